"""Where the records of a run come from: arrays, memory maps, tables on disk, datasets.

A source gives records by their numbers. It knows no network, and draws no batch itself.
"""

from dpbnn.sources.bits import Bits
from dpbnn.sources.opening import DataSource, opened, rows_of_arrays, without
from dpbnn.sources.prefetch import ahead, seed_of
from dpbnn.sources.source import Arrays, Block, Records, Source
from dpbnn.sources.streamed import StreamedRows, filled

__all__ = [
    "Arrays",
    "Bits",
    "Block",
    "DataSource",
    "Records",
    "Source",
    "StreamedRows",
    "ahead",
    "filled",
    "opened",
    "rows_of_arrays",
    "seed_of",
    "without",
]
