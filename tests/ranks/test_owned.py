"""Ranks that own rows: each record has one owner, and all of them are one dataset."""

import os
import signal

import broken_versions as broken
import numpy as np
import pytest
import torch
from small_runs import METHODS, STEPS, N, dataset, fit, network, numbers, plan
from test_ranks import check_one_run, on_ranks, traced
from together import together
from torch.utils.data import Dataset
from twins import fails_on, twins_of

import dpbnn
from dpbnn import checkpoint
from dpbnn.methods.sgd import SGDProcess
from dpbnn.privacy.group import Group
from dpbnn.privacy.ledger import Ledger

UNEVEN = {2: (17, 31), 3: (40, 0, 8)}


class Pairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, number):
        return self.x[number], int(self.y[number])


def own(rank, counts, kind="tensors", folder=None, data=None):
    """The rows of a rank, of some kind."""
    x, y = (torch.split(part, list(counts))[rank] for part in data or dataset())
    if kind == "memory map" and len(x):
        np.save(folder / f"{rank}.npy", x.numpy())
        x = np.load(folder / f"{rank}.npy", mmap_mode="r")
    given = Pairs(x, y) if kind == "Dataset" else (x, y)
    memory = 2**30 if kind == "tensors" else 2000
    return dpbnn.DataSource(given, owned=True, memory=memory)


def on_owners(counts, name="sgd", kind="tensors", folder=None, **options):
    found = together(
        len(counts), lambda rank: traced(name, data=own(rank, counts, kind, folder), **options)
    )
    for left in found:
        assert isinstance(left, tuple), left
    return found


@fails_on(
    63,
    broken.a_rank_divides_by_its_own_records,
    broken.owners_draw_from_their_own_records,
    broken.owners_begin_at_the_same_number,
    name="sgd", size=2,
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in METHODS), ("sgd", 3), ("bbp", 3)]
)
def test_item_63_owners_train_what_one_process_trains_on_all_rows(name, size):
    """Of three ranks one owns nothing."""
    alone = traced(name, debug_seed=3)
    owned = on_owners(UNEVEN[size], name, debug_seed=3)
    check_one_run(alone, owned, 1e-5 if name != "mcdropout" else 1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"relation": "replace-one", "sampling": "fixed-size"},
        {"relation": "add-remove"},
        {"sampling": "partition"},
        {"sampling": "full-batch", "batch_size": None},
    ],
    ids=str,
)
def test_all_samplings_and_relations(settings):
    chosen = plan(**settings)
    alone = traced(plan=chosen, debug_seed=3)
    check_one_run(alone, on_owners(UNEVEN[2], plan=chosen, debug_seed=3), 1e-3)


@fails_on(63, broken.an_empty_batch_is_skipped, broken.a_step_without_records_of_rank_0_is_skipped)
def test_item_63_empty_batches_and_empty_shares():
    """With one record expected a batch, most shares are empty, and a third of the batches."""
    chosen = plan(batch_size=1)
    alone = traced(plan=chosen, debug_seed=3)
    check_one_run(alone, on_owners(UNEVEN[2], plan=chosen, debug_seed=3), 1e-5)


@pytest.mark.parametrize("on_bad_rows", ["error", "zero"])
@pytest.mark.parametrize("kind", ["memory map", "Dataset"])
def test_rows_that_are_read_batch_by_batch(kind, on_bad_rows, tmp_path):
    """Owned, and such that every rank has them all."""
    alone = traced(debug_seed=3)
    options = {"debug_seed": 3, "on_bad_rows": on_bad_rows}
    check_one_run(alone, on_owners(UNEVEN[2], "sgd", kind, tmp_path, **options), 1e-5)
    x, y = dataset()
    np.save(tmp_path / "x.npy", x.numpy())
    x = x if kind == "Dataset" else np.load(tmp_path / "x.npy", mmap_mode="r")
    data = dpbnn.DataSource(Pairs(x, y) if kind == "Dataset" else (x, y), memory=2000)
    ranks = on_ranks(2, data=data, **options)
    check_one_run(alone, ranks, 1e-5)
    whole = on_ranks(2, **options)
    assert torch.equal(ranks[0][1], whole[0][1])


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


@fails_on(63, broken.owners_begin_at_the_same_number, name="sgd")
@pytest.mark.parametrize("name", METHODS)
def test_item_63_neighbours_over_two_owners(name):
    def work(rank, record):
        chosen = plan(sampling="full-batch", batch_size=None, steps=3)
        data = own(rank, UNEVEN[2])
        return dpbnn.replay(METHODS[name], data, record, model=network(name)(), plan=chosen)

    for record in (3, 20):
        first, second = together(2, lambda rank, record=record: work(rank, record))
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
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_owners_may_not_do_is_refused(words):
    for error in together(2, lambda rank: fit(data=REFUSED[words](rank))):
        assert words in str(error)


def test_persons_are_refused():
    def work(rank):
        return fit(data=own(rank, UNEVEN[2]), units=list(range(N)))

    for error in together(2, work):
        assert "units=: works in one process" in str(error)


def test_ranks_with_different_streamed_rows_are_refused():
    """A folder that is listed in another order, as an example: records would count twice."""

    def work(rank):
        x, y = dataset()
        return fit(data=Pairs(x.flip(0), y.flip(0)) if rank else Pairs(x, y))

    for error in together(2, work):
        assert "data: rank 1 has something else than rank 0" in str(error)


# Restarts


def stopped(rank, data, out, at=4):
    update = SGDProcess.update

    def interrupting(self, state, release):
        state = update(self, state, release)
        if rank == 1 and state.steps == at:
            os.kill(os.getpid(), signal.SIGINT)
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SGDProcess, "update", interrupting)
        with pytest.raises(KeyboardInterrupt):
            fit(data=data, out=out, checkpoint_every=100)


@fails_on(63, broken.rank_0_speaks_for_the_rows_of_all)
def test_item_63_owners_go_on_with_the_same_rows_alone(tmp_path):
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        fixed = checkpoint.Keys("name", *(bytes([i]) * 32 for i in range(3)))
        patch.setattr(checkpoint.Keys, "new", classmethod(lambda cls: fixed))
        whole = together(2, lambda r: numbers(fit(data=own(r, UNEVEN[2]), out=tmp_path / "whole")))
        together(2, lambda r: stopped(r, own(r, UNEVEN[2]), out))
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
        stopped(rank, own(rank, UNEVEN[2], kind), tmp_path / "run")

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
