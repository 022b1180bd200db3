"""Chain diagnostics against theory, and on chains that have not converged."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import dpbnn
from dpbnn import evaluation as ev


def autoregressive(a, chains=4, draws=2000, functions=40, seed=0):
    """Stationary AR(1) chains: x_t = a x_{t-1} + e_t, worth draws (1 - a)/(1 + a)."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(draws, chains, functions))
    x = np.empty_like(noise)
    x[0] = noise[0] / math.sqrt(1 - a * a)
    for t in range(1, draws):
        x[t] = a * x[t - 1] + noise[t]
    return x.swapaxes(0, 1)


@pytest.mark.parametrize("a", [0.0, 0.5, 0.9, -0.4])
def test_bulk_ess_of_autoregressive_chains_is_that_of_theory(a):
    """The mean over 40 functions lies within 8 % (its standard error is below 2 %)."""
    found = ev.chain_diagnostics(autoregressive(a))
    theory = 4 * 2000 * (1 - a) / (1 + a)
    assert found.ess_bulk.mean() == pytest.approx(theory, rel=0.08)
    assert found.median["ess_bulk"] == pytest.approx(theory, rel=0.1)
    assert found.worst["rhat"] < 1.03
    assert (found.chains, found.draws) == (4, 2000)


def test_tail_ess_is_that_of_the_quantiles_indicator():
    """Independent draws: as many as there are. Slow chains: fewer, yet more than the bulk."""
    found = ev.chain_diagnostics(autoregressive(0.0))
    assert found.ess_tail.mean() == pytest.approx(8000, rel=0.08)
    slow = ev.chain_diagnostics(autoregressive(0.9))
    assert slow.ess_bulk.mean() < slow.ess_tail.mean() < 4000


def test_a_textbook_rhat():
    """Four half chains with known moments, before ranks: sqrt((L-1)/L + B/(L W))."""
    from dpbnn.evaluation.diagnostics import _rhat

    x = np.array([[1.0, 2, 3, 4], [2, 3, 4, 5], [1, 2, 3, 4], [6, 7, 8, 9]])[:, :, None]
    between = 4 * np.var([2.5, 3.5, 2.5, 7.5], ddof=1)
    assert _rhat(x)[0] == pytest.approx(math.sqrt(3 / 4 + between / 4 / (5 / 3)))


def test_good_chains_have_no_warning():
    assert ev.chain_diagnostics(autoregressive(0.3)).warnings == ()


@pytest.mark.parametrize("wrong", ["shifted", "drifting", "wider", "one drifting chain"])
def test_chains_that_have_not_converged_are_flagged(wrong):
    x = autoregressive(0.3)
    if wrong == "shifted":
        x[0] += 1.0
    elif wrong == "drifting":
        x += np.linspace(0, 2, 2000)[:, None]
    elif wrong == "wider":
        x[0] *= 2  # only the folded ranks can tell
    else:
        x = x[:1] + np.linspace(0, 2, 2000)[:, None]
    found = ev.chain_diagnostics(x)
    assert found.worst["rhat"] > 1.03
    assert any("have R-hat above 1.01" in warning for warning in found.warnings)
    assert "R-hat" in str(found)


def test_rank_normalising_survives_heavy_tails():
    x = np.random.default_rng(0).standard_cauchy((4, 1000, 5))
    assert ev.chain_diagnostics(x).worst["rhat"] < 1.01


def test_a_monotone_transformation_changes_nothing_in_the_bulk():
    x = autoregressive(0.5, functions=3)
    a, b = ev.chain_diagnostics(x), ev.chain_diagnostics(np.exp(x))
    assert a.ess_bulk == pytest.approx(b.ess_bulk)
    assert a.ess_tail == pytest.approx(b.ess_tail)


def test_functions_that_do_not_move_are_named():
    x = autoregressive(0.0, functions=3)
    x[:, :, 1] = 5.0
    found = ev.chain_diagnostics(x)
    assert math.isnan(found.rhat[1])
    assert found.worst["rhat"] < 1.01
    assert found.warnings == ("1 of 3 functions do not move at all",)
    assert ev.chain_diagnostics(np.ones((2, 10, 2))).to_dict()["worst"]["rhat"] is None
    stuck = np.stack([np.zeros(50), np.ones(50)])
    assert ev.chain_diagnostics(stuck).rhat == math.inf


def test_shapes_blocks_and_refusals(monkeypatch):
    x = autoregressive(0.5, functions=6)
    whole = ev.chain_diagnostics(x.reshape(4, 2000, 2, 3))
    assert whole.rhat.shape == (2, 3)
    monkeypatch.setattr("dpbnn.evaluation.diagnostics._CELLS", 8000 * 2)
    parts = ev.chain_diagnostics(torch.from_numpy(x))
    assert parts.ess_bulk == pytest.approx(whole.ess_bulk.reshape(-1))
    for bad in (x[:, :7], np.zeros(10)):
        with pytest.raises(ValueError, match="at least 8 draws"):
            ev.chain_diagnostics(bad)
    with pytest.raises(ValueError, match="not finite"):
        ev.chain_diagnostics(np.full((2, 10), np.nan))


@pytest.fixture(scope="module")
def posterior():
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = torch.distributions.Categorical(logits=x @ torch.randn(3, 2)).sample()
    return dpbnn.fit(
        nn.Linear(3, 2), (x, y),
        method=dpbnn.SGLD(learning_rate=2e-3, chains=3, keep=60),
        plan=dpbnn.plan(epsilon=5.0, delta=1e-5, n=200, batch_size=50, steps=120),
    )  # fmt: skip


def test_a_posterior_is_diagnosed_chain_by_chain(posterior):
    x = torch.randn(10, 3)
    found = ev.diagnose(posterior, x)
    assert (found.chains, found.draws) == (3, 60)
    assert found.rhat.shape == (10, 2)
    assert found.clip == posterior.settings["clip"]
    assert found.temperature == posterior.settings["measured_temperature"]
    assert found.temperature == pytest.approx(1, abs=0.5)
    assert any("clipped at" in warning for warning in found.warnings)
    open_gate = dataclasses.replace(found, clip=math.inf).to_dict()
    assert json.loads(json.dumps(open_gate, allow_nan=False))["clip"] == "inf"
    outputs = posterior.outputs(x, 180)
    centred = (outputs - outputs.mean(-1, keepdim=True)).reshape(3, 60, 10, 2)
    assert found.ess_bulk == pytest.approx(ev.chain_diagnostics(centred).ess_bulk)
    assert ev.diagnose(posterior, x, chains=1).draws == 180
    assert ev.diagnose(posterior, x, inputs=4).rhat.shape == (4, 2)
    with pytest.raises(ValueError, match="chains=7"):
        ev.diagnose(posterior, x, chains=7)


def test_a_posterior_without_chains_is_refused(posterior):
    with pytest.raises(ValueError, match="has no chains"):
        ev.diagnose(posterior.summary(5), torch.randn(4, 3))


def test_the_temperature_is_the_measured_one_and_caveats_are_among_the_warnings(posterior):
    hot = copy.copy(posterior)
    hot.settings = {**posterior.settings, "measured_temperature": 3.456}
    found = ev.diagnose(hot, torch.randn(4, 3))
    assert found.temperature == 3.456
    (said,) = [warning for warning in found.warnings if "temperature" in warning]
    assert said.startswith("the chains sample the posterior at temperature at least 3.46, not 1")
    assert "batches add noise" in said
    assert posterior.caveats
    assert set(posterior.caveats) <= set(found.warnings)
    asked = copy.copy(posterior)
    asked.settings = {"temperature": 0.5, "chains": 3}
    found = ev.diagnose(asked, torch.randn(4, 3))
    assert found.warnings[-1] == "the chains sample the posterior at temperature 0.5, not 1"


def test_words_say_what_the_stored_networks_are():
    """A chain that has not mixed is a training path; one that has is draws."""
    mixed = ev.chain_diagnostics(autoregressive(0.3))
    assert mixed.mixed
    assert "draws of a chain that has mixed" in mixed.meaning[0]
    walk = np.random.default_rng(0).normal(size=(1, 100, 20)).cumsum(1)
    path = ev.chain_diagnostics(walk)
    assert not path.mixed
    assert path.median["rhat"] > 1.1
    assert "The 100 stored networks are points near the end of one training path" in path.meaning[0]
    assert "Together they tell as much as" in path.meaning[0]
    assert path.meaning[-1] == "A longer chain would tell more."
    clipped = dataclasses.replace(path, clip=1.5)
    assert clipped.meaning[-1].startswith("Epsilon does not depend on mixing")
    assert path.to_dict()["meaning"] == list(path.meaning)
    assert "training path" in str(path)
    still = ev.chain_diagnostics(np.ones((2, 10, 2)))
    assert not still.mixed
    assert "tell as much" not in still.meaning[0]
