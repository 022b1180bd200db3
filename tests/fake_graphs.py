"""Graphs that replay Python, so that captured steps can be tested without a GPU.

Like a CUDA graph it runs nothing when it is captured. From then on it runs the work that it was
captured with, not the work that it is asked for, and writes what that returns into the same tensors
every time. Unlike a CUDA graph it reads attributes of objects as they are at the replay.
"""

import contextlib

import pytest
import torch
from torch import Tensor

from dpbnn import training
from dpbnn.captured import CapturedStep, Replays
from dpbnn.contributions.recorded import NetworkContributions


class FakeGraph:
    """One graph.

    Args:
        work: what it replays.
    """

    def __init__(self, work) -> None:
        self.work, self.result = work, []

    def replay(self) -> None:
        """Run the work, and write what it returns into the result."""
        new = self.work()
        owner = getattr(getattr(self.work, "func", None), "__self__", None)
        if isinstance(owner, CapturedStep):
            owner.by_python = False
        if new is not None and not self.result:
            self.result += new
        elif new is not None:
            _write(self.result, new)


def _write(old, new) -> None:
    if isinstance(old, Tensor):
        old.copy_(new)
        return
    for key in old if isinstance(old, dict) else range(len(old)):
        _write(old[key], new[key])


def _captured(replays, work, looking):
    graph = FakeGraph(work)
    return graph, graph.result


@contextlib.contextmanager
def _seeded(step):
    with training._random_state(int(torch.randint(2**62, ()))):
        yield


def _fits(state, like) -> bool:
    return isinstance(like, NetworkContributions)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let steps on the CPU be captured."""
    patch.setattr(Replays, "_captured", _captured)
    patch.setattr(CapturedStep, "fits", staticmethod(_fits))
    patch.setattr(CapturedStep, "seeded", _seeded)
