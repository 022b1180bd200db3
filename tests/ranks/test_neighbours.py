"""Neighbour replay over two ranks: every method, relation, sampling and kind of data together."""

import dataclasses
import itertools

import broken_versions as broken
import pytest
import torch
from sharded_runs import fit as fit_sharded
from small_runs import METHODS, N, Pairs, dataset, network, plan
from together import together
from twins import fails_on, twins_of

import dpbnn
from dpbnn.privacy.events import UnsupportedEvent

pytestmark = pytest.mark.long

RECORD = 20  # of rank 1, where ranks own rows
COUNTS = (17, 31)
RELATIONS = ("zero-out", "replace-one", "add-remove")
SAMPLINGS = ("poisson", "fixed-size", "partition", "full-batch")


def plans():
    """Return all plans that there are, by relation and sampling; some sampling has no analysis."""
    found = {}
    for relation, sampling in itertools.product(RELATIONS, SAMPLINGS):
        size = None if sampling == "full-batch" else 24
        try:
            chosen = plan(relation=relation, sampling=sampling, batch_size=size, steps=3)
        except UnsupportedEvent:
            continue
        found[relation, sampling] = chosen
    return found


def neighbours(relation):
    """Return the data, and a neighbour: without the record, with another, or one row shorter."""
    x, y = dataset()
    other = x.clone()
    if relation == "zero-out":
        return (x, y), None
    if relation == "replace-one":
        other[RECORD] += 10.0
        return (x, y), (other, y)
    return (x, y), (x[:-1], y[:-1])


def given(kind, rank, data):
    """Return data as a rank gets it: all rows, rows that are read batch by batch, its own rows."""
    if kind == "whole":
        return data
    if kind == "streamed":
        return Pairs(*data)
    counts = (COUNTS[0], len(data[1]) - COUNTS[0])
    own = tuple(torch.split(part, counts)[rank] for part in data)
    return dpbnn.DataSource(own, owned=True)


def replayed(rank, kind, name, relation, chosen):
    data, other = (part and given(kind, rank, part) for part in neighbours(relation))
    neighbour = RECORD if other is None else other
    return dpbnn.replay(
        METHODS[name], data, neighbour, model=network(name)(), plan=chosen, trace=False
    )


def check(found, cases):
    """Compare releases; all cases show the record, but for some whose masks leave nothing of it."""
    shown = {}
    for case, first, second in zip(cases, *found, strict=True):
        assert first.passed, (case, first)
        assert first.differences == second.differences == (), (case, second)
        assert len(first.distances) == 3, case
        shown.setdefault(case[0], []).append(max(first.distances))
    dropout = shown.pop("mcdropout", [1.0])
    assert max(dropout) > 0.05
    assert all(min(distances) > 0.05 for distances in shown.values()), shown


@fails_on(58, broken.shares_overlap, kind="whole", names=("sgd",))
@pytest.mark.parametrize("names", [tuple(METHODS)], ids=["all"])
@pytest.mark.parametrize("kind", ["whole", "streamed", "owned"])
def test_item_58_neighbours_of_all_plans_over_two_ranks(kind, names):
    cases = [(name, *key, chosen) for name in names for key, chosen in plans().items()]

    def work(rank):
        return [replayed(rank, kind, name, relation, chosen) for name, relation, _, chosen in cases]

    found = together(2, work)
    assert all(isinstance(left, list) for left in found), found
    assert len({key[1:3] for key in cases}) == 8
    check(found, cases)


@fails_on(65, broken.norms_are_of_the_own_rows, names=("sgd",))
@pytest.mark.parametrize("names", [("sgd", "sgld", "sghmc")], ids=["all"])
def test_item_65_neighbours_of_all_plans_over_two_sharded_ranks(tmp_path, names):
    public = {key: chosen for key, chosen in plans().items() if key[0] != "add-remove"}
    cases = list(itertools.product(names, public.items(), (("whole", None), ("streamed", 3))))

    def work(rank):
        left, folders = [], iter(tmp_path / f"{number}" for number in range(10**4))
        for name, ((relation, _), chosen), (kind, size) in cases:

            def run(data, name=name, chosen=chosen, size=size):
                method = METHODS[name]
                if name != "sgd":
                    folder = next(folders)
                    folder.mkdir(exist_ok=True)
                    method = dataclasses.replace(method, folder=str(folder))
                posterior = fit_sharded(data=data, plan=chosen, method=method, microbatch_size=size)
                parts = posterior._parts()
                if name != "sgd":
                    parts["iterates"] = parts["iterates"].read(range(3))
                return parts, posterior.privacy.to_dict()

            data, other = (part and given(kind, rank, part) for part in neighbours(relation))
            neighbour = RECORD if other is None else other
            left.append(dpbnn.replay(run, data, neighbour, trace=False))
        return left

    found = together(2, work)
    assert all(isinstance(left, list) for left in found), found
    check(found, cases)


def test_the_plans_are_of_all_records():
    assert all(chosen.n == N for chosen in plans().values())


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
