"""The tables of `benchmarks.tables`: inputs, targets and what is publicly known about them.

Some are bundled with scikit-learn, some are drawn by fixed generators, and the UCI tables are read
from DPBNN_DATA. Bounds are never read off the data: those of generated tables follow from their
generator, the others are round numbers near the possible range of what was measured. They need not
hold; what lies outside is cut off by every learner. As in `benchmarks.uci`, those of public tables
were written by someone who had seen the data, and epsilon does not cover that.

    python -m benchmarks.table_data FOLDER

writes the tables that are not generated as npz files. Where DPBNN_TABLES names such a folder they
are read from there, on machines without the datasets. DPBNN_SPLITS=20 takes all given splits of
power, kin8nm, naval and wine-quality in place of the first five.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TESTED = 5000  # test rows at most
SPLITS = int(os.environ.get("DPBNN_SPLITS", "5"))  # of the 20 given ones, in UCI's tables

CLASSES = (
    "adult", "abalone-age", "breast-cancer", "digits", "interactions", "imbalanced",
    "noise-columns", "wide-bounds", "heavy-tails", "small", "large", "categorical", "monotone",
    "multi-class",
)  # fmt: skip
NUMBERS = (
    "power", "kin8nm", "naval", "protein", "wine-quality", "abalone-rings", "diabetes", "friedman",
    "prices", "small-numbers", "large-numbers", "wide-bounds-numbers", "heavy-noise", "wages",
)  # fmt: skip
TABLES = CLASSES + NUMBERS


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows to train on and rows to test on."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


@dataclasses.dataclass(frozen=True)
class Table:
    """A table and what is publicly known about it.

    Attributes:
        x: inputs [rows, columns]; categories are one-hot, with bounds (-1, 1) so that they stay.
        y: class numbers, or numbers.
        low: public lower bound of every column.
        high: public upper bound.
        classes: number of classes; 0 for a regression.
        target: public bounds of a regression's target.
        train: rows to train on, where the splits are drawn.
        groups: columns of every categorical column.
        splits: given (training rows, test rows); else they are drawn from the seed.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    classes: int = 0
    target: tuple[float, float] = (0.0, 0.0)
    train: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    splits: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    def split(self, seed: int) -> Split:
        """Return the rows of a seed, at most TESTED of them to test on."""
        order = np.random.default_rng(seed).permutation(len(self.x))
        if self.splits:
            train, test = self.splits[seed % len(self.splits)]
            test = np.random.default_rng(seed).permutation(test)
        else:
            train, test = order[: self.train], order[self.train :]
        test = test[:TESTED]
        return Split(self.x[train], self.y[train], self.x[test], self.y[test])

    def numeric(self) -> list[int]:
        """Return the columns that are not part of a category."""
        inside = {column for group in self.groups for column in group}
        return [column for column in range(self.x.shape[1]) if column not in inside]


@functools.cache
def table(name: str) -> Table:
    """Return a table by name; FileNotFoundError where its data is not here."""
    if name in _GENERATORS:
        return _GENERATORS[name](np.random.default_rng(zlib.crc32(name.encode())))
    if name in _BUNDLED:
        return _BUNDLED[name]()
    folder = os.environ.get("DPBNN_TABLES")
    if folder:
        return _read(Path(folder) / f"{name}.npz")
    if not os.environ.get("DPBNN_DATA"):
        raise FileNotFoundError(f"{name}: DPBNN_DATA is not set")
    return _described(name) if name in _SCHEMAS else _uci(name)


def present(names: list[str]) -> list[str]:
    """Return the names of tables that are here; the others are named on stderr."""
    here = []
    for name in names:
        try:
            table(name)
            here.append(name)
        except OSError as error:
            print(f"LEFT OUT: table {name} ({error})", file=sys.stderr, flush=True)
    return here


# Tables with data of their own

_SCHEMAS = {"adult": "adult", "abalone-age": "abalone", "abalone-rings": "abalone-rings"}
_UCI = {"power": "power", "kin8nm": "kin8nm", "naval": "naval", "protein": "protein",
        "wine-quality": "wine"}  # fmt: skip


def _uci(name: str) -> Table:
    from dpbnn.data import load
    from dpbnn.reproduce.uci import DATASETS

    about = DATASETS[_UCI[name]]
    parts = [load(_UCI[name], split=split) for split in range(SPLITS)]
    return _joined(parts, np.array(about.low, float), np.array(about.high, float), about.bounds)


def _described(name: str) -> Table:
    from dpbnn.data import load

    count = 1 if name == "adult" else SPLITS
    parts = [load(_SCHEMAS[name], split=split) for split in range(count)]
    schema = parts[0].schema
    groups, width = [], 0
    for column in schema.columns:
        if len(column.features) > 1:
            groups.append(tuple(range(width, width + len(column.features))))
        width += len(column.features)
    ones = np.ones(width)
    if parts[0].task == "classification":
        return _joined(parts, -ones, ones, classes=len(schema.classes), groups=tuple(groups))
    low, high = schema.target.bounds
    parts = [
        dataclasses.replace(p, y_train=low + (high - low) * (p.y_train.astype(float) + 1) / 2,
                            y_test=low + (high - low) * (p.y_test.astype(float) + 1) / 2)
        for p in parts
    ]  # fmt: skip
    return _joined(parts, -ones, ones, (low, high), groups=tuple(groups))


def _joined(
    parts: list[Any],
    low: np.ndarray,
    high: np.ndarray,
    target: tuple[float, float] = (0.0, 0.0),
    **about: Any,
) -> Table:
    """Return one table with the splits of all parts, which hold the same rows."""
    x = np.concatenate([parts[0].x_train, parts[0].x_test]).astype(float)
    y = np.concatenate([parts[0].y_train, parts[0].y_test])
    place = {}
    for row, key in enumerate(_keys(x, y)):
        place.setdefault(key, []).append(row)
    splits = []
    for part in parts:
        free = {key: list(rows) for key, rows in place.items()}
        sides = ((part.x_train, part.y_train), (part.x_test, part.y_test))
        splits.append(tuple(
            np.array([free[key].pop() for key in _keys(a.astype(float), b)]) for a, b in sides
        ))  # fmt: skip
    return Table(x, y, low, high, target=target, splits=tuple(splits), **about)


def _keys(x: np.ndarray, y: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in np.column_stack([x, y.astype(float)])]


def _breast_cancer() -> Table:
    """Cells in an image: radii in pixels, areas, and shares; errors below a half of the means."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    mean = np.array([40, 50, 250, 3000, 0.25, 0.5, 0.6, 0.3, 0.4, 0.15])
    error = np.array([4, 6, 30, 600, 0.05, 0.2, 0.4, 0.1, 0.1, 0.04])
    worst = np.array([50, 60, 300, 5000, 0.3, 1.5, 1.5, 0.4, 0.8, 0.3])
    high = np.concatenate([mean, error, worst])
    return Table(x, y, np.zeros(30), high, classes=2, train=455)


def _digits() -> Table:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return Table(x, y, np.zeros(64), np.full(64, 16.0), classes=10, train=1437)


def _diabetes() -> Table:
    """Age, sex (1 or 2), body mass index, blood pressure, six blood values; disease progression."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    low = np.array([15, 1, 15, 50, 80, 30, 20, 1, 3, 50], float)
    high = np.array([85, 2, 50, 150, 320, 250, 110, 10, 7, 140], float)
    return Table(x, y, low, high, target=(0.0, 400.0), train=354)


_BUNDLED: dict[str, Callable[[], Table]] = {
    "breast-cancer": _breast_cancer, "digits": _digits, "diabetes": _diabetes,
}  # fmt: skip


# Generated tables; every one has TESTED rows more than it trains on


def _labels(rng: np.random.Generator, logit: np.ndarray) -> np.ndarray:
    return (rng.random(len(logit)) < 1 / (1 + np.exp(-logit))).astype(np.int64)


def _made(x: np.ndarray, y: np.ndarray, low: Any, high: Any, **about: Any) -> Table:
    ends = [np.broadcast_to(np.asarray(end, float), x.shape[1:]).copy() for end in (low, high)]
    about = {"classes": 2 if "target" not in about else 0, "train": len(x) - TESTED} | about
    return Table(x, y, *ends, **about)


def _interactions(rng: np.random.Generator) -> Table:
    x = rng.uniform(-1, 1, (10_000 + TESTED, 10))
    logit = 5 * x[:, 0] * x[:, 1] + 5 * x[:, 2] * np.sign(x[:, 3]) + x[:, 4]
    return _made(x, _labels(rng, logit), -1, 1)


def _imbalanced(rng: np.random.Generator) -> Table:
    x = rng.standard_normal((10_000 + TESTED, 8))
    logit = -6 + 1.2 * x[:, 0] + x[:, 1] + 0.8 * x[:, 2] ** 2 - 0.6 * x[:, 3]
    return _made(x, _labels(rng, logit), -4, 4)


def _noise_columns(rng: np.random.Generator) -> Table:
    x = rng.uniform(-1, 1, (5_000 + TESTED, 60))
    logit = 3 * (x[:, 0] - x[:, 1]) + 2 * np.sign(x[:, 2]) + 1.5 * x[:, 3]
    return _made(x, _labels(rng, logit), -1, 1)


def _wide_bounds(rng: np.random.Generator) -> Table:
    """Columns of standard deviation 1 around a centre of their own, known to lie in +-100."""
    x = rng.standard_normal((10_000 + TESTED, 8))
    logit = 1.5 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3]
    centre = np.array([-20, 0, 5, 30, -5, 10, 0, 40])
    return _made(x + centre, _labels(rng, logit), -100, 100)


def _heavy_tails(rng: np.random.Generator) -> Table:
    x = rng.standard_t(2, (5_000 + TESTED, 8))
    logit = 2 * np.arctan(x[:, 0]) - 2 * np.arctan(x[:, 1]) + np.sign(x[:, 2]) + 0.2 * x[:, 3]
    return _made(x, _labels(rng, logit), -30, 30)


def _small(rng: np.random.Generator) -> Table:
    x = rng.standard_normal((200 + TESTED, 8))
    return _made(x, _labels(rng, 1.5 * x[:, 0] - 1.2 * x[:, 1] + 0.8 * x[:, 2]), -4, 4)


def _large(rng: np.random.Generator) -> Table:
    x = rng.standard_normal((50_000 + TESTED, 20))
    logit = x[:, 0] + np.sin(2 * x[:, 1]) + x[:, 2] * x[:, 3] + 0.5 * (x[:, 4] ** 2 - 1) - x[:, 5]
    return _made(x, _labels(rng, logit), -4, 4)


def _categories(
    rng: np.random.Generator, rows: int, sizes: tuple[int, ...]
) -> tuple[list[np.ndarray], np.ndarray, tuple[tuple[int, ...], ...]]:
    """Return codes of skewed categorical columns, all of them one-hot, and their columns."""
    codes, ones, groups, width = [], [], [], 0
    for size in sizes:
        chance = 1 / (1 + np.arange(size))
        codes.append(rng.choice(size, rows, p=chance / chance.sum()))
        ones.append(np.eye(size)[codes[-1]])
        groups.append(tuple(range(width, width + size)))
        width += size
    return codes, np.concatenate(ones, 1), tuple(groups)


def _categorical(rng: np.random.Generator) -> Table:
    rows, sizes = 8_000 + TESTED, (3, 5, 8, 12)
    codes, ones, groups = _categories(rng, rows, sizes)
    numbers = rng.standard_normal((rows, 3))
    effects = [rng.normal(0, 1, size) for size in sizes]
    logit = sum(effect[code] for effect, code in zip(effects, codes, strict=True))
    logit = logit + numbers[:, 0] * np.array([1.5, -1.5, 0])[codes[0]] + 0.5 * numbers[:, 1]
    ends = np.concatenate([np.ones(ones.shape[1]), np.full(3, 4.0)])
    x = np.concatenate([ones, numbers], 1)
    return _made(x, _labels(rng, logit), -ends, ends, groups=groups)


def _monotone(rng: np.random.Generator) -> Table:
    x = rng.exponential(1, (5_000 + TESTED, 6))
    logit = -2 + 4 * (1 - np.exp(-2 * x[:, 0])) - 2 * np.sqrt(x[:, 1]) + 2 * (x[:, 2] > 1)
    return _made(x, _labels(rng, logit), 0, 6)


def _multi_class(rng: np.random.Generator) -> Table:
    x = rng.standard_normal((8_000 + TESTED, 6))
    scores = 1.5 * x @ rng.standard_normal((6, 5)) + np.cos(2 * x @ rng.standard_normal((6, 5)))
    return _made(x, (scores + rng.gumbel(size=scores.shape)).argmax(1), -4, 4, classes=5)


def _friedman(rng: np.random.Generator) -> Table:
    x = rng.random((5_000 + TESTED, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y += 10 * x[:, 3] + 5 * x[:, 4] + rng.standard_normal(len(x))
    return _made(x, y, 0, 1, target=(-4.0, 34.0))


def _prices(rng: np.random.Generator) -> Table:
    """Log-normal sizes, grades, and prices from 0 to 20 000 that are skewed like diamonds'."""
    rows = 20_000 + TESTED
    codes, ones, groups = _categories(rng, rows, (5, 7))
    size = np.minimum(np.exp(rng.normal(-0.4, 0.5, rows)), 5)
    age = rng.uniform(0, 50, rows)
    log = 8.2 + 1.7 * np.log(size) - 0.1 * codes[0] - 0.08 * codes[1] - 0.004 * age
    y = np.minimum(np.exp(log + rng.normal(0, 0.15, rows)), 20_000)
    ends = np.ones(12)
    x = np.concatenate([ones, size[:, None], age[:, None]], 1)
    return _made(x, y, [*-ends, 0, 0], [*ends, 5, 50], target=(0.0, 20_000.0), groups=groups)


def _small_numbers(rng: np.random.Generator) -> Table:
    x = rng.standard_normal((200 + TESTED, 6))
    y = 2 * x[:, 0] - x[:, 1] + 0.5 * x[:, 2] + rng.standard_normal(len(x))
    return _made(x, y, -4, 4, target=(-10.0, 10.0))


def _large_numbers(rng: np.random.Generator) -> Table:
    x = rng.standard_normal((50_000 + TESTED, 15))
    y = 3 * np.tanh(x[:, 0]) + 2 * np.sin(2 * x[:, 1]) + x[:, 2] * x[:, 3] + x[:, 4]
    return _made(x, y + rng.standard_normal(len(x)), -4, 4, target=(-15.0, 15.0))


def _wide_bounds_numbers(rng: np.random.Generator) -> Table:
    x = rng.standard_normal((10_000 + TESTED, 8))
    y = 10 + 2 * x[:, 0] - x[:, 1] + np.abs(x[:, 2]) + 0.7 * rng.standard_normal(len(x))
    return _made(x + np.array([-20, 0, 5, 30, -5, 10, 0, 40]), y, -100, 100, target=(-100.0, 100.0))


def _heavy_noise(rng: np.random.Generator) -> Table:
    x = rng.uniform(-1, 1, (5_000 + TESTED, 8))
    y = 3 * x[:, 0] + 2 * np.cos(3 * x[:, 1]) + x[:, 2] * x[:, 3]
    return _made(x, y + 0.7 * rng.standard_t(3, len(x)), -1, 1, target=(-20.0, 20.0))


def _wages(rng: np.random.Generator) -> Table:
    """Categories, a hump over age, and noise that grows with the mean."""
    rows = 8_000 + TESTED
    codes, ones, groups = _categories(rng, rows, (2, 4, 10))
    age, hours = rng.uniform(18, 65, rows), np.clip(rng.normal(38, 8, rows), 5, 80)
    mean = 12 + 0.6 * (age - 18) - 0.009 * (age - 18) ** 2 + 3 * codes[1] + 0.5 * codes[2]
    mean = mean + 0.1 * (hours - 38) - 2 * codes[0]
    y = np.clip(mean * (1 + 0.25 * rng.standard_normal(rows)), 0, 100)
    ends = np.ones(16)
    x = np.concatenate([ones, age[:, None], hours[:, None]], 1)
    return _made(x, y, [*-ends, 18, 0], [*ends, 65, 80], target=(0.0, 100.0), groups=groups)


_GENERATORS: dict[str, Callable[[np.random.Generator], Table]] = {
    "interactions": _interactions, "imbalanced": _imbalanced, "noise-columns": _noise_columns,
    "wide-bounds": _wide_bounds, "heavy-tails": _heavy_tails, "small": _small, "large": _large,
    "categorical": _categorical, "monotone": _monotone, "multi-class": _multi_class,
    "friedman": _friedman, "prices": _prices, "small-numbers": _small_numbers,
    "large-numbers": _large_numbers, "wide-bounds-numbers": _wide_bounds_numbers,
    "heavy-noise": _heavy_noise, "wages": _wages,
}  # fmt: skip


# Tables as files


def _read(path: Path) -> Table:
    with np.load(path) as file:
        found = dict(file)
    splits = tuple((found[f"train_{k}"], found[f"test_{k}"]) for k in range(int(found["splits"])))
    groups, codes = [], found["groups"]
    for number in range(codes.max(initial=-1) + 1):
        groups.append(tuple(np.flatnonzero(codes == number).tolist()))
    return Table(
        found["x"].astype(float), found["y"], found["low"], found["high"], int(found["classes"]),
        tuple(found["target"].tolist()), int(found["train"]), tuple(groups), splits,
    )  # fmt: skip


def write(name: str, folder: Path) -> None:
    """Write a table as an npz file."""
    one = table(name)
    groups = np.full(one.x.shape[1], -1)
    for number, columns in enumerate(one.groups):
        groups[list(columns)] = number
    rows = {f"train_{k}": train for k, (train, _) in enumerate(one.splits)}
    rows |= {f"test_{k}": test for k, (_, test) in enumerate(one.splits)}
    np.savez_compressed(
        folder / f"{name}.npz", x=one.x, y=one.y, low=one.low, high=one.high, classes=one.classes,
        target=np.array(one.target), train=one.train, groups=groups, splits=len(one.splits), **rows,
    )  # fmt: skip


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    for each in present([*_SCHEMAS, *_UCI]):
        write(each, place)
        print(place / f"{each}.npz")
