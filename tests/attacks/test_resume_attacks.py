"""Attacks on runs that are interrupted, resumed, copied, replayed: is every release recorded?"""

import functools
import math
import os
import shutil

import broken_versions as broken
import pytest
import torch
import torch.distributed as dist
from forks import exit_code, fork, started
from runs_under_attack import STEPS, dataset, fit, interrupted, plan, released
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from twins import fails_on, twins_of

import dpbnn
from dpbnn import resume
from dpbnn.checkpoint import RunFolder
from dpbnn.contributions import DenseContributions
from dpbnn.privacy.events import gaussian_mu
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.keys import ratchet
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.relation import Relation


def ledger_of(folder):
    return dpbnn.Ledger(folder / "ledger.jsonl")


# 35: a run goes on under a ledger that lacks its first part


@fails_on(35, broken.a_run_goes_on_with_any_ledger)
def test_item_35_a_run_goes_on_only_with_the_ledger_that_holds_its_first_part(tmp_path):
    run, early = tmp_path / "run", tmp_path / "early"
    interrupted(2, out=run)
    shutil.copytree(run, early)
    shutil.rmtree(run)
    interrupted(5, out=run)
    files = ("ledger.jsonl", "ledger.jsonl.head")
    kept = {name: (run / name).read_bytes() for name in files}

    def refused(**options):
        try:
            posterior = fit(out=run, resume=True, **options)
        except ValueError as error:
            assert "not in the ledger given" in str(error)  # noqa: PT017
            assert "restored from a backup" in str(error)  # noqa: PT017
        else:
            assert sum(m["releases"] for m in posterior.privacy.mechanisms) >= STEPS

    refused(ledger=dpbnn.Ledger())
    refused(ledger=dpbnn.Ledger(tmp_path / "other.jsonl"))
    for name in files:
        (run / name).unlink()
    refused()
    for name in files:
        shutil.copy(early / name, run / name)
    refused()
    for name, content in kept.items():
        (run / name).write_bytes(content)
    assert fit(out=run, resume=True).privacy.mechanisms[0]["releases"] == STEPS


def test_item_35_a_ledger_in_memory_serves_the_run_that_began_with_it(tmp_path):
    ledger = dpbnn.Ledger()
    interrupted(5, out=tmp_path, ledger=ledger)
    fit(out=tmp_path, resume=True, ledger=ledger)
    assert ledger.releases == STEPS


# 38: statements of releases that were observed


@fails_on(38, broken.observed_releases_leave_no_mark)
def test_item_38_nothing_that_was_observed_is_called_private(tmp_path):
    statements = []

    def run(values):
        gate = Gate(1.0, 1.0)
        release = gate(DenseContributions(values))["value"]
        statements.append(gate.statement(delta=1e-5))
        statements.append(gate.ledger.statement(delta=1e-5))
        return release

    dpbnn.replay(run, torch.ones(4, 2), torch.ones(4, 2))
    posteriors = []

    def train(data):
        posteriors.append(fit(data))
        return posteriors[-1].model

    dpbnn.replay(train, dataset(), dataset())
    statements += [posterior.privacy for posterior in posteriors]
    assert len(statements) == 9
    kept = dpbnn.Ledger(tmp_path / "ledger.jsonl", delta=1e-5)
    dpbnn.replay(
        lambda v: Gate(1.0, 1.0, ledger=kept)(DenseContributions(v)), *[torch.ones(4, 2)] * 2
    )
    statements += [kept.statement(), dpbnn.Ledger(kept.path).statement()]
    for statement in statements:
        assert not statement.private
        assert math.isinf(statement.epsilon)
        assert "observed or replayed" in statement.reason


# 39: a partition goes on with the rows in another order


def test_item_39_a_record_that_moves_to_another_batch_pays_for_both(tmp_path):
    """Half a pass, the halves of the rows swapped, the other half: one record takes part twice."""
    once = plan(sampling="partition", steps=4, noise_multiplier=1.0)
    interrupted(2, out=tmp_path, plan=once)
    x, y = dataset()
    order = torch.arange(len(x)).roll(len(x) // 2)
    swapped = (x[order], y[order])
    with pytest.raises(ValueError, match=r"^data: not those of the run"):
        fit(swapped, out=tmp_path, plan=once, resume=True)
    (tmp_path / "keys.json").unlink()
    posterior = fit(swapped, out=tmp_path, plan=once, resume=True)
    takes_part_twice = gaussian_mu([dpbnn.FullBatch(40).event(1.0, 2)], Relation.ZERO_OUT)
    assert gaussian_mu(ledger_of(tmp_path).events, Relation.ZERO_OUT) >= takes_part_twice
    twice = plan(sampling="full-batch", batch_size=None, steps=2, noise_multiplier=1.0)
    assert posterior.privacy.epsilon >= twice.epsilon * (1 - 1e-9)


@fails_on(39, broken.all_orders_are_one_partition)
def test_item_39_two_fits_on_one_ledger_are_two_partitions():
    draw, ledger = dpbnn.Partition(40, 10), dpbnn.Ledger()
    for first in (0, 2):
        gate = Gate(1.0, 1.0, draw, ledger, step=first)
        for _ in range(2):
            gate(DenseContributions(torch.zeros(10, 1)))
    assert gaussian_mu(ledger.events, Relation.ZERO_OUT) == pytest.approx(math.sqrt(2))


def test_item_39_an_unchanged_run_is_one_partition(tmp_path):
    passes = plan(sampling="partition", steps=8, noise_multiplier=1.0)
    interrupted(3, out=tmp_path, plan=passes)
    posterior = fit(out=tmp_path, plan=passes, resume=True)
    assert posterior.privacy.epsilon == pytest.approx(passes.epsilon)


# 40: charges of discarded attempts


@fails_on(40, broken.charges_serve_any_attempt)
def test_item_40_charges_of_a_discarded_attempt_pay_for_nothing_else(tmp_path):
    with pytest.MonkeyPatch.context() as patch, released(patch) as made:
        interrupted(4, out=tmp_path)
        checkpoint = (tmp_path / "checkpoint.safetensors").read_bytes()
        for _ in range(3):
            (tmp_path / "keys.json").unlink()
            interrupted(9, out=tmp_path, resume=True)
            (tmp_path / "checkpoint.safetensors").write_bytes(checkpoint)
        posterior = fit(out=tmp_path, resume=True)
    recorded = ledger_of(tmp_path).releases
    assert len(made) == 4 + 3 * 5 + 8
    assert recorded >= len(made)
    assert posterior.privacy.mechanisms[0]["releases"] == recorded == STEPS + 4 * (STEPS - 4)


# 41: forks


@fails_on(41, broken.reservations_survive_a_fork)
def test_item_41_a_forked_gate_has_reserved_nothing(tmp_path):
    ledger = dpbnn.Ledger(tmp_path / "ledger.jsonl")
    gate = Gate(1.0, 1.0, ledger=ledger)
    gate.reserve(5)

    def release():
        for _ in range(5):
            gate(DenseContributions(torch.zeros(1, 1)))

    for _ in range(3):
        assert exit_code(started(release)) == 0
    release()
    assert ledger.releases == 20


@fails_on(41, broken.forked_runs_go_on)
def test_item_41_a_run_that_was_forked_goes_on_in_one_process_alone(tmp_path):
    children = []
    update = dpbnn.methods.sgd.SGDProcess.update

    def forked(self, state, release):
        state = update(self, state, release)
        if state.steps == 3 and not children:
            children.append(fork())
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpbnn.methods.sgd.SGDProcess, "update", forked)
        status = 1
        try:
            fit(out=tmp_path, checkpoint_every=100)
            status = 0
        except RuntimeError as error:
            status = 7 if "fit was forked" in str(error) else 2
        finally:
            if children and children[0] == 0:
                os._exit(status)
    assert status == 0
    assert exit_code(children[0]) == 7


def test_item_41_a_forked_ledger_in_memory_is_refused():
    gate = Gate(1.0, 1.0)
    gate.reserve(2)

    def release():
        with pytest.raises(RuntimeError, match="give the ledger a path"):
            gate(DenseContributions(torch.zeros(1, 1)))

    assert exit_code(started(release)) == 0


@pytest.mark.parametrize("thing", [Gate(1.0, 1.0), dpbnn.Ledger()])
def test_item_41_neither_gates_nor_ledgers_in_memory_can_be_copied(thing):
    import copy
    import pickle

    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="copied"):
            duplicate(thing)


# 42: seeded noise after a private start


@fails_on(42, broken.seeded_noise_is_recorded_as_noise)
def test_item_42_seeded_noise_voids_the_ledger_it_touches(tmp_path):
    interrupted(4, out=tmp_path)
    posterior = fit(out=tmp_path, resume=True, debug_seed=3)
    assert not posterior.privacy.private
    assert not ledger_of(tmp_path).statement().private


# 43: the same noise for another function


class Doubled:
    """A likelihood of the user's."""

    def __init__(self, scale):
        self.scale = scale

    def log_prob(self, outputs, y):
        return self.scale * torch.nn.functional.cross_entropy(outputs, y, reduction="none").neg()


class Tilted(nn.Linear):
    """A network of the user's, with a constant that no state_dict shows."""

    def __init__(self, tilt):
        super().__init__(3, 2)
        self.tilt = tilt

    def forward(self, x):
        return super().forward(self.tilt * x)


class Shaped(nn.Linear):
    """A network of the user's, with a function and an object among its attributes."""

    def __init__(self, function, scale):
        super().__init__(3, 2)
        self._function, self.settings = function, Doubled(scale)

    def forward(self, x):
        return super().forward(self._function(self.settings.scale * x))


def frozen(value):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    nn.init.constant_(model[0].weight, value)
    nn.init.zeros_(model[0].bias)
    return model


def scaled(factor):
    return dpbnn.SGD(learning_rate=0.5, schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, lambda step: factor))  # fmt: skip


PARTS = ("prior", "likelihood", "method", "data", "microbatch_size")
CHANGES = {
    "prior": ({"prior": dpbnn.Gaussian(1.0)}, {"prior": dpbnn.Gaussian(2.0)}),
    "likelihood": ({"likelihood": Doubled(1.0)}, {"likelihood": Doubled(2.0)}),
    "network": ({"model": Tilted(1.0)}, {"model": Tilted(2.0)}),
    "function": (
        {"model": Shaped(functools.partial(torch.add, other=1.0), 1.0)},
        {"model": Shaped(functools.partial(torch.add, other=2.0), 1.0)},
    ),
    "object": ({"model": Shaped(torch.tanh, 1.0)}, {"model": Shaped(torch.tanh, 2.0)}),
    "frozen weights": ({"model": frozen(1.0)}, {"model": frozen(2.0)}),
    "method": ({"method": scaled(1.0)}, {"method": scaled(0.5)}),
    "data": ({"data": dataset()}, {"data": dataset(1e-3)}),
    "microbatch_size": ({"microbatch_size": 4}, {"microbatch_size": 5}),
}


@fails_on(43, broken.keys_serve_any_function, change="prior")
@pytest.mark.parametrize("change", list(CHANGES))
def test_item_43_noise_serves_the_computation_that_it_was_drawn_for_and_no_other(change, tmp_path):
    first, second = CHANGES[change]
    interrupted(4, out=tmp_path, **first)
    part = change if change in PARTS else "network"
    try:
        fit(out=tmp_path, resume=True, **second)
        pytest.fail("the run went on with another computation")
    except ValueError as error:
        assert str(error).startswith(f"{part}: not those of the run")  # noqa: PT017
        assert "delete its keys.json" in str(error)  # noqa: PT017
    posterior = fit(out=tmp_path, resume=True, **first)
    assert posterior.privacy.mechanisms[0]["releases"] == STEPS


@fails_on(43, broken.keys_serve_any_function)
def test_item_43_noise_serves_one_version_of_this_library(tmp_path):
    """Another one may round differently; its run pays for what it computes anew."""
    interrupted(4, out=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "code", lambda: "of another version")
        try:
            fit(out=tmp_path, resume=True)
            pytest.fail("the run went on with the code of another version")
        except ValueError as error:
            assert str(error).startswith("the code of dpbnn: not those of the run")  # noqa: PT017
        (tmp_path / "keys.json").unlink()
        posterior = fit(out=tmp_path, resume=True)
    assert posterior.privacy.mechanisms[0]["releases"] == STEPS + STEPS - 4


@pytest.mark.parametrize("name", ["adam", "rmsprop", "adagrad"])
def test_a_run_of_an_earlier_version_goes_on(name, tmp_path):
    """Its optimizers were those of torch, which count their steps."""
    method = dpbnn.SGD(learning_rate=0.1, optimizer=name)
    interrupted(4, out=tmp_path, method=method)
    path = tmp_path / "checkpoint.safetensors"
    with safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    counts = {f"state.optimizer.{number}.step": torch.tensor(4.0) for number in range(2)}
    save_file(tensors | counts, path, metadata=about)
    posterior = fit(out=tmp_path, resume=True, method=method)
    assert posterior.privacy.mechanisms[0]["releases"] == STEPS + STEPS - 4


def test_item_43_without_its_keys_the_other_computation_pays_as_new(tmp_path):
    first, second = CHANGES["prior"]
    interrupted(4, out=tmp_path, **first)
    (tmp_path / "keys.json").unlink()
    posterior = fit(out=tmp_path, resume=True, **second)
    assert posterior.privacy.mechanisms[0]["releases"] == STEPS + STEPS - 4


# 44: keys on disk


@fails_on(44, broken.keys_never_move_on)
def test_item_44_the_keys_on_disk_give_neither_noise_nor_batches_of_the_past(tmp_path):
    noises, batches = [], []
    add, draw = NoiseSource.add, dpbnn.Poisson._draw
    with pytest.MonkeyPatch.context() as patch:

        def noticed(self, tensors, *rest, **options):
            before = {name: value.clone() for name, value in tensors.items()}
            add(self, tensors, *rest, **options)
            noises.append({n: v - before[n] for n, v in tensors.items()})

        def drawn(self, *arguments):
            batches.append(draw(self, *arguments).tolist())
            return torch.tensor(batches[-1], dtype=torch.long).numpy()

        patch.setattr(NoiseSource, "add", noticed)
        patch.setattr(dpbnn.Poisson, "_draw", drawn)
        interrupted(6, out=tmp_path, checkpoint_every=2)
    assert len(noises) == len(batches) == 6
    keys = RunFolder(tmp_path).keys(6)
    assert keys is not None
    purpose = f"noise {keys.what}"
    for step, noise in enumerate(noises):
        for key in (keys.noise, ratchet(keys.noise, step)):
            source = NoiseSource.from_key(key, step, purpose=purpose)
            again = source.normal({n: torch.zeros_like(v) for n, v in noise.items()}, 2.0)
            assert not any(torch.allclose(again[n], noise[n], atol=1e-3) for n in noise)
        for key in (keys.sampling, ratchet(keys.sampling, step)):
            assert next(plan().sampler.batches(1, start=step, key=key)).tolist() != batches[step]


# 54: several processes


@fails_on(54, broken.several_processes_train_at_once, make=fit)
@pytest.mark.parametrize("make", [lambda: Gate(1.0, 1.0), fit])
def test_item_54_processes_that_were_started_together_are_refused(make):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2: .* start one process"):
            make()


@fails_on(54, broken.several_processes_train_at_once)
def test_item_54_a_process_group_is_refused_without_its_variable(tmp_path):
    def member(rank):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        with pytest.raises(RuntimeError, match="a process group of 2"):
            Gate(1.0, 1.0)

    members = [started(functools.partial(member, rank)) for rank in range(2)]
    assert [exit_code(pid) for pid in members] == [0, 0]


@fails_on(54, broken.folders_are_not_locked)
def test_item_54_a_folder_serves_one_process_at_a_time(tmp_path):
    seen = []
    update = dpbnn.methods.sgd.SGDProcess.update

    def meanwhile(self, state, release):
        state = update(self, state, release)
        if state.steps == 3 and not seen:
            seen.append(None)
            with pytest.raises(ValueError, match="another process is at work"):
                fit(out=tmp_path, checkpoint_every=100)
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpbnn.methods.sgd.SGDProcess, "update", meanwhile)
        fit(out=tmp_path, checkpoint_every=100)
    assert seen
    assert ledger_of(tmp_path).releases == STEPS


# The twins


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
