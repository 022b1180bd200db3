"""Data that a network or a likelihood keeps, outside the gate; and parameters that are frozen."""

import collections
import copy
import dataclasses
import enum
import functools
import pickle
import weakref
from typing import ClassVar

import broken_versions as broken
import numpy as np
import pytest
import torch
from held_data import assert_holds_no_data
from safetensors import safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import fails_on, twins_of

import dpbnn
from dpbnn import likelihoods
from dpbnn.contributions import UnsupportedModel
from dpbnn.contributions.attach import public
from dpbnn.methods.bbp import BBPProcess
from dpbnn.methods.method import Method, Problem, Process
from dpbnn.methods.state import flat
from dpbnn.posteriors import PointPosterior
from dpbnn.privacy.module_state import ModuleState
from dpbnn.rows import checked_rows

N, FEATURES, CLASSES = 37, 4, 3
GLOBAL: list[torch.Tensor] = []


def dataset():
    x = 7 * torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(N) % CLASSES


def numbers():
    x, _ = dataset()
    return x, x.sum(1)


def planned(**options):
    given = {"noise_multiplier": 20.0, "delta": 1e-4, "n": N, "sampling": "full-batch", "steps": 4}
    return dpbnn.plan(**{**given, **options})


def fitted(model, data=None, likelihood="categorical", method=None, plan=None, **options):
    data = dataset() if data is None else data
    method, plan = method or dpbnn.SGD(), plan or planned()
    return dpbnn.fit(model, data, likelihood, None, method, plan, **options)


class Helper:
    shared: ClassVar[list[torch.Tensor]] = []

    def __init__(self):
        self.inner, self.level = {"cache": []}, float("0.5")


class Slotted:
    __slots__ = ("last",)


class Keeping(nn.Module):
    """A layer that does something with its input besides its work."""

    shared: ClassVar[list[torch.Tensor]] = []

    def __init__(self, keep, width=CLASSES):
        super().__init__()
        self.keep, self.linear = keep, nn.Linear(FEATURES, width)
        self.features, self.seen, self.table, self.kinds = None, [], {}, set()
        self.last, self.helper, self.slotted = collections.deque(maxlen=1), Helper(), Slotted()
        self.register_buffer("extremes", torch.zeros(FEATURES))
        self.array = np.zeros(FEATURES)

    def forward(self, x):
        self.keep(self, x.detach())
        return self.linear(x)


@pytest.fixture(autouse=True)
def _empty_classes():
    """Attacks that share a class with a later test leave nothing in it."""
    yield
    Keeping.shared.clear()
    Helper.shared.clear()


def largest(x):
    return x.abs().amax(0)


def keep_in_closure():
    seen = []
    return lambda module, x: seen.append(x)


def keep_in_default(module, x, seen=[]):  # noqa: B006
    seen.append(x)


def keep_on_function(module, x):
    keep_on_function.last = x


@functools.lru_cache
def keep_in_cache(module, x):
    return None


def keep_by_hook(module, x):
    module.linear.register_forward_hook(lambda *args: x)


def keep_in_parametrization(module, x):
    nn.utils.parametrize.register_parametrization(module.linear, "bias", nn.Identity())


KEEPS = {
    "attribute": (lambda m, x: setattr(m, "features", x), "'features'"),
    "new attribute": (lambda m, x: setattr(m, "new", x), "'new'"),
    "number": (lambda m, x: setattr(m, "features", float(x.max())), "'features'"),
    "another number": (lambda m, x: setattr(m.helper, "level", float(x.max())), "helper.level"),
    "list": (lambda m, x: m.seen.append(x), "'seen"),
    "dict": (lambda m, x: m.table.update(last=x), "table"),
    "key": (lambda m, x: m.table.update({str(float(x.sum())): None}), "table"),
    "set": (lambda m, x: m.kinds.add(x), "'kinds"),
    "deque": (lambda m, x: m.last.append(x), "'last"),
    "nested object": (lambda m, x: m.helper.inner["cache"].append(x), "helper.inner"),
    "slot": (lambda m, x: setattr(m.slotted, "last", x), "'slotted.last'"),
    "class": (lambda m, x: type(m).shared.append(x), "class Keeping .*'shared"),
    "class of a helper": (lambda m, x: m.helper.shared.append(x), "class Helper .*'shared"),
    "buffer": (lambda m, x: m.extremes.copy_(largest(x)), "buffer 'extremes'"),
    "new buffer": (lambda m, x: setattr(m, "extremes", largest(x)), "buffer 'extremes'"),
    "data": (lambda m, x: m.extremes.data.copy_(largest(x)), "buffer 'extremes'"),
    "other data": (lambda m, x: setattr(m.extremes, "data", largest(x)), "buffer 'extremes'"),
    "parameter": (lambda m, x: m.linear.bias.data.add_(x.mean()), "parameter 'bias'"),
    "on a parameter": (lambda m, x: setattr(m.linear.bias, "last", x), "'bias.last'"),
    "array": (lambda m, x: np.copyto(m.array, largest(x).numpy()), "'array'"),
    "closure": (keep_in_closure(), "keep.seen"),
    "default": (keep_in_default, "keep.__defaults__"),
    "function": (keep_on_function, "keep.last"),
    "cache": (keep_in_cache, "'keep'"),
    "hook": (keep_by_hook, "_forward_hooks"),
    "parametrization": (keep_in_parametrization, "'linear'"),
    "submodule": (lambda m, x: m.add_module(f"m{len(m._modules)}", nn.Identity()), "submodule 'm"),
    "flag": (lambda m, x: m.linear.eval(), "'training'"),
}
INSTANCE = ("attribute", "list", "dict", "set", "deque", "nested object", "slot", "new buffer")


# 33: a forward on private data outside the gate


@fails_on(33, broken.the_network_is_warmed_up_on_the_data)
def test_item_33_an_observer_is_refused_before_anything_is_spent():
    """It would return the exact extremes, which lie outside those of the probe's examples."""
    ledger = dpbnn.Ledger()
    model = nn.Sequential(torch.ao.quantization.MinMaxObserver(), nn.Linear(FEATURES, CLASSES))
    with pytest.raises(UnsupportedModel, match=r"'0' \(MinMaxObserver\).*buffer 'min_val'"):
        fitted(model, plan=planned(epsilon=0.1, noise_multiplier=None), ledger=ledger)
    assert ledger.releases == 0


@fails_on(33, broken.rows_are_checked_with_the_network_itself, name="buffer")
@pytest.mark.parametrize("name", [*INSTANCE, "buffer", "data", "array", "on a parameter"])
def test_item_33_the_pass_over_the_rows_leaves_nothing_in_the_network(name):
    network = nn.Sequential(Keeping(KEEPS[name][0]), dpbnn.networks.GaussianLinear(3, 3))
    network[1].generator = torch.Generator().manual_seed(3)
    state = ModuleState(network=network)
    checked_rows(dataset(), network, likelihoods.Categorical(), N, torch.device("cpu"), "error")
    assert state.differences(thorough=True) == []
    assert network[1].generator.get_state().equal(torch.Generator().manual_seed(3).get_state())


@fails_on(33, broken.checkpoints_hold_buffers)
def test_item_33_checkpoints_hold_trainable_parameters_alone(tmp_path):
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5).eval(), nn.Linear(5, CLASSES))
    model[0].requires_grad_(False)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    model[1].train = lambda mode=True: model[1]
    fitted(model, out=tmp_path / "run", checkpoint_every=2)
    with safe_open(tmp_path / "run" / "checkpoint.safetensors", "pt") as file:
        start = "state.parameters."
        names = {name for name in file.keys() if name.startswith(start)}  # noqa: SIM118
    assert names == {f"{start}{name}" for name in trainable}


@pytest.mark.parametrize("method", [dpbnn.SGD(), dpbnn.SGLD(learning_rate=1e-4)])
def test_item_33_checkpoints_restore_trainable_parameters_alone(method):
    model = Keeping(lambda module, x: None)
    model.linear.weight.requires_grad_(False)
    problem = Problem(model, likelihoods.Categorical(), dpbnn.Flat(), N, N, 4, True)
    process = method.start(problem)
    before = copy.deepcopy(model.state_dict())
    state = process.begin()
    saved = {name: value + 1 for name, value in flat(state).items()}
    others = {f"parameters.{n}": v + 1 for n, v in before.items() if n != "linear.bias"}
    process.resumed(state, {**others, **saved})
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved == {"linear.bias"}


# 34: a module, a likelihood or a method keeps what it sees


@fails_on(34, broken.changed_state_is_accepted, name="attribute")
@fails_on(34, broken.only_buffers_are_compared, name="list")
@fails_on(34, broken.the_version_counters_are_trusted, name="data")
@fails_on(34, broken.classes_are_not_looked_into, name="class")
@pytest.mark.parametrize("name", list(KEEPS))
def test_item_34_a_layer_that_keeps_something_is_refused_before_anything_is_spent(name):
    keep, place = KEEPS[name]
    ledger = dpbnn.Ledger()
    with pytest.raises(UnsupportedModel, match=place) as caught:
        fitted(nn.Sequential(nn.Tanh(), Keeping(keep)), ledger=ledger)
    assert "class " in str(caught.value) or "'1" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ledger.releases == 0
    with pytest.raises(UnsupportedModel, match=place):
        dpbnn.contributions(nn.Sequential(nn.Tanh(), Keeping(keep)), "categorical", *dataset())


class Scaling(nn.Module):
    """A layer with a parameter of its own, which is replayed example by example."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x):
        self.features = x.detach()
        return x * self.scale


@fails_on(34, broken.changed_state_is_accepted)
def test_item_34_a_layer_with_parameters_of_its_own_that_keeps_something_is_refused():
    with pytest.raises(UnsupportedModel, match=r"'0' \(Scaling\).*'features'"):
        fitted(nn.Sequential(Scaling(), nn.Linear(FEATURES, CLASSES)))


@fails_on(34, broken.what_was_held_may_vanish)
def test_item_34_a_number_that_gets_the_address_of_the_old_one_is_seen():
    model = nn.Linear(2, 2)
    model.level = float("0.5")
    state = ModuleState(model=model)
    for number in range(100):
        model.level = float(f"{number}.25")
        assert [change.attribute for change in state.differences()] == ["level"]


class Remembering:
    def log_prob(self, outputs, y):
        self.y = y
        return likelihoods.Gaussian(0.5).log_prob(outputs, y)

    def predictive(self, outputs):
        return dpbnn.posteriors.posterior.predictive_from(likelihoods.Gaussian(0.5), outputs)


@fails_on(34, broken.changed_state_is_accepted)
def test_item_34_a_likelihood_that_keeps_its_targets_is_refused():
    ledger, likelihood = dpbnn.Ledger(), Remembering()
    with pytest.raises(UnsupportedModel, match=r"'the likelihood' \(Remembering\).*attribute 'y'"):
        fitted(nn.Linear(FEATURES, 1), numbers(), likelihood, ledger=ledger)
    assert ledger.releases == 0
    assert not vars(likelihood)


@fails_on(34, broken.the_trained_likelihood_becomes_the_posteriors)
def test_item_34_the_likelihood_of_the_posterior_has_seen_no_target():
    """Even where nothing is refused."""
    with pytest.MonkeyPatch.context() as patch:
        broken.changed_state_is_accepted(patch)
        posterior = fitted(nn.Linear(FEATURES, 1), numbers(), Remembering())
    assert not vars(posterior.likelihood)
    assert_holds_no_data(posterior, *numbers())


def observe(module, args, output):
    GLOBAL.append(output.detach())


@fails_on(34, broken.hooks_are_accepted, register="register_forward_hook")
@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_item_34_a_hook_is_refused_before_anything_is_spent(register):
    ledger, model = dpbnn.Ledger(), nn.Sequential(nn.Linear(FEATURES, CLASSES))
    getattr(model[0], register)(observe if "pre" not in register else lambda m, args: None)
    with pytest.raises(UnsupportedModel, match=r"'0' \(Linear\) has a hook"):
        fitted(model, ledger=ledger)
    assert ledger.releases == 0


def keep_large(module, x):
    if x.abs().max() > 50:
        module.features = x


def keep_large_number(module, x):
    module.extremes.data.copy_(torch.maximum(module.extremes, largest(x) - 50))


@fails_on(34, broken.steps_are_not_watched, keep=keep_large)
@pytest.mark.parametrize("keep", [keep_large, keep_large_number])
def test_item_34_what_only_private_data_changes_is_refused_at_the_step(keep):
    x, y = dataset()
    x[5] = 100.0
    with pytest.raises(UnsupportedModel, match=r"'1' \(Keeping\).*'(features|extremes)'"):
        fitted(nn.Sequential(nn.Identity(), Keeping(keep)), (x, y))


@dataclasses.dataclass(frozen=True)
class Own(Method):
    """A user's method that puts something of the data into the posterior, or does not."""

    way: str
    name = "own"

    def settled(self, plan):
        return plan, 1.0

    def start(self, problem):
        return OwnProcess(self.way, problem)


class OwnProcess(Process):
    def __init__(self, way, problem):
        super().__init__(problem, problem.attach())
        self.way, self.batch = way, torch.zeros(2, FEATURES)

    def contribute(self, state, x, y):
        self.batch = x if len(x) else self.batch
        return super().contribute(state, x, y)

    def update(self, state, release):
        with torch.no_grad():
            for name, parameter in state.parameters.items():
                parameter -= 0.01 * release[name]
        return state

    def posterior(self, state, **record):
        model, likelihood = copy.deepcopy(self.model), self.problem.likelihood
        if self.way == "attribute":
            model[1].features = self.batch
        elif self.way == "buffer":
            model[0].running_mean.copy_(self.batch.mean(0))
        elif self.way == "frozen parameter":
            with torch.no_grad():
                model[0].weight.copy_(self.batch.mean(0))
        elif self.way == "layer":
            model[1] = Keeping(None).requires_grad_(False)
        elif self.way == "class":
            Keeping.shared.append(self.batch)
        elif self.way == "likelihood":
            likelihood = Remembering()
            likelihood.y = self.batch
        elif self.way == "rebuilt":
            model = self.problem.rebuilt(state.parameters)
        return PointPosterior(model, likelihood, **record)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.linear(x)


class Still(nn.BatchNorm1d):
    """Normalisation by public statistics, whatever the mode of the network."""

    def train(self, mode=True):
        return super().train(False)


def normalised(last):
    first = Still(FEATURES).requires_grad_(False)
    return nn.Sequential(first.eval(), last)


@fails_on(34, broken.posteriors_are_not_compared, way="attribute")
@pytest.mark.parametrize(
    "way", ["attribute", "buffer", "frozen parameter", "layer", "class", "likelihood"]
)
def test_item_34_a_users_method_cannot_put_another_state_into_the_posterior(way):
    last = Keeping(lambda module, x: None) if way == "class" else Plain()
    with pytest.raises(UnsupportedModel, match=r"of the posterior has another|class Keeping"):
        fitted(normalised(last), method=Own(way))


@pytest.mark.parametrize("way", ["not", "rebuilt"])
def test_item_34_a_users_method_that_keeps_to_the_gate_is_accepted(way):
    assert fitted(normalised(Plain()), method=Own(way)).privacy.private


@fails_on(34, broken.replay_compares_state_dicts)
def test_item_34_replay_names_the_module_and_the_attribute():
    def train(data):
        x, y = data
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, CLASSES), Keeping2())
        gate = dpbnn.Gate(clip=1.0, noise_multiplier=1.0)
        release = gate(dpbnn.contributions(model[0], "categorical", x, y))
        with torch.no_grad():
            model[0].weight -= release["weight"]
        model(x)
        return model

    x, y = dataset()
    other = x.clone()
    other[3] = 0
    found = dpbnn.replay(train, (x, y), (other, y)).differences
    assert any("result.1.features" in line for line in found), found


class Keeping2(nn.Module):
    def forward(self, x):
        self.features = x.detach()
        return x


# The object graph of every posterior


def keeping(dropout=0.0, outputs=CLASSES):
    def keep(module, x):
        for name in INSTANCE:
            KEEPS[name][0](module, x)

    layers = [
        nn.Identity(),
        Keeping(keep, 6),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(6, outputs),
    ]
    return nn.Sequential(*layers)


def plain(outputs=1):
    return dpbnn.mlp(FEATURES, (5,), outputs)


NOISE = likelihoods.Gaussian(0.5)
METHODS = {
    "sgd": (dpbnn.SGD(optimizer="adam", average="polyak"), keeping, "categorical"),
    "sgld": (dpbnn.SGLD(learning_rate=1e-4, keep=2, chains=2), keeping, "categorical"),
    "sghmc": (dpbnn.SGHMC(learning_rate=1e-4, keep=2), keeping, "categorical"),
    "bbp": (dpbnn.BBP(), keeping, "categorical"),
    "bbp, algorithm 3": (dpbnn.BBP.paper(draws=2), keeping, "categorical"),
    "vi": (dpbnn.VI(), keeping, "categorical"),
    "vi, integrated": (dpbnn.VI(), lambda: keeping(outputs=1), NOISE),
    "mcdropout": (dpbnn.MCDropout(), lambda: keeping(0.4), "categorical"),
    "mcdropout, shared": (dpbnn.MCDropout(shared_mask=True), lambda: keeping(0.4), "categorical"),
    "sep": (dpbnn.SEP(), plain, NOISE),
    "sep, learned noise": (dpbnn.SEP(), plain, likelihoods.Gaussian(None)),
    "ep": (dpbnn.EP(), plain, NOISE),
    "adf": (dpbnn.ADF(), plain, NOISE),
}


@fails_on(34, broken.the_trained_network_becomes_the_posterior, name="sgd")
@fails_on(34, broken.the_trained_network_becomes_the_posterior, name="sgld")
@fails_on(34, broken.the_trained_network_becomes_the_posterior, name="bbp")
@fails_on(34, broken.the_trained_network_becomes_the_posterior, name="mcdropout")
@pytest.mark.parametrize("name", list(METHODS))
def test_item_34_no_data_can_be_reached_from_a_posterior(name, tmp_path):
    """Even where nothing is refused: the trained network is full of data, the posterior is not."""
    method, make, likelihood = METHODS[name]
    data = dataset() if likelihood == "categorical" else numbers()
    plan = planned()
    if isinstance(method, dpbnn.EP | dpbnn.ADF):
        plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=2)
    with pytest.MonkeyPatch.context() as patch:
        broken.changed_state_is_accepted(patch)
        posterior = fitted(make(), data, likelihood, method, plan)
    assert_holds_no_data(posterior, *data)
    posterior.save(tmp_path / "run")
    for file in (tmp_path / "run").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            assert_holds_no_data([tensors.get_tensor(n) for n in tensors.keys()], *data)  # noqa: SIM118


def test_item_34_no_data_can_be_reached_from_a_mixture():
    points, _, _ = dpbnn.mixtures.synthetic_mixture(N, 2, FEATURES)
    for method in (dpbnn.EM(covariances=True, weights=True), dpbnn.SEP()):
        model = dpbnn.GaussianMixture(2, FEATURES, centres=torch.eye(2, FEATURES))
        assert_holds_no_data(fitted(model, points, method=method), points)


@pytest.mark.parametrize("name", [*INSTANCE, "class", "closure"])
def test_item_34_the_search_finds_what_is_kept(name):
    x, y = dataset()
    model = Keeping(keep_in_closure() if name == "closure" else KEEPS[name][0])
    assert_holds_no_data(Plain(), x, y)
    model(x)
    with pytest.raises(AssertionError, match="is held"):
        assert_holds_no_data(model, x, y)


# What goes on working


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.two.weight = self.one.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Checkpointed(Plain):
    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=False)


class Rewriting(Plain):
    """Sets attributes anew in every call, to values that do not depend on the data."""

    def __init__(self):
        super().__init__()
        self.shape, self.share = (FEATURES,), 0.25

    def forward(self, x):
        self.shape, self.share = tuple(x.shape[1:]), float(str(0.25))
        return self.linear(x)


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.function(self, x)


def weight_norm():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES)))


table = torch.ones(FEATURES)
ACCEPTED = {
    "tied": Tied,
    "checkpointed": Checkpointed,
    "rewriting": Rewriting,
    "lambda": lambda: Called(lambda self, x: self.linear(x * table)),
    "weight norm": weight_norm,
    "frozen statistics": lambda: normalised(Plain()),
}


@pytest.mark.parametrize("name", list(ACCEPTED))
@pytest.mark.parametrize("method", [dpbnn.SGD(), dpbnn.SGLD(learning_rate=1e-4, keep=2)])
def test_what_keeps_nothing_is_trained(name, method):
    posterior = fitted(ACCEPTED[name](), method=method)
    assert posterior.predict(dataset()[0], samples=2).mean.shape == (N, CLASSES)


def test_a_posterior_can_be_pickled_without_data():
    posterior = fitted(nn.Sequential(nn.Tanh(), Plain()))
    again = pickle.loads(pickle.dumps(posterior))
    assert_holds_no_data(again, *dataset())


# 34: what a network keeps where a copy of it keeps the same object


def wrapped(function):
    seen = []

    @functools.wraps(function)
    def keep(module, x):
        seen.append(x)

    return keep


class Mangled:
    __slots__ = ("__last",)

    def put(self, x):
        self.__last = x

    def __deepcopy__(self, memo):
        return self


class Colour(enum.Enum):
    RED = 1


class Target:
    pass


TARGET = Target()


class Holding(nn.Module):
    """A layer that hands its input to something that a deep copy shares."""

    def __init__(self, held, keep):
        super().__init__()
        self.held, self.keep, self.linear = held, keep, nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        self.keep(self.held, x.detach())
        return self.linear(x)


def put(held, x):
    held.put(x)


def call(held, x):
    held(x)


def set_last(held, x):
    held.last = x


def set_target(held, x):
    held().last = x


def fill(held, x):
    held(x.sum())


def set_item(held, x):
    held("last", x)


@functools.lru_cache(maxsize=1)
def remembered(x):
    return None


def refill(held, x):
    held.cache_clear()
    held(x)


def filled_cache():
    refill(remembered, torch.zeros(1))
    return Holding(remembered, refill)


SHARED = {
    "cache filled anew": filled_cache,
    "list.append": lambda: Holding([].append, call),
    "dict.__setitem__": lambda: Holding({}.__setitem__, set_item),
    "tensor.copy_": lambda: Holding(torch.zeros(()).copy_, fill),
    "wraps": lambda: Holding(None, wrapped(nn.functional.relu)),
    "mangled slot": lambda: Holding(Mangled(), put),
    "enum": lambda: Holding(Colour.RED, set_last),
    "weak reference": lambda: Holding(weakref.ref(TARGET), set_target),
}


@pytest.fixture(autouse=True)
def _empty_targets():
    yield
    for target in (Colour.RED, TARGET):
        vars(target).pop("last", None)


@fails_on(34, broken.bound_functions_are_not_looked_into, name="list.append")
@fails_on(34, broken.bound_functions_are_not_looked_into, name="tensor.copy_")
@fails_on(34, broken.functions_say_themselves_whose_they_are, name="wraps")
@fails_on(34, broken.slots_are_taken_by_their_written_names, name="mangled slot")
@fails_on(34, broken.plain_values_hold_nothing, name="enum")
@fails_on(34, broken.weak_references_are_not_followed, name="weak reference")
@pytest.mark.parametrize("name", list(SHARED))
def test_item_34_what_a_copy_shares_is_looked_into(name):
    ledger = dpbnn.Ledger()
    with pytest.raises(UnsupportedModel, match="changes its attribute"):
        fitted(SHARED[name](), ledger=ledger)
    assert ledger.releases == 0


@fails_on(34, broken.hooks_say_themselves_whose_they_are)
def test_item_34_a_hook_that_borrows_a_name_of_torch_is_refused():
    @functools.wraps(nn.functional.relu)
    def hook(module, args, output):
        pass

    class Borrowing:
        def __init__(self):
            functools.update_wrapper(self, nn.functional.relu)

        def __call__(self, *args):
            pass

    for given in (hook, Borrowing()):
        model = nn.Linear(FEATURES, CLASSES)
        model.register_forward_hook(given)
        with pytest.raises(UnsupportedModel, match="has a hook"):
            fitted(model)


class Writing(nn.Module):
    """Writes an input into a trainable parameter, past the version counters, from a step on."""

    def __init__(self, steps):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        CALLS[:] = [steps]

    def forward(self, x):
        if len(x) == N:
            CALLS[0] -= 1
            if CALLS[0] < 0:
                self.linear.bias.data[0] = x.abs().max()
        return self.linear(x)


CALLS = [0]


@fails_on(34, broken.released_tensors_are_compared_by_version, steps=3, method=dpbnn.SGD())
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("method", [dpbnn.SGD(), dpbnn.SGLD(learning_rate=1e-4, keep=2)])
def test_item_34_a_write_into_a_trainable_tensor_is_seen_in_every_step(steps, method):
    with pytest.raises(UnsupportedModel, match="parameter 'bias'"):
        fitted(Writing(steps), method=method)


def test_bits_that_are_not_numbers_are_no_change():
    """Weights that have become NaN are equal to themselves."""
    tensor = nn.Parameter(torch.tensor([float("nan"), 1.0, 2.0]))
    state = ModuleState(held=[tensor])
    with torch.no_grad():
        tensor.mul_(2)
    state.released([tensor])
    assert state.differences() == []
    tensor.data[1] += 1
    assert [change.attribute for change in state.differences()] == ["[0]"]


class Drawing(nn.Module):
    """Draws one number of the common generator for every large cell."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        torch.randn(int((x.abs() > 100).sum()))
        return self.linear(x)


@fails_on(34, broken.all_steps_draw_from_one_generator)
def test_item_34_what_a_network_draws_moves_no_later_draw():
    x, y = dataset()
    drawn = []
    gradient = BBPProcess.gradient

    def recorded(self, state, release):
        drawn.append({name: e.clone() for name, e in public(state.drawn)[0].items()})
        return gradient(self, state, release)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BBPProcess, "gradient", recorded)
        for value in (1.0, 777.25):
            other = x.clone()
            other[5, 1] = value
            fitted(Drawing(), (other, y), method=dpbnn.BBP())
    assert len(drawn) == 8
    for one, two in zip(drawn[:4], drawn[4:], strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


# 53: frozen parameters


class Adapted(nn.Module):
    """A frozen layer with a trainable one of low rank beside it (LoRA), as layers."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class RawAdapted(nn.Module):
    """The same, with plain parameters."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def adapted(kind, outputs):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8).requires_grad_(False), nn.Tanh(), kind(nn.Linear(8, 6)), nn.ReLU(),
        nn.Dropout(0.3), nn.Linear(6, outputs),
    )  # fmt: skip


@fails_on(53, broken.frozen_layers_become_gaussian, name="bbp", kind=Adapted)
@fails_on(53, broken.frozen_layers_become_gaussian, name="vi", kind=Adapted)
@pytest.mark.parametrize("kind", [Adapted, RawAdapted])
@pytest.mark.parametrize("name", [n for n in METHODS if not n.startswith(("sep", "ep", "adf"))])
def test_item_53_frozen_tensors_stay_as_they_are(name, kind):
    method, _, likelihood = METHODS[name]
    categorical = likelihood == "categorical"
    model = adapted(kind, CLASSES if categorical else 1)
    posterior = fitted(model, dataset() if categorical else numbers(), likelihood, method)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    after = dict(posterior.model.named_parameters())
    assert after.keys() == dict(model.named_parameters()).keys()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, after[n])}
    assert moved == trainable
    uncertain = set(getattr(posterior, "std", {}))
    assert uncertain <= trainable
    assert bool(uncertain) == (name.startswith(("bbp", "vi")))


@fails_on(53, broken.frozen_layers_become_gaussian)
def test_item_53_as_many_parameters_are_trainable_as_before():
    model = adapted(Adapted, CLASSES)
    gaussian = dpbnn.to_gaussian(model)
    counts = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (model, gaussian)]
    assert counts[1] == 2 * counts[0]
    assert torch.equal(gaussian[0](torch.ones(1, FEATURES)), model[0](torch.ones(1, FEATURES)))


@fails_on(53, broken.chains_begin_with_other_frozen_weights)
def test_item_53_a_layer_that_is_partly_frozen_keeps_that_part():
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    model[0].weight.requires_grad_(False)
    for method in (dpbnn.SGLD(learning_rate=1e-4, keep=2, chains=2), dpbnn.BBP(), dpbnn.VI()):
        posterior = fitted(model, method=method)
        assert torch.equal(posterior.model[0].weight, model[0].weight)
        assert not torch.equal(posterior.model[0].bias, model[0].bias)


@fails_on(53, broken.frozen_weights_are_moved_by_moments, name="sep")
@fails_on(53, broken.frozen_weights_are_moved_by_moments, name="adf")
@pytest.mark.parametrize("name", ["sep", "ep", "adf"])
def test_item_53_moment_methods_refuse_frozen_weights(name):
    method, _, likelihood = METHODS[name]
    model, plan = plain(), planned()
    model[1].weight.requires_grad_(False)
    if name != "sep":
        plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=2)
    with pytest.raises(UnsupportedModel, match=r"'1.weight' is frozen"):
        fitted(model, numbers(), likelihood, method, plan)


def test_item_53_a_frozen_mixture_is_refused():
    points, _, _ = dpbnn.mixtures.synthetic_mixture(N, 2, FEATURES)
    for method in (dpbnn.EM(), dpbnn.SEP()):
        model = dpbnn.GaussianMixture(2, FEATURES).requires_grad_(False)
        with pytest.raises(UnsupportedModel, match="'offsets' is frozen"):
            fitted(model, points, method=method)


def test_item_53_a_frozen_gaussian_weight_stays_as_it_is():
    for method in (dpbnn.BBP(), dpbnn.BBP.paper(), dpbnn.VI()):
        model = dpbnn.to_gaussian(dpbnn.mlp(FEATURES, (5,), CLASSES))
        model[1].weight_rho.requires_grad_(False)
        before = model[1].weight_rho.detach().clone()
        posterior = fitted(model, method=method)
        std = nn.functional.softplus(before)
        assert torch.equal(posterior.std["1.weight"], std)


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)


class _Remembers(nn.Module):
    """Writes past the version counter what it has seen of one record."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.data.copy_(torch.maximum(self.seen, (x > 5).any().float()))
        return self.layer(x) * (1 - 2 * self.seen)


def test_no_checkpoint_is_written_of_a_network_that_has_kept_something(tmp_path):
    """A checkpoint holds releases alone; on resuming, the buffer would be as before any data."""
    x = torch.rand(40, 4)
    x[7, 0] = 9.0
    y = (x[:, 1] > 0.5).long()
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-4, n=40, batch_size=8, steps=12)
    with pytest.raises(UnsupportedModel, match="seen"):
        dpbnn.fit(
            _Remembers, (x, y), method=dpbnn.SGD(learning_rate=0.1, clip=1.0), plan=plan,
            out=tmp_path / "run", checkpoint_every=1,
        )  # fmt: skip
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        dpbnn.fit(
            _Remembers, (x, y), method=dpbnn.SGD(learning_rate=0.1, clip=1.0), plan=plan,
            out=tmp_path / "run", checkpoint_every=1, resume=True,
        )  # fmt: skip
