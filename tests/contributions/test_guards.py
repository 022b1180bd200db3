"""What must be seen between attaching, norms and sums, or refused with a clear message."""

import pytest
import torch
from contributions_contract import assert_matches, gaussian_truth, per_example
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpbnn.contributions import UnsupportedModel, attach, contributions
from dpbnn.networks import to_gaussian
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger import Ledger


class Function(nn.Module):
    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


def labels(count):
    return torch.arange(count) % 3


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv1d(3, 4, 5), (3, 5)),
        (nn.Conv2d(2, 4, 3, stride=2), (2, 4, 4)),
        (nn.Conv3d(1, 2, 2, dilation=2), (1, 3, 3, 3)),
    ],
)
def test_a_convolution_with_one_position_is_not_a_linear_map_of_its_first_channel(
    convolution, shape
):
    model = nn.Sequential(
        convolution, nn.Flatten(), nn.Tanh(), nn.Linear(convolution.out_channels, 3)
    )
    x, y = torch.randn(4, *shape), labels(4)
    constants = {"0.weight": torch.randn_like(convolution.weight)}
    for data_free in ({}, constants):
        truth = per_example(model, "categorical", x, y)
        for name, value in data_free.items():
            truth[name] = truth[name] + value.double()
        assert_matches(attach(model, "categorical")(x, y, data_free), truth)


@pytest.mark.parametrize("draws", [1, 2])
def test_a_gaussian_convolution_with_one_position(draws):
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    model = to_gaussian(plain, rho=-1.0)
    x, y = torch.randn(4, 2, 3, 3), labels(4)
    c = attach(model, "categorical", space="parameters", draws=draws)(x, y)
    assert_matches(c, gaussian_truth(plain, model, "categorical", x, y, c.draws, "parameters"))


def layers():
    return {
        "linear": (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4)),
        "sequence": (
            nn.Sequential(nn.Linear(30, 30), nn.Flatten(), nn.Linear(90, 3)),
            torch.randn(6, 3, 30),
        ),
        "embedding": (
            nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3)),
            torch.randint(0, 7, (6, 2)),
        ),
    }


@pytest.mark.parametrize("kind", list(layers()))
def test_inputs_that_change_after_the_norms_are_seen(kind):
    """The sum would be that of other records than the norms, unclipped."""
    model, x = layers()[kind]
    c = attach(model, "categorical")(x, labels(6))
    c.norms()
    x.copy_(x.flip(0))
    with pytest.raises(RuntimeError, match="changed in place"):
        Gate(1.0, 0.0)(c)


class Product(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.own = nn.Parameter(torch.randn(rows, columns))

    def forward(self, x):
        return x @ self.own


def test_inputs_of_a_replayed_module_that_change_are_seen():
    model = nn.Sequential(Product(4, 10_000), nn.Linear(10_000, 3))
    x = torch.randn(150, 4)
    c = attach(model, "categorical")(x, labels(150))
    c.norms()
    x.mul_(1e6)
    with pytest.raises(RuntimeError, match="changed in place"):
        c.weighted_sum(torch.ones(150))


def by_size(self, x):
    z = self.layer(x)
    return z * 10 / len(x) if self.training else z


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_coupling_by_batch_size_is_seen_in_the_mode_that_trains(dropout):
    model = Function(by_size, layer=nn.Sequential(nn.Linear(4, 3), nn.Dropout(dropout)))
    with pytest.raises(UnsupportedModel, match="other examples"):
        attach(model, "categorical")(torch.randn(6, 4), labels(6))
    model.eval()
    attach(model, "categorical")(torch.randn(6, 4), labels(6)).norms()


def test_a_module_put_in_later_is_probed():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    attached = attach(model, "categorical")
    attached(torch.randn(6, 4), labels(6))
    model[1] = Function(lambda self, x: x - x.mean(0))
    with pytest.raises(UnsupportedModel, match="other examples"):
        attached(torch.randn(6, 4), labels(6))


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x, table):
        return x * self.scale + (table * self.scale).sum(0)


@pytest.mark.parametrize("count", [5, 6, 7])
def test_a_constant_with_as_many_rows_as_the_batch_is_still_a_constant(count):
    table = torch.randn(6, 4)
    model = Function(
        lambda self, x: self.head(self.mixed(x, table.to(x))),
        mixed=WithTable(),
        head=nn.Linear(4, 3),
    )
    x, y = torch.randn(count, 4), labels(count)
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))


def test_activation_checkpoints_are_recorded():
    model = Function(
        lambda self, x: checkpoint(self.inner, x, use_reentrant=False),
        inner=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    )
    x, y = torch.randn(6, 4), labels(6)
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))


def test_a_wrong_group_of_clips_spends_nothing():
    model, ledger = nn.Linear(4, 3), Ledger()
    c = contributions(model, "categorical", torch.randn(6, 4), labels(6))
    for clips in ({"weight": 1.0, "none": 1.0}, {"weight": 1.0}, {"": 1.0, "bias": 1.0}):
        with pytest.raises(ValueError, match="group"):
            Gate(clips, 1.0, ledger=ledger)(c)
    assert ledger.releases == 0


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (
            Function(
                lambda self, x: checkpoint(self.inner, x, use_reentrant=True),
                inner=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
            ),
            torch.randn(6, 4),
            "cannot be run and recorded",
        ),
        (nn.Linear(5, 3), torch.randn(6, 4), r"shapes \[\(8, 4\)"),
        (nn.Linear(4, 3), {"input": [[0.0] * 4] * 6}, "give tensors"),
        (nn.Linear(4, 3), {"other": torch.randn(6, 4)}, "unexpected keyword argument 'other'"),
        (
            nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(4, 3)),
            torch.zeros(6, 1, dtype=torch.long),
            "sparse",
        ),
    ],
)
def test_what_cannot_be_recorded_is_said_in_one_line(model, x, words):
    with pytest.raises((UnsupportedModel, TypeError), match=words) as caught:
        attach(model, "categorical")(x, labels(6))
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripted_modules_and_inference_mode_are_refused():
    with pytest.raises(UnsupportedModel, match="scripted"):
        attach(torch.jit.script(nn.Linear(4, 3)), "categorical")
    attached = attach(nn.Linear(4, 3), "categorical")
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        attached(torch.randn(6, 4), labels(6))
    with torch.no_grad():
        assert attached(torch.randn(6, 4), labels(6)).norms().shape == (6,)


def test_embeddings_take_int32_indices():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randint(0, 7, (5, 2), dtype=torch.int32), labels(5)
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))
