"""The example of sites over Flower, with a transport of our own, and with Flower where it is."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "examples" / "flower_sites.py"


def example():
    spec = importlib.util.spec_from_file_location("flower_sites", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.once
def test_turns_of_three_sites():
    module = example()
    turns = [module.Turns(module.begun(number)) for number in range(3)]
    total = []
    for _ in range(module.STEPS + 1):
        messages = [one.answer(total) for one in turns]
        total = module.added(messages, [one.told() for one in turns])
    assert total == []
    posteriors = [one.site.posterior() for one in turns]
    x, y = module.rows(2)
    right = posteriors[0].predict(x, samples=50).mean.argmax(-1) == y
    assert right.double().mean() > 0.5
    outside, own = turns[0].site.statement(0).epsilon, posteriors[0].privacy.epsilon
    assert outside <= 2.0 < own
    told = [{"site": number, "step": 4, "agreed": "a"} for number in range(3)]
    for wrong, words in [
        (told[:2], "a site is missing"),
        ([*told[:2], told[0]], "is there twice"),
        ([*told[:2], {**told[2], "agreed": "b"}], "other settings"),
        ([*told[:2], {**told[2], "step": 3}], "at another step"),  # its old message, once more
    ]:
        with pytest.raises(RuntimeError, match=words):
            module.added([[np.zeros(3)]] * len(wrong), wrong)


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")
def test_three_sites_over_flower():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, str(FILE), who] for who in ("server", "0", "1", "2")]
    running = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        said = [one.communicate(timeout=240) for one in running]
    finally:
        for one in running:
            one.kill()
    for one, (out, err) in zip(running[1:], said[1:], strict=True):
        assert one.returncode == 0, err[-2000:]
        assert "one of 3 sites" in out
