"""A posterior as a folder: manifest.json and safetensors files."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn

from dpbnn import likelihoods
from dpbnn.posteriors import architecture
from dpbnn.posteriors.iterate_file import IterateStore
from dpbnn.storage import plain, read_manifest, restored, write_manifest

if TYPE_CHECKING:
    from dpbnn.posteriors.posterior import Posterior

FORMAT, MODEL = "dpbnn-posterior", "model.safetensors"


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
        likelihood: needed where its class has no name here.
        statement: makes the privacy statement from its dictionary; the dictionary by default.
        device: where predictions are to be computed.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, FORMAT, "Posterior.save")
    kind = _kind(manifest["kind"])
    privacy = manifest["privacy"]
    parts = {
        name.removesuffix(".safetensors"): kind.read(folder / name)
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


def write(posterior: Posterior, folder: Path) -> None:
    """Write the files of a posterior to an empty folder."""
    write_parts(posterior, folder, model=architecture.named_tensors(posterior.model))
    write_record(posterior, folder)


def write_parts(posterior: Posterior, folder: Path, **more: Any) -> None:
    """Write what the posterior has beside its network, and more, one file each."""
    for name, part in {**more, **posterior._parts()}.items():
        path = folder / f"{name}.safetensors"
        if isinstance(part, IterateStore):
            part.export(path)
        else:
            values = {key: tensor.detach().cpu().contiguous() for key, tensor in part.items()}
            safetensors.torch.save_file(values, path)


def write_record(posterior: Posterior, folder: Path) -> None:
    """Write the manifest of a folder whose other files are complete."""
    tensors = architecture.named_tensors(posterior.model)
    values = {
        "kind": posterior.kind,
        "model": type(posterior.model).__name__,
        "architecture": architecture.describe(posterior.model),
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "likelihood": _description(posterior.likelihood),
        "prior": _description(posterior.prior),
        "privacy": _description(posterior.privacy),
        "settings": posterior.settings,
        "options": posterior._options(),
    }
    write_manifest(folder, FORMAT, values)


def _kind(name: str) -> type[Posterior]:
    from dpbnn.posteriors.posterior import Posterior

    if name not in Posterior.kinds:
        raise ValueError(
            f"the folder holds a posterior of kind {name!r}; known are "
            f"{', '.join(map(repr, Posterior.kinds))}. Import the module that defines it first."
        )
    return Posterior.kinds[name]


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
    meta = any(tensor.is_meta for tensor in architecture.named_tensors(model).values())
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
    model.load_state_dict(safetensors.torch.load_file(folder / MODEL), strict=False, assign=meta)
    return model


def _likelihood(description: dict[str, Any]) -> object:
    known = likelihoods.registered()
    if description["class"] not in known:
        raise ValueError(
            f"the likelihood {description['class']!r} is not one of {', '.join(known)}; import the "
            f"module that defines it first, or pass load(folder, likelihood=instance)."
        )
    return restored(description, known)


def _description(thing: Any) -> Any:
    """Return a statement, a dataclass, a mapping or the name of a class as JSON values."""
    if thing is None or isinstance(thing, Mapping):
        return thing
    if hasattr(thing, "to_dict"):
        return thing.to_dict()
    described = dataclasses.is_dataclass(thing)
    return plain(thing) if described else {"class": type(thing).__name__, "arguments": {}}
