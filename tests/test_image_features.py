"""features="scattering": estimators for images; features cost nothing and see no other row."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

import dpbnn
from dpbnn.estimators.images import Scattered

DIGITS = load_digits()
TRAIN, TEST = slice(0, 1400), slice(1400, None)


def classifier(**changes):
    settings = {"epsilon": 3.0, "bounds": (0, 16), "classes": range(10), "random_state": 0}
    return dpbnn.PrivateBayesClassifier(**{**settings, "features": "scattering", **changes})


@pytest.fixture(scope="module")
def fitted():
    return classifier().fit(DIGITS.data[TRAIN], DIGITS.target[TRAIN])


def test_features_of_a_row_depend_on_that_row_alone():
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, (120, 64))
    features = Scattered(64)
    whole = features(rows)
    alone = np.concatenate([features(row[None]) for row in rows])
    np.testing.assert_allclose(whole, alone, atol=1e-4)
    changed = rows.copy()
    changed[1:] = rng.uniform(-1, 1, (119, 64))
    np.testing.assert_allclose(features(changed)[0], whole[0], atol=1e-4)


def test_private_digits_are_told_apart(fitted):
    assert fitted.score(DIGITS.data[TEST], DIGITS.target[TEST]) > 0.9  # 0.96; pixels have 0.94
    assert fitted.privacy_.epsilon <= 3.0
    assert fitted.posterior_.model[-1].in_features > 64


def test_a_saved_estimator_predicts_the_same(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    again = dpbnn.PrivateBayesClassifier.load(tmp_path / "model")
    x = DIGITS.data[TEST][:20]
    np.testing.assert_allclose(again.predict_proba(x), fitted.predict_proba(x), atol=1e-9)


def test_numbers_are_predicted_from_images():
    model = dpbnn.PrivateBayesRegressor(
        epsilon=3.0, bounds=(0, 16), target_bounds=(0, 9), features="scattering", random_state=0
    ).fit(DIGITS.data[TRAIN], DIGITS.target[TRAIN])
    error = np.sqrt(np.mean((model.predict(DIGITS.data[TEST]) - DIGITS.target[TEST]) ** 2))
    assert error < 2.0  # 1.3; a constant has 2.9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "wavelets"}, "must be None or 'scattering'"),
        ({"method": "moments", "hidden": ()}, "few columns"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_spent(changes, message):
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match=message):
        classifier(ledger=ledger, **changes).fit(DIGITS.data[TRAIN], DIGITS.target[TRAIN])
    assert ledger.releases == 0


def test_rows_that_are_no_square_image_are_refused_before_bounds_are_paid_for():
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match="63 columns are no square image"):
        classifier(ledger=ledger, bounds="private").fit(
            DIGITS.data[TRAIN, :63], DIGITS.target[TRAIN]
        )
    assert ledger.releases == 0


def test_a_bad_row_is_left_out(fitted):
    data = DIGITS.data[:300].copy()
    data[3, 5] = np.nan
    model = classifier(on_bad_rows="zero", epochs=2).fit(data, DIGITS.target[:300])
    assert np.isfinite(model.predict_proba(DIGITS.data[:5])).all()
