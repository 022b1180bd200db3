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
    "dpbnn.audit": ("PrivacyBug", "Replay", "replay"),
    "dpbnn.calibration": ("calibration_split", "conformalize", "recalibrate", "select"),
    "dpbnn.contributions": ("DenseContributions", "UnsupportedModel", "attach"),
    "dpbnn.estimators": ("PrivateBayesClassifier", "PrivateBayesRegressor"),
    "dpbnn.evaluation": ("Evaluation", "evaluate"),
    "dpbnn.methods": (
        "ADF",
        "BBP",
        "EP",
        "SEP",
        "EM",
        "SGD",
        "SGHMC",
        "SGLD",
        "VI",
        "MCDropout",
        "Moments",
        "NoiseAware",
        "cyclical",
        "dropout_precision",
        "dropout_weight_decay",
    ),
    "dpbnn.mixtures": ("GaussianMixture",),
    "dpbnn.networks": ("cnn", "mlp", "to_gaussian"),
    "dpbnn.posteriors": ("Posterior",),
    "dpbnn.predictive": ("Predictive",),
    "dpbnn.priors": ("Flat", "Gaussian", "Laplace", "ScaleMixture"),
    "dpbnn.privacy.accountants": ("ACCOUNTANTS",),
    "dpbnn.privacy.bayesian": ("BayesianAccountant",),
    "dpbnn.privacy.bayesian_costs": ("attack_probability", "pair_distances"),
    "dpbnn.privacy.bayesian_estimate": ("BayesianPrivacyEstimate",),
    "dpbnn.privacy.events": ("Event", "UnsupportedEvent"),
    "dpbnn.privacy.gate": ("Gate",),
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
    "dpbnn.privacy.mechanisms": ("GaussianNoise", "Mechanism"),
    "dpbnn.privacy.noise": ("NoiseSource",),
    "dpbnn.privacy.plan": ("ComposedPlan", "Plan", "compose", "open_plan", "plan"),
    "dpbnn.privacy.relation": ("Relation",),
    "dpbnn.privacy.sampling": ("FixedSize", "FullBatch", "Partition", "Poisson", "Sampler"),
    "dpbnn.privacy.statement": ("PrivacyStatement",),
    "dpbnn.reproduce.dp_bbb": ("compare_passes",),
    "dpbnn.runs": ("load_run",),
    "dpbnn.silos": ("Site",),
    "dpbnn.sources": ("DataSource",),
    "dpbnn.training": ("fit", "load"),
}
_CALLABLE = ("contributions",)  # a subpackage that is a function as well
_ROOMS = ("calibration", "data", "evaluation")  # subpackages that are used by their own name
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [*sorted((*_MODULE_OF, *_CALLABLE, *_ROOMS)), "__version__"]


def __getattr__(name: str) -> Any:
    if name in (*_CALLABLE, *_ROOMS):
        return importlib.import_module(f"dpbnn.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dpbnn' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from dpbnn import calibration, data, evaluation
    from dpbnn.audit import PrivacyBug, Replay, replay
    from dpbnn.calibration import calibration_split, conformalize, recalibrate, select
    from dpbnn.contributions import (
        DenseContributions,
        UnsupportedModel,
        attach,
        contributions,
    )
    from dpbnn.estimators import PrivateBayesClassifier, PrivateBayesRegressor
    from dpbnn.evaluation import Evaluation, evaluate
    from dpbnn.methods import (
        ADF,
        BBP,
        EM,
        EP,
        SEP,
        SGD,
        SGHMC,
        SGLD,
        VI,
        MCDropout,
        Moments,
        NoiseAware,
        cyclical,
        dropout_precision,
        dropout_weight_decay,
    )
    from dpbnn.mixtures import GaussianMixture
    from dpbnn.networks import cnn, mlp, to_gaussian
    from dpbnn.posteriors import Posterior
    from dpbnn.predictive import Predictive
    from dpbnn.priors import Flat, Gaussian, Laplace, ScaleMixture
    from dpbnn.privacy.accountants import ACCOUNTANTS
    from dpbnn.privacy.bayesian import BayesianAccountant
    from dpbnn.privacy.bayesian_costs import attack_probability, pair_distances
    from dpbnn.privacy.bayesian_estimate import BayesianPrivacyEstimate
    from dpbnn.privacy.events import Event, UnsupportedEvent
    from dpbnn.privacy.gate import Gate
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
    from dpbnn.privacy.mechanisms import GaussianNoise, Mechanism
    from dpbnn.privacy.noise import NoiseSource
    from dpbnn.privacy.plan import ComposedPlan, Plan, compose, open_plan, plan
    from dpbnn.privacy.relation import Relation
    from dpbnn.privacy.sampling import FixedSize, FullBatch, Partition, Poisson, Sampler
    from dpbnn.privacy.statement import PrivacyStatement
    from dpbnn.reproduce.dp_bbb import compare_passes
    from dpbnn.runs import load_run
    from dpbnn.silos import Site
    from dpbnn.sources import DataSource
    from dpbnn.training import fit, load
