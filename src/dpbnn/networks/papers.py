"""The papers' networks, and the modes that networks are trained in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from dpbnn.networks.standard import KNOTS, Beside, First, Steps

__all__ = ["cnn", "mlp", "training_mode"]


def mlp(
    inputs: int = 784,
    hidden: Sequence[int] = (1200, 1200),
    outputs: int = 10,
    dropout: float = 0.0,
    activation: Callable[[], nn.Module] = nn.ReLU,
    linear_path: bool = False,
    steps: float = 0.0,
) -> nn.Sequential:
    """Return a multilayer perceptron; the default is the papers' 784-1200-1200-10 with ReLU.

    Args:
        inputs: number of features (further axes are flattened).
        hidden: widths of the hidden layers.
        outputs: number of outputs.
        dropout: probability of dropping a hidden unit, 0 for no dropout layers.
        activation: builds the nonlinearity between layers.
        linear_path: whether the last layer sees the inputs too, beside the hidden units.
        steps: size of steps of the inputs that a linear path has too; 0 for none. See `Steps`.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for rows, columns in pairwise((inputs, *hidden)):
        layers += [nn.Linear(rows, columns), activation()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    if linear_path and hidden:
        width = hidden[-1] + inputs
        if not steps:
            return nn.Sequential(layers[0], Beside(*layers[1:]), nn.Linear(width, outputs))
        width += len(KNOTS) * inputs
        beside = Beside(First(inputs), *layers[1:])  # steps come first: no gradient is for them
        return nn.Sequential(layers[0], Steps(inputs, steps), beside, nn.Linear(width, outputs))
    return nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], outputs))


def cnn(activation: Callable[[], nn.Module] = nn.ReLU, outputs: int = 10) -> nn.Sequential:
    """Return the papers' convolutional network for 28 x 28 grey images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        activation(),
        nn.Linear(32, outputs),
    )


def training_mode(network: nn.Module) -> None:
    """Put a network in training mode, but for modules that were given in evaluation mode and fixed.

    Fixed are modules whose parameters are all frozen, such as a pretrained backbone, with all that
    is in them; and BatchNorm and InstanceNorm layers that normalise by stored statistics.
    """
    fixed = [module for module in network.modules() if not module.training and _fixed(module)]
    modes = {module: module.training for outer in fixed for module in outer.modules()}
    network.train()
    for module, mode in modes.items():
        module.training = mode


def _fixed(module: nn.Module) -> bool:
    flags = [parameter.requires_grad for parameter in module.parameters()]
    stored = isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
    return stored or (bool(flags) and not any(flags))
