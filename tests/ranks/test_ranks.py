"""Several processes train one model: the same one as one process, from one noise, on one ledger."""

import json
import os
import subprocess
import sys
import textwrap

import broken_versions as broken
import pytest
import torch
from small_runs import METHODS, STEPS, N, dataset, drawn_noise, fit, network, numbers, plan
from together import together
from twins import fails_on, twins_of

import dpbnn
from dpbnn import resume
from dpbnn.contributions import DenseContributions
from dpbnn.privacy import group
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.group import Group, Shares
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.relation import Relation


def traced(name="sgd", **options):
    """The noise, the numbers and the statement of a fit in this process."""
    with pytest.MonkeyPatch.context() as patch, drawn_noise(patch) as noise:
        posterior = fit(name, **options)
    return noise, numbers(posterior), posterior.privacy.to_dict()


def on_ranks(size, name="sgd", **options):
    """The same of every rank; an error of a rank is raised."""
    found = together(size, lambda rank: traced(name, **options))
    for left in found:
        assert isinstance(left, tuple), left
    return found


def each_on_ranks(size, runs):
    """The same of several fits by one group, each given by its options: ranks of each fit."""
    found = together(size, lambda rank: [traced(**options) for options in runs])
    for left in found:
        assert isinstance(left, list), left
    return list(zip(*found, strict=True))


def check_one_run(alone, ranks, tolerance):
    """Check that all ranks have one model, with the noise that one process draws, drawn once."""
    noise = ranks[0][0]
    assert len(noise) == len(alone[0]) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(noise, alone[0], strict=True))
    for other in ranks[1:]:
        assert other[0] == []  # nobody else draws any
        assert torch.equal(other[1], ranks[0][1])
        assert other[2] == ranks[0][2]
    assert torch.allclose(ranks[0][1], alone[1], rtol=0, atol=tolerance)


@fails_on(
    58,
    broken.every_rank_adds_its_own_noise,
    broken.every_rank_adds_noise_to_the_release,
    broken.a_rank_divides_by_its_own_records,
    names=("sgd",),
)
@pytest.mark.parametrize("names", [tuple(METHODS)], ids=["all"])
def test_item_58_ranks_train_what_one_process_trains(names):
    runs = [{"name": name, "debug_seed": 3} for name in names]
    one, two, four = (each_on_ranks(size, runs) for size in (1, 2, 4))
    for name, *found in zip(names, one, two, four, strict=True):
        # Dropout masks are drawn by shards: the same for all numbers of ranks, not for no shards.
        tolerance = 1e-5 if name != "mcdropout" else 1.0
        check_one_run(traced(name, debug_seed=3), found[1], tolerance)
        for other in found:
            assert torch.equal(other[0][1], found[1][0][1])
            assert all(torch.equal(*pair) for pair in zip(other[0][0], found[1][0][0], strict=True))


SETTINGS = [
    {"relation": "replace-one", "sampling": "fixed-size"},
    {"relation": "add-remove"},
    {"sampling": "partition"},
    {"sampling": "full-batch", "batch_size": None},
]


def test_all_samplings_and_relations():
    runs = [{"plan": plan(**settings), "debug_seed": 3} for settings in SETTINGS]
    for options, ranks in zip(runs, each_on_ranks(2, runs), strict=True):
        check_one_run(traced(**options), ranks, 1e-3)


@fails_on(58, broken.an_empty_batch_is_skipped)
def test_item_58_empty_batches_and_uneven_shares():
    """With one record expected a batch, most shares are empty, and a third of the batches."""
    chosen = plan(batch_size=1)
    alone = traced(plan=chosen, debug_seed=3)
    ranks = on_ranks(3, plan=chosen, debug_seed=3)
    check_one_run(alone, ranks, 1e-5)
    sizes = [len(b) for b in chosen.sampler.batches(STEPS, key=sampling_key(3))]
    assert 0 in sizes


def sampling_key(seed):
    import hashlib

    return hashlib.sha256(f"debug {seed}".encode()).digest()


def test_microbatches_and_an_open_plan():
    alone = traced(debug_seed=3)
    check_one_run(alone, on_ranks(2, debug_seed=3, microbatch_size=2), 1e-5)
    free = dpbnn.open_plan(n=N, batch_size=12, steps=STEPS)
    ranks = on_ranks(2, plan=free, debug_seed=3)
    assert torch.equal(ranks[0][1], ranks[1][1])
    assert torch.allclose(ranks[0][1], traced(plan=free, debug_seed=3)[1], rtol=0, atol=1e-5)


@fails_on(58, broken.every_rank_charges)
def test_item_58_one_ledger_has_every_release_once(tmp_path):
    steps = 60
    ranks = together(2, lambda rank: fit(plan=plan(steps=steps), out=tmp_path).privacy.to_dict())
    assert ranks[0] == ranks[1]
    ledger = Ledger(tmp_path / "ledger.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert ledger.releases == steps == ranks[0]["mechanisms"][0]["releases"]
    spends = [line for line in lines if "spend" in line or "count" in line]
    assert len(spends) == 2  # blocks of 50 and 10
    assert ranks[0]["private"]


def test_no_rank_sums_before_rank_0_has_charged(tmp_path):
    """The budget holds 5 steps of 6: nobody gets to a sum, and all raise the same error."""
    summed = []

    def work(rank):
        chosen = plan()
        budget = chosen.epsilon_after(STEPS - 1) * 1.0001
        ledger = Ledger(tmp_path / "l.jsonl", epsilon=budget, delta=1e-5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Gate, "_clipped_sum", lambda *given: summed.append(rank))
            with pytest.raises(dpbnn.BudgetExceeded):
                fit(plan=chosen, ledger=ledger)
        return summed

    assert together(2, work) == [[], []]
    assert Ledger(tmp_path / "l.jsonl").releases == 0


def test_under_a_budget_all_ranks_reserve_the_same_steps(tmp_path, monkeypatch):
    """Rank 0 alone knows the budget, under which all steps are charged at once."""
    monkeypatch.setattr(resume, "_BLOCK", 2)

    def work(rank):
        ledger = Ledger(tmp_path / "l.jsonl", epsilon=100.0, delta=1e-5)
        return numbers(fit(ledger=ledger))

    one, two = together(2, work)
    assert torch.equal(one, two)
    assert Ledger(tmp_path / "l.jsonl").releases == STEPS


@fails_on(58, broken.shares_overlap, names=("sgd",))
@pytest.mark.parametrize("names", [tuple(METHODS)], ids=["all"])
def test_item_58_neighbours_over_two_ranks(names):
    def work(rank):
        chosen, given = plan(batch_size=24, steps=4), dataset()
        return [
            dpbnn.replay(METHODS[name], given, 7, model=network(name)(), plan=chosen)
            for name in names
        ]

    for first, second in zip(*together(2, work), strict=True):
        assert first.passed, first
        assert len(first.distances) == 4
        assert max(first.distances) > 0.1
        assert second.differences == ()


@pytest.mark.parametrize(
    "settings", [{"relation": "add-remove"}, {"relation": "replace-one", "sampling": "fixed-size"}]
)
def test_neighbours_of_other_relations(settings):
    def work(rank):
        chosen = plan(batch_size=24, steps=4, **settings)
        x, y = dataset()
        other = (x.clone(), y)
        other[0][5] += 10.0
        neighbour = 5 if settings["relation"] == "add-remove" else other
        return dpbnn.replay(METHODS["sgd"], (x, y), neighbour, model=network()(), plan=chosen)

    first, second = together(2, work)
    assert first.passed, first
    assert second.differences == ()


REFUSED = {
    "SEP: works in one process, and 2 were": {"method": dpbnn.SEP(), "likelihood": "gaussian"},
    "NoiseAware: works in one process": {"method": dpbnn.NoiseAware()},
    "observers=: works in one process": {"observers": [dpbnn.BayesianAccountant()]},
    "ledger: is in memory": {"ledger": Ledger},
}


def refusals(runs, work):
    """What two ranks say to each of several calls."""

    def each(rank):
        said = []
        for one in runs:
            with pytest.raises((ValueError, RuntimeError)) as refused:
                work(rank, one)
            said.append(str(refused.value))
        return said

    found = together(2, each)
    assert all(found), found
    return zip(*found, strict=True)


def test_what_ranks_cannot_do_is_refused():
    def work(rank, words):
        options = dict(REFUSED[words])
        if "ledger" in options:
            options["ledger"] = options["ledger"]()
        fit(**options)

    for words, said in zip(REFUSED, refusals(REFUSED, work), strict=True):
        assert words in said[0]
        assert words in said[1]


GIVEN = {
    "data": lambda rank: {"data": (dataset()[0] + rank, dataset()[1])},
    "seed": lambda rank: {"seed": rank},
    "checkpoint_every": lambda rank: {"checkpoint_every": 2 + rank},
    "debug_seed": lambda rank: {"debug_seed": rank or None},
    "settings and method": lambda rank: {"method": dpbnn.SGD(learning_rate=0.1 + rank)},
}


@fails_on(58, broken.nobody_compares_what_ranks_were_given, names=("data",))
@pytest.mark.parametrize("names", [tuple(GIVEN)], ids=["all"])
def test_item_58_ranks_that_were_given_different_things_are_refused(tmp_path, names):
    def work(rank, name):
        if name == "ledger":
            fit(ledger=Ledger(tmp_path / f"{rank}.jsonl"))
        fit(**GIVEN[name](rank))

    names = [*names, "ledger"]
    for name, said in zip(names, refusals(names, work), strict=True):
        expected = f"{name}: rank 1 has something else than rank 0"
        assert expected in said[0]
        assert expected in said[1]


@fails_on(58, broken.nobody_compares_weights)
def test_item_58_a_rank_whose_weights_differ_stops_all(tmp_path):
    def work(rank):
        update = dpbnn.methods.sgd.SGDProcess.update

        def spoilt(self, state, release):
            state = update(self, state, release)
            if state.steps == 3 and rank == 1:
                next(iter(state.parameters.values())).data.view(-1)[0] += 1e-6
            return state

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dpbnn.methods.sgd.SGDProcess, "update", spoilt)
            return fit(checkpoint_every=100)

    for error in together(2, work):
        assert "after step 3 the ranks have different weights" in str(error)


def test_the_default_group_may_have_any_backend_and_carries_nothing():
    """Such as NCCL; what this one is given is lost."""
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    first, second = together(2, lambda rank: numbers(fit(debug_seed=3)), backend="fake")
    assert torch.equal(first, second)
    assert torch.allclose(first, numbers(fit(debug_seed=3)), rtol=0, atol=1e-5)


def test_a_gate_of_ones_own_is_refused_on_ranks():
    def work(rank):
        with pytest.raises(RuntimeError, match="a process group of 2"):
            Gate(1.0, 1.0)
        with pytest.raises(ValueError, match="as `Shares`"):
            Gate(1.0, 1.0, group=Group(0, 2, 8))(DenseContributions(torch.ones(3, 2)))
        return "refused"

    assert together(2, work) == ["refused", "refused"]


def test_an_error_on_one_rank_ends_the_run_on_all():
    def work(rank):
        original = dpbnn.methods.sgd.SGDProcess.contribute

        def failing(self, state, x, y):
            if rank == 1 and state.steps == 2:
                raise MemoryError
            return original(self, state, x, y)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dpbnn.methods.sgd.SGDProcess, "contribute", failing)
            try:
                fit()
            except Exception:
                patch.undo()
        return numbers(fit(debug_seed=1))  # and the next run works

    first, second = together(2, work)
    assert torch.equal(first, second)


# The sum itself, without processes


def partial_sums(size, values, shards=8, relation=Relation.ZERO_OUT):
    """The sum over all ranks, each of which is asked in turn."""
    records = torch.arange(len(values))
    parts = []

    class Asked(Group):
        def sum(self, values):
            parts.append(values)
            return values

    for rank in range(size):
        gate = Gate(1.0, 1.0, ledger=Ledger(relation=relation))
        gate.group = Asked(rank, size, shards)
        shares = Shares(
            records,
            DenseContributions(values[:0]),
            lambda shard, own: held(values, own),
            gate.group,
        )
        gate._precision = gate._precision_of(shares, 1.0)
        gate._summed(shares, None, [])
    return torch.stack(parts).sum(0), gate


class held:
    def __init__(self, values, own):
        self.contributions = DenseContributions(values[own])

    def __enter__(self):
        return self.contributions

    def __exit__(self, *error):
        pass


def test_sums_do_not_depend_on_the_number_of_ranks():
    values = 2 * torch.randn(37, 11, generator=torch.Generator().manual_seed(1))
    one, _ = partial_sums(1, values)
    for size in (2, 3, 4, 8):
        assert torch.equal(partial_sums(size, values)[0], one)


def test_sums_that_float64_cannot_hold_are_added_in_int64():
    values = 2 * torch.randn(
        37, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    one, _ = partial_sums(1, values)
    assert one.dtype is torch.float64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_EXACT", 1.0)
        two, _ = partial_sums(3, values)
        assert two.dtype is torch.int64
        assert torch.equal(two.double(), one)
        patch.setattr(group, "_LARGEST", 1.0)
        with pytest.raises(ValueError, match="too many to be added over processes"):
            partial_sums(3, values)


def test_a_neighbour_moves_the_whole_numbers_by_no_more_than_the_clip():
    generator = torch.Generator().manual_seed(1)
    values = 2 * torch.randn(40, 50, generator=generator)
    one, gate = partial_sums(2, values)
    g = dpbnn.privacy.grid.spacing(1.0, gate._precision.dtype)
    for record in range(0, 40, 7):
        other = values.clone()
        other[record] = 0
        two, _ = partial_sums(2, other)
        assert 0.9 < (g * (one - two).double()).norm() <= 1.0


def test_more_roundings_are_paid_for_where_a_missing_record_moves_others():
    values = torch.randn(40, 5000, generator=torch.Generator().manual_seed(1))
    _, public = partial_sums(2, values)
    _, hidden = partial_sums(2, values, relation=Relation.ADD_REMOVE)
    left = 1 - 16 * 5000**0.5 * 2.0**-19
    assert public._precision.share > 0.9995
    assert left - 5e-4 < hidden._precision.share <= left


@pytest.mark.once
def test_torchrun_trains_one_model(tmp_path):
    """The command itself: two processes, one folder, one ledger."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, torch, dpbnn
        torch.manual_seed(0)
        x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
        plan = dpbnn.plan(noise_multiplier=2.0, delta=1e-5, n=40, batch_size=10, steps=5)
        posterior = dpbnn.fit(dpbnn.mlp(3, (4,), 2), (x, y), method=dpbnn.SGLD(keep=2),
                              plan=plan, out=sys.argv[1], progress=False)
        posterior.save(f"{sys.argv[1]}-{os.environ['RANK']}")
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (dpbnn.load(tmp_path / f"run-{rank}") for rank in range(2))
    assert torch.equal(numbers(first), numbers(second))
    assert first.privacy == second.privacy
    assert Ledger(tmp_path / "run" / "ledger.jsonl").releases == 5


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
