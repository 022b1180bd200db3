"""Rows that cannot be used: refused, or contributing nothing, before anything is spent."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import dpbnn

N = 60


class Looking(nn.Module):
    """A network of the user's own that uses its inputs as indices."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        kind = nn.functional.one_hot(x[:, 0].long().clamp(min=0), 7)
        return self.out(torch.cat([kind.to(x), x[:, 1:2]], 1))


class Counts:
    """A likelihood of the user's own that refuses targets outside its support."""

    def log_prob(self, outputs, y):
        return torch.distributions.Poisson(outputs[:, 0].exp(), validate_args=True).log_prob(y)


def embedded():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3))


def indices():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 7, (N, 3), generator=generator)
    return x, torch.randint(0, 3, (N,), generator=generator)


def looked_up():
    x, y = indices()
    return torch.stack([x[:, 0].float(), x[:, 1] / 7.0], 1), y


def counted():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 2, generator=generator), torch.randint(0, 5, (N,), generator=generator)


def altered(data, row, x=None, y=None):
    inputs, targets = (part.clone() for part in data)
    if x is not None:
        inputs[row] = x
    if y is not None:
        targets[row] = y
    return inputs, targets


def fit(model, data, likelihood="categorical", method=None, plan=None, **options):
    method = method or dpbnn.SGD(learning_rate=0.5)
    plan = plan or dpbnn.plan(noise_multiplier=2.0, delta=1e-4, n=N, batch_size=20, steps=6)
    return dpbnn.fit(model, data, likelihood, None, method, plan, **options)


CASES = {
    "an index that an Embedding does not hold": (embedded, indices, "categorical", {"x": 7}),
    "a negative index": (embedded, indices, "categorical", {"x": -1}),
    "an index in code of the user's": (Looking, looked_up, "categorical", {"x": 9.0}),
    "a label, with whole numbers as inputs": (embedded, indices, "categorical", {"y": 3}),
    "a target that a likelihood refuses": (lambda: nn.Linear(2, 1), counted, Counts(), {"y": -1}),
    "a number that is not finite": (lambda: nn.Linear(2, 1), counted, Counts(), {"x": math.nan}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_bad_row_is_refused_before_anything_is_spent(name):
    model, data, likelihood, change = CASES[name]
    ledger = dpbnn.Ledger()
    bad = altered(altered(data(), 11, **change), 42, **change)
    with pytest.raises(ValueError, match=r"2 rows cannot be used, the first ones \[11, 42\]") as e:
        fit(model(), bad, likelihood, ledger=ledger, on_bad_rows="show")
    assert "\n" not in str(e.value)
    assert "on_bad_rows='zero'" in str(e.value)
    with pytest.raises(ValueError, match="2 rows cannot be used: ") as e:
        fit(model(), bad, likelihood, ledger=ledger)
    assert "\n" not in str(e.value)
    assert not {"11", "42"} & set(str(e.value).replace("]", " ").split())
    assert ledger.releases == 0
    fit(model(), data(), likelihood, ledger=ledger)
    assert ledger.releases == 6


@pytest.mark.parametrize("name", list(CASES))
def test_a_bad_row_contributes_nothing(name):
    """The run equals one in which that record's contribution is zeroed, bit by bit."""
    model, data, likelihood, change = CASES[name]
    torch.manual_seed(0)
    network = model()
    plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=3)

    def weights(rows, **options):
        found = fit(network, rows, likelihood, plan=plan, debug_seed=0, **options)
        return torch.cat([p.flatten() for p in found.model.parameters()])

    bad = weights(altered(data(), 11, **change), on_bad_rows="zero")
    assert bad.isfinite().all()
    same = weights(altered(data(), 11, x=0, y=1), on_bad_rows="zero")
    assert not torch.equal(bad, same), "the row is not in the data of the other run"

    def without(self, contributions, original=dpbnn.Gate.__call__, *, keep, **options):
        return original(self, contributions, keep=keep & (torch.arange(N) != 11), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpbnn.Gate, "__call__", without)
        assert torch.equal(bad, weights(data(), on_bad_rows="zero"))


@pytest.mark.parametrize("method", [dpbnn.SGLD(learning_rate=1e-4), dpbnn.BBP(), dpbnn.VI()])
def test_every_row_may_be_bad(method):
    """An error would tell a run without usable rows from one with a single row."""
    x, y = indices()
    posterior = fit(embedded(), (x + 7, y), method=method, on_bad_rows="zero")
    assert posterior.privacy.private


@pytest.mark.parametrize("name", ["ep", "adf"])
def test_methods_that_visit_raw_records_leave_bad_ones_out(name):
    x = torch.linspace(-1, 1, N)[:, None]
    y = x[:, 0].clone()
    y[5] = math.inf
    method = {"ep": dpbnn.EP(), "adf": dpbnn.ADF()}[name]
    plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=2)
    posterior = fit(
        dpbnn.mlp(1, (4,), 1), (x, y), dpbnn.likelihoods.Gaussian(0.3), method, plan,
        on_bad_rows="zero",
    )  # fmt: skip
    assert posterior.predict(x).mean.isfinite().all()


class Whole:
    def log_prob(self, outputs, y):
        assert y.dtype == torch.int64
        return outputs.log_softmax(1).gather(1, y[:, None])[:, 0]


def test_whole_numbers_stay_whole_for_a_likelihood_of_the_users():
    fit(nn.Linear(2, 5), counted(), Whole())


def test_the_usual_layers_need_no_pass_over_the_data(monkeypatch):
    seen = []

    def forward(self, x, original=nn.Linear.forward):
        seen.append(len(x))
        return original(self, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    data = counted()
    plan = dpbnn.plan(noise_multiplier=2.0, delta=1e-4, n=N, batch_size=1, steps=1)
    fit(dpbnn.mlp(2, (4,), 5), data, plan=plan)
    assert N not in seen
    fit(nn.Sequential(nn.Linear(2, 5), Custom()), data, plan=plan)
    assert N in seen


class Custom(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


def test_the_pass_over_the_data_leaves_no_trace():
    """Neither in the random numbers of the run nor in the network's mode."""
    from dpbnn.rows import checked_rows

    network = nn.Sequential(dpbnn.networks.GaussianLinear(2, 5), Custom(), nn.Dropout(0.5))
    network[1].eval()
    state = torch.get_rng_state()
    checked_rows(
        counted(), network, dpbnn.likelihoods.Categorical(), N, torch.device("cpu"), "error"
    )
    assert torch.equal(state, torch.get_rng_state())
    assert network.training
    assert not network[1].training


WRONG = [
    ({"prior": "gaussian"}, r"prior='gaussian': must be a prior, such as dpbnn\.Gaussian"),
    ({"prior": 1.0}, r"prior=1\.0: must be a prior"),
    ({"method": "sgd"}, "method='sgd': must be a method's settings"),
    ({"plan": {"epsilon": 1}}, r"plan=.*: must be what dpbnn\.plan"),
    ({"likelihood": 3}, "likelihood=3: must be a name"),
    ({"model": "mlp"}, "model='mlp': must be a network"),
    ({"tuning_runs": -1}, "tuning_runs=-1: must be a whole number >= 0"),
    ({"tuning_runs": "a"}, "tuning_runs='a': is of type str"),
    ({"tuning_runs": 1.5}, "tuning_runs=1.5: must be a whole number"),
    ({"checkpoint_every": 0}, "checkpoint_every=0"),
    ({"microbatch_size": -3}, "microbatch_size=-3"),
    ({"device": "tpu"}, "device='tpu': cannot be used here"),
    ({"data": torch.zeros(N, 2)}, "data: is Tensor; give a pair"),
    ({"data": (np.array(["a"] * N), torch.zeros(N))}, "the inputs are not numbers"),
    ({"data": (torch.zeros(N), torch.zeros(N))}, "one row per example"),
    ({"data": (torch.zeros(N, 2).long(), torch.zeros(N))}, r"type torch\.int64"),
    ({"model": nn.Sequential(nn.Linear(2, 3), nn.Flatten(0))}, "one row per example"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_an_argument_of_another_kind_is_refused_in_a_line(change, message):
    arguments = {
        "model": nn.Linear(2, 5), "data": counted(), "likelihood": "categorical", "prior": None,
        "method": dpbnn.SGD(),
        "plan": dpbnn.plan(noise_multiplier=2.0, delta=1e-4, n=N, batch_size=20, steps=6),
        "ledger": dpbnn.Ledger(), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message) as caught:
        dpbnn.fit(**arguments)
    assert "\n" not in str(caught.value)
    assert arguments["ledger"].releases == 0


def test_a_gpu_that_is_not_there_is_refused_in_a_line():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=r"device='cuda': cannot be used.*device='cpu'") as caught:
        fit(nn.Linear(2, 5), counted(), device="cuda")
    assert "\n" not in str(caught.value)
