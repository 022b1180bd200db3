"""Known ways in which private trainers stop being private, each with the test that catches it.

The numbers are those of docs/pitfalls.md. Every test here goes through the public interface, from a
model to a release; each has a twin that runs a deliberately broken version and must reject it.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dpbnn
from dpbnn.contributions import DenseContributions, UnsupportedModel
from dpbnn.privacy.audit import PrivacyBug
from dpbnn.privacy.noise import NoiseSource

N, FEATURES, CLASSES = 24, 5, 3


class Attention(nn.Module):
    """A small transformer over sequences made of the features."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(1, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.block(self.lift(x.unsqueeze(-1))).mean(1))


def conv():
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(), nn.Linear(4 * FEATURES, CLASSES),
    )  # fmt: skip


def perceptron():
    return dpbnn.mlp(FEATURES, (7, 6), CLASSES, dropout=0.2)


MODELS = {
    "mlp": perceptron,
    "conv": conv,
    "attention": Attention,
    "gaussian": lambda: dpbnn.to_gaussian(dpbnn.mlp(FEATURES, (7,), CLASSES), rho=-2.0),
}
SPACES = {
    "gaussian": ({"space": "weights"}, {"space": "parameters"}, {"space": "parameters", "draws": 2})
}


def dataset(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (N,), generator=generator)
    return x, y


def trainer(make, *, clip=0.7, sampler=None, relation="zero-out", steps=3, gate=None, **options):
    """Private gradient descent, as a user would write it with the building blocks."""

    def train(data):
        x, y = data
        torch.manual_seed(1)
        model = make()
        draw = sampler or dpbnn.Poisson(N, 10)
        door = (gate or dpbnn.Gate)(clip, 1.5, draw, dpbnn.Ledger(relation=relation))
        for batch in draw.batches(steps):
            c = dpbnn.contributions(model, "categorical", x[batch], y[batch], **options)
            release = door(c, mean=True, records=batch)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in release:
                        parameter -= 0.5 * release[name]
        return model

    return train


CASES = [(name, options) for name in MODELS for options in SPACES.get(name, ({},))]
extreme = st.sampled_from([0.0, 1.0, -3.0, 1e4, 1e30, math.inf, math.nan])


class TestItem1Sensitivity:
    """One example contributes more than the declared sensitivity."""

    @pytest.mark.parametrize(("name", "options"), CASES)
    def test_zeroing_a_record_out_moves_a_release_by_at_most_the_clip(self, name, options):
        x, y = dataset()
        x[5] *= 1000
        result = dpbnn.replay(
            trainer(MODELS[name], sampler=dpbnn.FullBatch(N), **options), (x, y), 5
        )
        result.check()
        assert max(result.distances) == pytest.approx(0.7, rel=1e-3)

    @pytest.mark.parametrize("microbatch", [None, 4])
    @pytest.mark.parametrize("clip", [0.5, {"1": 0.3, "4": 0.4, "7": 0.5}])
    def test_for_every_clipping_mode(self, clip, microbatch):
        draw = dpbnn.FullBatch(N)
        train = trainer(perceptron, clip=clip, microbatch_size=microbatch, sampler=draw)
        for record in range(0, N, 6):
            dpbnn.replay(train, dataset(), record, trace=False).check()

    @settings(max_examples=12)
    @given(st.lists(extreme, min_size=FEATURES, max_size=FEATURES), st.sampled_from(list(MODELS)))
    def test_for_examples_of_every_kind(self, row, name):
        """Huge, zero, duplicated and non-finite examples take the place of a record."""
        data, (x, y) = dataset(), dataset()
        x[3] = torch.tensor(row)
        x[4] = x[3]
        data[0][4] = x[3]
        train = trainer(
            MODELS[name], sampler=dpbnn.Partition(N, 8), relation="replace-one", steps=3
        )
        dpbnn.replay(train, data, (x, y), trace=False).check()

    def test_a_gate_that_does_not_clip_is_rejected(self):
        class Broken(dpbnn.Gate):
            def _weights(self, chunk):
                return torch.ones(chunk.batch_size)

        x, y = dataset()
        x[5] *= 1000
        train = trainer(perceptron, sampler=dpbnn.FullBatch(N), gate=Broken)
        with pytest.raises(PrivacyBug, match="times its sensitivity"):
            dpbnn.replay(train, (x, y), 5).check()


class TestItem2DataFreeTerms:
    """A term without data (KL, prior, weight decay) sits inside the loss and escapes the clip."""

    def contributions(self, scale):
        torch.manual_seed(0)
        model = dpbnn.to_gaussian(dpbnn.mlp(FEATURES, (7,), CLASSES), rho=-2.0)
        x, y = dataset()
        prior = {name: scale * torch.randn_like(p) for name, p in model.named_parameters()}
        return dpbnn.contributions(
            model, "categorical", x[:1], y[:1], space="parameters", data_free=prior
        )

    @pytest.mark.parametrize("scale", [0.1, 100.0])
    def test_a_large_prior_inside_the_clip_is_clipped_with_the_example(self, scale):
        gate = dpbnn.Gate(clip=1.0, noise_multiplier=0.0)
        release = gate(self.contributions(scale))
        norm = torch.cat([v.flatten() for v in release.values()]).double().norm()
        assert norm <= 1.0 + 1e-5
        assert norm == pytest.approx(1.0, rel=2e-3)

    def test_norms_that_forget_the_prior_are_rejected(self):
        class Forgetful(dpbnn.Gate):
            def _weights(self, chunk):
                return torch.clamp(1.0 / self.without.norms(), max=1.0)

        gate = Forgetful(clip=1.0, noise_multiplier=0.0)
        gate.without = self.contributions(0.0)
        release = gate(self.contributions(100.0))
        norm = torch.cat([v.flatten() for v in release.values()]).norm()
        assert norm > 1.5


class TestItem3Cancellation:
    """Norms from Gram matrices cancel in float32, so that nothing is clipped."""

    def sequence(self):
        """Two halves of a sequence are equal, with back-signals of opposite sign."""
        model = nn.Linear(6, 6, bias=False)
        torch.manual_seed(0)
        half = torch.randn(1, 32, 6) * 100
        x = torch.cat([half, half * (1 + 1e-4)], 1)
        signs = torch.cat([torch.ones(32, 6), -torch.ones(32, 6)])

        def signed(outputs, y):
            return (outputs * signs * 100).flatten(1).sum(1)

        return model, signed, x

    def test_the_share_of_the_adversarial_example_stays_within_the_clip(self):
        model, likelihood, x = self.sequence()
        c = dpbnn.contributions(model, likelihood, x, torch.zeros(1))
        truth = torch.func.grad(lambda w: likelihood(x.double() @ w.T, None).sum())(
            model.weight.detach().double()
        ).norm()
        assert truth > 10
        assert c.norms()[0] >= truth * (1 - 1e-5)
        release = dpbnn.Gate(clip=1.0, noise_multiplier=0.0)(c)
        assert release["weight"].double().norm() <= 1 + 1e-5

    def test_the_naive_gram_norm_in_float32_is_rejected(self):
        model, likelihood, x = self.sequence()
        g = torch.cat([torch.ones(32, 6), -torch.ones(32, 6)]) * 100
        naive = ((x[0] @ x[0].T) * (g @ g.T)).sum().clamp(min=0).sqrt()
        truth = dpbnn.contributions(model, likelihood, x, torch.zeros(1)).norms()[0]
        assert naive < truth * (1 - 1e-3) or naive > truth * (1 + 1e-2)


class TestItem4NonFinite:
    """A non-finite example turns the whole update to NaN, so that its presence shows."""

    @pytest.mark.parametrize("name", list(MODELS))
    @pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
    def test_the_release_is_finite_and_equals_the_one_without_it(self, name, bad):
        x, y = dataset()
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        keep = torch.arange(N) != 4
        generators = [torch.Generator().manual_seed(3) for _ in range(2)]
        gates = [dpbnn.Gate(clip=0.5, noise_multiplier=0.0) for _ in range(2)]
        expected = gates[0](
            dpbnn.contributions(model, "categorical", x[keep], y[keep], generator=generators[0])
        )
        x[4] = bad
        release = gates[1](dpbnn.contributions(model, "categorical", x, y, generator=generators[1]))
        for key, value in release.items():
            assert value.isfinite().all()
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)

    def test_clipping_by_multiplication_alone_is_rejected(self):
        rows = torch.ones(3, 2)
        rows[0] = math.nan
        weights = torch.tensor([0.0, 1.0, 1.0])
        assert not (weights @ rows).isfinite().all()


class TestItem5Averaging:
    """The sum is divided by a number that depends on the data."""

    def test_everything_outside_the_mechanism_is_the_same_for_a_missing_record(self):
        result = dpbnn.replay(trainer(perceptron, steps=8), dataset(), 2).check()
        assert any(distance > 0 for distance in result.distances)

    def test_division_by_the_realised_size_is_rejected(self):
        def by_size(data):
            x, _ = data
            gate = dpbnn.Gate(clip=1.0, noise_multiplier=1.0)
            kept = x[~x.isnan().any(1)]
            return gate(DenseContributions(kept))["value"] / len(kept)

        x, y = dataset()
        x[0] = math.nan
        with pytest.raises(PrivacyBug, match="result differs"):
            dpbnn.replay(by_size, dataset(), (x, y), trace=False).check()


class TestItem6Sampling:
    """The sampling that is accounted for differs from the one that runs; see test_sampling."""

    def test_a_foreign_loader_gets_no_amplification(self):
        gate = dpbnn.Gate(clip=1.0, noise_multiplier=2.0)
        loader = torch.utils.data.DataLoader(torch.randn(20, 3), batch_size=5, shuffle=True)
        for rows in loader:
            gate(DenseContributions(rows))
        assert gate.ledger.events == (dpbnn.Event("full-batch", 2.0, 4),)

    def test_shuffled_batches_cannot_pass_for_fixed_ones(self):
        gate = dpbnn.Gate(clip=1.0, noise_multiplier=2.0, sampler=dpbnn.Partition(22, 5))
        sizes = [5, 5, 5, 5]
        for size in sizes:
            gate(DenseContributions(torch.zeros(size, 3)))
        with pytest.raises(ValueError, match="the batch has 5 records"):
            gate(DenseContributions(torch.zeros(5, 3)))


def test_item_7_empty_batches_are_released_with_full_noise_and_counted():
    draw = dpbnn.Poisson(1000, 0.2)
    torch.manual_seed(0)
    model = nn.Linear(40, 50)
    source = NoiseSource()
    gate = dpbnn.Gate(clip=1.0, noise_multiplier=3.0, sampler=draw, noise=source)
    x, y = torch.randn(1000, 40), torch.zeros(1000, dtype=torch.long)
    empty = 0
    for batch in draw.batches(40):
        empty += len(batch) == 0
        release = gate(dpbnn.contributions(model, "categorical", x[batch], y[batch]))
        assert release["weight"].std() == pytest.approx(3.0, rel=0.15)
    assert empty > 20
    assert source.draws == gate.ledger.releases == 40


@pytest.mark.parametrize("name", list(MODELS))
def test_items_8_and_9_chunks_are_clipped_by_example_and_noised_once(name):
    x, y = dataset()
    releases, source = [], NoiseSource.seeded(1)
    for microbatch in (None, 1, 5, N):
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        generator = torch.Generator().manual_seed(3)
        gate = dpbnn.Gate(clip=0.5, noise_multiplier=2.0, noise=NoiseSource.seeded(1))
        releases.append(
            gate(
                dpbnn.contributions(
                    model, "categorical", x, y, microbatch_size=microbatch, generator=generator
                )
            )
        )
        assert gate.noise.draws == gate.ledger.releases == 1
    for other in releases[1:]:
        for key, value in other.items():
            torch.testing.assert_close(value, releases[0][key], rtol=1e-4, atol=1e-5)
    assert source.draws == 0


def test_items_8_and_9_clipping_whole_chunks_is_rejected():
    rows = torch.eye(4) * 2
    by_example = dpbnn.Gate(clip=1.0, noise_multiplier=0.0)(DenseContributions(rows))["value"]
    sums = torch.stack([rows[:2].sum(0), rows[2:].sum(0)])
    by_chunk = dpbnn.Gate(clip=1.0, noise_multiplier=0.0)(DenseContributions(sums))["value"]
    assert not torch.allclose(by_example, by_chunk, rtol=1e-2)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_item_11_the_clip_reaches_the_clipping_on_every_path(name, options):
    x, y = dataset()
    torch.manual_seed(0)
    gate = dpbnn.Gate(clip=1e-3, noise_multiplier=0.0)
    release = gate(dpbnn.contributions(MODELS[name](), "categorical", x, y, **options))
    norm = torch.cat([v.flatten() for v in release.values()]).norm()
    assert 0 < norm <= N * 1e-3 * (1 + 1e-5)


def test_item_14_model_noise_and_sampling_share_no_generator():
    x, y = dataset()

    def run(seed):
        torch.manual_seed(seed)
        model = MODELS["mlp"]()
        gate = dpbnn.Gate(clip=1.0, noise_multiplier=1.0, noise=NoiseSource.seeded(5))
        draw = dpbnn.Poisson(N, 10)
        batches = [b.tolist() for b in draw.batches(3, key=b"sixteen bytes or more")]
        gate(dpbnn.contributions(model, "categorical", x, y))
        noise = gate.noise.normal({"a": torch.zeros(50)}, 1.0)["a"]
        return batches, noise, torch.rand(5)

    first, second = run(0), run(1)
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[2], second[2])

    torch.manual_seed(7)
    plain = torch.rand(5)
    torch.manual_seed(7)
    NoiseSource().normal({"a": torch.zeros(1000)}, 1.0)
    list(dpbnn.Poisson(N, 10).batches(3))
    assert torch.equal(torch.rand(5), plain)


class Centred(nn.Module):
    """Subtracts the mean of the batch: one example moves all others."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.linear(x - x.mean(0))


class Stray(nn.Module):
    """Uses a layer's weight outside the layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) @ self.first.weight)


class Counting(nn.Module):
    """Keeps a running mean of the data in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("running", torch.zeros(FEATURES))

    def forward(self, x):
        if self.training:
            self.running = 0.9 * self.running + 0.1 * x.mean(0).detach()
        return self.linear(x)


def weighted(outputs, y):
    """A class-weighted mean: the weights of a batch add up to one."""
    weight = torch.tensor([1.0, 5.0, 9.0])[y]
    log_prob = torch.log_softmax(outputs, -1).gather(1, y[:, None])[:, 0]
    return log_prob * weight / weight.sum()


@pytest.mark.parametrize(
    ("make", "likelihood", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)),
         "categorical", r"'1' \(BatchNorm1d\).*GroupNorm"),
        (Centred, "categorical", "other examples"),
        (lambda: nn.Linear(FEATURES, CLASSES), weighted, "other examples"),
        (Stray, "categorical", "'first"),
        (Counting, "categorical", "running"),
    ],
)  # fmt: skip
def test_items_15_16_17_what_is_not_per_example_is_refused_before_anything_is_spent(
    make, likelihood, message
):
    x, y = dataset()
    gate = dpbnn.Gate(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(UnsupportedModel, match=message):
        gate(dpbnn.contributions(make(), likelihood, x, y))
    assert gate.ledger.releases == 0


def test_item_16_every_parameter_that_changes_is_in_the_release():
    x, y = dataset()
    for make in MODELS.values():
        model = make()
        frozen = next(model.parameters()).requires_grad_(False)
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        c = dpbnn.contributions(model, "categorical", x, y, space="parameters")
        assert set(dpbnn.Gate(clip=1.0, noise_multiplier=1.0)(c)) == names
        assert frozen.grad is None


def test_item_17_a_run_changes_nothing_but_what_was_released():
    """Buffers and statistics are the same on neighbouring datasets."""
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(FEATURES, 4), nn.BatchNorm1d(4).eval(), nn.ReLU(), nn.Linear(4, CLASSES)
    )
    dpbnn.replay(trainer(make), dataset(), 1, seed=2).check()


@pytest.mark.parametrize(("n", "batch", "epochs"), [(75, 1, 3), (640, 64, 1.5), (1000, 300, 7)])
def test_item_19_exactly_the_planned_steps_stay_within_the_target(n, batch, epochs):
    plan = dpbnn.plan(epsilon=1.0, delta=1e-4, n=n, batch_size=batch, epochs=epochs)
    source, ledger = NoiseSource(), dpbnn.Ledger()
    gate = dpbnn.Gate(1.0, plan.noise_multiplier, plan.sampler, ledger, noise=source)
    gate.reserve(plan.steps)
    for rows in plan.sampler.batches(plan.steps):
        gate(DenseContributions(torch.zeros(len(rows), 1)))
    assert source.draws == ledger.releases == plan.steps
    assert ledger.epsilon(1e-4) <= 1.0


def test_item_20_a_count_of_clipped_examples_is_paid_like_any_release():
    """The query of adaptive clipping: how many norms lie below the clip."""

    def count(data):
        (values,) = data
        norms = DenseContributions(values).norms()
        gate = dpbnn.Gate(0.5, 4.0, dpbnn.FullBatch(N), dpbnn.Ledger(), label="clip count")
        below = (norms <= 1.0).float()[:, None] - 0.5
        return gate(DenseContributions(below), records=torch.arange(N))["value"]

    result = dpbnn.replay(count, (torch.randn(N, 3),), 3).check()
    assert result.distances == pytest.approx((0.5,), rel=1e-3)


def test_item_20_a_free_count_is_rejected():
    def count(data):
        (values,) = data
        return int((DenseContributions(values).norms() <= 1.0).sum())

    small, large = torch.zeros(N, 3), torch.zeros(N, 3)
    large[0] = 5.0
    with pytest.raises(PrivacyBug, match="result differs"):
        dpbnn.replay(count, (small,), (large,)).check()


def test_item_21_relations_cannot_be_mixed():
    ledger = dpbnn.Ledger(relation="replace-one")
    with pytest.raises(dpbnn.UnsupportedEvent, match="replace-one"):
        dpbnn.Gate(1.0, 1.0, dpbnn.Poisson(N, 5), ledger)
    x, y = dataset()
    x[2] *= -50
    train = trainer(perceptron, sampler=dpbnn.FullBatch(N), relation="replace-one")
    moved = dpbnn.replay(train, dataset(), (x, y)).check()
    assert set(moved.sensitivities) == {1.4}


def test_item_24_norm_and_sum_see_the_same_dropout_masks():
    x, y = dataset()
    torch.manual_seed(0)
    model = dpbnn.mlp(FEATURES, (50,), CLASSES, dropout=0.5)
    for microbatch in (None, 1):
        c = dpbnn.contributions(model, "categorical", x, y, microbatch_size=microbatch)
        norms, again = c.norms(), c.norms()
        assert torch.equal(norms, again)
        for i in range(3):
            one = torch.zeros(N)
            one[i] = 1
            total = torch.cat([v.flatten() for v in c.weighted_sum(one).values()])
            assert norms[i] >= total.double().norm() * (1 - 1e-6)
            assert norms[i] <= total.double().norm() * (1 + 1e-3)
    fresh = dpbnn.contributions(model, "categorical", x, y)
    assert not torch.allclose(fresh.norms(), norms, rtol=1e-2)


@settings(max_examples=20)
@given(st.floats(1e-3, 1e3), st.integers(0, 10**6))
def test_item_27_rounding_never_lifts_a_share_above_the_clip(clip, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, FEATURES, generator=generator) * 100
    torch.manual_seed(seed)
    model = perceptron().eval()
    c = dpbnn.contributions(model, "categorical", x, torch.zeros(1, dtype=torch.long))
    release = dpbnn.Gate(clip=clip, noise_multiplier=0.0)(c)
    norm = torch.cat([v.double().flatten() for v in release.values()]).norm()
    assert norm <= clip * (1 + 4 * torch.finfo(torch.float32).eps)


def test_item_29_the_statement_says_where_the_randomness_came_from():
    for source, words in (
        (NoiseSource(), "operating-system entropy"),
        (NoiseSource.seeded(3), "DEBUG: NOT PRIVATE"),
    ):
        gate = dpbnn.Gate(clip=1.0, noise_multiplier=1.0, noise=source)
        gate(DenseContributions(torch.zeros(1, 1)))
        assert words in str(gate.statement(delta=1e-5))


def test_item_31_control_flow_that_looks_at_the_data_is_rejected():
    def nosy(data):
        x, _ = data
        gate = dpbnn.Gate(clip=1.0, noise_multiplier=1.0)
        if x.isnan().any():
            gate = dpbnn.Gate(clip=2.0, noise_multiplier=1.0)
        return gate(DenseContributions(x))["value"]

    x, y = dataset()
    x[0] = math.nan
    with pytest.raises(PrivacyBug, match="another kind"):
        dpbnn.replay(nosy, dataset(), (x, y)).check()
