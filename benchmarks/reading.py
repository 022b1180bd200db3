"""Time and memory of reading and encoding a large table: `python -m benchmarks.reading`.

A table of 40 columns of numbers (ten with one missing value in a hundred) and 10 of categories is
written as text, as text with every category in quotes, and as Parquet. Each is read and encoded
in a process of its own, whose largest memory is that of the whole process, PyTorch and all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROWS, STEP = 1_000_000, 100_000
LEVELS = ("alpha", "beta", "gamma", "delta")
FILES = ("plain.csv", "quoted.csv", "table.parquet")


def columns(rows: int, generator: np.random.Generator) -> dict:
    import pyarrow as pa

    found = {}
    for i in range(40):
        values = np.round(generator.normal(50, 10, rows), 4)
        found[f"x{i}"] = pa.array(values, mask=generator.random(rows) < 0.01 if i < 10 else None)
    for i in range(10):
        found[f"c{i}"] = pa.array(np.array(LEVELS)[generator.integers(0, 4, rows)])
    return found


def write(folder: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet
    from pyarrow import csv

    generator = np.random.default_rng(0)
    writers: list = []
    for start in range(0, rows, STEP):
        table = pa.table(columns(min(STEP, rows - start), generator))
        if not writers:
            writers = [
                csv.CSVWriter(folder / name, table.schema, write_options=options)
                for name, options in (
                    (FILES[0], csv.WriteOptions(quoting_style="none")),
                    (FILES[1], csv.WriteOptions(quoting_style="needed")),
                )
            ]
            writers.append(parquet.ParquetWriter(folder / FILES[2], table.schema))
        for writer in writers:
            writer.write_table(table)
    for writer in writers:
        writer.close()


def measure(path: Path) -> dict:
    """Read and encode one file in this process."""
    import resource

    from dpbnn.data import Column, Schema, read_table

    numbers = [Column(f"x{i}", bounds=(0, 100), missing="middle") for i in range(40)]
    texts = [Column(f"c{i}", categories=LEVELS) for i in range(9)]
    schema = Schema((*numbers, *texts), Column("c9", categories=LEVELS))

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    before, begin, worked = peak(), time.perf_counter(), time.process_time()
    table = read_table(path)
    read, most = time.perf_counter() - begin, peak()
    x, _ = schema.encode(table)
    whole = time.perf_counter() - begin
    return {"file": path.name, "GB": round(path.stat().st_size / 1e9, 2), "shape": x.shape,
            "read s": round(read, 1), "read and encoded s": round(whole, 1),
            "CPU s": round(time.process_time() - worked, 1),
            "before GiB": round(before, 2), "read GiB": round(most, 2),
            "encoded GiB": round(peak(), 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--file", type=Path, help="measure this file alone")
    arguments = parser.parse_args()
    if arguments.file:
        print(json.dumps(measure(arguments.file)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments.rows)
        for name in FILES:
            command = [sys.executable, "-m", "benchmarks.reading", "--file", f"{folder}/{name}"]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
