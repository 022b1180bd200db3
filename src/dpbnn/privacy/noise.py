"""Gaussian noise for the gate, from operating-system entropy.

The noise of one release is a function of a secret key of its own and the number of the release:

    stream key = BLAKE2b(key; release number, use, purpose)
    words      = AES-128-CTR(stream key), 32 random bits per float32, 64 per float64
    (z, z')    = sqrt(-2 ln u) (cos 2 pi v, sin 2 pi v),   u, v uniform from two words
    next key   = BLAKE2b(key; "ratchet")

Only the key is carried from one release to the next, and it moves forward: tensors, releases,
purposes and sources never share a stream, a run can be resumed from the key and the number of its
next release alone, and no key gives the noise of earlier releases back. Where OpenSSL is out of
reach the words are SHAKE-128(stream key, block number), from hashlib.

Sum and noise are rounded to a public grid before they are added; `dpbnn.privacy.grid` has the
proof.

Reference: Box and Muller, A note on the generation of random normal deviates, 1958; Salmon et al.,
Parallel random numbers: as easy as 1, 2, 3, 2011 (counter-based streams).
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b, shake_128
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbnn.privacy.grid import add_on_grid, spacing
from dpbnn.privacy.keys import ratchet
from dpbnn.privacy.team import run_on_team, team_size

__all__ = ["NoiseSource"]

_Words = NDArray[np.uint8]
_SIGNED = {torch.float32: torch.int32, torch.float64: torch.int64}
_KEY_BYTES = 32
_DEBUG = b"dpbnn debug"  # how the key of a seeded source begins
_PAIRS = 1 << 21  # pairs of normals per chunk: few calls, and not much memory
_BLOCK = 32  # bytes of the stream that can be read by themselves
_SPONGE = 1 << 16  # bytes per call of SHAKE-128, which takes 21 ms for 2.4 million words (AES 3 ms)
_EDGE = 1 << 10  # radius words below this get 64 more bits
_FAR = 3.905  # below the radius of every word that comes before _EDGE
_MOST = torch.tensor(2.0**32 + 512, device="cpu")  # above every word: u < 1 and radius > 0
_ZEROS = np.zeros(1 << 20, np.uint8)
_ZEROS_AT = _ZEROS.ctypes.data
_SHARE = 1 << 19  # bytes below which a thread of its own is not worth it
_FEW = 1 << 12  # numbers below which torch's own generator is quicker
_TOGETHER = 1 << 20  # numbers noised at once on other devices: few calls, and not much memory
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


def _aes(library: ctypes.CDLL, key: bytes, counter: int, out: _Words) -> None:
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


def _generator_name() -> str:
    return "AES-128-CTR (OpenSSL)" if _LIBCRYPTO is not None else "SHAKE-128 (hashlib)"


def _fill(key: bytes, offset: int, out: _Words) -> None:
    """Fill `out` with bytes `offset`, `offset + 1`, ... of the stream of `key`.

    Args:
        key: 16 bytes.
        offset: A multiple of `_BLOCK`.
        out: Contiguous, of any length that is a multiple of 8.
    """
    threads = min(team_size(), out.size // _SHARE)
    if threads < 2:
        return _fill_serially(key, offset, out)
    step = -(-out.size // (threads * _BLOCK)) * _BLOCK
    parts = iter([(start, out[start : start + step]) for start in range(0, out.size, step)])

    def work() -> None:
        for start, part in parts:
            _fill_serially(key, offset + start, part)

    return run_on_team(work)


def _fill_serially(key: bytes, offset: int, out: _Words) -> None:
    if _LIBCRYPTO is not None:
        _aes(_LIBCRYPTO, key, offset // 16, out)
    else:
        _shake(key, offset, out)


def _shake(key: bytes, offset: int, out: _Words) -> None:
    """Fill `out` from SHAKE-128(key, 0), SHAKE-128(key, 1), ..., each `_SPONGE` bytes long."""
    done = 0
    while done < out.size:
        number, skip = divmod(offset + done, _SPONGE)
        size = min(_SPONGE - skip, out.size - done)
        block = shake_128(key + number.to_bytes(8, "big")).digest(skip + size)
        out[done : done + size] = np.frombuffer(block, np.uint8, size, skip)
        done += size


def _extend(key: bytes, begin: int, radius: Tensor) -> None:
    """Recompute the largest radii sqrt(-ln u) from 96-bit uniforms: u = (word + fraction) / 2^32.

    Without it they would end at sqrt(ln 2^32) = 4.7, a normal at 6.7, once in 2^32 pairs.

    Args:
        key: of the stream.
        begin: word of the stream that the first radius came from.
        radius: recomputed in place.
    """
    block = np.empty(_BLOCK, np.uint8)
    for i in (radius > _FAR).nonzero().flatten().tolist():
        start, within = divmod(4 * (begin + i), _BLOCK)
        _fill(key, start * _BLOCK, block)
        word = int(block.view(np.uint32)[within // 4])
        if word < _EDGE:
            pair = (begin // 2 + i).to_bytes(8, "big")
            digest = blake2b(pair, key=key, digest_size=8).digest()
            fraction = (int.from_bytes(digest, "big") + 0.5) * 2.0**-64
            radius[i] = math.sqrt(-math.log((word + fraction) * 2.0**-32))


def _steps(std: float, dtype: torch.dtype) -> float:
    """Return the standard deviation in steps of the grid."""
    return std / spacing(std, dtype) if std else 0.0


def _word_bytes(elements: int, dtype: torch.dtype) -> int:
    """Bytes of the stream that `elements` normals need: a whole number of pairs."""
    return (elements + elements % 2) * dtype.itemsize


def _empty(size: int) -> _Words:
    """Return memory for words, aligned as vector instructions like it."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu").numpy()


def _scratch(dtype: torch.dtype, pairs: int) -> tuple[_Words, Tensor]:
    """Return this thread's memory for a chunk: two words and a number per pair."""
    kept: dict[torch.dtype, tuple[_Words, Tensor]] = _LOCAL.__dict__.setdefault("kept", {})
    if dtype not in kept or kept[dtype][1].numel() < pairs:
        with torch.inference_mode(False):
            wave = torch.empty(pairs, dtype=dtype, device="cpu")
        kept[dtype] = _empty(2 * pairs * dtype.itemsize), wave
    return kept[dtype]


def _add_gaussian(
    flats: list[tuple[Tensor, float | None]],
    dtype: torch.dtype,
    key: bytes,
    ahead: _Words | None = None,
) -> None:
    """Add independent N(0, std^2) of one dtype to flat CPU tensors on their grids, by chunks.

    Where std is None, N(0, 1) takes the place of what was there. The tensors are read as one long
    vector; element i's noise depends on the key, the length of the vector and i only. Words become
    radii and angles where they are, those drawn ahead too.
    """
    signed = _SIGNED[dtype]
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
        offset, size = begin * dtype.itemsize, _word_bytes(elements, dtype)
        words = buffer[:size] if ahead is None else ahead[offset : offset + size]
        if ahead is None:
            _fill(key, offset, words)
        integers = torch.from_numpy(words).view(signed)
        numbers = integers.view(dtype)
        radius, angle = numbers[:pairs], numbers[pairs:]
        if dtype == torch.float32:
            radius.copy_(integers[:pairs].view(torch.uint32))
            torch.div(_MOST, radius, out=radius).log_().sqrt_()
            if float(radius.amax()) > _FAR:
                _extend(key, begin, radius)
        else:
            radius.copy_(integers[:pairs]).mul_(2.0**-64).add_(0.5).clamp_(2.0**-54, 1 - 2.0**-53)
            radius.log_().neg_().sqrt_()
        if common is not None:
            radius.mul_(common)
        angle.copy_(integers[pairs:]).mul_(math.pi / -torch.iinfo(signed).min)
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


def fill_normal(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill a tensor with N(0, 1) for a model's own draws, by several threads on the CPU.

    Not for releases: the key of the stream comes from the generator, so a seed repeats it.

    Args:
        tensor: contiguous where it is to be quick.
        generator: draws the key; None is torch's global one.
    """
    quick = tensor.device.type == "cpu" and tensor.dtype in _SIGNED and tensor.is_contiguous()
    if not quick or tensor.numel() < _FEW:
        return tensor.normal_(generator=generator)
    key = torch.empty(16, dtype=torch.uint8).random_(generator=generator).numpy().tobytes()
    with torch.no_grad():
        _add_gaussian([(tensor.view(-1), None)], tensor.dtype, key)
    return tensor


def _cpu_bytes(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> dict[torch.dtype, int]:
    """Bytes of stream that noise on the CPU needs, by its dtype."""
    elements: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            own = dtype or tensor.dtype
            elements[own] = elements.get(own, 0) + tensor.numel()
    return {dtype: _word_bytes(n, dtype) for dtype, n in elements.items() if n}


def _grouped(flats: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of pieces of flat tensors, in order, of `_TOGETHER` numbers each at most."""
    group: list[Tensor] = []
    room = _TOGETHER
    for flat in flats:
        while flat.numel():
            group.append(flat[:room])
            flat, room = flat[room:], room - group[-1].numel()
            if not room:
                yield group
                group, room = [], _TOGETHER
    if group:
        yield group


def _add_together(
    pieces: list[Tensor], std: float, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Add noise of a device's generator to flat tensors, on the grid of the dtype."""
    sums = torch.cat(pieces)
    noise = torch.empty_like(sums, dtype=torch.float64).normal_(generator=generator)
    add_on_grid(sums, noise.mul_(_steps(std, dtype)), spacing(std, dtype))
    for piece, part in zip(pieces, torch.split(sums, [len(p) for p in pieces]), strict=True):
        piece.copy_(part)


def _check(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in _SIGNED:
            raise TypeError(
                f"noise for {name!r} would be added in {tensor.dtype}; float32 and float64 are "
                f"allowed: sum the contributions with .float() first"
            )


def _later(key: bytes, times: int = 1) -> bytes:
    """Return the key of a later release; a seeded source's still shows what it is."""
    if key.startswith(_DEBUG):
        return _DEBUG + ratchet(key[len(_DEBUG) :], times)
    return ratchet(key, times)


class NoiseSource:
    """Gaussian noise for releases: one call of `add` or `normal` is one draw.

    tensor <- tensor + std * z,   z ~ N(0, I), fresh in every call, both rounded to a public grid

    **Guarantee.** Seeded with 256 bits of operating-system entropy and independent of every other
    generator; neither reads nor moves the states of `torch`, `numpy.random` and `random`. Every
    word of the stream serves one pair of normals of one release: what was drawn ahead is consumed
    once or thrown away, a release that failed half way is not drawn again, and a forked process
    gets a new key. The source holds the key of its next release and no earlier one, so that who
    finds a key learns the noise of that release and later ones, of none before. (What a release
    left in the process's memory is overwritten by the next, not at once.)

    Releases are multiples of g, the `spacing` of std: attacks on their low bits (Mironov 2012) find
    nothing that the Gaussian mechanism does not show, see `dpbnn.privacy.grid`. On the CPU z is
    Gaussian up to that rounding: the uniform behind the radius has 96 bits in the tail for float32
    (|z| up to 11.5) and 54 for float64 (|z| up to 8.6). On other devices z comes in float64 from
    the device's own generator, seeded per release with 64 bits of the stream key.

    Args:
        purpose: What the noise is for. Sources with the same key and different purposes (chains,
            ranks, methods) are independent.
    """

    def __init__(self, *, purpose: str = "noise") -> None:
        self._start(secrets.token_bytes(_KEY_BYTES), 0, purpose)

    @classmethod
    def from_key(cls, key: bytes, step: int = 0, *, purpose: str = "noise") -> NoiseSource:
        """Continue the source that has this key, the one of its release number `step`.

        **Guarantee.** Equal, bit for bit on one machine, to the uninterrupted source. The caller
        answers for never releasing one step twice: re-key when in doubt.

        Args:
            key: The other source's `key`.
            step: The number of the next release, the other source's `step` at the same time.
            purpose: The other source's purpose.
        """
        if len(key) != _KEY_BYTES or step < 0:
            raise ValueError(
                f"a key of {len(key)} bytes and step {step} were given; allowed are "
                f"{_KEY_BYTES} bytes and a step of 0 or more: pass source.key and source.step"
            )
        source = cls.__new__(cls)
        source._start(key, step, purpose)
        return source

    @classmethod
    def seeded(cls, seed: int, step: int = 0, *, purpose: str = "noise") -> NoiseSource:
        """Return a reproducible source for debugging; what it releases is not private.

        Args:
            seed: Any number.
            step: The number of the next release, to go on with an earlier source of this seed.
            purpose: As for any source.
        """
        digest = blake2b(str(seed).encode(), digest_size=_KEY_BYTES - len(_DEBUG)).digest()
        return cls.from_key(_later(_DEBUG + digest, step), step, purpose=purpose)

    def _start(self, key: bytes, step: int, purpose: str) -> None:
        self._key = key
        self._purpose = purpose
        self._step = step
        self._draws = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._forget_threads()

    def _forget_threads(self) -> None:
        self._process = os.getpid()
        self._cores = _cores()
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._buffers: dict[torch.dtype, _Words] = {}
        self._ahead: tuple[int, dict[torch.dtype, int], Future[None]] | None = None

    @property
    def key(self) -> bytes:
        """The secret key of the next release: for an owner-only file, never for a log.

        It gives the noise of all later releases too, and of no earlier one.
        """
        self._rekey_after_fork()
        return self._key

    @property
    def step(self) -> int:
        """The number of the next release."""
        return self._step

    @property
    def draws(self) -> int:
        """Releases that this object has drawn noise for."""
        return self._draws

    @property
    def private(self) -> bool:
        """Whether the noise is secret; False stamps a statement "debug: not private"."""
        return not self._key.startswith(_DEBUG)

    @property
    def source(self) -> str:
        """Where the noise comes from, for the privacy statement."""
        if not self.private:
            return "seeded (debug)"
        return f"operating-system entropy, {_generator_name()}"

    def __repr__(self) -> str:
        return f"NoiseSource(source={self.source!r}, step={self.step})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a NoiseSource cannot be pickled or copied: the copy would repeat its noise and show "
            "its key; make a new NoiseSource(), or NoiseSource.from_key(...) to resume"
        )

    def prepare(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
        *,
        ahead: bool | None = None,
    ) -> None:
        """Announce the tensors of the next release, so that CPU noise is drawn in the background.

        **Guarantee.** Changes when the noise is drawn, not its value. Holds one release at most;
        a release of other sizes throws it away.

        Args:
            tensors: What `add` will get; only sizes, dtypes and devices are read.
            dtype: What `add` will get.
            ahead: Draw in the background; by default only if there are more cores than torch
                uses, since otherwise the drawing slows the training down by as much as it saves.
        """
        _check(tensors)
        self._rekey_after_fork()
        if ahead is None:
            ahead = self._cores > torch.get_num_threads()
        with self._lock:
            self._ahead = None
            sizes = _cpu_bytes(tensors.values(), dtype) if ahead else {}
            if not sizes:
                return
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="dpbnn-noise")
            keys = {dtype: self._stream_key(str(dtype)) for dtype in sizes}
            self._ahead = (self._step, sizes, self._worker.submit(self._draw_ahead, keys, sizes))

    def add(
        self,
        tensors: Mapping[str, Tensor],
        std: float | Mapping[str, float],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add N(0, std^2) to every element, in place and on the grid: one draw, one release.

        Args:
            tensors: float32 or float64, on any device, of any shape.
            std: One standard deviation for all, or one per name; with 0 nothing is rounded.
            dtype: What the noise is drawn in, and the grid follows; each tensor's own by default.
                float32 noise for a float64 sum takes a third of the time.
        """
        _check(tensors)
        stds = dict.fromkeys(tensors, float(std)) if not isinstance(std, Mapping) else dict(std)
        if stds.keys() != tensors.keys() or not all(0 <= s < math.inf for s in stds.values()):
            raise ValueError(
                f"std {std!r} was given for {list(tensors)}; allowed is one finite number of 0 or "
                f"more, or one per name"
            )
        for name, value in stds.items():
            if value:
                for own in {dtype or tensors[name].dtype, tensors[name].dtype}:
                    spacing(value, own)
        self._rekey_after_fork()
        with self._lock, torch.no_grad():
            sizes = _cpu_bytes(tensors.values(), dtype)
            ahead, self._ahead = self._ahead, None
            try:
                drawn: dict[torch.dtype, _Words] = {}
                if ahead is not None and ahead[:2] == (self._step, sizes):
                    ahead[2].result()
                    drawn = self._buffers
                for own in sizes:
                    part = {k: t for k, t in tensors.items() if own in (dtype, t.dtype)}
                    self._add_on_cpu(own, part, stds, drawn.get(own))
                self._add_on_devices(tensors, stds, dtype)
            finally:
                self._key = _later(self._key)
                self._step += 1
                self._draws += 1

    def normal(
        self, likes: Mapping[str, Tensor], std: float | Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Return N(0, std^2) tensors of the given shapes, dtypes and devices: one draw."""
        noise = {name: torch.zeros_like(like) for name, like in likes.items()}
        self.add(noise, std)
        return noise

    def _add_on_cpu(
        self,
        dtype: torch.dtype,
        tensors: Mapping[str, Tensor],
        stds: Mapping[str, float],
        drawn: _Words | None,
    ) -> None:
        own = {k: t for k, t in tensors.items() if t.device.type == "cpu"}
        flats = {name: tensor.reshape(-1) for name, tensor in own.items()}
        pairs: list[tuple[Tensor, float | None]] = [(f, stds[name]) for name, f in flats.items()]
        _add_gaussian(pairs, dtype, self._stream_key(str(dtype)), drawn)
        for name, tensor in own.items():
            if not tensor.is_contiguous():
                tensor.copy_(flats[name].view_as(tensor))

    def _add_on_devices(
        self,
        tensors: Mapping[str, Tensor],
        stds: Mapping[str, float],
        dtype: torch.dtype | None,
    ) -> None:
        groups: dict[tuple[torch.device, torch.dtype, float], list[Tensor]] = {}
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" and stds[name]:
                groups.setdefault((tensor.device, tensor.dtype, stds[name]), []).append(tensor)
        seeded: set[torch.device] = set()
        for (device, own, std), alike in groups.items():
            if device not in self._generators:
                self._generators[device] = torch.Generator(device)
            generator = self._generators[device]
            if device not in seeded:
                generator.manual_seed(int.from_bytes(self._stream_key(str(device))[:8], "big"))
                seeded.add(device)
            flats = [tensor.reshape(-1) for tensor in alike]
            for pieces in _grouped(flats):
                _add_together(pieces, std, dtype or own, generator)
            for tensor, flat in zip(alike, flats, strict=True):
                if not tensor.is_contiguous():
                    tensor.copy_(flat.view_as(tensor))

    def _draw_ahead(self, keys: dict[torch.dtype, bytes], sizes: dict[torch.dtype, int]) -> None:
        for dtype, size in sizes.items():
            if dtype not in self._buffers or self._buffers[dtype].size != size:
                self._buffers[dtype] = _empty(size)
            _fill_serially(keys[dtype], 0, self._buffers[dtype])

    def _stream_key(self, use: str) -> bytes:
        message = f"{use}\0{self._purpose}".encode()
        step = self._step.to_bytes(8, "big")
        return blake2b(
            step + message, key=self._key, digest_size=16, person=b"dpbnn noise"
        ).digest()

    def _rekey_after_fork(self) -> None:
        if self._process == os.getpid():
            return
        if not self.private:
            raise RuntimeError(
                "a seeded NoiseSource was forked and would repeat the parent's noise; make one "
                "with another seed in the child process"
            )
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._forget_threads()


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
