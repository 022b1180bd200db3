"""What every posterior promises."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod

import pytest
import torch
from torch import nn

from dpbnn import posteriors
from dpbnn.networks import mlp
from dpbnn.posteriors import evaluate


class Statement:
    """A privacy statement as a posterior sees it: opaque."""

    def to_dict(self):
        return {"epsilon": 1.5, "caveats": ("one", "two")}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def network(outputs=3, dropout=0.0):
    torch.manual_seed(0)
    return mlp(4, (6, 5), outputs, dropout=dropout, activation=nn.Tanh)


X = torch.randn(11, 4, generator=generator(5))


class PosteriorContract(ABC):
    """Inherit and implement `make`; `random` says whether draws depend on a seed."""

    random = True

    @abstractmethod
    def make(self, tmp_path, model=None, likelihood="categorical", **record):
        """Return a posterior of a small network (or of `model`)."""

    @pytest.fixture
    def posterior(self, tmp_path):
        return self.make(
            tmp_path,
            privacy=Statement(),
            prior={"class": "Gaussian", "arguments": {"std": 0.1}},
            settings={"learning_rate": 0.1},
        )

    @pytest.fixture
    def saved(self, posterior, tmp_path):
        posterior.save(tmp_path / "saved")
        return tmp_path / "saved"

    def test_predictions_survive_save_and_load_bit_by_bit(self, posterior, saved):
        loaded = posteriors.load(saved)
        assert type(loaded) is type(posterior)
        for samples in (1, 4, 100):
            before = posterior.outputs(X, samples, seed=3)
            assert torch.equal(loaded.outputs(X, samples, seed=3), before)
        again = saved.with_name("again")
        loaded.save(again)
        assert torch.equal(posteriors.load(again).outputs(X, seed=3), posterior.outputs(X, seed=3))

    def test_what_was_recorded_survives(self, posterior, saved):
        loaded = posteriors.load(saved)
        assert loaded.privacy == {"epsilon": 1.5, "caveats": ["one", "two"]}
        assert loaded.prior == {"class": "Gaussian", "arguments": {"std": 0.1}}
        assert loaded.settings == {"learning_rate": 0.1}
        assert loaded.likelihood == posterior.likelihood
        built = posteriors.load(saved, statement=lambda values: values["epsilon"])
        assert built.privacy == 1.5
        assert isinstance(posterior.privacy, Statement)

    def test_a_seed_repeats_the_draws(self, posterior):
        first = posterior.outputs(X, 20, seed=1)
        assert torch.equal(posterior.outputs(X, 20, seed=1), first)
        assert torch.equal(posterior.outputs(X, 20, generator=generator(1)), first)
        assert torch.equal(posterior.outputs(X, 20, seed=2), first) != self.random
        assert torch.equal(posterior.outputs(X, 20), posterior.outputs(X, 20)) != self.random

    def test_draws_do_not_touch_torchs_own_generator(self, posterior):
        state = torch.get_rng_state()
        posterior.predict(X, 5)
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("limits", [{"batch_size": 2}, {"memory_limit": 1}, {"batch_size": 99}])
    def test_chunks_do_not_change_the_result(self, posterior, limits):
        whole = posterior.outputs(X, 20, seed=1)
        assert torch.allclose(posterior.outputs(X, 20, seed=1, **limits), whole, atol=1e-6)
        some = posterior.outputs(X, 20, seed=1, memory_limit=3000)
        assert torch.allclose(some, whole, atol=1e-6)

    def test_the_vectorised_pass_equals_the_loop(self, posterior, monkeypatch):
        fast = posterior.outputs(X, 20, seed=1)
        monkeypatch.setattr(evaluate, "_BUSY", {"cpu": 0, "cuda": 0})
        assert torch.allclose(posterior.outputs(X, 20, seed=1), fast, atol=1e-6)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
    def test_a_gpu_gives_the_same(self, posterior, saved):
        here = posterior.outputs(X, 20, generator=generator(1))
        there = posteriors.load(saved, device="cuda")
        settings = torch.backends.cuda.matmul.fp32_precision
        exact = there.outputs(X, 20, generator=generator(1), precision="highest")
        assert torch.allclose(exact.cpu(), here, atol=1e-5)
        assert torch.allclose(there.outputs(X, 20, generator=generator(1)).cpu(), here, atol=0.02)
        assert torch.equal(there.outputs(X, 20, seed=1), there.outputs(X, 20, seed=1))
        chunks = there.outputs(X, 20, seed=1, memory_limit=3000, batch_size=3)
        assert torch.allclose(chunks, there.outputs(X, 20, seed=1), atol=1e-3)
        assert torch.backends.cuda.matmul.fp32_precision == settings
        there.save(saved.with_name("again"))
        assert torch.equal(
            posteriors.load(saved.with_name("again")).outputs(X, 20, seed=1),
            posterior.outputs(X, 20, seed=1),
        )

    def test_a_network_that_vmap_cannot_take_is_looped_over(self, tmp_path):
        class Reading(nn.Sequential):
            def forward(self, x):
                y = super().forward(x)
                return y if y.sum().item() < 1e9 else -y

        plain = self.make(tmp_path, model=network(dropout=0.5))
        (tmp_path / "other").mkdir()
        reading = self.make(tmp_path / "other", model=Reading(*network(dropout=0.5)))
        assert torch.allclose(reading.outputs(X, 5, seed=1), plain.outputs(X, 5, seed=1), atol=1e-6)

    def test_the_model_given_is_left_alone(self, tmp_path):
        model = network(dropout=0.5).train()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        posterior = self.make(tmp_path, model=model)
        posterior.predict(X, 3)
        assert model.training
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        with torch.no_grad():
            model[1].weight += 1
        assert not torch.equal(posterior.model[1].weight, model[1].weight)

    def test_the_predictive_fits_the_likelihood(self, tmp_path, posterior):
        assert torch.allclose(posterior.predict(X).mean.sum(-1), torch.ones(11))
        (tmp_path / "real").mkdir()
        real = self.make(tmp_path / "real", model=network(1, dropout=0.5), likelihood="gaussian")
        assert real.predict(X).mean.shape == (11,)
        assert (real.predict(X).variance >= 1).all()

    def test_inputs_may_be_arrays_of_another_dtype(self, posterior):
        assert torch.equal(
            posterior.outputs(X.double().numpy(), seed=1), posterior.outputs(X, seed=1)
        )

    def test_a_network_of_other_modules_needs_the_instance(self, tmp_path):
        class Other(nn.Sequential):
            pass

        model = Other(*network(dropout=0.5))
        posterior = self.make(tmp_path, model=model)
        posterior.save(tmp_path / "saved")
        with pytest.raises(ValueError, match=r"Other.*model=instance"):
            posteriors.load(tmp_path / "saved")
        fresh = Other(*mlp(4, (6, 5), 3, dropout=0.5, activation=nn.Tanh))
        loaded = posteriors.load(tmp_path / "saved", model=fresh)
        assert torch.equal(loaded.outputs(X, seed=1), posterior.outputs(X, seed=1))

    def test_another_network_is_refused(self, saved):
        with pytest.raises(ValueError, match=r"1\.weight: saved \(6, 4\), model \(7, 4\)"):
            posteriors.load(saved, model=mlp(4, (7, 5), 3))

    def test_a_file_that_was_changed_is_refused(self, saved):
        for path in saved.glob("*.safetensors"):
            original = path.read_bytes()
            path.unlink()
            path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
            with pytest.raises(ValueError, match=f"{path.name}.*sha256"):
                posteriors.load(saved)
            path.write_bytes(original)
        (saved / "model.safetensors").unlink()
        with pytest.raises(ValueError, match="lacks the file"):
            posteriors.load(saved)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 99}, "version 99.*Install"),
            ({"format": "else"}, "'else'"),
            ({"kind": "else"}, "kind 'else'"),
            ({"architecture": {"class": "system", "arguments": {}}}, "'system'.*model="),
            ({"likelihood": {"class": "Else"}}, "'Else'.*likelihood="),
        ],
    )
    def test_an_unknown_manifest_is_refused(self, saved, change, message):
        manifest = json.loads((saved / "manifest.json").read_text()) | change
        (saved / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=message):
            posteriors.load(saved)

    def test_nothing_is_overwritten_unasked(self, posterior, saved):
        with pytest.raises(FileExistsError, match="overwrite=True"):
            posterior.save(saved)
        posterior.save(saved, overwrite=True)
        (saved / "ledger.jsonl").write_text("precious")
        with pytest.raises(FileExistsError, match=r"ledger\.jsonl"):
            posterior.save(saved, overwrite=True)
        assert (saved / "ledger.jsonl").read_text() == "precious"
        posteriors.load(saved)

    def test_a_save_that_fails_leaves_nothing(self, posterior, tmp_path):
        posterior.settings["bad"] = object()
        with pytest.raises(TypeError):
            posterior.save(tmp_path / "failed")
        assert not [path for path in tmp_path.iterdir() if "failed" in path.name]

    def test_bad_arguments_are_refused(self, posterior):
        with pytest.raises(ValueError, match="samples=0"):
            posterior.predict(X, 0)
        with pytest.raises(ValueError, match="both"):
            posterior.predict(X, seed=1, generator=generator())
        with pytest.raises(ValueError, match="batch_size=0"):
            posterior.predict(X, batch_size=0)
        with pytest.raises(ValueError, match="at least one example"):
            posterior.predict(X[:0])
        with pytest.raises(ValueError, match="NaN"):
            posterior.predict(X * float("nan"))
