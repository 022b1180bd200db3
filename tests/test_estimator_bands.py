"""Bands of the estimators' default: they hold the truth, and leave predictions as they are."""

import numpy as np
import pytest
import torch

import dpbnn
from dpbnn.data.standardising import Standardisation
from dpbnn.estimators.public_inputs import PublicInputs
from dpbnn.methods import laplace
from dpbnn.posteriors import IteratePosterior, LaplacePosterior
from dpbnn.predictive import WidenedClassPredictive, WidenedRealPredictive

N = 1500


def inputs(rng, rows=N):
    return rng.uniform(-1, 1, (rows, 3))


def chance(x):
    return 1 / (1 + np.exp(-(2 * x[:, 0] + 3 * x[:, 1] * x[:, 2])))


def mean(x):
    return x[:, 0] + np.sin(3 * x[:, 1])


def classifier(seed=0, **options):
    rng = np.random.default_rng(seed)
    x = inputs(rng)
    y = (rng.random(N) < chance(x)).astype(int)
    settings = {"bounds": (-1, 1), "classes": (0, 1), "random_state": seed, **options}
    return dpbnn.PrivateBayesClassifier(**settings).fit(x, y)


def regressor(seed=0, **options):
    rng = np.random.default_rng(seed)
    x = inputs(rng)
    y = mean(x) + 0.3 * rng.standard_normal(N)
    settings = {"bounds": (-1, 1), "target_bounds": (-4, 4), "random_state": seed, **options}
    return dpbnn.PrivateBayesRegressor(**settings).fit(x, y)


@pytest.fixture(scope="module")
def models():
    return classifier(), regressor()


def held(drawn, truth):
    low, high = np.quantile(drawn, [0.05, 0.95], axis=0)
    return np.mean((low <= truth) & (truth <= high))


def test_bands_hold_the_truth_and_the_iterates_alone_do_not(models):
    x = inputs(np.random.default_rng(9), 400)
    classes, numbers = (model.predictive(x) for model in models)
    assert type(classes) is WidenedClassPredictive
    assert type(numbers) is WidenedRealPredictive
    assert held(classes.probabilities[..., 1].numpy(), chance(x)) > 0.75
    assert held(numbers.means.numpy(), mean(x)) > 0.75
    assert held(classes.plain.probabilities[..., 1].numpy(), chance(x)) < 0.5


def test_predictions_are_those_of_the_iterates(models):
    x = inputs(np.random.default_rng(9), 50)
    for model in models:
        found = model.predictive(x)
        assert torch.equal(found.mean, found.plain.mean)
        assert len(found.plain.mean) == 50
    assert np.allclose(models[0].predict_proba(x), models[0].predictive(x).plain.mean)
    assert np.allclose(models[1].predict(x), models[1].predictive(x).plain.mean)


def test_far_from_the_data_less_is_known(models):
    """Records lie in [-1, 1]; the corners of the bounds are seen least."""
    middle, corner = np.zeros((1, 3)), np.array([[1.0, -1.0, 1.0]])
    found = models[1].predictive(np.concatenate([middle, corner]))
    assert found.epistemic[1] > found.epistemic[0]


def test_a_smaller_budget_has_wider_bands():
    x = inputs(np.random.default_rng(9), 200)
    wide, narrow = (
        classifier(epsilon=epsilon).predictive(x).probabilities.std(0).mean()
        for epsilon in (0.3, 5.0)
    )
    assert wide > 1.3 * narrow


def test_the_statement_says_nothing_of_narrow_bands(models):
    for model in models:
        assert type(model.posterior_) is LaplacePosterior
        assert not any("too narrow" in caveat for caveat in model.posterior_.caveats)
        assert model.posterior_.settings["inputs"] == "independent columns of the released moments"


def test_bands_are_saved_with_the_model(models, tmp_path):
    x = inputs(np.random.default_rng(9), 20)
    for name, model in zip(("classes", "numbers"), models, strict=True):
        model.save(tmp_path / name)
        again = type(model).load(tmp_path / name)
        assert torch.equal(again.predictive(x).epistemic, model.predictive(x).epistemic)


def test_an_interrupted_fit_has_the_bands_of_the_whole(tmp_path, monkeypatch):
    whole = classifier()
    original, calls = laplace.deviations, []

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(laplace, "deviations", stop)
    rng = np.random.default_rng(0)
    x = inputs(rng)
    y = (rng.random(N) < chance(x)).astype(int)
    model = dpbnn.PrivateBayesClassifier(bounds=(-1, 1), classes=(0, 1), random_state=0)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, out=tmp_path / "run")
    model.fit(x, y, out=tmp_path / "run", resume=True)
    shapes = {name: d.shape for name, d in whole.posterior_.deviations.items()}
    assert {name: d.shape for name, d in model.posterior_.deviations.items()} == shapes
    assert model.privacy_.epsilon < 1.1  # steps since the last checkpoint are paid again


def test_what_has_no_bands_says_so():
    """Persons, counts, methods of the user's choice, and networks that are too large."""
    rng = np.random.default_rng(0)
    x = inputs(rng, 300)
    counts = rng.poisson(2, 300)
    common = {"bounds": (-1, 1), "random_state": 0}
    bounded = {**common, "target_bounds": (0, 10)}
    persons = dpbnn.PrivateBayesRegressor(**bounded)
    persons.fit(x, counts.astype(float), units=np.arange(300) // 2)
    poisson = dpbnn.PrivateBayesRegressor(likelihood="poisson", **bounded).fit(x, counts)
    own = dpbnn.PrivateBayesClassifier(dpbnn.SGD(keep=5), classes=(0, 1), **common)
    own.fit(x, (x[:, 0] > 0).astype(int))
    large = dpbnn.PrivateBayesClassifier(classes=(0, 1), hidden=(500, 500), epochs=2, **common).fit(
        x, (x[:, 0] > 0).astype(int)
    )
    for model in (persons, poisson, own, large):
        assert type(model.posterior_) is IteratePosterior
        assert any("too narrow" in caveat for caveat in model.posterior_.caveats)


@pytest.mark.parametrize("kind", ["bernoulli", "weights"])
def test_other_likelihoods_of_classes_have_bands(kind):
    more = {"bernoulli": {"likelihood": "bernoulli"}, "weights": {"class_weight": {1: 3.0}}}
    model = classifier(**more[kind])
    x = inputs(np.random.default_rng(9), 300)
    found = model.predictive(x)
    assert found.probabilities.shape == (100, 300, 2)
    assert held(found.probabilities[..., 1].numpy(), chance(x)) > 0.7


def test_public_inputs_have_the_released_moments_and_nothing_else():
    standard = Standardisation(np.array([0.3, -0.9, 0.0, 0.999]), np.array([0.2, 0.02, 0.99, 0.5]))
    drawn = PublicInputs(standard, 50.0)(20_000).numpy()
    assert drawn.shape == (20_000, 4)
    assert np.abs(drawn[:, :3].mean(0)).max() < 0.03
    assert np.abs(drawn[:, :3].std(0) - 1).max() < 0.05  # the last cannot: its mean is at the bound
    assert (np.abs(drawn * standard.spread + standard.centre) <= 1 + 1e-9).all()
    assert np.abs(np.corrcoef(drawn[:, :3].T) - np.eye(3)).max() < 0.03
    assert np.array_equal(drawn, PublicInputs(standard, 50.0)(20_000).numpy())
    assert PublicInputs(standard, 2.0)(500).abs().max() <= 2
