"""A sampler of one's own: Poisson batches from groups that take turns. All of it is here."""

import dataclasses
import math

import dp_accounting
import numpy as np

from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import Sampler, register


@register
@dataclasses.dataclass(frozen=True)
class CyclicPoisson(Sampler):
    """Step t draws from group t mod k only: each of its records with q = k batch_size / n.

    **Guarantee.** The groups are fixed by position and disjoint, so a record is in the draw of one
    step in k, and then in the batch with probability q: ceil(T / k) Poisson-sampled releases of T.

    Args:
        groups: k, a divisor of n.
    """

    groups: int = 3

    name = "cyclic-poisson"
    relations = (Relation.ZERO_OUT,)
    by_position = True
    whole = False

    def __post_init__(self):
        super().__post_init__()
        if self.n % self.groups or self.groups * self.batch_size > self.n:
            raise ValueError(f"groups={self.groups}: must divide n, into no less than a batch each")

    def size(self, step):
        """Return None: the size is random."""
        return

    @classmethod
    def dp_event(cls, event, noise):
        """Return the Poisson-sampled releases of one group."""
        groups = dict(event.parameters)["groups"]
        one = dp_accounting.PoissonSampledDpEvent(groups * event.rate, noise)
        return dp_accounting.SelfComposedDpEvent(one, math.ceil(event.count / groups))

    def _draw(self, step, generator, records):
        members = np.arange(step % self.groups, records, self.groups)
        return members[generator.random(len(members)) < self.groups * self.rate]
