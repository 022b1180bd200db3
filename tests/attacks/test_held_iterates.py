"""No iterate lies on disk beside the key of its noise."""

import broken_versions as broken
import pytest
import torch
from twins import fails_on, twins_of

import dpbnn

N, STEPS, EVERY = 20, 11, 4
METHODS = [dpbnn.SGLD(learning_rate=1e-3, keep=8), dpbnn.SGHMC(learning_rate=1e-3, keep=8)]


def train(out, method, after, **options):
    """Train, and call `after(run, file)` after every step."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(N, 2, generator=generator), torch.arange(N) % 2
    plan = dpbnn.plan(
        noise_multiplier=20.0, delta=1e-3, n=N, sampling="full-batch", steps=STEPS
    )  # fmt: skip

    def one(original, self, batch):
        original(self, batch)
        after(self, self.out and self.out / "iterates.safetensors")

    with pytest.MonkeyPatch.context() as patch:
        broken.around(patch, dpbnn.training._Run, "_one", one)
        return dpbnn.fit(
            lambda: dpbnn.mlp(2, (4,), 2), data, method=method, plan=plan, out=out,
            checkpoint_every=EVERY, progress=False, **options,
        )  # fmt: skip


def weights(run):
    """The first weights of the network, as they would lie in the file."""
    return next(iter(run.state.parameters.values())).detach().numpy().tobytes()


@fails_on(44, broken.iterates_are_written_at_once, method=METHODS[0])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_item_44_iterates_go_to_disk_with_the_next_checkpoint_alone(tmp_path, method):
    since, first = [], STEPS - method.keep
    most = 0

    def after(run, file):
        nonlocal most
        if run.step % EVERY == 1:  # a checkpoint was written after the last step
            content = file.read_bytes()
            assert all(iterate in content for iterate in since)
            since.clear()
        if run.step > first:
            since.append(weights(run))
        content = file.read_bytes()
        assert not any(iterate in content for iterate in since)
        assert (run.process.writer.held_bytes > 0) == bool(since)
        most = max(most, len(since))

    posterior = train(tmp_path, method, after)
    assert most == EVERY
    assert len(posterior.iterates) == method.keep
    assert all(iterate in (tmp_path / "iterates.safetensors").read_bytes() for iterate in since)


@fails_on(44, broken.a_failed_run_writes_what_it_holds, method=METHODS[0])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_item_44_a_run_that_fails_leaves_no_iterate_beside_its_key(tmp_path, method):
    since = []

    def after(run, file):
        if run.step == 5:
            since.clear()
        since.append(weights(run))
        if run.step == 7:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train(tmp_path, method, after)
    content = (tmp_path / "iterates.safetensors").read_bytes()
    assert len(since) == 3
    assert not any(iterate in content for iterate in since)


def test_without_a_folder_nothing_is_held():
    found = set()
    train(None, METHODS[0], lambda run, file: found.add(run.process.writer.held_bytes))
    assert found == {0}


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
