"""Likelihoods: log p(y | outputs) of each example, and all that depends on the kind of targets.

`fit` takes any object with `log_prob`. A likelihood that inherits from `LikelihoodBase` also says
which targets it takes and how it predicts, and it is saved and loaded by its class name. To add
one, write its class in one file.

A likelihood sees one example at a time. It may hold public numbers, such as class weights or
bounds of counts. It may not hold anything that was computed from the data.
"""

from dpbnn.likelihoods.base import Likelihood, LikelihoodBase, full, likelihood, registered
from dpbnn.likelihoods.classes import Bernoulli, Categorical, Mixture, Ordinal
from dpbnn.likelihoods.counts import Poisson, ScaledPoisson
from dpbnn.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian, LearnedNoiseGaussian
from dpbnn.likelihoods.weighted import Weighted

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LearnedNoiseGaussian",
    "Likelihood",
    "LikelihoodBase",
    "Mixture",
    "Ordinal",
    "Poisson",
    "ScaledPoisson",
    "Weighted",
    "full",
    "likelihood",
    "registered",
]
