"""Settings shared by all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "dpbnn", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dpbnn")

_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
if "DPBNN_DATA" not in os.environ and _BESIDE.is_dir():
    os.environ["DPBNN_DATA"] = str(_BESIDE)


def pytest_collection_modifyitems(items):
    """Long files come first, so that no process works alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder with the papers' datasets; tests that need it skip, loudly, where it is absent."""
    folder = os.environ.get("DPBNN_DATA")
    if folder is None:
        pytest.skip("DPBNN_DATA is not set: the papers' datasets are not here")
    return Path(folder)


@pytest.fixture(scope="session")
def _generated(tmp_path_factory) -> tuple[Path, dict]:
    import generated_data

    folder = tmp_path_factory.mktemp("generated")
    return folder, generated_data.write(folder)


@pytest.fixture
def generated_folder(_generated, monkeypatch) -> Path:
    """A folder with small generated files in the formats of the papers' datasets."""
    from dpbnn.data import datasets

    folder, sources = _generated
    monkeypatch.setattr(datasets, "_sources", lambda: sources)
    monkeypatch.setenv("DPBNN_DATA", str(folder))
    return folder


@pytest.fixture(params=["papers", "generated"])
def either_folder(request) -> Path:
    """The folder with the papers' datasets where it is here, and the one with generated files."""
    name = {"papers": "data_folder", "generated": "generated_folder"}[request.param]
    return request.getfixturevalue(name)
