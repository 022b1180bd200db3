"""Sharded networks (FSDP2): one noise, whole norms, the same posterior as unsharded ones."""

import dataclasses
import functools
import shutil

import broken_versions as broken
import numpy as np
import pytest
import torch
import torch.distributed as dist
from killed_runs import WRONG, killed
from sharded_runs import at_once, each_on_ranks, encoder, fit, head_alone, mlp, sharded
from small_runs import METHODS, STEPS, N, Pairs, dataset, drawn_noise, numbers, plan, stopped
from together import together
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from twins import fails_on, twins_of

import dpbnn
from dpbnn import checkpoint
from dpbnn.privacy.ledger import Ledger

pytestmark = pytest.mark.long

NAMES = ["sgd", "sgld", "sghmc"]


def unsharded(name="sgd", **options):
    """Noise and numbers of the same fit in this process, with whole parameters."""
    with pytest.MonkeyPatch.context() as patch, drawn_noise(patch) as noise:
        posterior = fit(name, spread=False, **options)
    return noise, numbers(posterior)


def check_one_run(alone, ranks, tolerance=1e-5):
    """Check that ranks together add the noise of one process, once, and end where it ends."""
    assert len(ranks[0]) == len(alone[0]) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(ranks[0], alone[0], strict=True))
    assert torch.allclose(ranks[1], alone[1], rtol=0, atol=tolerance)
    assert all(statement == ranks[2][0] for statement in ranks[2])


@fails_on(
    65,
    broken.every_rank_draws_noise_of_its_own,
    broken.ranks_noise_their_rows_from_the_same_place,
    broken.a_share_goes_to_two_ranks,
    names=("sgd",),
)
@pytest.mark.parametrize("names", [NAMES], ids=["all"])
def test_item_65_sharded_ranks_train_what_one_process_trains(names):
    runs = [{"name": name, "debug_seed": 3} for name in names]
    found = [each_on_ranks(size, runs) for size in (1, 2, 4)]
    for run, *sizes in zip(runs, *found, strict=True):
        alone = unsharded(**run)
        for ranks in sizes:
            check_one_run(alone, ranks)
            assert torch.equal(ranks[1], sizes[0][1])


def test_other_layers_microbatches_empty_shares_and_an_average():
    """Three ranks share four shards, most of which are empty; some have no row of some layers."""
    chosen = plan(batch_size=2)
    method = dpbnn.SGD(learning_rate=0.1, optimizer="adam", average="polyak", schedule="cosine")
    run = {"make": encoder, "method": method, "plan": chosen, "debug_seed": 3}
    (ranks,) = each_on_ranks(3, [{**run, "microbatch_size": 1}])
    check_one_run(unsharded(**run), ranks)


def frozen():
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    network[0].requires_grad_(False)
    return network


def tied():
    """A layer that is used twice, and shares its weight with another one."""
    layer = nn.Linear(4, 4)
    network = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    network[4].weight = layer.weight
    return network


def test_other_plans_frozen_layers_bad_rows_and_tied_weights():
    x, y = dataset()
    bad = x.clone()
    bad[5] = float("nan")
    free = {"plan": dpbnn.open_plan(n=N, batch_size=12, steps=STEPS), "debug_seed": 3}
    numeric = dpbnn.likelihoods.Gaussian(noise_std=1.0)
    runs = [
        {"plan": plan(relation="replace-one", sampling="fixed-size")},
        {"make": frozen, "data": (x, y.float()[:, None]), "likelihood": numeric},
        {"data": (bad, y), "on_bad_rows": "zero"},
        {"make": tied, "spread": at_once, "loaded": tied()},
    ]
    runs = [{**run, "debug_seed": 3} for run in runs]
    *found, opened = each_on_ranks(2, [*runs, free])
    for run, ranks in zip(runs, found, strict=True):
        alone = {name: value for name, value in run.items() if name not in ("spread", "loaded")}
        check_one_run(unsharded(**alone), ranks)
    assert len(ranks[0][0]) == 4 * 4 + 4 + 4 + 3 * 4 + 3  # a tied weight counts once
    assert torch.allclose(opened[1], unsharded(**free)[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("on_bad_rows", ["error", "zero"])
def test_data_is_read_batch_by_batch(tmp_path, on_bad_rows):
    """A memory map above the limit, and code of the user's for each record, with a worker."""
    x, y = dataset()
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    kinds = [
        dpbnn.DataSource((mapped, y), memory=1000),
        dpbnn.DataSource(Pairs(x, y), workers=1, fixed=True, memory=1000),
    ]
    chosen = plan(relation="replace-one", sampling="fixed-size")  # so that no batch is all records
    run = {"plan": chosen, "debug_seed": 3, "on_bad_rows": on_bad_rows, "microbatch_size": 2}
    for ranks in each_on_ranks(2, [{**run, "data": data} for data in kinds]):
        check_one_run(unsharded(**run), ranks)


@fails_on(65, broken.every_rank_charges)
def test_item_65_one_ledger_has_every_release_once(tmp_path):
    ranks = together(2, lambda rank: fit(out=tmp_path).privacy.to_dict())
    assert ranks[0] == ranks[1]
    assert Ledger(tmp_path / "ledger.jsonl").releases == STEPS
    assert ranks[0]["private"]


@fails_on(65, broken.norms_are_of_the_own_rows, names=("sgd",))
@pytest.mark.parametrize("names", [NAMES], ids=["all"])
def test_item_65_neighbours_over_two_sharded_ranks(tmp_path, names):
    """The rows of two ranks together move by the clip at most, and nothing else differs."""
    chosen = plan(batch_size=24, steps=4)

    def run(name, folder, data):
        folder.mkdir(exist_ok=True)
        method = dataclasses.replace(METHODS[name], folder=str(folder))
        posterior = fit(data=data, plan=chosen, method=method)
        parts = posterior._parts()
        parts["iterates"] = parts["iterates"].read(range(3))
        return parts, posterior.privacy.to_dict()

    def replayed(name):
        if name == "sgd":
            return dpbnn.replay(METHODS[name], dataset(), 7, model=sharded(mlp), plan=chosen)
        runs = iter(tmp_path / f"{name} {number}" for number in range(9))
        return dpbnn.replay(lambda data: run(name, next(runs), data), dataset(), 7, trace=False)

    for first, second in zip(*together(2, lambda rank: [*map(replayed, names)]), strict=True):
        assert first.passed, first
        assert second.passed, second
        assert first.distances == second.distances
        assert len(first.distances) == 4
        assert max(first.distances) > 0.1


def finished(name, folder, **options):
    posterior = fit(name, **options)
    posterior.save(folder)
    return posterior.privacy.to_dict()


@fails_on(65, broken.noise_depends_on_the_ranks, cases={"sgd": (1,)})
@pytest.mark.parametrize("cases", [{"sgd": (1,), "sgld": (4, 2)}], ids=["all"])
def test_item_65_a_sharded_run_goes_on_on_another_number_of_ranks(tmp_path, cases):
    """DCP gives every rank its rows; with the same keys nothing is paid twice."""
    whole, runs = tmp_path / "whole", tmp_path / "runs"
    whole.mkdir()

    def work(rank):
        for name in cases:
            finished(name, whole / name, out=tmp_path / f"run {name}")
            stopped(rank, name, fit, out=runs / name)
        return "stopped"

    with pytest.MonkeyPatch.context() as patch:
        fixed = checkpoint.Keys("name", *(bytes([i]) * 32 for i in range(3)))
        patch.setattr(checkpoint.Keys, "new", classmethod(lambda cls: fixed))
        assert together(2, work) == ["stopped", "stopped"]
    for name, size in ((name, size) for name, sizes in cases.items() for size in sizes):
        out, saved = tmp_path / f"{name} on {size}", tmp_path / f"{name} of {size}"
        shutil.copytree(runs / name, out)
        assert len([path for path in out.iterdir() if path.name.startswith("rows-")]) == 1
        options = {"out": out, "resume": True}
        left = together(size, lambda rank, given=(name, saved), o=options: finished(*given, **o))
        assert all(isinstance(part, dict) for part in left), left
        assert torch.equal(numbers(dpbnn.load(saved)), numbers(dpbnn.load(whole / name)))
        assert Ledger(out / "ledger.jsonl").releases == STEPS


def partly_frozen(scale):
    def made():
        network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        network[0].requires_grad_(False).weight.mul_(scale)
        return network

    return made


@fails_on(65, broken.frozen_weights_count_by_shape, broken.any_arithmetic_will_do)
def test_item_65_noise_serves_the_same_computation_alone(tmp_path):
    """A frozen layer that is not spread is part of it, and so is autocast."""
    options = {"make": partly_frozen(1.0), "spread": head_alone}
    other = "not those of the run to be resumed"

    def refused(words, autocast=False, **change):
        with (
            torch.autocast("cpu", enabled=autocast),
            pytest.raises((ValueError, FileNotFoundError), match=words),
        ):
            fit(out=tmp_path, resume=True, **{**options, **change})

    def work(rank):
        stopped(rank, "sgd", fit, out=tmp_path, **options)
        refused(f"network: {other}", make=partly_frozen(2.0))
        refused(f"network: {other}", spread=None)
        refused(f"torch's arithmetic: {other}", autocast=True)
        dist.barrier()
        (folder,) = tmp_path.glob("rows-*")
        file = sorted(folder.iterdir())[0]
        if not rank:
            whole = file.read_bytes()
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused("is missing or damaged")
        if not rank:
            file.write_bytes(whole)
        return fit(out=tmp_path, resume=True, **options).privacy.to_dict()

    ranks = together(2, work)
    assert all(isinstance(left, dict) for left in ranks), ranks
    assert Ledger(tmp_path / "ledger.jsonl").releases == STEPS


def test_the_network_is_trained_as_it_is_and_left_sharded(tmp_path):
    def work(rank):
        network = sharded(mlp)()
        before = network[1].weight.full_tensor().clone()
        posterior = dpbnn.fit(network, dataset(), method=METHODS["sgd"], plan=plan())
        posterior.save(tmp_path / "saved")
        after = network[1].weight.full_tensor()
        assert isinstance(network, FSDPModule)
        assert network(dataset()[0]).shape == (N, 3)
        assert not torch.equal(before, after)
        with pytest.raises(RuntimeError, match="it cannot predict"):
            posterior.predict(dataset()[0])
        return after, str(posterior)

    ranks = together(2, work)
    assert isinstance(ranks[0], tuple), ranks
    loaded = dpbnn.load(tmp_path / "saved")
    assert torch.equal(loaded.model[1].weight, ranks[0][0])
    assert loaded.outputs(dataset()[0]).shape == (1, N, 3)


def along_columns(mesh):
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    return fully_shard(network, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def half(mesh):
    return fully_shard(mlp(), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


def without_hooks(mesh):
    network = mlp()
    network[1].weight = nn.Parameter(distribute_tensor(network[1].weight.data, mesh, [Shard(0)]))
    return network


def in_part(mesh):
    network = mlp()
    fully_shard(network[1], mesh=mesh)
    return network


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale


def own_layer(mesh):
    return fully_shard(nn.Sequential(Own(), nn.Linear(4, 3)), mesh=mesh)


def owned():
    x, y = (part.tensor_split([40])[dist.get_rank()] for part in dataset())
    return dpbnn.DataSource((x, y), owned=True)


REFUSED = {
    "VI: does not take a sharded network": {"method": dpbnn.VI()},
    "relation='add-remove': does not take": {"plan": plan(relation="add-remove")},
    "keep=3: of a sharded network": {"method": dpbnn.SGD(keep=3)},
    "go by name, such as 'adam'": {"method": dpbnn.SGD(optimizer=torch.optim.Adam)},
    "chains=2: of a sharded network": {"method": dpbnn.SGLD(chains=2)},
    "out: missing; all ranks write": {"method": dpbnn.SGLD()},
    "has the noise of a private plan": {
        "method": dpbnn.SGLD(),
        "plan": dpbnn.open_plan(n=N, batch_size=12, steps=STEPS),
    },
    "owned: does not take a sharded": {"data": owned},
    "units, observers: do not take": {"units": list(range(N))},
    "shard_placement_fn": {"model": along_columns},
    "leave mp_policy out": {"model": half},
    "tensor parallelism is not supported": {"model": without_hooks},
    "is trained and not sharded": {"model": in_part},
    "has no rule of its own": {"model": own_layer},
}


def test_what_sharded_networks_cannot_do_is_refused():
    def work(rank):
        mesh, found = init_device_mesh("cpu", (2,)), {}
        for words, change in REFUSED.items():
            settings = {"method": METHODS["sgd"], "plan": plan(), "progress": False, **change}
            model, data = settings.pop("model", None), settings.pop("data", dataset)
            made = functools.partial(model, mesh) if model else sharded(mlp)
            try:
                dpbnn.fit(made, data(), **settings)
            except ValueError as error:
                found[words] = str(error)
        return found

    for found in together(2, work):
        assert found.keys() == REFUSED.keys()
        assert all(words in said for words, said in found.items()), found


@pytest.mark.once
def test_a_few_kills_of_sharded_ranks(tmp_path):
    """The record of more kills is in docs/scaling.md."""
    found = killed(2, 1, tmp_path, spread=True)
    assert found["kills"] >= 2
    assert not any(found[name] for name in WRONG), found


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
