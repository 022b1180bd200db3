"""Files and folders that appear whole or not at all, and the manifest that every folder has.

Posteriors, estimators and runs are saved as folders of one format. manifest.json names what the
folder holds, the versions that wrote it, and the SHA-256 of each file in it; of a folder within, it
has the SHA-256 of the manifest there. So each file is hashed once. No pickle is written or read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpbnn import __version__
from dpbnn.privacy.locks import sync_folder

MANIFEST = "manifest.json"
VERSION = 3  # version 1: an estimator's manifest is estimator.json; a run's hashes are all in one;
# version 2: a saved estimator has no run around it, and that of a run takes encoded inputs
_FIRST = "estimator.json"


def replace_file(path: Path, write: Callable[[Path], object], *, private: bool = False) -> Path:
    """Let `write` make a file beside `path`; move it there once it is on disk.

    Args:
        path: the file, which one process at a time may write.
        write: is given the path to write to.
        private: let the file be readable by its owner alone, from the start.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        if private:
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        write(partial)
        _sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync(path.absolute().parent)
    return path


@contextlib.contextmanager
def new_folder(folder: Path, what: str, *, overwrite: bool) -> Iterator[Path]:
    """Yield a folder beside `folder` that takes its place where the block ends well.

    Args:
        folder: must be empty or missing.
        what: it is to hold, in words.
        overwrite: let it hold another saved thing, and nothing else; that goes once the new one
            stands.
    """
    _check_place(folder, what, overwrite)
    folder = folder.resolve()  # a link stays, and what it leads to is replaced
    parent = folder.parent
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=parent))
    try:
        yield partial
        sync_tree(partial)
        partial.chmod(0o755)
        if folder.exists() and any(folder.iterdir()):
            old = partial.with_name(partial.name + ".old")
            os.rename(folder, old)
            try:
                os.rename(partial, folder)
            except OSError:
                os.rename(old, folder)
                raise
            shutil.rmtree(old)
        else:
            if folder.exists():  # empty; Windows renames onto nothing
                folder.rmdir()
            os.rename(partial, folder)
        _sync(parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class Manifest(dict[str, Any]):
    """The entries of a manifest; one that is missing is a clear error."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"a {MANIFEST} lacks its entry {name!r}; copy the whole folder again.")


def versions() -> dict[str, str]:
    """Return the versions of the software that a model depends on."""
    return {
        "dpbnn": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dp-accounting": importlib.metadata.version("dp-accounting"),
        "python": platform.python_version(),
    }


def format_of(folder: Path) -> str | None:
    """Return what the manifest of a folder says that it holds, before anything is checked."""
    for name in (MANIFEST, _FIRST):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return str(json.loads((folder / name).read_text()).get("format"))
    return None


def write_manifest(folder: Path, format: str, values: Mapping[str, Any]) -> None:
    """Write the manifest of a folder whose files are complete.

    Args:
        folder: holds the files, and folders that have manifests.
        format: what the folder holds, such as "dpbnn-run".
        values: further entries, as JSON values.
    """
    files = sorted(p for p in (*folder.iterdir(), *folder.glob(f"*/{MANIFEST}")) if p.is_file())
    manifest = {
        "format": format,
        "version": VERSION,
        **values,
        "versions": versions(),
        "files": {path.relative_to(folder).as_posix(): _hash(path) for path in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def read_manifest(folder: Path, format: str, origin: str) -> Manifest:
    """Return the manifest of a folder, after checking format, version and the hash of every file.

    Args:
        folder: the folder.
        format: what it must hold.
        origin: what writes such folders, in words.
    """
    path = folder / MANIFEST
    if not path.is_file() and (folder / _FIRST).is_file():
        path = folder / _FIRST
    try:
        manifest = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        problem = f"no {MANIFEST}" if isinstance(error, FileNotFoundError) else "is a file"
        raise type(error)(
            error.errno, f"{problem}: pass a folder written by {origin}", str(folder)
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); save it again.") from None
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} is not a manifest; copy the whole folder again.")
    found, made = (manifest.get("format"), manifest.get("version")), manifest.get("versions")
    if found[0] != format or found[1] not in range(1, VERSION + 1):
        raise ValueError(
            f"{folder} has format {found[0]!r} version {found[1]!r}; this dpbnn "
            f"{__version__} reads {format!r} up to version {VERSION}. Install the dpbnn that wrote "
            f"it ({made.get('dpbnn', 'unknown') if isinstance(made, dict) else 'unknown'}) or a "
            f"newer one."
        )
    manifest["files"] = _files(manifest)
    listed = isinstance(manifest["files"], dict) and (manifest["files"] or path.name == _FIRST)
    if not listed:
        raise ValueError(f"{path} lists no files to check; copy the whole folder again.")
    for name, expected in manifest["files"].items():
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not (folder / name).is_file():
            raise ValueError(
                f"{folder} lacks the file {name!r} of its manifest; copy the whole folder."
            )
        if _hash(folder / name) != expected:
            raise ValueError(
                f"{folder / name} is not what was saved (its sha256 differs from the "
                f"manifest's); copy the folder again from its source."
            )
    return Manifest(manifest)


def plain(value: Any, *, as_text: bool = False) -> Any:
    """Return a value as JSON values, from which `restored` makes it again.

    Args:
        value: numbers, text, arrays, sequences, mappings, paths and dataclasses of these.
        as_text: give anything else as its text, instead of a TypeError.
    """
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.str}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (range, tuple, list)):
        return {"tuple": [plain(item, as_text=as_text) for item in value]}
    if isinstance(value, Mapping):
        pairs = [[plain(part, as_text=as_text) for part in pair] for pair in value.items()]
        return {"dict": pairs}
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        arguments = {name: plain(getattr(value, name), as_text=as_text) for name in fields}
        return {"class": type(value).__name__, "arguments": arguments}
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": repr(value)}
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if as_text:
        return {"text": repr(value)}
    raise TypeError(f"a {type(value).__name__} cannot be saved; use numbers, text or sequences")


def restored(value: Any, classes: Mapping[str, Any]) -> Any:
    """Return what `plain` described.

    Args:
        value: the JSON values.
        classes: that may be made, by name.
    """
    if not isinstance(value, dict):
        return value
    if "number" in value:
        return float(value["number"])
    if "array" in value:
        return np.array(value["array"], dtype=np.dtype(value["dtype"]))
    if "tuple" in value:
        return tuple(restored(item, classes) for item in value["tuple"])
    if "dict" in value:
        return {restored(key, classes): restored(item, classes) for key, item in value["dict"]}
    if "class" in value:
        arguments = value["arguments"].items()
        return classes[value["class"]](**{n: restored(item, classes) for n, item in arguments})
    return value["text"]


def sync_tree(folder: Path) -> None:
    """Write a folder and all that is in it to disk."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
    else:
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(manifest: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = manifest.get("files", manifest.get("hashes", {}))
    return found


def _check_place(folder: Path, what: str, overwrite: bool) -> None:
    """Raise where a folder holds anything that saving must not replace."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(
            errno.EEXIST,
            "exists already; choose another folder or pass overwrite=True",
            str(folder),
        )
    own = set()
    for path in (*folder.rglob(MANIFEST), *folder.rglob(_FIRST)):
        with contextlib.suppress(ValueError, AttributeError):
            manifest = json.loads(path.read_text())
            if str(manifest.get("format")).startswith("dpbnn-"):
                own |= {path, *(path.parent / name for name in _files(manifest))}
    there = [path for path in folder.rglob("*") if path.is_file() and path not in own]
    foreign = sorted(path.relative_to(folder).as_posix() for path in there)
    if foreign or not own:
        raise FileExistsError(
            errno.EEXIST,
            f"holds more than a saved {what} ({', '.join(foreign[:4])}), so it is not "
            f"replaced; choose another folder",
            str(folder),
        )
