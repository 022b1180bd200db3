"""A row whose target cannot be used contributes nothing, to whatever a fit releases."""

import math
import warnings

import broken_versions as broken
import numpy as np
import pytest
import torch
from twins import fails_on, twins_of

import dpbnn
from dpbnn.calibration import calibration_split
from dpbnn.posteriors import PointPosterior

pytestmark = pytest.mark.filterwarnings("ignore:epsilon = ")
N = 500
HELD = int(calibration_split(N, 0.2)[1][0])  # a row that is held out of the training
GRADES = ["low", "middle", "high"]


def table():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (N, 2))
    return x, rng.poisson(2 * np.exp(x[:, 0])), np.digitize(x[:, 1], [-0.3, 0.3])


def estimator(kind, **more):
    own = {"bounds": (-1, 1), "epsilon": 30.0, "epochs": 2, "random_state": 0, **more}
    own["on_bad_rows"] = "zero"
    if kind == "count":
        return dpbnn.PrivateBayesRegressor(likelihood="poisson", target_bounds=(0, 12), **own)
    if kind == "number":
        return dpbnn.PrivateBayesRegressor(target_bounds=(0, 12), **own)
    weights = {"high": 3.0}
    return dpbnn.PrivateBayesClassifier(
        likelihood=kind, classes=GRADES, class_weight=weights, **own
    )


def replayed(kind, value, row, **more):
    """Replay a fit with a target in one row, and without anything in that row."""
    x, counts, grades = table()
    y = counts.astype(object) if kind in ("count", "number") else np.array(GRADES, object)[grades]
    blank = x.copy()
    y[row], blank[row] = value, np.nan

    def fit(inputs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = estimator(kind, **more).fit(inputs, y)
        return model.posterior_.model, model.bounds_, model.temperature_, model.threshold_

    return dpbnn.replay(fit, x, blank, trace=False)


BAD = {
    "count": [None, -1, 2.5],
    "number": [None, math.inf],
    "ordinal": [None, "higher"],
    "categorical": [None, "higher"],
}
SETTINGS = {
    "conformal": ({"conformal": 0.3, "recalibrate": None}, HELD),
    "temperature": ({"recalibrate": 0.2}, HELD),
    "private bounds": ({"bounds": "private"}, HELD),
    "sgld": ({"method": "sgld"}, 7),
}


@fails_on(66, broken.whatever_is_finite_is_a_count, kind="count", setting="conformal")
@fails_on(66, broken.rows_without_a_target_count_in_private_bounds, kind="ordinal",
          setting="private bounds")  # fmt: skip
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", BAD)
def test_item_66_a_row_without_a_target_moves_no_release_at_all(kind, setting):
    more, row = SETTINGS[setting]
    if (kind, setting) == ("count", "temperature"):
        pytest.skip("counts have none")
    for value in BAD[kind]:
        result = replayed(kind, value, row, **more).check()
        assert result.worst == 0, repr(value)
    good = replayed(kind, 3 if kind in ("count", "number") else "high", row, **more).check()
    assert 0 < good.worst <= 1 + 1e-5


@fails_on(31, broken.scaling_looks_whether_it_is_needed)
def test_item_31_no_value_decides_whether_a_table_is_scaled():
    """Bounds of -1 and 1 change no number that is within them."""
    x, _, grades = table()
    far = x.copy()
    far[7] = 5.0

    def fit(inputs):
        model = estimator("ordinal", method="sgld", epochs=1)
        return model.fit(inputs, np.array(GRADES, object)[grades]).posterior_.model

    result = dpbnn.replay(fit, x, far)
    assert result.differences == ()


def counting():
    model = torch.nn.Linear(2, 1)
    return PointPosterior(model, dpbnn.likelihoods.Poisson(most=50.0))


@fails_on(66, broken.whatever_is_finite_is_a_count, value=-1.0)
@pytest.mark.parametrize("value", [-1.0, 2.5])
def test_item_66_what_is_no_count_is_not_calibrated_on(value):
    """Of calibration records half are no counts; they count as misses, and are refused."""
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    y = torch.poisson(torch.ones(400), generator=torch.Generator().manual_seed(1))
    y[::2] = value
    plan = dpbnn.open_plan(n=400, steps=1, sampling="full-batch")
    found = dpbnn.conformalize(counting(), (x, y), plan=plan, alpha=0.4, on_bad_rows="zero")
    assert found.threshold == math.inf
    with pytest.raises(ValueError, match="counts must be whole numbers"):
        dpbnn.conformalize(counting(), (x, y), plan=plan)


def test_item_66_a_choice_among_models_of_counts_raises_for_no_record():
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    y = torch.ones(50)
    y[3] = -1.0
    plan = dpbnn.open_plan(n=50, steps=1, sampling="full-batch")
    named = {"one": counting(), "other": counting()}
    dpbnn.select(named, (x, y), plan=plan, ledger=dpbnn.Ledger(), on_bad_rows="zero")
    with pytest.raises(ValueError, match="counts must be whole numbers"):
        dpbnn.select(named, (x, y), plan=plan, ledger=dpbnn.Ledger())


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
