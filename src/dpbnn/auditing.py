"""Neighbour replay of functions and of whole methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpbnn.likelihoods import Categorical, Likelihood
from dpbnn.methods.method import Method
from dpbnn.posteriors import Posterior
from dpbnn.priors import Prior
from dpbnn.privacy import audit
from dpbnn.privacy import plan as plans
from dpbnn.privacy.audit import Replay
from dpbnn.privacy.checks import quoted
from dpbnn.privacy.plan import Plan
from dpbnn.training import fit

__all__ = ["replay"]

_STEPS = 4


def replay(
    method_or_function: Method | Callable[[Any], Any],
    data: Any,
    neighbour: Any,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    likelihood: str | Likelihood = "categorical",
    prior: Prior | None = None,
    plan: Plan | None = None,
    seed: int = 0,
    trace: bool = True,
) -> Replay:
    """Run a function, or `fit` with a method, on a dataset and on a neighbour, and compare.

    Both runs have the same random numbers (torch, numpy, random, the samplers' batches). The second
    run gets the releases of the first, so whatever it does with them must come out the same: what
    still differs has seen the data by another way than the gate.

    **Guarantee.** Compared are the sums before the noise, release by release; the number, kind and
    order of releases; what the function returns, bit by bit and with everything that it holds
    (attributes of modules, lists, closures, class attributes), or all of a method's posterior; and
    with `trace` the sequence of calls of Python functions outside installed packages (and inside
    dpbnn). No ledger is charged. The result holds raw distances: it is for the data holder, not for
    publication.

    A method is replayed as `fit` runs it. Record `neighbour` is zeroed out for it by
    `on_bad_rows="zero"`: it is not there in the second run, so that a method in which examples
    reach into each other's contributions is found out as well. Under an add/remove plan the record
    comes last in the first run, and the second has one row less.

    Args:
        method_or_function: a method's settings, such as `dpbnn.SGD()` or one's own `Method`; or a
            function that takes a dataset, releases through gates and returns whatever it makes
            public. Either is run three times with `trace`, twice without.
        data: a dataset; for a method (inputs, targets), or the points of a mixture.
        neighbour: the index of the record to zero out or remove; or the neighbouring dataset, which
            may differ by a whole record where the relation is replace-one. A function must tell the
            gate which records a batch holds to have one zeroed out (`gate(c, records=batch)`).
        model: the network of a method.
        likelihood: of a method; see `fit`.
        prior: of a method; see `fit`.
        plan: of a method; four releases of all records by default.
        seed: of the random numbers that are no noise.
        trace: compare the calls.

    Example:
        >>> import dpbnn
        >>> data = torch.randn(20, 2), torch.arange(20) % 3
        >>> found = replay(dpbnn.SGD(clip=0.5), data, 7, model=dpbnn.mlp(2, (4,), 3))
        >>> found.passed, len(found.distances), found.sensitivities[0]
        (True, 4, 0.5)
    """
    if not isinstance(method_or_function, Method):
        if not callable(method_or_function):
            raise ValueError(
                f"{quoted(method_or_function)}: must be a function of a dataset, or a method's "
                f"settings such as dpbnn.SGD()"
            )
        return audit.replay(method_or_function, data, neighbour, seed=seed, trace=trace)
    if model is None:
        raise ValueError(
            f"model: missing; {type(method_or_function).__name__} needs a network, as in "
            f"model=dpbnn.mlp(2, (4,), 3)"
        )
    method, network = method_or_function, model
    chosen = plan or plans.plan(
        noise_multiplier=1.0, delta=1e-5, n=_count(data), sampling="full-batch", steps=_STEPS
    )

    def trained(rows: Any) -> dict[str, Any]:
        posterior = fit(
            network, rows, likelihood, prior, method, chosen, seed=seed, on_bad_rows="zero",
            progress=False,
        )  # fmt: skip
        return _public(posterior)

    if isinstance(neighbour, int) and not isinstance(neighbour, bool):
        if chosen.relation.public_size:
            neighbour = _without(data, neighbour, likelihood)
        else:
            data, neighbour = _removed(data, neighbour)
    return audit.replay(trained, data, neighbour, seed=seed, trace=trace)


def _parts(data: Any) -> list[torch.Tensor]:
    parts = data if isinstance(data, tuple | list) else (data,)
    return [torch.as_tensor(part) for part in parts if part is not None]


def _count(data: Any) -> int:
    return len(_parts(data)[0])


def _without(data: Any, record: int, likelihood: str | Likelihood) -> Any:
    """Return the data with a record that `fit` takes for a bad one, or else the record."""
    parts = _parts(data)
    _check_record(parts, record)
    real = [index for index, part in enumerate(parts) if part.is_floating_point()]
    if not real and not isinstance(likelihood, str | Categorical):
        return record
    index = next(iter(real), -1)
    parts[index] = parts[index].clone()
    parts[index][record] = math.nan if real else -1
    return tuple(parts) if len(parts) > 1 else parts[0]


def _removed(data: Any, record: int) -> tuple[Any, Any]:
    """Return the data with a record moved to its end, and without it."""
    parts = _parts(data)
    _check_record(parts, record)
    moved = [torch.cat([p[:record], p[record + 1 :], p[record : record + 1]]) for p in parts]
    whole, rest = tuple(moved), tuple(part[:-1] for part in moved)
    return (whole, rest) if len(parts) > 1 else (whole[0], rest[0])


def _check_record(parts: list[torch.Tensor], record: int) -> None:
    if not 0 <= record < len(parts[0]):
        raise ValueError(f"neighbour={record}: the data has records 0 to {len(parts[0]) - 1}")


def _public(posterior: Posterior) -> dict[str, Any]:
    """Return everything that a posterior makes public."""
    parts = {
        name: value.read(list(range(len(value)))) if hasattr(value, "read") else value
        for name, value in posterior._parts().items()
    }
    return {
        "model": posterior.model,
        "parts": parts,
        "likelihood": posterior.likelihood,
        "settings": posterior.settings,
        "privacy": posterior.privacy.to_dict(),
    }
