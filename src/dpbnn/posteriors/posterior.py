"""What every posterior can do: predict, and be saved."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dpbnn.likelihoods import full
from dpbnn.likelihoods import likelihood as named_likelihood
from dpbnn.messages import unquoted
from dpbnn.networks.inputs import arguments, each
from dpbnn.notebook import Shown
from dpbnn.posteriors import folder as folders
from dpbnn.posteriors.evaluate import Draws, Inputs, evaluate
from dpbnn.predictive import Predictive
from dpbnn.storage import new_folder


class Posterior(Shown, ABC):
    """A distribution over the weights of a network.

    Args:
        model: the network; copied.
        likelihood: "categorical", "gaussian", or a likelihood object.
        privacy: the privacy statement, passed on as it is (something with `to_dict`, or a mapping).
        prior: the prior, for the record (a dataclass, or a mapping).
        settings: settings of the training, for the record (JSON values).
    """

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Posterior]]] = {}
    parts: ClassVar[tuple[str, ...]] = ()  # attributes and arguments that are tensors by name
    read: ClassVar[Callable[[Path], Any]] = staticmethod(load_file)  # a part's file

    def __init__(
        self,
        model: nn.Module,
        likelihood: object,
        *,
        privacy: Any = None,
        prior: Any = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.likelihood = (
            named_likelihood(likelihood) if isinstance(likelihood, str) else likelihood
        )
        self.privacy = privacy
        self.prior = prior
        self.settings = dict(settings or {})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):
            Posterior.kinds[cls.kind] = cls

    def __str__(self) -> str:
        count = sum(tensor.numel() for tensor in self.model.parameters())
        about = f"{type(self).__name__}: {count} weights of {type(self.model).__name__}"
        return about if self.privacy is None else f"{about}\n{self.privacy}"

    @abstractmethod
    def _draws(
        self, samples: int, generator: torch.Generator, inputs: Inputs
    ) -> tuple[nn.Module, Draws]:
        """Return a network and draws of its tensors."""

    def _parts(self) -> dict[str, Any]:
        """Return the constructor's tensors (mappings or an iterate store), one file each."""
        return {name: getattr(self, name) for name in self.parts}

    def _options(self) -> dict[str, Any]:
        """Return the constructor's other arguments, as JSON values."""
        return {}

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why the spread of predictions may be too small, in words; empty where nothing is known.

        They follow from public settings of the training alone.
        """
        return tuple(self.settings.get("caveats", ()))

    @property
    def device(self) -> torch.device:
        """Where predictions are computed."""
        tensor = next(self.model.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def to(self, device: torch.device | str) -> Self:
        """Move the posterior to a device, in place."""
        self.model.to(device)
        for name, part in self._parts().items():
            if isinstance(part, Mapping):
                setattr(self, name, {key: tensor.to(device) for key, tensor in part.items()})
        return self

    def predict(
        self,
        x: Any,
        samples: int = 100,
        *,
        batch_size: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        memory_limit: int | None = None,
        precision: str = "high",
    ) -> Predictive:
        """Return the predictive distribution at inputs x, 1/S sum_s p(y | x, w_s).

        All draws are evaluated in one vectorised pass, in chunks that fit in memory. A seed gives
        the same draws on a device whatever the chunks.

        Args:
            x: inputs, examples first; a tuple for a network of several arguments, or a mapping of
                their names.
            samples: number S of weight draws; posteriors with fewer use all they have.
            batch_size: examples per pass; as many as fit by default.
            seed: of the draws; fresh ones by default.
            generator: draws the weights, instead of a seed.
            memory_limit: bytes for weights and activations of a pass; half of the free GPU memory
                by default, 1 GiB on the CPU.
            precision: of float32 matrix products on a GPU. "high" is TF32, five times as fast, with
                relative errors of 1e-3 (as torch's convolutions have by default); "highest" is full
                float32.
        """
        limits = {"batch_size": batch_size, "memory_limit": memory_limit, "precision": precision}
        found = self.outputs(x, samples, seed=seed, generator=generator, **limits)
        return self._predictive(found)

    def outputs(
        self,
        x: Any,
        samples: int = 100,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        **limits: Any,
    ) -> Tensor:
        """Return the network's raw outputs at every draw, [S, N, ...]; see `predict`."""
        if samples < 1:
            raise ValueError(f"samples={samples} must be at least 1; try samples=100.")
        if seed is not None and generator is not None:
            raise ValueError("seed and generator are both given; pass one of them.")
        if generator is None:
            generator = torch.Generator(self.device)
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
        inputs = self._inputs(x)
        model, draws = self._draws(samples, generator, inputs)
        return evaluate(model, draws, inputs, **limits)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the posterior to a folder: manifest.json and safetensors files; read by `load`.

        The folder appears complete or not at all.

        Args:
            folder: where to; its parent must exist.
            overwrite: replace a posterior that is there already.
        """
        with new_folder(Path(folder), "posterior", overwrite=overwrite) as partial:
            folders.write(self, partial)

    def _predictive(self, outputs: Tensor) -> Predictive:
        return predictive_from(self.likelihood, outputs)

    def _inputs(self, x: Any) -> Inputs:
        tensor = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        dtype = torch.get_default_dtype() if tensor is None else tensor.dtype
        with unquoted("x cannot be read as tensors", "give a tensor or an array", ValueError):
            inputs = each(lambda part: torch.as_tensor(part, device=self.device), arguments(x))
        if len({part.shape[:1] for part in inputs}) != 1 or not (
            inputs[0].dim() and len(inputs[0])
        ):
            shapes = [list(part.shape) for part in inputs]
            raise ValueError(
                f"x has shapes {shapes}; pass at least one example, examples on the first axis."
            )
        return each(lambda part: part.to(dtype) if part.is_floating_point() else part, inputs)


def predictive_from(likelihood: object, outputs: Tensor) -> Predictive:
    """Return the predictive of a likelihood and raw network outputs [S, N, ...].

    Args:
        likelihood: anything with `predictive(outputs)`.
        outputs: what the network returned for every posterior sample. A last axis of size 1 is
            dropped in regression.
    """
    return full(likelihood).predictive(outputs)
