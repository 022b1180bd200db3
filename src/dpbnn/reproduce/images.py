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
_MNIST = "edc0d109"  # digest of its training images and labels


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
    """Return the images of the data folder, on the device; in a fast run fewer of them.

    They are MNIST, or any other set in its file format (idx, gzip or not), in the folder itself or
    in its subfolder "mnist". A fast run without files takes scikit-learn's digits, enlarged.
    """
    above = Path(settings.data or os.environ.get("DPBNN_DATA", "."))
    folder = next((f for f in (above / "mnist", above) if _file(f, "train-images-idx3")), None)
    if folder is not None:
        parts = [_read(folder, part) for part in ("train", "t10k")]
        digest = hashlib.sha256(b"".join(values.tobytes() for values in parts[0])).hexdigest()[:8]
        name = {_MNIST: "mnist"}.get(digest, f"images {digest}")
    elif settings.fast:
        parts, name = _digits(), "digits"
    else:
        raise ValueError(
            f"{above}: MNIST's files (train-images-idx3-ubyte.gz and so on) are neither here nor "
            f"in its folder mnist; set DPBNN_DATA or pass --data, or --fast"
        )
    if settings.fast:
        parts = [(x[:n], y[:n]) for (x, y), n in zip(parts, (600, 200), strict=True)]
    x, x_test = (torch.from_numpy(p[0]).float().div(255)[:, None] for p in parts)
    y, y_test = (torch.from_numpy(p[1].astype(np.int64)) for p in parts)
    device = settings.device
    return Images(x.to(device), y.to(device), x_test.to(device), y_test, name)


def _file(folder: Path, name: str) -> Path | None:
    """Return a file in MNIST's format, packed or not, if it is there."""
    places = (folder / f"{name}-ubyte.gz", folder / f"{name}-ubyte")
    return next((path for path in places if path.is_file()), None)


def _numbers(folder: Path, name: str) -> np.ndarray:
    """Return the numbers of an idx file of bytes, in their shape."""
    path = _file(folder, name)
    if path is None:
        raise ValueError(f"{folder / name}-ubyte.gz: is not here")
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    axes = content[3]
    shape = np.frombuffer(content, ">i4", axes, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


def _read(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = (_numbers(folder, f"{part}-{kind}") for kind in ("images-idx3", "labels-idx1"))
    if x.shape[1:] != (28, 28) or len(x) != len(y) or y.max(initial=0) > 9:
        raise ValueError(
            f"{folder}: {part} has images of shape {list(x.shape)} and {len(y)} labels up to "
            f"{y.max(initial=0)}; they must be as MNIST's: [n, 28, 28], and n labels from 0 to 9"
        )
    return x, y


def _digits() -> list[tuple[np.ndarray, np.ndarray]]:
    from sklearn.datasets import load_digits

    found = load_digits()
    large = np.kron(found.images, np.ones((3, 3))) * 255 / 16
    x = np.pad(large, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    return [(x[:1400], found.target[:1400]), (x[1400:], found.target[1400:])]
