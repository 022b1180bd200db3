"""The contents of a report: plain values, without access to the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from dpbnn.privacy.statement import PrivacyStatement


@dataclasses.dataclass(frozen=True)
class Example:
    """A test record and what every posterior draw says about it.

    Attributes:
        name: how the page calls it, such as "test record 404".
        truth: its label, as shown.
        prediction: the predicted label, as shown.
        uncertainty: what it was ranked by: predictive entropy in nats, or predictive std.
        draws: class probabilities of every posterior draw, [S, K]; for a real target the mean that
            every draw predicts, [S].
        image: grey values [h, w] or colours [h, w, 3], in 0..1.
        row: columns and values, where it is no image.
    """

    name: str
    truth: str
    prediction: str
    uncertainty: float
    draws: np.ndarray
    image: np.ndarray | None = None
    row: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Examples:
    """The most and the least certain test records.

    Attributes:
        certain: surest first.
        uncertain: least sure first.
        classes: names of the classes; empty for a real target.
    """

    certain: Sequence[Example]
    uncertain: Sequence[Example]
    classes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Band:
    """Predictions along one input, with the two kinds of uncertainty apart.

    Attributes:
        x: positions, [N].
        mean: predictive mean, [N].
        epistemic: std of the mean over posterior draws, [N].
        aleatoric: noise std, [N].
        x_label: name of the input.
        y_label: name of the target.
        points: test records (x, y), drawn only where the test data is public.
        truth: the true function at x, where it is known.
        note: what is held fixed, in a sentence.
        bounds: public range of the target, which the bands do not leave.
    """

    x: Sequence[float] | np.ndarray
    mean: Sequence[float] | np.ndarray
    epistemic: Sequence[float] | np.ndarray
    aleatoric: Sequence[float] | np.ndarray
    x_label: str = "x"
    y_label: str = "y"
    points: tuple[Any, Any] | None = None
    truth: Sequence[float] | np.ndarray | None = None
    note: str = ""
    bounds: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class RunPage:
    """One run, as the page shows it.

    Attributes:
        privacy: the statement, or its `to_dict()`.
        evaluation: the `Evaluation` of a test set, or its `to_dict()`.
        title: heading of the page.
        settings: model, method, plan and so on; mappings in it become groups.
        versions: names and versions of the software.
        hashes: names of files and their SHA-256.
        diagnostics: the `Diagnostics` of the chains, or its `to_dict()`.
        examples: test records to show; shown only where the test data is public.
        band: predictions along one input, for a real target.
        bayesian: a Bayesian-DP estimate, or its `to_dict()`; never shown as epsilon.
        test_data_public: whether single test records may be shown.
        ledger: the ledger's path as a reader would type it; None where there is none.
        created: date of the run, as shown.
        rows: number of rows by what they were used for, such as training.
        public: what was known in public: columns and their bounds or categories.
        promise: what prediction sets or intervals promise, in one or two sentences.
    """

    privacy: PrivacyStatement | Mapping[str, Any]
    evaluation: Any = None
    title: str = "Private Bayesian model"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    diagnostics: Any = None
    examples: Examples | None = None
    band: Band | None = None
    bayesian: Any = None
    test_data_public: bool = False
    ledger: str | None = "ledger.jsonl"
    created: str = ""
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    public: Mapping[str, str] = dataclasses.field(default_factory=dict)
    promise: str = ""


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One run among several on the same table.

    Attributes:
        method: name of the method; runs of one method are joined by a line.
        privacy: the run's own statement, or its `to_dict()`.
        evaluation: its `Evaluation`, or that one's `to_dict()`.
        note: a word on the run, such as its number of epochs.
        report: link to the run's own page, relative to this one.
    """

    method: str
    privacy: PrivacyStatement | Mapping[str, Any]
    evaluation: Any
    note: str = ""
    report: str = ""
