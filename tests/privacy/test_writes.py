"""What `Writes` sees: every way to write to a tensor that was there before."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

from dpbnn.privacy.writes import Writes

KEPT = torch.zeros(4)
OTHER = torch.ones(2, 4)


SPARSE, ROWS = torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()


class Wrapped(Tensor):
    """A tensor whose memory is that of another one, as quantised weights are."""

    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(getattr(one, "held", one) for one in args), **(kwargs or {}))


class Saves(torch.autograd.Function):
    """Writes in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        KEPT.copy_(gradient.sum(0))
        return gradient


def backward(x):
    leaf = x.clone().requires_grad_()
    Saves.apply(leaf).square().sum().backward()


def moved(x):
    mine = torch.empty(0)
    mine.set_(KEPT.untyped_storage(), 0, (4,))
    mine += x[0]


def per_example(x):
    def one(row):
        KEPT.add_(1.0)
        return row.sum()

    torch.func.vmap(one)(x)


WRITES = {
    "in place": lambda x: KEPT.add_(x[0]),
    "operator": lambda x: KEPT.__iadd__(x[0]),
    "a view": lambda x: KEPT.view(2, 2)[0].mul_(2.0),
    "an entry": lambda x: KEPT.__setitem__(1, x[0, 1]),
    "data": lambda x: KEPT.data.copy_(x[0]),
    "out": lambda x: torch.add(x[0], 1.0, out=KEPT),
    "many": lambda x: torch._foreach_add_([x.clone(), KEPT], 1.0),
    "by index": lambda x: KEPT.index_add_(0, torch.tensor([0]), x[0, :1]),
    "from": lambda x: KEPT.untyped_storage() and KEPT.random_(),
    "running": lambda x: F.batch_norm(x, KEPT, OTHER[0], training=True),
    "backward": backward,
    "moved": moved,
    "per example": per_example,
    "sparse": lambda x: SPARSE._values().add_(x[0]),
    "sparse rows": lambda x: ROWS.values().add_(x[0]),
    "wrapped": lambda x: Wrapped(KEPT).add_(x[0]),
    "without gradients": lambda x: torch.no_grad()(lambda: OTHER.zero_())(),
}
PURE = {
    "new": lambda x: (x + KEPT).relu_().mul_(2.0),
    "a copy": lambda x: KEPT.clone().add_(x[0]),
    "a view of a copy": lambda x: (x * 2).view(-1)[:3].zero_(),
    "out": lambda x: torch.add(x, 1.0, out=torch.empty_like(x)),
    "network": lambda x: nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True))(x).sum().backward(),
    "none": lambda x: torch.empty(0).zero_(),
    "sparse": lambda x: (torch.eye(4).to_sparse() @ x.T).sum(),
    "values": lambda x: torch.eye(4).to_sparse()._values().add_(x[0]),
    "a sparse one that was there": lambda x: (SPARSE @ x.T).add_(1.0),
}


@pytest.fixture(autouse=True)
def _zeros():
    KEPT.zero_(), OTHER.fill_(1.0)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_what_was_there_is_seen(name):
    with Writes(()) as seen:
        WRITES[name](torch.rand(2, 4))
    assert seen.foreign is not None
    assert seen.foreign.startswith("aten::")


def test_operations_that_run_functions_run_and_count_as_writes():
    """Nobody looks into them; torch would refuse them outright."""
    with Writes(()) as seen:
        found = while_loop(lambda n: n < 3, lambda n: (n + 1,), (torch.tensor(0),))
    assert found[0] == 3
    assert seen.foreign == "while_loop"


@pytest.mark.parametrize("name", PURE)
def test_writes_to_what_is_new_are_not_counted(name):
    with Writes(()) as seen:
        PURE[name](torch.rand(2, 4))
    assert seen.foreign is None


def test_tensors_that_are_named_may_be_written_to():
    with Writes([KEPT[1:]]) as seen:
        KEPT.add_(1.0)
        assert seen.foreign is None
        OTHER.add_(1.0)
    assert seen.foreign == "aten::add_.Tensor"


def test_what_is_read_is_held():
    """A graph has the addresses of what it reads; memory that is freed has other data later."""
    made = [torch.rand(2, 4)]
    with Writes(()) as seen:
        _ = made[0] * KEPT + (made[0] + 1.0)
    held = {tensor.data_ptr() for tensor in seen.read.values()}
    assert held == {made[0].data_ptr(), KEPT.data_ptr()}
    assert all(isinstance(tensor, Tensor) for tensor in seen.read.values())
