"""Runs that are interrupted, for tests."""

import os
import signal


def stop_after(updates, process, monkeypatch):
    """Interrupt runs of a kind of process after so many updates, as Ctrl-C would."""
    update, seen = process.update, []

    def counted(self, state, release):
        state = update(self, state, release)
        seen.append(1)
        if len(seen) == updates:
            os.kill(os.getpid(), signal.SIGINT)
        return state

    monkeypatch.setattr(process, "update", counted)
