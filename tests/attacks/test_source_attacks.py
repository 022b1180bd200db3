"""Attacks through the data: records that come from code and files while a run goes on."""

import gc
import math
import subprocess
import sys
import threading
from pathlib import Path

import broken_versions as broken
import numpy as np
import pytest
import torch
from datasets_under_attack import (
    SECRET,
    Augmented,
    Dying,
    Fails,
    Odd,
    Plain,
    Shrinking,
    Spying,
)
from runs_under_attack import STEPS, N, dataset, fit, interrupted, plan, released
from torch import nn
from twins import fails_on, twins_of

import dpbnn
from dpbnn.messages import HiddenError

SMALL = 400  # bytes: a batch fits, the data does not


def ledger_of(folder):
    return dpbnn.Ledger(folder / "ledger.jsonl")


def quoted(error):
    """Everything that an error says, with what it came from."""
    return "" if error is None else f"{error!r} {quoted(error.__context__)}"


@fails_on(59, broken.records_that_may_change_keep_their_keys)
def test_item_59_noise_is_not_drawn_again_for_records_that_may_change(tmp_path):
    """Two runs of a step with one noise would show the difference of two augmentations."""
    with pytest.MonkeyPatch.context() as patch, released(patch) as made:
        interrupted(6, data=Augmented(), out=tmp_path, checkpoint_every=4)
        fit(Augmented(), out=tmp_path, resume=True)
    assert not (tmp_path / "keys.json").exists()
    assert ledger_of(tmp_path).releases >= len(made)
    assert ledger_of(tmp_path).releases > STEPS


@pytest.mark.parametrize("kind", ["map", "declared"])
def test_item_59_fixed_records_go_on_with_the_same_noise(kind, tmp_path):
    def data():
        x, y = dataset()
        if kind == "declared":
            return dpbnn.DataSource(Plain(), fixed=True, memory=SMALL)
        np.save(tmp_path / "x.npy", x.numpy())
        held = np.load(tmp_path / "x.npy", mmap_mode="r")
        return dpbnn.DataSource((held, y), memory=SMALL)

    small = plan(batch_size=4, sampling="partition")
    out = tmp_path / "run"
    interrupted(6, data=data(), out=out, plan=small)
    fit(data(), out=out, resume=True, plan=small)
    assert ledger_of(out).releases == STEPS


def test_a_run_on_several_inputs_goes_on_with_the_same_noise(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x, z):
            return self.one(x) + self.two(z)

    x, y = dataset()
    interrupted(6, data=((x, x), y), model=Both, out=tmp_path)
    fit(((x, x), y), model=Both, out=tmp_path, resume=True)
    assert ledger_of(tmp_path).releases == STEPS


@fails_on(59, broken.streamed_records_have_no_digest)
def test_item_59_noise_serves_the_records_that_it_was_drawn_for_and_no_others(tmp_path):
    small = plan(batch_size=4, sampling="partition")

    def data(shift):
        x, y = dataset()
        x[3, 1] += shift
        np.save(tmp_path / f"x{shift}.npy", x.numpy())
        held = np.load(tmp_path / f"x{shift}.npy", mmap_mode="r")
        return dpbnn.DataSource((held, y), memory=SMALL)

    interrupted(6, data=data(0), out=tmp_path / "run", plan=small)
    with pytest.raises(ValueError, match="data: not those of the run"):
        fit(data(1), out=tmp_path / "run", resume=True, plan=small)


@fails_on(59, broken.records_share_a_generator)
def test_item_59_what_one_record_draws_moves_no_other_record():
    found = dpbnn.replay(
        dpbnn.SGD(clip=0.1), Augmented(), 7, model=lambda: nn.Linear(3, 2),
        plan=plan(batch_size=20, steps=4),
    )  # fmt: skip
    assert found.check().worst > 0

    class Changed(Augmented):
        def __init__(self):
            super().__init__()
            self.x[7] = 30.0

    full = dpbnn.plan(noise_multiplier=9.0, delta=1e-5, n=N, sampling="full-batch", steps=2,
                      relation="replace-one")  # fmt: skip
    dpbnn.replay(
        dpbnn.SGD(clip=0.1), Augmented(), Changed(), model=lambda: nn.Linear(3, 2), plan=full
    ).check()


@fails_on(59, broken.a_record_of_another_shape_is_only_left_out)
def test_item_59_the_shape_of_one_record_decides_about_no_other():
    """As the first record, it would make all others the odd ones."""
    ledger = dpbnn.Ledger()
    for record, mapping in ((0, False), (7, False), (7, True)):
        with pytest.raises(ValueError, match=r"records differ in|cannot take inputs"):
            fit(Odd(record, mapping), on_bad_rows="zero", ledger=ledger)
    with pytest.raises(ValueError, match="target: missing"):
        fit(Odd(0, True), on_bad_rows="zero", ledger=ledger)
    named = dpbnn.DataSource(Odd(0, True), "x", "y")
    with pytest.raises(ValueError, match=r"records differ in"):
        fit(named, on_bad_rows="zero", ledger=ledger)
    assert ledger.releases == 0


def test_item_59_a_record_that_cannot_be_loaded_is_counted_and_not_quoted():
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match=r"^1 row cannot be used: records must load") as caught:
        fit(Fails(), ledger=ledger)
    assert str(SECRET) not in quoted(caught.value)
    assert ledger.releases == 0
    fit(Fails(), on_bad_rows="zero")
    fit(Fails(0), on_bad_rows="zero")


@pytest.mark.parametrize("make", [lambda: Fails(after=N + 5), Shrinking])
def test_item_59_a_record_that_fails_later_ends_the_run_or_contributes_nothing(make):
    whole = dpbnn.plan(noise_multiplier=9.0, delta=1e-5, n=N, sampling="full-batch", steps=3)
    with pytest.raises(HiddenError, match="cannot be loaded now") as caught:
        fit(make(), plan=whole)
    assert str(SECRET) not in quoted(caught.value)
    fit(make(), plan=whole, on_bad_rows="zero")


@fails_on(59, broken.workers_are_forked)
def test_item_59_workers_hold_nothing_of_the_run(tmp_path):
    spied = dpbnn.DataSource(Spying(tmp_path), workers=1)
    options = {"model": lambda: nn.Linear(3, 2), "plan": plan(steps=3), "debug_seed": 1}
    one, two = (fit(data, **options).model.weight for data in (Augmented(), spied))
    assert torch.equal(one, two)  # the same records, with the same augmentation
    found = [path.read_text() for path in tmp_path.iterdir()]
    assert len(found) > 3
    assert set(found) == {""}


def test_item_59_a_worker_that_dies_ends_the_run_unspent():
    ledger = dpbnn.Ledger()
    with pytest.raises(HiddenError, match="a worker process ended"):
        fit(dpbnn.DataSource(Dying(), workers=1), ledger=ledger)
    assert ledger.releases == 0

    class Local(Plain):
        pass

    with pytest.raises(ValueError, match="cannot be sent to worker processes"):
        fit(dpbnn.DataSource(Local(), workers=1), ledger=ledger)


def test_item_59_a_script_without_a_guard_is_not_run_twice(tmp_path):
    """A spawned worker imports the script; its releases would be in no ledger of the first."""
    script = tmp_path / "script.py"
    script.write_text(
        "import dpbnn, torch\n"
        "from datasets_under_attack import Plain\n"
        "from runs_under_attack import fit\n"
        "gate = dpbnn.Gate(1.0, 1.0)\n"
        "gate(dpbnn.DenseContributions(torch.ones(3, 1)))\n"
        f"open({str(tmp_path / 'made')!r}, 'a').write('released ')\n"
        "fit(dpbnn.DataSource(Plain(), workers=1))\n"
    )
    here = Path(__file__).parent
    path = ":".join([str(here), str(here.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={"PYTHONPATH": path}
    )
    assert done.returncode != 0
    assert "__name__ == '__main__'" in done.stderr
    assert (tmp_path / "made").read_text() == "released "


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@fails_on(59, broken.data_is_copied_whole, dtype=torch.float32, on_bad_rows="zero")
@pytest.mark.parametrize(
    ("dtype", "on_bad_rows"), [(torch.float32, "zero"), (torch.float64, "error")]
)
def test_item_59_memory_stays_flat(tmp_path, dtype, on_bad_rows):
    """200 MB on disk, of which a copy would show in the memory of the process."""
    n, width = 50_000, 1000
    x = np.memmap(tmp_path / "x", dtype=np.float32, mode="w+", shape=(n, width))
    y = torch.zeros(n, dtype=torch.long)
    data = dpbnn.DataSource((x, y), memory=100_000_000)
    usual = plan(n=n, batch_size=200, steps=4)
    fit(model=nn.Linear(3, 2))  # imports
    with PeakOfMemory() as peak:
        fit(data, nn.Linear(width, 2, dtype=dtype), plan=usual, on_bad_rows=on_bad_rows)
    assert peak() < 120e6


class PeakOfMemory:
    """Looks at the memory of this process, without that of files, while a block runs."""

    def __enter__(self):
        gc.collect()
        self.first, self.most, self.stop = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return lambda: self.most - self.first

    def __exit__(self, *raised):
        self.stop.set()
        self.thread.join()

    def look(self):
        while not self.stop.wait(0.005):
            self.most = max(self.most, self.now())

    @staticmethod
    def now():
        text = Path("/proc/self/status").read_text().partition("RssAnon:")[2]
        return int(text.split()[0]) * 1024


def test_item_59_records_that_became_bad_contribute_nothing(tmp_path):
    np.save(tmp_path / "x.npy", dataset()[0].numpy())
    x = np.load(tmp_path / "x.npy", mmap_mode="r+")
    seen = []
    update = dpbnn.methods.sgd.SGDProcess.update

    def spoil(self, state, release):
        seen.append(all(value.isfinite().all() for value in release.values()))
        x[:] = math.nan
        return update(self, state, release)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpbnn.methods.sgd.SGDProcess, "update", spoil)
        data = dpbnn.DataSource((x, dataset()[1]), memory=700)
        fit(data, plan=plan(batch_size=2))
    assert seen == [True] * STEPS


# The twins


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
