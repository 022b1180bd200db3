"""The loop of methods that visit raw records; not private, so that private plans are refused."""

from __future__ import annotations

from typing import Any

import torch

from dpbnn.contributions.dense import DenseContributions
from dpbnn.messages import unquoted
from dpbnn.methods.method import OpenProcess
from dpbnn.resume import FAILED, Run


class OpenRun(Run):
    """Visits records without a gate. The ledger counts a step as one without privacy."""

    process: OpenProcess[Any]

    def __post_init__(self) -> None:
        if self.plan.private:
            raise ValueError(
                f"{type(self.method).__name__} is not private: it visits raw records; use "
                f"dpbnn.SEP(...) with this plan, or dpbnn.open_plan(...)"
            )
        if self.rows.x is None and not getattr(self.method, "shared", True):
            raise ValueError(
                f"{type(self.method).__name__} keeps a factor of every record, and the data is not "
                f"held in memory; use dpbnn.ADF(...), or raise memory= of its DataSource"
            )
        super().__post_init__()

    def train(self, progress: bool) -> None:
        """Run the remaining steps; an interrupt leaves a checkpoint to resume from."""
        with self.steps(progress) as done:
            seed = torch.default_generator.initial_seed()
            for batch in self.rows.ahead(self.batches(), seed):
                self.reserve()
                self.gate(DenseContributions(torch.zeros(len(batch), 1)), records=batch)
                torch.randint(2**62, ())  # as every step of a run draws a seed
                x, y, keep = self.rows.take(batch)
                if keep is not None:
                    x, y, batch = x[keep], y[keep], batch[keep.cpu()]
                with unquoted(*FAILED):
                    self.state = self.process.visit(self.state, x, y, batch)
                self.step += 1
                done()
