"""Estimators whose unit is a person: what a fit by persons can do, and what it must refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

from dpbnn.estimators import frames
from dpbnn.estimators.recipes import METHODS, Recipe
from dpbnn.methods.method import Method
from dpbnn.privacy.checks import check_count
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.units import by_unit
from dpbnn.units import Units

__all__ = ["Persons", "unit_name"]

UNIT = "person"


@dataclasses.dataclass(frozen=True)
class Persons:
    """Whose rows they are, where the unit of a fit is not a row.

    Attributes:
        labels: one for each row; None where the unit is a row.
        owners: the rows of every unit, likewise.
        unit: what a unit is called.
        most: public number of rows of a unit that count; None for any number.
    """

    labels: Any = None
    owners: Units | None = None
    unit: str = ""
    most: int | None = None

    @classmethod
    def of(
        cls, labels: Any, unit: str, rows: int, on_bad_rows: str, most: int | None = None
    ) -> Persons:
        """Return the units of a table; their number is public, as the number of rows is.

        Args:
            labels: one for each row; None where the unit is a row.
            unit: what a unit is called.
            rows: of the table.
            on_bad_rows: as in `dpbnn.fit`.
            most: public number of rows of a unit that count.
        """
        check_count(max_records=most)
        if labels is None:
            if most is not None:
                raise ValueError(
                    f"max_records={most}: is for rows of persons; say whose they are, by units= or "
                    f"by a schema with unit = 'COLUMN'"
                )
            return cls()
        owners = Units.of(labels, None, unit=unit, most=most, on_bad_rows=on_bad_rows)
        if len(owners.order) != rows:
            raise ValueError(f"units: give one label for each of the {rows} rows")
        if len(owners) < 2:
            raise ValueError(
                f"units: all rows are of one {unit}, and training needs 2 or more; give labels "
                f"that tell them apart, or leave units out"
            )
        return cls(labels, owners, unit, most)

    @classmethod
    def of_fit(
        cls, estimator: Any, X: Any, rows: int, labels: Any, unit: str, most: int | None
    ) -> Persons:
        """Return the units of a fit: those given, or the column that the schema names.

        Args:
            estimator: with its `schema_`, which may be None.
            X: as in `fit`.
            rows: their number.
            labels: as `units` there.
            unit: what a unit is called, where labels are given.
            most: as `max_records` there.
        """
        if estimator.schema_ is not None and estimator.schema_.unit:
            table = frames.table_with(estimator.schema_, X, None, estimator.on_bad_rows)
            if labels is not None:
                raise ValueError(
                    "units: the schema names a column for them; leave one of the two out"
                )
            labels, unit = estimator.schema_.units(table), unit_name(estimator.schema_.unit)
        return cls.of(labels, unit, rows, estimator.on_bad_rows, most)

    @property
    def count(self) -> int:
        """Number of units; 0 where the unit is a row."""
        return 0 if self.owners is None else len(self.owners)

    def recipe(self, known: Recipe, settings: Any) -> Recipe:
        """Return the recipe of a method for units, or raise where it is for single rows.

        Args:
            known: the recipe without units; "auto" takes that of networks, whatever the network.
            settings: of the estimator.
        """
        if self.owners is None:
            return known
        for name, given, other in (
            ("bounds", isinstance(settings.bounds, str), "public bounds"),
            ("recalibrate", isinstance(settings.recalibrate, float | int), "'training' or None"),
            ("conformal", settings.conformal is not None, "None"),
        ):
            if given:
                raise ValueError(
                    f"{name}: its release would protect one row and not one {self.unit}; with "
                    f"units pass {other}"
                )
        if settings.method == "auto":
            known = METHODS["auto"]
        (settings.method if isinstance(settings.method, Method) else known.method()).check_units()
        return dataclasses.replace(known, tempered=False, bands=False)

    def planned(
        self, bounds: Plan | None, standard: Plan | None, training: Plan
    ) -> tuple[Plan | None, Plan | None, Plan]:
        """Return the plans with n counted in units; the standardisation is by unit too."""
        if self.owners is None:
            return bounds, standard, training
        beside = tuple(
            dataclasses.replace(event, parameters=(("unit", self.unit),))
            for event in training.beside
        )
        training = dataclasses.replace(training, beside=beside)
        standard = None if standard is None else by_unit(standard, self.unit)
        return None, standard, by_unit(training, self.unit)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `dpbnn.fit`."""
        if self.owners is None:
            return {}
        return {"units": self.labels, "unit": self.unit, "max_records": self.most}


def unit_name(column: str) -> str:
    """Return what the units of a column are called: "patient" for a column "patient_id".

    A "record" is a single row everywhere else, so that a column "record_id" has "record group"s.
    """
    name = " ".join(column.replace("_", " ").replace("-", " ").split())
    if name.lower() == "id":
        return UNIT
    for ending in (" id", " ID", " Id", "Id", "ID"):
        name = name.removesuffix(ending)
    name = name[:40].strip()
    return f"{name} group" if name.lower() in ("record", "row") else name
