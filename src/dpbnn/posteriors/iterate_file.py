"""Iterates on disk: one stacked safetensors file, written as they come, read piece by piece.

The file is written by plain writes and read by a memory map. A memory map for writing would end the
process (SIGBUS) where a disk is full after all, as file systems that copy on write allow it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

_INDEX = "__index__"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_QUEUED = 4  # copies that wait for the thread at most
_FORMAT = {"format": "dpbnn-iterates", "version": "1"}
_LINKS = os.name != "nt"  # Windows lets nobody replace a file that is open under another name


@dataclass(frozen=True)
class _Layout:
    """Where everything lies in the file: a header, the index [K], then [K, ...] per parameter."""

    header: bytes
    capacity: int
    dtype: torch.dtype
    shapes: dict[str, tuple[int, ...]]
    begins: dict[str, int]
    widths: dict[str, int]  # bytes of one iterate's values, and of one number of the index

    @classmethod
    def of(cls, like: Mapping[str, Tensor], capacity: int, dtype: torch.dtype) -> _Layout:
        code = next(name for name, known in _DTYPES.items() if known == dtype)
        shapes = {name: tuple(value.shape) for name, value in like.items()}
        widths = {n: math.prod(shape) * dtype.itemsize for n, shape in shapes.items()}
        entries: dict[str, object] = {"__metadata__": _FORMAT}
        begins, end = {}, 0
        for name, width in {_INDEX: 8, **widths}.items():
            begins[name], end = end, end + capacity * width
            entries[name] = {
                "dtype": "I64" if name == _INDEX else code,
                "shape": [capacity, *shapes.get(name, ())],
                "data_offsets": [begins[name], end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 64 + 56)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, capacity, dtype, shapes, begins, {_INDEX: 8, **widths})

    def offset(self, name: str, slot: int) -> int:
        """Return where the values of a slot begin; the file ends after the last slot's."""
        return len(self.header) + self.begins[name] + slot * self.widths[name]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.offset(list(self.begins)[-1], self.capacity)


class IterateWriter:
    """Writes iterates to one safetensors file while training goes on.

    The file has its full size from the start, so that a full disk is an `OSError` here and not
    hours later. `append` copies the iterate where it is, and a thread fetches it (from a GPU) and
    writes it; at most four copies wait. An error of the thread is raised by the next `append`
    or by `close`; what was written before it can be read. Use as a context manager.

    Args:
        path: the file, which must not exist (unless `start` is given).
        like: tensors with the names and shapes of the parameters.
        capacity: K; the first K iterates are kept.
        dtype: torch.float32 or torch.bfloat16.
        start: number of iterates already passed to `append` by the run that is resumed; later ones
            in the file are dropped.
        hold: keep what is appended in memory, as much as it takes, until `flush` or `close`.
    """

    _leads = True  # whether this writer makes the file, and its index

    def __init__(
        self,
        path: str | os.PathLike[str],
        like: Mapping[str, Tensor],
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        start: int = 0,
        hold: bool = False,
    ) -> None:
        if capacity < 1 or start < 0:
            raise ValueError(
                f"capacity={capacity} must be at least 1 and start={start} at least 0."
            )
        if dtype not in _DTYPES.values():
            raise ValueError(f"dtype={dtype} must be torch.float32 or torch.bfloat16.")
        if not like:
            raise ValueError("like is empty; pass dict(model.named_parameters()).")
        self.path = Path(path)
        self.seen = start
        self._layout = layout = _Layout.of(like, capacity, dtype)
        self._shapes, self._skip = layout.shapes, dict.fromkeys(layout.shapes, 0)
        self._error: Exception | None = None
        self._file = self._open(start)
        if start and self._leads:  # forget what was written after it
            zeros = memoryview(bytes(8 * max(0, capacity - start)))
            put(self._file, zeros, layout.offset(_INDEX, start))
        self._hold = hold
        self._held: list[tuple[int, Future[dict[str, Tensor]]]] = []
        self._waiting = threading.Semaphore(_QUEUED)
        self._thread = ThreadPoolExecutor(1, "iterate-writer")
        self._closed = False

    def _open(self, start: int) -> FileIO:
        layout = self._layout
        return reopen(self.path, layout) if start else _create(self.path, layout)

    def append(self, values: Mapping[str, Tensor]) -> bool:
        """Pass one iterate; return whether it is kept, as it is while there is room."""
        if self._closed:
            raise ValueError(f"{self.path} is closed; open a new writer.")
        self._raise()
        layout = self._layout
        if self.seen >= layout.capacity:
            return False
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        if shapes != self._shapes:
            wrong = sorted(set(shapes.items()) ^ set(self._shapes.items()))
            raise ValueError(
                f"the iterate does not have the names and shapes given to the writer; they differ "
                f"in {wrong[:4]}."
            )
        self._waiting.acquire()
        copies = {
            name: torch.empty(v.shape, dtype=layout.dtype, device=v.device).copy_(v.detach())
            for name, v in values.items()
        }
        self._held.append((self.seen, self._thread.submit(self._fetch, copies)))
        self.seen += 1
        if not self._hold:
            self._pass_on()
        return True

    @property
    def held_bytes(self) -> int:
        """Memory of the iterates that wait for `flush` or `close`."""
        return len(self._held) * (sum(self._layout.widths.values()) - self._layout.widths[_INDEX])

    def flush(self) -> None:
        """Wait until everything appended is on disk."""
        self._pass_on()
        self._thread.submit(lambda: None).result()  # after all that was passed on
        self._raise()
        os.fsync(self._file.fileno())

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
        self._thread.shutdown()
        self._file.close()
        self._raise()

    def __enter__(self) -> IterateWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close(drop=error is not None)
        except OSError:
            if error is None:
                raise

    def _pass_on(self) -> None:
        """Let the thread write what is held."""
        for held in self._held:
            self._thread.submit(self._write, *held)
        self._held.clear()

    def _fetch(self, copies: dict[str, Tensor]) -> dict[str, Tensor]:
        try:
            return {name: value.cpu() for name, value in copies.items()}
        finally:
            if self._hold:
                self._waiting.release()

    def _write(self, slot: int, fetched: Future[dict[str, Tensor]]) -> None:
        try:
            if self._error is None:
                for name, value in fetched.result().items():
                    data = memoryview(value.reshape(-1).view(torch.uint8).numpy())
                    put(self._file, data, self._layout.offset(name, slot) + self._skip[name])
                if self._leads:
                    number = memoryview((slot + 1).to_bytes(8, "little"))
                    put(self._file, number, self._layout.offset(_INDEX, slot))
        except Exception as error:
            self._error = error
        finally:
            if not self._hold:
                self._waiting.release()

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
        with safe_open(self.path, framework="pt") as file:
            metadata = file.metadata()
        if metadata != _FORMAT:
            raise ValueError(
                f"{self.path} is not a file of iterates of version {_FORMAT['version']}; pass a "
                f"file written by IterateWriter."
            )
        self._mapped = load_file(self.path)
        index = self._mapped.pop(_INDEX)
        kept = int((index > 0).sum())
        self._slots = index.argsort(stable=True)[len(index) - kept :].tolist()
        self.numbers: list[int] = index[self._slots].tolist()
        self.capacity = len(index)
        self.names = list(self._mapped)
        self.shapes = {name: tuple(value.shape[1:]) for name, value in self._mapped.items()}
        self.dtype = self._mapped[self.names[0]].dtype

    def __len__(self) -> int:
        return len(self._slots)

    def __reduce__(self) -> tuple[Any, ...]:
        """Serialise the path of the file, not what is in it."""
        return _reopened, (str(self.path.absolute()),)

    def read(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """Return the iterates at these positions (0 is the oldest), stacked, on the CPU."""
        slots = [self._slots[i] for i in positions]
        return {name: value[slots] for name, value in self._mapped.items()}

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


def _create(path: Path, layout: _Layout) -> FileIO:
    try:
        file = FileIO(path, "x+")
    except FileExistsError:
        raise FileExistsError(
            errno.EEXIST,
            "the file of iterates exists already; choose another path, or remove it",
            str(path),
        ) from None
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, layout.size)
        elif shutil.disk_usage(path.parent).free < layout.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            file.truncate(layout.size)
        put(file, memoryview(layout.header), 0)
    except OSError as error:
        file.close()
        os.unlink(path)
        raise OSError(
            error.errno,
            f"no room for {layout.capacity} iterates: {layout.size / 1e6:.0f} MB needed, "
            f"{shutil.disk_usage(path.parent).free / 1e6:.0f} MB free ({error.strerror}). Keep "
            f"fewer iterates, use dtype=torch.bfloat16, or choose another disk",
            str(path),
        ) from error
    return file


def reopen(path: Path, layout: _Layout) -> FileIO:
    """Return a file of iterates to be written to, after a look at its head and its size."""
    if path.stat().st_nlink > 1:  # a saved posterior shares the file: leave it its own
        shutil.copyfile(path, path.with_name(path.name + ".new"))
        os.replace(path.with_name(path.name + ".new"), path)
    file = FileIO(path, "r+")
    if file.read(len(layout.header)) != layout.header:
        file.close()
        raise ValueError(
            f"{path} was written with other parameters, capacity or dtype; resume with the "
            f"settings of the first run."
        )
    if path.stat().st_size != layout.size:
        file.close()
        raise ValueError(f"{path} is cut off: iterates are missing; copy it again, or start anew.")
    return file


def put(file: FileIO, data: memoryview, offset: int) -> None:
    """Write bytes at a place of a file."""
    file.seek(offset)
    while data:
        data = data[file.write(data) :]
