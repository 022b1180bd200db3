"""Item 49: what is said about private data: no cell, no label, no row number.

Secrets are put into every place of a table and sent through every public entry point. All that can
be read afterwards is searched for them: errors with their causes and contexts, warnings, standard
output and error, log records. With on_bad_rows="zero" nothing may be raised at all.
"""

import contextlib
import io
import logging
import re
import traceback
import warnings

import broken_versions as broken
import numpy as np
import pytest
import torch
from torch import nn
from twins import fails_on, twins_of

import dpbnn
from dpbnn.cli import main
from dpbnn.data import Schema, private_bounds, private_counts, private_quantiles, read_table
from dpbnn.likelihoods import Categorical

N, ROW = 60, 37
TEXT, NUMBER, LABEL = "HIV positive", 987654.321, 4242
SECRETS = re.compile(r"HIV|987654|9\.87654|9\.88e\+0?5|4242|(?<![\d.:])(37|38|39)(?![\d.])")
SCHEMA = """
[target]
name = "y"
classes = ["no", "yes"]
[columns.age]
bounds = [0, 100]
[columns.sex]
categories = ["F", "M"]
"""
REAL = SCHEMA.replace('classes = ["no", "yes"]', "bounds = [0, 1]")


class Heard:
    """Everything that an action said, and what it raised."""

    def __init__(self, action):
        self.said, self.error, self.result = [], None, None
        handler = logging.Handler(0)
        handler.emit = lambda record: self.said.append(handler.format(record))
        logging.getLogger().addHandler(handler)
        out, err = io.StringIO(), io.StringIO()
        try:
            with (
                warnings.catch_warnings(record=True) as caught,
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                warnings.simplefilter("always")
                self.result = action()
        except SystemExit as stop:
            self.error = stop if stop.code else None
        except Exception as error:
            self.error = error
            self._errors(error)
        finally:
            logging.getLogger().removeHandler(handler)
        self.said += [str(warning.message) for warning in caught]
        self.said += [out.getvalue(), err.getvalue()]

    def _errors(self, error):
        """Take down an error and all that hang on it, shown or not."""
        shown = "".join(traceback.format_exception(error)).splitlines()
        self.said += [line for line in shown if not line.startswith("  ")]  # frames show no values
        seen, left = set(), [error]
        while left:
            found = left.pop()
            if found is None or id(found) in seen:
                continue
            seen.add(id(found))
            self.said += [str(found), repr(found), repr(vars(found)), repr(found.args)]
            left += [found.__cause__, found.__context__]

    def keeps_the_secrets(self):
        for text in self.said:
            assert not SECRETS.search(re.sub(r"/\S*/", "", text)), text  # folders have numbers
        return self


def quiet(action, on_bad_rows="error", *, raises=True):
    """Run an action; it must say nothing private, and not raise under on_bad_rows="zero"."""
    heard = Heard(action).keeps_the_secrets()
    if on_bad_rows == "zero":
        assert heard.error is None, heard.error
    elif raises:
        assert heard.error is not None
    return heard


# Tables


def columns(column, cell):
    """A table with a secret cell in one row."""
    table = {
        "age": [float(20 + i % 50) for i in range(N)],
        "sex": ["FM"[i % 2] for i in range(N)],
        "y": [("no", "yes")[i % 3 == 0] for i in range(N)],
    }
    table[column] = [*table[column]]
    table[column][ROW] = cell
    return table


def csv(table):
    rows = zip(*table.values(), strict=True)
    lines = [",".join("" if v is None else str(v) for v in row) for row in rows]
    return "\n".join([",".join(table), *lines]) + "\n"


def csv_file(table, folder):
    (folder / "t.csv").write_text(csv(table))
    return folder / "t.csv"


def parquet_file(table, folder):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    texts = {
        name: [None if v is None else str(v) for v in values] for name, values in table.items()
    }
    parquet.write_table(arrow.table(texts), folder / "t.parquet")
    return folder / "t.parquet"


def pandas_frame(table, folder):
    pandas = pytest.importorskip("pandas")
    index = [f"{TEXT} {i}" for i in range(N)]
    return pandas.DataFrame({n: np.array(v, dtype=object) for n, v in table.items()}, index=index)


def polars_frame(table, folder):
    polars = pytest.importorskip("polars")
    return polars.DataFrame({name: polars.Series(v, strict=False) for name, v in table.items()})


def polars_objects(table, folder):
    polars = pytest.importorskip("polars")
    return polars.DataFrame(
        {name: polars.Series(v, dtype=polars.Object) for name, v in table.items()}
    )


def object_array(table, folder):
    found = np.empty(N, dtype=[(name, object) for name in table])
    for name, values in table.items():
        for i, value in enumerate(values):
            found[name][i] = value
    return found


def mapping(table, folder):
    return table


SOURCES = [
    csv_file, parquet_file, pandas_frame, polars_frame, polars_objects, object_array, mapping,
]  # fmt: skip
CELLS = {
    "text in a number": ("age", TEXT),
    "an infinite number": ("age", float("inf")),
    "a number that is no number": ("age", f"{NUMBER}.5"),
    "a missing number": ("age", None),
    "an unknown category": ("sex", TEXT),
    "a number in a category": ("sex", NUMBER),
    "an unknown class": ("y", TEXT),
    "a number in a class": ("y", LABEL),
    "a list": ("age", [TEXT]),
    "a number beyond all floats": ("age", 10**400),
}


@fails_on(49, broken.tables_quote_bad_values, source=mapping, kind="text in a number", mode="error")
@fails_on(49, broken.odd_cells_are_refused, source=mapping, kind="a list", mode="zero")
@pytest.mark.parametrize("mode", ["error", "zero"])
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("source", SOURCES)
def test_item_49_encoding_a_table(tmp_path, source, kind, mode):
    column, cell = CELLS[kind]
    if source is polars_frame and (isinstance(cell, list) or cell == 10**400):
        pytest.skip("polars has no such column")
    table, schema = source(columns(column, cell), tmp_path), Schema.from_toml(SCHEMA)
    heard = quiet(lambda: schema.encode(table, target=True, on_bad_rows=mode), mode)
    if mode == "zero":
        x, _ = heard.result
        assert np.isnan(x).all(1).tolist() == [row == ROW for row in range(N)]
    quiet(lambda: schema.check(table, on_bad_rows=mode), mode, raises=False)
    draft = Heard(lambda: Schema.draft(table, "y")).keeps_the_secrets()
    assert draft.error is not None or not SECRETS.search(draft.result)


@pytest.mark.parametrize("cell", [TEXT, NUMBER, float("nan")])
@pytest.mark.parametrize("mode", ["error", "zero"])
def test_item_49_encoding_a_real_target(tmp_path, cell, mode):
    table = columns("y", cell)
    table["y"] = [0.5 if value in ("no", "yes") else value for value in table["y"]]
    schema = Schema.from_toml(REAL)
    quiet(lambda: schema.encode(table, on_bad_rows=mode), mode, raises=cell is not NUMBER)


LINES = {
    "a separator in a cell": f"{TEXT},M,no,{NUMBER}",
    "too few values": TEXT,
    "a quote in a cell": f'30,"{TEXT}"M,no',
    "a byte that is no text": f"30,{TEXT}\udcff,no",
    "a NUL byte": f"30,{TEXT}\0,no",
}


@fails_on(49, broken.lines_are_named, kind="too few values", mode="error")
@fails_on(
    49, broken.undecoded_bytes_stay_in_the_context, kind="a byte that is no text", mode="error"
)
@pytest.mark.parametrize("mode", ["error", "zero"])
@pytest.mark.parametrize("kind", LINES)
def test_item_49_lines_of_a_file(tmp_path, kind, mode):
    lines = csv(columns("age", 30.0)).splitlines()
    lines[ROW + 1] = LINES[kind]
    path = tmp_path / "t.csv"
    path.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))
    heard = quiet(lambda: read_table(path, on_bad_rows=mode), mode)
    if mode == "zero":
        assert heard.result.n == N


@fails_on(49, broken.names_of_the_first_line_are_quoted)
def test_item_49_a_record_in_place_of_a_header(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(f"{TEXT},F,no\n30,M,yes\n40,F,no\n")
    schema = Schema.from_toml(SCHEMA)
    quiet(lambda: schema.encode(read_table(path)))
    quiet(lambda: read_table(path)["age"])
    path.write_text(f"{TEXT},{TEXT},no\n30,M,yes\n40,F,no\n")
    quiet(lambda: read_table(path))
    path.write_text(f"sex,y,age,{TEXT}\nF,no,30,1\nM,yes,40,2\n")
    quiet(lambda: schema.encode(read_table(path)), raises=False)


# The command line


def command(folder, *arguments):
    def action():
        with contextlib.chdir(folder):
            main([str(argument) for argument in arguments])

    return action


@fails_on(49, broken.tables_quote_bad_values, kind="an unknown category", write=csv_file)
@pytest.mark.parametrize("write", [csv_file, parquet_file])
@pytest.mark.parametrize("kind", [kind for kind in CELLS if kind != "a list"])
def test_item_49_commands(tmp_path, kind, write):
    path = write(columns(*CELLS[kind]), tmp_path)
    (tmp_path / "good.csv").write_text(csv(columns("age", 30.0)))
    (tmp_path / "s.toml").write_text(SCHEMA)
    common = ("--schema", "s.toml", "--epsilon", 1, "--epochs", 2)
    quiet(command(tmp_path, "fit", path, *common, "--out", "run"))
    zero = ("--on-bad-rows", "zero")
    quiet(command(tmp_path, "fit", path, *common, *zero, "--out", "run"), "zero")
    quiet(command(tmp_path, "schema", "check", path, "--schema", "s.toml"))
    quiet(command(tmp_path, "schema", "draft", path, "--target", "y"), raises=False)
    bad_target = CELLS[kind][0] == "y"
    quiet(command(tmp_path, "predict", "run", path, "--out", "p.csv"), raises=not bad_target)
    quiet(command(tmp_path, "evaluate", "run", path))
    if write is csv_file:
        rows = path.read_text().splitlines(keepends=True)
        (tmp_path / "other.csv").write_text("".join([*rows, rows[1]]))  # not the training table
        both = ("compare", path, "--schema", "s.toml", "--epochs", 2, "--methods", "sgd",
                "--epsilons", 1, "--test", "other.csv", "--yes", "--out", "both")  # fmt: skip
        quiet(command(tmp_path, *both))
        quiet(command(tmp_path, *both, *zero), "zero")


def test_item_49_the_command_that_shows_values_is_asked_to(tmp_path):
    """The search finds secrets where they are shown on purpose."""
    path = csv_file(columns("age", TEXT), tmp_path)
    (tmp_path / "s.toml").write_text(SCHEMA)
    check = ("schema", "check", path, "--schema", "s.toml")
    quiet(command(tmp_path, *check))
    said = " ".join(Heard(command(tmp_path, *check, "--show-values")).said)
    assert f"line {ROW + 2}" in said
    assert TEXT in said


# Training


def tensors():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 3, generator=generator)
    return x, torch.arange(N) % 2


def with_cell(cell, target=False):
    """Object arrays with a secret cell among the inputs, or a secret target."""
    x, y = (part.numpy().astype(object) for part in tensors())
    if target:
        y[ROW] = cell
    else:
        x[ROW, 1] = cell
    return x, y


def with_label(label=LABEL):
    x, y = tensors()
    y[ROW] = label
    return x, y


def with_number(number):
    x, y = tensors()
    x[ROW, 1] = number
    return x, y


class Quoting(nn.Module):
    """A network of the user's own that quotes what it cannot take."""

    def __init__(self, outputs=2):
        super().__init__()
        self.linear = nn.Linear(3, outputs)

    def forward(self, x):
        if not torch._C._functorch.is_batchedtensor(x) and (x > 1e5).any():
            raise ValueError(f"cannot take {x[(x > 1e5).any(1)]} {x.double().max().item()}")
        return self.linear(x)


class QuotingLikelihood:
    """A likelihood of the user's own that quotes what it cannot take."""

    def log_prob(self, outputs, y):
        if (y > 1).any():
            try:
                raise KeyError(f"{y.max().item()} is no label")
            except KeyError as error:
                raise ValueError(f"row {ROW}: {y.tolist()}") from error
        return Categorical().log_prob(outputs, y)

    def predictive(self, outputs):
        return dpbnn.predictive.ClassPredictive.from_logits(outputs)


class OnlyInTraining(Quoting):
    """Raises in the training alone, where no check has looked."""

    def forward(self, x):
        return super().forward(x) if self.training else self.linear(x)


def fitted(model, data, likelihood="categorical", **options):
    plan = dpbnn.plan(noise_multiplier=20.0, delta=1e-3, n=N, sampling="full-batch", steps=2)
    method = options.pop("method", dpbnn.SGD())
    return dpbnn.fit(model, data, likelihood, None, method, plan, **options)


def small():
    return dpbnn.mlp(3, (4,), 2)


FITS = {
    "text among inputs": (small, lambda: with_cell(TEXT), "categorical"),
    "a list among inputs": (small, lambda: with_cell([TEXT]), "categorical"),
    "text among labels": (small, lambda: with_cell(TEXT, target=True), "categorical"),
    "a label": (small, with_label, "categorical"),
    "a label among floats": (small, lambda: (tensors()[0], with_label()[1] + 0.5), "categorical"),
    "an infinite number": (small, lambda: with_number(float("inf")), "categorical"),
    "lists": (small, lambda: tuple(part.tolist() for part in with_cell(TEXT)), "categorical"),
    "a network that quotes": (Quoting, lambda: with_number(NUMBER), "categorical"),
    "a likelihood that quotes": (lambda: nn.Linear(3, 2), with_label, QuotingLikelihood()),
    "text among targets": (
        lambda: nn.Linear(3, 1), lambda: with_cell(TEXT, target=True), "gaussian"
    ),
    "an index": (
        lambda: nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(6, 2)),
        lambda: ((with_number(LABEL)[0]).long(), tensors()[1]), "categorical",
    ),
}  # fmt: skip


@fails_on(49, broken.bad_rows_are_named, kind="a label", mode="error")
@fails_on(49, broken.errors_of_the_network_are_quoted, kind="a network that quotes", mode="error")
@fails_on(49, broken.cells_that_are_no_numbers_raise, kind="text among inputs", mode="zero")
@pytest.mark.parametrize("mode", ["error", "zero"])
@pytest.mark.parametrize("kind", FITS)
def test_item_49_fit(kind, mode):
    model, data, likelihood = FITS[kind]
    quiet(lambda: fitted(model(), data(), likelihood, on_bad_rows=mode, progress=True), mode)


def test_item_49_fit_shows_rows_where_it_is_asked_to():
    with pytest.raises(ValueError, match=rf"the first ones \[{ROW}\]"):
        fitted(small(), with_label(), on_bad_rows="show")
    with pytest.raises(ValueError, match=rf"the first ones \[{ROW}\].*987654"):
        fitted(Quoting(), with_number(NUMBER), on_bad_rows="show")


@fails_on(49, broken.texts_of_errors_are_passed_on)
@fails_on(49, broken.errors_keep_their_context)
def test_item_49_errors_of_a_step():
    x, y = with_number(NUMBER)
    for options in ({}, {"microbatch_size": 7}):
        quiet(lambda options=options: fitted(OnlyInTraining(), (x, y), **options))
        quiet(
            lambda options=options: dpbnn.Gate(1.0, 2.0)(
                dpbnn.contributions(Quoting(), "categorical", x, y, **options)
            )
        )
    quiet(lambda: dpbnn.contributions(nn.Linear(3, 2), QuotingLikelihood(), *with_label()))
    attached = dpbnn.attach(Quoting(), "categorical")
    quiet(lambda: attached(x, y))


class QuotingMethod(dpbnn.SGD):
    """A method of the user's own that quotes its batch."""

    def start(self, problem):
        process = super().start(problem)
        original = process.contribute

        def contribute(state, x, y):
            if len(x):
                raise ValueError(f"{x.double().max().item()} {y.tolist()}")
            return original(state, x, y)

        process.contribute = contribute
        return process


def test_item_49_errors_of_a_method_of_the_users():
    quiet(lambda: fitted(small(), with_number(NUMBER), method=QuotingMethod()))


@pytest.mark.parametrize("mode", ["error", "zero"])
@pytest.mark.parametrize("cell", [TEXT, [TEXT], float("nan")])
@pytest.mark.parametrize("method", [dpbnn.EM(), dpbnn.SEP()])
def test_item_49_mixtures(cell, mode, method):
    points, _ = with_cell(cell)
    mixture = dpbnn.GaussianMixture(2, 3)
    quiet(lambda: fitted(mixture, points, method=method, on_bad_rows=mode), mode)
    quiet(lambda: fitted(mixture, (points, None), method=method, on_bad_rows=mode), mode)


# Estimators


def classifier(**options):
    return dpbnn.PrivateBayesClassifier(
        **{"epsilon": 2.0, "bounds": (0, 1), "classes": [0, 1], "epochs": 2, **options}
    )


def regressor(**options):
    return dpbnn.PrivateBayesRegressor(
        **{"epsilon": 2.0, "bounds": (0, 1), "target_bounds": (0, 1), "epochs": 2, **options}
    )


def as_frame(x):
    pandas = pytest.importorskip("pandas")
    index = [f"{TEXT} {i}" for i in range(len(x))]
    return pandas.DataFrame(x, columns=["a", "b", "c"], index=index)


def as_polars(x):
    polars = pytest.importorskip("polars")
    return polars.DataFrame(
        {name: polars.Series(x[:, i].tolist(), strict=False) for i, name in enumerate("abc")}
    )


FORMS = {
    "array": lambda x: x,
    "lists": lambda x: x.tolist(),
    "pandas": as_frame,
    "polars": as_polars,
}
SETTINGS = {
    "": {},
    "private bounds": {"bounds": "private", "epsilon": 100.0},
    "recalibrated": {"recalibrate": 0.5, "epsilon": 100.0},
    "conformal": {"conformal": 0.9, "epsilon": 100.0},
    "not private": {"epsilon": None, "epochs": 2, "bounds": None},
}


@fails_on(
    49, broken.scikit_learn_is_passed_on, form="array", cell=TEXT, make=classifier, mode="error"
)
@fails_on(49, broken.cells_that_are_no_numbers_raise, form="array", cell=TEXT, make=regressor,
          mode="zero")  # fmt: skip
@pytest.mark.parametrize("mode", ["error", "zero"])
@pytest.mark.parametrize("make", [classifier, regressor])
@pytest.mark.parametrize("cell", [TEXT, float("inf"), None], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_item_49_inputs_of_estimators(form, cell, make, mode):
    x, y = with_cell(cell)
    y = y.astype(int)
    if form == "polars" and cell == TEXT:
        x = x.astype(str)
    table, good = FORMS[form](x), FORMS[form](tensors()[0].numpy())
    quiet(lambda: make(on_bad_rows=mode).fit(table, y), mode)
    if mode == "error":
        model = make().fit(good, y)
        quiet(lambda: model.predict(table))
        quiet(lambda: model.predictive(table))
        quiet(lambda: model.evaluate(table, y))
        quiet(lambda: model.score(table, y))


@fails_on(49, broken.unknown_labels_are_quoted, make=classifier, target=LABEL, mode="error")
@pytest.mark.parametrize("mode", ["error", "zero"])
@pytest.mark.parametrize("target", [LABEL, TEXT, float("nan"), [TEXT]], ids=str)
@pytest.mark.parametrize("make", [classifier, regressor])
def test_item_49_targets_of_estimators(make, target, mode):
    x, y = tensors()[0].numpy(), with_cell(target, target=True)[1]
    y = y.astype(int) if target == LABEL else y
    clipped = make is regressor and target == LABEL
    quiet(lambda: make(on_bad_rows=mode).fit(x, y), mode, raises=not clipped)
    if mode == "error":
        model = make().fit(x, tensors()[1].numpy())
        quiet(lambda: model.evaluate(x, y), raises=not clipped)
        quiet(lambda: model.score(x, y), raises=False)
        quiet(lambda: model.score(x, y.tolist()), raises=False)
    quiet(lambda: make(epsilon=None, classes=None, on_bad_rows=mode).fit(x, y), raises=False)


@pytest.mark.parametrize("mode", ["error", "zero"])
@pytest.mark.parametrize("kind", [list, np.str_, np.bytes_, object])
def test_item_49_text_targets_of_a_regression(kind, mode):
    """NumPy's arrays of text pass scikit-learn's checks; the cell must not be quoted later."""
    x, y = tensors()[0].numpy(), [*["0.5"] * (len(tensors()[0]) - 1), TEXT]
    given = y if kind is list else np.array(y, dtype=kind)
    quiet(lambda: regressor(on_bad_rows=mode).fit(x, given), mode)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("make", [classifier, regressor])
def test_item_49_settings_of_estimators(name, make):
    """Statistics, temperatures and thresholds: rows that are bad in every way."""
    settings = SETTINGS[name]
    inputs, labels = with_cell(TEXT)[0], with_cell(LABEL, target=True)[1]
    inputs[:ROW:2, 0] = None
    labels[:ROW:3] = TEXT
    inputs, labels = np.tile(inputs, (8, 1)), np.tile(labels, 8)
    quiet(lambda: make(**settings, on_bad_rows="zero").fit(inputs, labels), "zero")
    quiet(lambda: make(**settings).fit(inputs, labels))


def test_item_49_one_label_alone_is_not_quoted():
    x = tensors()[0].numpy()
    quiet(lambda: classifier(epsilon=None, classes=None).fit(x, np.full(N, LABEL)))


# Calibration, predictions, evaluation, statistics


@pytest.fixture(scope="module")
def posterior():
    return fitted(small(), tensors())


CALIBRATIONS = {
    "text among inputs": lambda: with_cell(TEXT),
    "text among labels": lambda: with_cell(TEXT, target=True),
    "a label": with_label,
    "an infinite number": lambda: with_number(float("inf")),
}


@fails_on(49, broken.cells_that_are_no_numbers_raise, kind="text among inputs", mode="zero")
@pytest.mark.parametrize("mode", ["error", "zero"])
@pytest.mark.parametrize("kind", CALIBRATIONS)
def test_item_49_calibration(kind, mode):
    found, data = fitted(small(), tensors()), CALIBRATIONS[kind]()
    given = {"epsilon": 50.0, "delta": 1e-4, "on_bad_rows": mode}
    quiet(lambda: dpbnn.recalibrate(found, data, **given), mode)
    quiet(lambda: dpbnn.conformalize(found, data, alpha=0.5, **given), mode)
    ledger = dpbnn.Ledger()
    several = {name: fitted(small(), tensors(), ledger=ledger) for name in "ab"}
    quiet(lambda: dpbnn.select(several, data, **given, ledger=ledger), mode)


def test_item_49_calibration_does_not_count_bad_records():
    """Their number, as that of all records, is no public one under add/remove."""
    with pytest.raises(ValueError, match="some calibration records cannot be used: "):
        dpbnn.recalibrate(fitted(small(), tensors()), with_label(), 50.0, 1e-4)


@pytest.mark.parametrize("mode", ["error", "zero"])
def test_item_49_calibration_of_a_network_that_quotes(mode):
    found, data = fitted(Quoting(), tensors()), with_number(NUMBER)
    given = {"epsilon": 50.0, "delta": 1e-4, "on_bad_rows": mode}
    quiet(lambda: dpbnn.recalibrate(found, data, **given), mode)
    quiet(lambda: dpbnn.conformalize(found, data, alpha=0.5, **given), mode)


def test_item_49_bad_records_contribute_nothing_to_a_calibration(posterior):
    """What is found equals what is found where the record's contribution is zeroed."""
    from dpbnn.calibration import release

    plan = {"plan": dpbnn.open_plan(n=N, sampling="full-batch", steps=1)}
    whole, bad = tensors(), with_label()

    def without(n, width, rows, work=1):
        def masked(first, last):
            kept = torch.arange(first, last) != ROW
            return rows(first, last) * kept[:, None]

        return release.row_blocks(n, width, masked, work)

    def found(data):
        return (
            dpbnn.recalibrate(posterior, data, **plan, on_bad_rows="zero").temperature,
            dpbnn.conformalize(posterior, data, alpha=0.5, **plan, on_bad_rows="zero").threshold,
        )

    alone = found(bad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpbnn.calibration.temperature.row_blocks", without)
        patch.setattr("dpbnn.calibration.conformal.row_blocks", without)
        assert found(whole) == alone


@fails_on(49, broken.labels_are_quoted)
def test_item_49_labels_of_predictions():
    found = fitted(small(), tensors()).predict(tensors()[0])
    labels = with_label()[1]
    quiet(lambda: found.log_prob(labels))
    quiet(lambda: dpbnn.evaluate(found, labels))
    quiet(lambda: dpbnn.evaluate(found, labels.numpy()))
    quiet(lambda: dpbnn.evaluate(found, with_cell(TEXT, target=True)[1]))
    quiet(lambda: dpbnn.evaluate(found, with_cell(TEXT, target=True)[1].tolist()))
    broken_share = found.mean.clone()
    broken_share[ROW] = float("nan")
    quiet(lambda: dpbnn.evaluation.accuracy(broken_share, tensors()[1]))
    broken_share[ROW] = 4
    quiet(lambda: dpbnn.evaluation.accuracy(broken_share, tensors()[1]))


def test_item_49_targets_of_predictions():
    found = fitted(nn.Linear(3, 1), tensors(), "gaussian").predict(tensors()[0])
    target = tensors()[1].double()
    target[ROW] = float("inf")
    quiet(lambda: dpbnn.evaluate(found, target))
    quiet(lambda: dpbnn.evaluate(found, with_cell(TEXT, target=True)[1]))
    with_nan = found.means.clone()
    with_nan[:, ROW] = float("nan")
    quiet(lambda: type(found)(with_nan, 1.0))
    with_nan[:, ROW] = 0.0
    variances = torch.full_like(with_nan, NUMBER)
    variances[:, ROW] = -NUMBER
    quiet(lambda: type(found)(with_nan, variances))


def test_item_49_inputs_of_predictions():
    found = fitted(Quoting(), tensors())
    quiet(lambda: found.predict(with_number(NUMBER)[0]))
    quiet(lambda: found.predict(with_cell(TEXT)[0]))
    quiet(lambda: found.predict(with_cell(TEXT)[0].tolist()))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # a public error is told in full
        found.predict(torch.zeros(4, 9))
    method = dpbnn.MCDropout()
    dropped = nn.Sequential(nn.Dropout(0.1), Quoting())
    found = fitted(dropped, tensors(), method=method)
    quiet(lambda: found.predict(torch.full((2, 3), NUMBER)))


def test_item_49_inputs_of_moments():
    data = tensors()[0], tensors()[1].float()
    found = fitted(dpbnn.mlp(3, (4,), 1), data, dpbnn.likelihoods.Gaussian(0.5), method=dpbnn.SEP())
    quiet(lambda: found.predict(with_number(float("nan"))[0]))
    quiet(lambda: found.predict(with_number(NUMBER)[0].double() * 1e300))


@pytest.mark.parametrize("cell", [TEXT, [TEXT], float("inf"), None])
def test_item_49_statistics(cell):
    """Cells that are no numbers add nothing, and raise nothing."""
    x, _ = with_cell(cell)
    for statistic in (
        private_counts,
        lambda x, **options: private_quantiles(x, [0.5], **options),
        lambda x, **options: private_bounds(x, range=(0, 1), **options),
    ):
        quiet(lambda f=statistic: f(x, noise_multiplier=0.1), "zero")
        quiet(lambda f=statistic: f(x.tolist(), noise_multiplier=0.1), raises=False)


@fails_on(49, broken.wrong_settings_are_quoted)
def test_item_49_data_in_the_place_of_a_setting():
    """`fit(model, X, y)`, as scikit-learn has it, must not print y."""
    (x, _), (_, y) = with_number(NUMBER), with_label()
    plan = dpbnn.plan(noise_multiplier=20.0, delta=1e-3, n=N, sampling="full-batch", steps=2)
    given = {"method": dpbnn.SGD(), "plan": plan}
    found = fitted(small(), tensors())
    for data, other in ((x, y), (x.numpy(), y.numpy()), (x.tolist(), y.tolist())):
        quiet(lambda x=data, y=other: dpbnn.fit(small(), x, y, **given))
        quiet(lambda x=data, y=other: dpbnn.fit(small(), (x, y), "categorical", y, **given))
        quiet(lambda x=data, y=other: dpbnn.fit(x, y, **given))
        quiet(lambda x=data, y=other: dpbnn.contributions(small(), x, y, y))
        quiet(lambda x=data, y=other: dpbnn.recalibrate(found, x, y))
        quiet(lambda x=data, y=other: dpbnn.recalibrate(found, tensors(), y))
        quiet(lambda x=data, y=other: dpbnn.conformalize(found, x, y))
        quiet(lambda x=data, y=other: dpbnn.select([found, found], x, y, ledger=dpbnn.Ledger()))
        quiet(lambda x=data: private_quantiles(x, x, noise_multiplier=1.0))
        quiet(lambda x=data, y=other: private_quantiles(x, y, noise_multiplier=1.0))
        quiet(lambda x=data, y=other: dpbnn.replay(x, y, 0))
        quiet(lambda x=data, y=other: classifier(bounds=x).fit(tensors()[0], tensors()[1]))
        quiet(lambda x=data, y=other: classifier(hidden=y).fit(x, tensors()[1]))


@pytest.mark.parametrize("header", [f"{TEXT},b,y", "a,b,y"])
def test_item_49_schemas_that_are_learned(tmp_path, header):
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n1,,no\n2,,yes\n")
    quiet(lambda: Schema.learned(path, "y"), raises=False)
    path.write_text(f"{header}\n{NUMBER}e302,1,no\n-{NUMBER}e302,2,yes\n")
    quiet(lambda: Schema.learned(path, "y"))


def test_item_49_replay_says_where_results_differ_and_not_what_they_are():
    x = tensors()[0].clone()
    other = x.clone()
    x[ROW, 0] = NUMBER
    heard = quiet(lambda: dpbnn.replay(lambda data: data.max().item(), x, other).check())
    assert isinstance(heard.error, dpbnn.PrivacyBug)


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
