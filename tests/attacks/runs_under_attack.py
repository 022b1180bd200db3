"""Small runs for attacks, and a count of the releases that were really made."""

import contextlib
import hashlib

import torch
from interruption import stopped_after
from torch import nn

import dpbnn
from dpbnn.privacy.gate import Gate

N, STEPS = 40, 12


def dataset(shift=0.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator) + shift
    return x, torch.randint(0, 2, (N,), generator=generator)


def plan(**change):
    arguments = {"noise_multiplier": 2.0, "delta": 1e-5, "n": N, "batch_size": 10, "steps": STEPS}
    return dpbnn.plan(**{**arguments, **change})


def fit(data=None, model=None, **options):
    arguments = {"method": dpbnn.SGD(learning_rate=0.5), "plan": plan(), "progress": False}
    return dpbnn.fit(model or nn.Linear(3, 2), data or dataset(), **{**arguments, **options})


@contextlib.contextmanager
def released(patch):
    """Collect a digest of every release that was made; the same one made twice counts once."""
    made, noised = set(), Gate._noised

    def noticed(self, sums, sigma):
        release = noised(self, sums, sigma)
        content = b"".join(value.detach().numpy().tobytes() for value in release.values())
        made.add(hashlib.sha256(content).hexdigest())
        return release

    patch.setattr(Gate, "_noised", noticed)
    yield made


def interrupted(after, **options):
    """Begin a run and interrupt it after so many steps."""
    with stopped_after(after):
        fit(**options)
