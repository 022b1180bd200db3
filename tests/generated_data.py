"""The papers' datasets in small: generated files of the same names, formats and columns."""

import copy
import gzip
import struct
from pathlib import Path

import numpy as np

from dpbnn.data import Schema, datasets
from dpbnn.data.download import sha256
from dpbnn.reproduce import dp_sep_uci, uci

ROWS = {"mnist": (300, 100), "adult": (2000, 1000), "abalone": (800, 200)}
"""Training and test rows; the regressions have REGRESSION."""
REGRESSION = (270, 30)


def write(folder: Path) -> dict:
    """Write all files below a folder; return the sources, with the checksums of these files."""
    rng, sources = np.random.default_rng(0), copy.deepcopy(datasets._sources())
    _images(folder / "mnist", rng)
    _adult(folder / "uci" / "adult", rng)
    _abalone(folder / "uci" / "abalone", rng)
    for name in dp_sep_uci.SETS:
        _regression(folder / sources[name]["folder"], uci.DATASETS[name], sources[name], rng)
    for source in sources.values():
        for entry in source["files"]:
            path = folder / entry["path"]
            content = path.read_bytes() if path.is_file() else _unpacked(path)
            entry["sha256"] = sha256(content)
    return sources


def _unpacked(path: Path) -> bytes:
    return gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())


def _images(folder: Path, rng: np.random.Generator) -> None:
    """Digit k is a bright bar in rows 2k to 2k + 7, on noise."""
    folder.mkdir(parents=True)
    for part, n in zip(("train", "t10k"), ROWS["mnist"], strict=True):
        labels = np.arange(n, dtype=np.uint8) % 10
        pixels = rng.integers(0, 64, (n, 28, 28), dtype=np.uint8)
        for image, label in zip(pixels, labels, strict=True):
            image[2 * label : 2 * label + 8, 4:24] += 190
        for kind, header, values in (
            ("images-idx3", struct.pack(">4I", 2051, n, 28, 28), pixels),
            ("labels-idx1", struct.pack(">2I", 2049, n), labels),
        ):
            path = folder / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(header + values.tobytes(), mtime=0))


def _adult(folder: Path, rng: np.random.Generator) -> None:
    """Those with more than ten years of education and more than 35 hours a week earn more."""
    folder.mkdir(parents=True)
    schema = Schema.from_toml(datasets._resource("schemas/adult.toml"))
    for part, n in zip(("data", "test"), ROWS["adult"], strict=True):
        columns = {"fnlwgt": rng.integers(10_000, 10**6, n)}
        for column in schema.columns:
            if column.bounds is None:
                columns[column.name] = rng.choice(column.categories, n)
            else:
                columns[column.name] = rng.integers(*column.bounds, n, endpoint=True)
        columns["workclass"][::50] = "?"
        more = (columns["education-num"] > 10) & (columns["hours-per-week"] > 35)
        columns["income"] = np.where(more, ">50K", "<=50K")
        dot = "." if part == "test" else ""
        rows = zip(*(columns[name] for name in datasets._ADULT), strict=True)
        lines = [", ".join(map(str, row)) + dot for row in rows]
        first = ["|1x3 Cross validator"] if part == "test" else []
        text = "\n".join([*first, *lines]) + "\n\n"
        (folder / f"adult.{part}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def _abalone(folder: Path, rng: np.random.Generator) -> None:
    """Rings grow with the length, and so does all else."""
    folder.mkdir(parents=True)
    n = sum(ROWS["abalone"])
    length = rng.uniform(0.1, 0.8, n)
    sizes = [length, 0.8 * length, 0.3 * length, *(part * length**3 for part in (5, 2, 1, 1.4))]
    rings = np.clip(np.round(20 * length + rng.normal(size=n)), 1, 29).astype(int)
    rows = zip(rng.choice(["M", "F", "I"], n), *(np.round(s, 4) for s in sizes), rings, strict=True)
    (folder / "abalone.data").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))


def _regression(folder: Path, about: uci.Dataset, source: dict, rng: np.random.Generator) -> None:
    """Uniform inputs within the public bounds, a target that follows the first of them."""
    folder.mkdir(parents=True)
    n = sum(REGRESSION)
    u = rng.uniform(size=(n, len(about.low)))
    bottom, top = about.bounds
    y = bottom + (top - bottom) * np.clip(u[:, 0] + 0.05 * rng.normal(size=n), 0, 1)
    x = np.array(about.low) + u * (np.array(about.high) - np.array(about.low))
    extra = [rng.uniform(size=n)] if source["inputs"] == 16 else []  # naval's second target
    np.savetxt(folder / "data.txt", np.column_stack([x, y, *extra]), fmt="%.8g")
    splits = {}
    for split in range(len(source["splits"])):
        order = rng.permutation(n).astype(np.int32)
        train, test = order[: REGRESSION[0]], order[REGRESSION[0] :]
        splits |= {f"train_{split}": train, f"test_{split}": test}
        digest = sha256(np.concatenate([train, test]).astype("<i4").tobytes())
        source["splits"][split] = digest[:16]
    np.savez(folder / "splits.npz", **splits)
