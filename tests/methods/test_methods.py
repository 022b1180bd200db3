"""What every method promises: one contract, and replay on neighbours."""

import inspect
import math

import pytest
import torch
from held_data import assert_holds_no_data
from stepping import step
from torch import nn

import dpbnn
from dpbnn.likelihoods import Categorical, HeteroscedasticGaussian, LearnedNoiseGaussian
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.methods.method import Problem, Process
from dpbnn.methods.state import State, flat
from dpbnn.networks import SlopedNoise

N = 24


def net(outputs, dropout=0.0):
    return lambda: dpbnn.mlp(4, (6,), outputs, dropout=dropout)


def public_inputs(count):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


METHODS = {
    "sgd": (dpbnn.SGD(learning_rate=0.5), 0.0),
    "sgd-adam": (dpbnn.SGD(learning_rate=0.01, optimizer="adam", average=0.9), 0.0),
    "sgd-momentum": (
        dpbnn.SGD(learning_rate=0.1, momentum=0.9, schedule="cosine", average="polyak"),
        0.0,
    ),
    "sgd-kept": (
        dpbnn.SGD(learning_rate=0.01, optimizer="adam", schedule="linear", keep=2),
        0.0,
    ),
    "sgd-bands": (
        dpbnn.SGD(learning_rate=0.01, optimizer="adam", keep=2, inputs=public_inputs),
        0.0,
    ),
    "sgld": (dpbnn.SGLD(learning_rate=1e-3, keep=3), 0.0),
    "sghmc": (dpbnn.SGHMC(learning_rate=1e-3, keep=3), 0.0),
    "bbp": (dpbnn.BBP(learning_rate=0.5), 0.0),
    "bbp-paper": (dpbnn.BBP.paper(draws=2, clip=0.5), 0.0),
    "vi": (dpbnn.VI(learning_rate=0.5, draws=2), 0.0),
    "mcdropout": (dpbnn.MCDropout(learning_rate=0.5), 0.4),
    "mcdropout-shared": (dpbnn.MCDropout(learning_rate=0.5, shared_mask=True), 0.4),
}
PRIORS = {"gaussian": dpbnn.Gaussian(0.5), "laplace": dpbnn.Laplace(0.5), "flat": dpbnn.Flat()}
LIKELIHOODS = {
    "categorical": (Categorical(), 3),
    "gaussian": (GaussianNoise(0.5), 1),
    "learned": (GaussianNoise(None), 1),
    "heteroscedastic": (HeteroscedasticGaussian(), 2),
    "learned, steady": (LearnedNoiseGaussian(start=-1.0), 1),
    "learned, sloped": (LearnedNoiseGaussian(start=-1.0, sloped=True), 1),
}


def dataset(likelihood="categorical"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    if likelihood == "categorical":
        return x, torch.randint(0, 3, (N,), generator=generator)
    return x, x.sum(1) + torch.randn(N, generator=generator)


def run(name, data, likelihood="categorical", prior="gaussian", sampling="full-batch", **options):
    method, dropout = METHODS[name]
    kind, outputs = LIKELIHOODS[likelihood]
    sizes = {} if sampling == "full-batch" else {"batch_size": 8}
    plan = dpbnn.plan(noise_multiplier=20.0, delta=1e-3, n=N, sampling=sampling, steps=4, **sizes)
    return dpbnn.fit(net(outputs, dropout), data, kind, PRIORS[prior], method, plan, **options)


def public(posterior):
    """Everything that a posterior shows."""
    tensors = dict(posterior.model.state_dict())
    for part in ("std", "deviations"):
        if hasattr(posterior, part):
            values = getattr(posterior, part)
            tensors |= {f"{part}.{name}": value for name, value in values.items()}
    if hasattr(posterior, "iterates"):
        count = len(posterior.iterates)
        tensors |= {f"it.{n}": v for n, v in posterior.iterates.read(list(range(count))).items()}
    return tensors, posterior.settings


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
def test_neighbour_replay_for_every_method_and_likelihood(name, likelihood):
    """The release moves by at most the sensitivity, and nothing else moves at all."""
    x, y = dataset(likelihood)
    x[5] *= 100
    result = dpbnn.replay(lambda data: public(run(name, data, likelihood)), (x, y), 5, trace=False)
    result.check()
    assert result.worst > 0


@pytest.mark.parametrize("name", ["sgd", "sgld", "bbp", "bbp-paper", "vi"])
@pytest.mark.parametrize("prior", list(PRIORS))
def test_neighbour_replay_for_every_prior(name, prior):
    result = dpbnn.replay(
        lambda data: public(run(name, data, prior=prior)), dataset(), 3, trace=False
    )
    result.check()


@pytest.mark.parametrize("name", ["sgd", "sgld", "bbp", "mcdropout"])
def test_neighbour_replay_with_the_trace_of_calls(name):
    dpbnn.replay(lambda data: public(run(name, data)), dataset(), 3).check()


@pytest.mark.parametrize("name", list(METHODS))
def test_update_sees_the_release_and_nothing_else(name):
    method, dropout = METHODS[name]
    problem = Problem(
        method.prepared(net(3, dropout)()), Categorical(), dpbnn.Gaussian(1.0), N, 8, 5, True
    )
    process = method.start(problem)
    assert isinstance(process, Process)
    assert list(inspect.signature(process.update).parameters) == ["state", "release"]
    x, y = dataset()
    state = step(process, process.begin(), dpbnn.Gate(1.0, 1.0), x, y)
    assert isinstance(state, State)
    assert_holds_no_data((process, state), x, y)


def in_an_attribute(process, x):
    process.x = x


def in_a_list_of_an_object(process, x):
    process.problem.likelihood.__dict__["cache"] = [{"batch": x}]


def in_a_closure(process, x):
    process.attached.again = lambda: x


def as_rows_of_a_larger_tensor(process, x):
    process.settings.__dict__["cache"] = torch.cat([torch.zeros(7, 4), x])


@pytest.mark.parametrize(
    "hide", [in_an_attribute, in_a_list_of_an_object, in_a_closure, as_rows_of_a_larger_tensor]
)
def test_data_that_a_process_hides_is_found(hide):
    method = dpbnn.SGD()
    problem = Problem(net(3)(), Categorical(), dpbnn.Gaussian(1.0), N, 8, 5, True)
    process = method.start(problem)
    x, y = dataset()
    assert_holds_no_data(process, x, y)
    hide(process, x)
    with pytest.raises(AssertionError, match="is held"):
        assert_holds_no_data(process, x, y)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_process_goes_on_from_its_state(name):
    method, dropout = METHODS[name]
    x, y = dataset()

    def start():
        torch.manual_seed(0)
        model = method.prepared(net(3, dropout)())
        problem = Problem(model, Categorical(), dpbnn.Gaussian(1.0), N, N, 6, True)
        return method.start(problem)

    def advance(process, state, steps, seed):
        torch.manual_seed(seed)
        gate = dpbnn.Gate(1.0, 0.0)
        for _ in range(steps):
            state = step(process, state, gate, x, y)
        return state

    whole = start()
    state = advance(whole, whole.begin(), 3, 1)
    saved = flat(state)
    state = advance(whole, state, 3, 2)
    other = start()
    found = advance(other, other.resumed(other.begin(), saved), 3, 2)
    assert flat(found).keys() == flat(state).keys()
    for name, value in flat(found).items():
        assert torch.equal(value, flat(state)[name]), name
    for (key, a), b in zip(
        whole.model.state_dict().items(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", list(METHODS))
def test_the_same_code_trains_without_privacy_and_says_so(name):
    method, dropout = METHODS[name]
    plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=3)
    posterior = dpbnn.fit(net(3, dropout), dataset(), "categorical", None, method, plan)
    assert "NOT PRIVATE" in str(posterior.privacy)
    assert posterior.predict(dataset()[0], samples=3).mean.shape == (N, 3)


@pytest.mark.parametrize("name", list(METHODS))
def test_every_posterior_is_saved_and_loaded_with_its_statement(name, tmp_path):
    posterior = run(name, dataset())
    posterior.save(tmp_path / "run")
    again = dpbnn.load(tmp_path / "run")
    x, _ = dataset()
    assert torch.equal(again.predict(x, seed=1).mean, posterior.predict(x, seed=1).mean)
    assert again.privacy == posterior.privacy
    assert again.privacy.private


@pytest.mark.parametrize("name", ["sgd", "sgld", "bbp", "vi", "mcdropout"])
def test_convolutions_train_too(name):
    method, _ = METHODS[name]
    layers = [nn.Conv2d(1, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(27, 2))
    x, y = torch.randn(N, 1, 8, 8), torch.randint(0, 2, (N,))
    plan = dpbnn.plan(noise_multiplier=3.0, delta=1e-3, n=N, batch_size=8, steps=3)
    posterior = dpbnn.fit(model, (x, y), "categorical", dpbnn.Gaussian(1.0), method, plan)
    assert posterior.predict(x, samples=2).mean.shape == (N, 2)


def test_polyak_averaging_is_the_mean_of_the_last_half():
    method = dpbnn.SGD(learning_rate=0.1, average="polyak")
    model = nn.Linear(4, 3)
    problem = Problem(model, Categorical(), dpbnn.Flat(), N, N, 6, True)
    process = method.start(problem)
    state, seen = process.begin(), []
    for _ in range(6):
        release = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        state = process.update(state, release)
        seen.append(model.weight.detach().clone())
    torch.testing.assert_close(process.final(state).weight, torch.stack(seen[3:]).mean(0))


def test_the_prior_is_scaled_by_the_library():
    """With zero releases, SGD decays by lr/(n std^2) and BBP's KL is over n."""
    model = nn.Linear(4, 3)
    problem = Problem(model, Categorical(), dpbnn.Gaussian(0.1), 1000, 10, 1, True)
    before = model.weight.detach().clone()
    process = dpbnn.SGD(learning_rate=0.5).start(problem)
    release = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    process.update(process.begin(), release)
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.5 * 100 / 1000))


@pytest.mark.parametrize("name", ["sgd", "mcdropout", "sgld", "bbp", "vi"])
def test_a_learned_noise_does_not_have_the_prior_of_the_weights(name):
    """A release of 0 leaves priors: N(0, 0.1^2) of weights, and N(0, 1) of a log-variance."""
    method, dropout = METHODS[name]
    noise = SlopedNoise(1, log_variance=-2.0)
    model = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 1), noise)
    problem = Problem(
        method.prepared(model), HeteroscedasticGaussian(), dpbnn.Gaussian(0.1), 100, 10, 1, True
    )
    process = method.start(problem)
    state = process.draw(process.begin())
    before = {key: value.detach().clone() for key, value in state.parameters.items()}
    x, y = dataset("learned")
    release = process.contribute(state, x, y).weighted_sum(torch.zeros(N))
    if name == "sgld":
        after = process.update(state, release).parameters
        pull = {key: (old - after[key]) / (1e-3 / 2) for key, old in before.items()}
    else:
        pull = {key: 100 * value for key, value in process.gradient(state, release).items()}
    for key, old in before.items():
        if not key.endswith(("rho", "bias_mu")):
            expected = (1 if "2." in key else 100) * old.to(pull[key])
            torch.testing.assert_close(pull[key].detach(), expected, rtol=1e-3, atol=1e-3)


def test_a_narrow_prior_of_weights_does_not_widen_intervals():
    """200 targets of noise 0.1 and no function; N(0, 0.05^2) of log s^2 would say 0.6 or more."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 4, generator=rng), 0.1 * torch.randn(200, generator=rng)
    plan = dpbnn.open_plan(n=200, sampling="full-batch", steps=300)
    method = dpbnn.SGD(learning_rate=0.05, optimizer="adam", schedule="linear")
    found = dpbnn.fit(
        lambda: nn.Linear(4, 1), (x, y), GaussianNoise(None), dpbnn.Gaussian(0.05), method, plan
    )
    std = float(found.predict(x[:1]).variance.sqrt())
    assert 0.08 < std < 0.13


def test_dropout_precision_and_weight_decay_invert_each_other():
    decay = dpbnn.dropout_weight_decay(0.01, 4.0, 0.5, 1000)
    assert decay == pytest.approx(0.5 * 0.01**2 / (2 * 4.0 * 1000))
    assert dpbnn.dropout_precision(0.01, decay, 0.5, 1000) == pytest.approx(4.0)


def test_a_method_that_the_model_cannot_take_says_so():
    plan = dpbnn.open_plan(n=N, sampling="full", steps=1)
    with pytest.raises(ValueError, match=r"torch.nn.Dropout\(0.5\)"):
        dpbnn.fit(net(3), dataset(), "categorical", None, dpbnn.MCDropout(), plan)
    with pytest.raises(ValueError, match="Linear or Conv2d"):
        dpbnn.fit(nn.Sequential(nn.LayerNorm(4)), dataset(), "categorical", None, dpbnn.BBP(), plan)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dpbnn.SGD(learning_rate=-1.0), "learning_rate=-1"),
        (lambda: dpbnn.SGD(clip=0.0), "clip=0"),
        (lambda: dpbnn.SGD(optimizer="lion"), "optimizer='lion'"),
        (lambda: dpbnn.SGD(schedule="steps"), "schedule='steps'"),
        (lambda: dpbnn.SGD(average=2.0), "average=2"),
        (lambda: dpbnn.SGD(momentum=1.0), "momentum=1"),
        (lambda: dpbnn.MCDropout(precision=math.nan), "precision=nan"),
        (lambda: dpbnn.SGHMC(friction=0.0), "friction=0"),
    ],
)
def test_bad_settings_say_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()
