"""Small fits of networks on which `fully_shard` was called, and what their ranks release."""

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_runs import METHODS, dataset, numbers, plan, sharded
from together import together
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dpbnn
from dpbnn.privacy import noise


def mlp():
    return dpbnn.mlp(4, (5,), 3)


def encoder():
    """A network of most kinds of layers; some have fewer rows than there are ranks."""
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 5, 2),
        nn.GroupNorm(1, 5), nn.Flatten(), nn.Linear(10, 3),
    )  # fmt: skip


def fit(name="sgd", make=mlp, data=None, spread=sharded, **options):
    settings = {"method": METHODS[name], "plan": plan(), "progress": False, **options}
    network = spread(make) if spread else make
    return dpbnn.fit(network, dataset() if data is None else data, **settings)


@contextlib.contextmanager
def pieces_of_noise(patch):
    """Collect what this rank adds to each release: (where, noise) of each piece, in float64."""
    found, original = [], noise.add_gaussian_at

    def add(pieces, total, dtype, key):
        zeros = [(torch.zeros_like(flat, dtype=torch.float64), std, at) for flat, std, at in pieces]
        original(zeros, total, dtype, key)
        found.append((total, [(at, values) for values, _, at in zeros]))
        original(pieces, total, dtype, key)

    patch.setattr(noise, "add_gaussian_at", add)
    yield found


def traced(name, folder, **options):
    """Fit and save; return the pieces of noise of this rank, and the statement."""
    with pytest.MonkeyPatch.context() as patch, pieces_of_noise(patch) as pieces:
        posterior = fit(name, **options)
    posterior.save(folder)
    return pieces, posterior.privacy.to_dict()


def at_once(make=mlp):
    """Return a function that makes a network of which one call has spread all parameters."""
    return lambda: fully_shard(make(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def head_alone(make=mlp):
    """Return a function that makes a network whose last layer is spread, and all others are not."""

    def made():
        network = make()
        fully_shard(network[-1], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return network

    return made


def each_on_ranks(size, runs):
    """Return of each of several fits by one group, given by its options: noise of every release,
    all numbers of the posterior that one process reads (into a network, where `loaded` is given),
    and the statements. An error of a rank is raised."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), []

        def work(rank):
            left = []
            for number, options in enumerate(runs):
                given = {name: value for name, value in options.items() if name != "loaded"}
                given = {"name": "sgd", "out": folder / f"run {number}", **given}
                left.append(traced(folder=folder / f"saved {number}", **given))
            return left

        ranks = together(size, work)
        for left in ranks:
            assert isinstance(left, list), left
        for number, (options, *left) in enumerate(zip(runs, *ranks, strict=True)):
            posterior = dpbnn.load(folder / f"saved {number}", options.get("loaded"))
            noise = joined([rank[0] for rank in left])
            found.append((noise, numbers(posterior), [rank[1] for rank in left]))
    return found


def joined(ranks):
    """Return the noise of every release as one vector; every number must be there once."""
    whole = []
    for release in zip(*(rank for rank in ranks if rank), strict=True):  # some have no rows at all
        total = release[0][0]
        vector, times = torch.zeros(total, dtype=torch.float64), torch.zeros(total)
        for _, pieces in release:
            for at, values in pieces:
                vector[at : at + len(values)] += values
                times[at : at + len(values)] += 1
        assert torch.equal(times, torch.ones(total))
        whole.append(vector)
    return whole
