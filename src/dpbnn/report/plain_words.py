"""A privacy statement in plain language."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from dpbnn.privacy.attack import Attack
from dpbnn.privacy.checks import round_up
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.statement import BEFORE, PrivacyStatement, statement_of


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the page says about privacy.

    Attributes:
        banner: "", "NOT PRIVATE" or "DEBUG: NOT PRIVATE".
        reason: why there is no guarantee.
        epsilon: epsilon, rounded up.
        delta: delta with two digits, rounded up.
        full_delta: delta with six digits, rounded up.
        approximate: whether epsilon is no bound.
        chance: the best chance of an attacker's guess at even odds.
        unit: what is protected, in a word.
        protects: what is protected, one paragraph.
        meaning: what epsilon means, one paragraph.
        odds_of_failure: what delta means, one sentence.
        tuning: what is known of tuning runs.
        assumptions: what the guarantee rests on.
        uncovered: what it does not cover.
        caveats: remarks of the statement itself.
        details: name and value of the technical facts.
        mechanisms: one row per kind of release.
    """

    banner: str
    reason: str = ""
    epsilon: str = ""
    delta: str = ""
    full_delta: str = ""
    approximate: bool = False
    chance: float = 1.0
    unit: str = "record"
    protects: str = ""
    meaning: str = ""
    odds_of_failure: str = ""
    tuning: str = ""
    assumptions: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    details: tuple[tuple[str, str], ...] = ()
    mechanisms: tuple[Mapping[str, Any], ...] = ()

    @property
    def counted(self) -> str:
        """What n counts."""
        return "rows" if self.unit == "record" else f"{self.unit}s"


def guess_chance(epsilon: float, delta: float) -> float:
    """Return the best chance to guess which of two neighbours was used, at even odds.

    TPR <= e^eps FPR + delta, and the same of the complements, give (e^eps + delta)/(1 + e^eps); for
    delta = 0 that is 1/(1 + e^-eps).
    """
    if epsilon > 700:
        return 1.0
    return min((1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon)), 1.0)


def percent_up(share: float) -> str:
    """Return a share in percent, rounded up, with enough decimals to stay below 100."""
    for digits in range(1, 5):
        scale = 10**digits
        if (up := math.ceil(share * 100 * scale - 1e-9) / scale) < 100:
            return f"{up:.{digits}f}\N{NO-BREAK SPACE}%"
    return "100\N{NO-BREAK SPACE}%"


def written(value: float, digits: int = 6) -> str:
    """Return a number as people write it, such as 0.5, 1200 or 3.1e-6."""
    return re.sub(r"e([-+])0*", lambda sign: "e" + sign[1].strip("+"), f"{value:.{digits}g}")


def read(privacy: PrivacyStatement | Mapping[str, Any]) -> Reading:
    """Put a statement, or its `to_dict()`, in plain language."""
    statement = statement_of(privacy)
    if not statement.private:
        debug = statement.reason.startswith("debug")
        reason = statement.reason.removeprefix("debug: not private, ")
        return Reading(banner="DEBUG: NOT PRIVATE" if debug else "NOT PRIVATE", reason=reason)
    approximate = statement.accountant == "gdp-clt"
    alone = guess_chance(statement.epsilon, statement.delta)
    attack = statement.attack
    chance = alone if attack is None else min(alone, attack.right)
    delta, full = (written(float(round_up(statement.delta, digits))) for digits in (2, 6))
    return Reading(
        banner="",
        epsilon=round_up(statement.epsilon),
        delta=delta,
        full_delta=full,
        approximate=approximate,
        chance=chance,
        unit=statement.unit_name,
        protects=_protects(statement),
        meaning=_meaning(statement, chance, alone, approximate),
        odds_of_failure=(
            f"Delta is for bad luck: except with probability {delta}, the run "
            f"behaves as if epsilon held without exception."
        ),
        tuning=_tuning(statement.tuning_runs),
        assumptions=(
            *(f"Public, not protected: {item}." for item in statement.public),
            f"Noise and sampling: {statement.randomness}.",
        ),
        uncovered=_uncovered(statement),
        caveats=tuple(_sentence(caveat) for caveat in statement.caveats),
        details=(
            ("epsilon", ("about " if approximate else "") + round_up(statement.epsilon)),
            ("delta", full),
            *_attack(attack, statement.unit_name),
            ("unit", statement.unit),
            ("neighbouring datasets", f"{statement.relation}"),
            ("accountant", f"{statement.accountant} ({statement.accountant_version})"),
            ("covers", "; ".join(statement.covers)),
        ),
        mechanisms=statement.mechanisms,
    )


def _protects(statement: PrivacyStatement) -> str:
    unit = statement.unit
    whole = "" if statement.unit_name == "record" else ", with all records,"
    bound = "about" if statement.accountant == "gdp-clt" else "at most"
    factor = "e^epsilon"
    if statement.epsilon < 20:
        factor += f" = {round_up(math.exp(statement.epsilon), 3)}"
    event = {
        Relation.ZERO_OUT: f"{unit} of the training data{whole} was used or left blank",
        Relation.ADD_REMOVE: f"{unit}{whole} was in the training data or not",
        Relation.REPLACE_ONE: f"{unit} of the training data was this one or any other",
    }[statement.relation or Relation.ZERO_OUT]
    return (
        f"Whether {event}: the chance of any model, posterior or prediction that could come out "
        f"changes by a factor of {bound} {factor}, apart from delta. This holds for every "
        f"{statement.unit_name}, whatever else an attacker knows."
    )


def _attack(attack: Attack | None, unit: str) -> list[tuple[str, str]]:
    """Return the technical facts on the best attack."""
    if attack is None:
        return []
    found = "; ".join(
        f"{percent_up(power)} at {100 * share:g}\N{NO-BREAK SPACE}% false positives"
        for share, power in attack.power.items()
    )
    known = [] if attack.mu is None else [(f"mu ({attack.scope}), at most", round_up(attack.mu))]
    return [*known, (f"used {unit}s that an attacker finds, at most", found)]


def _meaning(statement: PrivacyStatement, chance: float, alone: float, approximate: bool) -> str:
    unit = statement.unit_name
    question = (
        f"which of two {unit}s was used"
        if statement.relation is Relation.REPLACE_ONE
        else f"whether one given {unit} was used"
    )
    bound = "about" if approximate else "at most"
    text = (
        f"Think of someone who knows every other {unit}, all settings and the finished model, and "
        f"who bets on {question}, at even odds. Tossing a coin is right in 50 % of such bets. "
        f"Here the best possible strategy is right in {bound} {percent_up(chance)}."
    )
    if percent_up(alone) != percent_up(chance):
        text += (
            f" That follows from the whole privacy loss of the run; epsilon and delta alone would "
            f"allow {percent_up(alone)}."
        )
    if chance >= 0.99:
        text += " That is close to certainty: at this epsilon the guarantee alone promises little."
    return text


def _uncovered(statement: PrivacyStatement) -> tuple[str, ...]:
    lines = [
        f"Preparation of the data: {BEFORE}. Such steps must rest on public knowledge, or be "
        f"private themselves.",
        "Test records. The figures on this page are computed from them and from the private model; "
        "the guarantee is for the training data only.",
        "What is true of people in general. A model may reveal that a disease is common in some "
        "group, whether or not a given person took part.",
    ]
    if statement.unit == "one record":
        lines.append(
            "People with several records. The guarantee is for one record at a time; for a person "
            "with k records epsilon is up to k times as large, and delta grows too."
        )
    lines.append(
        "The computer that trained: its memory, its timing, copies of the raw data, and attacks on "
        "the last bits of floating-point noise."
    )
    return tuple(lines)


def _tuning(runs: int | None) -> str:
    if runs is None:
        return (
            "It was not declared how many other runs on this data chose the settings. If there "
            "were any, what they reveal is not part of epsilon."
        )
    if runs == 0:
        return (
            "No other run on this data chose the settings, as declared by the person who ran this "
            "one."
        )
    runs_were = "1 other run" if runs == 1 else f"{runs} other runs"
    return (
        f"{runs_were} on this data chose the settings, as declared. What they reveal is not part "
        f"of epsilon, unless they are among the releases listed below."
    )


def _sentence(text: str) -> str:
    text = text.strip()
    if text.split(" ", 1)[0].isalpha():
        text = text[:1].upper() + text[1:]
    return text + ("" if text.endswith((".", "!", "?")) else ".")
