"""Small fits for several ranks, and what they release."""

import contextlib
import functools
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import dpbnn
from dpbnn.data.standardising import Standardisation
from dpbnn.estimators.public_inputs import PublicInputs
from dpbnn.methods.sgd import SGDProcess
from dpbnn.methods.sgld import LangevinProcess
from dpbnn.privacy import noise

N, STEPS = 48, 6
METHODS = {
    "sgd": dpbnn.SGD(learning_rate=0.3, momentum=0.5),
    "bands": dpbnn.SGD(
        learning_rate=0.3, keep=3, inputs=PublicInputs(Standardisation.public(4), 4.0)
    ),
    "sgld": dpbnn.SGLD(learning_rate=1e-3, keep=3),
    "sghmc": dpbnn.SGHMC(learning_rate=1e-3, keep=3),
    "bbp": dpbnn.BBP(learning_rate=0.3),
    "vi": dpbnn.VI(learning_rate=0.3),
    "mcdropout": dpbnn.MCDropout(learning_rate=0.3),
}


def dataset(n=N):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    return x, torch.randint(0, 3, (n,), generator=generator)


class Pairs(Dataset):
    """Code of the user's, which is run for each record of a batch."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, number):
        return self.x[number], int(self.y[number])


@functools.cache
def plan(**change):
    settings = {"noise_multiplier": 1.5, "delta": 1e-5, "n": N, "batch_size": 12, "steps": STEPS}
    return dpbnn.plan(**{**settings, **change})


def network(name="sgd"):
    def made():
        return dpbnn.mlp(4, (5,), 3, dropout=0.3 if name == "mcdropout" else 0.0)

    return made


def sharded(make, kind="cpu"):
    """Return a function that makes a network, spread over all ranks of a mesh of devices."""

    def made():
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        whole = make()
        for layer in whole:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(whole, mesh=mesh)

    return made


def fit(name="sgd", data=None, **options):
    settings = {"method": METHODS[name], "plan": plan(), "progress": False, **options}
    return dpbnn.fit(network(name), dataset() if data is None else data, **settings)


def numbers(posterior):
    """All numbers of a posterior, as one tensor."""
    parts = [value.detach() for value in posterior.model.state_dict().values()]
    for part in posterior._parts().values():
        held = part.read(list(range(len(part)))) if hasattr(part, "read") else part
        held = held.values() if isinstance(held, dict) else [held]
        parts += [value for value in held if isinstance(value, torch.Tensor)]
    return torch.cat([part.double().flatten().cpu() for part in parts])


def stopped(rank, name="sgd", fit=fit, at=4, **options):
    """Fit until rank 1 gets an interrupt after some step, which all ranks must raise."""
    kind = {"sgd": SGDProcess, "sgld": LangevinProcess}[name]
    update = kind.update

    def interrupting(self, state, release):
        state = update(self, state, release)
        if rank == 1 and state.steps == at:
            os.kill(os.getpid(), signal.SIGINT)
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "update", interrupting)
        with pytest.raises(KeyboardInterrupt):
            fit(name, checkpoint_every=100, **options)
    return "stopped"


@contextlib.contextmanager
def drawn_noise(patch):
    """Collect the noise of every release that this process makes, without the sums."""
    found, original = [], noise.add_gaussian

    def add(pairs, dtype, key, drawn):
        zeros = [(torch.zeros_like(values, dtype=torch.float64), std) for values, std in pairs]
        original(zeros, dtype, key, None)
        found.append(torch.cat([values for values, _ in zeros]))
        original(pairs, dtype, key, drawn)

    patch.setattr(noise, "add_gaussian", add)
    yield found
