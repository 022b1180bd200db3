"""Chain diagnostics of the network's outputs: split R-hat and effective sample size.

Weights of a network are not identified (hidden units can swap places), so their convergence is
neither needed nor expected. Predictions depend on the outputs alone.

A private chain does not mix at a useful clip (docs/methods.md has the reason and the figures), so
the numbers come with words: what the stored networks are, and how their spread is to be read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from dpbnn.evaluation.checked import Floats, finite
from dpbnn.evaluation.summary import plain
from dpbnn.likelihoods import full

__all__ = ["Diagnostics", "chain_diagnostics", "diagnose"]

_CELLS = 1 << 21  # numbers in a temporary array
_WARM = 0.1  # difference in temperature that is worth a warning
_HOT = ": batches add noise of their own; use larger ones, or a smaller learning rate"
_RHAT, _ESS = 1.01, 100  # limits of Vehtari et al.; the ESS per chain
_MIXED = (1.1, 50)  # largest median R-hat, and smallest median bulk ESS, of chains that have mixed


@dataclasses.dataclass(frozen=True, eq=False)
class Diagnostics:
    """Split R-hat and effective sample sizes of functions of the chains.

    Attributes:
        rhat: rank-normalised split R-hat of every function, the larger of bulk and folded; NaN for
            constant functions.
        ess_bulk: effective number of draws for the centre of every function.
        ess_tail: effective number of draws for its 5 % and 95 % quantiles.
        chains: number of chains.
        draws: draws in every chain.
        warnings: what is wrong, in words; empty where nothing was found.
        clip: the clip that the chains were run with, where known.
        temperature: that of the noise in their steps, privacy noise and batches together, as
            measured in the releases; the setting where it was not measured. The chains' own is at
            least this, as a clip weakens the pull of the data.
    """

    rhat: Floats
    ess_bulk: Floats
    ess_tail: Floats
    chains: int
    draws: int
    warnings: tuple[str, ...] = ()
    clip: float | None = None
    temperature: float | None = None

    @property
    def worst(self) -> dict[str, float]:
        """Largest R-hat and smallest effective sample sizes; NaN if all functions are constant."""
        pick = {"rhat": np.fmax, "ess_bulk": np.fmin, "ess_tail": np.fmin}
        return {k: float(p.reduce(getattr(self, k), axis=None)) for k, p in pick.items()}

    @property
    def median(self) -> dict[str, float]:
        """Medians over the functions that are not constant."""
        moving = {k: getattr(self, k) for k in ("rhat", "ess_bulk", "ess_tail")}
        kept = {k: v[np.isfinite(v)] for k, v in moving.items()}
        return {k: float(np.median(v)) if v.size else math.nan for k, v in kept.items()}

    @property
    def mixed(self) -> bool:
        """Whether the stored networks can be read as draws: median R-hat and bulk ESS say so."""
        median = self.median
        return median["rhat"] <= _MIXED[0] and median["ess_bulk"] >= _MIXED[1]

    @property
    def meaning(self) -> tuple[str, ...]:
        """What the stored networks are, and what that means for a reader, in sentences."""
        count = self.chains * self.draws
        worth = self.median["ess_bulk"]
        if self.mixed:
            return (
                f"The {count} stored networks are draws of a chain that has mixed where it was "
                f"looked at: together they tell as much as {_draws(worth)}.",
            )
        paths = "one training path" if self.chains == 1 else f"{self.chains} training paths"
        return (
            f"The {count} stored networks are points near the end of {paths} with noise, not "
            f"independent draws from the posterior."
            + (f" Together they tell as much as {_draws(worth)}." if math.isfinite(worth) else ""),
            "Predictions are their average, as with an averaged optimizer. Figures on test records "
            "(accuracy, calibration, coverage) measure that average itself, and private "
            "temperatures and prediction sets hold for it.",
            "Their spread is less than that of the posterior, most of all far from the data. Do "
            "not read epistemic uncertainty or bands as the width of the posterior.",
            "A longer chain would tell more."
            if self.clip is None or not math.isfinite(self.clip)
            else "Epsilon does not depend on mixing. At a given epsilon, a chain that mixes must "
            "clip harder; where that was tried, it predicted worse.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain values for JSON; NaN is None, infinity the text "inf"."""
        names = ("worst", "median", "clip", "temperature", "mixed", "meaning", "warnings")
        own = {name: plain(getattr(self, name)) for name in names}
        functions = int(self.rhat.size)
        return {"chains": self.chains, "draws": self.draws, "functions": functions, **own}

    def __str__(self) -> str:
        worst, median = self.worst, self.median
        lines = [
            f"{self.chains} chain{'s' if self.chains > 1 else ''} of {self.draws} draws, "
            f"{self.rhat.size} functions"
            + ("" if self.clip is None else f", clip {self.clip:.4g}")
            + ("" if self.temperature is None else f", temperature {self.temperature:.3g}"),
            f"  R-hat     worst {worst['rhat']:.3f}, median {median['rhat']:.3f}",
            f"  bulk ESS  worst {worst['ess_bulk']:.0f}, median {median['ess_bulk']:.0f}",
            f"  tail ESS  worst {worst['ess_tail']:.0f}, median {median['ess_tail']:.0f}",
        ]
        lines += [f"  {sentence}" for sentence in self.meaning]
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])


def chain_diagnostics(outputs: Any) -> Diagnostics:
    """Return split R-hat and effective sample sizes of every function of the chains.

        R-hat = sqrt((L - 1)/L + B/(L W)),    ESS = M L / (-1 + 2 sum_k P_k)

    over M half chains of L draws, with B and W the variances between and within them, and P_k
    Geyer's initial monotone sequence of paired autocorrelations. For R-hat and the bulk ESS, draws
    are replaced by normal scores of their ranks; the tail ESS is the smaller of those of the
    indicators of the 5 % and 95 % quantiles.

    Reference: Vehtari, Gelman, Simpson, Carpenter, Bürkner, Rank-normalization, folding, and
    localization, 2021.

    Args:
        outputs: [chains, draws, ...functions], with at least 8 draws.
    """
    values = finite(outputs, "outputs")
    if values.ndim < 2 or values.shape[1] < 8:
        raise ValueError(
            f"outputs have shape {list(values.shape)}; give [chains, draws, ...functions] with at "
            f"least 8 draws in every chain"
        )
    chains, draws = values.shape[:2]
    flat = values.reshape(chains, draws, -1)
    size = max(1, _CELLS // (chains * draws))
    parts = [_diagnosed(flat[:, :, i : i + size]) for i in range(0, flat.shape[2], size)]
    shape = values.shape[2:]
    rhat, bulk, tail = (np.concatenate(part).reshape(shape) for part in zip(*parts, strict=True))
    return Diagnostics(rhat, bulk, tail, chains, draws, _warnings(rhat, bulk, tail, chains))


def diagnose(
    posterior: Any, x: Any, chains: int | None = None, *, inputs: int = 256
) -> Diagnostics:
    """Return the diagnostics of a posterior of stored iterates, in its outputs at x.

    Functions are the network's outputs at every input; for classes, the logits minus their mean.

    Args:
        posterior: an `IteratePosterior`, from SGLD or SGHMC.
        x: public inputs, examples first.
        chains: number of chains, stored one after the other; the settings' by default.
        inputs: largest number of inputs used, evenly spaced.
    """
    stored = getattr(posterior, "iterates", None)
    if stored is None:
        raise ValueError(
            f"{type(posterior).__name__} has no chains; diagnostics are for SGLD and SGHMC"
        )
    settings = posterior.settings
    chains = int(settings.get("chains", 1)) if chains is None else chains
    draws = len(stored)
    if chains < 1 or draws % chains:
        raise ValueError(f"chains={chains}: does not divide the {draws} iterates; give its number")
    count = len(x)
    rows = np.linspace(0, count - 1, min(count, inputs)).round().astype(int)
    outputs = posterior.outputs(torch.as_tensor(x)[rows], draws)
    outputs = full(posterior.likelihood).identified(outputs)
    found = chain_diagnostics(outputs.reshape(chains, draws // chains, *outputs.shape[1:]))
    clip, asked = settings.get("clip"), settings.get("temperature")
    temperature = settings.get("measured_temperature", asked)
    warnings = [*found.warnings, *settings.get("caveats", ())]
    if clip is not None and math.isfinite(clip):
        warnings.append(
            f"gradients were clipped at {clip:.4g}, so that the chains settle near, not at, the "
            f"posterior; nothing here can tell how near"
        )
    if temperature is not None and abs(temperature - 1) > _WARM:
        at = "at least " if clip is not None and math.isfinite(clip) else ""
        warnings.append(
            f"the chains sample the posterior at temperature {at}{temperature:.3g}, not 1"
            + ("" if asked is None or abs(temperature - asked) <= _WARM * asked else _HOT)
        )
    return dataclasses.replace(found, clip=clip, temperature=temperature, warnings=tuple(warnings))


def _diagnosed(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return R-hat, bulk and tail ESS of [chains, draws, functions]."""
    split = _split(values)
    pooled = split.reshape(-1, split.shape[2])
    centre = np.median(pooled, axis=0)
    ranked, folded = _normal_scores(split), _normal_scores(np.abs(split - centre))
    low, high = np.quantile(pooled, [0.05, 0.95], axis=0)
    tail = np.fmin(_ess((split <= low).astype(float)), _ess((split <= high).astype(float)))
    return np.fmax(_rhat(ranked), _rhat(folded)), _ess(ranked), tail


def _split(values: Floats) -> Floats:
    """Return the halves of every chain as chains; an odd draw in the middle is left out."""
    half = values.shape[1] // 2
    return np.concatenate([values[:, :half], values[:, -half:]])


def _normal_scores(values: Floats) -> Floats:
    """Return Phi^-1((r - 3/8)/(S + 1/4)) of the ranks among all draws, ties averaged."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    pooled = values.reshape(-1, values.shape[2])
    ranks = rankdata(pooled, axis=0)
    return ndtri((ranks - 0.375) / (len(pooled) + 0.25)).reshape(values.shape)


def _rhat(values: Floats) -> Floats:
    draws = values.shape[1]
    within = values.var(1, ddof=1).mean(0)
    between = draws * values.mean(1).var(0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt((draws - 1) / draws + between / draws / within)


def _ess(values: Floats) -> Floats:
    """Return the effective sample size of the mean of every function; NaN where it is constant."""
    chains, draws = values.shape[:2]
    covariance = _autocovariance(values)
    within = (covariance[:, 0] * draws / (draws - 1)).mean(0)
    variance = within * (draws - 1) / draws + values.mean(1).var(0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = 1 - (within - covariance.mean(0)) / variance
    correlation[0] = 1.0
    even = draws // 2 * 2
    pairs = correlation[:even].reshape(-1, 2, values.shape[2]).sum(1)
    kept = np.logical_and.accumulate(pairs > 0, axis=0)
    kept[0] = True
    monotone = np.minimum.accumulate(np.where(kept, pairs, np.inf), axis=0)
    after = np.minimum(kept.sum(0) * 2, draws - 1)
    following = np.take_along_axis(correlation, after[None], 0)[0]
    time = -1 + 2 * np.where(kept, monotone, 0.0).sum(0) + np.maximum(following, 0.0)
    total = chains * draws
    size = total / np.maximum(time, 1 / math.log10(total))
    return np.where(variance > 0, size, np.nan)


def _autocovariance(values: Floats) -> Floats:
    """Return the autocovariances of every chain at all lags, by the fast Fourier transform."""
    from scipy.fft import irfft, next_fast_len, rfft

    draws = values.shape[1]
    length = next_fast_len(2 * draws, real=True)
    spectrum = rfft(values - values.mean(1, keepdims=True), length, axis=1)
    return irfft(np.abs(spectrum) ** 2, length, axis=1)[:, :draws] / draws


def _draws(worth: float) -> str:
    count = max(1, round(worth))
    return f"{count} independent draw{'s' * (count != 1)}"


def _warnings(rhat: Floats, bulk: Floats, tail: Floats, chains: int) -> tuple[str, ...]:
    found = []
    still = int(np.isnan(rhat).sum())
    if still:
        found.append(f"{still} of {rhat.size} functions do not move at all")
    apart = int((rhat > _RHAT).sum())
    if apart:
        found.append(
            f"{apart} of {rhat.size} functions have R-hat above {_RHAT}, the worst "
            f"{np.nanmax(rhat):.3f}: parts of the chains differ there"
        )
    for name, sizes in (("bulk", bulk), ("tail", tail)):
        few = int((sizes < _ESS * chains).sum())
        if few:
            found.append(
                f"{few} of {sizes.size} functions have a {name} ESS below {_ESS * chains}, the "
                f"worst {np.nanmin(sizes):.0f}"
            )
    if chains == 1:
        found.append("one chain, split in halves, cannot show modes that it never visited")
    return tuple(found)
