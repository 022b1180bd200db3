"""Without privacy: how strong the prior is, chosen by rows that are held out. NOT PRIVATE."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpbnn.calibration import calibration_split
from dpbnn.posteriors import Posterior
from dpbnn.priors import Gaussian
from dpbnn.privacy.plan import Plan, open_plan

__all__ = ["chosen_prior", "plenty"]

FEWEST = 50  # rows that some can be held out of
ENOUGH = 8  # rows per weight from which no prior is needed
_HELD = 0.2  # share of the rows
_WIDEST = 1.0  # standard deviation up to which it is doubled
_HALVINGS = 4  # of it, at most


def chosen_prior(
    train: Callable[..., Posterior],
    data: tuple[Tensor, Tensor],
    good: Tensor,
    network: Callable[[], torch.nn.Module],
    plan: Plan,
    first: Gaussian,
) -> Gaussian:
    """Return the prior under which rows that are held out are most probable.

    Its standard deviation is doubled up to 1 at most, or, where that makes them less so, halved as
    long as it helps. All rows can then be trained on.

    **Guarantee.** None: it looks at the data, and it refuses a private plan.

    Args:
        train: as `dpbnn.fit`, with the network and all settings but data, prior and plan.
        data: inputs and targets of the training.
        good: which rows can be used.
        network: builds the network.
        plan: of the training.
        first: the prior to begin with.
    """
    if plan.private:
        raise ValueError("plan: is private, and rows that are held out may not choose a prior")
    count = int(good.sum())
    with torch.device("meta"):
        sketch = network()
    if count < FEWEST or plenty(count, sketch):
        return first
    x, y = (part[good] for part in data)
    rest, held = calibration_split(count, _HELD)
    size = min(plan.batch_size, len(rest))
    shorter = open_plan(
        n=len(rest), batch_size=size, steps=plan.steps,
        sampling="full-batch" if size == len(rest) else plan.sampling,
    )  # fmt: skip

    def likely(std: float) -> float:
        prior = Gaussian(std)
        posterior = train(data=(x[rest], y[rest]), prior=prior, plan=shorter, progress=False)
        return float(posterior.predict(x[held]).log_prob(y[held]).mean())

    best, most = first.std, likely(first.std)
    wider = [first.std * 2] if first.std * 2 <= _WIDEST else []
    narrower = [first.std / 2**halvings for halvings in range(1, _HALVINGS + 1)]
    for stds in (wider, narrower):
        for std in stds:
            found = likely(std)
            if not found > most:
                break
            best, most = std, found
        if best != first.std:
            break
    return Gaussian(best)


def plenty(rows: int, network: torch.nn.Module) -> bool:
    """Return whether rows are so many that a network fits them hardly better than others.

    Args:
        rows: of the training.
        network: its weights are counted.
    """
    return rows >= ENOUGH * sum(parameter.numel() for parameter in network.parameters())
