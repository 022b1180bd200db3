"""Methods on networks whose parameters are spread over ranks: each rank updates its own rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dpbnn.contributions.attach import describe
from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.methods.descent import Descent
from dpbnn.methods.method import Method, Problem, Process
from dpbnn.methods.sgd import SGD, SGDProcess
from dpbnn.methods.sgld import (
    SGHMC,
    SGLD,
    LangevinProcess,
    LangevinState,
    SGHMCProcess,
    SGLDProcess,
)
from dpbnn.networks.sharded import Sharding
from dpbnn.posteriors.shards import SliceWriter
from dpbnn.privacy.group import Group
from dpbnn.privacy.plan import Plan

__all__ = ["check_sharded", "start_sharded"]

_FILE = "iterates.safetensors"


class ShardedLangevin(LangevinProcess):
    """What SGLD and SGHMC do otherwise: all ranks write one file, each its own rows.

    The temperature of the noise is not measured.
    """

    def begin(self) -> LangevinState:
        """Return the state before the first step."""
        state = super().begin()
        return dataclasses.replace(state, earlier=state.earlier[:0])

    def _measure(
        self, state: LangevinState, release: Mapping[str, Tensor], which: str, eta: float
    ) -> None:
        pass

    def update(self, state: LangevinState, release: Mapping[str, Tensor]) -> LangevinState:
        """Take a Langevin step; see `LangevinProcess.update`."""
        return dataclasses.replace(super().update(state, release), pairs=0)

    def ready(self, state: LangevinState) -> None:
        """Let rank 0 make the file, and reserve its disk space."""
        self._open_writer(state)

    def _open_writer(self, state: LangevinState) -> Any:
        if self.writer is None:
            parts = self.problem.parts
            assert isinstance(parts, Sharding)
            folder = self.settings.folder or self.problem.folder
            assert folder is not None  # see `check_sharded`
            path, stored = Path(folder) / _FILE, self._stored(state.steps)
            if state.steps and not stored and not parts.group.rank:
                path.unlink(missing_ok=True)
            self.writer = SliceWriter(
                path, parts, self.kept * self.settings.chains, self.settings.dtype, stored,
                self.problem.folder is not None,
            )  # fmt: skip
        return self.writer

    def share(self, state: LangevinState, group: Group) -> None:
        """Wait until all ranks have written their rows."""
        self.iterates = self._written(state)
        group.first(lambda: None)


class ShardedSGLD(ShardedLangevin, SGLDProcess):
    """SGLD on a sharded network."""


class ShardedSGHMC(ShardedLangevin, SGHMCProcess):
    """SGHMC on a sharded network."""


def check_sharded(method: Method, plan: Plan, folder: Path | None, persons: bool) -> None:
    """Raise for what sharded networks do not take.

    Args:
        method: the method.
        plan: of the run.
        folder: of the run, if any.
        persons: whether there are units or observers.
    """
    refused = None
    if persons:
        refused = "units, observers: do not take a sharded network; use a plain one"
    elif type(method) not in (SGD, SGLD, SGHMC):
        refused = f"{type(method).__name__}: does not take a sharded network; use SGD, SGLD, SGHMC"
    elif not plan.relation.public_size:
        refused = "relation='add-remove': does not take a sharded network; use 'zero-out'"
    elif isinstance(method, SGD) and method.keep:
        refused = f"keep={method.keep}: of a sharded network one point is kept; use SGLD"
    elif isinstance(method, Descent) and not (
        isinstance(method.optimizer, str) and isinstance(method.schedule, str | None)
    ):
        refused = (
            "optimizer, schedule: those of a sharded network go by name, such as 'adam' and "
            "'cosine', since one of your own may need whole tensors"
        )
    elif isinstance(method, SGLD | SGHMC):
        if method.chains > 1:
            refused = f"chains={method.chains}: of a sharded network one chain is run"
        elif not plan.private:
            refused = "plan: a sharded chain has the noise of a private plan; use a plain network"
        elif folder is None and method.folder is None:
            refused = (
                "out: missing; all ranks write the iterates of a sharded network to one file, so "
                "give a folder that all of them see"
            )
    if refused is not None:
        raise ValueError(refused)


def start_sharded(method: Method, problem: Problem) -> Process[Any]:
    """Return the process that trains a sharded network."""
    process: Process[Any]
    if isinstance(method, SGLD):
        process = ShardedSGLD(method, problem)
    elif isinstance(method, SGHMC):
        process = ShardedSGHMC(method, problem)
    else:
        assert isinstance(method, SGD)
        process = SGDProcess(method, problem, problem.attach())
    for unit in process.attached.units:
        if unit.rule is None:
            raise UnsupportedModel(
                f"{describe(problem.model, unit.path)} has no rule of its own, which layers of a "
                f"sharded network need; register one (dpbnn.networks.layers.register), or use "
                f"torch's layers"
            )
    return process
