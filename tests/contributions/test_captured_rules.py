"""Released sums of every rule with a CUDA graph and without, on architectures that are drawn."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_rules import drawn, images, sequences, vectors
from torch import nn

import dpbnn
from dpbnn.captured import CapturedStep
from dpbnn.likelihoods import Categorical
from dpbnn.methods.method import Problem
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.sampling import Poisson

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
N = 60


class Last(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.out = kind(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.inner(x)[0][:, -1])


FIXED = {
    "RNN": (lambda: Last(nn.RNN), (5, 4)),
    "LSTM": (lambda: Last(nn.LSTM), (5, 4)),
    "GRU": (lambda: Last(nn.GRU), (5, 4)),
    "replayed": (lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 3)), (6,)),
    "pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(36, 3)
        ),
        (1, 6, 6),
    ),
}


def compare(model, shape, tokens):
    """Compare the sums of four batches, the last of them replayed, with those of the batches."""
    generator = torch.Generator().manual_seed(7)
    if tokens:
        x = torch.randint(0, tokens, (N, *shape), generator=generator)
    else:
        x = torch.randn(N, *shape, generator=generator)
    x, y = x.cuda(), torch.randint(0, 3, (N,), generator=generator).cuda()
    problem = Problem(model.cuda(), Categorical(), dpbnn.Gaussian(1.0), N, 12, 50, True)
    process = dpbnn.SGD().start(problem)
    state = process.begin()
    like = process.contribute(process.draw(state), x[:0], y[:0])
    sampler = Poisson(N, 12)  # says how large batches can be: graphs are of that bound
    step = CapturedStep(process, state, like, (x, y, None), sampler)
    gate = Gate(0.7, 1.0, sampler, noise=NoiseSource.seeded(0))
    gate._noised = lambda sums, sigma: {name: value.clone() for name, value in sums.items()}
    batches = [torch.randperm(N, generator=generator)[:size] for size in (12, 9, 14, 11)]
    for batch in step.ahead(iter(batches)):
        found = gate(step.load(batch, state), records=batch)
        records = batch.cuda()
        wanted = gate(process.contribute(state, x[records], y[records]))
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-5)
    assert step.replays.count == 1
    step.check()


@pytest.fixture(autouse=True)
def _full_precision():
    torch.backends.cudnn.conv.fp32_precision, before = "ieee", "tf32"
    yield
    torch.backends.cudnn.conv.fp32_precision = before


@pytest.mark.parametrize("kind", [vectors, sequences, images])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_replayed_sums_of_random_architectures_are_those_of_the_batch(kind):
    @settings(drawn, max_examples=4, derandomize=True, phases=[Phase.generate])
    @given(kind(), st.integers(0, 99))
    def check(case, seed):
        model, shape, tokens = case
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
        compare(model, shape, tokens)

    check()


@pytest.mark.parametrize("name", FIXED)
def test_replayed_sums_of_other_rules_are_those_of_the_batch(name):
    torch.manual_seed(0)
    make, shape = FIXED[name]
    compare(make(), shape, None)
