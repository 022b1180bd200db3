"""Ranks on a GPU: one beside NCCL, several with gloo that share it; whole and sharded networks.

Each group of ranks is started anew; see `gpu_runs`. Sums of a GPU are compared up to rounding, and
noise to the bit, with one process on the same GPU.
"""

import json

import gpu_runs
import pytest
import torch
from gpu_runs import GLOO, NCCL, together
from small_runs import METHODS, STEPS, dataset, fit, numbers

import dpbnn
from dpbnn.privacy.ledger import Ledger

pytestmark = [
    pytest.mark.skipif(
        gpu_runs.KIND == "cuda" and not torch.cuda.is_available(),
        reason="needs a GPU: NO RANK ON A GPU, NO NCCL AND NO MESH OF GPUS IS TESTED HERE",
    ),
    pytest.mark.once,
]
NAMES = ("sgd", "sgld", "sghmc")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Noise and numbers of every method by one process on the GPU, without a group."""
    runs = [{"name": name, "debug_seed": 3} for name in METHODS]
    folder = tmp_path_factory.mktemp("alone")
    (found,) = together(1, gpu_runs.one_of, runs, folder, backend=None)
    return dict(zip(METHODS, found, strict=True))


def releases_of(folder):
    """How many releases a ledger has, in how many entries."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    spends = [line for line in lines if "spend" in line or "count" in line]
    return Ledger(folder / "ledger.jsonl").releases, len(spends)


def check_noise(found, wanted):
    """Check that two runs have added the same noise to each release, bit for bit."""
    assert len(found) == len(wanted) == STEPS
    for one, two in zip(found, wanted, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            assert torch.equal(one[name].flatten(), two[name].flatten()), name
            assert one[name].count_nonzero() > 0.9 * one[name].numel()


@pytest.mark.parametrize(("size", "backend"), [(1, "nccl"), (2, GLOO), (4, "gloo")])
def test_ranks_on_a_gpu_train_what_one_process_trains(alone, tmp_path, size, backend):
    runs = [{"name": name, "debug_seed": 3} for name in METHODS]
    ranks = together(size, gpu_runs.traced, runs, tmp_path, backend=backend)
    for number, (name, first, *others) in enumerate(zip(METHODS, *ranks, strict=True)):
        noise, found, statement = first
        check_noise(noise, alone[name][0])
        for other in others:
            assert other[0] == []  # rank 0 alone draws noise
            assert torch.equal(other[1], found), name
            assert other[2] == statement
        tolerance = 1e-4 if name != "mcdropout" else 1.0  # its masks are drawn by shards
        assert torch.allclose(found, alone[name][1], rtol=0, atol=tolerance), name
        assert releases_of(tmp_path / f"{number}") == (STEPS, 1)


@pytest.mark.parametrize(("size", "backend"), [(1, NCCL), (1, "nccl"), (2, GLOO), (3, GLOO)])
def test_sharded_ranks_on_a_mesh_of_gpus_train_what_one_process_trains(
    alone, tmp_path, size, backend
):
    runs = [{"name": name, "debug_seed": 3, "sharded": True} for name in NAMES]
    ranks = together(size, gpu_runs.traced, runs, tmp_path, backend=backend)
    for number, (name, *left) in enumerate(zip(NAMES, *ranks, strict=True)):
        rows = [rank[0] for rank in left]
        noise = [
            {key: torch.cat([part[key].flatten() for part in release]) for key in release[0]}
            for release in zip(*rows, strict=True)
        ]
        check_noise(noise, alone[name][0])
        assert all(rank[2] == left[0][2] for rank in left)
        assert left[0][2]["randomness"] == alone[name][2]["randomness"]
        found = numbers(dpbnn.load(tmp_path / f"saved {number}"))
        assert torch.allclose(found, alone[name][1], rtol=0, atol=1e-4), name
        assert releases_of(tmp_path / f"{number}") == (STEPS, 1)


def test_without_noise_a_mesh_of_gpus_ends_where_the_cpu_ends(tmp_path):
    free = dpbnn.open_plan(n=len(dataset()[0]), batch_size=12, steps=STEPS)
    wanted = numbers(fit(plan=free, debug_seed=3))
    (whole,) = together(1, gpu_runs.opened, False, None, backend=NCCL)
    together(2, gpu_runs.opened, True, tmp_path / "saved")
    spread = numbers(dpbnn.load(tmp_path / "saved"))
    assert torch.allclose(whole, wanted, rtol=0, atol=1e-4)
    assert torch.allclose(spread, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_on_a_gpu_is_killed_and_the_run_goes_on(tmp_path, sharded, exact):
    """Sums of a GPU may differ when made again: steps get new noise, unless torch repeats them."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    left = together(2, gpu_runs.killed_at, run, sharded, exact, killed=True)
    assert left[1] is None, left[1]
    together(2, gpu_runs.gone_on, run, tmp_path / "resumed", sharded, exact, True)
    repeats = exact or gpu_runs.KIND == "cpu"
    assert releases_of(run)[0] == (STEPS if repeats else STEPS + STEPS - 2)
    if repeats:
        together(2, gpu_runs.gone_on, whole, tmp_path / "saved", sharded, exact, False)
        resumed, wanted = (numbers(dpbnn.load(tmp_path / n)) for n in ("resumed", "saved"))
        assert torch.equal(resumed, wanted)


@pytest.mark.parametrize("sharded", [False, True])
def test_neighbours_over_two_ranks_on_a_gpu(sharded):
    names = ("sgd",) if sharded else tuple(METHODS)
    first, second = together(2, gpu_runs.replayed, names, sharded)
    for one, two in zip(first, second, strict=True):
        passed, differences, distances, text = one
        assert passed, text
        assert differences == two[1] == ()
        assert len(distances) == 4
        assert max(distances) > 0.1


def test_a_network_is_on_the_devices_of_its_mesh():
    (said,) = together(1, gpu_runs.elsewhere, backend=NCCL)
    assert "leave device out" in said
