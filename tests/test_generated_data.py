"""Every dataset, from files in its own format to a private model, without the real ones."""

import numpy as np
import pytest

import dpbnn
from benchmarks import command
from dpbnn.data import DATASETS, Schema, load, read_table

pytestmark = pytest.mark.usefixtures("generated_folder")


@pytest.mark.parametrize("name", DATASETS)
def test_an_estimator_is_fitted_and_scored(name):
    data = load(name)
    x, x_test = (part.reshape(len(part), -1) for part in (data.x_train, data.x_test))
    common = {"epsilon": 5.0, "bounds": (x.min(0), x.max(0) + 1e-3), "epochs": 3}
    if data.task == "classification":
        estimator = dpbnn.PrivateBayesClassifier(classes=range(len(data.classes)), **common)
    else:
        ends = (float(data.y_train.min()), float(data.y_train.max()))
        estimator = dpbnn.PrivateBayesRegressor(target_bounds=ends, **common)
    estimator.fit(x, data.y_train)
    assert estimator.privacy_.epsilon <= 5.0
    assert len(estimator.predict(x_test)) == len(data.y_test)
    assert np.isfinite(estimator.score(x_test, data.y_test))


@pytest.mark.parametrize("name", command.TABLES)
def test_tables_are_written_for_the_command(name, tmp_path):
    command.write(tmp_path, name)
    schema = Schema.from_toml((tmp_path / "schema.toml").read_text())
    for part in ("train", "test"):
        x, y = schema.encode(read_table(tmp_path / f"{part}.csv"), target=True)
        np.testing.assert_array_equal(x, getattr(load(name), f"x_{part}"))
        np.testing.assert_array_equal(y, getattr(load(name), f"y_{part}"))


def test_settings_of_tables_are_compared_on_training_parts():
    parts = command.training_parts()
    assert set(command.TABLES) < set(parts)
    for name in command.TABLES:
        shown = command.SHOWN["classification" if parts[name][-1] else "regression"]
        assert command.held_out(parts[name], 1, 5.0, epochs=2).startswith(shown[0])
