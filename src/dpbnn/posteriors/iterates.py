"""Stored iterates of a Markov chain."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor, nn

from dpbnn.posteriors.evaluate import Draws, Inputs
from dpbnn.posteriors.gaussian import check_like
from dpbnn.posteriors.iterate_file import IterateStore, IterateWriter
from dpbnn.posteriors.low_rank import LowRankPosterior
from dpbnn.posteriors.posterior import Posterior


class IteratePosterior(Posterior):
    """Equal weight on every stored iterate.

    `predict(x, samples)` uses all iterates if there are no more than `samples`, and otherwise that
    many, evenly spaced along the chain; nothing is random. Iterates are read from the file as they
    are needed; on a GPU they stay there between predictions where they take no more than a quarter
    of its free memory.

    Args:
        model: the network; its own values are used for parameters that are not stored.
        likelihood: see `Posterior`.
        iterates: the store, or the path of its file.
        **record: privacy, prior and settings; see `Posterior`.
    """

    kind = "iterates"
    parts = ("iterates",)
    read = staticmethod(IterateStore)

    def __init__(
        self,
        model: nn.Module,
        likelihood: object,
        iterates: IterateStore | str | os.PathLike[str],
        **record: Any,
    ) -> None:
        super().__init__(model, likelihood, **record)
        if not isinstance(iterates, IterateStore):
            iterates = IterateStore(iterates)
        like = dict(self.model.named_parameters())
        shapes = {n: torch.empty(s, device="meta") for n, s in iterates.shapes.items()}
        check_like(shapes, like, "iterates")
        if not len(iterates):
            raise ValueError(
                f"{iterates.path} holds no iterates yet; train longer, or burn in less."
            )
        self.iterates = iterates
        self._resident: tuple[list[int], dict[str, Tensor]] | None = None

    @classmethod
    def of_draws(
        cls,
        model: nn.Module,
        likelihood: object,
        draws: Mapping[str, Tensor],
        folder: str | os.PathLike[str] | None = None,
        **record: Any,
    ) -> Self:
        """Write draws to a file, and return the posterior that has equal weight on each.

        Args:
            model: see the class.
            likelihood: see the class.
            draws: parameters by name, draws first.
            folder: where the file goes; by default a temporary one, which goes with the posterior.
            **record: see the class.
        """
        made = None if folder else TemporaryDirectory(prefix="dpbnn-", ignore_cleanup_errors=True)
        path = Path(made.name if made else str(folder)) / "iterates.safetensors"
        path.unlink(missing_ok=True)
        count = len(next(iter(draws.values())))
        with IterateWriter(path, {n: values[0] for n, values in draws.items()}, count) as writer:
            for place in range(count):
                writer.append({name: values[place] for name, values in draws.items()})
        posterior = cls(model, likelihood, path, **record)
        if made:
            weakref.finalize(posterior, made.cleanup)
        return posterior

    def to(self, device: torch.device | str) -> Self:
        """Move the posterior to a device, in place."""
        self._resident = None
        return super().to(device)

    def __getstate__(self) -> dict[str, Any]:
        """Serialise the path of the iterates, which must still be there when it is read."""
        return {**vars(self), "_resident": None}

    def summary(self, rank: int = 20) -> LowRankPosterior:
        """Return a Gaussian of low rank plus diagonal with the iterates' mean and variances.

        Args:
            rank: number of deviations kept, those of evenly spaced iterates.
        """
        count = len(self.iterates)
        if not 2 <= rank <= count:
            raise ValueError(f"rank={rank} must be from 2 to the number of iterates, {count}.")
        mean = {n: torch.zeros(s, dtype=torch.double) for n, s in self.iterates.shapes.items()}
        variance = {name: torch.zeros_like(total) for name, total in mean.items()}
        for i in range(count):
            for name, value in self.iterates.read([i]).items():
                mean[name] += value[0].double() / count
        for i in range(count):
            for name, value in self.iterates.read([i]).items():
                variance[name] += (value[0].double() - mean[name]).square() / (count - 1)
        rows = [self.iterates.read([i]) for i in evenly(count, rank)]
        like = dict(self.model.named_parameters())
        summary = LowRankPosterior(
            self.model,
            self.likelihood,
            {name: total.to(like[name].dtype) for name, total in variance.items()},
            {
                name: torch.cat([row[name] - centre for row in rows]).to(like[name].dtype)
                for name, centre in mean.items()
            },
            privacy=self.privacy,
            prior=self.prior,
            settings=self.settings,
        )
        for name, centre in mean.items():
            summary.model.get_parameter(name).copy_(centre)
        return summary

    def _draws(
        self, samples: int, generator: torch.Generator, inputs: Inputs
    ) -> tuple[nn.Module, Draws]:
        positions = evenly(len(self.iterates), min(samples, len(self.iterates)))
        taken = 0

        def take(count: int) -> dict[str, Tensor]:
            nonlocal taken
            begin, taken = taken, taken + count
            if self._keep(positions):
                assert self._resident is not None
                return {n: t[begin:taken] for n, t in self._resident[1].items()}
            return self._weights(positions[begin:taken])

        sizes = sum(p.numel() for n, p in self._stored().items())
        return self.model, Draws(count=len(positions), numbers=sizes, take=take)

    def _stored(self) -> dict[str, Tensor]:
        return {name: self.model.get_parameter(name) for name in self.iterates.names}

    def _weights(self, positions: list[int]) -> dict[str, Tensor]:
        read = self.iterates.read(positions)
        return {name: read[name].to(p.device, p.dtype) for name, p in self._stored().items()}

    def _keep(self, positions: list[int]) -> bool:
        """Return whether these iterates are on the GPU, putting them there if there is room."""
        if self.device.type != "cuda":
            return False
        if self._resident is None or self._resident[0] != positions:
            self._resident = None
            size = sum(p.numel() * p.itemsize for p in self._stored().values())
            if 4 * size * len(positions) > torch.cuda.mem_get_info(self.device)[0]:
                return False
            self._resident = positions, self._weights(positions)
        return True


def evenly(count: int, number: int) -> list[int]:
    """Return `number` evenly spaced positions of 0..count-1, the last one included."""
    return [(i + 1) * count // number - 1 for i in range(number)]
