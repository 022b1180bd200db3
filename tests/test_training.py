"""fit(): bad input, interrupts, resumes, and what a run may show."""

import ast
import errno
import inspect
import json
import math
import os
import secrets
import shutil
import textwrap
import threading

import pytest
import torch
from interruption import stop_after
from torch import nn

import dpbnn
from dpbnn.data.standardising import Standardisation
from dpbnn.estimators.public_inputs import PublicInputs
from dpbnn.privacy.gate import Gate

N, STEPS = 40, 12


def dataset():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def plan(**change):
    arguments = {"noise_multiplier": 2.0, "delta": 1e-5, "n": N, "batch_size": 10, "steps": STEPS}
    return dpbnn.plan(**{**arguments, **change})


METHODS = {
    "sgd": dpbnn.SGD(learning_rate=0.5, momentum=0.5, schedule="cosine", average="polyak"),
    "adam": dpbnn.SGD(learning_rate=0.05, optimizer="adam"),
    "path": dpbnn.SGD(learning_rate=0.05, optimizer="adam", schedule="linear", keep=6),
    "bands": dpbnn.SGD(
        learning_rate=0.05,
        optimizer="adam",
        keep=6,
        inputs=PublicInputs(Standardisation.public(4), 4.0),
    ),
    "sgld": dpbnn.SGLD(learning_rate=1e-3, keep=6),
    "sghmc": dpbnn.SGHMC(learning_rate=1e-3, keep=6, thin=2),
    "bbp": dpbnn.BBP(learning_rate=0.5),
    "mcdropout": dpbnn.MCDropout(learning_rate=0.5),
    "noiseaware": dpbnn.NoiseAware(points=50, chains=2, iterations=12, keep=8),
}


def fit(name="sgd", data=None, **options):
    method = METHODS[name]
    model = lambda: dpbnn.mlp(4, (5,), 3, dropout=0.3)  # noqa: E731
    arguments = {"prior": dpbnn.Gaussian(1.0), "method": method, "plan": plan()}
    return dpbnn.fit(model, data or dataset(), **{**arguments, **options})


def weights(posterior):
    tensors = [v.flatten() for v in posterior.model.state_dict().values()]
    for part in ("std", "deviations"):
        tensors += [v.flatten() for v in getattr(posterior, part, {}).values()]
    if hasattr(posterior, "iterates"):
        store = posterior.iterates
        tensors += [v.flatten() for v in store.read(list(range(len(store)))).values()]
    return torch.cat(tensors)


@pytest.fixture
def fixed_keys(monkeypatch):
    """The same keys in every run, so that runs can be compared bit by bit."""
    monkeypatch.setattr(secrets, "token_bytes", lambda n=32: bytes(range(n)))


class TestItem13Resume:
    """Noise is repeated after a resume, or the resumed run is another one."""

    @pytest.mark.parametrize("name", list(METHODS))
    @pytest.mark.parametrize("after", [4, 7, STEPS])
    def test_with_its_keys_a_resumed_run_equals_the_uninterrupted_one(
        self, tmp_path, monkeypatch, fixed_keys, name, after
    ):
        whole = fit(name, out=tmp_path / "whole")
        with monkeypatch.context() as patch:
            stop_after(after, patch)
            with pytest.raises(KeyboardInterrupt):
                fit(name, out=tmp_path / "run", checkpoint_every=3)
        resumed = fit(name, out=tmp_path / "run", checkpoint_every=3, resume=True)
        assert torch.equal(weights(resumed), weights(whole))
        assert dpbnn.Ledger(tmp_path / "run" / "ledger.jsonl").releases == STEPS
        assert resumed.privacy.epsilon == pytest.approx(whole.privacy.epsilon)

    def test_without_its_keys_it_gets_new_ones_and_lost_steps_are_charged_again(
        self, tmp_path, monkeypatch
    ):
        with monkeypatch.context() as patch:
            stop_after(4, patch)
            with pytest.raises(KeyboardInterrupt):
                fit(out=tmp_path)
        (tmp_path / "keys.json").unlink()
        resumed = fit(out=tmp_path, resume=True)
        ledger = dpbnn.Ledger(tmp_path / "ledger.jsonl")
        assert ledger.releases == STEPS + STEPS - 4
        assert resumed.privacy.epsilon > plan().epsilon
        assert resumed.privacy.epsilon == pytest.approx(ledger.epsilon(1e-5))

    def test_going_on_twice_from_one_checkpoint_never_repeats_noise(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            stop_after(4, patch)
            with pytest.raises(KeyboardInterrupt):
                fit(out=tmp_path / "run")
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        (tmp_path / "copy" / "keys.json").unlink()
        first = fit(out=tmp_path / "run", resume=True)
        second = fit(out=tmp_path / "copy", resume=True)
        assert not torch.equal(weights(first), weights(second))
        assert not (tmp_path / "run" / "keys.json").exists()

    def test_keys_are_used_up_before_anything_is_released(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            stop_after(4, patch)
            with pytest.raises(KeyboardInterrupt):
                fit(out=tmp_path)
        there = []
        call = Gate.__call__
        monkeypatch.setattr(
            Gate,
            "__call__",
            lambda *a, **k: (there.append((tmp_path / "keys.json").exists()), call(*a, **k))[1],
        )
        fit(out=tmp_path, resume=True, checkpoint_every=100)
        assert there
        assert not any(there)

    def test_other_data_gets_no_noise_of_this_run(self, tmp_path, monkeypatch):
        """The same noise on other data would show the difference."""
        with monkeypatch.context() as patch:
            stop_after(4, patch)
            with pytest.raises(KeyboardInterrupt):
                fit(out=tmp_path)
        keys = json.loads((tmp_path / "keys.json").read_text())
        x, y = dataset()
        x[0] += 1
        with pytest.raises(ValueError, match=r"^data: not those of the run .* delete its keys"):
            fit(data=(x, y), out=tmp_path, resume=True)
        assert json.loads((tmp_path / "keys.json").read_text()) == keys
        (tmp_path / "keys.json").unlink()
        used = []
        from_key = dpbnn.NoiseSource.from_key
        monkeypatch.setattr(
            dpbnn.NoiseSource,
            "from_key",
            lambda key, *a, **k: (used.append(key), from_key(key, *a, **k))[1],
        )
        posterior = fit(data=(x, y), out=tmp_path, resume=True)
        assert used[0].hex() != keys["noise"]
        assert posterior.privacy.epsilon > plan().epsilon

    def test_keys_are_for_the_owner_and_nowhere_else(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            stop_after(4, patch)
            with pytest.raises(KeyboardInterrupt):
                fit(out=tmp_path)
        assert (tmp_path / "keys.json").stat().st_mode & 0o077 == 0
        keys = json.loads((tmp_path / "keys.json").read_text())
        posterior = fit(out=tmp_path, resume=True)
        assert not (tmp_path / "keys.json").exists()
        posterior.save(tmp_path / "posterior")
        for path in tmp_path.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                for key in (keys["noise"], keys["sampling"]):
                    assert key.encode() not in content
                    assert bytes.fromhex(key) not in content

    def test_a_broken_resume_that_reuses_its_keys_is_seen(self, tmp_path, monkeypatch, fixed_keys):
        """Two runs with the same keys have the same noise: the comparison above can fail."""
        assert torch.equal(weights(fit()), weights(fit()))


@pytest.mark.parametrize("after", [1, 5, 11])
def test_an_interrupt_leaves_a_true_ledger(tmp_path, monkeypatch, after):
    stop_after(after, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        fit(out=tmp_path)
    assert dpbnn.Ledger(tmp_path / "ledger.jsonl").releases >= after


def test_resuming_with_other_settings_or_nothing_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="needs out="):
        fit(resume=True)
    with pytest.raises(FileNotFoundError, match="leave resume out"):
        fit(out=tmp_path / "empty", resume=True)
    with monkeypatch.context() as patch:
        stop_after(4, patch)
        with pytest.raises(KeyboardInterrupt):
            fit(out=tmp_path)
    with pytest.raises(FileExistsError, match="resume=True"):
        fit(out=tmp_path)
    with pytest.raises(ValueError, match="other settings"):
        fit("adam", out=tmp_path, resume=True)


def with_nan():
    x, y = dataset()
    x[3, 1] = math.nan
    return x, y


def with_label(value):
    x, y = dataset()
    y[5] = value
    return x, y


BAD = [
    (with_nan(), {"on_bad_rows": "show"}, r"1 row cannot be used, the first ones \[3\]"),
    (
        with_label(3),
        {"on_bad_rows": "show"},
        r"first ones \[5\]: labels must be whole numbers from 0 to 2",
    ),
    (with_label(-1), {"on_bad_rows": "show"}, r"first ones \[5\]"),
    (with_label(-1), {}, "1 row cannot be used: labels must be whole numbers from 0 to 2"),
    ((dataset()[0][:-1], dataset()[1]), {}, "plan with n=39"),
    ((torch.randn(N, 9), dataset()[1]), {}, r"inputs of shape \(9,\)"),
    ((dataset()[0], torch.randn(N, 2)), {"likelihood": "gaussian"}, "targets have 2 columns"),
    (dataset(), {"method": None}, "method and plan"),
    (dataset(), {"on_bad_rows": "drop"}, "on_bad_rows='drop'"),
    (dataset(), {"likelihood": "cauchy"}, "likelihood='cauchy'"),
    (dataset(), {"ledger": dpbnn.Ledger(relation="replace-one")}, "relation"),
]


@pytest.mark.parametrize(("data", "options", "message"), BAD)
def test_bad_input_is_refused_before_anything_is_spent(data, options, message):
    ledger = options.get("ledger") or dpbnn.Ledger()
    with pytest.raises((ValueError, TypeError), match=message):
        fit(data=data, **{"ledger": ledger, **options})
    assert ledger.releases == 0


class Centred(nn.Linear):
    """Subtracts the mean of the batch, which only a probe can see."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), "BatchNorm1d"),
        (Centred(4, 3), "other examples"),
    ],
)
def test_a_model_that_is_not_per_example_is_refused_before_anything_is_spent(model, message):
    ledger = dpbnn.Ledger()
    with pytest.raises(dpbnn.UnsupportedModel, match=message):
        dpbnn.fit(model, dataset(), method=METHODS["sgd"], plan=plan(), ledger=ledger)
    assert ledger.releases == 0


def test_a_full_disk_is_noticed_before_anything_is_spent(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    ledger = dpbnn.Ledger()
    with pytest.raises(OSError, match="No space left"):
        fit("sgld", ledger=ledger, out=tmp_path)
    assert ledger.releases == 0


def test_bad_rows_can_contribute_nothing():
    """The run equals, noise aside, one in which they were never drawn."""
    x, y = with_nan()
    y[5] = 99
    posterior = fit(data=(x, y), on_bad_rows="zero")
    assert weights(posterior).isfinite().all()
    quiet = dpbnn.open_plan(n=N, sampling="full", steps=3)
    bad = fit(data=(x, y), on_bad_rows="zero", plan=quiet, method=dpbnn.SGD(learning_rate=0.1))
    assert weights(bad).isfinite().all()


def test_a_budget_that_does_not_hold_the_run_stops_it_before_anything_is_spent():
    ledger = dpbnn.Ledger(epsilon=plan().epsilon * 1.1, delta=1e-5)
    fit(ledger=ledger)
    with pytest.raises(dpbnn.BudgetExceeded, match=r"12 more releases .* is left"):
        fit(ledger=ledger)
    assert ledger.releases == STEPS


def test_what_is_planned_beside_the_training_is_in_the_statement():
    statistics = dpbnn.plan(noise_multiplier=9.0, delta=1e-5, n=N, sampling="full", steps=1)
    joint = plan(beside=[statistics])
    posterior = fit(plan=joint)
    assert posterior.privacy.epsilon == pytest.approx(joint.epsilon)
    assert posterior.privacy.epsilon > fit().privacy.epsilon


def test_two_fits_on_one_ledger_compose():
    ledger = dpbnn.Ledger()
    first, second = fit(ledger=ledger), fit("adam", ledger=ledger)
    assert ledger.releases == 2 * STEPS
    assert second.privacy.epsilon > first.privacy.epsilon


def test_item_18_a_run_shows_nothing_that_was_not_released(capfd, caplog, tmp_path):
    """No loss, norm or clip fraction in the output, in the posterior or in its files."""
    posterior = fit(out=tmp_path / "run")
    streams = capfd.readouterr()
    assert streams.out == ""
    assert streams.err == ""
    assert not caplog.records
    posterior.save(tmp_path / "posterior")
    manifest = (tmp_path / "posterior" / "manifest.json").read_text().lower()
    for word in ("loss", "gradient", "norm_of", "fraction", "accuracy"):
        assert word not in manifest
    result = dpbnn.replay(
        lambda data: json.loads(json.dumps(fit(data=data).settings, default=str)), dataset(), 2,
        seed=1, trace=False,
    )  # fmt: skip
    assert not [d for d in result.differences if d.startswith("result")]


def test_item_30_the_statement_has_the_declared_number_of_tuning_runs():
    assert "not declared" in str(fit().privacy)
    text = " ".join(str(fit(tuning_runs=7).privacy).split())
    assert "7 tuning runs declared" in text
    assert "not part of epsilon" in text


def test_the_progress_bar_shows_steps_and_an_upper_bound_on_epsilon(capfd):
    fit(progress=True)
    shown = capfd.readouterr().err
    assert f"/{STEPS}" in shown
    assert "epsilon <=" in shown


def test_the_seed_controls_initialisation_and_not_the_noise():
    first, second = (
        dpbnn.fit(
            lambda: dpbnn.mlp(4, (5,), 3), dataset(), method=dpbnn.SGD(learning_rate=1e-9),
            plan=plan(), seed=seed,
        )
        for seed in (1, 1)
    )  # fmt: skip
    torch.testing.assert_close(weights(first), weights(second), atol=1e-4, rtol=0)
    assert not torch.equal(weights(fit(seed=1)), weights(fit(seed=1)))


def test_a_debug_seed_repeats_everything_and_says_so():
    first, second = fit(debug_seed=3), fit(debug_seed=3)
    assert torch.equal(weights(first), weights(second))
    assert "DEBUG: NOT PRIVATE" in str(first.privacy)


def test_the_users_model_is_left_as_it_was():
    model = dpbnn.mlp(4, (5,), 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dpbnn.fit(model, dataset(), method=METHODS["sgd"], plan=plan())
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


class Twice(nn.Module):
    """One layer under two names, another under two places of a Sequential, and dropout."""

    def __init__(self):
        super().__init__()
        self.a, inner = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b, self.inner = self.a, nn.Sequential(inner, nn.Tanh(), inner, nn.Dropout(0.2))
        self.c, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.c.bias = inner.bias

    def forward(self, x):
        return self.last(self.c(self.inner(self.b(torch.tanh(self.a(x))))))


SHARING = [METHODS[name] for name in METHODS if name != "bands"]  # whose layers are used once


@pytest.mark.parametrize("method", [*SHARING, dpbnn.VI(), dpbnn.BBP(space="parameters")], ids=str)
def test_a_module_that_is_used_twice_is_left_as_it_is_by_predictions(method):
    x, y = dataset()
    posterior = dpbnn.fit(Twice(), (x, y), method=method, plan=plan())
    before = {name: p.clone() for name, p in posterior.model.named_parameters()}
    first = posterior.predict(x, samples=5, seed=0).mean
    after = dict(posterior.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(posterior.predict(x, samples=5, seed=0).mean, first)


def test_a_tied_weight_is_drawn_once():
    posterior = dpbnn.fit(Twice(), dataset(), method=METHODS["sgld"], plan=plan())
    weights = {n: t[0] for n, t in posterior.iterates.read([5]).items()}
    expected = Twice().eval()
    with torch.no_grad():
        for name, value in weights.items():
            expected.get_parameter(name).copy_(value)
    found = posterior.outputs(dataset()[0], 6)[5]
    assert torch.allclose(found, expected(dataset()[0]), atol=1e-5)


def backbone():
    frozen = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
    frozen.requires_grad_(False)
    return nn.Sequential(frozen, nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))


@pytest.mark.parametrize("method", [*METHODS.values(), dpbnn.VI()], ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_a_frozen_backbone_in_evaluation_mode_is_trained_on(method, whole):
    model = backbone()
    (model if whole else model[0]).eval()
    posterior = dpbnn.fit(model, dataset(), method=method, plan=plan())
    after = posterior.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(after[name], value) == name.startswith("0.")


def test_a_frozen_backbone_in_training_mode_is_refused():
    with pytest.raises(dpbnn.UnsupportedModel, match=r"BatchNorm1d.*call \.eval\(\)"):
        dpbnn.fit(backbone(), dataset(), method=METHODS["sgd"], plan=plan())


class Attention(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.last = nn.Linear(4, 3)
        if frozen:
            self.encoder.eval().requires_grad_(False)

    def forward(self, x):
        return self.last(self.encoder(x[:, None])[:, 0])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("method", [METHODS["sgd"], METHODS["bbp"], dpbnn.VI()], ids=str)
def test_a_transformer_is_trained_off_its_fused_path(method, frozen):
    fused = torch.backends.mha.get_fastpath_enabled()
    posterior = dpbnn.fit(Attention(frozen), dataset(), method=method, plan=plan())
    assert posterior.predict(dataset()[0], samples=3).mean.shape == (N, 3)
    assert torch.backends.mha.get_fastpath_enabled() == fused


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"'0' \(LazyLinear\).*run the network once"),
        (lambda: torch.jit.script(nn.Linear(4, 3)), r"before torch\.jit"),
        (Locked, "Locked cannot be copied"),
    ],
)
@pytest.mark.parametrize("method", [METHODS["sgd"], METHODS["bbp"]], ids=str)
def test_a_network_that_cannot_be_trained_is_refused_in_one_line(make, message, method):
    ledger = dpbnn.Ledger()
    with pytest.raises(dpbnn.UnsupportedModel, match=message) as caught:
        dpbnn.fit(make(), dataset(), method=method, plan=plan(), ledger=ledger)
    assert "\n" not in str(caught.value)
    assert ledger.releases == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": torch.optim.LBFGS}, "optimizer=LBFGS: cannot take a step"),
        ({"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "schedule=ReduceLROnPlateau"),
    ],
)
def test_an_optimizer_that_needs_more_than_a_gradient_is_refused(settings, message):
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match=message):
        fit(ledger=ledger, method=dpbnn.SGD(**settings))
    assert ledger.releases == 0


def test_bad_rows_are_not_counted_where_the_number_of_records_is_secret():
    x, y = dataset()
    secret = plan(n=50, relation="add/remove")
    with pytest.raises(ValueError, match="some rows cannot be used") as caught:
        dpbnn.fit(nn.Linear(4, 3), (x, y + 7), method=METHODS["sgd"], plan=secret)
    assert str(N) not in str(caught.value)


def _handed_records(source):
    """The functions that get what `self.rows` gives, in a piece of code, by name."""
    tree = ast.parse(textwrap.dedent(source))
    inside = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for part in (p for given in call.args for p in ast.walk(given)):
            inside[part] = ast.unparse(call.func)
    given = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("self.rows.take(")
        for name in node.targets[0].elts[:2]
    }
    return {
        inside.get(node, "elsewhere")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in given)
        or (isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("self.x", "self.y"))
    }


def test_a_private_step_hands_records_to_contribute_alone():
    from dpbnn.open_training import OpenRun
    from dpbnn.training import _Run

    assert _handed_records(inspect.getsource(_Run)) == {"self.process.contribute"}
    assert _handed_records(inspect.getsource(OpenRun)) != {"self.process.contribute"}
