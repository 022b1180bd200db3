"""Every attack of the list from 33 on has a test, and every broken version is used by one."""

import importlib.util
import inspect
from pathlib import Path

import broken_versions as broken
from twins import TWINS

HERE = Path(__file__).parent
REQUIRED = {*range(33, 60)}


def load(path):
    """Import a test file under a name of its own, so that its twins are registered."""
    spec = importlib.util.spec_from_file_location(f"coverage_of_{path.stem}", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def files_with_twins():
    """All test files that name a broken version; some lie with what they test."""
    files = sorted(HERE.parent.rglob("test_*.py"))
    return [path for path in files if "@fails_on(" in path.read_text(encoding="utf-8")]


def test_every_item_has_a_broken_version_and_every_broken_version_a_test(monkeypatch):
    before = list(TWINS)
    try:
        for path in files_with_twins():
            if path != Path(__file__):
                monkeypatch.syspath_prepend(path.parent)
                load(path)
        found = list(TWINS)
    finally:
        TWINS[:] = before
    versions = {
        function
        for name, function in inspect.getmembers(broken, inspect.isfunction)
        if function.__module__ == broken.__name__ and not name.startswith("_")
    }
    assert versions - {broken.around} == {twin.version for twin in found}
    assert {twin.item for twin in found} >= REQUIRED
