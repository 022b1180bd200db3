"""The digest of what is computed: other where anything is, the same in another process."""

import collections
import enum
import functools
import operator
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpbnn
from dpbnn.computed import code, digest

KEY = bytes(range(32))
settings = types.ModuleType("settings")
settings.__file__ = "settings.py"
settings.T = 1.0
LEVEL = 1.0


class Base:
    def log_prob(self, outputs, y):
        return outputs * self.scale

    @property
    def scale(self):
        return 1.0

    @staticmethod
    def shift(x):
        return x + 1

    @classmethod
    def turn(cls, x):
        return x * 2


class Likelihood(Base):
    T = 1.0


class Slotted:
    __slots__ = ("__value", "plain")

    def __init__(self, value, plain=0):
        self.__value, self.plain = value, plain


class Heavy(float):
    pass


class Colour(enum.Enum):
    RED, BLUE = 1, 2


def outer(x):
    return (lambda z: z * LEVEL)(x)


def reads_a_module(x):
    return x * settings.T


def wrapped(scale):
    @functools.wraps(F.relu)
    def relu(x):
        return scale * x

    return relu


def members(x):
    return x in {"lin", "abs", "one", "two"} or torch.relu(F.relu(np.sqrt(x)))


def tied(which):
    layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
    layers["c"] = layers[which]
    return layers


def seeded(seed, freeze=False):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(2, 2).requires_grad_(not freeze)


def holding(value):
    return types.SimpleNamespace(value=value)


PAIRS = {
    "slots": (Slotted(1), Slotted(2)),
    "deque": (collections.deque([1]), collections.deque([2])),
    "range": (range(3), range(4)),
    "dtype": (torch.float32, torch.float64),
    "device": (torch.device("cpu"), torch.device("meta")),
    "float subclass": (Heavy(1.0), Heavy(2.0)),
    "method of tensors": (torch.Tensor.tanh, torch.Tensor.relu),
    "builtin": (torch.relu, torch.tanh),
    "bound builtin": ([1].append, [2].append),
    "partial": (functools.partial(outer, 1), functools.partial(outer, 2)),
    "getter": (operator.attrgetter("a"), operator.attrgetter("b")),
    "ufunc": (np.sqrt, np.exp),
    "enum": (Colour.RED, Colour.BLUE),
    "wraps": (wrapped(1.0), wrapped(2.0)),
    "tying": (tied("a"), tied("b")),
    "frozen": (seeded(0, True), seeded(1, True)),
    "set": ({1, 2}, {1, 3}),
    "object": (holding([1, {"a": 2}]), holding([1, {"a": 3}])),
    "size": (torch.Size([1, 2]), torch.Size([2, 1])),
    "array": (np.zeros(2), np.ones(2)),
    "prior": (dpbnn.Gaussian(1.0), dpbnn.Gaussian(2.0)),
    "method": (dpbnn.SGD(clip=1.0), dpbnn.SGD(clip=2.0)),
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_other_values_have_other_digests(name):
    one, two = PAIRS[name]
    assert digest(one, KEY) == digest(one, KEY)
    assert digest(one, KEY) != digest(two, KEY)
    assert digest(one, KEY) != digest(one, KEY[::-1])


@pytest.mark.parametrize(
    ("owner", "name", "value", "thing"),
    [
        (Likelihood, "T", -1.0, Likelihood()),
        (Base, "log_prob", lambda self, outputs, y: -outputs, Likelihood()),
        (Base, "scale", property(lambda self: 2.0), Likelihood()),
        (Base, "shift", staticmethod(lambda x: x - 1), Likelihood()),
        (Base, "turn", classmethod(lambda cls, x: x * 3), Likelihood()),
        (settings, "T", 2.0, reads_a_module),
        (sys.modules[__name__], "LEVEL", 2.0, outer),
    ],
)
def test_what_code_reads_counts(monkeypatch, owner, name, value, thing):
    before = digest(thing, KEY)
    assert digest(thing, KEY) == before
    monkeypatch.setattr(owner, name, value)
    assert digest(thing, KEY) != before


def test_trained_values_do_not_count_and_all_others_do():
    one, two = seeded(0), seeded(1)
    assert digest(one, KEY, one.parameters()) == digest(two, KEY, two.parameters())
    assert digest(one, KEY) != digest(two, KEY)


def test_what_cannot_be_read_is_never_the_same():
    held = holding(sys.stdout)
    assert digest(held, KEY) != digest(held, KEY)


def everything():
    names = [n for n in PAIRS if n not in ("frozen", "tying")]
    things = [*(PAIRS[n] for n in names), Likelihood(), members, outer, dpbnn.mlp(2, (3,), 2)]
    return digest(things, KEY, things[-1].parameters())


def test_another_process_finds_the_same():
    here = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import test_computed as t; " \
           "print(t.everything())"  # fmt: skip
    found = set()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        found.add(run.stdout)
    assert len(found) == 1


def test_sources_count_by_name_and_text(tmp_path):
    texts = {"a.py": "x = 1", "inner/b.py": "y = 2"}
    others = [{"a.py": "x = 2"}, {"a.py": "x = 1y = 2", "inner/b.py": ""}, {"c.py": "x = 1"}]
    found = set()
    for number, changed in enumerate([{}, *others]):
        folder = tmp_path / str(number)
        for name, text in (texts | changed).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        found.add(code(folder))
    assert len(found) == 4
    assert code() not in found
