"""Runs that are interrupted, for tests."""

import contextlib
import os
import signal

import pytest

from dpbnn import training


def stop_after(step, monkeypatch):
    """Interrupt every run after this step, as Ctrl-C would."""
    one = training._Run._one

    def counted(self, batch):
        one(self, batch)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(training._Run, "_one", counted)


@contextlib.contextmanager
def stopped_after(step):
    """Expect what runs in here to be interrupted after this step."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(step, patch)
        with pytest.raises(KeyboardInterrupt):
            yield
