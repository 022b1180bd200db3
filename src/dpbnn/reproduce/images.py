"""Images for the reproductions: MNIST's files, or any set of the same shape in their place."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpbnn.reproduce.result import Settings

__all__ = ["Images", "images"]

_MEAN, _STD = 0.1307, 0.3081


@dataclasses.dataclass(frozen=True)
class Images:
    """Grey images of 28 x 28 pixels in [0, 1] and their classes.

    Attributes:
        x: [n, 1, 28, 28] to train on.
        y: classes, 0 to 9.
        x_test: to score on.
        y_test: their classes, on the CPU.
        name: what they are: "mnist", or a digest for another set.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    name: str

    def standardised(self) -> Images:
        """Return the images scaled by MNIST's published constants, which are taken for public."""
        x, x_test = ((part - _MEAN) / _STD for part in (self.x, self.x_test))
        return dataclasses.replace(self, x=x, x_test=x_test)

    def validation(self) -> Images:
        """Return the last sixth of the training images as the ones to score on."""
        cut = len(self.x) * 5 // 6
        parts = self.x[:cut], self.y[:cut], self.x[cut:], self.y[cut:].cpu()
        return Images(*parts, f"{self.name}, validation")


def images(settings: Settings) -> Images:
    """Return the images of `DATA/mnist`, on the device; in a fast run fewer of them.

    The folder may hold any other image set in MNIST's file format. A fast run without files takes
    scikit-learn's digits, enlarged.
    """
    folder = Path(settings.data or os.environ.get("DPBNN_DATA", ".")) / "mnist"
    if (folder / "train-images-idx3-ubyte.gz").is_file():
        parts = [_read(folder, part) for part in ("train", "t10k")]
        digest = hashlib.sha256(parts[0][1].tobytes()).hexdigest()[:8]
        name = {"1feba77c": "mnist"}.get(digest, f"images {digest}")
    elif settings.fast:
        parts, name = _digits(), "digits"
    else:
        raise ValueError(
            f"{folder}: MNIST's files are not here; set DPBNN_DATA or pass --data, or --fast"
        )
    if settings.fast:
        parts = [(x[:n], y[:n]) for (x, y), n in zip(parts, (600, 200), strict=True)]
    x, x_test = (torch.from_numpy(p[0]).float().div(255)[:, None] for p in parts)
    y, y_test = (torch.from_numpy(p[1].astype(np.int64)) for p in parts)
    device = settings.device
    return Images(x.to(device), y.to(device), x_test.to(device), y_test, name)


def _read(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    pixels = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    x = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28).copy()
    return x, np.frombuffer(labels, np.uint8, offset=8).copy()


def _digits() -> list[tuple[np.ndarray, np.ndarray]]:
    from sklearn.datasets import load_digits

    found = load_digits()
    large = np.kron(found.images, np.ones((3, 3))) * 255 / 16
    x = np.pad(large, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    return [(x[:1400], found.target[:1400]), (x[1400:], found.target[1400:])]
