"""Tests with twins: broken versions of the library on which the very same test must fail.

`fails_on(item, versions...)` above a test names broken versions of `broken_versions.py`; the item
is a number of docs/pitfalls.md. A test file that uses it has these lines at its end:

    @pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
    def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
        twin.must_fail(tmp_path)
"""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest


@dataclasses.dataclass(frozen=True)
class Twin:
    """A test of an item of the list, and a broken version of the library on which it must fail."""

    item: int
    test: Callable
    version: Callable
    arguments: dict

    def __str__(self):
        return f"{self.item}-{self.version.__name__}"

    def must_fail(self, tmp_path: Path) -> None:
        """Run the test on the broken version; raise unless the test fails."""
        with pytest.MonkeyPatch.context() as patch:
            arguments = {**self.arguments, **(self.version(patch) or {})}
            if "tmp_path" in inspect.signature(self.test).parameters:
                arguments["tmp_path"] = tmp_path
            with pytest.raises((AssertionError, pytest.fail.Exception)):
                self.test(**arguments)


TWINS: list[Twin] = []


def fails_on(item: int, *versions: Callable, **arguments) -> Callable:
    """Name the broken versions on which a test, with these arguments, must fail."""

    def register(test):
        TWINS.extend(Twin(item, test, version, arguments) for version in versions)
        return test

    return register


def twins_of(module: str) -> list[Twin]:
    """Return the twins of the tests of one file."""
    return [twin for twin in TWINS if twin.test.__module__ == module]
