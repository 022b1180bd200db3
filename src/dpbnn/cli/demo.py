"""dpbnn demo: a private classifier of the bundled digits, with its report."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import click

import dpbnn
from dpbnn.cli.account import plan_table, print_table
from dpbnn.cli.say import Speaker, speaking

_MARK = "dpbnn demo"
_TUNING_RUNS = 155  # most runs on the digits among those that chose the library's defaults


@click.command("demo")
@click.option("--out", type=click.Path(path_type=Path), default=Path("demo"), show_default=True,
              help="The run directory; an earlier demo there is replaced.")  # fmt: skip
@speaking
def demo_command(out: Path, speaker: Speaker) -> None:
    r"""Train a private Bayesian classifier on scikit-learn's digits and write its report.

    \b
    Example:
      dpbnn demo
    """
    from dpbnn import report
    from dpbnn.data import Column, Schema
    from dpbnn.estimators.fitting import train
    from dpbnn.estimators.workspace import REPORT
    from dpbnn.runs import Run

    _clear(out)
    pixels = tuple(Column(f"pixel{i}", bounds=(0.0, 16.0)) for i in range(64))
    schema = Schema(pixels, Column("digit", categories=tuple("0123456789")))
    x, x_test, y, y_test = _digits()
    speaker.say(f"Digits: {len(x)} training images of {x.shape[1]} pixels.")
    classifier = dpbnn.PrivateBayesClassifier(
        epsilon=3.0,
        delta=1e-5,
        schema=schema,
        tuning_runs=_TUNING_RUNS,
        random_state=0,
        progress=speaker.progress,
    )
    train(classifier, _named(x), y, out=out, settings={"made by": _MARK})
    if speaker.progress:
        print_table(plan_table(classifier.plan_))
    run = Run.open(out)
    found = run.tested(_named(x_test), y_test)
    predictive, evaluation = found.predictive, found.evaluation
    run.write_metrics(evaluation.to_dict())
    examples = report.select_examples(
        predictive, y_test, images=x_test.reshape(-1, 8, 8) / 16, classes=schema.classes or ()
    )
    contents = dataclasses.replace(
        run.page(evaluation, test_data_public=True), title="Handwritten digits", examples=examples
    )
    written = report.write(contents, run.folder / REPORT)
    right = predictive.mode.numpy() == y_test
    speaker.say(evaluation)
    speaker.say(
        f"Epistemic uncertainty {predictive.epistemic[right].mean():.3f} nats where right, "
        f"{predictive.epistemic[~right].mean():.3f} where wrong."
    )
    speaker.say(classifier.privacy_)
    speaker.say(f"Wrote {written}: open it in a browser.")
    speaker.result({"run": str(out), "report": str(written), **evaluation.to_dict()})


def _named(images: Any) -> dict[str, Any]:
    return {f"pixel{i}": images[:, i] for i in range(images.shape[1])}


def _digits() -> Any:
    """Return training and test images and labels, split at a fixed seed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    return train_test_split(images, labels, stratify=labels, test_size=0.25, random_state=0)


def _clear(out: Path) -> None:
    """Remove an earlier demo, whose data is public; anything else stays."""
    manifest = out / "manifest.json"
    if manifest.is_file():
        settings = json.loads(manifest.read_text()).get("settings", {})
        if settings.get("made by") == _MARK:
            shutil.rmtree(out)
