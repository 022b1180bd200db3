"""What Bayesian accounting says, in its own type and its own words."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NoReturn

from dpbnn.privacy.bayesian_costs import attack_probability
from dpbnn.privacy.statement import PrivacyStatement, item

_NOT_DP = (
    "this is a Bayesian privacy estimate (epsilon_mu), not differential privacy; read "
    ".epsilon_mu if an estimate for records from the data's distribution is what you want, and "
    ".dp for the guarantee that holds for every record"
)


@dataclasses.dataclass(frozen=True)
class BayesianPrivacyEstimate:
    """What Bayesian accounting estimates for a typical record; not a privacy guarantee.

    It has no `epsilon`, cannot be turned into a number or a `PrivacyStatement`, and was computed
    from the data without noise: showing it releases something about the data that no budget covers.

    Attributes:
        epsilon_mu: the estimate.
        delta_mu: probability, over the noise and over the record, that the loss exceeds it.
        failure: part of delta_mu set aside for the estimator; 0 means that nothing was.
        order: lambda at which the smallest value was found.
        largest_order: the largest lambda that was allowed.
        steps: T, fixed in advance.
        observed: steps whose distances were seen.
        charged: releases that count at their clip, for every record, since nothing was seen.
        samples: number of distances seen, in all.
        fewest: smallest number of distances of a step.
        distances: what the distances are.
        dp: the differential privacy of the same releases, if known.
    """

    epsilon_mu: float
    delta_mu: float
    failure: float
    order: int
    largest_order: int
    steps: int
    observed: int
    charged: int
    samples: int
    fewest: int
    distances: str
    dp: PrivacyStatement | None = None

    @property
    def epsilon(self) -> NoReturn:
        """Refuse: there is no epsilon here."""
        raise AttributeError(f"epsilon: {_NOT_DP}")

    @property
    def delta(self) -> NoReturn:
        """Refuse: there is no delta here."""
        raise AttributeError(f"delta: {_NOT_DP}")

    @property
    def at_cap(self) -> bool:
        """Whether the smallest value lies at the largest order, and so says little of the data."""
        return self.order == self.largest_order

    @property
    def floor(self) -> float:
        """What epsilon_mu would be if no record had any effect: -log(delta) / largest order."""
        return -math.log(self.delta_mu - self.failure) / self.largest_order

    @property
    def attack_probability(self) -> float:
        """1 / (1 + exp(-epsilon_mu)); see `dpbnn.attack_probability`."""
        return attack_probability(self.epsilon_mu)

    def __float__(self) -> NoReturn:
        raise TypeError(f"float: {_NOT_DP}")

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(f"format {spec!r}: {_NOT_DP}")
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain values, under names that no reader takes for epsilon."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["dp"] = None if self.dp is None else self.dp.to_dict()
        own = {"at_cap": self.at_cap, "floor": self.floor}
        return {"kind": "bayesian-privacy-estimate", "private": False, **values, **own}

    def to_json(self) -> str:
        """Return the estimate as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        confidence = (
            f"estimated with failure probability {self.failure:g}, which is part of delta_mu; the "
            f"estimator takes sample means for nearly Gaussian and can be far too low"
            if self.failure
            else "plain means of samples, with no allowance for what was not sampled"
        )
        cap = "is that cap: it says more of the cap than of the data"
        cap = cap if self.at_cap else "is below the cap"
        seen = f"{self.samples} distances at {self.observed} of {self.steps} steps fixed in advance"
        if self.observed:
            seen += f", at least {self.fewest} at each"
        seen += f"; {self.charged} releases counted at their clip"
        shared = (
            "not known here; it comes with fit" if self.dp is None else str(self.dp).splitlines()[0]
        )
        return "\n".join(
            [
                f"Bayesian privacy ESTIMATE, not differential privacy: epsilon_mu about "
                f"{self.epsilon_mu:.4g}, delta_mu = {self.delta_mu:g}",
                item(
                    "Assumes",
                    "the record to be protected is drawn from the same distribution as the data; "
                    "an unusual record has no protection from this number. It is no bound.",
                ),
                item("Not for", "publication: it was computed from the data without noise."),
                item("Estimator", confidence),
                item("Distances", f"{self.distances}: {seen}"),
                item(
                    "Floor",
                    f"{self.floor:.4g} = -log(delta) / {self.largest_order}, what the largest "
                    f"order would give without data; the order found, {self.order}, {cap}.",
                ),
                item(
                    "Reading",
                    f"a test between two such neighbours is right with probability at most "
                    f"{self.attack_probability:.3f}, on average over records.",
                ),
                item("DP beside", shared),
            ]
        )
