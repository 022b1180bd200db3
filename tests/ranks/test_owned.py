"""Ranks that own rows: each record has one owner, and all of them are one dataset."""

import io
import json
import re
import types
from contextlib import redirect_stderr, redirect_stdout

import broken_versions as broken
import numpy as np
import pytest
import torch
from small_runs import METHODS, STEPS, N, Pairs, dataset, fit, network, numbers, plan, stopped
from test_ranks import SETTINGS, check_one_run, refusals, traced
from together import together
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from twins import fails_on, twins_of

import dpbnn
from dpbnn import checkpoint
from dpbnn.privacy import ledger_entries
from dpbnn.privacy.group import Group
from dpbnn.privacy.ledger import Ledger

UNEVEN = {2: (17, 31), 3: (40, 0, 8)}


def own(rank, counts, kind="tensors", folder=None, data=None):
    """The rows of a rank, of some kind."""
    x, y = (torch.split(part, list(counts))[rank] for part in data or dataset())
    if kind == "memory map" and len(x):
        np.save(folder / f"{rank}.npy", x.numpy())
        x = np.load(folder / f"{rank}.npy", mmap_mode="r")
    given = Pairs(x, y) if kind == "Dataset" else (x, y)
    memory = 2**30 if kind == "tensors" else 2000
    return dpbnn.DataSource(given, owned=True, memory=memory)


def each_on_owners(counts, runs):
    """Noise, numbers and statement of every rank, of several fits by one group of owners."""
    found = together(
        len(counts), lambda rank: [traced(**{"data": own(rank, counts), **run}) for run in runs]
    )
    for left in found:
        assert isinstance(left, list), left
    return list(zip(*found, strict=True))


@fails_on(
    63,
    broken.a_rank_divides_by_its_own_records,
    broken.owners_draw_from_their_own_records,
    broken.owners_begin_at_the_same_number,
    cases=((2, ("sgd",)),),
)
@pytest.mark.parametrize("cases", [((2, tuple(METHODS)), (3, ("sgd", "bbp")))], ids=["all"])
def test_item_63_owners_train_what_one_process_trains_on_all_rows(cases):
    """Of three ranks one owns nothing."""
    for size, names in cases:
        runs = [{"name": name, "debug_seed": 3} for name in names]
        for run, owned in zip(runs, each_on_owners(UNEVEN[size], runs), strict=True):
            check_one_run(traced(**run), owned, 1e-5 if run["name"] != "mcdropout" else 1.0)


def test_all_samplings_and_relations():
    runs = [{"plan": plan(**settings), "debug_seed": 3} for settings in SETTINGS]
    for run, owned in zip(runs, each_on_owners(UNEVEN[2], runs), strict=True):
        check_one_run(traced(**run), owned, 1e-3)


@fails_on(63, broken.an_empty_batch_is_skipped, broken.a_step_without_records_of_rank_0_is_skipped)
def test_item_63_empty_batches_and_empty_shares():
    """With one record expected a batch, most shares are empty, and a third of the batches."""
    run = {"plan": plan(batch_size=1), "debug_seed": 3}
    (owned,) = each_on_owners(UNEVEN[2], [run])
    check_one_run(traced(**run), owned, 1e-5)


@pytest.mark.parametrize("on_bad_rows", ["error", "zero"])
@pytest.mark.parametrize("kind", ["memory map", "Dataset"])
def test_rows_that_are_read_batch_by_batch(kind, on_bad_rows, tmp_path):
    """Owned, and such that every rank has them all."""
    alone = traced(debug_seed=3)
    options = {"debug_seed": 3, "on_bad_rows": on_bad_rows}

    def work(rank):
        owned = traced(data=own(rank, UNEVEN[2], kind, tmp_path), **options)
        x, y = dataset()
        if kind == "memory map":
            np.save(tmp_path / f"all {rank}.npy", x.numpy())
            x = np.load(tmp_path / f"all {rank}.npy", mmap_mode="r")
        data = dpbnn.DataSource(Pairs(x, y) if kind == "Dataset" else (x, y), memory=2000)
        return owned, traced(data=data, **options), traced(**options)

    owned, ranks, whole = zip(*together(2, work), strict=True)
    check_one_run(alone, owned, 1e-5)
    check_one_run(alone, ranks, 1e-5)
    assert torch.equal(ranks[0][1], whole[0][1])


class Two(nn.Module):
    """A network of two inputs, which are given by name."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, first, second):
        return self.left(first) + self.right(second)


class Named(Pairs):
    def __getitem__(self, number):
        return {"first": self.x[number, :2], "second": self.x[number, 2:]}, int(self.y[number])


def spread_two():
    return fully_shard(Two(), mesh=init_device_mesh("cpu", (2,)))


def test_inputs_by_name_over_ranks(tmp_path):
    """All rows on every rank, each rank's own, records of a dataset; sharded too."""
    x, y = dataset()
    whole = {"first": x[:, :2], "second": x[:, 2:]}, y
    settings = {"method": METHODS["sgd"], "plan": plan(), "debug_seed": 3, "progress": False}

    def work(rank):
        mine = slice(0, 17) if rank == 0 else slice(17, None)
        owned = {name: part[mine] for name, part in whole[0].items()}, y[mine]
        kinds = [whole, dpbnn.DataSource(owned, owned=True), Named(x, y)]
        left = [numbers(dpbnn.fit(Two, data, **settings)) for data in kinds]
        dpbnn.fit(spread_two, whole, **settings).save(tmp_path / "saved")
        return left

    first, second = together(2, work)
    assert isinstance(first, list), first
    alone = numbers(dpbnn.fit(Two, whole, **settings))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
        assert torch.allclose(one, alone, rtol=0, atol=1e-5)
    spread = numbers(dpbnn.load(tmp_path / "saved", Two()))
    assert torch.allclose(spread, alone, rtol=0, atol=1e-5)


def test_bad_rows_of_an_owner_contribute_nothing():
    x, y = dataset()
    x[20, 1] = float("nan")
    options = {"plan": plan(), "debug_seed": 3, "on_bad_rows": "zero"}
    alone = traced(data=(x, y), **options)
    owned = together(2, lambda r: traced(data=own(r, UNEVEN[2], data=(x, y)), **options))
    check_one_run(alone, owned, 1e-5)
    errors = together(2, lambda r: fit(data=own(r, UNEVEN[2], data=(x, y))))
    assert "rank 1 has refused its data" in str(errors[0])
    assert "1 row cannot be used" in str(errors[1]), errors[1]


@fails_on(63, broken.owners_begin_at_the_same_number, names=("sgd",))
@pytest.mark.parametrize("names", [tuple(METHODS)], ids=["all"])
def test_item_63_neighbours_over_two_owners(names):
    """A record of rank 1 with all methods, and one of rank 0."""
    cases = [*((name, 20) for name in names), ("sgd", 3)]

    def work(rank):
        chosen = plan(sampling="full-batch", batch_size=None, steps=3)
        return [
            dpbnn.replay(
                METHODS[name], own(rank, UNEVEN[2]), record, model=network(name)(), plan=chosen
            )
            for name, record in cases
        ]

    for first, second in zip(*together(2, work), strict=True):
        assert first.passed, first
        assert len(first.distances) == 3
        assert max(first.distances) > 0.1
        assert second.differences == ()


@pytest.mark.parametrize(
    "settings", [{"relation": "add-remove"}, {"relation": "replace-one", "sampling": "fixed-size"}]
)
def test_neighbours_of_other_relations(settings):
    """Under add/remove the last record of rank 1 is taken away: its number is the last of all."""

    def work(rank):
        chosen = plan(batch_size=24, steps=4, **settings)
        x, y = dataset()
        other = (x.clone(), y)
        other[0][20] += 10.0
        neighbour = own(rank, UNEVEN[2], data=other)
        if settings["relation"] == "add-remove":
            neighbour = own(rank, (17, 30), data=(x[:-1], y[:-1]))
        data = own(rank, UNEVEN[2])
        return dpbnn.replay(METHODS["sgd"], data, neighbour, model=network()(), plan=chosen)

    first, second = together(2, work)
    assert first.passed, first
    assert second.differences == ()


@fails_on(63, broken.nobody_asks_whether_two_own_the_same, settings={"relation": "add-remove"})
@fails_on(63, broken.every_owner_has_n_records, settings={})
@pytest.mark.parametrize("settings", [{}, {"relation": "add-remove"}], ids=str)
def test_item_63_records_with_two_owners_are_refused(settings):
    """Every rank says that it owns all rows. The number is public, or the rows are alike."""
    data = dpbnn.DataSource(dataset(), owned=True)
    words = "two ranks own the same rows" if settings else "the ranks own [48, 48], 96 in all"
    for error in together(2, lambda rank: fit(data=data, plan=plan(**settings))):
        assert words in str(error)


REFUSED = {
    "owned: is true on some ranks alone": lambda r: dpbnn.DataSource(dataset(), owned=r == 1),
    "the ranks own [17, 30], 47 in all": lambda r: own(
        r, (17, 30), data=[p[:-1] for p in dataset()]
    ),
    "units=: works in one process": lambda r: own(r, UNEVEN[2]),
    # A folder that is listed in another order, as an example: records would count twice.
    "data: rank 1 has something else than rank 0": lambda r: Pairs(
        *(part.flip(0) if r else part for part in dataset())
    ),
}


def test_what_owners_may_not_do_is_refused():
    def work(rank, words):
        options = {"units": list(range(N))} if words.startswith("units") else {}
        fit(data=REFUSED[words](rank), **options)

    for words, said in zip(REFUSED, refusals(REFUSED, work), strict=True):
        assert words in said[0]
        assert words in said[1]


def test_the_number_of_records_of_owners_shows_in_nothing(tmp_path, monkeypatch):
    """Under add/remove: no file, no line of the ledger and no printed text tells 48 from 47."""
    clock = types.SimpleNamespace(time=lambda: 1.5)  # a time's digits count in the size of a file
    monkeypatch.setattr(ledger_entries, "time", clock)
    chosen = plan(relation="add-remove")

    def work(rank, counts):
        data = [part[: sum(counts)] for part in dataset()]
        out = tmp_path / str(sum(counts))
        said = io.StringIO()  # of its own: two ranks write over each other on one stream
        with redirect_stdout(said), redirect_stderr(said):
            posterior = fit(
                data=own(rank, counts, data=data), plan=chosen, out=out, checkpoint_every=2
            )
            print(posterior.privacy)
        return posterior.privacy.to_dict(), re.sub("[0-9a-f]{8,}", "", said.getvalue())

    seen = []
    for counts in (UNEVEN[2], (17, 30)):
        left = together(2, lambda rank, counts=counts: work(rank, counts))
        out = tmp_path / str(sum(counts))
        lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
        for line in lines:
            for name in ("id", "run", "key", "what", "check", "label"):
                line.pop(name, None)
        for entry in (entry for statement, _ in left for entry in statement["mechanisms"]):
            entry.pop("ledger"), entry.pop("label")
        sizes = {path.name: path.stat().st_size for path in out.iterdir()}
        seen.append((left, lines, sizes))
    for one, two in zip(*seen, strict=True):
        assert one == two


# Restarts


@fails_on(63, broken.rank_0_speaks_for_the_rows_of_all)
def test_item_63_owners_go_on_with_the_same_rows_alone(tmp_path):
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        fixed = checkpoint.Keys("name", *(bytes([i]) * 32 for i in range(3)))
        patch.setattr(checkpoint.Keys, "new", classmethod(lambda cls: fixed))
        whole = together(2, lambda r: numbers(fit(data=own(r, UNEVEN[2]), out=tmp_path / "whole")))
        together(2, lambda r: stopped(r, data=own(r, UNEVEN[2]), out=out))
        assert (out / "keys.json").exists()
    changed = dataset()
    changed[0][40] += 1.0
    for counts, data in (((18, 30), None), (UNEVEN[2], changed), (UNEVEN[3], None)):

        def work(rank, counts=counts, data=data):
            return fit(data=own(rank, counts, data=data), out=out, resume=True)

        errors = together(len(counts), work)
        for error in errors:
            assert "data: not those of" in str(error) or "cannot go on" in str(error), error
    rest = together(2, lambda r: numbers(fit(data=own(r, UNEVEN[2]), out=out, resume=True)))
    assert all(torch.equal(one, whole[0]) for one in rest)
    assert Ledger(out / "ledger.jsonl").releases == STEPS


@fails_on(63, broken.rank_0_speaks_for_the_rows_of_all)
def test_item_63_rows_of_one_rank_that_may_change_take_the_keys_away(tmp_path):
    def work(rank):
        kind = "Dataset" if rank else "tensors"
        stopped(rank, data=own(rank, UNEVEN[2], kind), out=tmp_path / "run")

    together(2, work)
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "run" / "keys.json").exists()


def test_shards_of_owners():
    group = Group(1, 3, 3, starts=(0, 4, 4, 9))
    assert group.shard_of(torch.arange(9)).tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 2]
    assert list(group.mine()) == [1]


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
