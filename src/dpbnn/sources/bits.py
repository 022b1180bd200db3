"""One bit for each record: which are bad, of more records than a byte each should be kept for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["Bits"]


class Bits:
    """A mask of records, eight to a byte.

    Args:
        count: number of records.

    Attributes:
        total: how many bits are set.
    """

    def __init__(self, count: int) -> None:
        self.count, self.total = count, 0
        self._bytes = np.zeros(-(-count // 8), dtype=np.uint8)

    def put(self, start: int, values: Tensor) -> None:
        """Set the bits of consecutive records, once; `start` is a multiple of 8."""
        packed = np.packbits(values.cpu().numpy())
        self._bytes[start // 8 : start // 8 + len(packed)] = packed
        self.total += int(values.sum())

    def at(self, records: Tensor) -> Tensor:
        """Return the bits of some records."""
        numbers = records.numpy()
        return torch.from_numpy(self._bytes[numbers >> 3] >> (7 - (numbers & 7)) & 1 > 0)

    def mask(self) -> Tensor:
        """Return all bits, a byte for each."""
        return torch.from_numpy(np.unpackbits(self._bytes, count=self.count).view(np.bool_))
