"""Steps that are captured in CUDA graphs: padded batches, what is refused, replays.

Without a GPU graphs are those of `fake_graphs.py`, which replay Python.
"""

import dataclasses
import math
import os
import random
import signal
import warnings

import broken_versions as broken
import numpy as np
import pytest
import torch
from fake_graphs import install
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from twins import fails_on, twins_of

import dpbnn
from dpbnn import captured, training
from dpbnn.captured import CapturedStep, Replays, capacity
from dpbnn.contributions import UnsupportedModel
from dpbnn.likelihoods import Categorical
from dpbnn.methods.method import Problem
from dpbnn.methods.sgd import SGDProcess
from dpbnn.privacy import noise
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.sampling import FixedSize, Partition, Poisson

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
N = 300
generator = torch.Generator().manual_seed(0)
X = torch.rand(N, 6, generator=generator)
Y = torch.randint(0, 3, (N,), generator=generator)


def network(dropout=0.0):
    return dpbnn.mlp(6, (9, 8), 3, dropout=dropout)


def started(model, x, kept=None, method=None, limit=None):
    """Return a captured step on the CPU, its process and its state."""
    method = method or dpbnn.SGD()
    process = method.start(Problem(model, Categorical(), dpbnn.Gaussian(1.0), N, 20, 50, True))
    state = process.begin()
    like = process.contribute(process.draw(state), x[:0], Y[:0])
    sampler = Poisson(N, 20)
    return CapturedStep(process, state, like, (x, Y, kept), sampler, limit), process, state


def silent():
    gate = Gate(0.7, 1.0, noise=NoiseSource.seeded(0))
    gate._noised = lambda sums, sigma: {name: value.clone() for name, value in sums.items()}
    return gate


@pytest.mark.parametrize("size", [0, 1, 20, 24, 25, 48, 70, 299])
@pytest.mark.parametrize("limit", [None, 7])
def test_a_padded_batch_has_the_sum_of_the_batch(size, limit, monkeypatch):
    """Record 0 stands for the padding: here it is not finite, and not in the batch.

    Batches above the capacity are summed in parts; none of their records is lost.
    """
    monkeypatch.setattr(captured, "_EAGER", 1000)
    monkeypatch.setattr(captured, "_AHEAD", 3)
    x = X.clone()
    x[0] = torch.nan
    kept = torch.arange(N) % 5 > 0
    torch.manual_seed(0)
    step, process, state = started(network(), x, kept, limit=limit)
    assert (step.capacity, step.more) == ((limit, limit) if limit else (24, 8))
    batches = [torch.randperm(N - 1)[: max(0, size - i)] + 1 for i in range(5)]
    for batch in step.ahead(iter(batches)):
        found = silent()(step.load(batch, state), records=batch)
        ordinary = process.contribute(state, x[batch], Y[batch])
        wanted = silent()(ordinary, keep=kept[batch])
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)
    assert not step._waiting


@pytest.mark.parametrize("method", [dpbnn.BBP(learning_rate=0.1), dpbnn.VI(learning_rate=0.1)])
def test_all_parts_of_a_batch_see_the_same_weights(method, monkeypatch):
    """The update gets one draw; a part at another draw would make its gradient a wrong one."""
    monkeypatch.setattr(captured, "_EAGER", 1000)
    model = dpbnn.networks.to_gaussian(network())
    step, process, state = started(model, X, method=method)
    batch = next(step.ahead(iter([torch.arange(70)])))
    found = silent()(step.load(batch, state), records=batch)
    drawn = dataclasses.replace(state, drawn=step.drawn)
    wanted = silent()(process.contribute(drawn, X[batch], Y[batch]))
    other = silent()(process.contribute(process.draw(state), X[batch], Y[batch]))
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)
    assert any((wanted[name] - other[name]).abs().max() > 1e-3 for name in wanted)


@fails_on(6, broken.large_batches_lose_their_rest)
def test_item_6_no_record_of_a_large_batch_is_lost():
    """The accountant knows of no truncation."""
    step, process, state = started(network(), X)
    batch = next(step.ahead(iter([torch.arange(30)])))
    found = silent()(step.load(batch, state), records=batch)
    wanted = silent()(process.contribute(state, X[batch], Y[batch]))
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_parts_have_room_for_most_batches():
    assert capacity(Poisson(N, 20), N) == 24
    assert capacity(Poisson(60_000, 256), 60_000) == 288
    assert capacity(FixedSize(N, 20), N) == 24
    assert capacity(Partition(N, 150), N) == 152
    assert capacity(Poisson(10, 9), 10) == 10


def test_an_audit_can_leave_a_record_out(monkeypatch):
    monkeypatch.setattr(captured, "_EAGER", 1000)
    step, process, state = started(network(), X)
    batch = torch.arange(60)
    next(step.ahead(iter([batch])))
    gate, keep = silent(), batch % 3 > 0
    step.load(batch, state)
    gate._precision = gate._precision_of(step, 1.0)
    found = gate._summed(step, keep, [])
    wanted = silent()(process.contribute(state, X[batch], Y[batch]), keep=keep)
    for name in wanted:
        torch.testing.assert_close(found[name].float(), wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tampers", [False, True])
def test_a_network_that_writes_to_its_weights_is_refused(tampers):
    """The attack: during replays no Python looks, so the device itself must note it."""
    step, process, state = started(network(), X)
    weight, contribute = next(iter(state.parameters.values())), process.contribute

    def writes(*arguments):
        weight.data[0] += 1.0  # torch's version counters do not see it
        return contribute(*arguments)

    process.contribute = writes if tampers else contribute
    batch = torch.arange(20)
    next(step.ahead(iter([batch])))
    if tampers:
        with pytest.warns(RuntimeWarning, match="writes to a tensor that it keeps"):
            silent()(step.load(batch, state), records=batch)
        with pytest.raises(UnsupportedModel, match="changes its parameter"):
            step.check()
    else:
        silent()(step.load(batch, state), records=batch)
        step.check()


def test_work_that_cannot_be_captured_runs_as_it_is_and_says_so_once(monkeypatch):
    def refuse(self, work, looking):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Replays, "_captured", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    replays, ran = Replays(), []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(10):
            assert replays("key", lambda: ran.append(0) or len(ran)) == len(ran)
    assert len(ran) == 10
    assert len(found) == 1
    assert "cannot be captured" in str(found[0].message)


def test_a_replay_is_of_the_same_key_and_the_same_tensors(monkeypatch):
    class Graph:
        def replay(self):
            played.append(self)

    monkeypatch.setattr(Replays, "_captured", lambda self, work, looking: (Graph(), work()))
    replays, played, ran = Replays(), [], []
    one, two = torch.zeros(3), torch.zeros(3)
    for key, tensor in [("a", one)] * 5 + [("a", two)] * 2 + [("b", one)] * 2:
        replays(key, lambda: ran.append(0), tensor)
    assert (len(ran), len(played), replays.count) == (3 + 2 + 2, 3, 1)
    for replays._refused in (False, True):
        for key in range(500):
            replays(key, lambda: ran.append(0))
        assert len(replays._seen) <= 65


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: np.random.rand(), lambda: torch.rand(1)],  # noqa: NPY002
)
def test_numbers_drawn_on_the_cpu_are_noticed(draw):
    before = captured._host_generators()
    assert captured._host_generators() == before
    draw()
    assert captured._host_generators() != before


# Replays


def fitted(method, make=network, *, device="cuda", steps=12, capture=True, watch=None, **options):
    """Return the parameters after a run, and the run."""
    runs, train, once = [], training._Run.train, training._Run._captured

    def noted(run, progress):
        runs.append(run)
        train(run, progress)

    plan = dpbnn.plan(noise_multiplier=1.3, delta=1e-5, n=N, batch_size=40, steps=steps)
    options = {"debug_seed": 1, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training._Run, "train", noted)
        if device == "cpu":
            install(patch)
        if not capture:
            patch.setattr(training._Run, "_captured", lambda run: None)
        if watch is not None:
            watch(patch)
        dpbnn.fit(make, (X, Y), method=method, plan=plan, device=device, progress=False, **options)
    assert once is training._Run._captured
    return {n: p.detach().clone() for n, p in runs[0].state.parameters.items()}, runs[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.blocks(self.first(x.view(-1, 3, 2))).mean(1))


class Convolution(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(),
            nn.Flatten(), nn.Linear(16, 3),
        )  # fmt: skip


METHODS = {
    "sgd": (dpbnn.SGD(learning_rate=0.1, momentum=0.9), network, 2),
    "averaged": (dpbnn.SGD(learning_rate=0.1, average="polyak"), network, 2),
    "adam": (dpbnn.SGD(learning_rate=0.01, optimizer="adam"), network, 1),
    "schedule": (dpbnn.SGD(learning_rate=0.01, schedule="cosine"), network, 1),
    "sgld": (dpbnn.SGLD(learning_rate=1e-3, keep=3), network, 2),
    "sghmc": (dpbnn.SGHMC(learning_rate=1e-3, keep=3), network, 2),
    "bbp": (dpbnn.BBP(learning_rate=0.1), network, 2),
    "paper": (dpbnn.BBP.paper(draws=2, kl_weight=None), network, 2),
    "vi": (dpbnn.VI(learning_rate=0.1), network, 2),
    "encoder": (dpbnn.SGD(learning_rate=0.1), Encoder, 2),
    "convolution": (dpbnn.SGD(learning_rate=0.1), Convolution, 2),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [None, 16])
@pytest.mark.parametrize("name", METHODS)
def test_a_captured_run_ends_where_an_ordinary_one_does(name, limit, device):
    """With a limit all batches are summed in several parts, by one graph more."""
    method, make, graphs = METHODS[name]
    graphs += limit is not None
    torch.backends.cudnn.conv.fp32_precision, before = "ieee", "tf32"
    try:
        options = {"microbatch_size": limit, "device": device}
        found, run = fitted(method, make, **options)
        wanted, _ = fitted(method, make, capture=False, **options)
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert run.captured.replays.count >= graphs
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-4, atol=2e-6)


def released(device, watch=None, steps=30):
    """Return what every step of a captured run adds to its sums."""
    found, noised = [], Gate._noised

    def note(gate, sums, sigma):
        before = {name: value.clone() for name, value in sums.items()}
        after = noised(gate, sums, sigma)
        found.append(torch.cat([(after[n] - before[n]).flatten() for n in before]))
        return after

    def both(patch):
        patch.setattr(Gate, "_noised", note)
        if watch is not None:
            watch(patch)

    make = lambda: dpbnn.mlp(6, (60, 60), 3)  # noqa: E731
    _, run = fitted(dpbnn.SGD(), make, device=device, steps=steps, watch=both, debug_seed=None)
    assert run.captured.replays.count >= 2
    return torch.stack(found).double().cpu()


def repeats(found):
    """Whether two steps share noise; of independent ones, less often than once in 10^9 runs."""
    correlations = torch.corrcoef(found).fill_diagonal_(0).abs()
    return bool(correlations.max() > 8 / found.shape[1] ** 0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_no_two_replays_share_their_noise(device):
    found = released(device)
    assert abs(float(found.std()) / 1.3 - 1) < 0.02
    assert not repeats(found)


@gpu
def test_noise_of_a_key_that_never_changes_would_be_seen():
    def baked(patch):
        original = noise.add_noise
        patch.setattr(
            noise, "add_noise", lambda flat, std, dtype, key: original(flat, std, dtype, bytes(32))
        )

    assert repeats(released("cuda", baked))


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_masks_differ_from_step_to_step_and_resume_as_they_were(tmp_path, device):
    make = lambda: network(dropout=0.5)  # noqa: E731
    method, given = dpbnn.MCDropout(learning_rate=0.5), {"steps": 24, "device": device}
    whole, run = fitted(method, make, out=tmp_path / "whole", checkpoint_every=10, **given)
    assert run.captured.replays.count >= 2

    def stops(patch):
        once = training._Run._replayed

        def interrupted(run, *arguments):
            if run.step == 17:
                raise MemoryError
            once(run, *arguments)

        patch.setattr(training._Run, "_replayed", interrupted)

    def interrupts(patch):
        once = training._Run._replayed

        def interrupted(run, *arguments):
            once(run, *arguments)
            if run.step == 17:
                os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C

        patch.setattr(training._Run, "_replayed", interrupted)

    def breaks(patch):
        once = Gate._noised

        def broken(gate, *arguments):
            if gate.step == 18:
                raise OSError  # between the sum and its noise
            return once(gate, *arguments)

        patch.setattr(Gate, "_noised", broken)

    for error, watch in [(MemoryError, stops), (OSError, breaks), (KeyboardInterrupt, interrupts)]:
        out = tmp_path / error.__name__
        with pytest.raises(error):
            fitted(method, make, out=out, checkpoint_every=10, watch=watch, **given)
        again, _ = fitted(method, make, out=out, resume=True, **given)
        for key in whole:
            torch.testing.assert_close(again[key], whole[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sgd", "sgld", "bbp", "encoder"])
def test_neighbours_are_as_far_apart_as_the_sensitivity_through_captured_steps(name, device):
    method, make, _ = METHODS[name]
    plan = dpbnn.plan(noise_multiplier=1.3, delta=1e-5, n=N, batch_size=150, steps=8)
    counts, once = [], CapturedStep.check

    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            install(patch)
        patch.setattr(
            CapturedStep, "check", lambda step: (counts.append(step.replays.count), once(step))
        )
        found = dpbnn.replay(method, (X, Y), 7, model=lambda: make().to(device), plan=plan)
    assert max(counts) >= 1
    assert found.passed, found
    assert max(found.distances) > 0


@gpu
def test_the_loop_waits_for_nothing():
    seen = []

    def strict(patch):
        once = training._Run._replayed

        def checked(run, batch, step):
            all_graphs = step.replays.count >= 4 or len(batch) <= step.capacity
            replayed = step.replays.count >= 2 and all_graphs and not step.by_python
            strict = replayed and run.step < 136  # then iterates are stored
            torch.cuda.set_sync_debug_mode("error" if strict else "default")
            try:
                once(run, batch, step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            seen.append(strict)

        patch.setattr(training._Run, "_replayed", checked)

    for name in ("sgd", "sgld", "bbp"):
        method, make, _ = METHODS[name]
        seen.clear()
        fitted(method, make, steps=140, watch=strict)
        assert sum(seen) > 80


class Compiled(nn.Module):
    """Has to be compiled, as flex attention does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("torch.compile with fullgraph=True found no compiled frames")
        return self.layer(x)


@pytest.mark.parametrize("device", DEVICES)
def test_a_network_that_cannot_be_looked_at_runs_as_it_is(device):
    """It is found out on made-up records, before anything is spent."""
    with pytest.warns(RuntimeWarning, match="does not run while one looks"):
        found, run = fitted(dpbnn.SGD(), Compiled, device=device)
    wanted, _ = fitted(dpbnn.SGD(), Compiled, device=device, capture=False)
    assert run.captured is None
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        y = self.layer(x)
        return y * 2 if bool((y > 1e9).any()) else y


class Chance(Branches):
    def forward(self, x):
        return self.layer(x) * (1 + float(torch.rand(())))


@gpu
@pytest.mark.parametrize("make", [Branches, Chance])
def test_a_network_that_cannot_be_captured_is_trained_all_the_same(make):
    with pytest.warns(RuntimeWarning, match="cannot be captured") as found:
        parameters, run = fitted(dpbnn.SGD(learning_rate=0.1), make)
    assert len(found) == 1
    assert run.captured.replays.count == 0
    wanted, _ = fitted(dpbnn.SGD(learning_rate=0.1), make, capture=False)
    if make is Branches:
        for key in wanted:
            torch.testing.assert_close(parameters[key], wanted[key], rtol=1e-4, atol=1e-6)


@gpu
def test_many_steps_leave_the_memory_as_it_was():
    used = {}

    def measured(patch):
        once = training._Run._replayed

        def noted(run, *arguments):
            once(run, *arguments)
            used[run.step] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

        patch.setattr(training._Run, "_replayed", noted)

    _, run = fitted(dpbnn.SGD(), steps=10_000, watch=measured)
    assert run.captured.replays.count > 2  # also of batches above the capacity
    assert used[9_990][0] <= used[500][0] + 2**16
    assert used[9_990][1] <= used[500][1] + 2**21


class Own(nn.Module):
    """A network of a user: code of its own, an activation that is a function, a constant."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.activation = lambda x: x.relu()

    def forward(self, x):
        hidden = self.activation(self.first(x)) * self.scale
        hidden = hidden.clone().mul_(0.5)  # of what is its own
        return self.last(hidden + x.mean(1, keepdim=True))


class _Theirs(Categorical):
    """A likelihood of a user."""

    def nll(self, output, target):
        return super().nll(output, target) * 1.0


KEPT = {}


class Remembers(Own):
    """Keeps a mean of what it has seen where no state of a module shows it, from a call on.

    Had it begun before the training, the probe would have found that examples are mixed.
    """

    after = math.inf

    def forward(self, x):
        kept = KEPT.setdefault(x.device, torch.zeros(6, device=x.device))
        KEPT["calls"] = KEPT.get("calls", 0) + 1
        if KEPT["calls"] > self.after:
            kept.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x + kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("likelihood", ["categorical", _Theirs()], ids=["ours", "theirs"])
def test_networks_of_a_user_are_captured(device, likelihood):
    found, run = fitted(dpbnn.SGD(), Own, device=device, likelihood=likelihood)
    wanted, _ = fitted(dpbnn.SGD(), Own, device=device, likelihood=likelihood, capture=False)
    assert "sums" in {key[0][0] for key in run.captured.replays._graphs}
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-4, atol=2e-6)


def _remembers(device, steps):
    """Run a network that begins to write after some steps."""
    KEPT.clear()
    fitted(dpbnn.SGD(), Remembers, device=device, capture=False, steps=steps + 1)
    last = KEPT["calls"] - 1
    KEPT.clear()
    with pytest.warns(RuntimeWarning, match="writes to a tensor that it keeps"):
        _, run = fitted(dpbnn.SGD(), type("Late", (Remembers,), {"after": last}), device=device)
    assert not any(key[0][0] == "sums" for key in run.captured.replays._graphs)


@fails_on(33, broken.writes_are_not_seen, device="cpu")
@pytest.mark.parametrize("device", DEVICES)
def test_item_33_what_would_write_in_replays_is_not_captured(device):
    """The attack: a graph repeats the write, and no version counter and no Python shows it."""
    _remembers(device, 0)


@gpu
def test_a_write_that_begins_at_the_capture_is_seen():
    _remembers("cuda", captured._EAGER)


@pytest.mark.parametrize("device", DEVICES)
def test_a_buffer_that_is_written_to_is_refused(device):
    class Running(Own):
        def forward(self, x):
            self.scale.add_(0.01)
            return super().forward(x)

    with pytest.raises(UnsupportedModel, match="changes its buffer"):
        fitted(dpbnn.SGD(), Running, device=device)


class Kept(SGDProcess):
    """Averages the releases that it has kept, with a step size that it counts on the host."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kept = []

    def gradient(self, state, release):
        self.kept = [*self.kept, release][-3:]
        count = (1 + state.steps) * len(self.kept)
        return {n: sum(own[n] for own in self.kept) / count for n in state.parameters}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keeps(dpbnn.SGD):
    def start(self, problem):
        return Kept(self, problem, problem.attach())


@pytest.mark.parametrize("device", DEVICES)
def test_a_method_of_a_user_may_keep_releases_and_count_steps(device):
    """Replayed sums are written over one another, and what Python counts is not replayed."""
    method = Keeps(learning_rate=0.1)
    found, run = fitted(method, device=device)
    wanted, _ = fitted(method, device=device, capture=False)
    assert run.captured.replays.count >= 1
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_what_an_optimizer_calls_is_called_in_every_step(device):
    called = []

    def optimizer(parameters, lr):
        made = torch.optim.SGD(parameters, lr=lr)
        made.register_step_post_hook(lambda *_: called.append(1))
        return made

    method = dpbnn.SGD(optimizer=optimizer)
    _, run = fitted(method, device=device, watch=lambda _: called.clear())
    assert len(called) >= 12
    assert {key[0][0] for key in run.captured.replays._graphs} <= {"sums", "more"}


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
