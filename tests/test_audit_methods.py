"""Neighbour replay of whole methods: ours pass, methods that go around the gate do not."""

import dataclasses

import pytest
import torch

import dpbnn
from dpbnn.audit import PrivacyBug
from dpbnn.contributions import DenseContributions
from dpbnn.methods.method import Method, Process
from dpbnn.posteriors import PointPosterior

N = 30


def classes():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=generator)
    x[7] = torch.tensor([20.0, -3.0])
    return x, torch.arange(N) % 3


def numbers():
    x, _ = classes()
    return x, x.sum(1)


def network(outputs=3, dropout=0.0):
    return lambda: dpbnn.mlp(2, (4,), outputs, dropout)


METHODS = {
    "sgd": (dpbnn.SGD(clip=0.5, optimizer="adam", average="polyak"), {}),
    "sgd, steps of the inputs": (
        dpbnn.SGD(clip=0.5, optimizer="adam", keep=3),
        {"model": lambda: dpbnn.mlp(2, (4,), 3, linear_path=True, steps=1.0)},
    ),
    "sgd, bands": (
        dpbnn.SGD(
            clip=0.5, keep=3, inputs=lambda count: torch.linspace(-1, 1, 2 * count).view(count, 2)
        ),
        {},
    ),
    "sgld": (dpbnn.SGLD(learning_rate=1e-3, keep=3), {}),
    "sghmc": (dpbnn.SGHMC(learning_rate=1e-3, keep=3), {}),
    "bbp": (dpbnn.BBP(), {}),
    "bbp, algorithm 3": (dpbnn.BBP.paper(draws=2), {}),
    "vi": (dpbnn.VI(), {}),
    "mcdropout": (dpbnn.MCDropout(), {"model": network(dropout=0.3)}),
    "noiseaware": (dpbnn.NoiseAware(points=50, chains=2, iterations=12, keep=8), {}),
    "sep": (dpbnn.SEP(), {"model": network(1), "likelihood": "gaussian"}),
    "sep, learned noise": (
        dpbnn.SEP(),
        {"model": network(1), "likelihood": dpbnn.likelihoods.Gaussian(None)},
    ),
}


@pytest.mark.parametrize("name", list(METHODS))
def test_our_methods_pass_as_settings(name):
    method, options = METHODS[name]
    data = numbers() if "likelihood" in options else classes()
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=N, batch_size=20, steps=5)
    result = dpbnn.replay(method, data, 7, **{"model": network(), "plan": plan, **options}).check()
    assert len(result.distances) == 5
    assert 0 < result.worst <= 1 + 1e-5


def test_a_mixture_passes_and_by_default_every_record_is_in_every_release():
    points, _, _ = dpbnn.mixtures.synthetic_mixture(N, 2, 2)
    model = dpbnn.GaussianMixture(2, 2, centres=torch.eye(2))
    result = dpbnn.replay(dpbnn.EM(clip=1.0), points, 3, model=model).check()
    assert len(result.distances) == 4
    assert min(result.distances) > 0


def test_whole_numbers_as_inputs_pass():
    x, y = torch.arange(N)[:, None] % 7, torch.arange(N) % 3
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Linear(4, 3))
    assert min(dpbnn.replay(dpbnn.SGD(), (x, y), 5, model=model).check().distances) > 0


def test_a_neighbour_can_be_a_dataset():
    x, y = classes()
    other = x.clone()
    other[4] = -100.0
    plan = dpbnn.plan(
        noise_multiplier=4.0, delta=1e-5, n=N, batch_size=10, steps=6, sampling="partition",
        relation="replace-one",
    )  # fmt: skip
    options = {"model": network(), "plan": plan}
    result = dpbnn.replay(dpbnn.SGD(), (x, y), (other, y), **options).check()
    assert sum(d > 0 for d in result.distances) == 2
    assert result.sensitivities[0] == 2.0


@dataclasses.dataclass(frozen=True)
class Leaking(Method):
    """A user's own method that goes around the gate in one of several ways, or does not."""

    way: str
    name = "leaking"

    def settled(self, plan):
        return plan, 1.0

    def start(self, problem):
        return LeakingProcess(self.way, problem)


class LeakingProcess(Process):
    def __init__(self, way, problem):
        super().__init__(problem, problem.attach())
        self.way, self.seen = way, 0.0

    def contribute(self, state, x, y):
        found = super().contribute(state, x, y)
        if self.way == "keeps the batch":
            self.seen = float(x.sum())
        if self.way == "examples in each other's contributions" and len(x):
            return DenseContributions({"weight": x + x.amax(0) - x.amin(0)})
        if self.way == "looks" and len(x) and bool((x[7] == 0).all()):
            _peek()
        if self.way == "norms that are too small" and len(x):
            return Shrunk({"weight": x})
        return found

    def update(self, state, release):
        with torch.no_grad():
            for name, parameter in state.parameters.items():
                parameter -= 0.01 * release.get(name, torch.zeros(())) + 1e-3 * self.seen
        return state

    def posterior(self, state, **record):
        return PointPosterior(self.model, self.problem.likelihood, **record)


def _peek():
    pass


class Shrunk(DenseContributions):
    def norms(self):
        return super().norms() / 1000


def test_a_users_method_passes_where_it_keeps_to_the_gate():
    assert dpbnn.replay(Leaking("not"), classes(), 7, model=network()).check().passed


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("keeps the batch", r"result\['model'\].* differs"),
        ("examples in each other's contributions", "times its sensitivity"),
        ("looks", "sequence of function calls"),
        ("norms that are too small", "times its sensitivity"),
    ],
)
def test_a_method_that_goes_around_the_gate_is_found_out(way, message):
    with pytest.raises(PrivacyBug, match=message):
        dpbnn.replay(Leaking(way), classes(), 7, model=network()).check()


@dataclasses.dataclass(frozen=True)
class Counting(Leaking):
    """A user's own method that has a second gate, as adaptive clipping has."""

    name = "counting"

    def start(self, problem):
        return CountingProcess(self.way, problem)


class CountingProcess(LeakingProcess):
    def contribute(self, state, x, y):
        if len(x):
            wrong = self.way == "looks at another record"
            values = torch.ones(len(x), 1) * (100.0 * (x[7] == 0).all() if wrong else 1.0)
            gate = dpbnn.Gate(1.0, 2.0)
            self.count = gate(DenseContributions(values), records=torch.arange(len(x)))["value"]
        return super().contribute(state, x, y)


def test_the_gates_that_a_method_makes_are_replayed_too():
    result = dpbnn.replay(Counting("none"), classes(), 7, model=network()).check()
    assert len(result.distances) == 8
    wrong = Counting("looks at another record")
    with pytest.raises(PrivacyBug, match="times its sensitivity"):
        dpbnn.replay(wrong, classes(), 7, model=network()).check()


def test_a_function_is_replayed_as_before():
    def mean(values):
        gate = dpbnn.Gate(clip=1.0, noise_multiplier=2.0)
        found = gate(DenseContributions(values), records=torch.arange(len(values)))
        return found["value"] / len(values)

    assert dpbnn.replay(mean, torch.ones(5, 3), 2).check().passed


def test_what_cannot_be_replayed_is_refused_in_a_line():
    for what, options, message in (
        (dpbnn.SGD(), {}, "model: missing"),
        (3, {}, "must be a function of a dataset, or a method's settings"),
        (dpbnn.EP(), {"model": network(1), "likelihood": "gaussian"}, "is not private"),
        (dpbnn.SGD(), {"model": network(), "neighbour": N}, "records 0 to 29"),
    ):
        arguments = {"neighbour": 7, **options}
        with pytest.raises(ValueError, match=message) as caught:
            dpbnn.replay(what, classes(), **arguments)
        assert "\n" not in str(caught.value)
