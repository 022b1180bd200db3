"""Random sequences of fits, crashes, resumes, damage to files and overlapping runs.

Whatever happens in a folder, no readable ledger may say fewer releases than were made on it, no
posterior may state fewer, and whoever is refused is told how to go on.

One thing is out of reach: somebody who puts an older ledger *and* its older head back has a folder
as it was before. So heads are deleted and damaged here, but not put back.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import broken_versions as broken
import pytest
import torch
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch import nn

import dpbnn
from dpbnn import checkpoint
from dpbnn.contributions import probe
from dpbnn.methods.sgd import SGDProcess
from dpbnn.privacy.gate import Gate

pytestmark = pytest.mark.long

N, STEPS = 8, 6
SEQUENCES = int(os.environ.get("DPBNN_SEQUENCES", "2000"))
FILES = ("ledger.jsonl", "ledger.jsonl.head", "checkpoint.safetensors", "keys.json")
PLANS = {
    "full": dpbnn.plan(noise_multiplier=2.0, delta=1e-5, n=N, sampling="full", steps=STEPS),
    "partition": dpbnn.plan(
        noise_multiplier=2.0, delta=1e-5, n=N, sampling="partition", batch_size=4, steps=STEPS
    ),
}
CHANGES = {
    "nothing": {},
    "data": {"data": (torch.ones(N, 2), torch.zeros(N, 1))},
    "order": {"data": (torch.arange(2.0 * N).view(N, 2).flip(0), torch.zeros(N, 1))},
    "prior": {"prior": dpbnn.Gaussian(0.5)},
    "likelihood": {"likelihood": dpbnn.likelihoods.Gaussian(2.0)},
    "network": {"model": nn.Linear(2, 1, bias=False)},
    "settings": {"method": dpbnn.SGD(learning_rate=0.2)},
    "debug": {"debug_seed": 1},
    "memory": {"ledger": "memory"},
    "elsewhere": {"ledger": "elsewhere"},
}
CURE = re.compile(
    r"resume=True|leave resume out|backup|--repair|delete its keys|another folder|new run|"
    r"give the plan|give the same|give (a|another|the) path"
)


def says_how_to_go_on(error):
    assert CURE.search(str(error)), f"no way to go on: {error}"


class Dead(BaseException):
    """The process was killed: nothing more reaches the disk."""


@contextlib.contextmanager
def killed_at(write):
    """Kill the process at its n-th write, and keep it dead; None lets it live."""
    if write is None:
        yield
        return
    count = 0

    def mortal(function):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count > write:
                raise Dead
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "fsync", "replace", "ftruncate"):
            patch.setattr(os, name, mortal(getattr(os, name)))
        patch.setattr(Path, "unlink", mortal(Path.unlink))
        patch.setattr(checkpoint, "save_file", mortal(checkpoint.save_file))
        with contextlib.suppress(Dead):
            yield


LAYOUTS, PROBE = {}, probe.probe


def probed_once(attached, arguments, y):
    """The same networks come again and again, and probing them is not what this is about."""
    key = str(attached.model), str(attached.likelihood)
    if key not in LAYOUTS:
        LAYOUTS[key] = PROBE(attached, arguments, y)
    return LAYOUTS[key]


class Folder(RuleBasedStateMachine):
    """A folder of runs, and what was really released on each ledger."""

    made: dict[str, set[str]]

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="dpbnn-sequence-"))
        self.out = self.root / "run"
        self.made = {}
        self.copies = {}
        self.debugging, self.seeded = False, set()
        self.patch = pytest.MonkeyPatch()
        noised, made = Gate._noised, self.made

        def noticed(gate, sums, sigma):
            release = noised(gate, sums, sigma)
            content = b"".join(value.numpy().tobytes() for value in release.values())
            made.setdefault(gate.ledger.id, set()).add(hashlib.sha256(content).hexdigest())
            if self.debugging:
                self.seeded.add(gate.ledger.id)
            return release

        self.patch.setattr(Gate, "_noised", noticed)
        self.patch.setattr(probe, "probe", probed_once)

    def teardown(self):
        self.patch.undo()
        shutil.rmtree(self.root)

    @rule(
        resume=st.sampled_from(["as fits", "as fits", "as fits", True, False]),
        change=st.sampled_from(["nothing"] * 10 + list(CHANGES)),
        kind=st.sampled_from(["full"] * 5 + ["partition"]),
        every=st.sampled_from([1, 2, 100]),
        stop=st.sampled_from([None, 1, 2, 3, 5]),
        dies=st.one_of(st.none(), st.none(), st.integers(0, 80)),
        overlaps=st.booleans(),
    )
    def fits(self, resume, change, kind, every, stop, dies, overlaps):
        if resume == "as fits":
            resume = (self.out / "checkpoint.safetensors").exists()
        options = {
            "data": (torch.arange(2.0 * N).view(N, 2), torch.zeros(N, 1)),
            "model": nn.Linear(2, 1),
            "likelihood": dpbnn.likelihoods.Gaussian(1.0),
            "method": dpbnn.SGD(learning_rate=0.1),
            **CHANGES[change],
        }
        if "ledger" in options:
            elsewhere = options["ledger"] == "elsewhere"
            options["ledger"] = dpbnn.Ledger(self.root / "other.jsonl" if elsewhere else None)
        arguments = {
            **options, "plan": PLANS[kind], "out": self.out, "resume": resume,
            "checkpoint_every": every, "progress": False,
        }  # fmt: skip
        self.debugging = change == "debug"
        update = SGDProcess.update
        steps, overlapping = [], []

        def counted(process, state, release):
            state = update(process, state, release)
            steps.append(1)
            if len(steps) == 2 and overlaps and not overlapping:
                overlapping.append(1)
                with pytest.raises(ValueError, match="another process is at work"):
                    dpbnn.fit(**{**arguments, "resume": True})
            if len(steps) == stop:
                os.kill(os.getpid(), signal.SIGINT)
            return state

        posterior, outcome = None, "died"
        with pytest.MonkeyPatch.context() as patch, killed_at(dies):
            patch.setattr(SGDProcess, "update", counted)
            try:
                posterior, outcome = dpbnn.fit(**arguments), "ended"
            except KeyboardInterrupt:
                assert stop is not None
                outcome = "interrupted"
            except (ValueError, OSError, dpbnn.LedgerCorrupted) as error:
                says_how_to_go_on(error)
                outcome = "refused"
        event(f"{'resumed' if resume else 'new'}, {outcome}")
        if posterior is not None and posterior.privacy.private:
            recorded = posterior.privacy.mechanisms
            (name,) = {mechanism["ledger"] for mechanism in recorded}
            assert sum(m["releases"] for m in recorded) >= len(self.made[name])

    @rule(
        name=st.sampled_from(FILES),
        way=st.sampled_from(["delete", "truncate", "flip", "copy", "copy", "put back"]),
        place=st.floats(0, 1, exclude_max=True),
    )
    def touches_a_file(self, name, way, place):
        path = self.out / name
        if way == "put back" and name in self.copies and not name.endswith("head"):
            path.write_bytes(self.copies[name])
        if not path.exists():
            return
        content = bytearray(path.read_bytes())
        if way == "copy":
            self.copies[name] = bytes(content)
        elif way == "delete":
            path.unlink()
        elif way == "truncate":
            path.write_bytes(content[: int(place * len(content))])
        elif way == "flip" and content:
            content[int(place * len(content))] ^= 1
            path.write_bytes(content)

    @rule()
    def repairs(self):
        try:
            dpbnn.Ledger.repair(self.out / "ledger.jsonl")
        except (OSError, dpbnn.LedgerCorrupted) as error:
            says_how_to_go_on(error)

    @rule()
    def forgets_the_run(self):
        """A user who starts anew and keeps the ledger."""
        for name in ("checkpoint.safetensors", "keys.json"):
            (self.out / name).unlink(missing_ok=True)

    @invariant()
    def no_ledger_says_less_than_was_released(self):
        for path in (self.out / "ledger.jsonl", self.root / "other.jsonl"):
            if not path.exists():
                continue
            try:
                book = dpbnn.Ledger(path)
            except dpbnn.LedgerCorrupted as error:
                says_how_to_go_on(error)
            else:
                if book.statement(delta=1e-5).private:
                    assert book.id not in self.seeded
                    assert book.releases >= len(self.made.get(book.id, ()))


USUAL = settings(
    max_examples=SEQUENCES, stateful_step_count=8, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
)  # fmt: skip


@pytest.mark.once
def test_no_sequence_hides_a_release():
    run_state_machine_as_test(Folder, settings=USUAL)


@pytest.mark.parametrize(
    "version",
    [
        broken.a_run_goes_on_with_any_ledger,
        broken.charges_serve_any_attempt, broken.folders_are_not_locked,
        broken.seeded_noise_is_recorded_as_noise,
    ],
)  # fmt: skip
def test_the_same_sequences_find_what_was_broken(version):
    with pytest.MonkeyPatch.context() as patch:
        version(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception, Flaky)):
            run_state_machine_as_test(Folder, settings=USUAL)
