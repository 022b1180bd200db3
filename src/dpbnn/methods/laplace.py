"""How far the truth may be from a trained network: Laplace's approximation with noise and clip.

Everything here is post-processing: it sees released weights, public inputs and settings, no data.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.contributions.attach import attach
from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.likelihoods import full
from dpbnn.likelihoods.base import Outcomes
from dpbnn.methods.method import Problem, name_of
from dpbnn.networks.sharded import Sharding
from dpbnn.networks.standard import LearnedNoise
from dpbnn.priors import Gaussian
from dpbnn.privacy.checks import first_line

LARGEST = 250_000  # weights, of which there are as many draws
DRAWS = 100
_POINTS = 1536  # public inputs
_PASSES = 16_384  # public inputs times outcomes, at most
_JOINT = 1600  # weights up to which layers are taken together
_ROWS = 4096  # public inputs times outputs for that, at most
_DENSE = 1024  # inputs of a layer from which they are taken for uncorrelated
_BELIEF = 5.0  # directions that the first prior variance counts for
_ROUNDS = 5  # of learning it


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a Linear layer knows of public inputs.

    Attributes:
        name: of the layer.
        inputs: of the layer, [N, in], with a last column of 1 where it has a bias.
        reach: derivative of the network's outputs by the layer's, [N, K, out].
    """

    name: str
    inputs: Tensor
    reach: Tensor


@dataclasses.dataclass(frozen=True)
class Releases:
    """What a training has released, and how much of it is noise.

    Attributes:
        network: at the released weights.
        problem: of the training.
        slope: E[c r s'] at every public input, [N, K, K]; see `deviations`.
        spread: E[c^2 r r'], likewise.
        noise: variance of the privacy noise.
    """

    network: nn.Module
    problem: Problem
    slope: Tensor
    spread: Tensor
    noise: float

    def told(self, curvature: Tensor, lost: float) -> Tensor:
        """Return the precision of directions, with V in them as large a share of H as in all.

        Args:
            curvature: H/n in these directions.
            lost: trace of V/n.
        """
        n, known = self.problem.n, curvature.clamp(min=0)
        ratio = (1 + _subsampling(self.problem)) * lost / max(float(known.sum()), 1e-300)
        return (n * known).square() / (ratio * n * known + self.noise + 1e-300)

    def moved(self, name: str) -> Tensor:
        """Return how far training has moved weight and bias of a layer, [out, in]."""
        return _joined(self.network, name) - _joined(self.problem.origin, name)


@dataclasses.dataclass(frozen=True)
class Directions:
    """Weights in directions about which the releases tell by themselves.

    Attributes:
        told: precision that the releases give a direction.
        moved: how far training has moved it, likewise.
        forth: returns numbers in these directions, [S, ...], of weights that are shaped like them.
        back: returns weights and biases by layer, [S, out, in], of numbers in these directions.
    """

    told: Tensor
    moved: Tensor
    forth: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], dict[str, Tensor]]


def check(problem: Problem, inputs: Callable[[int], Tensor]) -> None:
    """Raise where `deviations` would, before anything is spent.

    Args:
        problem: of the training.
        inputs: see `SGD`.
    """
    model = problem.origin
    if isinstance(problem.parts, Sharding):
        raise UnsupportedModel("inputs: a sharded network has no bands; leave inputs out")
    layers = [m for m in model.modules() if type(m) is nn.Linear or isinstance(m, LearnedNoise)]
    known = {id(p) for layer in layers for p in layer.parameters()}
    moved = {name: p for name, p in model.named_parameters() if p.requires_grad}
    other = [name for name, p in moved.items() if id(p) not in known]
    size = sum(p.numel() for p in moved.values())
    if other or size > LARGEST:
        why = f"{other[0]!r} is in another one" if other else f"these have {size} weights"
        raise UnsupportedModel(
            f"inputs: bands are for networks of Linear layers with {LARGEST} weights at most, and "
            f"{why}; leave inputs out"
        )
    network = copy.deepcopy(model).double().cpu().eval()
    x, outcomes = _outcomes(network, problem, inputs)
    _layers(network, x[:2], torch.arange(outcomes.scores.shape[-1]))


def deviations(
    model: nn.Module, problem: Problem, clip: float, inputs: Callable[[int], Tensor]
) -> dict[str, Tensor]:
    """Return draws of how far the weights of the truth may be from a network's, by name.

    With J the outputs' derivatives by the weights and y a target that the network says is likely at
    x, a training's average release at other weights w + d has

        mean        H d,       H = n E[c (J' r)(J' s)'],  c the clip's factor
        covariance  V + s^2 I, V = n E[c^2 (J' r)(J' r)'], s^2 that of the privacy noise

    where s is the score and r the slope that `log_prob` hands on. So

        d ~ N(0, P^-1),    P = H (V + s^2 I)^-1 H + I / t^2,

    with V taken for a multiple of H. Networks of more than 1600 weights are taken layer by layer,
    with Kronecker products. The prior variance t^2 of a weight begins at t_0^2, where the function
    varies as much as a likelihood says it can. It goes to the mean square of what training has
    moved, as far as releases tell of that (MacKay's evidence),

        t^2 = (5 t_0^2 + sum_i r_i m_i^2) / (5 + sum_i r_i),   r_i = p_i t^2 / (1 + p_i t^2)

    with m_i the move and p_i the precision by the releases in a direction i. It is never above that
    of the user's prior. What all this leaves out, that training has not reached the mode and that
    the network is not linear, makes standard deviations too small. They are multiplied by 2 for
    classes (1.5 without privacy) and 1.15 for numbers, which was chosen by the coverage of bands on
    simulated tables.

    Reference: Ritter, Botev and Barber, A scalable Laplace approximation for neural networks, 2018;
    Immer, Korzepa and Bauer, Improving predictions of Bayesian neural nets via local linearization,
    2021; MacKay, Bayesian interpolation, 1992; Bernstein and Sheldon, Differentially private
    Bayesian linear regression, 2019 (noise in the likelihood).

    Args:
        model: the network at the released weights.
        problem: of the training.
        clip: of the training.
        inputs: see `SGD`.
    """
    network = copy.deepcopy(model).double().cpu().eval()
    x, outcomes = _outcomes(network, problem, inputs)
    columns = (outcomes.scores != 0).flatten(0, 1).any(0).nonzero()[:, 0]
    scores, slopes = outcomes.scores[..., columns], outcomes.slopes[..., columns]
    factors = _clip_factors(network, problem, x, outcomes, clip)
    kept = outcomes.chances * factors
    slope = torch.einsum("qn,qna,qnb->nab", kept, slopes, scores)
    spread = torch.einsum("qn,qna,qnb->nab", kept * factors, slopes, slopes)
    layers = _layers(network, x, columns)
    releases = Releases(network, problem, slope, spread, _noise(problem, clip))
    if sum(layer.inputs.shape[1] * layer.reach.shape[-1] for layer in layers) <= _JOINT:
        found = [_together(layers, releases)]
    else:
        found = [_apart(layer, releases) for layer in layers]
    precision = 1 / _prior_variance(found, outcomes.variance / _unit_variance(layers, problem))
    if problem.private and isinstance(problem.prior, Gaussian):  # else data may have chosen it
        precision = max(precision, problem.prior.std**-2)
    wider = outcomes.wider[0 if problem.private else 1]
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, Tensor] = {}
    for part in found:
        shape = (DRAWS // 2, *part.told.shape)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        # By way of the weights: directions of which as much is told may turn with any rounding.
        moves = wider * part.forth(normal) / (part.told + precision).sqrt()
        for name, half in part.back(moves).items():
            both = torch.cat([half, -half]).float()  # so that their mean is 0
            drawn |= _split(network.get_submodule(name), name, both)
    return drawn


def _together(layers: list[Layer], releases: Releases) -> Directions:
    """Return what the releases tell about all layers."""
    slope, spread = releases.slope, releases.spread
    count = min(len(slope), _ROWS // slope.shape[-1])
    parts = [
        torch.einsum("nko,ni->nkoi", layer.reach[:count], layer.inputs[:count]) for layer in layers
    ]
    jacobian = torch.cat([part.flatten(2) for part in parts], 2)
    even = (slope + slope.mT)[:count] / 2
    hessian = jacobian.flatten(0, 1).mT @ (even @ jacobian).flatten(0, 1) / count
    lost = (jacobian * (spread[:count] @ jacobian)).sum() / count
    strong, basis = torch.linalg.eigh(hessian)
    moved = torch.cat([releases.moved(layer.name).flatten() for layer in layers])

    def forth(weights: Tensor) -> Tensor:
        return weights @ basis

    def back(moves: Tensor) -> dict[str, Tensor]:
        pieces = (moves @ basis.mT).split([part[0, 0].numel() for part in parts], 1)
        return {
            layer.name: piece.unflatten(1, part.shape[2:])
            for layer, part, piece in zip(layers, parts, pieces, strict=True)
        }

    return Directions(releases.told(strong, float(lost)), forth(moved), forth, back)


def _apart(layer: Layer, releases: Releases) -> Directions:
    """Return what the releases tell about a layer if others stay, by a Kronecker product."""
    outer, lost = (
        torch.einsum("nka,nkl,nlb->ab", layer.reach, part, layer.reach) / len(part)
        for part in (releases.slope, releases.spread)
    )
    strong, down = torch.linalg.eigh((outer + outer.mT) / 2)
    values, across = _eigen(layer.inputs)
    total = float(lost.trace() * values.sum())
    told = releases.told(strong[:, None] * values, total)

    def forth(weights: Tensor) -> Tensor:
        return down.mT @ weights @ across

    def back(moves: Tensor) -> dict[str, Tensor]:
        return {layer.name: down @ moves @ across.mT}

    return Directions(told, forth(releases.moved(layer.name)), forth, back)


def _prior_variance(found: list[Directions], first: float) -> float:
    """Return t^2 of `deviations`, from its first value."""
    variance = first
    for _ in range(_ROUNDS):
        learned, weight = _BELIEF * first, _BELIEF
        for part in found:
            share = part.told * variance / (1 + part.told * variance)
            learned += float((share * part.moved.square()).sum())
            weight += float(share.sum())
        variance = learned / weight
    return variance


def _joined(network: nn.Module, name: str) -> Tensor:
    """Return weight and bias of a Linear layer side by side, [out, in]."""
    layer: Any = network.get_submodule(name)
    parts = [layer.weight] if layer.bias is None else [layer.weight, layer.bias[:, None]]
    return torch.cat(parts, 1).detach().double().cpu()


def _split(layer: nn.Module, name: str, joined: Tensor) -> dict[str, Tensor]:
    """Return weight and bias by name, from both side by side [..., out, in]."""
    parts = joined.split([layer.in_features, joined.shape[-1] - layer.in_features], -1)  # type: ignore[arg-type, operator]
    found = {f"{name}.weight".strip("."): parts[0].contiguous()}
    if layer.bias is not None:
        found[f"{name}.bias".strip(".")] = parts[1][..., 0].contiguous()
    return found


def _outcomes(
    network: nn.Module, problem: Problem, inputs: Callable[[int], Tensor]
) -> tuple[Tensor, Outcomes]:
    """Return public inputs, and what targets may be there."""
    likelihood = full(problem.likelihood)
    with torch.no_grad():
        try:
            few = inputs(2).double()
            outputs = network(few)
        except Exception as error:
            raise ValueError(
                f"inputs={name_of(inputs)}: must be a function of a number that returns so many "
                f"inputs of the network as a tensor ({first_line(error)})"
            ) from None
        found = likelihood.outcomes(outputs)
        if found is None:
            raise UnsupportedModel(
                f"inputs: bands are for one target, classes or a number, and "
                f"{type(problem.likelihood).__name__} has none with these outputs; leave inputs out"
            )
        count = max(64, min(_POINTS, _PASSES // len(found.chances)))
        x = inputs(count).double()
        found = likelihood.outcomes(network(x))
    assert found is not None
    return x, found


def _clip_factors(
    network: nn.Module, problem: Problem, x: Tensor, outcomes: Outcomes, clip: float
) -> Tensor:
    """Return min(1, clip / norm) of an example's gradient for every outcome, [Q, N]."""
    if not problem.private:
        return torch.ones_like(outcomes.chances)
    attached = attach(network, copy.deepcopy(problem.likelihood))
    repeated = x.repeat(len(outcomes.targets), *[1] * (x.dim() - 1))
    norms = attached(repeated, outcomes.targets.flatten(0, 1)).norms()
    return (clip / norms.double().clamp(min=1e-300)).clamp(max=1).view_as(outcomes.chances)


def _layers(network: nn.Module, x: Tensor, columns: Tensor) -> list[Layer]:
    """Return the Linear layers in their order, as public inputs see them."""
    inputs: dict[str, Tensor] = {}
    added: dict[str, Tensor] = {}

    def watch(name: str, module: nn.Linear) -> Callable[..., Tensor]:
        def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            a = args[0].detach()
            if a.dim() != 2 or name in inputs:
                raise UnsupportedModel(
                    f"inputs: bands need layers that see each example once, and {name!r} sees "
                    f"several positions; leave inputs out"
                )
            ones = a.new_ones(len(a), 1 if module.bias is not None else 0)
            inputs[name] = torch.cat([a, ones], 1)
            added[name] = torch.zeros_like(output, requires_grad=True)
            return output + added[name]

        return hook

    linear = {name: m for name, m in network.named_modules() if type(m) is nn.Linear}
    hooks = [m.register_forward_hook(watch(name, m)) for name, m in linear.items()]
    outputs = network(x)
    for hook in hooks:
        hook.remove()
    names = [name for name in added if linear[name].weight.requires_grad]
    reach = [
        torch.autograd.grad(
            outputs[:, k].sum(),
            [added[n] for n in names],
            retain_graph=True,
            materialize_grads=True,
        )
        for k in columns.tolist()
    ]
    return [
        Layer(name, inputs[name], torch.stack([row[i] for row in reach], 1))
        for i, name in enumerate(names)
    ]


def _unit_variance(layers: list[Layer], problem: Problem) -> float:
    """Return the variance of a logit or a mean where all weights have variance 1."""
    total = 0.0
    for layer in layers:
        reach = full(problem.likelihood).identified(layer.reach.movedim(1, -1))
        size = layer.inputs.square().sum(1) * reach.square().sum((1, 2))
        total += float(size.mean()) / max(1, reach.shape[-1] - 1)
    return total


def _noise(problem: Problem, clip: float) -> float:
    """Return the variance of the privacy noise in the average of all releases, over n records."""
    if not problem.private:
        return 0.0
    precision = sum(1 / sigma**2 for sigma in problem.sigmas)
    return (problem.n * clip / problem.batch_size) ** 2 / precision


def _subsampling(problem: Problem) -> float:
    """Return what the drawing of batches adds to the variance of the sample, relative to it."""
    rate = min(1.0, problem.batch_size / problem.n)
    return (1 - rate) * problem.n / (problem.batch_size * problem.steps)


def _eigen(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of E[a a']."""
    width = inputs.shape[1]
    if width > _DENSE:
        return inputs.square().mean(0), torch.eye(width, dtype=inputs.dtype)
    values, vectors = torch.linalg.eigh(inputs.mT @ inputs / len(inputs))
    return values.clamp(min=0), vectors
