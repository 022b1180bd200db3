"""States: what is saved is what is restored, and one average serves all methods."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpbnn
from dpbnn.methods import Method, Process, State
from dpbnn.methods.state import UNSAVED, Average, flat, restored
from dpbnn.posteriors import PointPosterior


@dataclasses.dataclass(frozen=True, kw_only=True)
class Everything(State):
    tensor: Tensor
    array: np.ndarray
    number: float
    flag: bool
    nested: dict
    parts: list
    later: dict = dataclasses.field(default_factory=dict)
    maybe: Tensor | None = None
    average: Average = dataclasses.field(default_factory=Average)
    derived: object = dataclasses.field(default=None, metadata=UNSAVED)


def state(value, **changes):
    return Everything(
        steps=int(value), tensor=torch.full((2, 3), value), array=np.full(4, value), number=value,
        flag=bool(value), nested={"a.b": {"c": torch.tensor(value)}}, parts=[torch.tensor(value)],
        **changes,
    )  # fmt: skip


def test_every_kind_of_value_comes_back_bit_by_bit():
    third = 1 / 3
    average = Average().add({"w.0": torch.tensor([third])}, 1, 1)
    full = state(third, later={"x.y": torch.ones(2)}, maybe=torch.zeros(3), average=average)
    first = state(0.0, derived=object())
    tensor = first.tensor
    again = restored(first, flat(full))
    assert flat(again).keys() == flat(full).keys()
    assert all(torch.equal(v, flat(full)[n]) for n, v in flat(again).items())
    assert again.number == third
    assert again.tensor is tensor  # in place, as a network's parameters are
    assert again.derived is first.derived
    assert not any("derived" in name for name in flat(full))


def test_a_saved_state_is_a_copy():
    one = state(1.0)
    saved = flat(one)
    one.tensor.zero_()
    one.array[:] = 0
    assert saved["tensor"].min() == 1
    assert saved["array"].min() == 1


def test_a_number_that_has_become_a_fraction_stays_one():
    first = dataclasses.replace(state(0.0), number=1)
    assert restored(first, flat(state(0.25))).number == 0.25


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_tensors_of_another_state_are_refused(change):
    saved = flat(state(1.0))
    if change == "missing":
        del saved["tensor"]
    elif change == "dtype":
        saved["tensor"] = saved["tensor"].double() / 3  # would be rounded
    else:
        saved["tensor"] = torch.ones(3)  # would be broadcast
    with pytest.raises((KeyError, RuntimeError)):
        restored(state(0.0), saved)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop", "Adagrad"])
def test_an_optimizer_of_torch_goes_on_from_its_saved_state(kind):
    weights = []
    extra = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    for stops in (False, True):
        layer = nn.Linear(3, 2)
        nn.init.ones_(layer.weight)
        optimizer = getattr(torch.optim, kind)([layer.weight], **extra, lr=0.1)
        for step in range(6):
            if stops and step == 3:
                saved = flat(optimizer)
                optimizer = getattr(torch.optim, kind)([layer.weight], **extra, lr=0.1)
                optimizer = restored(optimizer, saved)
            layer.weight.grad = torch.arange(6.0).reshape(2, 3).sin() + step
            optimizer.step()
        weights.append(layer.weight.detach().clone())
    assert torch.equal(*weights)


def test_an_optimizer_whose_state_is_nested_is_refused():
    """Its mappings would come back as single names."""

    class Nested(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["inner"] = {"mean": torch.ones(1)}

    optimizer = Nested([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    with pytest.raises(TypeError, match="Nested holds mappings or lists"):
        flat(optimizer)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 5.0), ({"share": 1.0}, 3.5), ({"share": 0.2}, 5.5), ({"share": 0.5, "decay": 0.5}, 5.25)],
)
def test_an_average_is_over_the_last_share_of_the_steps(options, expected):
    average = Average()
    for step in range(1, 7):
        average = average.add({"w": torch.tensor([float(step)])}, step, 6, **options)
    assert float(average.values["w"]) == pytest.approx(expected)


@dataclasses.dataclass(frozen=True)
class Odd(Method):
    """A method whose state cannot be saved, or not be restored."""

    way: str
    name = "odd"

    def settled(self, plan):
        return plan, 1.0

    def start(self, problem):
        return OddProcess(self.way, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OddState(State):
    kept: object


class OddProcess(Process):
    def __init__(self, way, problem):
        super().__init__(problem, problem.attach())
        self.way = way

    def begin(self):
        kept = {"text": "a text", "growing list": []}[self.way]
        return OddState(parameters=self.problem.trainable(), kept=kept)

    def update(self, state, release):
        return dataclasses.replace(state, steps=state.steps + 1, kept=[*state.kept, torch.ones(1)])

    def posterior(self, state, **record):
        model = self.problem.rebuilt(state.parameters)
        return PointPosterior(model, self.problem.likelihood, **record)


def fit(way, **options):
    plan = dpbnn.plan(noise_multiplier=2.0, delta=1e-3, n=20, sampling="full-batch", steps=4)
    data = torch.zeros(20, 2), torch.arange(20) % 2
    return dpbnn.fit(nn.Linear(2, 2), data, method=Odd(way), plan=plan, progress=False, **options)


def test_a_state_that_cannot_be_saved_is_refused_before_anything_is_spent(tmp_path):
    ledger = dpbnn.Ledger()
    with pytest.raises(TypeError, match="a state holds a str, which cannot be saved"):
        fit("text", out=tmp_path, ledger=ledger)
    assert ledger.releases == 0


def test_a_checkpoint_of_which_something_would_be_lost_is_not_gone_on_with(tmp_path):
    fit("growing list", out=tmp_path, checkpoint_every=2)
    with pytest.raises(ValueError, match="does not fit this network and method"):
        fit("growing list", out=tmp_path, resume=True)


def test_a_checkpoint_of_another_version_is_refused_with_what_to_do(tmp_path):
    from safetensors.torch import save_file

    fit("growing list", out=tmp_path, checkpoint_every=2)
    names = ("run", "label", "ledger", "head", "settings")
    save_file(
        {"process.model.weight": torch.zeros(2, 2)},
        tmp_path / "checkpoint.safetensors",
        metadata={"step": "2", **dict.fromkeys(names, "")},
    )
    with pytest.raises(ValueError, match=r"another version of dpbnn.*version that began the run"):
        fit("growing list", out=tmp_path, resume=True)
