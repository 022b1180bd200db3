"""Iterates on disk: one stacked safetensors file, written as they come, read piece by piece."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import queue
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

__all__ = ["IterateStore", "IterateWriter"]

_INDEX = "__index__"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_FORMAT = {"format": "dpbnn-iterates", "version": "1"}
_PAGE = 4096
_LINKS = os.name != "nt"  # Windows lets nobody replace a file that is open under another name
_BINARY = getattr(os, "O_BINARY", 0)


@dataclass(frozen=True)
class _Layout:
    """Where everything lies in the file: a header, the index [K], then [K, ...] per parameter."""

    header: bytes
    capacity: int
    dtype: torch.dtype
    shapes: dict[str, tuple[int, ...]]
    offsets: dict[str, int]
    size: int

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], capacity: int, dtype: torch.dtype) -> _Layout:
        code = next(name for name, known in _DTYPES.items() if known == dtype)
        entries: dict[str, object] = {"__metadata__": _FORMAT}
        ends, end = {}, 0
        for name, kind, shape, width in (
            (_INDEX, "I64", (), 8),
            *((name, code, tuple(shape), dtype.itemsize) for name, shape in shapes.items()),
        ):
            begin, end = end, end + capacity * math.prod(shape) * width
            entries[name] = {
                "dtype": kind,
                "shape": [capacity, *shape],
                "data_offsets": [begin, end],
            }
            ends[name] = begin
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 64 + 56)
        header = len(text).to_bytes(8, "little") + text
        return cls(
            header=header,
            capacity=capacity,
            dtype=dtype,
            shapes={name: tuple(shape) for name, shape in shapes.items()},
            offsets={name: len(header) + begin for name, begin in ends.items()},
            size=len(header) + end,
        )


class _Staging:
    """Room on the GPU for a copy of an iterate, and when it was last copied from there."""

    def __init__(self, layout: _Layout, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.copied: torch.cuda.Event | None = None
        self.values = {
            name: torch.empty(shape, dtype=layout.dtype, device=stream.device)
            for name, shape in layout.shapes.items()
        }


class _Buffer:
    """One iterate on its way to disk, by way of a copy on the GPU where it comes from one.

    A value that goes to byte o of the file lies at an address of the same remainder modulo a page,
    as writing past the page cache needs it.
    """

    def __init__(self, layout: _Layout, staging: _Staging | None) -> None:
        self.layout, self.staging = layout, staging
        self.bytes = {n: math.prod(s) * layout.dtype.itemsize for n, s in layout.shapes.items()}
        pages = sum(2 + size // _PAGE for size in self.bytes.values())
        self.flat = torch.empty((pages + 1) * _PAGE, dtype=torch.uint8, pin_memory=bool(staging))
        self.parts: dict[str, Tensor] = {}
        self.copied: torch.cuda.Event | None = None
        self.slot = self.number = 0

    def fill(self, values: Mapping[str, Tensor], slot: int, number: int) -> None:
        self.slot, self.number = slot, number
        begin = -self.flat.data_ptr() % _PAGE
        for name, size in self.bytes.items():
            first = begin + self.offset(name) % _PAGE
            self.parts[name] = self.flat[first : first + size]
            begin += (2 + size // _PAGE) * _PAGE
        targets = {name: self._values(name) for name in self.parts}
        staging = self.staging
        if staging is None:
            for name, target in targets.items():
                target.copy_(values[name].detach())
            return
        current = torch.cuda.current_stream(staging.stream.device)
        if staging.copied is not None:
            current.wait_event(staging.copied)
        for name, room in staging.values.items():
            room.copy_(values[name].detach())
        staging.stream.wait_stream(current)
        with torch.cuda.stream(staging.stream):
            for name, target in targets.items():
                target.copy_(staging.values[name], non_blocking=True)
            self.copied = staging.copied = staging.stream.record_event()

    def offset(self, name: str) -> int:
        """Where in the file the values of a parameter go."""
        return self.layout.offsets[name] + self.slot * self.bytes[name]

    def _values(self, name: str) -> Tensor:
        return self.parts[name].view(self.layout.dtype).view(self.layout.shapes[name])


class _File:
    """Writes whole pages past the page cache where the file system lets it, the rest through it.

    Copying into the page cache would take the cores from the training; whole pages sent to the
    disk directly cost next to nothing.
    """

    def __init__(self, cached: int, path: Path) -> None:
        self.cached = cached
        self.direct: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.direct = os.open(path, os.O_WRONLY | _BINARY | os.O_DIRECT)

    def write(self, data: memoryview, offset: int) -> None:
        first = -offset % _PAGE
        last = first + max(0, len(data) - first) // _PAGE * _PAGE
        if last > first and self._write_pages(data[first:last], offset + first):
            _pwrite(self.cached, data[:first], offset)
            data, offset = data[last:], offset + last
        _pwrite(self.cached, data, offset)

    def _write_pages(self, data: memoryview, offset: int) -> bool:
        if self.direct is None:
            return False
        try:
            _pwrite(self.direct, data, offset)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EFAULT):
                raise
            return False
        return True

    def read(self, size: int, offset: int) -> bytes:
        return _pread(self.cached, size, offset)

    def sync(self) -> None:
        os.fsync(self.cached)

    def close(self) -> None:
        os.close(self.cached)
        if self.direct is not None:
            os.close(self.direct)


class IterateWriter:
    """Writes iterates to one safetensors file while training goes on.

    The file has its full size from the start, so that a full disk is an `OSError` here and not
    hours later. `append` copies the iterate (from a GPU without waiting) and threads write it; at
    most `queued` copies are in memory. An error of a thread is raised by the next `append` or by
    `close`; what was written before it can be read. Use as a context manager.

    Args:
        path: the file, which must not exist (unless `start` is given).
        like: tensors with the names and shapes of the parameters.
        capacity: K, the most iterates kept.
        dtype: torch.float32 or torch.bfloat16.
        keep: "last" keeps the last K, "first" the first K and ignores the rest.
        burn_in: number of iterates to skip first.
        thinning: keep one in so many after that.
        start: number of iterates already passed to `append` by the run that is resumed; later ones
            in the file are dropped.
        queued: iterates in memory at most.
        threads: how many iterates are written at a time.
        hold: keep what is appended in memory, as much as it takes, until `flush` or `close`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        like: Mapping[str, Tensor],
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        keep: str = "last",
        burn_in: int = 0,
        thinning: int = 1,
        start: int = 0,
        queued: int = 4,
        threads: int = 2,
        hold: bool = False,
    ) -> None:
        if capacity < 1 or thinning < 1 or burn_in < 0 or start < 0 or min(queued, threads) < 1:
            raise ValueError(
                f"capacity={capacity}, thinning={thinning}, queued={queued}, threads={threads} "
                f"must be at least 1 and burn_in={burn_in}, start={start} at least 0."
            )
        if keep not in ("first", "last"):
            raise ValueError(f"keep={keep!r} must be 'first' or 'last'.")
        if dtype not in _DTYPES.values():
            raise ValueError(f"dtype={dtype} must be torch.float32 or torch.bfloat16.")
        if not like:
            raise ValueError("like is empty; pass dict(model.named_parameters()).")
        self.path = Path(path)
        self.keep, self.burn_in, self.thinning = keep, burn_in, thinning
        self.seen = start
        self._layout = _Layout.of({n: t.shape for n, t in like.items()}, capacity, dtype)
        self._index = [0] * capacity
        self._error: Exception | None = None
        opened = _reopen(self.path, self._layout) if start else _create(self.path, self._layout)
        self._file = _File(opened, self.path)
        if start:
            self._drop_after(start)
        self._kept = max(0, start - burn_in) // thinning
        self._free: queue.Queue[_Buffer] = queue.Queue()
        self._full: list[queue.Queue[_Buffer | None]] = [queue.Queue() for _ in range(threads)]
        device = next((t.device for t in like.values() if t.is_cuda), None)
        stream = None if device is None else torch.cuda.Stream(device)
        self._staging: _Staging | None = None
        for _ in range(queued):
            if stream is not None:
                self._staging = _Staging(self._layout, stream)
            self._free.put(_Buffer(self._layout, self._staging))
        self._hold = hold
        self._held: list[_Buffer] = []
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(full,), name="iterate-writer", daemon=True)
            for full in self._full
        ]
        for thread in self._threads:
            thread.start()

    def append(self, values: Mapping[str, Tensor]) -> bool:
        """Pass one iterate; return whether it is kept (burn-in, thinning and `keep` decide)."""
        if self._closed:
            raise ValueError(f"{self.path} is closed; open a new writer.")
        self._raise()
        passed = self.seen + 1 - self.burn_in
        if passed < 1 or passed % self.thinning:
            self.seen += 1
            return False
        if self.keep == "first" and self._kept >= self._layout.capacity:
            self.seen += 1
            return False
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        if shapes != self._layout.shapes:
            wrong = sorted(set(shapes.items()) ^ set(self._layout.shapes.items()))
            raise ValueError(
                f"the iterate does not have the names and shapes given to the writer; they differ "
                f"in {wrong[:4]}."
            )
        self.seen += 1
        if self._hold and self._free.empty():
            buffer = _Buffer(self._layout, self._staging)
        else:
            buffer = self._free.get()
        buffer.fill(values, self._kept % self._layout.capacity, self.seen)
        self._kept += 1
        self._held.append(buffer)
        if not self._hold:
            self._pass_on()
        return True

    @property
    def held_bytes(self) -> int:
        """Memory of the iterates that wait for `flush` or `close`."""
        return sum(buffer.flat.nbytes for buffer in self._held)

    def flush(self) -> None:
        """Wait until everything appended is on disk."""
        self._pass_on()
        for full in self._full:
            full.join()
        self._raise()
        self._file.sync()

    def close(self, *, drop: bool = False) -> None:
        """Finish writing and close the file; raise an error of the thread not yet raised.

        Args:
            drop: forget what is held instead of writing it.
        """
        if self._closed:
            return
        self._closed = True
        if drop:
            self._held.clear()
        self._pass_on()
        for full, thread in zip(self._full, self._threads, strict=True):
            full.put(None)
            thread.join()
        self._file.close()
        self._raise()

    def __enter__(self) -> IterateWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close(drop=error is not None)
        except OSError:
            if error is None:
                raise

    def _pass_on(self) -> None:
        """Hand what is held to the threads."""
        for buffer in self._held:
            self._full[buffer.slot % len(self._full)].put(buffer)
        self._held.clear()

    def _run(self, full: queue.Queue[_Buffer | None]) -> None:
        while (buffer := full.get()) is not None:
            try:
                if self._error is None:
                    self._write(buffer)
            except Exception as error:
                self._error = error
            finally:
                self._free.put(buffer)
                full.task_done()

    def _write(self, buffer: _Buffer) -> None:
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if self._index[buffer.slot]:
            self._number(buffer.slot, 0)
        for name, part in buffer.parts.items():
            self._file.write(memoryview(part.numpy()), buffer.offset(name))
        self._number(buffer.slot, buffer.number)

    def _number(self, slot: int, number: int) -> None:
        data = memoryview(number.to_bytes(8, "little"))
        self._file.write(data, self._layout.offsets[_INDEX] + 8 * slot)
        self._index[slot] = number

    def _drop_after(self, start: int) -> None:
        data = self._file.read(8 * self._layout.capacity, self._layout.offsets[_INDEX])
        self._index = memoryview(data).cast("q").tolist()
        for slot, number in enumerate(self._index):
            if number > start:
                self._number(slot, 0)

    def _raise(self) -> None:
        error = self._error
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        raise OSError(
            error.errno,
            f"an iterate could not be written ({error.strerror}); those before it are in the "
            f"file. Free disk space or keep fewer iterates",
            str(self.path),
        ) from error


class IterateStore:
    """Reads a file of iterates, oldest first, through a memory map.

    A file whose writer was interrupted is read as far as it was written.

    Args:
        path: a file written by `IterateWriter`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._open = safe_open(self.path, framework="pt")
        if (self._open.metadata() or {}) != _FORMAT:
            raise ValueError(
                f"{self.path} is not a file of iterates of version {_FORMAT['version']}; pass a "
                f"file written by IterateWriter."
            )
        index = self._open.get_tensor(_INDEX)
        kept = int((index > 0).sum())
        self._slots = index.argsort(stable=True)[len(index) - kept :].tolist()
        self.numbers: list[int] = index[self._slots].tolist()
        self.capacity = len(index)
        self.names = [name for name in self._open.keys() if name != _INDEX]  # noqa: SIM118
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(self._open.get_slice(name).get_shape()[1:]) for name in self.names
        }
        self.dtype = _DTYPES[self._open.get_slice(self.names[0]).get_dtype()]

    def __len__(self) -> int:
        return len(self._slots)

    def __reduce__(self) -> tuple[Any, ...]:
        """Serialise the path of the file, not what is in it."""
        return _reopened, (str(self.path.absolute()),)

    def read(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """Return the iterates at these positions (0 is the oldest), stacked, on the CPU."""
        slots = [self._slots[i] for i in positions]
        begin, end = slots[0], slots[-1] + 1
        found = {}
        for name in self.names:
            piece = self._open.get_slice(name)
            if slots == list(range(begin, end)):
                found[name] = piece[begin:end]
            else:
                found[name] = torch.cat([piece[slot : slot + 1] for slot in slots])
        return found

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the iterates to another file, without room for more."""
        if self._slots == list(range(self.capacity)):
            if _LINKS:
                with contextlib.suppress(OSError):
                    return os.link(self.path, path)
            shutil.copyfile(self.path, path)
            return None
        like = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        with IterateWriter(path, like, len(self), dtype=self.dtype) as writer:
            for position in range(len(self)):
                writer.append({name: t[0] for name, t in self.read([position]).items()})
        return None


def _reopened(path: str) -> IterateStore:
    if not Path(path).exists():
        raise FileNotFoundError(
            errno.ENOENT,
            "the iterates were left in their file, which is gone; use posterior.save, dpbnn.load",
            path,
        )
    return IterateStore(path)


def _create(path: Path, layout: _Layout) -> int:
    try:
        file = os.open(path, os.O_RDWR | _BINARY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise FileExistsError(
            errno.EEXIST,
            "the file of iterates exists already; choose another path, or remove it",
            str(path),
        ) from None
    try:
        _reserve(file, path, layout.size)
        _pwrite(file, memoryview(layout.header), 0)
    except OSError as error:
        os.close(file)
        os.unlink(path)
        raise OSError(
            error.errno,
            f"no room for {layout.capacity} iterates: {layout.size / 1e6:.0f} MB needed, "
            f"{shutil.disk_usage(path.parent).free / 1e6:.0f} MB free ({error.strerror}). Keep "
            f"fewer iterates, use dtype=torch.bfloat16, or choose another disk",
            str(path),
        ) from error
    return file


def _reserve(file: int, path: Path, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    if shutil.disk_usage(path.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(file, size)


def _reopen(path: Path, layout: _Layout) -> int:
    if path.stat().st_nlink > 1:  # a saved posterior shares the file: leave it its own
        shutil.copyfile(path, path.with_name(path.name + ".new"))
        os.replace(path.with_name(path.name + ".new"), path)
    file = os.open(path, os.O_RDWR | _BINARY)
    if _pread(file, len(layout.header), 0) != layout.header:
        os.close(file)
        raise ValueError(
            f"{path} was written with other parameters, capacity or dtype; resume with the "
            f"settings of the first run."
        )
    return file


if hasattr(os, "pwrite"):

    def _pwrite(file: int, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written

    def _pread(file: int, size: int, offset: int) -> bytes:
        return os.pread(file, size, offset)

else:
    _POSITION = threading.Lock()  # threads share the position of a file

    def _pwrite(file: int, data: memoryview, offset: int) -> None:
        with _POSITION:
            os.lseek(file, offset, os.SEEK_SET)
            while data:
                data = data[os.write(file, data) :]

    def _pread(file: int, size: int, offset: int) -> bytes:
        with _POSITION:
            os.lseek(file, offset, os.SEEK_SET)
            return os.read(file, size)
