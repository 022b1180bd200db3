"""Training on more data than memory: peak memory of the process, and time of the passes.

Writes a table of random records to a file, or makes a sparse file of zeros, and fits a network on
its memory map. Memory is RssAnon: what the process holds itself, without the pages of files.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

import dpbnn
from dpbnn import training

CHUNK = 1 << 20


def anonymous():
    """Bytes that this process holds, without those of files."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024


class Peak:
    """The most memory while a block runs, above what was there before."""

    def __enter__(self):
        self.before, self.most, self.stop = anonymous(), 0, threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *raised):
        self.stop.set()
        self.thread.join()

    def look(self):
        while not self.stop.wait(0.01):
            self.most = max(self.most, anonymous() - self.before)


def written(folder, records, features, sparse):
    """Return inputs and labels as memory maps of new files."""
    x = np.memmap(folder / "x", np.float32, "w+", shape=(records, features))
    y = np.memmap(folder / "y", np.uint8, "w+", shape=(records,))
    chance = np.random.default_rng(0)
    for start in range(0, 0 if sparse else records, CHUNK):
        part = chance.standard_normal((min(CHUNK, records - start), features), dtype=np.float32)
        x[start : start + len(part)] = part
        y[start : start + len(part)] = part[:, 0] > 0
    del x, y
    return (
        np.memmap(folder / "x", np.float32, "r", shape=(records, features)),
        np.memmap(folder / "y", np.uint8, "r", shape=(records,)),
    )


def measured(data, features, steps, batch_size, dtype, on_bad_rows, out):
    """Fit once; return seconds of the check, seconds of a step, peak memory, and the posterior."""
    times = {}

    def model():
        return dpbnn.mlp(features, (64,), 2).to(dtype)

    def timed(*given):
        began = time.perf_counter()
        rows = checked(*given)
        times["check"] = time.perf_counter() - began
        print(f"check: {times['check']:.0f} s", flush=True)
        times["began"] = time.perf_counter()
        return rows

    plan = dpbnn.plan(
        noise_multiplier=1.0, delta=1e-9, n=len(data[1]), batch_size=batch_size, steps=steps
    )
    checked, training.checked_rows = training.checked_rows, timed
    try:
        with Peak() as peak:
            posterior = dpbnn.fit(
                model, data, method=dpbnn.SGD(learning_rate=0.5), plan=plan, out=out,
                on_bad_rows=on_bad_rows, progress=False,
            )  # fmt: skip
    finally:
        training.checked_rows = checked
    return times["check"], (time.perf_counter() - times["began"]) / steps, peak.most, posterior


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=100_000_000)
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--sparse", action="store_true", help="zeros that take no disk")
    parser.add_argument("--resumable", action="store_true", help="with a digest of all records")
    parser.add_argument("--once", action="store_true", help="in float32 alone")
    parser.add_argument("--folder", help="where the files go for the time; the temporary one")
    options = parser.parse_args()
    small = dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=100, batch_size=10, steps=2)
    dpbnn.fit(  # imports, and what is made once
        dpbnn.mlp(3, (4,), 2), (torch.zeros(100, 3), torch.zeros(100, dtype=torch.long)),
        method=dpbnn.SGD(), plan=small,
    )  # fmt: skip
    print(f"interpreter with dpbnn and torch: {anonymous() / 1e6:.0f} MB")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = written(Path(folder), options.records, options.features, options.sparse)
        print(f"{options.records:.3g} x {options.features}: {data[0].nbytes / 1e9:.3g} GB on disk")
        kinds = [(torch.float32, "error"), (torch.float64, "zero")]
        for dtype, on_bad_rows in kinds[: 1 if options.once else 2]:
            out = Path(folder) / f"run-{on_bad_rows}" if options.resumable else None
            check, step, peak, posterior = measured(
                data, options.features, options.steps, options.batch_size, dtype, on_bad_rows, out
            )
            print(
                f"{dtype!s:13} on_bad_rows={on_bad_rows!r:7}: check {check:.0f} s, "
                f"{1e3 * step:.1f} ms a step, peak {peak / 1e6:.0f} MB above the interpreter"
            )
        if not options.sparse:
            x, y = (np.array(part[-20_000:]) for part in data)
            right = posterior.predict(x, samples=1).mean.argmax(-1).numpy() == y
            print(f"accuracy on the last 20 000 records: {right.mean():.3f}")


if __name__ == "__main__":
    main()
