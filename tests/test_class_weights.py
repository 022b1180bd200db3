"""Class weights in estimators and the command: public, corrected for, refused otherwise."""

import json
import math

import numpy as np
import pytest
import torch
from command_line import run
from sklearn.base import clone

import dpbnn

RARE = {"ill": 12.0}
PUBLIC = {"bounds": (-4, 4), "classes": ["ill", "well"]}


def rare(n=3000, seed=0):
    """Two columns, of which the first makes ill; about 6 %."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2)).clip(-4, 4)
    ill = rng.random(n) < 1 / (1 + np.exp(3.5 - 1.5 * x[:, 0]))
    return x, np.where(ill, "ill", "well")


def test_probabilities_are_those_of_the_population():
    """Without noise: the mean is the prevalence. With the weights left in, it would be far off."""
    x, y = rare(6000)
    share = (y == "ill").mean()
    classifier = dpbnn.PrivateBayesClassifier(
        "sgd", epsilon=None, **PUBLIC, class_weight=RARE, hidden=(), random_state=0
    ).fit(x, y)
    assert classifier.predict_proba(x)[:, 0].mean() == pytest.approx(share, abs=0.01)
    logs = classifier.predictive(x).log_probabilities
    weights = torch.tensor(classifier.posterior_.likelihood.weights, dtype=logs.dtype)
    raw = (logs + weights.log()).softmax(-1)[..., 0].mean().item()
    assert raw > 3 * share
    truth = 1 / (1 + np.exp(3.5 - 1.5 * x[:, 0]))
    assert np.abs(classifier.predict_proba(x)[:, 0] - truth).mean() < 0.02


@pytest.mark.parametrize(
    ("method", "expected"),
    [("auto", (1.0, 1 / 12)), ("sgld", (math.sqrt(12), 1 / math.sqrt(12)))],
)
def test_only_ratios_of_weights_matter(method, expected):
    x, y = rare(200)
    for weights in (RARE, {"ill": 6.0, "well": 0.5}):
        fitted = dpbnn.PrivateBayesClassifier(method, **PUBLIC, class_weight=weights, epochs=3).fit(
            x, y
        )
        assert fitted.posterior_.likelihood.weights == pytest.approx(expected)
    assert fitted.privacy_.private


def test_weights_are_saved_and_cloned(tmp_path):
    x, y = rare(200)
    fitted = dpbnn.PrivateBayesClassifier(**PUBLIC, class_weight=RARE, epochs=3).fit(x, y)
    fitted.save(tmp_path / "saved")
    loaded = dpbnn.PrivateBayesClassifier.load(tmp_path / "saved")
    assert loaded.class_weight == RARE
    np.testing.assert_array_equal(loaded.predict_proba(x), fitted.predict_proba(x))
    assert clone(fitted).class_weight == RARE


def test_weights_by_labels_of_numpy_are_saved_too(tmp_path):
    x, y = rare(200)
    labels = (y == y[0]).astype(int)
    weights = dict.fromkeys(np.unique(labels), 2.0)
    public = {**PUBLIC, "classes": [0, 1]}
    fitted = dpbnn.PrivateBayesClassifier(**public, class_weight=weights, epochs=3)
    fitted.fit(x, labels).save(tmp_path / "saved")
    loaded = dpbnn.PrivateBayesClassifier.load(tmp_path / "saved")
    assert loaded.class_weight == {0: 2.0, 1: 2.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"class_weight": "balanced"}, "would depend on all records at once"),
        ({"class_weight": {"unknown": 2.0}}, "must map labels among classes"),
        ({"class_weight": 3.0}, "must map labels among classes"),
        ({"class_weight": {"ill": 0.0}}, "must be a finite number > 0"),
        ({"class_weight": {"ill": math.nan}}, "must be a finite number > 0"),
        ({"class_weight": RARE, "hidden": ()}, "not for methods that model the noise"),
        ({"class_weight": RARE, "method": "noiseaware"}, "not for methods that model the noise"),
    ],
)
def test_other_weights_are_refused_before_anything_is_spent(change, words):
    x, y = rare(200)
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match=words):
        dpbnn.PrivateBayesClassifier(**PUBLIC, ledger=ledger, **change).fit(x, y)
    assert ledger.releases == 0


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_weights_of_rows_are_refused_with_the_reason(kind):
    x, y = rare(200)
    if kind == "classifier":
        estimator = dpbnn.PrivateBayesClassifier(**PUBLIC)
    else:
        estimator = dpbnn.PrivateBayesRegressor(bounds=(-4, 4), target_bounds=(-4, 4))
        y = x[:, 0]
    with pytest.raises(TypeError, match=r"computed from several rows.*likelihoods\.Weighted"):
        estimator.fit(x, y, sample_weight=np.ones(200))
    with pytest.raises(TypeError, match="epochs: fit takes X and y only"):
        estimator.fit(x, y, epochs=3)


def test_the_command_takes_weights_by_label(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, y = rare(200)
    lines = [f"{a:.3f},{b:.3f},{label}" for (a, b), label in zip(x, y, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,state", *lines]) + "\n")
    text = 'a = [-4, 4]\nb = [-4, 4]\nstate = ["well", "ill"]\n'
    (tmp_path / "bounds.toml").write_text(text)
    common = ("fit", "table.csv", "--target", "state", "--bounds", "bounds.toml", "--epsilon", "1",
              "--epochs", "3", "--quiet")  # fmt: skip
    code, _, err = run(capsys, *common, "--out", "run", "--class-weight", "ill=12")
    assert code == 0, err
    settings = json.loads((tmp_path / "run" / "manifest.json").read_text())["settings"]
    assert settings["class_weight"] == "ill: 12"
    model = dpbnn.PrivateBayesClassifier.load(tmp_path / "run")
    assert model.class_weight == {"ill": 12.0}
    for wrong in ("sick=3", "ill", "ill=much", "12"):
        code, _, err = run(capsys, *common, "--out", "other", "--class-weight", wrong)
        assert code == 2
        assert "LABEL=WEIGHT with one of well, ill" in err
        assert not (tmp_path / "other").exists()
    code, _, err = run(
        capsys, "fit", "table.csv", "--target", "a", "--bounds", "bounds.toml", "--epsilon", "1",
        "--out", "other", "--class-weight", "ill=2",
    )  # fmt: skip
    assert code == 2
    assert "has no classes" in err
