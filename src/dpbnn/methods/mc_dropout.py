"""DP-MC Dropout: a posterior of dropout masks on one set of weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from dpbnn.methods.descent import Descent, DescentState
from dpbnn.methods.method import Problem
from dpbnn.methods.sgd import SGDProcess
from dpbnn.networks import SharedDropout, training_mode
from dpbnn.posteriors import DropoutPosterior, Posterior
from dpbnn.privacy.checks import check_positive


def dropout_weight_decay(length_scale: float, precision: float, keep: float, n: int) -> float:
    """Return the weight decay lambda = p l^2 / (2 tau n) of a prior length-scale l.

    Supplement B.2 of the DP-BNN paper (Gal and Ghahramani 2016), for the objective
    1/(2n) sum |y - f|^2 + lambda |W|^2, p the probability of keeping a unit.

    Args:
        length_scale: l, prior length-scale.
        precision: tau, of the observation noise.
        keep: p, one minus the dropout rate.
        n: number of records.
    """
    check_positive(length_scale=length_scale, precision=precision, keep=keep, n=n)
    return keep * length_scale**2 / (2 * precision * n)


def dropout_precision(length_scale: float, weight_decay: float, keep: float, n: int) -> float:
    """Return the precision tau = p l^2 / (2 lambda n) at which lambda is the weight decay."""
    check_positive(length_scale=length_scale, weight_decay=weight_decay, keep=keep, n=n)
    return keep * length_scale**2 / (2 * weight_decay * n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MCDropout(Descent):
    """Algorithm 4 of the DP-BNN paper: training with dropout, which stays on at prediction.

        g = (1/b) (sum_i clip(grad nll_i under its mask) + noise) + (1/n) grad r(w)

    An example contributes its gradient under a dropout mask, so the sensitivity is the clip; the
    prior sits outside the clip, once.

    Attributes:
        shared_mask: one mask per batch, as Algorithm 4 prints it, instead of one per example.
        precision: tau of the observation noise in regression; adds 1/tau to predictive variances.
    """

    shared_mask: bool = False
    precision: float | None = None

    name = "mcdropout"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(precision=self.precision)

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the network, with masks shared by the batch if asked for."""
        layers = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        if not any(layer.p > 0 for layer in layers):
            raise ValueError(
                "MCDropout needs dropout layers and this model has none; add "
                "torch.nn.Dropout(0.5), or build it with dpbnn.mlp(..., dropout=0.5)"
            )
        return replaced_dropout(model, nn.Dropout, SharedDropout) if self.shared_mask else model

    def start(self, problem: Problem) -> MCDropoutProcess:
        """Return the process that trains on a problem."""
        training_mode(problem.model)
        for module in problem.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.train()  # also in a frozen backbone: predictions leave all of them on
        return MCDropoutProcess(self, problem, problem.attach())


class MCDropoutProcess(SGDProcess):
    """Equations of `MCDropout`."""

    settings: MCDropout

    def posterior(self, state: DescentState, **record: Any) -> Posterior:
        """Return the weights with their dropout layers left on."""
        return DropoutPosterior(
            replaced_dropout(self.final(state), SharedDropout, nn.Dropout),
            self.problem.likelihood,
            precision=self.settings.precision,
            **record,
        )


def replaced_dropout(model: nn.Module, old: type, new: type) -> nn.Module:
    """Return the model with dropout layers of one class replaced by another, in place."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is old:
                setattr(parent, name, new(child.p))
    return model
