"""Checkpoints of sharded runs: each rank's rows, through torch's distributed checkpoints (DCP).

They are safetensors files, one for each rank. A run goes on on another number of ranks: DCP reads
the rows that a rank needs from whatever files hold them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpbnn.networks.sharded import Sharding
from dpbnn.privacy.group import Group
from dpbnn.privacy.locks import sync_folder

__all__ = ["RowFiles"]

_NAME = "rows-"  # how the folders begin
_FIELDS = ("parameters", "first", "velocity", "average.values")
_FOLDER, _FOUND = "rows.folder", "rows.digest"


@dataclasses.dataclass
class RowFiles:
    """The rows of all ranks in the folder of a run; one folder within it for each checkpoint.

    All methods but `rest` and `forget_others` are called by all ranks.

    Attributes:
        sharding: of the network.
        group: the ranks.
        folder: of the run, seen by all ranks.
        pointer: what leads to the rows that were saved last.
    """

    sharding: Sharding
    group: Group
    folder: Path
    pointer: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, sharding: Sharding | None, group: Group, folder: Path | None) -> RowFiles | None:
        """Return the files of a sharded run that has a folder, or None."""
        return None if sharding is None or folder is None else cls(sharding, group, folder)

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the rows among the tensors of a state."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        name = self.group.first(lambda: f"{_NAME}{secrets.token_hex(8)}")
        path = self.folder / name
        self.group.first(path.mkdir)
        whole = {n: self._spread(n, v) for n, v in tensors.items() if self._parameter(n, v)}
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
        save(whole, storage_writer=writer, process_group=self._transport)

        def told() -> bytes:
            sync_folder(path)
            return _digest(path)

        self.pointer = {_FOLDER: _text(name.encode()), _FOUND: _text(self.group.first(told))}

    def rest(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the other tensors of a state, with what leads to the rows."""
        left = {name: v for name, v in tensors.items() if not self._parameter(name, v)}
        return {**left, **self.pointer}

    def load(self, pointer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows, written by whatever number of ranks."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        path = self.folder / _bytes(pointer[_FOLDER]).decode()

        def check() -> None:
            if not path.is_dir() or _digest(path) != _bytes(pointer[_FOUND]):
                raise FileNotFoundError(
                    f"{path}: is missing or damaged, and the checkpoint needs it; restore it from "
                    f"a backup, or start a new run in another folder, on the same ledger"
                )

        self.group.first(check)
        reader = HuggingFaceStorageReader(str(path))
        slices, found = self.sharding.slices, {}
        saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        for name, about in saved.items():
            parameter = _parameter(name, list(slices.shapes))
            if parameter is None or slices.shapes[parameter] != about.size:
                raise KeyError(name)
            rows = slices.rows(parameter)[1], *about.size[1:]
            kind = self.sharding.mesh.device_type
            found[name] = torch.empty(rows, dtype=about.properties.dtype, device=kind)
        whole = {name: self._spread(name, rows) for name, rows in found.items()}
        load(whole, storage_reader=reader, process_group=self._transport)
        self.pointer = {name: pointer[name] for name in (_FOLDER, _FOUND)}
        return found

    def forget_others(self) -> None:
        """Delete the rows of all checkpoints but the last."""
        for path in self.folder.glob(f"{_NAME}*"):
            if path.name.encode() != _bytes(self.pointer[_FOLDER]):
                shutil.rmtree(path, ignore_errors=True)

    @property
    def _transport(self) -> Any:
        return getattr(self.group, "transport", None)

    def _parameter(self, path: str, value: Tensor) -> str | None:
        """Return which parameter an entry of a state holds rows of, if any."""
        shapes = self.sharding.slices.shapes
        name = _parameter(path, list(shapes))
        return name if name is not None and value.dim() == len(shapes[name]) else None

    def _spread(self, path: str, rows: Tensor) -> Any:
        """Return the whole of which these are a rank's rows."""
        from torch.distributed.tensor import DTensor, Shard

        shapes = self.sharding.slices.shapes
        shape = shapes[_parameter(path, list(shapes)) or ""]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            rows.contiguous(), self.sharding.mesh, (Shard(0),), run_check=False,
            shape=shape, stride=stride,
        )  # fmt: skip


def _parameter(path: str, names: list[str]) -> str | None:
    """Return which parameter an entry of a state belongs to, if any."""
    for field in _FIELDS:
        if path.startswith(f"state.{field}."):
            return path.removeprefix(f"state.{field}.")
    match = re.fullmatch(r"state\.optimizer\.(\d+)\..+", path)
    return names[int(match[1])] if match else None


def _digest(path: Path) -> bytes:
    whole = hashlib.sha256()
    for file in sorted(path.iterdir()):
        with file.open("rb") as opened:
            whole.update(file.name.encode() + hashlib.file_digest(opened, "sha256").digest())
    return whole.digest()


def _text(value: bytes) -> Tensor:
    return torch.tensor(list(value), dtype=torch.uint8)


def _bytes(text: Tensor) -> bytes:
    return bytes(text.tolist())
