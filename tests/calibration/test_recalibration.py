"""Private temperature scaling: derivatives, temperatures found, costs, neighbours."""

import json
import math

import pytest
import torch
from calibration_cases import classes, reals, trained

import dpbnn
from dpbnn import evaluation as ev
from dpbnn.calibration import RecalibratedPosterior, temperature, tempered
from dpbnn.predictive import ClassPredictive, CountPredictive, OrdinalPredictive, RealPredictive


def contributed(predictive, y, t, influence=0.0, asked="classification"):
    kept = torch.ones(len(y), dtype=torch.bool)
    rows, _ = temperature._contributed(predictive, y, kept, influence, asked)
    return rows(0, len(y), t)[:, 0]


def normal(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.double)


@pytest.mark.parametrize("t", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("influence", [0.0, 0.3, 100.0])
def test_a_record_contributes_the_derivative_of_its_log_loss(t, influence):
    """Of a training record it is that under draws weighted by 1/p(y), or nearer to equal ones."""
    predictive, y = ClassPredictive.from_logits(3 * normal(6, 9, 4)), torch.arange(9) % 4
    rows = torch.arange(9)
    logs = -predictive.log_probabilities[:, rows, y]
    spread = logs.std(0, correction=0)
    assert spread.min() > 0.3
    weights = (logs * (influence / spread).clamp(max=1)).softmax(0)

    def loss(log_t):
        p = tempered(predictive, math.exp(log_t)).probabilities[:, rows, y]
        return -(weights * p).sum(0).log()

    step = 1e-5
    expected = (loss(math.log(t) + step) - loss(math.log(t) - step)) / (2 * step)
    assert contributed(predictive, y, t, influence) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("t", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("shape", [(6, 200), (6, 200, 2)])
@pytest.mark.parametrize(
    ("asked", "level", "beyond"),
    [
        ("regression", 0.9, -0.5),
        ("uncounted", 0.9, -0.9),
        ("most", 0.75, -0.5),
        ("half", 0.5, -0.5),
    ],
)
def test_a_real_record_contributes_whether_its_interval_holds_it(t, shape, asked, level, beyond):
    predictive = RealPredictive(normal(*shape), normal(*shape).square() + 0.1)
    y = 2 * normal(*shape[1:])
    low, high = tempered(predictive, t).interval(level)
    held = ((low <= y) & (y <= high)).double()
    held = held.mean(1) if held.dim() > 1 else held
    assert 0.05 < held.mean() < 0.99
    found = contributed(predictive, y, t, asked=asked)
    assert found == pytest.approx(held + beyond)
    assert found.abs().max() < temperature.CLIP[asked]
    kinder = contributed(predictive, y, t, 1.0, asked)
    assert kinder.mean() < found.mean()  # less kind to itself


@pytest.mark.parametrize("t", [0.3, 1.0, 4.0])
def test_a_coarse_record_contributes_whether_its_most_probable_class_is_right(t):
    predictive, y = ClassPredictive.from_logits(3 * normal(6, 90, 4)), torch.arange(90) % 4
    p, top = tempered(predictive, t).mean.max(-1)
    found = contributed(predictive, y, t, asked="top class")
    assert found == pytest.approx(torch.where(top == y, 1 - p, -p) / torch.maximum(p, 1 - p))
    assert found.abs().max() < temperature.CLIP["top class"]


@pytest.mark.parametrize(
    ("task", "coarse", "most"),
    [("classification", "top class", 0.1), ("regression", "most", 0.2), ("uncounted", "half", 0.3)],
)
def test_records_are_asked_less_where_the_noise_of_the_plan_is_large(task, coarse, most):
    def plans(n, *epsilons):
        common = {"delta": 1e-5, "n": n, "steps": 5, "sampling": "full-batch"}
        return [dpbnn.plan(epsilon=epsilon, **common) for epsilon in epsilons]

    large = plans(2000, 0.005, 1.0)
    assert [temperature.question(task, plan) for plan in large] == [coarse, task]
    assert [temperature.error(task, plan) > most for plan in large] == [True, False]
    few = plans(100, 0.1, 2.0)  # chance of the records
    assert [temperature.question(task, plan) for plan in few] == [coarse, task]
    assert [temperature.error(task, plan) > most for plan in few] == [
        True,
        task == "classification",
    ]


def test_tempering_scales_logits_or_the_variance():
    logits = torch.randn(3, 8, 4)
    found = tempered(ClassPredictive.from_logits(logits), 2.0)
    assert found.probabilities.allclose((logits / 2).softmax(-1), atol=1e-6)
    real = RealPredictive(torch.randn(3, 8), torch.rand(3, 8) + 0.5)
    found = tempered(real, 4.0)
    assert found.mean.allclose(real.mean, atol=1e-6)
    assert found.variance.allclose(4 * real.variance, rtol=1e-4)
    assert tempered(real, 1.0).log_prob(real.mean).allclose(real.log_prob(real.mean), atol=1e-5)
    sure = tempered(ClassPredictive(torch.tensor([[[0.0, -math.inf]]])), 5.0)
    assert sure.mean.tolist() == [[1.0, 0.0]]
    with pytest.raises(ValueError, match="temperature=0"):
        tempered(real, 0)


@pytest.fixture(params=[False, True], ids=["fine", "coarse"])
def coarse(request, monkeypatch):
    """Whether records are asked the coarse question, whatever the noise."""

    def asked(task, plan):
        return temperature._COARSE[task][0] if request.param else task

    monkeypatch.setattr(temperature, "question", asked)
    return request.param


@pytest.mark.parametrize(("make", "truth", "tolerance"), [(classes, 2.5, 0.2), (reals, 4.0, 0.3)])
def test_the_true_temperature_is_found(make, truth, tolerance, coarse):
    """epsilon 1 on 3000 records. The standard error of log T is about 0.05; tolerance over 4 of it.

    The same test rejects a posterior that was left as it is.
    """
    posterior, data = make()
    found = dpbnn.recalibrate(posterior, data, 1.0, 1e-5)

    def close(value):
        return abs(math.log(value / truth)) < tolerance

    assert close(found.temperature)
    assert not close(1.0)
    _, (x, y) = make(seed=1)
    before, after = (ev.evaluate(p.predict(x), y, resamples=0) for p in (posterior, found))
    if make is classes:
        assert after.metrics["ece"].value < 0.05 < before.metrics["ece"].value
        assert after.metrics["accuracy"].value == before.metrics["accuracy"].value
    else:
        assert abs(after.coverage[2].observed - 0.9) < 0.05 < abs(before.coverage[2].observed - 0.9)


def test_without_noise_it_is_the_temperature_of_least_log_loss():
    posterior, (x, y) = classes(500)
    plan = dpbnn.open_plan(n=500, steps=20, sampling="full-batch")
    found = dpbnn.recalibrate(posterior, (x, y), plan=plan)
    best = found.temperature
    loss = [ev.nll(tempered(posterior.predict(x), best * s), y) for s in (0.99, 1.0, 1.01)]
    assert loss[1] == min(loss)
    assert not found.privacy.private
    assert "without noise" in found.privacy.reason


def test_blocks_do_not_matter(monkeypatch):
    posterior, data = classes(300)
    plan = dpbnn.open_plan(n=300, steps=12, sampling="full-batch")
    whole = dpbnn.recalibrate(posterior, data, plan=plan).temperature
    monkeypatch.setattr("dpbnn.calibration.release._ROWS", 70)
    assert dpbnn.recalibrate(posterior, data, plan=plan).temperature == pytest.approx(whole)


def test_the_ledger_is_charged_and_the_statement_covers_training_too():
    posterior, data = classes(1000, privacy=trained())
    ledger = dpbnn.Ledger(delta=1e-5, epsilon=2.0)
    found = dpbnn.recalibrate(posterior, data, 0.5, ledger=ledger)
    assert ledger.releases == temperature.STEPS
    assert ledger.epsilon() == pytest.approx(0.5, rel=0.01)
    assert [m["label"] for m in found.privacy.mechanisms] == ["sgld", "recalibration"]
    alone = trained()
    assert alone.epsilon < found.privacy.epsilon < alone.epsilon + 0.5
    # A second one adds up, and training is not counted twice.
    again = dpbnn.recalibrate(found, data, 0.5, ledger=ledger)
    assert [m["releases"] for m in again.privacy.mechanisms] == [50, 2 * temperature.STEPS]
    assert again.privacy.epsilon > found.privacy.epsilon


@pytest.mark.parametrize("make", [dpbnn.recalibrate, dpbnn.conformalize])
def test_two_alike_in_ledgers_of_their_own_are_counted_twice(make):
    """The second release looks exactly like the first, which its ledger does not hold."""
    posterior, data = classes(300, privacy=trained())
    once = make(posterior, data, 0.5)
    steps = once.privacy.mechanisms[-1]["releases"]
    posterior.privacy = once.privacy
    twice = make(posterior, data, 0.5)
    assert [m["releases"] for m in twice.privacy.mechanisms] == [50, steps, steps]
    assert twice.privacy.epsilon > once.privacy.epsilon > trained().epsilon


def test_caveats_of_the_training_are_said_once():
    posterior, data = classes(300, privacy=trained(tuning_runs=2))
    found = dpbnn.recalibrate(posterior, data, 0.5).privacy
    assert found.tuning_runs == 2
    assert len([text for text in found.caveats if text.startswith("2 other runs")]) == 1


def test_a_ledger_that_holds_the_training_states_it_once():
    x, y = torch.randn(400, 5), torch.randint(3, (400,))
    train, held = dpbnn.calibration_split(400)
    ledger = dpbnn.Ledger(epsilon=3.0, delta=1e-5, accountant="rdp")
    plan = dpbnn.plan(epsilon=2.0, delta=1e-5, n=320, batch_size=32, steps=10, accountant="rdp")
    posterior = dpbnn.fit(
        torch.nn.Linear(5, 3), (x[train], y[train]), method=dpbnn.SGD(), plan=plan, ledger=ledger
    )
    found = dpbnn.recalibrate(posterior, (x[held], y[held]), 0.5, ledger=ledger)
    assert found.privacy.epsilon == pytest.approx(ledger.epsilon())
    assert ledger.releases == 10 + temperature.STEPS
    assert found.privacy.epsilon <= 3.0


def test_what_was_trained_without_privacy_stays_not_private():
    statement = dpbnn.PrivacyStatement.not_private()
    posterior, data = classes(200, privacy=statement)
    assert not dpbnn.recalibrate(posterior, data, 1.0, 1e-5).privacy.private
    posterior, data = classes(200)
    found = dpbnn.recalibrate(posterior, data, 1.0, 1e-5).privacy
    assert not found.private
    assert "nothing is known of the training" in found.reason
    seeded = dpbnn.NoiseSource.seeded(0)
    found = dpbnn.recalibrate(posterior, data, 1.0, 1e-5, noise=seeded).privacy
    assert not found.private
    assert "debug" in found.reason


def test_nothing_is_spent_on_bad_data_or_beyond_the_budget():
    posterior, (x, y) = classes(100)
    ledger = dpbnn.Ledger(epsilon=0.5, delta=1e-5)
    bad = x.clone()
    bad[3, 0] = math.nan
    for data, options, error, message in (
        ((x, y + 5), {"epsilon": 0.1}, ValueError, "labels"),
        ((bad, y), {"epsilon": 0.1}, ValueError, "NaN"),
        ((x, y[:50]), {"epsilon": 0.1}, ValueError, "one target"),
        ((x[:0], y[:0]), {"epsilon": 0.1}, ValueError, "at least one"),
        ((x, y), {}, ValueError, "give one of them"),
        ((x, y), {"plan": dpbnn.open_plan(n=7, steps=1, sampling="full-batch")}, ValueError, "n=7"),
        ((x, y), {"epsilon": 2.0}, dpbnn.BudgetExceeded, "over the budget"),
    ):
        with pytest.raises(error, match=message):
            dpbnn.recalibrate(posterior, data, ledger=ledger, **options)
    plan = dpbnn.plan(
        epsilon=0.1, delta=1e-5, n=100, steps=8, sampling="full-batch", relation="replace-one"
    )
    with pytest.raises(ValueError, match="the plan has replace-one"):
        dpbnn.recalibrate(posterior, (x, y), plan=plan, ledger=ledger)
    with pytest.raises(ValueError, match="delta: missing"):
        dpbnn.recalibrate(posterior, (x, y), 0.1)
    with pytest.raises(ValueError, match="NaN or infinity"):
        dpbnn.recalibrate(reals(100)[0], (x, bad[:, 0]), 0.1, ledger=ledger)
    assert ledger.releases == 0


def temperature_of(data, relation="zero-out", make=classes, influence=0.0):
    posterior, _ = make(1)
    ledger = dpbnn.Ledger(relation=relation)
    options = {"ledger": ledger, "on_bad_rows": "zero", "influence": influence}
    return dpbnn.recalibrate(posterior, data, 1.0, 1e-5, **options).temperature


@pytest.mark.parametrize("influence", [0.0, 0.5])
def test_neighbours_move_no_release_by_more_than_its_sensitivity(influence, coarse):
    """A record that is very wrong and very sure, zeroed out, then replaced by one that is right."""
    posterior, (x, y) = classes(60)
    x[7] *= 10
    y[7] = posterior.predict(x[7:8]).mean.argmin()
    found = dpbnn.replay(lambda d: temperature_of(d, influence=influence), (x, y), 7)
    assert len(found.distances) == temperature.STEPS
    assert found.check().worst == pytest.approx(1, rel=2e-2 if coarse else 1e-3)
    other = y.clone()
    other[7] = posterior.predict(x[7:8]).mode[0]
    found = dpbnn.replay(lambda d: temperature_of(d, "replace-one"), (x, y), (x, other))
    assert 0.4 < found.check().worst <= 1 + 1e-5


def test_a_real_record_moves_each_count_by_no_more_than_its_sensitivity(coarse):
    """One far outside every interval moves each of the five counts by all of it, 0.9 or 0.5."""
    _, (x, y) = reals(60)
    y[7] = 1e6
    found = dpbnn.replay(lambda d: temperature_of(d, make=reals), (x, y), 7).check()
    level = 0.5 if coarse else 0.9
    assert found.distances == pytest.approx([level] * temperature.STEPS, rel=1e-3)
    assert found.worst == pytest.approx(1, rel=2e-3)
    _, (x, y) = reals(60)
    inside = y.clone()
    inside[7] = reals(1)[0].predict(x[7:8]).mean[0]
    y[7] = 1e6
    found = dpbnn.replay(lambda d: temperature_of(d, "replace-one", reals), (x, y), (x, inside))
    assert found.check().distances == pytest.approx([1.0] * temperature.STEPS, rel=1e-3)


def test_where_the_number_of_records_is_public_a_real_record_moves_each_count_by_half(monkeypatch):
    """Replacing one moves it by 1, all of the sensitivity, where 0.1 or -0.9 leaves nearly half."""
    monkeypatch.setattr(temperature, "question", lambda task, plan: task)
    posterior, (x, y) = reals(60)
    y[7] = 1e6
    inside = y.clone()
    inside[7] = posterior.predict(x[7:8]).mean[0]

    def run(data):
        ledger = dpbnn.Ledger(relation="replace-one")
        return dpbnn.recalibrate(posterior, data, 1.0, 1e-5, ledger=ledger).temperature

    found = dpbnn.replay(run, (x, y), (x, inside)).check()
    assert found.distances == pytest.approx([1.0] * temperature.STEPS, rel=1e-3)
    assert found.worst == pytest.approx(1, rel=2e-3)


def test_records_that_do_not_count_do_not_move_the_temperature():
    """Of 6000 records half are bad, or of 6000 expected only half are there. Truth is 4.

    The question for a public number finds more than 30 on the same records: it takes those who are
    missing for records outside of their intervals.
    """
    posterior, (x, y) = reals(3000)
    bad = torch.cat([x, torch.full_like(x, math.nan)]), torch.cat([y, y])
    plan = dpbnn.plan(
        epsilon=1.0, delta=1e-5, n=6000, steps=5, sampling="full-batch", relation="add/remove"
    )
    zeroed = dpbnn.recalibrate(posterior, bad, 1.0, 1e-5, on_bad_rows="zero")
    ledger = dpbnn.Ledger(relation="add/remove")
    fewer = dpbnn.recalibrate(posterior, (x, y), plan=plan, ledger=ledger)
    for found in (zeroed, fewer):
        assert abs(math.log(found.temperature / 4)) < 0.3


def test_replay_sees_weights_that_look_at_other_records(monkeypatch, coarse):
    """A broken twin: draws are weighted by what all records say, not by the record's own label."""
    name = "_right" if coarse else "_slope"
    honest = getattr(temperature, name)

    def shared(*given):
        return honest(*given) - (3 if coarse else 1) * honest(*given).mean()

    posterior, (x, y) = classes(60)
    bad = x.clone()
    bad[7] = math.nan
    y[7] = posterior.predict(10 * x[7:8]).mean.argmin()
    x[7] *= 10_000
    run = lambda d: temperature_of(d, influence=0.5)  # noqa: E731
    worst = dpbnn.replay(run, (x, y), (bad, y)).check().worst
    assert worst == pytest.approx(1, rel=2e-3 if coarse else 1e-3)
    monkeypatch.setattr(temperature, name, shared)
    with pytest.raises(dpbnn.PrivacyBug, match="times its sensitivity"):
        dpbnn.replay(run, (x, y), (bad, y)).check()


@pytest.mark.parametrize(("make", "truth"), [(classes, 2.5), (reals, 4.0)])
def test_noise_that_hides_the_temperature_leaves_it_near_1(make, truth):
    """200 records at epsilon 0.01: an error of log T above 4. Sure to 1e-6 for each bound.

    The same noise moves a plain bisection to anywhere within its range.
    """
    posterior, data = make(200)
    source = dpbnn.NoiseSource.seeded(3)
    found = [dpbnn.recalibrate(posterior, data, 0.01, 1e-5, noise=source) for _ in range(20)]
    logs = torch.tensor([math.log(f.temperature) for f in found])
    assert logs.abs().max() < 1.2
    assert logs.std() < 0.5


def test_replay_sees_a_temperature_that_skips_the_gate(monkeypatch):
    def raw(gate, contributions):
        return sum(chunk.weighted_sum(torch.ones(chunk.batch_size))["value"]
                   for chunk in contributions.chunks())  # fmt: skip

    monkeypatch.setattr(temperature, "release", raw)
    posterior, (x, _) = classes(1)
    right, wrong = posterior.predict(x).mode, posterior.predict(x).mean.argmin(-1)
    with pytest.raises(dpbnn.PrivacyBug, match="result differs"):
        dpbnn.replay(temperature_of, (x, right), (x, wrong)).check()


def test_it_can_be_saved():
    posterior, data = classes(200, privacy=trained())
    found = dpbnn.recalibrate(posterior, data, 1.0)
    again = RecalibratedPosterior.from_dict(json.loads(found.to_json()), posterior)
    assert again.to_dict() == found.to_dict()
    x = data[0][:5]
    assert again.predict(x).mean.equal(found.predict(x).mean)
    assert again.likelihood is posterior.likelihood
    with pytest.raises(ValueError, match="schema 1"):
        RecalibratedPosterior.from_dict({}, posterior)


def test_the_split_is_a_function_of_public_numbers():
    train, held = dpbnn.calibration_split(1000, 0.3, seed=5)
    assert (len(train), len(held)) == (700, 300)
    assert sorted(torch.cat([train, held]).tolist()) == list(range(1000))
    again = dpbnn.calibration_split(1000, 0.3, seed=5)
    assert held.equal(again[1])
    assert not held.equal(dpbnn.calibration_split(1000, 0.3, seed=6)[1])
    assert [len(part) for part in dpbnn.calibration_split(2, 0.01)] == [1, 1]
    for n, fraction in ((1, 0.5), (10, 1.0), (10, 0)):
        with pytest.raises(ValueError, match="must"):
            dpbnn.calibration_split(n, fraction)


def test_a_temperature_keeps_the_order_of_classes():
    predictive = OrdinalPredictive.from_logits(torch.randn(3, 4, 5))
    assert isinstance(tempered(predictive, 2.0), OrdinalPredictive)
    with pytest.raises(TypeError, match="CountPredictive has no temperature"):
        tempered(CountPredictive(torch.zeros(2, 3)), 2.0)
