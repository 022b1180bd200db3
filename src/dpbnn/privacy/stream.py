"""Streams of Gaussian noise: a function of a key, without any state.

    words   = AES-128-CTR(key), 32 random bits per float32, 64 per float64
    (z, z') = sqrt(-2 ln u) (cos 2 pi v, sin 2 pi v),   u, v uniform from two words

Where OpenSSL is out of reach the words are SHAKE-128(key, block number), from hashlib. Sum and
noise are rounded to a public grid before they are added; `dpbnn.privacy.grid` has the proof. Who
uses which key, and that none is used twice, is the matter of `dpbnn.privacy.noise`.

Reference: Box and Muller, A note on the generation of random normal deviates, 1958; Salmon et al.,
Parallel random numbers: as easy as 1, 2, 3, 2011 (counter-based streams).
"""

from __future__ import annotations

import ctypes
import math
import threading
from bisect import bisect_right
from hashlib import blake2b, shake_128

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbnn.privacy.grid import add_on_grid, spacing
from dpbnn.privacy.team import run_on_team, team_size

__all__ = ["Words", "add_gaussian", "add_gaussian_at", "fill_normal", "generator_name"]

Words = NDArray[np.uint8]
SIGNED = {torch.float32: torch.int32, torch.float64: torch.int64}
_PAIRS = 1 << 21  # pairs of normals per chunk: few calls, and not much memory
_PIECE = 1 << 15  # pairs that are made at once where a piece of a vector is asked for
_BLOCK = 32  # bytes of the stream that can be read by themselves
_SPONGE = 1 << 16  # bytes per call of SHAKE-128, which takes 21 ms for 2.4 million words (AES 3 ms)
_EDGE = 1 << 10  # radius words below this get 64 more bits
_FAR = 3.905  # below the radius of every word that comes before _EDGE
_MOST = torch.tensor(2.0**32 + 512, device="cpu")  # above every word: u < 1 and radius > 0
_ZEROS = np.zeros(1 << 20, np.uint8)
_ZEROS_AT = _ZEROS.ctypes.data
_SHARE = 1 << 19  # bytes below which a thread of its own is not worth it
_FEW = 1 << 12  # numbers below which torch's own generator is quicker
_LOCAL = threading.local()


def _load_libcrypto() -> ctypes.CDLL | None:
    """Return the OpenSSL that Python's own `ssl` runs on, if it passes the FIPS-197 example."""
    try:
        import _ssl

        library = ctypes.CDLL(_ssl.__file__)
        library.EVP_aes_128_ctr.restype = ctypes.c_void_p
        library.EVP_CIPHER_CTX_new.restype = ctypes.c_void_p
        library.EVP_CIPHER_CTX_free.argtypes = [ctypes.c_void_p]
        library.EVP_EncryptInit_ex.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_char_p] * 2
        library.EVP_EncryptUpdate.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int]
        block = np.empty(16, np.uint8)
        counter = int.from_bytes(bytes(17 * i for i in range(16)), "big")
        _aes(library, bytes(range(16)), counter, block)
    except (ImportError, AttributeError, OSError, RuntimeError):
        return None
    return library if block.tobytes().hex() == "69c4e0d86a7b0430d8cdb78070b4c55a" else None


def _aes(library: ctypes.CDLL, key: bytes, counter: int, out: Words) -> None:
    """Fill `out` with AES-128-CTR(key) from block `counter` on; runs without Python's lock."""
    written = ctypes.c_int()
    context = library.EVP_CIPHER_CTX_new()
    try:
        ok = library.EVP_EncryptInit_ex(
            context, library.EVP_aes_128_ctr(), None, key, counter.to_bytes(16, "big")
        )
        target, done = out.ctypes.data, ctypes.addressof(written)
        for start in range(0, out.size, _ZEROS.size):
            size = min(_ZEROS.size, out.size - start)
            ok &= library.EVP_EncryptUpdate(context, target + start, done, _ZEROS_AT, size)
            ok &= written.value == size
    finally:
        library.EVP_CIPHER_CTX_free(context)
    if ok != 1:
        raise RuntimeError("OpenSSL failed to encrypt; no noise was drawn")


_LIBCRYPTO = _load_libcrypto()


def generator_name() -> str:
    """Return what the words come from, for the privacy statement."""
    return "AES-128-CTR (OpenSSL)" if _LIBCRYPTO is not None else "SHAKE-128 (hashlib)"


def fill(key: bytes, offset: int, out: Words) -> None:
    """Fill `out` with bytes `offset`, `offset + 1`, ... of the stream of `key`.

    Args:
        key: 16 bytes.
        offset: A multiple of `_BLOCK`.
        out: Contiguous, of any length that is a multiple of 8.
    """
    threads = min(team_size(), out.size // _SHARE)
    if threads < 2:
        return fill_serially(key, offset, out)
    step = -(-out.size // (threads * _BLOCK)) * _BLOCK
    parts = iter([(start, out[start : start + step]) for start in range(0, out.size, step)])

    def work() -> None:
        for start, part in parts:
            fill_serially(key, offset + start, part)

    return run_on_team(work)


def fill_serially(key: bytes, offset: int, out: Words) -> None:
    """Fill `out` as `fill` does, on this thread alone; for threads that are not torch's."""
    if _LIBCRYPTO is not None:
        _aes(_LIBCRYPTO, key, offset // 16, out)
    else:
        _shake(key, offset, out)


def _shake(key: bytes, offset: int, out: Words) -> None:
    """Fill `out` from SHAKE-128(key, 0), SHAKE-128(key, 1), ..., each `_SPONGE` bytes long."""
    done = 0
    while done < out.size:
        number, skip = divmod(offset + done, _SPONGE)
        size = min(_SPONGE - skip, out.size - done)
        block = shake_128(key + number.to_bytes(8, "big")).digest(skip + size)
        out[done : done + size] = np.frombuffer(block, np.uint8, size, skip)
        done += size


def _extend(key: bytes, begin: int, radius: Tensor, skip: int = 0) -> None:
    """Recompute the largest radii sqrt(-ln u) from 96-bit uniforms: u = (word + fraction) / 2^32.

    Without it they would end at sqrt(ln 2^32) = 4.7, a normal at 6.7, once in 2^32 pairs.

    Args:
        key: of the stream.
        begin: word of the stream that the first radius of the chunk came from.
        radius: recomputed in place.
        skip: radii of the chunk that come before these.
    """
    block = np.empty(_BLOCK, np.uint8)
    for place in (radius > _FAR).nonzero().flatten().tolist():
        i = place + skip
        start, within = divmod(4 * (begin + i), _BLOCK)
        fill(key, start * _BLOCK, block)
        word = int(block.view(np.uint32)[within // 4])
        if word < _EDGE:
            pair = (begin // 2 + i).to_bytes(8, "big")
            digest = blake2b(pair, key=key, digest_size=8).digest()
            fraction = (int.from_bytes(digest, "big") + 0.5) * 2.0**-64
            radius[place] = math.sqrt(-math.log((word + fraction) * 2.0**-32))


def _steps(std: float, dtype: torch.dtype) -> float:
    """Return the standard deviation in steps of the grid."""
    return std / spacing(std, dtype) if std else 0.0


def word_bytes(elements: int, dtype: torch.dtype) -> int:
    """Bytes of the stream that `elements` normals need: a whole number of pairs."""
    return (elements + elements % 2) * dtype.itemsize


def empty_words(size: int) -> Words:
    """Return memory for words, aligned as vector instructions like it."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu").numpy()


def _scratch(dtype: torch.dtype, pairs: int) -> tuple[Words, Tensor]:
    """Return this thread's memory for a chunk: two words and a number per pair."""
    kept: dict[torch.dtype, tuple[Words, Tensor]] = _LOCAL.__dict__.setdefault("kept", {})
    if dtype not in kept or kept[dtype][1].numel() < pairs:
        with torch.inference_mode(False):
            wave = torch.empty(pairs, dtype=dtype, device="cpu")
        kept[dtype] = empty_words(2 * pairs * dtype.itemsize), wave
    return kept[dtype]


def add_gaussian(
    flats: list[tuple[Tensor, float | None]],
    dtype: torch.dtype,
    key: bytes,
    ahead: Words | None = None,
) -> None:
    """Add independent N(0, std^2) of one dtype to flat CPU tensors on their grids, by chunks.

    Where std is None, N(0, 1) takes the place of what was there. The tensors are read as one long
    vector; element i's noise depends on the key, the length of the vector and i only. Words become
    radii and angles where they are, those drawn ahead too.
    """
    scales = [math.sqrt(2) * (1.0 if std is None else _steps(std, dtype)) for _, std in flats]
    common = scales[0] if len(set(scales)) == 1 else None
    starts = [0]
    for flat, _ in flats:
        starts.append(starts[-1] + flat.numel())
    total = starts.pop()
    buffer, scratch = _scratch(dtype, min(_PAIRS, -(-total // 2)))
    for begin in range(0, total, 2 * _PAIRS):
        elements = min(2 * _PAIRS, total - begin)
        pairs = -(-elements // 2)
        offset, size = begin * dtype.itemsize, word_bytes(elements, dtype)
        words = buffer[:size] if ahead is None else ahead[offset : offset + size]
        if ahead is None:
            fill(key, offset, words)
        integers = torch.from_numpy(words).view(SIGNED[dtype])
        radius = _radius(integers[:pairs], dtype, key, begin)
        angle = _angle(integers[pairs:], dtype)
        if common is not None:
            radius.mul_(common)
        for function, wave, low in (
            (torch.cos, scratch[:pairs], begin),
            (torch.sin, angle, begin + pairs),
        ):
            function(angle, out=wave)
            high = min(low + pairs, begin + elements)
            for index in range(bisect_right(starts, low) - 1, len(flats)):
                start, (flat, std) = starts[index], flats[index]
                if start >= high:
                    break
                a, b = max(low, start), min(high, start + flat.numel())
                if a < b:
                    here, part = flat[a - start : b - start], slice(a - low, b - low)
                    # Scaled before the product: scaled afterwards, floats would have gaps.
                    noise = wave[part] if common is not None else wave[part].mul_(scales[index])
                    torch.mul(noise, radius[part], out=here if std is None else noise)
                    if std:
                        add_on_grid(here, noise, spacing(std, dtype))


def add_gaussian_at(
    pieces: list[tuple[Tensor, float, int]], total: int, dtype: torch.dtype, key: bytes
) -> None:
    """Add to pieces of a long vector what `add_gaussian` adds to all of it.

    Numbers are made in blocks that begin at the same places whoever asks for them.

    Args:
        pieces: flat CPU tensors, each with its std and where it begins; only one std.
        total: numbers of the vector.
        dtype: of the noise.
        key: of the stream.
    """
    if len({std for _, std, _ in pieces}) > 1:
        raise ValueError("std: pieces of a release have one standard deviation")
    for flat, std, start in pieces:
        done = 0
        while std and done < flat.numel():
            begin = (start + done) // (2 * _PAIRS) * (2 * _PAIRS)
            elements = min(2 * _PAIRS, total - begin)
            pairs = -(-elements // 2)
            half, first = divmod(start + done - begin, pairs)
            low = first // _PIECE * _PIECE
            high = min(low + _PIECE, pairs)
            count = min(high - first, flat.numel() - done)
            radius = _radius(_words(key, begin + low, high - low, dtype), dtype, key, begin, low)
            angle = _angle(_words(key, begin + pairs + low, high - low, dtype), dtype)
            wave = torch.sin(angle) if half else torch.cos(angle)
            noise = wave.mul_(radius.mul_(math.sqrt(2) * _steps(std, dtype)))
            own = noise[first - low : first - low + count]
            add_on_grid(flat[done : done + count], own, spacing(std, dtype))
            done += count


def _words(key: bytes, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return words of a stream, as whole numbers of the dtype's size."""
    start, stop = first * dtype.itemsize, (first + count) * dtype.itemsize
    low = start // _BLOCK * _BLOCK
    words = empty_words(-(-(stop - low) // 8) * 8)
    fill(key, low, words)
    return torch.from_numpy(words).view(SIGNED[dtype])[(start - low) // dtype.itemsize :][:count]


def _radius(integers: Tensor, dtype: torch.dtype, key: bytes, begin: int, skip: int = 0) -> Tensor:
    """Return sqrt(-ln u) of words, in their place; see `_extend`."""
    radius = integers.view(dtype)
    if dtype == torch.float32:
        radius.copy_(integers.view(torch.uint32))
        torch.div(_MOST, radius, out=radius).log_().sqrt_()
        if float(radius.amax()) > _FAR:
            _extend(key, begin, radius, skip)
        return radius
    radius.copy_(integers).mul_(2.0**-64).add_(0.5).clamp_(2.0**-54, 1 - 2.0**-53)
    return radius.log_().neg_().sqrt_()


def _angle(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return angles from -pi to pi of words, in their place."""
    least = torch.iinfo(SIGNED[dtype]).min
    return integers.view(dtype).copy_(integers).mul_(math.pi / -least)


def fill_normal(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill a tensor with N(0, 1) for a model's own draws, by several threads on the CPU.

    Not for releases: the key of the stream comes from the generator, so a seed repeats it.

    Args:
        tensor: contiguous where it is to be quick.
        generator: draws the key; None is torch's global one.
    """
    quick = tensor.device.type == "cpu" and tensor.dtype in SIGNED and tensor.is_contiguous()
    if not quick or tensor.numel() < _FEW:
        return tensor.normal_(generator=generator)
    key = torch.empty(16, dtype=torch.uint8).random_(generator=generator).numpy().tobytes()
    with torch.no_grad():
        add_gaussian([(tensor.view(-1), None)], tensor.dtype, key)
    return tensor
