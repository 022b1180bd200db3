"""Every table and figure in its fast version, on generated files; cells; views of a record."""

import gzip
import json
import math
import struct
import xml.etree.ElementTree

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import dpbnn
from dpbnn import reproduce
from dpbnn.reproduce import dp_bnn_mnist, records, speed
from dpbnn.reproduce.cells import Cells
from dpbnn.reproduce.command import reproduce_command
from dpbnn.reproduce.dp_bnn_theory import simulated_epsilon
from dpbnn.reproduce.images import images
from dpbnn.reproduce.views import SHIFTS, ViewedCategorical, shifted

pytestmark = pytest.mark.long

NAMES = list(reproduce.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.mark.usefixtures("generated_folder")
@pytest.mark.parametrize("name", NAMES)
def test_the_fast_version_has_a_table_a_summary_and_a_record(name, folder):
    """Through the command; runs that items share are made once."""
    dpbnn.reproduce.uci.raw.cache_clear()
    done = CliRunner().invoke(reproduce_command, [name, "--fast", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    values = json.loads((folder / f"{name}.json").read_text())
    assert values["rows"]
    assert all(isinstance(text, str) and text for text in values["summary"].values())
    assert (folder / f"{name}.md").read_text().startswith(f"# {values['title']}\n")
    record = values["record"]
    assert record["command"] == f"dpbnn reproduce {name} --fast"
    assert record["settings"] == {"fast": True, "seed": 0, "seeds": None}
    assert record["seconds"] >= 0
    assert record["unfinished"] == 0
    assert {"dpbnn", "torch", "python"} <= set(record["versions"])
    assert record["device"].startswith("CPU")
    assert ("figure" in values) == (folder / f"{name}.svg").is_file()
    if "figure" in values:
        root = xml.etree.ElementTree.parse(folder / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    dpbnn.reproduce.uci.raw.cache_clear()


def test_the_list_names_every_item_with_one_line():
    text = CliRunner().invoke(reproduce_command, ["--list"]).output
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert set(lines) == set(reproduce.items())
    assert all(len(line.split()) > 4 for line in lines.values())


@pytest.mark.usefixtures("generated_folder")
@pytest.mark.parametrize("name", NAMES)
def test_a_table_can_be_made_before_its_runs_are(name, tmp_path):
    """With no time at all; items that need no cells are left out."""
    alone = ("theorem", "dp-bnn.privacy", "dp-bnn.table5", "bounds", "fig4", "fig5", "dp-sep.fig1",
             "bayesian-dp.fig", "bayesian-dp.vi", "bayesian-dp.cifar10")  # fmt: skip
    if any(word in name for word in alone):
        return
    result = reproduce.reproduce(name, reproduce.Settings(limit=-1, out=tmp_path))
    assert 0 < result.record["cells"] == result.record["unfinished"]
    assert reproduce.write(name, result, tmp_path)


class TestCells:
    CELLS = ({"run": "a", "seed": 0}, {"run": "b", "seed": 0})

    def all(self, settings, compute=lambda cell: {"value": 1}):
        return Cells("name", settings).all(self.CELLS, compute)

    def test_finished_cells_are_not_run_again(self, tmp_path):
        self.all(reproduce.Settings(out=tmp_path))

        def never(cell):
            raise AssertionError(cell)

        again = reproduce.Settings(out=tmp_path)
        assert [value for _, value in self.all(again, never)] == [{"value": 1}] * 2
        assert [line["cell"]["run"] for line in again.used] == ["a", "b"]

    def test_a_fast_cell_is_another_cell(self, tmp_path):
        self.all(reproduce.Settings(out=tmp_path, fast=True))
        ran = []
        self.all(reproduce.Settings(out=tmp_path), lambda cell: ran.append(cell) or {})
        assert len(ran) == 2

    def test_a_crash_keeps_what_is_finished(self, tmp_path):
        def second_fails(cell):
            if cell["run"] == "b":
                raise RuntimeError("stop")
            return {"value": 1}

        with pytest.raises(RuntimeError, match="stop"):
            self.all(reproduce.Settings(out=tmp_path), second_fails)
        ran = []
        self.all(reproduce.Settings(out=tmp_path), lambda cell: ran.append(cell["run"]) or {})
        assert ran == ["b"]

    def test_a_line_that_a_kill_cut_off_is_made_again(self, tmp_path):
        self.all(reproduce.Settings(out=tmp_path))
        path = tmp_path / "name.cells.jsonl"
        whole = path.read_text()
        for length in (len(whole) - 1, len(whole) - 20, 5):
            path.write_text(whole[:length])
            ran = []
            self.all(reproduce.Settings(out=tmp_path), lambda cell, ran=ran: ran.append(cell) or {})
            assert len(ran) == (1 if length > 5 else 2)
            assert len(path.read_text().splitlines()) == 2
            assert len(Cells("name", reproduce.Settings(out=tmp_path)).lines) == 2

    def test_what_the_limit_and_only_leave_out_is_counted(self, tmp_path):
        late = reproduce.Settings(out=tmp_path, limit=-1)
        assert self.all(late) == []
        assert len([line for line in late.used if "value" not in line]) == 2
        some = reproduce.Settings(only=('"b"',))
        assert [cell["run"] for cell, _ in self.all(some)] == ["b"]


class TestViews:
    def data(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(6, 5, 12, generator=generator)
        return nn.Linear(12, 4), x, torch.arange(6) % 4

    def test_a_records_gradient_is_the_mean_over_its_views_and_is_clipped_once(self):
        model, x, y = self.data()
        found = dpbnn.contributions(model, ViewedCategorical(), x, y)
        views = [dpbnn.contributions(model, "categorical", x[:, v], y) for v in range(5)]
        norms = found.norms()
        for i in range(6):
            only = torch.zeros(6)
            only[i] = 1.0
            whole = found.weighted_sum(only)
            for name, value in whole.items():
                mean = torch.stack([v.weighted_sum(only)[name] for v in views]).mean(0)
                torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-6)
            norm = math.sqrt(sum(float(v.square().sum()) for v in whole.values()))
            assert norm * (1 - 1e-6) <= float(norms[i]) <= norm * (1 + 1e-3)

    @pytest.mark.parametrize("kind", ["cnn", "mlp"])
    def test_networks_for_views_are_the_plain_ones_on_each_view(self, kind):
        plain, viewed = getattr(records, f"_tanh_{kind}")(), getattr(records, f"_viewed_{kind}")()
        with torch.no_grad():
            for a, b in zip(plain.parameters(), viewed.parameters(), strict=True):
                b.copy_(a.view_as(b))
        x = records.pixels(torch.randn(3, 1, 28, 28), 5)
        assert x.shape == (3, 1, 5, 28, 28)
        each = torch.stack([plain(x[:, :, v]) for v in range(5)], 1)
        torch.testing.assert_close(viewed(x), each)

    def test_training_with_views_is_replayed_within_the_clip(self):
        """Zeroing a record out moves a release by the clip at most, whatever its views are."""
        model, x, y = self.data()
        x = torch.cat([x, x + 1, x - 1])
        x[3] *= 1e4
        y = y.repeat(3)
        plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=18, batch_size=9, steps=3)
        result = dpbnn.replay(
            dpbnn.SGD(learning_rate=0.1, clip=0.1), (x, y), 3, model=model,
            likelihood=ViewedCategorical(), plan=plan,
        )  # fmt: skip
        assert not result.differences
        assert 0 < result.worst <= 1.0

    def test_predictions_average_the_probabilities(self):
        model, x, _ = self.data()
        outputs = model(x)[None]
        mean = ViewedCategorical().predictive(outputs).mean
        torch.testing.assert_close(mean, outputs[0].softmax(-1).mean(1))

    def test_shifts_move_zeros_in(self):
        x = torch.arange(9.0).reshape(1, 1, 3, 3) + 1
        views = shifted(x)
        assert views.shape == (1, 5, 1, 3, 3)
        torch.testing.assert_close(views[:, 0], x)
        at = SHIFTS.index((0, 1))
        assert views[0, at, 0].tolist() == [[0, 1, 2], [0, 4, 5], [0, 7, 8]]
        at = SHIFTS.index((-1, 0))
        assert views[0, at, 0].tolist() == [[4, 5, 6], [7, 8, 9], [0, 0, 0]]


def test_simulated_losses_of_a_single_gaussian_give_its_epsilon():
    """Rate 1, one step: epsilon at 0.05 is that of the Gaussian mechanism, within 3 %."""
    from dpbnn.privacy.accountants import gaussian_epsilon

    found = simulated_epsilon(1.0, 1.0, 1, 0.05, 200_000, 0)
    assert found == pytest.approx(gaussian_epsilon(1.0, 0.05), rel=0.03)
    assert simulated_epsilon(2.0, 1.0, 1, 0.05, 200_000, 0) < 0.7 * found


def test_the_printed_mixture_without_clip_and_noise_is_eq_5():
    """The batched code against the library's EP with shared factors, damped by 1/N."""
    from dpbnn.reproduce.dp_sep_mixture import NOISE, PRIOR, D, J, N, problem
    from dpbnn.reproduce.dp_sep_printed import Printed, run_printed

    x, _, centres, _, _ = problem(101)
    generator = torch.Generator().manual_seed(0)
    means, covariances = run_printed(
        x[None], centres, PRIOR.std**2, NOISE, [Printed(math.inf)], 1, generator
    )
    model = dpbnn.GaussianMixture(J, D, NOISE, centres=centres)
    plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=1)
    other = dpbnn.fit(model, x, prior=PRIOR, method=dpbnn.EP(shared=True, damping=1 / N), plan=plan)
    torch.testing.assert_close(covariances[0], other.covariance, rtol=0.05, atol=0.05)
    torch.testing.assert_close(means[0], other.means, rtol=0.05, atol=0.05)


def test_cells_from_another_device_are_rendered_here_and_the_command_says_so(tmp_path):
    """A line of a cells file that a GPU wrote: its table is made without running anything."""
    name = "dp-bbb.run"
    settings = reproduce.Settings(out=tmp_path, limit=-1, seeds=1)
    assert reproduce.reproduce(name, settings).record["unfinished"] == 6
    from dpbnn.reproduce import dp_bbb_items

    cell = {"data": "digits", "batches": "poisson", "seed": 0,
            "settings": list(dp_bbb_items._RUNS["digits"])}  # fmt: skip
    value = {"accuracy": 0.9, "nll": 0.4, "ece": 0.1, "sigma": 1.0, "epsilon": 2.0}
    line = {"cell": cell, "value": value, "seconds": 7.0, "device": "NVIDIA H200", "versions": {}}
    (tmp_path / f"{name}.cells.jsonl").write_text(json.dumps(line) + "\n")
    result = reproduce.reproduce(name, settings)
    assert result.record["unfinished"] == 5
    assert result.record["seconds"] == 7.0
    assert result.record["command"] == f"dpbnn reproduce {name} --seeds 1 --device cuda"
    assert result.rows == (("digits", "poisson", 0.9, 0.4, 0.1, 1.0, 2.0, 1),)


def _idx(folder, seed, packed, shape=(40, 28, 28)):
    """Write an image set in MNIST's format, packed or not; labels are the same for every seed."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for part in ("train", "t10k"):
        values = {"images-idx3": rng.integers(0, 256, shape, dtype=np.uint8),
                  "labels-idx1": np.arange(shape[0], dtype=np.uint8) % 10}  # fmt: skip
        for kind, numbers in values.items():
            magic = 0x800 + numbers.ndim
            content = struct.pack(f">{1 + numbers.ndim}I", magic, *numbers.shape)
            content += numbers.tobytes()
            name = f"{part}-{kind}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


def test_records_run_on_another_image_set_and_keep_its_runs_apart(tmp_path):
    """Two sets with the same labels, in a folder and in its subfolder, into one folder of runs."""
    _idx(tmp_path / "one", 1, packed=False)
    (tmp_path / "two").mkdir()
    _idx(tmp_path / "two" / "mnist", 2, packed=True)
    titles = set()
    for count, name in enumerate(("one", "two", "two"), 1):
        options = ["--fast", "--data", str(tmp_path / name), "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(reproduce_command, ["records", *options])
        assert done.exit_code == 0, done.output
        values = json.loads((tmp_path / "out" / "records.json").read_text())
        titles.add(values["title"])
        assert all("accuracy >=" not in (row["target"] or "") for row in values["rows"])
        lines = (tmp_path / "out" / "records.cells.jsonl").read_text().splitlines()
        assert len({json.loads(line)["cell"]["images"] for line in lines}) == min(count, 2)
    assert len(titles) == 2


def test_images_of_another_shape_are_refused(tmp_path):
    _idx(tmp_path / "wide", 0, packed=True, shape=(40, 32, 32))
    with pytest.raises(ValueError, match="must be as MNIST's"):
        images(reproduce.Settings(data=tmp_path / "wide"))
    with pytest.raises(ValueError, match="pass --data"):
        images(reproduce.Settings(data=tmp_path))


def test_a_bayesian_head_is_compared_seed_by_seed_with_the_point_estimate():
    def runs(head, values):
        return [({"run": head, "seed": i}, {"nll": v}) for i, v in enumerate(values)]

    head, point = records.BAYESIAN[0], runs(records.POINT, (0.1, 0.2, 0.3))
    for values, word in [
        ((0.1, 0.2, 0.3), "no worse"),
        ((0.13, 0.18, 0.3), "the same within noise"),
        ((0.2, 0.3, 0.401), "worse"),
    ]:
        assert records._beside([*runs(head, values), *point], head).endswith(f": {word}")
    assert records._beside(point, head) == ""


def test_a_network_that_guesses_reproduces_no_calibration():
    """Its gap is near the paper's because its confidence is near a tenth, as its accuracy is."""
    rows = [("SGD", "with", 0.01, 0.1, 0.9, 0.02), ("SGD", "without", 0.01, 0.1, 0.9, 0.2),
            ("MC Dropout", "with", 0.01, 0.1, 0.1, 0.01)]  # fmt: skip
    found, missed, guessed = dp_bnn_mnist._calibration_verdict(rows).split("; ")
    assert found.endswith("for SGD with prior")
    assert missed == "not for SGD without prior"
    assert guessed.endswith("MC Dropout with prior (accuracy 0.10)")


class TestSpeed:
    def line(self, method, seconds, **cell):
        cell = {"method": method, "network": "mlp", "steps": 10, "device": "cuda", **cell}
        value = {"seconds": seconds, "threads": 1}
        return {"cell": cell, "value": value, "seconds": 1.0, "device": "GPU", "versions": {}}

    def test_rows_of_another_device_stay_beside_those_of_this_one(self, tmp_path):
        found = {"SGD": 0.5, "BBP, weight space": 0.75, "BBP, Algorithm 3, one draw": 1.25,
                 speed.PLAIN: 0.25}  # fmt: skip
        lines = [json.dumps(self.line(name, value)) + "\n" for name, value in found.items()]
        (tmp_path / "speed.cells.jsonl").write_text("".join(lines))
        result = reproduce.reproduce("speed", reproduce.Settings(out=tmp_path, limit=-1))
        assert [(row[0], row[3], row[4], row[5]) for row in result.rows] == [
            ("SGD", 0.5, 2.0, "GPU"), ("BBP, weight space", 0.75, 3.0, "GPU"),
            ("BBP, Algorithm 3, one draw", 1.25, 5.0, "GPU"), (speed.PLAIN, 0.25, 1.0, "GPU"),
        ]  # fmt: skip
        assert "1.5 and 2.5 (GPU)" in result.summary.verdict

    def test_ratios_are_taken_within_a_round(self):
        lines = [
            self.line(name, factor * slow, round=i)
            for i, slow in enumerate((1.0, 10.0, 3.0))
            for name, factor in (("SGD", 2.0), (speed.PLAIN, 1.0))
        ]
        by = {row[0]: row for row in speed._rows(lines)}
        assert by["SGD"][3:5] == (6.0, 2.0)

    def test_without_opacus_its_rows_are_left_out_with_the_reason(self, monkeypatch):
        monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: None)
        result = reproduce.reproduce("speed", reproduce.Settings(limit=-1))
        assert any("Opacus is not installed" in note for note in result.notes)
        assert result.record["cells"] == 3 * 2 * 7
