"""Tests that repeat: the same random numbers in every run, whatever ran before.

Only a test marked `os_entropy(false_alarm)` draws keys from the operating system. It can fail by
chance, at most at the rate that its mark states; `tests/test_false_alarms.py` adds the rates up.
"""

import hashlib
import itertools
import os
import random
import secrets

import numpy as np
import pytest
import torch

_PROCESS = os.getpid()


class Repeatable:
    """Stands in for `secrets.token_bytes`: bytes that a name decides; other ones after a fork."""

    def __init__(self, name: str):
        self.name, self.calls = name, itertools.count()

    def __call__(self, nbytes: int | None = None) -> bytes:
        fork = "" if os.getpid() == _PROCESS else f", process {os.getpid()}"
        text = f"{self.name}, call {next(self.calls)}{fork}"
        return hashlib.shake_256(text.encode()).digest(32 if nbytes is None else nbytes)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("os_entropy") is None:
            patch.setattr(secrets, "token_bytes", Repeatable(item.nodeid))
        seed = int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:4])
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        return (yield)
