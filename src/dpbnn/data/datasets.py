"""The papers' datasets by name: from a local folder, else from their public source."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import importlib.resources
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from dpbnn.data.download import BadDownload, fetch, sha256
from dpbnn.data.files import read_table
from dpbnn.data.schema import Schema
from dpbnn.data.table import Table, TableError

_ADULT = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week",
    "native-country", "income",
)  # fmt: skip
_ABALONE = (
    "sex", "length", "diameter", "height", "whole-weight", "shucked-weight", "viscera-weight",
    "shell-weight", "rings",
)  # fmt: skip
_REGRESSIONS = ("naval", "kin8nm", "power", "wine", "protein")
_SCHEMAS = {"adult": "adult", "abalone": "abalone-age", "abalone-rings": "abalone-rings"}
DATASETS = ("mnist", "digits", *_REGRESSIONS, *_SCHEMAS)
"""Names that `load` knows."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A dataset, cut into training and test parts.

    Attributes:
        name: as given to `load`.
        task: "classification" or "regression".
        x_train: inputs: images [rows, 1, 28, 28] in [0, 1], digits [rows, 64] in [0, 1], tables as
            their schema encodes them, the other regressions in their own units (float64).
        y_train: class numbers, or targets; scaled to [-1, 1] where there is a schema.
        x_test: likewise.
        y_test: likewise.
        classes: names of the classes; None for a regression.
        schema: the public schema, for tables of mixed columns.
        split: which split it is.
    """

    name: str
    task: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...] | None = None
    schema: Schema | None = None
    split: int = 0


def load(name: str, folder: str | os.PathLike[str] | None = None, split: int = 0) -> Dataset:
    """Load a dataset by name; its files are checked against their published content.

    Files are looked for in `folder` (by default the one that DPBNN_DATA names), then in the cache
    (DPBNN_CACHE, by default ~/.cache/dpbnn), then downloaded into the cache.

    Args:
        name: mnist, digits, naval, kin8nm, power, wine, protein, adult, abalone (more than nine
            rings or not) or abalone-rings.
        folder: holds the files.
        split: which training and test rows: one of the 20 (protein: 5) standard splits of the UCI
            regressions, or of 5 of digits and abalone; mnist and adult have one.
    """
    if name not in DATASETS:
        raise TableError(f"{name!r}: is no dataset; give one of {', '.join(DATASETS)}")
    most = len(_sources()[name]["splits"]) if name in _REGRESSIONS else _SPLITS.get(name, 1)
    if not 0 <= split < most:
        raise TableError(f"split={split}: {name} has splits 0 to {most - 1}")
    if name == "mnist":
        return _mnist(folder)
    if name == "digits":
        return _digits(split)
    if name in _REGRESSIONS:
        return _regression(name, folder, split)
    train, test, schema = load_table(name, folder, split)
    parts = (*schema.encode(train, target=True), *schema.encode(test, target=True))
    return Dataset(name, schema.task, *parts, classes=schema.classes, schema=schema, split=split)  # type: ignore[arg-type]


_SPLITS = {"digits": 5, "abalone": 5, "abalone-rings": 5}


def load_table(
    name: str, folder: str | os.PathLike[str] | None = None, split: int = 0
) -> tuple[Table, Table, Schema]:
    """Return the training table, the test table and the public schema of adult or abalone.

    Args:
        name: adult, abalone or abalone-rings.
        folder: as in `load`.
        split: as in `load`.
    """
    if name not in _SCHEMAS:
        raise TableError(f"{name!r}: is no table of mixed columns; give one of {[*_SCHEMAS]}")
    schema = Schema.from_toml(_resource(f"schemas/{_SCHEMAS[name]}.toml"))
    if name == "adult":
        train, test = (
            read_table(path, header=False, names=_ADULT, separator=",", comment="|")
            for path in _files("adult", folder)
        )
        return train, _without_dots(test), schema
    (path,) = _files("abalone", folder)
    table = read_table(path, header=False, names=_ABALONE, separator=",")
    ends = [table.n * part // 5 for part in (4 - split, 5 - split)]
    held_out = np.zeros(table.n, dtype=bool)
    held_out[ends[0] : ends[1]] = True
    return table.take(~held_out), table.take(held_out), schema


def _mnist(folder: Any) -> Dataset:
    parts = []
    for path in _files("mnist", folder):
        with gzip.open(path) as file:
            content = file.read()
        if "images" in path.name:
            pixels = np.frombuffer(content, np.uint8, offset=16).reshape(-1, 1, 28, 28)
            parts.append(pixels.astype(np.float32) / 255)
        else:
            parts.append(np.frombuffer(content, np.uint8, offset=8).astype(np.int64))
    return Dataset("mnist", "classification", *parts, classes=tuple("0123456789"))


def _digits(split: int) -> Dataset:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    test = np.arange(len(x)) % 5 == split
    x, y = (x / 16).astype(np.float32), y.astype(np.int64)
    parts = (x[~test], y[~test], x[test], y[test])
    return Dataset("digits", "classification", *parts, classes=tuple("0123456789"), split=split)


def _regression(name: str, folder: Any, split: int) -> Dataset:
    source = _sources()[name]
    (path,) = _files(name, folder)
    values = np.loadtxt(path)
    x, y = values[:, : source["inputs"]], values[:, source["inputs"]]
    train, test = _rows(source, folder, split)
    return Dataset(name, "regression", x[train], y[train], x[test], y[test], split=split)


def _rows(source: dict[str, Any], folder: Any, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a standard split: from splits.npz, or as published, file by file."""
    for place in _places(folder):
        path = place / source["folder"] / "splits.npz"
        if path.is_file():
            with np.load(path) as kept:
                train, test = kept[f"train_{split}"], kept[f"test_{split}"]
            if problem := _wrong_split(source, split, train, test):
                raise TableError(f"{path}: {problem}; replace the file, or delete it")
            return train, test
    paths = []
    for part in ("train", "test"):
        name = f"index_{part}_{split}.txt"
        entry = {"path": f"{source['folder']}/{name}", "urls": [f"{source['source']}/{name}"]}
        paths.append(_file(entry, folder))
    parts = [np.loadtxt(path).astype(np.int32) for path in paths]
    if problem := _wrong_split(source, split, *parts):
        for path in paths:
            path.unlink()
        raise TableError(
            f"{source['source']}: split {split} {problem}; put a checked copy of splits.npz below "
            f"the folder that DPBNN_DATA names"
        )
    return parts[0], parts[1]


def _wrong_split(
    source: dict[str, Any], split: int, train: np.ndarray, test: np.ndarray
) -> str | None:
    digest = sha256(np.concatenate([train, test]).astype("<i4").tobytes())[:16]
    if digest == source["splits"][split]:
        return None
    return f"has checksum {digest} instead of {source['splits'][split]}"


def _files(name: str, folder: Any) -> list[Path]:
    return [_file(entry, folder) for entry in _sources()[name]["files"]]


def _file(entry: dict[str, Any], folder: Any) -> Path:
    """Return a file's path: found and checked, or downloaded and checked."""
    for place in _places(folder):
        for path in (place / entry["path"], place / f"{entry['path']}.gz"):
            if path.is_file():
                if problem := _wrong(path, entry):
                    raise TableError(f"{path}: {problem}; replace the file, or delete it")
                return path
    path = _cache() / entry["path"]
    problems = []
    for url in entry["urls"]:
        try:
            fetch(url, path, lambda part: _wrong(part, entry))
        except BadDownload as error:
            problems.append(str(error))
        else:
            return path
    raise TableError(
        f"{entry['path']}: is not here and could not be downloaded ({'; '.join(problems)}); get it "
        f"from {entry['urls'][0]} and put it at {_places(folder)[0] / entry['path']}"
    )


def _wrong(path: Path, entry: dict[str, Any]) -> str | None:
    if "sha256" not in entry:
        return None
    content = path.read_bytes()
    if path.suffix == ".gz" and not entry["path"].endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError):
            return "is a damaged gzip file"
    digest = sha256(content)
    if digest == entry["sha256"]:
        return None
    return f"has sha256 {digest[:16]}... instead of {entry['sha256'][:16]}..."


def _places(folder: Any) -> list[Path]:
    given = folder or os.environ.get("DPBNN_DATA")
    return [*([Path(given)] if given else []), _cache()]


def _cache() -> Path:
    return Path(os.environ.get("DPBNN_CACHE") or Path.home() / ".cache" / "dpbnn")


@functools.cache
def _sources() -> dict[str, Any]:
    return tomllib.loads(_resource("sources.toml"))


def _resource(name: str) -> str:
    return (importlib.resources.files("dpbnn.data") / name).read_text(encoding="utf-8")


def _without_dots(table: Table) -> Table:
    """Return Adult's test table with the classes spelled as in its training table."""
    columns = {name: table.raw(name) for name in table.names}
    columns["income"] = np.array([v.rstrip(".") for v in columns["income"]], dtype=object)
    lines = np.arange(2, table.n + 2)
    return Table(columns, source=table.source, lines=lines, missing=table.missing)
