"""Tables in: reading them, encoding them by a public schema, the papers' datasets by name."""

from dpbnn.data.column import Column
from dpbnn.data.datasets import DATASETS, Dataset, load, load_table
from dpbnn.data.files import read_table
from dpbnn.data.frames import as_table
from dpbnn.data.paid import PaidBounds, learn_bounds
from dpbnn.data.schema import Schema
from dpbnn.data.standardising import Standardisation, private_standardisation
from dpbnn.data.statistics import (
    Bounds,
    Histograms,
    private_bounds,
    private_counts,
    private_quantiles,
    share,
    signed_log_grid,
)
from dpbnn.data.table import Table, TableError, TableWarning

__all__ = [
    "DATASETS",
    "Bounds",
    "Column",
    "Dataset",
    "Histograms",
    "PaidBounds",
    "Schema",
    "Standardisation",
    "Table",
    "TableError",
    "TableWarning",
    "as_table",
    "learn_bounds",
    "load",
    "load_table",
    "private_bounds",
    "private_counts",
    "private_quantiles",
    "private_standardisation",
    "read_table",
    "share",
    "signed_log_grid",
]
