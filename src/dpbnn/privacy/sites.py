"""What sites that add their own noise release, and what is left of it for whom.

Each of k sites adds noise of standard deviation s = sigma C / sqrt(k) to its own clipped sum, and
sends that, a message. The model moves by the sum of all messages.

**Guarantee.** A message is one release of its site's gate, with noise s, whoever looks and whatever
others do. Who sees sums of messages alone, and knows the noise of t sites that are not the record's
own (its own noise, or none where a site added none), meets noise s sqrt(k - t):

- A record is at one site, so it moves the sum by the clip at most.
- All messages lie on one public grid of spacing g, since all have the same s, and they are added
  exactly (`Message`).
- A Gaussian that is rounded down to the grid has the chances of a density at the points of the
  grid: that of the Gaussian plus a uniform on (-g, 0). A sum of m of these has those of the sum of
  Gaussians plus m uniforms; other terms of Poisson's summation are below exp(-2 pi^2 4^19), since s
  is 2^19 g or more. That is the Gaussian of the sum, plus m - 1 uniforms, rounded down: it is
  post-processing of the Gaussian mechanism.
- Batches are drawn at each site from a key of its own, so that sampling amplifies against other
  sites too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from dpbnn.privacy import accountants
from dpbnn.privacy.checks import round_up
from dpbnn.privacy.events import Event
from dpbnn.privacy.group import Group, Shares
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import FullBatch, Poisson, Sampler
from dpbnn.privacy.schedule import first_steps, scaled

__all__ = [
    "Message",
    "OneOfSeveral",
    "against_sums",
    "check_sites",
    "said_of_sums",
    "site_plan",
]

_NOISE = 2.0**24  # steps of the grid that noise stays within: 16 standard deviations


class OneOfSeveral(Group):
    """A process that makes releases of its own, on a ledger of its own, beside others that do."""

    def check_alone(self) -> None:
        """Let others be there: what they release is no part of this site's releases."""


@dataclasses.dataclass
class Message(Shares):
    """The contributions of a site's batch, whose noised sum stays whole numbers of the grid.

    Attributes:
        sites: how many messages are added up.
    """

    sites: int = 1

    def check_range(self, steps: float) -> None:
        """Raise where float64 would not add up all messages exactly."""
        super().check_range(self.sites * (steps + _NOISE))
        if self.added_in is not torch.float64:
            raise ValueError(
                "noise_multiplier: too small for messages that are added up exactly; use more "
                "noise or smaller batches"
            )

    def spread(self, release: Any) -> dict[str, Tensor]:
        """Return the release as it is, in float64."""
        return dict(release)


def check_sites(plan: Plan, site: int, records: tuple[int, ...]) -> None:
    """Raise where a plan of all sites does not fit them."""
    if len(records) < 2 or not 0 <= site < len(records) or min(records) < 1:
        raise ValueError(
            f"site={site}, records={records}: give the numbers of records of two or more sites, "
            f"each at least 1, and which of them this one is"
        )
    if sum(records) != plan.n:
        raise ValueError(
            f"the plan is for n={plan.n} records and the sites have {sum(records)}; plan with "
            f"n={sum(records)}"
        )
    known = isinstance(plan.sampler, Poisson | FullBatch) and not plan.sampler.unit
    if not known or plan.relation is not Relation.ZERO_OUT or plan.beside:
        raise ValueError(
            "plan: sites draw records by Poisson or full-batch sampling, under zero-out, with "
            "nothing beside; plan with the defaults"
        )


def site_plan(plan: Plan, records: int, sites: int) -> Plan:
    """Return the plan of a site: its share of every batch, and of the noise."""
    own: Sampler = FullBatch(records)
    if isinstance(plan.sampler, Poisson):
        own = Poisson(records, plan.batch_size * records / plan.n)
    noise = scaled(plan.noise_multipliers, 1 / math.sqrt(sites))
    made = dataclasses.replace(plan, sampler=own, noise_multipliers=noise, target_epsilon=None)
    if not plan.private:
        return made
    chosen = accountants.accountant(plan.accountant)
    epsilon = chosen.epsilon(made.events, plan.delta, plan.relation)
    return dataclasses.replace(made, epsilon=epsilon)


def against_sums(plan: Plan, steps: int, left: int) -> list[Event]:
    """Return the first steps of a site's plan with the noise of so many sites."""
    runs = scaled(first_steps(plan.noise_multipliers, steps), math.sqrt(left))
    return [plan.sampler.event(sigma, count) for sigma, count in runs]


def said_of_sums(plan: Plan, steps: int, sites: int) -> tuple[str, ...]:
    """Return in words what the first steps of a site's plan mean for others.

    Args:
        plan: of a site, private.
        steps: that were made.
        sites: how many there are.
    """
    chosen = accountants.accountant(plan.accountant)
    outside, other = (
        round_up(chosen.epsilon(against_sums(plan, steps, left), plan.delta, plan.relation))
        for left in (sites, sites - 1)
    )
    return (
        f"this is one of {sites} sites; epsilon holds against who collects its messages, and "
        f"against all other sites together, whatever noise they add",
        f"where all sites add their noise, and messages are seen by nobody but added up, this "
        f"run has epsilon {outside} against others, and {other} against one other site",
    )
