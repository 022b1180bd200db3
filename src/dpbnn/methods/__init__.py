"""Methods: what an example contributes, and what becomes of the release."""

from dpbnn.methods.adf import ADF
from dpbnn.methods.bbp import BBP
from dpbnn.methods.em import EM
from dpbnn.methods.ep import EP
from dpbnn.methods.mc_dropout import MCDropout, dropout_precision, dropout_weight_decay
from dpbnn.methods.method import Method, Problem, Process
from dpbnn.methods.moments import Moments
from dpbnn.methods.noise_aware import NoiseAware
from dpbnn.methods.sep import SEP
from dpbnn.methods.sgd import SGD
from dpbnn.methods.sgld import SGHMC, SGLD, cyclical
from dpbnn.methods.state import State
from dpbnn.methods.vi import VI

__all__ = [
    "ADF",
    "BBP",
    "EM",
    "EP",
    "SEP",
    "SGD",
    "SGHMC",
    "SGLD",
    "VI",
    "MCDropout",
    "Method",
    "Moments",
    "NoiseAware",
    "Problem",
    "Process",
    "State",
    "cyclical",
    "dropout_precision",
    "dropout_weight_decay",
]
