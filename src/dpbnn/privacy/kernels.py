"""Triton kernels, imported where Triton is; each does what torch operations do elsewhere."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _put(sums, at, size, noise, inverse, g):
    """Round sum and noise to the grid, and add them."""
    here = (at >= 0) & (at < size)
    own = tl.load(sums + at, mask=here, other=0.0)
    scaled = own.to(tl.float64) * inverse
    whole = tl.where(scaled < 0, tl.ceil(scaled), tl.floor(scaled))
    total = (whole + tl.floor(noise)).to(own.dtype).to(tl.float64) * g
    total = tl.where(total == 0, 0.0, total)  # takes the sign off a zero
    tl.store(sums + at, total.to(own.dtype), mask=here)


@triton.jit
def _pair(
    sums, at, size, a, b, c, d, steps, inverse, g,
    LANES: tl.constexpr,
):  # fmt: skip
    """Turn four words into two normals, and add them."""
    u = (a.to(tl.float64) * 4294967296.0 + b.to(tl.float64) + 0.5) * 5.421010862427522e-20
    v = (c.to(tl.float64) * 4294967296.0 + d.to(tl.float64)) * 5.421010862427522e-20
    radius = tl.sqrt(-2.0 * tl.log(u))
    angle = v * 6.283185307179586
    _put(sums, at, size, radius * tl.cos(angle) * steps, inverse, g)
    _put(sums, at + LANES, size, radius * tl.sin(angle) * steps, inverse, g)


@triton.jit(
    do_not_specialize=[
        "size", "first", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "s", "i", "p",
    ]
)  # fmt: skip
def add_kernel(
    sums, size, first, k0, k1, k2, k3, k4, k5, k6, k7,
    s, i, p, LANES: tl.constexpr,
):  # fmt: skip
    """Add the noise of one tile of positions; see `dpbnn.privacy.chacha.add_noise`.

    s, i and p are the bits of three float64: the standard deviation in steps, 1 / g and g. `first`
    is the position of the first sum.
    """
    tile = tl.program_id(0).to(tl.int64) + first // (8 * LANES)
    lane = tl.arange(0, LANES)
    zero = tl.zeros((LANES,), tl.uint32)
    counter = zero + (tile * LANES + lane).to(tl.uint32)
    x0, x1 = zero + 0x61707865, zero + 0x3320646E
    x2, x3 = zero + 0x79622D32, zero + 0x6B206574
    x4, x5 = zero + k0.to(tl.uint32, bitcast=True), zero + k1.to(tl.uint32, bitcast=True)
    x6, x7 = zero + k2.to(tl.uint32, bitcast=True), zero + k3.to(tl.uint32, bitcast=True)
    x8, x9 = zero + k4.to(tl.uint32, bitcast=True), zero + k5.to(tl.uint32, bitcast=True)
    x10, x11 = zero + k6.to(tl.uint32, bitcast=True), zero + k7.to(tl.uint32, bitcast=True)
    x12, x13, x14, x15 = counter, zero, zero, zero
    for _ in tl.static_range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3 = x0 + 0x61707865, x1 + 0x3320646E, x2 + 0x79622D32, x3 + 0x6B206574
    x4, x5 = x4 + k0.to(tl.uint32, bitcast=True), x5 + k1.to(tl.uint32, bitcast=True)
    x6, x7 = x6 + k2.to(tl.uint32, bitcast=True), x7 + k3.to(tl.uint32, bitcast=True)
    x8, x9 = x8 + k4.to(tl.uint32, bitcast=True), x9 + k5.to(tl.uint32, bitcast=True)
    x10, x11 = x10 + k6.to(tl.uint32, bitcast=True), x11 + k7.to(tl.uint32, bitcast=True)
    x12 = x12 + counter
    steps = s.to(tl.float64, bitcast=True)
    inverse = i.to(tl.float64, bitcast=True)
    g = p.to(tl.float64, bitcast=True)
    at = tile * (8 * LANES) + lane - first
    _pair(sums, at, size, x0, x1, x2, x3, steps, inverse, g, LANES)
    _pair(sums, at + 2 * LANES, size, x4, x5, x6, x7, steps, inverse, g, LANES)
    _pair(sums, at + 4 * LANES, size, x8, x9, x10, x11, steps, inverse, g, LANES)
    _pair(sums, at + 6 * LANES, size, x12, x13, x14, x15, steps, inverse, g, LANES)


@triton.jit
def squares_kernel(rows, out, columns, tiny, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of squares of one part of a row plus `tiny`, in float64; inf beyond float32."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(part * PART, tl.minimum(columns, part * PART + PART), BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(rows + row * columns + at, mask=at < columns, other=0.0).to(tl.float64)
        total += values * values
    summed = tl.sum(total, 0)
    summed = tl.where(summed > 3.4028234663852886e38, float("inf"), summed + tiny)
    tl.store(out + row * tl.num_programs(1) + part, summed)


@triton.jit
def positions_kernel(
    values, sums, squares, positions, columns, tiny,
    STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write an example's sum over positions for a block of columns, and its sum of squares.

    As in `squares_kernel` the latter is float64, has `tiny` added, and is inf beyond float32.
    """
    example, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((STEP, BLOCK), tl.float32)
    square = tl.zeros((STEP, BLOCK), tl.float64)
    for start in range(0, positions, STEP):
        t = start + tl.arange(0, STEP)
        here = (t < positions)[:, None] & (at < columns)[None, :]
        place = values + (example * positions + t)[:, None] * columns + at[None, :]
        found = tl.load(place, mask=here, other=0.0).to(tl.float32)
        total += found
        square += found.to(tl.float64) * found.to(tl.float64)
    tl.store(sums + example * columns + at, tl.sum(total, 0), mask=at < columns)
    whole = tl.sum(tl.sum(square, 1), 0)
    whole = tl.where(whole > 3.4028234663852886e38, float("inf"), whole + tiny)
    tl.store(squares + example * tl.num_programs(1) + block, whole)


@triton.jit(do_not_specialize=["g"])
def slack_kernel(values, squared, out, size, g, BLOCK: tl.constexpr):
    """Write (sqrt(v) + gamma sqrt(s))^2 in float64; g is the bits of gamma."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(values + at, mask=at < size, other=0.0)
    s = tl.load(squared + at, mask=at < size, other=0.0)
    root = tl.sqrt(v) + g.to(tl.float64, bitcast=True) * tl.sqrt(s)
    tl.store(out + at, root * root, mask=at < size)


@triton.jit
def total_kernel(
    parts, total, bad, count, size,
    FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a factor times the sum over the parts, in float64, 0 where it is not finite."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.float64)
    for part in range(count):
        found += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    found = found * FACTOR
    finite = found < float("inf")
    tl.store(total + at, tl.where(finite, found, 0.0), mask=at < size)
    tl.store(bad + at, (finite == 0).to(tl.int8), mask=at < size)


@triton.jit(do_not_specialize=["c"])
def factor_kernel(norms, out, size, c, BLOCK: tl.constexpr):
    """Write min(1, C / |c_i|) in float64, 0 where the norm is not finite; c is the bits of C."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    norm = tl.load(norms + at, mask=at < size, other=0.0)
    clip = c.to(tl.float64, bitcast=True)
    found = tl.where(norm > clip, clip / norm, 1.0)
    tl.store(out + at, tl.where(norm < float("inf"), found, 0.0), mask=at < size)


@triton.jit
def row_weights_kernel(weights, bad, out, size, BLOCK: tl.constexpr):
    """Write weights in the dtype of `out`, 0 for the bad examples."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weights + at, mask=at < size, other=0.0)
    w = tl.where(tl.load(bad + at, mask=at < size, other=0) != 0, 0.0, w)
    tl.store(out + at, w.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def factors_kernel(
    weights, scaled, plain, scaled_out, plain_out, scaled_columns, plain_columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write w_i times one row and the other as it is; zeros for both where w_i is 0."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weights + row)
    here = (at < scaled_columns) & (w != 0)
    found = tl.load(scaled + row * scaled_columns + at, mask=here, other=0.0)
    tl.store(scaled_out + row * scaled_columns + at, found * w, mask=at < scaled_columns)
    here = (at < plain_columns) & (w != 0)
    found = tl.load(plain + row * plain_columns + at, mask=here, other=0.0)
    tl.store(plain_out + row * plain_columns + at, found, mask=at < plain_columns)


@triton.jit
def weighted_kernel(weights, values, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write sum_i w_i v_i for a block of columns; a row of weight 0 is left out, finite or not."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        w = tl.load(weights + row, mask=row < rows, other=0.0)
        place = values + row.to(tl.int64)[:, None] * columns + at[None, :]
        found = tl.load(place, mask=(w != 0)[:, None] & (at < columns)[None, :], other=0.0)
        total += found * w[:, None]
    tl.store(out + at, tl.sum(total, 0), mask=at < columns)


@triton.jit
def differs_kernel(one, two, flag, size, BLOCK: tl.constexpr):
    """Set the flag where the bits of two int64 tensors differ."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(one + at, mask=at < size, other=0)
    b = tl.load(two + at, mask=at < size, other=0)
    if tl.sum((a != b).to(tl.int32), 0) > 0:
        tl.store(flag, 1)


@triton.jit
def _tile(
    g, a, example, positions, rows, columns, m, n,
    HIGH: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return a tile of one example's sum_t g_t a_t^T, products exact and added up in float32."""
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for start in range(0, positions, STEP):
        t = start + tl.arange(0, STEP)
        at = (example * positions + t)[:, None]
        here = (t < positions)[:, None]
        left = tl.load(g + at * rows + m[None, :], mask=here & (m < rows)[None, :], other=0.0)
        right = tl.load(
            a + at * columns + n[None, :], mask=here & (n < columns)[None, :], other=0.0
        )
        total = tl.dot(tl.trans(left), right, total)
    return total


@triton.jit
def tile_squares_kernel(
    g, a, out, positions, rows, columns, tiny,
    HIGH: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the sum of squares of one tile of one example's gradient; out is [example, tile]."""
    tile, example = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across = tl.cdiv(columns, WIDE)
    m = tile // across * HIGH + tl.arange(0, HIGH)
    n = tile % across * WIDE + tl.arange(0, WIDE)
    part = _tile(g, a, example, positions, rows, columns, m, n, HIGH, WIDE, STEP)
    found = tl.sum(tl.sum(part * part, 1), 0).to(tl.float64) + tiny
    tl.store(out + example * tl.num_programs(0) + tile, found)


@triton.jit
def tile_sums_kernel(
    g, a, weights, out, examples, run, positions, rows, columns,
    HIGH: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write one tile of sum_i w_i G_i over a run of examples; out is [run, rows, columns]."""
    tile, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * run
    across = tl.cdiv(columns, WIDE)
    m = tile // across * HIGH + tl.arange(0, HIGH)
    n = tile % across * WIDE + tl.arange(0, WIDE)
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for example in range(first, tl.minimum(first + run, examples)):
        w = tl.load(weights + example)
        part = _tile(g, a, example, positions, rows, columns, m, n, HIGH, WIDE, STEP)
        total += tl.where(w != 0, part * w, 0.0)  # a weight of 0 may be that of one not finite
    at = (tl.program_id(1).to(tl.int64) * rows + m)[:, None] * columns + n[None, :]
    tl.store(out + at, total, mask=(m < rows)[:, None] & (n < columns)[None, :])
