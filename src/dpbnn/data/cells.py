"""Cells: the texts of a column as places in the bytes of a file, read when asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

__all__ = ["Block", "Cells", "columns"]

_WORD = 8  # bytes that are looked at at once
_WIDEST = 8  # words in a cell beyond which cells are read one by one
_LOOK = 1024  # rows that say whether a column repeats itself
_MASKS = np.array([(1 << 8 * used) - 1 for used in range(_WORD + 1)], dtype=np.uint64)
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Cells(Sequence[str]):
    """The texts of one column; a part of them shares the bytes.

    Args:
        data: UTF-8, without NUL, and eight bytes more than the last cell needs.
        starts: where each cell begins.
        ends: where each cell ends.
        spaced: whether white space around the texts has to be taken off.
    """

    def __init__(self, data: bytes, starts: np.ndarray, ends: np.ndarray, spaced: bool) -> None:
        self._data, self._starts, self._ends, self._spaced = data, starts, ends, spaced

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Cells: ...

    def __getitem__(self, index: int | slice) -> str | Cells:
        if isinstance(index, slice):
            return Cells(self._data, self._starts[index], self._ends[index], self._spaced)
        return self._data[self._starts[index] : self._ends[index]].decode().strip()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """Return all texts."""
        if self._words_needed() > _WIDEST:
            places = zip(self._starts.tolist(), self._ends.tolist(), strict=True)
            texts = [self._data[start:end].decode() for start, end in places]
        else:
            words = np.ascontiguousarray(self._words().T, dtype="<u8")
            fixed = words.view(f"S{words.shape[1] * _WORD}")[:, 0]
            texts = [*map(bytes.decode, fixed.tolist())]
        return [*map(str.strip, texts)] if self._spaced else texts

    def distinct(self) -> tuple[list[str], np.ndarray] | None:
        """Return texts that hold every one of the column, and the number of each row's among them.

        None where the first rows hardly repeat themselves, so that nothing would be saved.
        """
        if self._words_needed() > _WIDEST:
            return None
        first = _keys(self[:_LOOK]._words())
        if 2 * len(np.unique(first)) > len(first):
            return None
        words = self._words()
        _, rows, numbers = np.unique(_keys(words), return_index=True, return_inverse=True)
        if len(words) > 1 and not np.array_equal(words[:, rows[numbers]], words):  # a collision
            return None
        return [self[row] for row in rows.tolist()], numbers

    def _words_needed(self) -> int:
        widest = int((self._ends - self._starts).max(initial=1))
        return max(1, -(-widest // _WORD))

    def _words(self) -> np.ndarray:
        """Return the bytes of all cells as numbers [words, rows], zeros behind the end."""
        last = len(self._data) - _WORD
        at = np.ndarray((last + 1,), "<u8", self._data, strides=(1,))
        size = self._ends - self._starts
        found = np.empty((self._words_needed(), len(self)), dtype=np.uint64)
        for i, word in enumerate(found):
            used = np.clip(size - i * _WORD, 0, _WORD) if len(found) > 1 else size
            np.bitwise_and(at[np.minimum(self._starts + i * _WORD, last)], _MASKS[used], out=word)
        return found


@dataclasses.dataclass(frozen=True)
class Block:
    """Whole lines that were cut into cells.

    Attributes:
        data: their bytes.
        starts: where each cell begins [rows, columns].
        ends: where each cell ends [rows, columns].
        spaced: whether white space around the texts has to be taken off.
    """

    data: bytes
    starts: np.ndarray
    ends: np.ndarray
    spaced: bool

    @classmethod
    def of(cls, texts: Sequence[Sequence[str]]) -> Block:
        """Return the block that holds the texts [columns][rows]."""
        parts = [text.encode() for column in texts for text in column]
        bounds = np.cumsum([0, *map(len, parts)])
        shape = (len(texts), -1)
        return cls(
            b"".join(parts), bounds[:-1].reshape(shape).T, bounds[1:].reshape(shape).T, False
        )

    def lists(self) -> list[list[str]]:
        """Return the texts of every column."""
        return [cells.tolist() for cells in columns([self])]


def columns(blocks: Sequence[Block]) -> list[Cells]:
    """Return the columns of blocks that follow one another."""
    size = sum(len(block.data) for block in blocks)
    kind = np.int32 if size + _WORD * (_WIDEST + 1) < 2**31 else np.int64
    shape = (blocks[0].starts.shape[1], sum(len(block.starts) for block in blocks))
    starts, ends = np.empty(shape, kind), np.empty(shape, kind)
    row = base = 0
    for block in blocks:
        stop = row + len(block.starts)
        np.add(block.starts.T, base, out=starts[:, row:stop], casting="same_kind")
        np.add(block.ends.T, base, out=ends[:, row:stop], casting="same_kind")
        row, base = stop, base + len(block.data)
    data = b"".join((*(block.data for block in blocks), bytes(_WORD)))
    spaced = any(block.spaced for block in blocks)
    return [Cells(data, *places, spaced) for places in zip(starts, ends, strict=True)]


def _keys(words: np.ndarray) -> np.ndarray:
    """Return one number for each row that equal texts share, and other texts hardly ever."""
    keys = words[0]
    for word in words[1:]:
        keys = (keys ^ (keys >> np.uint64(29))) * _MIX + word
    return keys
