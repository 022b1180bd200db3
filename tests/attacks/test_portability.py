"""A run with a folder needs nothing that Windows lacks."""

import broken_versions as broken
import pytest
import torch
import windows
from interruption import stopped_after
from twins import fails_on, twins_of

import dpbnn
from dpbnn import checkpoint, storage
from dpbnn.privacy import ledger_file, locks

N = 20


def settings(method, out, **options):
    generator = torch.Generator().manual_seed(0)
    plan = dpbnn.plan(
        noise_multiplier=20.0, delta=1e-3, n=N, sampling="full-batch", steps=9,
        relation="replace-one",
    )  # fmt: skip
    data = torch.randn(N, 2, generator=generator), torch.arange(N) % 2
    return {
        "model": lambda: dpbnn.mlp(2, (4,), 2), "data": data, "method": method, "plan": plan,
        "out": out, "checkpoint_every": 2, "progress": False, **options,
    }  # fmt: skip


@fails_on(
    56, broken.positioned_writes_are_taken_for_granted, broken.folders_are_synced_everywhere,
    method=dpbnn.SGLD(learning_rate=1e-3, keep=4),
)  # fmt: skip
@pytest.mark.parametrize(
    "method",
    [
        dpbnn.SGLD(learning_rate=1e-3, keep=4),
        dpbnn.SGHMC(learning_rate=1e-3, keep=4),
        dpbnn.SGD(average="polyak"),
    ],
    ids=lambda method: method.name,
)
def test_item_56_a_run_is_interrupted_resumed_saved_and_loaded_without_posix(tmp_path, method):
    with pytest.MonkeyPatch.context() as patch:
        windows.without_posix(patch)
        windows.strict_files(patch)
        own = windows.again(locks)
        for module, name in (
            (ledger_file, "lock"), (ledger_file, "unlock"), (ledger_file, "sync_folder"),
            (checkpoint, "lock"), (checkpoint, "sync_folder"), (checkpoint, "unlock"),
            (storage, "sync_folder"),
        ):  # fmt: skip
            patch.setattr(module, name, getattr(own, name))
        try:
            with stopped_after(5):
                dpbnn.fit(**settings(method, tmp_path / "run"))
            posterior = dpbnn.fit(**settings(method, tmp_path / "run", resume=True))
            (tmp_path / "saved").mkdir()
            posterior.save(tmp_path / "saved")
            posterior.save(tmp_path / "saved", overwrite=True)
            loaded = dpbnn.load(tmp_path / "saved")
        except (AttributeError, OSError) as error:
            pytest.fail(f"needs what Windows lacks: {error!r}")
    x = torch.zeros(3, 2)
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)


@fails_on(56, broken.locks_let_everybody_in)
def test_item_56_a_lock_on_windows_keeps_others_out(tmp_path):
    """By a byte that no file reaches; tests/privacy/test_locks.py has the rest."""
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with pytest.MonkeyPatch.context() as patch, path.open("rb+") as one, path.open("rb+") as two:
        fake = windows.without_posix(patch)
        module = windows.again(locks)
        assert module.lock(one.fileno())
        assert not module.lock(two.fileno(), wait=False)
        assert all(byte >= 2**30 for *_, byte in fake.held)
        module.unlock(one.fileno())
        assert module.lock(two.fileno(), wait=False)


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
