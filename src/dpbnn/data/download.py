"""Downloads from public sources: a file appears only when it is complete and checked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

_BLOCK = 2**18


class BadDownload(OSError):
    """A source that cannot be reached, or whose content is wrong."""


def fetch(url: str, path: Path, check: Callable[[Path], str | None]) -> None:
    """Download a file; it appears at `path` only once it is complete and checked.

    Args:
        url: where it is.
        path: where it goes; folders are made.
        check: looks at the downloaded file and returns what is wrong with it, or None.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    part = Path(name)
    try:
        try:
            with os.fdopen(handle, "wb") as file, urllib.request.urlopen(url, timeout=30) as source:
                expected = int(source.headers.get("Content-Length") or 0)
                with _progress(path.name, expected) as advance:
                    while block := source.read(_BLOCK):
                        file.write(block)
                        advance(len(block))
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise BadDownload(f"{url}: {getattr(error, 'reason', error)}") from None
        size = part.stat().st_size
        problem = f"ended after {size} of {expected} bytes" if size < expected else check(part)
        if problem:
            raise BadDownload(f"{url}: {problem}")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def sha256(content: bytes) -> str:
    """Return the checksum of content."""
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def _progress(name: str, size: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"downloading {name}", total=size or None)
        yield lambda count: bar.advance(task, count)
