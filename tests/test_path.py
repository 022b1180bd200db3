"""The path of one batch, from an estimator's `fit` to the update: that of docs/architecture.md."""

import inspect
import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import dpbnn
from dpbnn.methods.method import Process
from dpbnn.methods.sgd import SGDProcess
from dpbnn.training import _Run

SOURCE = Path(dpbnn.__file__).parent
LIST = Path(__file__).parents[1] / "docs" / "architecture.md"
# Whose calls into other files are the path; what these call works for them alone.
TRUNK = (
    "training.py", "methods/method.py", "methods/descent.py", "privacy/gate.py",
    "privacy/mechanisms.py",
)  # fmt: skip
# Public settings, and errors without private texts: nothing of the batch goes there.
ASIDE = ("messages.py", "privacy/events.py", "privacy/grid.py", "privacy/ledger.py",
         "privacy/relation.py", "privacy/plan.py", "privacy/sampling.py")  # fmt: skip
SETTINGS = ("Mechanism.check", "Mechanism.on", "NoiseSource.private")


def place(frame):
    """Return the file of the library that a frame is in, and its function; None elsewhere."""
    code = frame.f_code
    path = Path(code.co_filename)
    if not path.is_relative_to(SOURCE):
        return None
    return path.relative_to(SOURCE).as_posix(), code.co_qualname


def fitted():
    chance = np.random.default_rng(0)
    x = chance.uniform(-1, 1, (300, 4))
    model = dpbnn.PrivateBayesClassifier(
        method="sgd", epsilon=1.0, delta=1e-4, bounds=(-1, 1), classes=[0, 1], epochs=3,
        batch_size=100, progress=False, random_state=0,
    )  # fmt: skip
    return model.fit(x, (x[:, 0] > 0).astype(int))


def calls_of(run):
    """Return every call between two files of the library: (caller, callee), in order."""
    found, begun = [], set()

    def note(frame, event, argument):
        here = place(frame) if event == "call" else None
        if here is None:
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            if frame in begun:
                return  # it goes on
            begun.add(frame)
        back = frame.f_back
        while back is not None and place(back) is None:
            back = back.f_back
        caller = place(back) if back is not None else ("", "")
        if caller[0] != here[0]:
            found.append((caller, here))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def steps_of(calls):
    """Return what the trunk calls in each step, the first and the last left out."""
    path = [
        here
        for (file, _), here in calls
        if file in TRUNK and here[0] not in ASIDE and here[1] not in SETTINGS
    ]
    starts = [i for i, here in enumerate(path) if here == ("resume.py", "Run.reserve")]
    return [path[a:b] for a, b in pairwise(starts[1:])]


def documented():
    text = LIST.read_text().partition("## The path of one batch")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.<>]+)`", text, re.M)


def test_a_batch_takes_the_path_of_the_document_and_crosses_each_function_once():
    fitted()  # imports
    steps = steps_of(calls_of(fitted))
    assert len(steps) > 3
    for step in steps:
        assert [tuple(entry) for entry in step] == documented()
        assert max(Counter(step).values()) == 1


def test_a_detour_would_be_seen(monkeypatch):
    once = _Run._one

    def twice(self, batch):
        self.process.contribute(self.process.draw(self.state), self.x[batch], self.y[batch])
        once(self, batch)

    twice.__code__ = twice.__code__.replace(co_filename=once.__code__.co_filename)
    monkeypatch.setattr(_Run, "_one", twice)
    assert any(
        [tuple(entry) for entry in step] != documented() for step in steps_of(calls_of(fitted))
    )


@pytest.mark.parametrize(
    "name",
    ["checked_rows", "Watch.__init__", "SGD.start", "Descent.settled", "taken", "Run.opened",
     "fit"],
)  # fmt: skip
def test_the_data_and_the_settings_are_taken_in_once(name):
    calls = [here for _, here in calls_of(fitted)]
    assert len([here for here in calls if here[1] == name]) == 1


def test_the_update_gets_the_release_and_nothing_of_the_data():
    assert list(inspect.signature(Process.update).parameters) == ["self", "state", "release"]
    assert list(inspect.signature(SGDProcess.update).parameters) == ["self", "state", "release"]
