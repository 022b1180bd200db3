"""Norms of all records of a unit together: never below the truth, and hardly above it."""

import math

import pytest
import torch
from contributions_contract import flat, gaussian_truth, per_example
from torch import nn

import dpbnn
from dpbnn.contributions import Contributions, DenseContributions, UnsupportedModel, attach, sites
from dpbnn.contributions.outer import Outer
from dpbnn.privacy import units
from dpbnn.privacy.units import Groups, unit_norms

SIZES = (1, 3, 1, 2, 7, 4, 1, 5)
ROWS = sum(SIZES)
UNITS = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))


class Own(nn.Module):
    """A layer that has no rule, so that its gradients are replayed row by row."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))

    def forward(self, x):
        return torch.tanh(x * self.scale.exp()) + self.shift


class Tied(nn.Module):
    """Tokens whose embedding is used again to predict."""

    def __init__(self, tokens=9, width=4):
        super().__init__()
        self.tokens, self.last = nn.Embedding(tokens, width), nn.Linear(width, tokens, bias=False)
        self.last.weight = self.tokens.weight

    def forward(self, x):
        return self.last(self.tokens(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.inner(x)[0][:, -1])


class TwoInputs(nn.Module):
    """Two weights whose outputs are added, so that they share the gradient at it."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.left(x) + self.right(x.square()))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def sequence():
    block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(3, 6), block, Mean(), nn.Linear(6, 3))


MODELS = {
    "perceptron": (lambda: dpbnn.mlp(5, (40, 7), 3), (5,)),
    "normed": (lambda: nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)), (5,)),
    "own layer": (lambda: nn.Sequential(nn.Linear(5, 6), Own(6), nn.Linear(6, 3)), (5,)),
    "used twice": (lambda: (lambda a: nn.Sequential(a, nn.Tanh(), a, nn.Linear(5, 3)))(
        nn.Linear(5, 5)), (5,)),
    "two inputs": (TwoInputs, (5,)),
    "images": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, 3)), (2, 6, 6)),
    "transformer": (sequence, (4, 3)),
    "recurrent": (Recurrent, (4, 3)),
    "tokens": (lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten(),
        nn.Linear(12, 3)), (3,)),
}  # fmt: skip


def data(shape, tokens=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, *shape, generator=generator)
    if tokens:
        x = torch.randint(0, 9, (ROWS, *shape), generator=generator)
    return x, torch.randint(0, 3, (ROWS,), generator=generator)


def true_norms(truth, used=None):
    values = flat(truth, list(truth))
    values = values if used is None else values * used[:, None]
    total = torch.zeros(len(SIZES), values.shape[1], dtype=torch.float64)
    return total.index_add_(0, UNITS, values).norm(dim=1)


def found_norms(c, used=None, names=None):
    """Norms of the sums alone, without that of the largest row; of one row it is that row's."""
    groups, names = Groups.of_rows(UNITS, used), list(c.shapes) if names is None else names
    found = c.unit_squares(groups, names).sqrt()
    return torch.where(groups.sizes > 1, found, unit_norms(c, groups, names))


def assert_tight(found, truth, above=2e-3):
    assert (found >= truth * (1 - 1e-6)).all()
    assert (found <= truth * (1 + above) + 1e-6).all()


@pytest.mark.parametrize("form", [None, "gram", "instantiated"])
@pytest.mark.parametrize("name", list(MODELS))
def test_norms_of_units_are_those_of_summed_gradients(name, form, monkeypatch):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    x, y = data(shape, name == "tokens")
    monkeypatch.setattr(Outer, "form", form)
    monkeypatch.setattr(sites, "CHUNK", 200)  # a few rows at a time: units are cut
    c = attach(model, "categorical")(x, y)
    truth = per_example(model, "categorical", x, y)
    assert_tight(found_norms(c), true_norms(truth))
    used = torch.arange(ROWS) % 3 != 1
    assert_tight(found_norms(c, used), true_norms(truth, used))


@pytest.mark.parametrize(("reach", "step"), [(1, 1), (2, 1), (4, 2), (4, 8), (8, 2), (8, 5)])
@pytest.mark.parametrize("name", ["perceptron", "normed", "own layer"])
def test_units_that_reach_beyond_a_window(name, reach, step, monkeypatch):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    x, y = data(shape)
    monkeypatch.setattr(units, "REACH", reach)
    monkeypatch.setattr(units, "STEP", step)
    c = attach(model, "categorical")(x, y)
    truth = per_example(model, "categorical", x, y)
    assert_tight(found_norms(c), true_norms(truth))
    used = torch.arange(ROWS) % 3 != 1
    assert_tight(found_norms(c, used), true_norms(truth, used))


MIXED = (1, 2, 40, 5, 8, 9, 1, 16, 3, 20, 32, 33, 1)  # in a window, and beyond one


def mixed(name, bad=None):
    """Contributions of units of all sizes, their true gradients, the unit and use of each row."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, rows = make(), sum(MIXED)
    x, y = torch.randn(rows, *shape), torch.randint(0, 3, (rows,))
    whose = torch.arange(len(MIXED)).repeat_interleave(torch.tensor(MIXED))
    truth = per_example(model, "categorical", x, y)
    used = torch.arange(rows) % 5 != 2
    if bad is not None:
        x[~used] = bad
    return attach(model, "categorical")(x, y), truth, whose, used


def mixed_truth(truth, names, whose, used):
    """|sum_i c_i|, or the largest |c_i| if that is more, by brute force."""
    values = flat(truth, names).double() * used[:, None]
    total = torch.zeros(len(MIXED), values.shape[1], dtype=torch.float64)
    largest = torch.zeros(len(MIXED), dtype=torch.float64)
    largest.scatter_reduce_(0, whose, values.norm(dim=1), "amax")
    return torch.maximum(total.index_add_(0, whose, values).norm(dim=1), largest)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ["perceptron", "normed", "two inputs", "own layer", "images",
    "transformer"])  # fmt: skip
def test_units_of_all_sizes_in_one_batch(name, bad):
    c, truth, whose, used = mixed(name, bad)
    keep, names = None if bad is not None else used, list(c.shapes)
    found = unit_norms(c, Groups.of_rows(whose, keep), names)
    assert_tight(found, mixed_truth(truth, names, whose, used))
    if bad is None:
        found = unit_norms(c, Groups.of_rows(whose), names)
        assert_tight(found, mixed_truth(truth, names, whose, torch.ones_like(used)))


@pytest.mark.parametrize("chosen", ["weight", "bias", "0.", "last"])
@pytest.mark.parametrize("name", ["perceptron", "normed", "two inputs", "images"])
def test_norms_over_some_names(name, chosen):
    c, truth, whose, used = mixed(name)
    names = [n for n in c.shapes if chosen in n]
    if names:
        found = unit_norms(c, Groups.of_rows(whose, used), names)
        assert_tight(found, mixed_truth(truth, names, whose, used))


@pytest.mark.parametrize("name", ["perceptron", "normed", "images"])
def test_other_units_change_nothing_about_a_unit(name):
    """The way to a unit's norm depends on its own rows: without others it is the same."""
    c, _, whose, _ = mixed(name)
    groups, names = Groups.of_rows(whose), list(c.shapes)
    found = unit_norms(c, groups, names)
    for unit in range(len(MIXED)):
        others_gone = unit_norms(c, Groups.of_rows(whose, whose == unit), names)
        assert others_gone[unit] == found[unit]
        assert (others_gone > 1e-15).sum() == 1


@pytest.mark.parametrize("relation", ["zero-out", "add/remove"])
@pytest.mark.parametrize("name", ["perceptron", "normed", "two inputs", "images"])
def test_dropping_a_unit_moves_the_sum_by_its_clip_at_most(name, relation):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, rows = make(), sum(MIXED)
    x, y = torch.randn(rows, *shape), torch.randint(0, 3, (rows,))
    whose = torch.arange(len(MIXED)).repeat_interleave(torch.tensor(MIXED))
    attached = attach(model, "categorical")

    def summed(keep):
        ledger, sampler = dpbnn.Ledger(relation=relation), dpbnn.Poisson(100, 10, unit="person")
        gate = dpbnn.Gate(0.3, 0.0, sampler, ledger)
        if relation == "zero-out":
            release = gate(attached(x, y), units=whose, keep=keep)
        else:
            release = gate(attached(x[keep], y[keep]), units=whose[keep])
        return torch.cat([value.flatten().double() for value in release.values()])

    whole = summed(torch.ones(rows, dtype=torch.bool))
    moved = [(whole - summed(whose != unit)).norm() for unit in range(len(MIXED))]
    assert max(moved) <= 0.3 * (1 + 1e-5)
    assert max(moved) >= 0.299


@pytest.mark.parametrize("size", [2, 7, 20])
@pytest.mark.parametrize("scale", [1e-19, 1e-21, 1e-23])
def test_inner_products_that_underflow_are_never_rounded_down(size, scale):
    """Inputs whose products float32 does not hold, with gradients that make up for it."""
    torch.manual_seed(0)
    model, x = nn.Linear(30, 3, bias=False), torch.randn(size, 30).abs() * scale

    def log_prob(outputs, y):
        return (outputs * y).sum(1)

    y = torch.rand(size, 3) * 1e18
    c = attach(model, log_prob)(x, y)
    truth = (y.double().T @ x.double()).norm()
    found = c.unit_squares(Groups.of_rows(torch.zeros(size, dtype=torch.int64)), ["weight"])
    assert found.sqrt() >= truth * (1 - 1e-6)


def test_products_beyond_float32_reach_no_other_unit():
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(12, 4), torch.randn(12, 3)

    def norms():
        c = attach(model, lambda outputs, y: (outputs * y).sum(1))(x, y)
        whose = torch.arange(4).repeat_interleave(3)
        return unit_norms(c, Groups.of_rows(whose), list(c.shapes))

    before = norms()
    x[4], y[4] = 5e18, 5e18  # finite norms, whose products with those of neighbours are not
    after = norms()
    assert not after[1] < 1e37
    assert (after == before).tolist() == [True, False, True, True]


@pytest.mark.parametrize("width", [2, 300])
def test_cross_terms_that_cancel_out_are_never_rounded_down(width):
    """Two records with opposite gradients, but for a little: the cross terms cancel in float32."""
    torch.manual_seed(0)
    model = nn.Linear(width, 3)

    def log_prob(outputs, y):
        return (outputs * y).sum(1)

    for rest in (1e-2, 1e-3, 1e-4, 1e-6, 0.0):
        x, y = torch.randn(1, width).repeat(8, 1), torch.randn(1, 3).repeat(8, 1)
        y[1::2] *= -(1 + rest)
        c, truth = attach(model, log_prob)(x, y), per_example(model, log_prob, x, y)
        exact = flat(truth, list(truth)).double().unflatten(0, (4, 2)).sum(1).norm(dim=1)
        groups = Groups.of_rows(torch.arange(4).repeat_interleave(2))
        assert (c.unit_squares(groups, list(c.shapes)).sqrt() >= exact * (1 - 1e-6)).all()


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_batches_of_one_unit_and_of_none(size):
    torch.manual_seed(0)
    model = dpbnn.mlp(5, (7,), 3)
    x, y = torch.randn(size, 5), torch.randint(0, 3, (size,))
    c = attach(model, "categorical")(x, y)
    truth = per_example(model, "categorical", x, y)
    groups = Groups.of_rows(torch.zeros(size, dtype=torch.int64))
    found = unit_norms(c, groups, list(c.shapes))
    largest = flat(truth, list(truth)).norm(dim=1).max()
    assert_tight(found, torch.maximum(flat(truth, list(truth)).sum(0).norm(), largest)[None])
    empty = attach(model, "categorical")(x[:0], y[:0])
    assert unit_norms(empty, Groups.of_rows(y[:0]), list(empty.shapes)).shape == (0,)


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("space", ["weights", "parameters"])
def test_gaussian_layers(space, draws):
    torch.manual_seed(0)
    plain = dpbnn.mlp(5, (8,), 3)
    gaussian = dpbnn.to_gaussian(plain, rho=-1.0)
    x, y = data((5,))
    c = attach(gaussian, "categorical", space=space, draws=draws)(x, y)
    truth = gaussian_truth(plain, gaussian, "categorical", x, y, c.draws, space)
    assert_tight(found_norms(c), true_norms(truth))


def test_tied_weights():
    torch.manual_seed(0)
    model = Tied()
    x, y = data((3,), tokens=True)
    c = attach(model, "categorical")(x, y)
    assert_tight(found_norms(c), true_norms(per_example(model, "categorical", x, y)))


def test_dense_values():
    values = torch.randn(ROWS, 4, 3, generator=torch.Generator().manual_seed(0))
    c = DenseContributions(values)
    assert_tight(found_norms(c), true_norms({"value": values}))


@pytest.mark.parametrize("form", ["gram", "instantiated"])
@pytest.mark.parametrize("width", [2, 300])
def test_records_of_a_unit_that_cancel_out_are_never_rounded_down(form, width, monkeypatch):
    """Two records with opposite gradients, but for 1e-4: what is left is far below their norms."""
    torch.manual_seed(0)
    model = nn.Linear(width, 3, bias=False)
    monkeypatch.setattr(Outer, "form", form)
    x = torch.randn(1, width).repeat(ROWS, 1) * 50
    x[1::2] *= -(1 + 1e-4)
    y = torch.randn(ROWS, 3)

    def log_prob(outputs, y):
        return (outputs * y).sum(1)

    y[1::2] = y[0::2][: len(y[1::2])]
    c = attach(model, log_prob)(x, y)
    truth = per_example(model, log_prob, x, y)
    found, exact = found_norms(c), true_norms(truth)
    assert (found >= exact * (1 - 1e-6)).all()
    largest = flat(truth, list(truth)).norm(dim=1).max()
    assert (found <= exact * (1 + 1e-3) + 1e-4 * largest).all()


def test_a_unit_counts_at_least_as_much_as_its_largest_record():
    values = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.5, 0.0]])
    groups = Groups.of_rows(torch.tensor([4, 4, 9]))
    norms = unit_norms(DenseContributions(values), groups, ["value"])
    assert norms[0] >= 3
    assert norms == pytest.approx([3.0, 0.5], rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_records_that_are_not_finite_are_left_out_of_their_unit(bad):
    torch.manual_seed(0)
    model = dpbnn.mlp(5, (7,), 3)
    x, y = data((5,))
    truth = per_example(model, "categorical", x, y)
    used = torch.ones(ROWS, dtype=torch.bool)
    used[6] = used[0] = False  # one of several records, and a unit's only one
    x[~used] = bad
    c = attach(model, "categorical")(x, y)
    assert (c.norms()[~used] == 0).all()
    assert_tight(found_norms(c), true_norms(truth, used))


def test_padding_depends_on_a_units_own_number_of_records_alone():
    few = Groups.of_rows(UNITS)
    more = Groups.of_rows(torch.cat([UNITS, torch.full((100,), 99)]))
    widths = {}
    for groups in (few, more):
        for same in groups.padded:
            for unit in same.units.tolist():
                widths.setdefault(unit, set()).add(same.rows.shape[1])
    assert all(len(own) == 1 for own in widths.values())
    assert widths[len(SIZES)] == {128}
    assert sorted({same.rows.shape[1] for same in few.padded}) == [2, 4, 8]


@pytest.mark.parametrize("units", [[1, 0, 0], [0.0, 1.0, 2.0], [[0], [1]]])
def test_rows_of_a_unit_must_follow_on_one_another(units):
    with pytest.raises(ValueError, match="rising order"):
        Groups.of_rows(torch.tensor(units))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_chunks_never_cut_a_unit(size):
    torch.manual_seed(0)
    model = dpbnn.mlp(5, (7,), 3)
    x, y = data((5,))
    whole = attach(model, "categorical")(x, y)
    first, parts = 0, []
    for chunk in attach(model, "categorical", microbatch_size=size)(x, y).unit_chunks(UNITS):
        rows = slice(first, first + chunk.batch_size)
        first = rows.stop
        assert len(UNITS[rows].unique()) == 1 or chunk.batch_size <= size
        assert first == ROWS or UNITS[first] != UNITS[first - 1]
        parts.append(unit_norms(chunk, Groups.of_rows(UNITS[rows]), list(chunk.shapes)))
    assert first == ROWS
    expected = unit_norms(whole, Groups.of_rows(UNITS), list(whole.shapes))
    assert torch.cat(parts) == pytest.approx(expected, rel=1e-5)


def test_contributions_of_another_kind_are_refused():
    class Strange(DenseContributions):
        unit_squares = Contributions.unit_squares

    with pytest.raises(UnsupportedModel, match="Strange"):
        found_norms(Strange(torch.ones(ROWS, 2)))


def test_a_data_free_part_inside_the_clip_is_refused():
    model = dpbnn.mlp(5, (), 3)
    constants = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    c = attach(model, "categorical", data_free=constants)(*data((5,)))
    with pytest.raises(UnsupportedModel, match="once per record"):
        found_norms(c)
