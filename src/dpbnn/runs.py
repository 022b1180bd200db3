"""Runs: folders of trained models, opened to predict, evaluate and report.

`dpbnn fit`, `fit(..., out=folder)` and `save` of the estimators write them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpbnn import report as reports
from dpbnn.data.frames import as_table
from dpbnn.data.schema import Schema
from dpbnn.estimators import frames, pages
from dpbnn.estimators.estimator import PrivateBayes
from dpbnn.estimators.storage import opened, settings_of
from dpbnn.estimators.workspace import FINGERPRINT, METRICS, REPORT, Fingerprint
from dpbnn.predictive import Predictive
from dpbnn.privacy.statement import PrivacyStatement
from dpbnn.report import RunPage
from dpbnn.storage import replace_file

if TYPE_CHECKING:
    from dpbnn.estimators.pages import Tested
    from dpbnn.evaluation import Evaluation

__all__ = ["Run", "load_run"]


def load_run(folder: str | os.PathLike[str], *, device: str = "cpu") -> Run:
    """Return a run, ready to predict raw tables.

    Args:
        folder: written by `dpbnn fit`, by `fit(..., out=folder)` or by `save` of an estimator.
        device: where predictions are to be computed.
    """
    return Run.open(Path(folder), device)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder that is complete.

    It holds manifest.json, schema.toml (with a schema), model/ (the estimator), ledger.jsonl
    (unless the run used another ledger), private.json, and after an evaluation metrics.json and
    report.html. All but private.json, a fingerprint of the training table, may be given away; so
    may figures in the last two, unless they are those of the training table itself.

    Attributes:
        folder: the folder.
        manifest: settings, statement, versions and hashes.
        estimator: the fitted estimator.
    """

    folder: Path
    manifest: dict[str, Any]
    estimator: PrivateBayes

    @classmethod
    def open(cls, folder: Path, device: str = "cpu") -> Run:
        """Read a run folder, checking that no file was changed."""
        estimator, manifest = opened(PrivateBayes, folder, device)
        return cls(folder, manifest, estimator)

    @property
    def schema(self) -> Schema | None:
        """How tables are encoded; None for an estimator that was fitted to numbers."""
        return self.estimator.schema_

    @property
    def privacy(self) -> PrivacyStatement:
        """The privacy statement of the model."""
        return self.estimator.privacy_

    @property
    def metrics(self) -> dict[str, Any] | None:
        """What the last evaluation found, or None."""
        path = self.folder / METRICS
        return json.loads(path.read_text()) if path.is_file() else None

    @property
    def ledger(self) -> str | None:
        """The ledger's path as a reader would type it; None where it is not known."""
        return self.manifest.get("ledger")

    def predict(self, table: Any) -> np.ndarray:
        """Return the predicted label or mean of every row.

        Args:
            table: a raw data frame, an Arrow table, a mapping of columns, or the path of a file.
        """
        return self.estimator.predict(table)

    def predictive(self, table: Any) -> Predictive:
        """Return the predictive distribution of every row; see `PrivateBayes.predictive`.

        Args:
            table: as in `predict`.
        """
        return self.estimator.predictive(table)

    def evaluate(
        self, table: Any, y: Any = None, *, training_table: bool = False, **options: Any
    ) -> Evaluation:
        """Return metrics on a test table; the very table of the training is refused.

        Args:
            table: as in `predict`; it may hold the targets.
            y: test targets, where the table does not hold them.
            training_table: let the table be the one of the training; epsilon does not cover what
                is computed then, and metrics.json and the page say so.
            **options: of `dpbnn.evaluation.evaluate`.
        """
        return self.tested(table, y, training_table=training_table, **options).evaluation

    def report(
        self,
        path: str | os.PathLike[str] | None = None,
        table: Any = None,
        y: Any = None,
        *,
        training_table: bool = False,
        test_data_public: bool = False,
        **options: Any,
    ) -> Path:
        """Write the page of the run, and return its path.

        Args:
            path: of the page; report.html in the run folder by default.
            table: a test table; None takes the figures of the last evaluation, if there are any.
            y: as in `evaluate`.
            training_table: likewise.
            test_data_public: single test records may be shown.
            **options: of `dpbnn.evaluation.evaluate`.
        """
        out = self.folder / REPORT if path is None else Path(path)
        if table is None:
            return reports.write(self.page(self.metrics), out)
        rows = as_table(table) if self.schema is not None else table
        found = self.tested(rows, y, training_table=training_table, **options)
        self.write_page(out, found, rows if test_data_public else None)
        return out

    def write_page(self, out: Path, found: Tested, shown: Any = None) -> dict[str, Any]:
        """Write metrics and page of an evaluation, and return the metrics.

        Args:
            out: path of the page.
            found: by `tested`.
            shown: the test table, where single records of it may be shown.
        """
        values = pages.values_of(found)
        self.write_metrics(values)
        contents = self.page(values, test_data_public=shown is not None)
        if shown is not None and self.schema is not None:
            contents = pages.with_records(contents, self.estimator, shown, found)
        reports.write(contents, out)
        return values

    def tested(
        self, table: Any, y: Any = None, *, training_table: bool = False, **options: Any
    ) -> Tested:
        """Return predictions, truth and metrics of a test table; see `evaluate`."""
        if self.schema is not None:
            table, y = frames.table_with(self.schema, table, y, "error"), None
        trained_on = self._trained_on(table, y)
        if trained_on and not training_table:
            raise ValueError(
                "the table is the one that the run was trained on, so its figures would not "
                "say how the model does on new records; give other records, or "
                "training_table=True (--training-table) to evaluate it anyway"
            )
        found = pages.tested(self.estimator, table, y, options)
        raw = training_table and trained_on is not False
        return dataclasses.replace(found, training_table=raw)

    def page(self, evaluation: Any, *, test_data_public: bool = False) -> RunPage:
        """Return the page of the run, without any test record."""
        manifest = self.manifest
        return pages.page(
            self.estimator,
            evaluation,
            test_data_public=test_data_public,
            privacy=manifest.get("privacy"),
            settings=manifest.get("settings", settings_of(self.estimator)),
            versions=manifest["versions"],
            hashes=manifest["files"],
            ledger=self.ledger,
            created=manifest.get("created", "")[:10],
        )

    def write_metrics(self, values: dict[str, Any]) -> None:
        """Write metrics.json, whole or not at all."""
        text = json.dumps(values, indent=2) + "\n"
        replace_file(self.folder / METRICS, lambda path: path.write_text(text))

    def _trained_on(self, table: Any, y: Any) -> bool | None:
        """Return whether a table is the very one of the training; None where nobody knows."""
        path = self.folder / FINGERPRINT
        if not path.is_file():
            return None
        known = json.loads(path.read_text())
        own = self.estimator._known(table, y)
        return bool(Fingerprint.of(*own, bytes.fromhex(known["salt"])).table == known["table"])
