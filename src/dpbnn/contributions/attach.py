"""Attaching a model and a likelihood: validation, then contributions batch by batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpbnn.contributions.dense import (
    ChunkedContributions,
    Contributions,
    Draws,
    UnsupportedModel,
)
from dpbnn.contributions.fallback import replayed
from dpbnn.contributions.recorded import NetworkContributions, same_draws
from dpbnn.contributions.rules import Unit, recorded
from dpbnn.contributions.tape import Discovery, Draw, Key, Tape, replaced_forwards
from dpbnn.likelihoods import Likelihood
from dpbnn.likelihoods import likelihood as named_likelihood
from dpbnn.messages import unquoted
from dpbnn.networks.gaussian import GaussianLayer
from dpbnn.networks.inputs import arguments as as_arguments
from dpbnn.networks.inputs import called, each
from dpbnn.networks.layers import is_whole, registered, rule_of
from dpbnn.networks.sharded import Whole
from dpbnn.privacy.checks import first_line, quoted
from dpbnn.privacy.module_state import Change

Space = Literal["weights", "parameters"]
LikelihoodLike = str | Likelihood | Callable[[Any, Any], Tensor]
DataFree = Mapping[str, Tensor] | Callable[[Draws], Mapping[str, Tensor]]
Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
_PARTS = ("mu", "rho")
_FAILED = (
    "the network or the likelihood raised an error on this batch",
    "run them on public rows of that shape to see more",
)


def _log_prob(likelihood: LikelihoodLike) -> Callable[[Any, Any], Tensor]:
    if isinstance(likelihood, str):
        return named_likelihood(likelihood).log_prob
    if isinstance(likelihood, nn.modules.loss._Loss):
        raise UnsupportedModel(
            f"likelihood={type(likelihood).__name__} is a loss; pass a per-example log-likelihood "
            "such as 'categorical' or 'gaussian', or a function (outputs, y) -> log_prob [batch]."
        )
    if isinstance(likelihood, Likelihood):
        return likelihood.log_prob
    if callable(likelihood):
        return likelihood
    raise TypeError(
        f"likelihood={quoted(likelihood)} has no log_prob; pass 'categorical', 'gaussian', an "
        "object with log_prob(outputs, y), or a function (outputs, y) -> log_prob [batch]."
    )


def describe(model: nn.Module, path: str) -> str:
    """Return a module's dotted path and class."""
    module, found = model, ""
    for part in path.split(".") if path else []:
        child = module._modules.get(part)
        if child is None:
            break
        module, found = child, f"{found}.{part}".strip(".")
    return f"{found or 'the model'!r} ({type(module).__name__})"


def _flags(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def _gaussian(model: nn.Module) -> dict[str, GaussianLayer]:
    return {path: m for path, m in model.named_modules() if isinstance(m, GaussianLayer)}


def refuse_coupling(model: nn.Module) -> None:
    """Raise for modules that mix examples or keep statistics of the batch."""
    for path, module in model.named_modules():
        batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if batch and (module.training or module.running_mean is None):
            raise UnsupportedModel(
                f"{describe(model, path)} mixes the examples of a batch; replace it by "
                f"torch.nn.GroupNorm(groups, {module.num_features}), or call .eval() on it."
            )
        instance = isinstance(module, nn.modules.instancenorm._InstanceNorm)
        if instance and module.training and module.track_running_stats:
            raise UnsupportedModel(
                f"{describe(model, path)} keeps running statistics of the data; use "
                "track_running_stats=False or torch.nn.GroupNorm."
            )


def refuse_changes(changes: list[Change]) -> None:
    """Raise where a forward pass or a log-probability has left something behind."""
    if changes:
        owner, kind, attribute = changes[0]
        raise UnsupportedModel(
            f"{owner} changes its {kind} {attribute!r} when it is called; data would stay there "
            "without noise. Keep nothing of a batch: make it anew in every call, set it once in "
            "__init__, or use torch.nn.GroupNorm instead of running statistics."
        )


class Attached:
    """A model and a likelihood that yield contributions; see `attach`.

    Attributes:
        held: the model where the attachment keeps it alive; None where it lives with the model.
        parts: how the model is run where its parameters are spread over ranks.
    """

    held: nn.Module | None = None
    parts: Whole = Whole()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike,
        *,
        space: Space = "weights",
        draws: int = 1,
        data_free: DataFree | None = None,
        generator: torch.Generator | None = None,
        microbatch_size: int | None = None,
    ) -> None:
        if space not in ("weights", "parameters"):
            raise ValueError(f"space={space!r} is not 'weights' or 'parameters'; pass one of them.")
        if draws < 1:
            raise ValueError(f"draws={draws} must be at least 1; pass draws=1.")
        if microbatch_size is not None and microbatch_size < 1:
            raise ValueError(f"microbatch_size={microbatch_size} must be at least 1, or None.")
        self._model = weakref.ref(model)
        self.likelihood, self.log_prob = likelihood, _log_prob(likelihood)
        self.space, self.data_free, self.generator = space, data_free, generator
        self.microbatch_size = microbatch_size
        self.draws = draws if _gaussian(model) else 1
        refuse_coupling(model)
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise UnsupportedModel(
                    f"{describe(model, path)} is scripted, so its layers cannot be recorded; "
                    "attach the module as it was before torch.jit."
                )
        self._flags = _flags(model)
        if not any(self._flags):
            raise UnsupportedModel(
                f"{type(model).__name__} has no trainable parameter; set requires_grad."
            )
        self._shapes: dict[str, torch.Size] = {}
        self._released = self._released_names(model)
        self.units = self._units(model)
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        self._layouts: dict[Any, dict[Key, str]] = {}

    @property
    def model(self) -> nn.Module:
        """Return the model."""
        model = self._model()
        if model is None:
            raise RuntimeError("the attached model no longer exists; keep a reference to it.")
        return model

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Return the names and shapes that contributions have."""
        return dict(self._shapes)

    def _released_names(self, model: nn.Module) -> dict[int, str]:
        """Return the released name of every trainable parameter, by its id."""
        drawn = {
            id(getattr(layer, f"{name}_{part}"))
            for layer in _gaussian(model).values()
            for name in layer.drawn_names()
            for part in _PARTS
        }
        released = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                weight = self.space == "weights" and id(parameter) in drawn
                out = name.rpartition("_")[0] if weight else name
                released[id(parameter)] = out
                self._shapes[out] = parameter.shape
        return released

    def _names(self, module: nn.Module) -> dict[str, list[str | None]]:
        """Return the released names of a module's parameters; see `Unit`."""
        released = {name: self._released.get(id(p)) for name, p in module.named_parameters()}
        names = {own: [name] for own, name in released.items()}
        if isinstance(module, GaussianLayer):
            names = {n: [released[f"{n}_{p}"] for p in _PARTS] for n in module.drawn_names()}
            if self.space == "weights":
                names = {own: [mu or rho] for own, (mu, rho) in names.items()}
        return {own: every for own, every in names.items() if any(every)}

    def _units(self, model: nn.Module) -> list[Unit]:
        units: list[Unit] = []
        seen: set[int] = set()

        def walk(module: nn.Module, path: str) -> None:
            if id(module) in seen:
                return
            seen.add(id(module))
            rule, names = rule_of(module), self._names(module)
            if isinstance(module, GaussianLayer) and names and rule is None:
                raise UnsupportedModel(
                    f"{describe(model, path)} has its own forward; record GaussianLinear "
                    "or GaussianConv2d as they are."
                )
            own = any(id(p) in self._released for p in module.parameters(recurse=False))
            if own or (names and is_whole(module)):
                units.append(Unit(path, rule, names))
                seen.update(id(m) for m in module.modules())
            elif rule is not None and registered(module).always:
                units.append(Unit(path, rule, {}))
            else:
                for name, child in module.named_children():
                    walk(child, f"{path}.{name}".strip("."))

        walk(model, "")
        return units

    def draw(self) -> list[Draw]:
        """Return fresh standard normal draws, one set of weights per draw."""
        layers = _gaussian(self.model).items()
        return [{p: layer.draw(self.generator) for p, layer in layers} for _ in range(self.draws)]

    def _forward(self, recorder: Tape | Discovery, x: tuple[Tensor, ...], y: Tensor) -> Tensor:
        model, forwards = self.model, {}
        for unit in self.units:
            module = model.get_submodule(unit.path)
            made = replayed if unit.rule is None else recorded
            forwards[module] = made(module, unit, recorder)
        torch.clear_autocast_cache()  # it would hold the weights of an earlier step
        with replaced_forwards(forwards):
            log_prob = self.log_prob(called(model, x), y)
        tensor = isinstance(log_prob, Tensor)
        if not tensor or log_prob.shape != (recorder.batch,):
            kind = type(log_prob).__name__
            found = f"a tensor of {log_prob.dim()} dimensions" if tensor else kind
            raise UnsupportedModel(
                f"likelihood {self.likelihood!r} returned {found} for a batch; "
                "return one log-probability per example, without a mean or sum over the batch."
            )
        return log_prob

    def record(
        self,
        x: tuple[Tensor, ...],
        y: Tensor,
        draws: list[Draw],
        data_free: Mapping[str, Tensor],
        found: Mapping[Key, str],
    ) -> NetworkContributions:
        """Return the contributions of a batch at given draws."""
        model, batch = self.model, len(y)
        sites = []
        for draw in draws if batch else []:
            tape = Tape(batch, draw, found, lambda path: describe(model, path))
            with torch.enable_grad(), self.parts.gathered():
                sites += tape.sites(self._forward(tape, x, y), -1 / len(draws))
        return NetworkContributions(
            sites, batch, self._shapes, self.device, self.dtype, data_free, public(draws)
        )

    def discover(self, x: tuple[Tensor, ...], y: Tensor, draw: Draw) -> Discovery:
        """Return the shapes of all layer outputs for a batch."""
        discovery = Discovery(len(y), draw)
        with torch.no_grad(), self.parts.gathered():
            self._forward(discovery, x, y)
        return discovery

    def _constants(self, given: DataFree | None, draws: list[Draw]) -> dict[str, Tensor]:
        given = self.data_free if given is None else given
        constants = dict(given(public(draws)) if callable(given) else given or {})
        for name, value in constants.items():
            if name not in self._shapes or value.shape != self._shapes[name]:
                raise ValueError(
                    f"data_free[{name!r}] has shape {tuple(value.shape)}; contributions have "
                    f"{ {n: tuple(s) for n, s in self._shapes.items()} }."
                )
        return constants

    def _signature(self, x: tuple[Tensor, ...], y: Tensor) -> Any:
        kinds = [(t.dim(), t.dtype) for t in (*x, y)]
        names = getattr(x, "names", ())
        return (
            *kinds,
            names,
            *((type(module), module.training) for module in self.model.modules()),
        )

    def probe(self, x: Inputs, y: Tensor) -> None:
        """Check on a few public examples that contributions are per example and complete."""
        from dpbnn.contributions.probe import probe

        arguments = as_arguments(x)
        signature = self._signature(arguments, y)
        try:
            self._layouts[signature] = probe(self, arguments, y)
        except (RuntimeError, IndexError, TypeError, AttributeError) as error:
            shapes = [tuple(t.shape) for t in (*arguments, y)]
            raise UnsupportedModel(
                f"{type(self.model).__name__} and the likelihood {self.likelihood!r} cannot be run "
                f"and recorded on probe examples of shapes {shapes} ({first_line(error)}); give "
                f"inputs and targets that fit them, or modules that run as they are."
            ) from error

    def __call__(
        self,
        x: Inputs,
        y: Tensor,
        data_free: DataFree | None = None,
        draws: list[Draw] | None = None,
    ) -> Contributions:
        """Return the contributions of a batch.

        Args:
            x: the model's input, a tuple of its positional inputs, or a mapping of named ones.
            y: targets, one row per example.
            data_free: gradients inside the clip for this batch, instead of those attached.
            draws: of the weights, from `draw`; fresh ones by default.
        """
        model, arguments = self.model, as_arguments(x)
        if not all(isinstance(t, Tensor) and t.dim() for t in (*arguments, y)):
            kinds = [type(t).__name__ for t in (*arguments, y)]
            raise TypeError(
                f"inputs and targets are {kinds}; give tensors with a row per example, or a tuple "
                f"or a mapping of such inputs."
            )
        if torch.is_inference_mode_enabled() or any(t.is_inference() for t in (*arguments, y)):
            raise RuntimeError(
                "contributions need gradients, which torch.inference_mode() forbids; use "
                "torch.no_grad() instead."
            )
        if _flags(model) != self._flags:
            raise UnsupportedModel(
                "parameters were frozen, unfrozen, added or removed after attaching; attach again."
            )
        refuse_coupling(model)
        lengths = {t.shape[0] for t in (*arguments, y)}
        if len(lengths) != 1:
            raise ValueError(f"inputs and targets have {sorted(lengths)} rows; give equally many.")
        signature = self._signature(arguments, y)
        if signature not in self._layouts:
            from dpbnn.contributions.probe import synthetic

            self.probe(*synthetic(model, arguments, y))
        found, draws = self._layouts[signature], self.draw() if draws is None else draws
        constants = self._constants(data_free, draws)

        def part(first: int, last: int) -> NetworkContributions:
            rows = slice(first, last)
            with unquoted(*_FAILED, let=(UnsupportedModel,)):
                chosen = each(lambda t: t[rows], arguments)
                return self.record(chosen, y[rows], draws, constants, found)

        size = self.microbatch_size
        if size is None or len(y) <= size:
            return part(0, len(y))
        return ChunkedContributions(
            same_draws(part, self.device), len(y), size, self._shapes, self.device,
            self.dtype, self.dtype, public(draws),
        )  # fmt: skip


def public(draws: list[Draw]) -> Draws:
    """Return draws by released weight path, as `contributions.draws` shows them."""
    return [
        {f"{p}.{name}".strip("."): e for p, layer in draw.items() for name, e in layer.items()}
        for draw in draws
    ]


def attach(
    model: nn.Module,
    likelihood: LikelihoodLike,
    *,
    space: Space = "weights",
    draws: int = 1,
    data_free: DataFree | None = None,
    generator: torch.Generator | None = None,
    microbatch_size: int | None = None,
) -> Attached:
    """Return an object that turns batches (x, y) into contributions.

    An example contributes the gradient of its negative log-likelihood with respect to the
    trainable parameters. What cannot be taken per example is refused here, or by the probe that
    runs before the first batch, with an error that names the module and the cure.

    Args:
        model: any network; it is left as it was.
        likelihood: "categorical", "gaussian", an object with `log_prob(outputs, y)`, or a function
            (outputs, y) -> log-probability per example.
        space: for Gaussian layers, gradients with respect to the drawn "weights" or to the
            "parameters" (mu, rho) jointly.
        draws: number of weight draws that an example's gradient is the mean of.
        data_free: data-independent gradients added to every example's contribution inside the
            clip, by released name; or a function of the draws that returns them.
        generator: draws the weights of Gaussian layers; None is their own.
        microbatch_size: most examples recorded at once.
    """
    attached = Attached(
        model, likelihood, space=space, draws=draws, data_free=data_free, generator=generator,
        microbatch_size=microbatch_size,
    )  # fmt: skip
    attached.held = model
    return attached


_attachments: weakref.WeakKeyDictionary[nn.Module, dict[Any, Attached]] = (
    weakref.WeakKeyDictionary()
)
_MOST_ATTACHMENTS = 8


def contributions(
    model: nn.Module,
    likelihood: LikelihoodLike,
    x: Inputs,
    y: Tensor,
    *,
    data_free: DataFree | None = None,
    **options: Any,
) -> Contributions:
    """Return the contributions of one batch; the attachment is remembered as long as the model.

    Args:
        model: any network.
        likelihood: as in `attach`.
        x: the model's input, a tuple of its positional inputs, or a mapping of named ones.
        y: targets, one row per example.
        data_free: as in `attach`.
        options: further arguments of `attach`.
    """
    known = _attachments.setdefault(model, {})
    identity = likelihood if isinstance(likelihood, str) else id(likelihood)
    given = sorted((k, id(v) if k == "generator" else v) for k, v in options.items())
    key = (identity, *_flags(model), *given)
    if key not in known:
        if len(known) >= _MOST_ATTACHMENTS:
            known.pop(next(iter(known)))
        known[key] = Attached(model, likelihood, **options)
    return known[key](x, y, data_free)
