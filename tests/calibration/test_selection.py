"""Private selection: it finds the better model, pays for it, and its neighbours agree."""

import math

import pytest
import torch
from calibration_cases import classes, reals
from torch import nn

import dpbnn
from dpbnn.posteriors import PointPosterior

PLAN = {"delta": 1e-5, "n": 8000, "batch_size": 200, "steps": 20}


def worse(posterior, spread=1.0):
    """The same model with disturbed weights."""
    model = nn.Linear(5, posterior.model.out_features, bias=posterior.model.bias is not None)
    with torch.no_grad():
        noise = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(3))
        model.weight.copy_(posterior.model.weight + spread * noise)
        if model.bias is not None:
            model.bias.copy_(posterior.model.bias)
    return PointPosterior(model, posterior.likelihood, privacy=posterior.privacy)


def candidates(make, **options):
    good, data = make(**options)
    return {"bad": worse(good, 3.0), "good": good, "poor": worse(good)}, data


@pytest.mark.parametrize(
    ("make", "score"), [(classes, "log_prob"), (classes, "accuracy"), (reals, "log_prob")]
)
def test_the_best_is_found(make, score):
    named, data = candidates(make, **({"temperature": 1.0} if make is classes else {"noise": 1.0}))
    chosen = dpbnn.select(named, data, 1.0, 1e-5, ledger=dpbnn.Ledger(), score=score)
    first, second = sorted(chosen.scores.values())[:0:-1]
    assert first - second > 8 * chosen.noise_std  # so that noise does not decide this test
    assert chosen.name == "good"
    assert chosen.posterior is named["good"]
    assert list(chosen.scores) == list(named)
    assert abs(sum(chosen.scores.values())) < 10 * chosen.noise_std * math.sqrt(3)


def test_scores_are_true_but_for_the_noise():
    named, (x, y) = candidates(classes)
    right = {k: (p.predict(x).mode == y).double().mean().item() for k, p in named.items()}
    mean = sum(right.values()) / 3
    got = dpbnn.select(named, (x, y), 5.0, 1e-5, ledger=dpbnn.Ledger(), score="accuracy")
    for name, value in right.items():
        assert abs(got.scores[name] - (value - mean)) < 5 * got.noise_std  # false alarm 2e-6
    assert got.noise_std < 0.01


def test_it_is_in_the_ledger_and_the_statement():
    ledger = dpbnn.Ledger(epsilon=3.0, delta=1e-5)
    plan = dpbnn.plan(epsilon=1.0, **PLAN)
    named, data = candidates(classes)
    for posterior in named.values():
        for event in plan.own_events:
            ledger.spend(event, label="sgld", clip=1.0)
        posterior.privacy = ledger.statement()
    before = ledger.epsilon()
    chosen = dpbnn.select(named, data, 0.5, ledger=ledger)
    assert ledger.epsilon() > before
    assert chosen.privacy.epsilon == pytest.approx(ledger.epsilon(), rel=1e-6)
    assert chosen.privacy.tuning_runs == 0
    assert [m["label"] for m in chosen.privacy.mechanisms] == ["sgld", "private selection"]
    with pytest.raises(dpbnn.BudgetExceeded):
        dpbnn.select(named, data, 3.0, ledger=ledger)


def test_candidates_of_another_ledger_are_refused():
    named, data = candidates(classes)
    for posterior in named.values():  # each on a ledger of its own
        posterior.privacy = dpbnn.plan(epsilon=1.0, **PLAN).statement(labels=["sgld"], clip=1.0)
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match="same ledger"):
        dpbnn.select(named, data, 0.5, 1e-5, ledger=ledger)
    assert ledger.releases == 0


def test_one_open_candidate_makes_it_not_private():
    named, data = candidates(classes)
    named["poor"].privacy = dpbnn.PrivacyStatement.not_private()
    chosen = dpbnn.select(named, data, 0.5, 1e-5, ledger=dpbnn.Ledger())
    assert not chosen.privacy.private


@pytest.mark.parametrize("score", ["log_prob", "accuracy"])
def test_a_neighbour_moves_the_release_by_at_most_the_clip(score):
    named, (x, y) = candidates(classes, n=200)
    x[7] *= 10
    y[7] = named["good"].predict(x[7:8]).mode[0]

    def run(data):
        chosen = dpbnn.select(named, data, 1.0, 1e-5, ledger=dpbnn.Ledger(), score=score)
        return chosen.name, chosen.scores

    assert 0.4 < dpbnn.replay(run, (x, y), 7).check().worst <= 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"candidates": []}, "at least 2"),
        ({"score": "rmse"}, "must be 'log_prob' or 'accuracy'"),
        ({"plan": dpbnn.plan(epsilon=1.0, delta=1e-5, n=3000, sampling="full-batch", steps=2),
          "epsilon": None}, "needs one"),
    ],
)  # fmt: skip
def test_wrong_arguments_cost_nothing(change, match):
    named, data = candidates(classes)
    ledger = dpbnn.Ledger()
    arguments = {"candidates": named, "data": data, "epsilon": 1.0, "delta": 1e-5, **change}
    with pytest.raises(ValueError, match=match):
        dpbnn.select(**arguments, ledger=ledger)
    assert ledger.releases == 0


def test_accuracy_needs_classes():
    named, data = candidates(reals)
    with pytest.raises(ValueError, match="real numbers"):
        dpbnn.select(named, data, 1.0, 1e-5, ledger=dpbnn.Ledger(), score="accuracy")
