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
_PAD = _WORD * (_WIDEST + 1)
_MASKS = np.array(  # for every word of a cell and every size of the cell, the bytes that count
    [
        [(1 << 8 * min(max(size - word * _WORD, 0), _WORD)) - 1 for size in range(_PAD)]
        for word in range(_WIDEST)
    ],
    dtype=np.uint64,
)
_SLOTS = 16  # bits of a key that choose its slot
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Cells(Sequence[str]):
    """The texts of one column; a part of them shares the bytes.

    Args:
        data: UTF-8, without NUL, and `_PAD` bytes behind the last cell.
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
        words = self._words()
        keys = _keys(words)
        known = np.unique(keys[:_LOOK])
        if 2 * len(known) > min(len(keys), _LOOK):
            return None
        at = _slots(known, keys)
        if (other := known[at] != keys).any():
            known = np.union1d(known, keys[other])
            at = _slots(known, keys)
            other = known[at] != keys
            at[other] = np.searchsorted(known, keys[other])
        rows = np.empty(len(known), dtype=np.intp)
        rows[at] = np.arange(len(keys))
        if len(words) > 1 and any((word[rows][at] != word).any() for word in words):
            return None  # two texts have one key
        return [self[row] for row in rows.tolist()], at

    def _words_needed(self) -> int:
        widest = int((self._ends - self._starts).max(initial=1))
        return max(1, -(-widest // _WORD))

    def _words(self) -> np.ndarray:
        """Return the bytes of all cells as numbers [words, rows], zeros behind the end."""
        at = np.ndarray((len(self._data) - _WORD + 1,), "<u8", self._data, strides=(1,))
        size = self._ends - self._starts
        found = np.empty((self._words_needed(), len(self)), dtype=np.uint64)
        for i, word in enumerate(found):
            np.bitwise_and(at[self._starts + i * _WORD], _MASKS[i].take(size), out=word)
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
    kind = np.int32 if size + _PAD < 2**31 else np.int64
    shape = (blocks[0].starts.shape[1], sum(len(block.starts) for block in blocks))
    starts, ends = np.empty(shape, kind), np.empty(shape, kind)
    row = base = 0
    for block in blocks:
        stop = row + len(block.starts)
        np.add(block.starts.T, kind(base), out=starts[:, row:stop], casting="same_kind")
        np.add(block.ends.T, kind(base), out=ends[:, row:stop], casting="same_kind")
        row, base = stop, base + len(block.data)
    data = b"".join((*(block.data for block in blocks), bytes(_PAD)))
    spaced = any(block.spaced for block in blocks)
    return [Cells(data, *places, spaced) for places in zip(starts, ends, strict=True)]


def _keys(words: np.ndarray) -> np.ndarray:
    """Return one number for each row that equal texts share, and other texts hardly ever."""
    keys: np.ndarray = words[0]
    for word in words[1:]:
        keys = (keys ^ (keys >> np.uint64(29))) * _MIX + word
    return keys


def _slots(known: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return where each key stands among the known ones, mostly: two of them may share a slot."""
    table = np.zeros(1 << _SLOTS, dtype=np.intp)
    table[known * _MIX >> np.uint64(64 - _SLOTS)] = np.arange(len(known))
    found: np.ndarray = table[keys * _MIX >> np.uint64(64 - _SLOTS)]
    return found
