"""A new method is one file: it trains, resumes, is replayed, saved and named like the others."""

import secrets

import broken_versions as broken
import pytest
import torch
from interruption import stopped_after
from toy_method import SignDescent

import dpbnn
from dpbnn.checkpoint import RunFolder
from dpbnn.estimators.recipes import METHODS, Recipe
from dpbnn.methods.state import flat

N, STEPS = 60, 8


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator)
    return x, (x[:, 0] > 0).long()


def fit(**options):
    plan = dpbnn.plan(noise_multiplier=2.0, delta=1e-3, n=N, batch_size=20, steps=STEPS)
    return dpbnn.fit(
        lambda: dpbnn.mlp(3, (4,), 2), data(), method=SignDescent(), plan=plan, progress=False,
        **options,
    )  # fmt: skip


def interrupted(after, **options):
    """Begin a run and interrupt it after so many steps."""
    with stopped_after(after):
        fit(**options)


def weights(posterior):
    return torch.cat([p.detach().flatten() for p in posterior.model.parameters()])


def test_it_learns_under_a_plan_and_is_accounted_for():
    x, y = data()
    plan = dpbnn.plan(noise_multiplier=2.0, delta=1e-3, n=N, sampling="full-batch", steps=100)
    posterior = dpbnn.fit(
        lambda: dpbnn.mlp(3, (8,), 2), (x, y), prior=dpbnn.Flat(), method=SignDescent(), plan=plan
    )
    assert (posterior.predict(x).mean.argmax(1) == y).float().mean() > 0.8
    assert posterior.privacy.private
    assert posterior.privacy.epsilon == pytest.approx(plan.epsilon)


@pytest.mark.parametrize("after", [3, 6])
def test_it_resumes_bit_for_bit(tmp_path, monkeypatch, after):
    monkeypatch.setattr(secrets, "token_bytes", lambda n=32: bytes(range(n)))
    whole = fit(out=tmp_path / "whole")
    interrupted(after, out=tmp_path / "run")
    resumed = fit(out=tmp_path / "run", resume=True)
    assert torch.equal(weights(resumed), weights(whole))
    assert dpbnn.Ledger(tmp_path / "run" / "ledger.jsonl").releases == STEPS


def test_a_state_that_is_not_saved_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", lambda n=32: bytes(range(n)))
    whole = fit(out=tmp_path / "whole")
    interrupted(3, out=tmp_path / "run")

    def forgotten(original, self, device):
        checkpoint = original(self, device)
        found = [v for n, v in checkpoint.tensors.items() if "velocity" in n]
        assert sum(float(v.zero_().numel()) for v in found)
        return checkpoint

    broken.around(monkeypatch, RunFolder, "load", forgotten)
    assert not torch.equal(weights(fit(out=tmp_path / "run", resume=True)), weights(whole))


def test_replay_finds_no_way_around_the_gate():
    x, y = data()
    x[7] *= 100
    found = dpbnn.replay(SignDescent(clip=0.5), (x, y), 7, model=dpbnn.mlp(3, (4,), 2)).check()
    assert 0 < found.worst <= found.sensitivities[0] == 0.5


def test_what_it_leaves_is_saved_and_loaded(tmp_path):
    posterior = fit()
    posterior.save(tmp_path)
    again = dpbnn.load(tmp_path)
    x, _ = data()
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)
    assert again.settings["method"] == "sign"
    assert again.privacy == posterior.privacy


def test_estimators_take_its_name_after_one_line(monkeypatch):
    monkeypatch.setitem(METHODS, "sign", Recipe(SignDescent, 0.02, 0.02))
    x, y = data()
    fitted = dpbnn.PrivateBayesClassifier(
        method="sign", epsilon=20.0, delta=1e-3, bounds=(-4, 4), classes=[0, 1], random_state=0
    ).fit(x.numpy(), y.numpy())
    assert fitted.predict_proba(x.numpy()).shape == (N, 2)
    assert fitted.privacy_.epsilon <= 20.0


def test_its_whole_state_is_its_fields():
    problem = dpbnn.methods.Problem(
        dpbnn.mlp(3, (4,), 2), dpbnn.likelihoods.Categorical(), dpbnn.Flat(), N, 20, STEPS, True
    )
    names = set(flat(SignDescent().start(problem).begin()))
    parameters = [name for name, _ in problem.model.named_parameters()]
    assert names == {"steps"} | {f"{k}.{n}" for k in ("parameters", "velocity") for n in parameters}
