"""Runs over ranks that are killed at any moment and started again, on other numbers of ranks.

    PYTHONPATH=tests python tests/ranks/killed_runs.py 200 [seed] [owned | sharded]
    PYTHONPATH=tests python tests/ranks/killed_runs.py 20 21-30 [owned | sharded]

kills so many processes by SIGKILL and prints what was found; of several seeds side by side, and
added up. Every release that rank 0 is about to make is first written to a log: its key and a
digest of the sum. With "owned" every rank has rows of its own, and a run is started again on the
same number of ranks. Of a sharded network every rank writes one line for each of its rows.
"""

import hashlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from sharded_runs import fit as fit_sharded
from small_runs import dataset, fit, numbers, plan
from together import DEADLINE, begun, ended

import dpbnn
from dpbnn import checkpoint
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger import Ledger

STEPS, EVERY = 24, 3
WRONG = (
    "under-counts",
    "noise used twice",
    "ranks with different models",
    "another model, not paid for",
)


def lines_of(gate, sums):
    """Return what is noised with which part of which noise: one line, or one for each row."""
    key = hashlib.sha256(gate.noise.key + gate.noise.step.to_bytes(8, "big")).hexdigest()
    if gate.slices is None:
        content = b"".join(value.numpy().tobytes() for value in sums.values())
        return f"{key} {hashlib.sha256(content).hexdigest()}\n"
    found = []
    for name, value in sums.items():
        for row, held in enumerate(value, gate.slices.rows(name)[0]):
            content = hashlib.sha256(held.numpy().tobytes()).hexdigest()
            found.append(f"{key}:{name}:{row} {content}\n")
    return "".join(found)


def left_by(posterior):
    """Return all numbers of a posterior, of a sharded one the iterates, which all ranks read."""
    if not hasattr(posterior, "whole"):
        return numbers(posterior)
    iterates = posterior.whole.iterates
    return torch.cat([v.double().flatten() for v in iterates.read(range(len(iterates))).values()])


def worker(folder, secret, owners=0, spread=False):
    """Return what one rank does: train, with releases logged, and return all numbers.

    Where there are owners every rank has a part of the rows, of uneven sizes.
    """

    chosen = plan(steps=STEPS)

    def work(rank):
        noised, new = Gate._noised, checkpoint.Keys.new

        def logged(self, sums, sigma):
            with (folder / "releases.log").open("a") as file:
                file.write(lines_of(self, sums))
                file.flush()
            return noised(self, sums, sigma)

        def keys(cls):
            """The first keys of a run are those of its reference; later ones are new."""
            made = new()
            if secret is None or (folder / "keyed").exists():
                new_ones = f"{os.getpid()} {time.monotonic_ns()}".encode()
                own = [hashlib.sha256(new_ones + bytes([i])).digest() for i in range(3)]
                return checkpoint.Keys(own[0].hex()[:16], *own)
            (folder / "keyed").touch()
            own = [hashlib.sha256(secret + bytes([i])).digest() for i in range(3)]
            return checkpoint.Keys(made.name, *own)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Gate, "_noised", logged)
            patch.setattr(checkpoint.Keys, "new", classmethod(keys))
            out = folder / "run"
            resume = (out / "checkpoint.safetensors").exists()
            data = dataset()
            if owners:
                data = tuple(part.tensor_split([5, 20][: owners - 1])[rank] for part in data)
                data = dpbnn.DataSource(data, owned=True)
            posterior = (fit_sharded if spread else fit)(
                "sgld", data=data, plan=chosen, out=out, resume=resume,
                checkpoint_every=EVERY,
            )  # fmt: skip
        (folder / "done").touch()
        return left_by(posterior), posterior.privacy.to_dict()

    return work


def trouble(folder):
    """Return what is wrong so far: releases that are not charged, or noise that served twice."""
    log = folder / "releases.log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    made = {(key, content) for key, content in (line for line in lines if len(line) == 2)}
    ledger = folder / "run" / "ledger.jsonl"
    charged = Ledger(ledger).releases if ledger.exists() else 0
    found = Counter()
    if len({key.partition(":")[0] for key, _ in made}) > charged:
        found["under-counts"] += 1
    found["noise used twice"] += len(made) - len({key for key, _ in made})
    return found


def moment(draw, folder, rows=1):
    """Wait until a time to kill: soon after the start, or after some release more."""
    log, limit = folder / "releases.log", time.monotonic() + 20.0
    if draw.random() < 0.2:
        limit = time.monotonic() + draw.uniform(0.0, 1.0)
    before = log.stat().st_size if log.exists() else 0
    wanted = before + 130 * rows * draw.randint(1, 10)
    while time.monotonic() < limit and not (log.exists() and log.stat().st_size >= wanted):
        if (folder / "done").exists():
            break
        time.sleep(0.001)
    time.sleep(draw.choice([0.0, draw.uniform(0.0, 0.03)]))


def killed(kills, seed, folder, owned=False, spread=False):
    """Kill ranks of runs at random moments until so many are dead; return counts."""
    draw, found, dead, run = random.Random(seed), Counter(), 0, 0
    reference: dict[tuple[bytes, int], torch.Tensor] = {}
    while dead < kills:
        run += 1
        here, secret = folder / f"run {run}", bytes([run % 4]) * 8
        here.mkdir()
        owners = draw.choice([2, 3]) if owned else 0
        if (secret, owners) not in reference:
            whole = folder / f"reference {run % 4} {owners}"
            whole.mkdir()
            work = worker(whole, secret, owners, spread)
            left = ended(begun(owners or 1, work, whole / "group"), whole / "group")
            reference[secret, owners] = left[0][0]
        attempt = 0
        while True:
            attempt += 1
            size, group = owners or draw.choice([1, 2, 2, 3, 4]), here / f"group {attempt}"
            children = begun(size, worker(here, secret, owners, spread), group)
            if dead < kills and attempt <= 6:
                moment(draw, here, 16 if spread else 1)
                os.kill(draw.choice(children), signal.SIGKILL)
            left = ended(children, group, draw.uniform(0.0, 1.5))
            dead += None in left
            found += trouble(here)
            whole = [part for part in left if isinstance(part, tuple)]
            if len({part[0].numpy().tobytes() for part in whole}) > 1:
                found["ranks with different models"] += 1
            if len(whole) == size:
                break
            errors = [str(part) for part in left if isinstance(part, Exception)]
            started = (here / "run" / "iterates.safetensors").exists()
            if started and any("holds an earlier run" in error for error in errors):
                found["refused: killed before the first checkpoint"] += 1
                break
        if len(whole) == size:
            charged = whole[0][1]["mechanisms"][0]["releases"]
            same = torch.equal(whole[0][0], reference[secret, owners])
            kind = "the same model" if same else "another model, paid for by new noise"
            if not same and charged <= STEPS:
                kind = "another model, not paid for"
            found[kind] += 1
    return Counter({"kills": dead, "runs": run}) + found


def of_seed(kills, seed, *kinds):
    """The same in a folder of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        return killed(kills, seed, Path(name), "owned" in kinds, "sharded" in kinds)


if __name__ == "__main__":
    begin = time.monotonic()
    kills, seeds, *kinds = sys.argv[1:] if len(sys.argv) > 2 else [sys.argv[1], "0"]
    first, _, last = seeds.partition("-")
    chosen = range(int(first), int(last or first) + 1)
    with ProcessPoolExecutor(len(chosen), multiprocessing.get_context("fork")) as pool:
        each = [pool.submit(of_seed, int(kills), seed, *kinds) for seed in chosen]
        print(sum((one.result() for one in each), Counter()))
    print(f"{time.monotonic() - begin:.0f} s; every group within {DEADLINE:.0f} s")
