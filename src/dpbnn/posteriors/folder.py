"""A posterior as a folder: manifest.json and safetensors files, hashed, written at once."""

from __future__ import annotations

import copy
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dpbnn import __version__, likelihoods
from dpbnn.posteriors import architecture
from dpbnn.posteriors.iterate_file import IterateStore

if TYPE_CHECKING:
    from dpbnn.posteriors.posterior import Posterior

__all__ = ["file_hash", "load", "put_in_place"]

FORMAT, VERSION = "dpbnn-posterior", 1
MANIFEST, MODEL = "manifest.json", "model.safetensors"
_WINDOWS = os.name == "nt"


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    likelihood: object = None,
    statement: Callable[[dict[str, Any]], Any] | None = None,
    device: torch.device | str = "cpu",
) -> Posterior:
    """Return the posterior saved in a folder, after checking its version and hashes.

    Args:
        folder: written by `Posterior.save`.
        model: an instance of the network, needed where it is not made of standard modules; copied.
        likelihood: needed where it is not one of the library's.
        statement: makes the privacy statement from its dictionary; the dictionary by default.
        device: where predictions are to be computed.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    for name, expected in manifest["files"].items():
        _check_hash(folder, name, expected)
    kind = _kind(manifest["kind"])
    privacy = manifest["privacy"]
    parts = {
        name.removesuffix(".safetensors"): kind._read(folder / name)
        for name in manifest["files"]
        if name != MODEL
    }
    return kind(
        _model(folder, manifest, model),
        _likelihood(manifest["likelihood"]) if likelihood is None else likelihood,
        privacy=statement(privacy) if statement and privacy is not None else privacy,
        prior=manifest["prior"],
        settings=manifest["settings"],
        **parts,
        **manifest["options"],
    ).to(device)


def save(posterior: Posterior, folder: Path, overwrite: bool) -> None:
    """Write a posterior to a temporary folder beside, then rename."""
    _check_target(folder, overwrite)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        tensors = architecture.named_tensors(posterior.model)
        _write_tensors(partial / MODEL, tensors)
        for name, part in posterior._parts().items():
            if isinstance(part, IterateStore):
                part.export(partial / f"{name}.safetensors")
            else:
                _write_tensors(partial / f"{name}.safetensors", part)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "kind": posterior.kind,
            "model": type(posterior.model).__name__,
            "architecture": architecture.describe(posterior.model),
            "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
            "likelihood": _description(posterior.likelihood),
            "prior": _description(posterior.prior),
            "privacy": _description(posterior.privacy),
            "settings": posterior.settings,
            "options": posterior._options(),
            "versions": {"dpbnn": __version__, "torch": torch.__version__},
            "files": {path.name: file_hash(path) for path in sorted(partial.iterdir())},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.chmod(0o755)
        put_in_place(partial, folder)
        _sync(folder.absolute().parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file."""
    return safetensors.torch.load_file(path)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, f"no {MANIFEST}: pass a folder written by Posterior.save", str(folder)
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{folder / MANIFEST} cannot be read ({error}); save the posterior again."
        ) from None
    found = manifest.get("format"), manifest.get("version")
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"{folder} has format {found[0]!r} version {found[1]!r}; this dpbnn "
            f"{__version__} reads {FORMAT!r} version {VERSION}. Install the dpbnn that wrote "
            f"it ({manifest.get('versions', {}).get('dpbnn', 'unknown')}) or a newer one."
        )
    return manifest


def _kind(name: str) -> type[Posterior]:
    from dpbnn.posteriors.posterior import Posterior

    if name not in Posterior.kinds:
        raise ValueError(
            f"the folder holds a posterior of kind {name!r}; known are "
            f"{', '.join(map(repr, Posterior.kinds))}. Import the module that defines it first."
        )
    return Posterior.kinds[name]


def _check_hash(folder: Path, name: str, expected: str) -> None:
    if Path(name).name != name or not (folder / name).is_file():
        raise ValueError(
            f"{folder} lacks the file {name!r} of its manifest; copy the whole folder."
        )
    if file_hash(folder / name) != expected:
        raise ValueError(
            f"{folder / name} is not the file that was saved (its sha256 differs from the "
            f"manifest's); copy the folder again from its source."
        )


def _model(folder: Path, manifest: dict[str, Any], model: nn.Module | None) -> nn.Module:
    if model is not None:
        model = copy.deepcopy(model)
    elif manifest["architecture"] is not None:
        model = architecture.build(manifest["architecture"])
    else:
        raise ValueError(
            f"the network ({manifest['model']}) is not made of standard modules alone, so it "
            f"cannot be rebuilt; pass load(folder, model=instance) with an instance of it."
        )
    shapes = {name: tuple(shape) for name, shape in manifest["tensors"].items()}
    own = {name: tuple(t.shape) for name, t in architecture.named_tensors(model).items()}
    if own != shapes:
        lines = [
            f"{name}: saved {shapes.get(name, 'absent')}, model {own.get(name, 'absent')}"
            for name in sorted(shapes.keys() | own.keys())
            if shapes.get(name) != own.get(name)
        ]
        raise ValueError(
            f"the model is not the one that was saved ({'; '.join(lines[:4])}); pass an instance "
            f"of the saved network."
        )
    model.load_state_dict(read_tensors(folder / MODEL), strict=False, assign=_is_meta(model))
    return model


def _is_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in architecture.named_tensors(model).values())


def _likelihood(description: dict[str, Any]) -> object:
    known = likelihoods.registered()
    name = description["class"]
    if name not in known:
        raise ValueError(
            f"the likelihood {name!r} is not one of {', '.join(known)}; pass "
            f"load(folder, likelihood=instance)."
        )
    return known[name](**description["arguments"])


def _description(thing: Any) -> Any:
    """Return a statement, dataclass or mapping as JSON values."""
    if thing is None or isinstance(thing, Mapping):
        return thing
    if hasattr(thing, "to_dict"):
        return thing.to_dict()
    arguments = dataclasses.asdict(thing) if dataclasses.is_dataclass(thing) else {}
    return {"class": type(thing).__name__, "arguments": arguments}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(plain, path)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Write a file or the names in a folder to disk; Windows sees to the names itself."""
    folder = path.is_dir()
    if folder and _WINDOWS:
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_target(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(
            errno.EEXIST,
            "exists already; choose another folder or pass overwrite=True",
            str(folder),
        )
    try:
        own = {MANIFEST, *json.loads((folder / MANIFEST).read_text())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in own)
    if foreign:
        raise FileExistsError(
            errno.EEXIST,
            f"holds more than a saved posterior ({', '.join(foreign[:4])}), so it is not "
            f"replaced; choose another folder",
            str(folder),
        )


def put_in_place(partial: Path, folder: Path) -> None:
    """Move a finished folder to its place; what was there goes once the new one stands."""
    if folder.exists() and any(folder.iterdir()):
        old = partial.with_name(partial.name + ".old")
        os.rename(folder, old)
        os.rename(partial, folder)
        shutil.rmtree(old)
    else:
        if folder.exists():  # empty; Windows renames onto nothing
            folder.rmdir()
        os.rename(partial, folder)
