"""Several views of a record inside one contribution.

A record comes as [views, ...]. Its log-likelihood is the mean over its views, so that its gradient
is the mean of the views' gradients, which is clipped once: views cost no privacy. Predictions
average the probabilities over the views, or the logits.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbnn.likelihoods import Categorical
from dpbnn.predictive import ClassPredictive, Predictive

__all__ = ["SHIFTS", "ViewedCategorical", "shifted"]

SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))
"""The image itself and its shifts by one pixel, as (rows, columns)."""


@dataclasses.dataclass(frozen=True)
class ViewedCategorical(Categorical, name="viewed-categorical"):
    """Class labels of records that have several views: log p(y | f) = mean_v log p(y | f_v).

    Outputs are [records, views, classes].

    Args:
        logits: predict by the mean of the logits instead of the mean of the probabilities.
    """

    logits: bool = False

    never_raises = True

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean over views of log p(y_i | outputs_iv), one number per record."""
        views = outputs.shape[1]
        each = F.cross_entropy(outputs.flatten(0, 1), y.repeat_interleave(views), reduction="none")
        return -each.view(-1, views).mean(1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive of logits [S, N, views, K], averaged over views."""
        if self.logits:
            return super().predictive(outputs.mean(-2))
        logs = outputs.float().log_softmax(-1)
        return ClassPredictive(logs.logsumexp(-2) - math.log(outputs.shape[-2]))


def shifted(x: Tensor, shifts: tuple[tuple[int, int], ...] = SHIFTS) -> Tensor:
    """Return images [n, 1, h, w] with their shifts, [n, views, 1, h, w]; zeros move in."""
    most = max(max(abs(a), abs(b)) for a, b in shifts)
    wide = F.pad(x, (most,) * 4)
    height, width = x.shape[-2:]
    views = [
        wide[..., most - a : most - a + height, most - b : most - b + width] for a, b in shifts
    ]
    return torch.stack(views, 1)
