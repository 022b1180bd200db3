"""Results as JSON lines, one per job, written by parallel processes that can be resumed.

A job is a dict of JSON values; its record is the job with what was found. The last record of a job
counts. Records with an "error" are run again, all others are not.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(path: Path, names: tuple[str, ...]) -> list[Record]:
    """Return the records of a file; a torn line is dropped.

    Args:
        path: of the file; one that does not exist has none.
        names: entries that name a job.
    """
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[tuple(record[name] for name in names)] = record
    return list(found.values())


def waiting(jobs: list[Record], path: Path) -> list[Record]:
    """Return the jobs that have no record yet, or a failed one."""
    names = tuple(jobs[0]) if jobs else ()
    done = [r for r in read(path, names) if "error" not in r] if jobs else []
    keys = {tuple(record[name] for name in names) for record in done}
    return [job for job in jobs if tuple(job.values()) not in keys]


def run(one: Callable[[Record], Record], jobs: list[Record], processes: int, path: Path) -> None:
    """Run jobs in processes of one thread each, and write every record as soon as it is there."""
    for name in ("OMP", "OPENBLAS", "MKL"):
        os.environ[f"{name}_NUM_THREADS"] = "1"  # of the processes that are started
    begin, failed = time.perf_counter(), 0
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool, path.open("a") as file:
        found = pool.imap_unordered(functools.partial(recorded, one), jobs)
        for number, record in enumerate(found, 1):
            print(json.dumps(record), file=file, flush=True)
            if "error" in record:
                failed += 1
                print(f"FAILED: {json.dumps(record)}", file=sys.stderr, flush=True)
            if number % 50 == 0 or number == len(jobs):
                spent = time.perf_counter() - begin
                print(f"{number} of {len(jobs)} jobs, {spent:.0f} s", flush=True)
    if failed:
        print(f"{failed} jobs FAILED; a second call runs them again", file=sys.stderr)


def recorded(one: Callable[[Record], Record], job: Record) -> Record:
    """Return a job's record; a failure is a record too, with its last line of code."""
    import torch

    torch.set_num_threads(1)
    begin = time.perf_counter()
    try:
        found = one(job)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        found = {"error": f"{type(error).__name__}: {error} ({place})"}
    return {**job, **found, "job_seconds": round(time.perf_counter() - begin, 3)}
