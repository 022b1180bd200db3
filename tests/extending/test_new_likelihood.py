"""A likelihood of one new file trains, predicts, refuses bad rows, and is saved and loaded."""

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from toy_likelihood import ToyCounts

import dpbnn
from dpbnn.likelihoods import Categorical, Gaussian, LikelihoodBase, full, likelihood
from dpbnn.predictive import RealPredictive

N = 200
METHODS = [dpbnn.SGD(learning_rate=0.5), dpbnn.SGLD(learning_rate=2e-3, keep=10)]


def counts():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 1, generator=generator) * 2 - 1
    return x, torch.poisson((1 + x[:, 0]).exp(), generator=generator)


def fit(data, method=METHODS[0], likelihood="toy-counts", plan=None, **options):
    plan = plan or dpbnn.plan(epsilon=8.0, delta=1e-4, n=N, sampling="full-batch", steps=60)
    torch.manual_seed(0)
    return dpbnn.fit(
        nn.Linear(1, 1), data, likelihood, None, method, plan, progress=False, **options
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_it_trains_and_predicts(method):
    x, y = counts()
    posterior = fit((x, y), method, debug_seed=0)
    found = posterior.predict(torch.tensor([[-1.0], [0.0], [1.0]]))
    assert isinstance(found, RealPredictive)
    assert (found.mean.diff() > 0).all()
    assert found.mean[1] == pytest.approx(math.e, rel=0.5)
    assert (found.variance >= found.mean * (1 - 1e-4)).all()
    assert found.log_prob(torch.tensor([0.0, 3.0, 7.0])).isfinite().all()


def test_it_is_saved_and_loaded_by_its_name(tmp_path):
    posterior = fit(counts(), METHODS[1], ToyCounts(most=5.0), debug_seed=0)
    posterior.save(tmp_path / "saved")
    loaded = dpbnn.load(tmp_path / "saved")
    assert loaded.likelihood == ToyCounts(most=5.0)
    x = torch.linspace(-1, 1, 5)[:, None]
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)


def test_a_program_that_does_not_import_it_is_told(tmp_path):
    fit(counts()).save(tmp_path / "saved")
    code = f"import dpbnn; dpbnn.load({str(tmp_path / 'saved')!r}, **{{}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "the likelihood 'ToyCounts' is not one of Categorical, Bernoulli" in found.stderr
    assert "load(folder, likelihood=instance)" in found.stderr
    here = Path(__file__).parent
    code = f"import sys; sys.path.append({str(here)!r}); import toy_likelihood; {code}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("bad", [-3.0, 2.25, math.nan, math.inf])
def test_what_is_no_count_is_refused_before_anything_is_spent(bad):
    x, y = counts()
    y[17] = y[99] = bad
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match="2 rows cannot be used: counts must be whole") as caught:
        fit((x, y), ledger=ledger)
    assert not any(text in str(caught.value) for text in (str(bad), "17", "99"))
    with pytest.raises(ValueError, match=r"\[17, 99\]"):
        fit((x, y), ledger=ledger, on_bad_rows="show")
    assert ledger.releases == 0


def test_a_count_too_large_for_the_network_is_a_bad_row():
    x, y = counts()
    y = y.double()
    y[17] = 1e300
    with pytest.raises(ValueError, match="1 row cannot be used: inputs and targets must be fin"):
        fit((x, y))
    assert fit((x, y), on_bad_rows="zero").privacy.private


@pytest.mark.parametrize("bad", [-3.0, 2.25, math.nan])
def test_what_is_no_count_can_contribute_nothing(bad):
    """The run is the one in which another bad count stands there, bit by bit, and not any other."""
    plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=5)

    def weights(value):
        x, y = counts()
        y[17] = value
        found = fit((x, y), plan=plan, debug_seed=0, on_bad_rows="zero")
        return torch.cat([p.flatten() for p in found.model.parameters()])

    assert torch.equal(weights(bad), weights(-math.inf))
    assert not torch.equal(weights(bad), weights(0.0))


def test_the_number_of_columns_is_its_own():
    x, y = counts()
    with pytest.raises(ValueError, match="the targets have 2 columns and the network predicts 1"):
        fit((x, torch.stack([y, y], 1)))


def test_methods_that_quote_the_targets_are_not_heard():
    """What `wrong` raises may hold private values."""

    @dataclass(frozen=True)
    class Chatty(ToyCounts):
        def wrong(self, y, outputs):
            raise ValueError(f"what is {y[17].item()}?")

    x, y = counts()
    y[17] = 40320.0
    with pytest.raises(ValueError, match="cannot tell which targets") as caught:
        fit((x, y), likelihood=Chatty())
    assert "40320" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_subclass_is_tried_on_every_row():
    """It may raise where its parent does not."""

    @dataclass(frozen=True)
    class Strict(ToyCounts):
        def log_prob(self, outputs, y):
            if (y > 1000).any():
                raise ValueError("too many")
            return super().log_prob(outputs, y)

    assert ToyCounts.never_raises
    assert not Strict.never_raises
    x, y = counts()
    y[17] = 5000.0
    with pytest.raises(ValueError, match="1 row cannot be used: the network or the likelihood"):
        fit((x, y), likelihood=Strict())
    assert fit((x, y), likelihood=Strict(), on_bad_rows="zero").privacy.private


def test_a_name_is_given_once():
    with pytest.raises(TypeError, match=r"is the name of toy_likelihood\.ToyCounts already"):
        type("ToyCounts", (LikelihoodBase,), {"log_prob": None})
    with pytest.raises(TypeError, match=r"gaussian: is the name of dpbnn\.likelihoods\."):

        class Other(LikelihoodBase, name="gaussian"):
            pass


def test_the_built_in_ones_use_the_same_protocol():
    for name in ("categorical", "gaussian", "heteroscedastic", "mixture", "toy-counts"):
        found = likelihood(name)
        assert isinstance(found, LikelihoodBase)
        assert full(found) is found
    outputs = torch.zeros(2, 3)
    y = torch.tensor([0.0, 2.0, 3.0, 0.5, math.nan, -1.0])
    assert Categorical().wrong(y, outputs).tolist() == [False, False, True, True, True, True]
    assert Gaussian().wrong(y, outputs).tolist() == [False] * 4 + [True, False]
    assert Gaussian(0.5).with_noise(2.0) == Gaussian(2.0)
    assert Categorical().with_noise(2.0) is None
