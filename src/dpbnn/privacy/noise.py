"""Gaussian noise for the gate, from operating-system entropy.

The noise of one release is a function of a secret key of its own and the number of the release:

    stream key = BLAKE2b(key; release number, use, purpose)
    next key   = BLAKE2b(key; "ratchet")

Only the key is carried from one release to the next, and it moves forward: tensors, releases,
purposes and sources never share a stream, a run can be resumed from the key and the number of its
next release alone, and no key gives the noise of earlier releases back. What a stream key becomes,
up to the rounded sum, is in `dpbnn.privacy.stream` for the CPU and in `dpbnn.privacy.chacha` for
other devices.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dpbnn.privacy.chacha import TILE, add_noise, flat_views, shared_flat
from dpbnn.privacy.grid import spacing
from dpbnn.privacy.keys import ratchet
from dpbnn.privacy.stream import (
    SIGNED,
    Words,
    add_gaussian,
    add_gaussian_at,
    empty_words,
    fill_serially,
    generator_name,
    word_bytes,
)

__all__ = ["NoiseSource", "Places"]

_KEY_BYTES = 32
_DEBUG = b"dpbnn debug"  # how the key of a seeded source begins


class Places(NamedTuple):
    """Where the pieces of a release lie, of which each process adds the noise of its own.

    Attributes:
        first: number of a piece's first element within its tensor, by name.
        sizes: elements of the whole tensors of the release, by name, in order.
    """

    first: Mapping[str, int]
    sizes: Mapping[str, int]

    def starts(self, multiple: int = 1) -> dict[str, int]:
        """Return the position of every piece, where tensors begin at multiples of a number."""
        rounded = (-(-size // multiple) * multiple for size in self.sizes.values())
        pairs = zip(self.sizes, itertools.accumulate(rounded, initial=0), strict=False)
        return {name: start + self.first[name] for name, start in pairs}

    def check(self, lengths: Mapping[str, int]) -> None:
        """Raise where a piece does not lie within its tensor: it would share others' noise."""
        for name, length in lengths.items():
            if not 0 <= self.first[name] <= self.sizes[name] - length:
                raise ValueError(f"at: the piece of {name!r} reaches into the noise of others")

    @property
    def total(self) -> int:
        """Elements of the release."""
        return sum(self.sizes.values())


def _cpu_bytes(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> dict[torch.dtype, int]:
    """Bytes of stream that noise on the CPU needs, by its dtype."""
    elements: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            own = dtype or tensor.dtype
            elements[own] = elements.get(own, 0) + tensor.numel()
    return {dtype: word_bytes(n, dtype) for dtype, n in elements.items() if n}


def _check(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in SIGNED:
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
    (|z| up to 11.5) and 54 for float64 (|z| up to 8.6). On other devices z is float64 from ChaCha20
    with a key of 256 bits a release (|z| up to 9.5, see `dpbnn.privacy.chacha`), in one pass over
    all tensors; they are copied to one buffer unless they are views of one (`flat_views`).

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
        self._used = ""
        self._flats: dict[int, tuple[list[Tensor], Tensor]] = {}
        self._forget_threads()

    def _forget_threads(self) -> None:
        self._process = os.getpid()
        self._cores = _cores()
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._buffers: dict[torch.dtype, Words] = {}
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
        return f"operating-system entropy, {self._used or generator_name()}"

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
        at: Places | None = None,
    ) -> None:
        """Add N(0, std^2) to every element, in place and on the grid: one draw, one release.

        Args:
            tensors: float32 or float64, on any device, of any shape.
            std: One standard deviation for all, or one per name; with 0 nothing is rounded.
            dtype: What the noise is drawn in, and the grid follows; each tensor's own by default.
                float32 noise for a float64 sum takes a third of the time.
            at: where the tensors lie in a release, if they are pieces of it: they get the noise
                that they would get in a call with all of it, on one device with one std.
        """
        _check(tensors)
        stds = dict.fromkeys(tensors, float(std)) if not isinstance(std, Mapping) else dict(std)
        if stds.keys() != tensors.keys() or not all(0 <= s < math.inf for s in stds.values()):
            raise ValueError(
                f"std {std!r} was given for {list(tensors)}; allowed is one finite number of 0 or "
                f"more, or one per name"
            )
        for value, own in {(stds[name], tensor.dtype) for name, tensor in tensors.items()}:
            if value:
                spacing(value, own)
                spacing(value, dtype or own)
        kinds = {(tensor.device, tensor.dtype, stds[name]) for name, tensor in tensors.items()}
        if at is not None and len(kinds) > 1:
            raise ValueError("std: pieces of a release have one, and one device and dtype")
        if at is not None:
            at.check({name: tensor.numel() for name, tensor in tensors.items()})
        self._rekey_after_fork()
        with self._lock, torch.no_grad():
            sizes = _cpu_bytes(tensors.values(), dtype)
            ahead, self._ahead = self._ahead, None
            try:
                drawn: dict[torch.dtype, Words] = {}
                if ahead is not None and ahead[:2] == (self._step, sizes):
                    ahead[2].result()
                    drawn = self._buffers
                for own in sizes:
                    part = {k: t for k, t in tensors.items() if own in (dtype, t.dtype)}
                    self._add_on_cpu(own, part, stds, drawn.get(own), at)
                if at is None:
                    self._add_on_devices(tensors, stds, dtype)
                else:
                    self._add_pieces(tensors, stds, dtype, at)
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
        drawn: Words | None,
        at: Places | None,
    ) -> None:
        own = {k: t for k, t in tensors.items() if t.device.type == "cpu"}
        flats = {name: tensor.reshape(-1) for name, tensor in own.items()}
        key = self._stream_key(str(dtype))
        if at is not None:
            starts = at.starts()
            pieces = [(flat, stds[name], starts[name]) for name, flat in flats.items()]
            add_gaussian_at(pieces, at.total, dtype, key)
        else:
            pairs: list[tuple[Tensor, float | None]] = [(f, stds[n]) for n, f in flats.items()]
            add_gaussian(pairs, dtype, key, drawn)
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
        for index, ((device, own, std), alike) in enumerate(groups.items()):
            flat, copies = self._buffer(index, alike), []
            if flat is None:
                shapes = {str(i): tensor.shape for i, tensor in enumerate(alike)}
                flat, views = flat_views(shapes, own, device)
                copies = list(views.values())
                torch._foreach_copy_(copies, alike)
            add_noise(flat, std, dtype or own, self._stream_key(f"chacha20 {index}", 32))
            self._used = "ChaCha20"
            if copies:
                torch._foreach_copy_(alike, copies)

    def _add_pieces(
        self,
        tensors: Mapping[str, Tensor],
        stds: Mapping[str, float],
        dtype: torch.dtype | None,
        at: Places,
    ) -> None:
        """Add to pieces what `_add_on_devices` adds to whole tensors."""
        key, starts = self._stream_key("chacha20 0", 32), at.starts(TILE)
        for name, tensor in tensors.items():
            if tensor.numel() and stds[name] and tensor.device.type != "cpu":
                flat = tensor.reshape(-1)
                add_noise(flat, stds[name], dtype or tensor.dtype, key, first=starts[name])
                tensor.copy_(flat.view_as(tensor))
                self._used = "ChaCha20"

    def _buffer(self, index: int, tensors: list[Tensor]) -> Tensor | None:
        """Return `shared_flat`, which is remembered for as long as the tensors are the same."""
        known = self._flats.pop(index, None)
        if known is None or [*map(id, known[0])] != [*map(id, tensors)]:
            flat = shared_flat(tensors)
            if flat is None:
                return None
            known = (tensors, flat)
        self._flats[index] = known
        return known[1]

    def _draw_ahead(self, keys: dict[torch.dtype, bytes], sizes: dict[torch.dtype, int]) -> None:
        for dtype, size in sizes.items():
            if dtype not in self._buffers or self._buffers[dtype].size != size:
                self._buffers[dtype] = empty_words(size)
            fill_serially(keys[dtype], 0, self._buffers[dtype])

    def _stream_key(self, use: str, size: int = 16) -> bytes:
        message = f"{use}\0{self._purpose}".encode()
        step = self._step.to_bytes(8, "big")
        return blake2b(
            step + message, key=self._key, digest_size=size, person=b"dpbnn noise"
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
