"""Neighbouring relations: which two datasets a privacy guarantee cannot tell apart."""

from __future__ import annotations

import enum
import re

__all__ = ["Relation", "check_same"]


class Relation(enum.StrEnum):
    """When two datasets count as neighbours.

    A release clips every record's contribution to norm C, so neighbours move the sum by at most
    `shift * C`; the noise multiplier is always sigma = noise std / C, whatever the relation.

    Attributes:
        ZERO_OUT: the same n records, one of them contributing nothing. n is public.
        ADD_REMOVE: one record more or less. Numerically the same accounting as zero-out. n is an
            expected number, chosen without looking at the data; the true one is not public.
        REPLACE_ONE: the same n records, one of them exchanged for another. n is public.
    """

    ZERO_OUT = "zero-out"
    ADD_REMOVE = "add/remove"
    REPLACE_ONE = "replace-one"

    @property
    def shift(self) -> float:
        """Distance between neighbouring sums in units of the clip."""
        return 2.0 if self is Relation.REPLACE_ONE else 1.0

    @property
    def public_size(self) -> bool:
        """Whether the number of records is public, and n is that number."""
        return self is not Relation.ADD_REMOVE

    def describe(self, unit: str = "record") -> str:
        """Return one clause that completes 'neighbouring datasets ...', about a unit's name."""
        whole = "" if unit == "record" else " with all its records"
        return {
            Relation.ZERO_OUT: f"differ in one {unit}{whole}, which in one of them contributes "
            f"nothing",
            Relation.ADD_REMOVE: f"differ by one {unit}{whole} being added or removed",
            Relation.REPLACE_ONE: f"differ in one {unit}{whole} being replaced by any other",
        }[self]

    @classmethod
    def parse(cls, value: str | Relation) -> Relation:
        """Return the relation that `value` names, whatever its case and punctuation."""
        if isinstance(known := cls._value2member_map_.get(value), Relation):
            return known
        letters = re.sub(r"[^a-z]", "", str(value).lower())
        for relation in cls:
            if letters == re.sub(r"[^a-z]", "", relation.value):
                return relation
        allowed = ", ".join(repr(str(r)) for r in cls)
        raise ValueError(f"relation={value!r}: must be one of {allowed}; the default is 'zero-out'")


def check_same(plan: Relation, ledger: Relation) -> None:
    """Raise where a plan and the ledger that it spends from have different relations."""
    if plan is not ledger:
        raise ValueError(
            f"relation: the plan has {plan} and the ledger {ledger}; give the plan the ledger's"
        )
