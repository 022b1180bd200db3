"""Differentially private Bayesian neural networks.

A user states a model, a method, a budget (epsilon, delta) and data, and gets back a posterior that
predicts with uncertainty and a privacy statement that is true. Everything here is imported on first
use, so that `import dpbnn` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

_EXPORTS = {
    "dpbnn.privacy.accountants": ("ACCOUNTANTS",),
    "dpbnn.privacy.events": ("Event", "UnsupportedEvent"),
    "dpbnn.privacy.langevin": (
        "gdp_mu",
        "gdp_noise_multiplier",
        "sgd_equivalent",
        "sgld_clip",
        "sgld_equivalent",
        "sgld_learning_rate",
        "sgld_mu",
        "sgld_noise_multiplier",
        "sgld_plan",
    ),
    "dpbnn.privacy.ledger": ("BudgetExceeded", "Ledger", "LedgerCorrupted"),
    "dpbnn.privacy.passes": ("compare_passes",),
    "dpbnn.privacy.plan": ("ComposedPlan", "Plan", "compose", "plan"),
    "dpbnn.privacy.relation": ("Relation",),
    "dpbnn.privacy.sampling": ("FixedSize", "FullBatch", "Partition", "Poisson", "Sampler"),
    "dpbnn.privacy.statement": ("PrivacyStatement",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [*sorted(_MODULE_OF), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dpbnn' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from dpbnn.privacy.accountants import ACCOUNTANTS
    from dpbnn.privacy.events import Event, UnsupportedEvent
    from dpbnn.privacy.langevin import (
        gdp_mu,
        gdp_noise_multiplier,
        sgd_equivalent,
        sgld_clip,
        sgld_equivalent,
        sgld_learning_rate,
        sgld_mu,
        sgld_noise_multiplier,
        sgld_plan,
    )
    from dpbnn.privacy.ledger import BudgetExceeded, Ledger, LedgerCorrupted
    from dpbnn.privacy.passes import compare_passes
    from dpbnn.privacy.plan import ComposedPlan, Plan, compose, plan
    from dpbnn.privacy.relation import Relation
    from dpbnn.privacy.sampling import FixedSize, FullBatch, Partition, Poisson, Sampler
    from dpbnn.privacy.statement import PrivacyStatement
