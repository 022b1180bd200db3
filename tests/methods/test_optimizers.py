"""Optimizers by name compute what those of torch compute."""

import subprocess
import sys

import pytest
import torch

import dpbnn
from dpbnn.methods.method import Problem
from dpbnn.methods.optimizers import RULES, SCHEDULES
from dpbnn.methods.state import flat
from dpbnn.priors import Gaussian

STEPS, RATE = 12, 0.05
OF_TORCH = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
CASES = [
    *((name, 0.0, schedule) for name in OF_TORCH for schedule in (None, *SCHEDULES)),
    ("sgd", 0.9, "cosine"), ("rmsprop", 0.5, "linear"),
]  # fmt: skip


def test_all_names_are_tested():
    assert OF_TORCH.keys() == RULES.keys()


def started(method):
    network = dpbnn.mlp(3, (4,), 2)
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
            parameter += number
    likelihood = dpbnn.likelihoods.likelihood("categorical")
    problem = Problem(network, likelihood, Gaussian(1.0), 50, 10.0, STEPS, True)
    return method.start(problem)


def releases():
    generator = torch.Generator().manual_seed(1)
    shapes = {name: p.shape for name, p in dpbnn.mlp(3, (4,), 2).named_parameters()}
    for _ in range(STEPS):
        yield {n: 5 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def trained(method, stop=None):
    """Return the state after all steps, from a checkpoint if the run stops."""
    process = started(method)
    state = process.begin()
    for step, release in enumerate(releases()):
        if step == stop:
            saved, process = flat(state), started(method)
            state = process.resumed(process.begin(), saved)
        state = process.update(state, release)
    return state


@pytest.mark.parametrize(("name", "momentum", "schedule"), CASES)
def test_steps_are_those_of_torch(name, momentum, schedule):
    """The same settings with a factory of the user's own go through torch.optim."""
    extra = {"momentum": momentum} if name in ("sgd", "rmsprop") else {}

    def factory(parameters, lr):
        return OF_TORCH[name](parameters, lr=lr, **extra)

    settings = {"learning_rate": RATE, "schedule": schedule}
    own = trained(dpbnn.SGD(optimizer=name, momentum=momentum, **settings))
    other = trained(dpbnn.SGD(optimizer=factory, **settings))
    assert isinstance(own.optimizer, dict)
    assert isinstance(other.optimizer, torch.optim.Optimizer)
    for key, value in other.parameters.items():
        torch.testing.assert_close(own.parameters[key], value, rtol=2e-5, atol=2e-6)
    held = other.optimizer.state_dict()["state"]
    kept = {f"{n}.{k}": t for n, part in held.items() for k, t in part.items() if k != "step"}
    kept = {name: tensor for name, tensor in kept.items() if tensor is not None}
    assert own.optimizer.keys() == kept.keys()
    for key, value in kept.items():
        torch.testing.assert_close(own.optimizer[key], value, rtol=2e-5, atol=2e-6)


def test_another_number_of_the_step_is_seen():
    """The comparison would fail for Adam without its correction for the first steps."""
    parameters = [torch.ones(3)], [torch.ones(3)]
    for moved, count in zip(parameters, (1, 2), strict=True):
        rule = RULES["adam"]
        given = [torch.tensor([1.0, 2.0, 3.0])]
        memory = rule.memory(moved, 0.0)
        rule(moved, given, memory, rate=RATE, momentum=0.0, count=count)
    assert not torch.allclose(*(moved[0] for moved in parameters), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "momentum", "schedule"), CASES)
def test_a_run_that_stops_goes_on_as_if_it_had_not(name, momentum, schedule):
    method = dpbnn.SGD(optimizer=name, momentum=momentum, schedule=schedule, learning_rate=RATE)
    whole, parts = trained(method), trained(method, stop=5)
    assert all(torch.equal(v, parts.parameters[k]) for k, v in whole.parameters.items())
    assert all(torch.equal(v, parts.optimizer[k]) for k, v in whole.optimizer.items())


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_checkpoint_of_an_optimizer_of_torch_is_read(name):
    """Runs of earlier versions have it: the names are the same, and a count of steps is beside."""
    extra = {"momentum": 0.9} if name in ("sgd", "rmsprop") else {}

    def factory(parameters, lr):
        return OF_TORCH[name](parameters, lr=lr, **extra)

    earlier = started(dpbnn.SGD(optimizer=factory, learning_rate=RATE))
    now = started(dpbnn.SGD(optimizer=name, learning_rate=RATE, **extra))
    wanted = earlier.begin()
    for step, release in enumerate(releases()):
        if step == 5:
            state = now.resumed(now.begin(), flat(wanted))
        wanted = earlier.update(wanted, release)
        if step >= 5:
            state = now.update(state, release)
    for key, value in wanted.parameters.items():
        torch.testing.assert_close(state.parameters[key], value, rtol=2e-5, atol=2e-6)


def test_a_schedule_of_the_users_own_takes_an_optimizer_by_name():
    def halves(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    state = trained(dpbnn.SGD(optimizer="adam", schedule=halves, learning_rate=RATE))
    assert isinstance(state.optimizer, torch.optim.Adam)
    assert state.schedule.get_last_lr() == [RATE * 0.5**STEPS]


def test_a_fit_by_default_does_not_import_the_compiler_of_torch():
    """It would take longer than the fit."""
    code = """
import sys, numpy, dpbnn
x = numpy.random.default_rng(0).normal(size=(60, 3))
dpbnn.PrivateBayesClassifier(bounds=(-4, 4), classes=[0, 1]).fit(x, (x[:, 0] > 0).astype(int))
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
