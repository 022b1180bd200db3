"""The band of a regression: along the column that matters, from public bounds alone."""

import numpy as np
import torch

from dpbnn.data import Column, Schema
from dpbnn.estimators.bands import band_along
from dpbnn.predictive import RealPredictive

SCHEMA = Schema(
    (
        Column("site", categories=("north", "south")),
        Column("age", bounds=(0.0, 100.0)),
        Column("income", bounds=(0.0, 999.0), log=True),
    ),
    Column("rent", bounds=(0.0, 10.0)),
)


def predictive(x):
    """10 x income (scaled) + age (scaled), north being 100 more."""
    x = torch.as_tensor(x, dtype=torch.double)
    place = SCHEMA.features.index
    mean = 10 * x[:, place("income")] + x[:, place("age")] + 100 * x[:, place("site=north")]
    return RealPredictive(torch.stack([mean - 3, mean + 3]), 16.0)


def test_the_column_that_moves_the_prediction_most_is_drawn():
    band = band_along(SCHEMA, predictive)
    assert (band.x_label, band.y_label) == ("income", "rent")
    np.testing.assert_allclose([band.x[0], band.x[-1]], [0, 999], atol=1e-9)
    np.testing.assert_allclose(band.mean, 100 + np.linspace(-10, 10, 101), atol=1e-5)
    np.testing.assert_allclose(band.epistemic, 3)
    np.testing.assert_allclose(band.aleatoric, 4)
    assert "held at the middle" in band.note


def test_classes_and_tables_without_numbers_have_no_band():
    classes = Schema((Column("age", bounds=(0, 1)),), Column("y", categories=("a", "b")))
    words = Schema((Column("site", categories=("a", "b")),), Column("y", bounds=(0, 1)))
    assert band_along(classes, None) is None
    assert band_along(words, None) is None
