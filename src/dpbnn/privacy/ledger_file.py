"""The file of a ledger: lines in a checksum chain, and the chain's head in a second file.

    ledger.jsonl        one JSON object a line; each carries a checksum of itself and of the
                        checksum before it
    ledger.jsonl.head   the length of the file, its last checksum, and the last lines themselves

Lines come first, then the head; only then may what they announce be done. (The very first line
comes after its head, so a file without a head is never a new one.) So everything that was done is
within the head. A file that is shorter than its head says, or other, has lost something and is
refused. Whole lines beyond the head are of a process that died on the way; they count. Lines do not
go over the end of a page, so that such a process leaves no part of a line.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpbnn.privacy.locks import lock, sync_folder, unlock

_PAGE = 4096  # bytes of a file that are written together, or a part of such
_LONGEST = 1024  # bytes of a usual line, at most


class LedgerCorrupted(RuntimeError):
    """The ledger does not say reliably what was spent."""


class LedgerFile:
    """Reads and appends lines under a lock.

    **Guarantee.** `append` returns only after lines and head are on disk. A file that does not hold
    what its head says, or that ends in a torn line, raises `LedgerCorrupted`, whatever the cause: a
    flipped byte, a line removed, an older copy put back. Processes that share the file take turns.

    Args:
        path: of the ledger; the head lies beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head_path = path.with_name(path.name + ".head")
        self.forget()

    def forget(self) -> None:
        """Begin anew at the first line."""
        self.offset = 0
        self.checks = {0: ""}  # checksum of everything before an offset at which a line begins

    @contextlib.contextmanager
    def locked(self, *, writing: bool) -> Iterator[Locked]:
        """Hold the file's lock: for `append`, or for reading only."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND if writing else os.O_RDONLY
        try:
            fd = os.open(self.path, flags | getattr(os, "O_BINARY", 0), 0o600)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not writing:
                raise self._corrupted("is gone") from None
            raise _unwritable(error, self.path) from None
        try:
            lock(fd, exclusive=writing)
            try:
                yield Locked(self, fd)
            finally:
                unlock(fd)
        finally:
            os.close(fd)

    def exists(self) -> bool:
        """Return whether there is a file, or a head that is left of it."""
        return self.path.exists() or self.head_path.exists()

    def repair(self) -> None:
        """Mend a file that is refused, and say in it where entries can be missing; see `Ledger`."""
        if not self.exists():
            raise FileNotFoundError(
                errno.ENOENT,
                "no such ledger; give the path of one that a run has written",
                str(self.path),
            )
        content, complete = self.recovered()
        if not content:
            raise LedgerCorrupted(
                f"{self.path}: has no readable first line, so nothing of it can be saved. Restore "
                f"it from a backup, or count its whole budget as spent and give another path"
            )
        mark = time.strftime("%Y%m%d-%H%M%S") + f"-{secrets.token_hex(2)}"
        self.rewrite(content, [] if complete else [{"lost": True}], mark)

    def recovered(self) -> tuple[bytes, bool]:
        """Return the content that the file should have, and whether nothing can be missing in it.

        Where the head is whole, its lines are known, so damage to them can be undone, and a torn
        line beyond them announced nothing that was done. Anything else is lost; the content is then
        what can be read before it.
        """
        content = self.path.read_bytes() if self.path.is_file() else b""
        head = self._head()
        whole, check, checks = b"", "", {0: ""}
        for line in content.splitlines(keepends=True):
            found = _checked(line, check)
            if found is None:
                break
            whole, check = whole + line, found[1]
            checks[len(whole)] = check
        if head is None:
            return whole, False
        if checks.get(head["size"]) == head["check"]:
            return whole, True
        known = head["lines"].encode()
        start = head["size"] - len(known)
        first = _checked(known.splitlines(keepends=True)[0], checks.get(start, "none"))
        return (whole[:start] + known, True) if first is not None else (whole, False)

    def rewrite(self, content: bytes, more: list[dict[str, Any]], mark: str) -> None:
        """Replace the file by this content and more lines, and its head with it.

        Copies of both are kept first. Where it ends half way, file and head do not fit each other,
        so that the file is refused as before.

        Args:
            content: whole lines.
            more: entries to follow them.
            mark: for the names of the copies.
        """
        for part in (self.path, self.head_path):
            if part.exists():
                _replace(part.with_name(f"{part.name}.damaged-{mark}"), part.read_bytes())
        check = json.loads(content.splitlines()[-1])["check"]
        content += b"".join(lines := [line for line, _ in _lines(check, more)])
        last = b"".join(lines) or content.splitlines(keepends=True)[-1]
        check = json.loads(last.splitlines()[-1])["check"]
        _replace(self.path, content)
        self._write_head(len(content), check, last)
        sync_folder(self.path.parent)

    def _head(self) -> dict[str, Any] | None:
        """Return the head, or None where there is none that is whole."""
        try:
            values = json.loads(self.head_path.read_bytes())
            found = values.pop("sum")
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None
        return values if found == _digest(values) else None

    def _write_head(self, size: int, check: str, lines: bytes) -> None:
        values = {"size": size, "check": check, "lines": lines.decode()}
        _replace(self.head_path, json.dumps({**values, "sum": _digest(values)}).encode())

    def _corrupted(self, what: str) -> LedgerCorrupted:
        return LedgerCorrupted(
            f"{self.path} {what}, so it is not known for sure what was spent. Restore it from a "
            f"backup, together with {self.head_path.name}; or run 'dpbnn account --repair "
            f"{self.path}', which counts the most that can have been spent"
        )


class Locked:
    """A ledger file while its lock is held."""

    def __init__(self, file: LedgerFile, fd: int) -> None:
        self.file, self.fd = file, fd

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that were added since the last time."""
        file = self.file
        size, head = os.fstat(self.fd).st_size, file._head()
        if size == 0 and file.offset == 0 and not file.head_path.exists():
            return []
        if head is None:
            raise file._corrupted(f"is no ledger, or has no whole {file.head_path.name} beside it")
        if size == 0 and file.offset == 0 and len(head["lines"].encode()) == head["size"]:
            return []  # the process that made it died before its first line
        if size < max(head["size"], file.offset):
            raise file._corrupted(f"became shorter: its head says {head['size']} bytes")
        known = head["lines"].encode()
        os.lseek(self.fd, head["size"] - len(known), os.SEEK_SET)
        if _read(self.fd, len(known)) != known:
            raise file._corrupted("has other last lines than its head says")
        os.lseek(self.fd, file.offset, os.SEEK_SET)
        found, end, checks = [], file.offset, {file.offset: file.checks[file.offset]}
        for line in _read(self.fd, size - file.offset).splitlines(keepends=True):
            values = _checked(line, checks[end])
            if values is None:
                raise file._corrupted(f"is damaged or torn at byte {end}")
            found.append(values[0])
            end += len(line)
            checks[end] = values[1]
        if {**file.checks, **checks}.get(head["size"]) != head["check"]:
            raise file._corrupted("is not what its head says")
        file.offset = end
        file.checks |= checks
        return found

    def append(self, entries: list[dict[str, Any]]) -> None:
        """Write lines and wait until they are on disk; after an error nothing counts as written."""
        file = self.file
        end, check, lines, checks = file.offset, "", b"", {}
        for line, check in _lines(file.checks[file.offset], entries):
            lines += _filled(line, end)
            end = file.offset + len(lines)
            checks[end] = check
        try:
            if not file.offset:
                file._write_head(end, check, lines)
                sync_folder(file.path.parent)
            _write(self.fd, lines)
            os.fsync(self.fd)
            if file.offset:
                file._write_head(end, check, lines)  # an older one would do after a power failure
        except BaseException as error:
            self._undo()
            if isinstance(error, OSError):
                raise _unwritable(error, file.path) from None
            raise
        file.offset = end
        file.checks |= checks

    def _undo(self) -> None:
        """Take back lines that the head does not know; where that fails too, they count."""
        with contextlib.suppress(OSError):
            if not self.file.offset:
                self.file.head_path.unlink(missing_ok=True)
            head = self.file._head()
            if head is None or head["size"] <= self.file.offset:
                os.ftruncate(self.fd, self.file.offset)


def _lines(check: str, entries: list[dict[str, Any]]) -> Iterator[tuple[bytes, str]]:
    """Yield entries as lines, each with its checksum, to follow one with checksum `check`."""
    for values in entries:
        check = _checksum(check, values)
        yield json.dumps({**values, "check": check}).encode() + b"\n", check


def _filled(line: bytes, start: int) -> bytes:
    """Return a line that has spaces up to the end of its page where another may not fit in there.

    A process that is killed while it writes leaves whole pages. So a line in one page is whole, or
    not there at all.

    Args:
        line: to be written.
        start: its place in the file.
    """
    room = -(start + len(line)) % _PAGE
    return line[:-1] + b" " * room + b"\n" if room < _LONGEST else line


def _replace(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(partial, path)


def _checked(line: bytes, before: str) -> tuple[dict[str, Any], str] | None:
    """Return a line's values and checksum, or None where it is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        values: dict[str, Any] = json.loads(line)
        check = values.pop("check")
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return (values, check) if check == _checksum(before, values) else None


def _checksum(before: str, values: dict[str, Any]) -> str:
    text = before + json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _digest(values: dict[str, Any]) -> str:
    return _checksum("head", values)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := os.read(fd, size - len(data))):
        data += part
    return data


def _unwritable(error: OSError, path: Path) -> OSError:
    cure = "give a path in a writable folder with space left"
    return type(error)(
        error.errno, f"the ledger cannot be written: {error.strerror}; {cure}", str(path)
    )
