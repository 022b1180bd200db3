"""The pages: what they must say, and what they must never show."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_pages import (
    CLASS_SECTIONS,
    EVIL,
    REAL_SECTIONS,
    class_labels,
    class_page,
    class_predictive,
    pages,
    real_page,
    real_predictive,
    rows,
    statement,
)

import dpbnn
from dpbnn import report
from dpbnn.evaluation import evaluate
from dpbnn.report import charts
from dpbnn.report.figures import decimals, interval
from dpbnn.report.plain_words import guess_chance, percent_up, read, written
from dpbnn.report.template import short

ROOT = Path(__file__).resolve().parents[2]


class Outline(HTMLParser):
    """Collects elements, ids, addresses and text, and checks that elements are closed."""

    EMPTY = frozenset({"meta", "link", "img", "br", "rect", "path", "circle"})

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.addresses, self.texts, self.tags = [], [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.addresses += [
            values[k] for k in ("src", "href", "xlink:href", "action") if k in values
        ]
        assert not [name for name in values if name.startswith("on")]
        if tag not in self.EMPTY or (tag in {"rect", "path", "circle"}):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def text(page):
    return Outline(page).text


@pytest.fixture(scope="module")
def every_page():
    return pages()


@pytest.mark.parametrize(
    ("page", "sections"), [(class_page, CLASS_SECTIONS), (real_page, REAL_SECTIONS)]
)
def test_sections_come_in_order_with_privacy_first(page, sections):
    outline = Outline(report.render(page()))
    assert outline.ids == sections
    links = [a[1:] for a in outline.addresses if a.startswith("#")]
    assert links == sections


def test_every_page_is_well_formed_complete_and_small(every_page):
    for name, (page, _) in every_page.items():
        outline = Outline(page)
        assert page.startswith("<!doctype html>"), name
        assert '<html lang="en">' in page
        assert '<meta name="viewport"' in page
        assert len(page.encode()) < 1_000_000
        assert "script" not in outline.tags
        assert not re.search(r"https?:|//[a-z]|url\(|@import", page), name
        for address in outline.addresses:
            assert address.startswith(("#", "data:")), address


def test_names_from_the_data_are_escaped(every_page):
    for page, _ in every_page.values():
        assert "<script" not in page
        assert "alert" not in page or "&lt;script&gt;" in page
    for name in ("classes", "real", "comparison"):
        assert EVIL in text(every_page[name][0])


def test_drawings_are_valid_xml_with_title_and_description(every_page):
    for page, _ in every_page.values():
        drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
        assert drawings
        for drawing in drawings:
            root = ET.fromstring(drawing)
            assert root.get("role") == "img"
            assert root.get("aria-label")
            assert root.find("title").text
            assert root.find("desc").text
            numbers = re.findall(r"[-\d.]+|nan|inf", " ".join(p.get("d", "") for p in root))
            assert "nan" not in numbers
            assert "inf" not in numbers


def test_the_style_sheet_has_light_dark_and_print():
    page = report.render(class_page())
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert "color-scheme: light dark" in page


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_marks_stand_out_in_both_themes():
    """WCAG AA: 4.5 for text, 3 for marks."""
    style = (Path(report.__file__).parent / "templates" / "style.css").read_text()
    themes = [dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in style.split("@media")[:2]]
    assert len(themes) == 2
    for theme in themes:
        for ground in ("paper", "panel"):
            assert contrast(theme["ink"], theme[ground]) >= 7
            assert contrast(theme["soft"], theme[ground]) >= 4.5
        assert contrast(theme["ink"], theme["warn"]) >= 7
        assert contrast(theme["alarm-ink"], theme["alarm"]) >= 4.5
        for role in ("c1", "c2", "c3"):
            assert contrast(theme[role], theme["paper"]) >= 4.5  # also used for text
        for role in ("c4", "c5", "c6"):
            assert contrast(theme[role], theme["paper"]) >= 3


class TestPrivacy:
    def test_epsilon_delta_and_the_attackers_chance(self):
        found = text(report.render(class_page(privacy=statement(1.0))))
        right = statement(1.0).attack.right
        assert " ".join(f"at most {percent_up(right)}".split()) in found
        assert "epsilon and delta alone would allow 73.2 %" in found
        assert 0.5 < right < 0.7
        for words in (
            "What is protected",
            "What it rests on",
            "What it does not cover",
            "not declared how many other runs",
            "dpbnn account run/ledger.jsonl --delta 1e-5",
            "pld",
            "zero-out",
            "NOT PRIVATE",
        ):
            assert (words in found) == (words != "NOT PRIVATE"), words

    def test_the_chance_is_that_of_the_best_attack(self):
        """The bound is met by the mechanism that is optimal for (epsilon, delta)."""
        assert guess_chance(1.0, 0.0) == pytest.approx(1 / (1 + math.exp(-1)))
        assert guess_chance(0.0, 0.0) == 0.5
        for epsilon, delta in ((0.5, 1e-5), (2.0, 0.01), (800.0, 1e-5)):
            # Two neighbours: reveal with probability delta, else answer truly with odds e^eps.
            truly = (1 - delta) / (1 + math.exp(-epsilon))
            assert guess_chance(epsilon, delta) == pytest.approx(truly + delta, abs=1e-12)

    def test_the_factor_is_e_to_the_epsilon_rounded_up(self):
        assert "at most e^epsilon = 20.1," in read(statement(3.0)).protects
        assert "about e^epsilon" in read(statement(3.0, accountant="gdp-clt")).protects

    def test_percentages_are_never_rounded_down(self):
        for share in (0.5, 0.73106, 0.999, 0.99951, 0.999999, 1.0):
            assert float(percent_up(share)[:-2]) >= 100 * share - 1e-6
        assert percent_up(0.99951).startswith("99.96")

    @pytest.mark.parametrize(
        ("delta", "shown", "full"),
        [(1e-5, "1e-5", "1e-5"), (1 / 325610, "3.1e-6", "3.07116e-6"), (0.0304, "0.031", "0.0304")],
    )
    def test_delta_has_two_digits_and_is_never_rounded_down(self, delta, shown, full):
        found = read(statement(1.0, delta=delta))
        assert (found.delta, found.full_delta) == (shown, full)
        assert f"except with probability {shown}, the run" in found.odds_of_failure
        page = report.render(class_page(privacy=statement(1.0, delta=delta)))
        assert f"<dd>{shown}</dd>" in page
        assert f"--delta {full}</code>" in page
        for text in (shown, full):
            assert float(text) >= delta * (1 - 1e-8)

    @pytest.mark.parametrize(("unit", "words"), [
        ("one record", "Whether one record of the training data was used"),
        ("one patient", "Whether one patient of the training data, with all records, was used"),
    ])  # fmt: skip
    def test_a_person_is_protected_with_all_records(self, unit, words):
        assert read(statement(1.0, unit=unit)).protects.startswith(words)

    def test_a_statement_and_its_dict_give_the_same_page(self):
        given = statement(2.0, tuning_runs=3)
        loaded = json.loads(json.dumps(given.to_dict()))
        page = class_page(privacy=given)
        assert report.render(page) == report.render(dataclasses.replace(page, privacy=loaded))

    @pytest.mark.parametrize(
        ("privacy", "banner"),
        [
            (dpbnn.PrivacyStatement.not_private(), "NOT PRIVATE"),
            (dpbnn.PrivacyStatement.debug(), "DEBUG: NOT PRIVATE"),
        ],
    )
    def test_no_guarantee_is_said_in_title_bar_and_box(self, privacy, banner):
        page = report.render(class_page(privacy=privacy))
        assert f"<title>{banner}: Three classes" in page
        assert f'<div class="alarm bar" role="alert">{banner}</div>' in page
        assert f"<strong>{banner}</strong>" in page
        assert f'@page {{ @top-center {{ content: "{banner}"' in page  # on every printed page
        assert privacy.reason.split(", ")[-1] in text(page)
        for words in ("What is protected", "<dt>epsilon", "dpbnn account", "at most"):
            assert words not in page, words

    def test_a_private_page_has_no_alarm(self):
        page = report.render(class_page())
        assert 'class="alarm' not in page
        assert "<title>Three classes" in page

    def test_an_approximation_is_never_called_a_bound(self):
        page = text(report.render(class_page(privacy=statement(1.0, accountant="gdp-clt"))))
        assert not re.search(r"at most [\d.]+ %", page)
        assert "about 73.2 %" in page
        assert "≈ 1" in page
        assert "a rigorous accountant may be larger" in page

    def test_tuning_runs_are_stated(self):
        assert "No other run" in read(statement(tuning_runs=0)).tuning
        assert read(statement(tuning_runs=1)).tuning.startswith("1 other run on")
        assert read(statement(tuning_runs=7)).tuning.startswith("7 other runs on")

    def test_relation_and_unit_are_in_the_words(self):
        reading = read(statement(relation=dpbnn.Relation.REPLACE_ONE, unit="one patient"))
        assert "one patient" in reading.protects
        assert "which of two patients" in reading.meaning
        assert not any("several records" in line for line in reading.uncovered)

    def test_caveats_are_shown(self):
        page = report.render(class_page(privacy=statement(caveats=("delta is large",))))
        assert "Delta is large." in text(page)

    def test_a_bayesian_estimate_is_marked_and_apart_from_epsilon(self):
        page = text(report.render(real_page()))
        assert "It is no guarantee" in page
        assert "Do not publish this page as it is" in page
        assert "Do not publish" not in text(report.render(real_page(bayesian=None)))
        assert "epsilon_mu 0.123" in page
        assert page.count("0.123") == 1
        assert "bayesian-privacy-estimate" not in page

    def test_test_records_are_said_to_be_uncovered(self):
        assert "test records are not covered by the guarantee" in text(report.render(class_page()))


class TestExamples:
    def test_they_are_shown_only_where_the_test_data_is_public(self):
        page = report.render(class_page())
        assert page.count('class="example"') == 4
        assert page.count("data:image/png") == 4
        hidden = report.render(class_page(test_data_public=False))
        assert 'class="example"' not in hidden
        assert "data:image" not in hidden
        assert "not declared public" in text(hidden)
        assert "test record" not in text(hidden).split("Most and least certain")[1].replace(
            "test records", ""
        ).replace("No single test record", "")

    def test_points_of_a_band_are_test_records_too(self):
        assert "ink dot" in report.render(real_page())
        hidden = report.render(real_page(test_data_public=False))
        assert "ink dot" not in hidden
        assert "Test records are not drawn" in text(hidden)

    def test_not_public_is_the_default(self):
        assert report.RunPage(privacy=statement()).test_data_public is False

    def test_hidden_records_leave_no_trace(self):
        """The page without the flag is the page of a run that never had examples or points."""
        page = real_page(test_data_public=False)
        without = dataclasses.replace(page, examples=None)
        assert report.render(page) == report.render(without)

    def test_the_most_and_least_certain_are_chosen(self):
        predictive = class_predictive()
        y = class_labels(predictive)
        chosen = report.select_examples(predictive, y, count=3)
        entropy = predictive.entropy.numpy()
        order = np.argsort(entropy)
        names = [f"test record {i}" for i in order]
        assert [e.name for e in chosen.certain] == names[:3]
        assert [e.name for e in chosen.uncertain] == names[::-1][:3]
        first = chosen.certain[0]
        assert first.truth == str(y[order[0]])
        assert first.prediction == str(int(predictive.mode[order[0]]))
        np.testing.assert_allclose(
            first.draws, predictive.probabilities[:, order[0]].numpy(), rtol=1e-6
        )

    def test_real_targets_are_ranked_by_std(self):
        x, predictive = real_predictive()
        chosen = report.select_examples(predictive, np.sin(x), count=2)
        assert abs(x[int(chosen.uncertain[0].name.split()[-1])]) == pytest.approx(2)
        assert chosen.certain[0].draws.shape == (30,)
        assert chosen.classes == []

    def test_labels_of_another_length_are_refused(self):
        with pytest.raises(ValueError, match=r"shape \[3\].*120 predictions"):
            report.select_examples(class_predictive(), [0, 1, 2])

    def test_wide_rows_are_cut(self):
        x, predictive = real_predictive()
        wide = [{f"column {i}": i for i in range(10_000)}] * len(x)
        page = real_page(examples=report.select_examples(predictive, np.sin(x), rows=wide))
        page = report.render(page)
        assert "and 9988 more columns" in text(page)
        assert len(page) < 200_000

    def test_many_classes_are_cut_to_the_most_probable(self):
        predictive = class_predictive(n=20, classes=100)
        y = class_labels(predictive)
        page = class_page(
            evaluation=None, examples=report.select_examples(predictive, y), diagnostics=None
        )
        assert report.render(page).count('strip"') == 6 * 10


class TestParts:
    def test_a_page_of_nothing_but_a_statement(self):
        page = report.render(report.RunPage(privacy=statement(), ledger=None))
        found = Outline(page)
        assert found.ids == [
            "privacy",
            "metrics",
            "examples",
            "settings",
            "versions",
            "hashes",
            "verify",
        ]
        assert "No test set was evaluated" in found.text
        assert "No ledger file was kept" in found.text
        assert dpbnn.__version__ in found.text

    def test_metrics_and_intervals_are_those_of_the_evaluation(self):
        page = class_page()
        found = text(report.render(page))
        accuracy = page.evaluation.metrics["accuracy"]
        value, base = map(decimals, (accuracy.value, page.evaluation.baseline["accuracy"]))
        assert f"{value} {interval(dataclasses.asdict(accuracy))} {base}" in found
        assert "No training record was read for it" in found
        assert "95 % interval" in found

    def test_an_evaluation_from_json_gives_the_same_page(self):
        for make in (class_page, real_page):
            page = make()
            loaded = json.loads(page.evaluation.to_json())
            assert report.render(page) == report.render(
                dataclasses.replace(page, evaluation=loaded)
            )

    def test_infinite_and_missing_numbers_are_shown(self):
        certain = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        found = evaluate(certain, np.array([0, 1, 1]), resamples=0)
        page = report.render(class_page(evaluation=found, examples=None))
        assert "∞" in page
        assert not re.search(r"\bnan\b|>None<|None[,:]", page)

    def test_counts_are_written_into_the_reliability_diagram(self):
        page = class_page()
        drawing = re.search(r'aria-label="Reliability.*?</svg>', report.render(page), re.DOTALL)[0]
        shown = re.findall(r'class="count middle">(\d+)<', drawing)
        counts = page.evaluation.reliability.counts
        assert [int(n) for n in shown] == counts[counts > 0].tolist()

    @pytest.mark.parametrize("n", [7, 999, 8888, 88_888, 7_777_777])
    def test_counts_do_not_collide(self, n):
        edges, middles = np.linspace(0, 1, 16), np.linspace(0.03, 0.97, 15)
        for counts in ([n] * 15, [n, n // 2 or 1] * 7 + [n], list(range(n, n + 15))):
            drawing = str(charts.reliability(edges, counts, middles, middles))
            found = re.findall(r'x="([\d.]+)" y="([\d.]+)" class="count middle">([^<]+)<', drawing)
            boxes = [(float(x), float(y), 5.3 * len(words)) for x, y, words in found]
            assert len(boxes) == 15
            for i, (x, y, wide) in enumerate(boxes):
                assert 290 < y < 362
                for x2, y2, wide2 in boxes[:i]:
                    assert abs(x - x2) >= (wide + wide2) / 2 or abs(y - y2) >= 9

    def test_numbers_are_as_people_write_them(self):
        for value, expected in ((0.5, "0.5"), (3.1e-6, "3.1e-6"), (1200.0, "1200"), (1e20, "1e20")):
            assert written(value) == expected
            assert short(value) == expected
        for value, expected in (
            (0.5, "0.5"), (0.91234, "0.9123"), (3.1e-6, "3.1e-6"), (-1.25, "−1.25"), (0.0, "0"),
            (123456.0, "123456"), (12.3456, "12.35"), (None, "—"), (-3.1e-6, "−3.1e-6"),
            (3e9, "3e9"),
        ):  # fmt: skip
            assert decimals(value) == expected
        for low, high, expected in (
            (8.3791, 10.36123, "8.38 to 10.36"), (0.65, 0.7534, "0.6500 to 0.7534"),
            (0.5, 0.9, "0.5 to 0.9"), (-2e-9, 1.0, "0 to 1"), (1e-5, 2e-5, "1e-5 to 2e-5"),
            (-12.5, 3.0, "−12.5 to 3"), (0.0, 0.3829, "0 to 0.3829"), (0.8512, 1.0, "0.8512 to 1"),
            (-math.inf, 3.0, "−∞ to 3"), (None, 3.0, ""),
        ):  # fmt: skip
            assert interval({"low": low, "high": high}) == expected

    def test_no_line_ends_inside_a_date(self):
        page = class_page(created="2026-01-31", public={EVIL: f"2020-01-01 to 2024-12-31 {EVIL}"})
        found = report.render(page)
        for date in ("2026-01-31", "2020-01-01", "2024-12-31"):
            assert f'<span class="whole">{date}</span>' in found
        assert EVIL not in found

    def test_groups_confusion_promise_and_public_facts_are_shown(self):
        page = class_page()
        found = text(report.render(page))
        for words in (
            "1000 rows for training, 20 rows for calibration",
            f"Sets hold the truth for 80 % of the records {EVIL}.",
            "What was known in public",
            "number, 0 to 1",
            f"By site {EVIL}",
            "Confusion matrix",
            "A release is one noised sum",
            "Zero-out means that two datasets are neighbours",
        ):
            assert words in found
        first = page.evaluation.groups[0]
        assert first.n == 1
        assert f"{first.name} 1 {decimals(first.metrics['accuracy'].value)}" in found
        matrix = page.evaluation.confusion
        assert f"no {' '.join(map(str, matrix[0]))}" in found

    def test_chain_diagnostics_and_their_warnings(self):
        page = class_page()
        found = text(report.render(page))
        assert f"{page.diagnostics.worst['rhat']:.3f}" in found
        for sentence in (*page.diagnostics.meaning, *page.diagnostics.warnings):
            assert sentence in found
        assert page.diagnostics.warnings

    def test_settings_are_grouped_and_short(self):
        found = text(report.render(class_page()))
        assert "hidden 64, 32" in found
        assert "0.333333" in found

    def test_long_lists_and_many_releases_are_cut(self):
        events = [dpbnn.Poisson(1000, 50).event(2.0 + i / 100, 3) for i in range(500)]
        many = dpbnn.PrivacyStatement.of(events, delta=1e-5, epsilon=5.0)
        page = report.render(
            class_page(privacy=many, settings={"bounds": list(range(10_000)), "n": {"a": {1: 2}}})
        )
        found = text(page)
        assert "And 488 further kinds of release, 1464 releases in all" in found
        assert "39, and 9960 more" in found
        assert len(page) < 200_000

    def test_a_path_with_spaces_is_quoted_for_the_shell(self):
        found = text(report.render(class_page(ledger="my run/ledger.jsonl")))
        assert "dpbnn account 'my run/ledger.jsonl'" in found

    def test_a_page_is_a_pure_function(self):
        assert report.render(class_page()) == report.render(class_page())


class TestWrite:
    def test_a_page_is_written_whole(self, tmp_path):
        path = tmp_path / "report.html"
        path.write_text("old")
        assert report.write(class_page(), path) == path
        assert path.read_text(encoding="utf-8") == report.render(class_page())
        assert list(tmp_path.iterdir()) == [path]

    def test_a_failed_write_leaves_the_old_page_and_no_litter(self, tmp_path, monkeypatch):
        path = tmp_path / "report.html"
        path.write_text("old")

        def full(*_):
            raise OSError(28, "no space left")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space"):
            report.write(class_page(), path)
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]


class TestComparison:
    def test_every_run_metric_and_epsilon_is_in_the_table(self):
        page = report.render_comparison(rows(with_open=False))
        found = Outline(page)
        assert found.ids == ["privacy", "runs", "charts"]
        value = rows()[0].evaluation.metrics["accuracy"].value
        assert page.count(f'data-name="accuracy">{decimals(value)}<span') == 6
        assert "baseline no training" in found.text
        for words in ("accuracy", "log-loss (NLL)", "ECE", "bbp"):
            assert words in found.text

    def test_the_composed_budget_comes_first(self):
        page = text(report.render_comparison(rows(with_open=False), total=statement(4.321)))
        assert 0 < page.index("4.321") < page.index("Side by side")
        assert "This budget covers all of them" in page

    def test_without_a_composed_budget_the_page_warns(self):
        page = text(report.render_comparison(rows(with_open=False)))
        assert "learns more than any single epsilon says" in page

    def test_one_open_run_makes_the_whole_not_private(self):
        page = report.render_comparison(rows(), total=statement(4.321))
        assert '<div class="alarm bar" role="alert">NOT PRIVATE</div>' in page
        assert "6 runs with a guarantee have epsilon 4.321" in text(page)

    def test_bold_marks_the_best_private_value_only(self):
        kept = rows()
        better = json.loads(kept[0].evaluation.to_json())
        better["metrics"]["accuracy"]["value"] += 0.01
        kept[1] = dataclasses.replace(kept[1], evaluation=better)
        best = json.loads(kept[0].evaluation.to_json())
        best["metrics"]["accuracy"]["value"] = 1.0
        kept[-1] = dataclasses.replace(kept[-1], evaluation=best)
        page = report.render_comparison(kept)
        bold = re.findall(r'best" data-name="accuracy">([\d.]+)', page)
        assert bold == [decimals(better["metrics"]["accuracy"]["value"])]

    def test_regression_has_its_own_metrics(self):
        found = real_page().evaluation
        page = text(report.render_comparison([report.ComparisonRow("sgld", statement(), found)]))
        for words in ("RMSE", "log-likelihood", "CRPS"):
            assert words in page

    def test_tasks_cannot_be_mixed_and_rows_cannot_be_empty(self):
        mixed = [*rows(), report.ComparisonRow("x", statement(), real_page().evaluation)]
        with pytest.raises(ValueError, match="one task at a time"):
            report.render_comparison(mixed)
        with pytest.raises(ValueError, match="at least one run"):
            report.render_comparison([])

    def test_it_is_written_whole(self, tmp_path):
        path = report.write_comparison(rows(), tmp_path / "compare.html", title="Two methods")
        assert "Two methods" in path.read_text()


def test_the_templates_are_in_the_wheel(tmp_path):
    """hatchling is what builds the wheel; the page must work from it."""
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    folder = ROOT / "src" / "dpbnn" / "report" / "templates"
    assert {f"dpbnn/report/templates/{path.name}" for path in folder.iterdir()} <= names


def test_importing_the_report_needs_no_plotting_library():
    code = "import dpbnn.report, sys; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
