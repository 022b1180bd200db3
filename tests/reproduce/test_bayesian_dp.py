"""dpbnn reproduce: the figures of the Bayesian DP paper, and short versions of its runs."""

import json
import math
import subprocess
import sys
import xml.etree.ElementTree

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import dpbnn
from dpbnn import reproduce
from dpbnn.privacy.bayesian_costs import best_order, left_cost, moments_epsilon
from dpbnn.reproduce.bayesian_dp import (
    basic_composition,
    group_privacy,
    protected_share,
    right_cost,
)
from dpbnn.reproduce.bayesian_dp_runs import last_layer, paper_protocol, tutorial_cnn
from dpbnn.reproduce.command import reproduce_command
from dpbnn.reproduce.masked_sgd import MaskedSGD, masked
from dpbnn.reproduce.sampled_vi import SampledVI

QUICK = reproduce.Settings(fast=True)


@pytest.fixture(scope="module")
def fig3():
    return reproduce.reproduce("bayesian-dp.fig3", QUICK)


class TestFigures:
    def test_figure_3(self, fig3):
        smallest = [(round(row[1], 3), row[2]) for row in fig3.rows]
        assert smallest == [(0.238, 49), (0.543, 26), (1.106, 12)]
        assert fig3.rows[2][6:] == (pytest.approx(0.813, abs=1e-3), pytest.approx(0.511, abs=1e-3))
        assert [len(curve.y) for curve in fig3.figure.curves] == [49, 49, 49]

    def test_figure_1_clipped_estimates_lie_below_and_meet_where_all_are_clipped(self):
        result = reproduce.reproduce("bayesian-dp.fig1", QUICK)
        rows = np.array(result.rows)
        assert (rows[:, 5:] <= 1.01 * rows[:, 3:4]).all()
        low, high = rows[rows[:, 0] == 0.01], rows[rows[:, 0] == 0.99]
        assert (low[:, 5] >= 0.97 * low[:, 3]).all()
        assert (high[:2, 5] < 0.9 * high[:2, 3]).all()

    def test_figure_2_unclipped_is_worse_at_a_low_quantile_whatever_the_draw(self):
        one, two = (
            np.array(reproduce.reproduce("bayesian-dp.fig2", settings).rows)
            for settings in (QUICK, reproduce.Settings(fast=True, seed=1))
        )
        assert one[0, 1] != two[0, 1]
        for rows in (one, two):
            low = rows[rows[:, 0] == 0.05]
            assert (low[:, 6] > low[:, 3]).all()

    def test_the_moments_accountant_of_the_figures(self):
        assert moments_epsilon(1.0, 64 / 60_000, 10_000, 1e-5) == pytest.approx(1.1065, abs=1e-4)


class TestFormulas:
    def test_the_right_hand_cost_as_printed_knows_no_amplification(self):
        assert left_cost(8, 0.01, 1.0)[0] == pytest.approx(0.0143, abs=1e-4)
        assert right_cost(8, 0.01, 1.0)[0] == pytest.approx(0.596, abs=1e-3)
        assert right_cost(8, 1.0, 1.0)[0] == left_cost(8, 1.0, 1.0)[0]
        orders = range(1, 50)
        printed = [10_000 * right_cost(order, 64 / 60_000, 1.0)[0] for order in orders]
        assert best_order(printed, orders, 1e-5)[0] == pytest.approx(20.2, abs=0.1)

    def test_propositions(self):
        assert basic_composition([(0.5, 1e-6), (0.25, 2e-6)]) == (0.75, pytest.approx(3e-6))
        assert group_privacy(0.5, 1e-6, 3) == (1.5, pytest.approx(3e-6 * math.exp(1.5)))
        assert protected_share(1e-10, 1e-5) == pytest.approx(0.99999)
        with pytest.raises(ValueError, match="k=0"):
            group_privacy(0.5, 1e-6, 0)


class TestFiles:
    def test_a_figure_is_written_as_markdown_json_and_svg(self, fig3, tmp_path):
        paths = reproduce.write("bayesian-dp.fig3", fig3, tmp_path / "new")
        assert [path.suffix for path in paths] == [".md", ".json", ".svg"]
        table = paths[0].read_text()
        assert "| 0.7 | 0.5431 | 26 |" in table
        values = json.loads(paths[1].read_text())
        assert values["rows"][0]["at order"] == 49
        assert len(values["figure"]["curves"]) == 3
        root = xml.etree.ElementTree.parse(paths[2]).getroot()
        lines = [e for e in root.iter() if "curve" in e.attrib.get("class", "").split()]
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(lines) == 6  # three curves and their legend

    def test_numbers_that_are_not_finite_are_null(self):
        result = reproduce.Result("title", ("a", "b"), ((math.inf, "x"),))
        assert json.loads(result.json())["rows"] == [{"a": None, "b": "x"}]

    def test_a_figure_without_a_positive_value_is_refused(self, tmp_path):
        figure = reproduce.Figure("x", "y", (reproduce.Curve("c", [1.0], [0.0]),))
        with pytest.raises(ValueError, match="nothing to draw"):
            reproduce.write("n", reproduce.Result("t", (), (), figure=figure), tmp_path)


class TestCommand:
    def run(self, *arguments):
        return CliRunner().invoke(reproduce_command, arguments)

    def test_list(self):
        text = self.run("--list").output
        for name in ("fig1", "fig2", "fig3", "vi", "mnist", "cifar10"):
            assert f"bayesian-dp.{name} " in text

    def test_a_figure_to_a_folder_and_to_the_terminal(self, tmp_path):
        result = self.run("bayesian-dp.fig3", "--fast", "--out", str(tmp_path))
        assert result.exit_code == 0
        assert {p.name for p in tmp_path.iterdir()} == {
            "bayesian-dp.fig3.md",
            "bayesian-dp.fig3.json",
            "bayesian-dp.fig3.svg",
        }
        assert "| 0.1 | 0.2378 | 49 |" in self.run("bayesian-dp.fig3", "--fast").output

    def test_bad_input_is_one_line(self):
        assert "--list" in self.run().output
        error = self.run("nothing").exception
        assert isinstance(error, ValueError)
        assert str(error).startswith("'nothing': nothing of that name; give one of dp-bnn.")

    def test_it_is_part_of_dpbnn(self):
        code = "import sys; from dpbnn.cli import main; main(['reproduce', '--list'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "bayesian-dp.fig3" in done.stdout


class TestMasked:
    def network(self):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(48, 5),
            nn.ReLU(),
            nn.Linear(5, 3),
        )

    def explicit(self, model, x, y):
        rows = []
        for i in range(len(y)):
            model.zero_grad()
            nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
            rows.append({n: p.grad.clone() for n, p in model.named_parameters()})
        return rows

    @pytest.mark.parametrize("microbatch", [None, 4])
    def test_norms_and_sums_are_those_of_masked_gradients(self, microbatch):
        model = self.network()
        x, y = torch.randn(7, 1, 6, 6), torch.randint(0, 3, (7,))
        masks = {n: (torch.rand_like(p) < 0.3).float() for n, p in model.named_parameters()}
        rows = [{n: g * masks[n] for n, g in row.items()} for row in self.explicit(model, x, y)]
        attached = dpbnn.attach(model, "categorical", microbatch_size=microbatch)
        c = masked(attached(x, y), masks)
        norms = [math.sqrt(sum(float(g.square().sum()) for g in row.values())) for row in rows]
        assert c.norms().numpy() == pytest.approx(norms, rel=1e-3)
        assert (c.norms().numpy() >= np.array(norms) * (1 - 1e-6)).all()
        w = torch.rand(7)
        for name, value in masked(attached(x, y), masks).weighted_sum(w).items():
            expected = sum(w[i] * row[name] for i, row in enumerate(rows))
            torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4)

    def test_only_masked_weights_move_and_the_replay_holds(self):
        def train(data):
            plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=40, batch_size=10, steps=1)
            method = MaskedSGD(learning_rate=0.5, clip=0.2, fraction=0.1)
            fitted = dpbnn.fit(self.network, data, method=method, plan=plan, prior=dpbnn.Flat())
            return fitted.model.state_dict()

        x, y = torch.randn(40, 1, 6, 6), torch.randint(0, 3, (40,))
        before, after = self.network().state_dict(), train((x, y))
        before = {n: before[n] for n in after}
        moved = torch.cat([(after[n] != before[n]).flatten() for n in after]).double().mean()
        assert 0.03 < moved < 0.2
        replay = dpbnn.replay(train, (x, y), 3)
        assert replay.worst <= 1 + 1e-5
        assert [d for d in replay.differences if "record 3" not in d] == []

    def test_other_layers_are_refused(self):
        c = dpbnn.contributions(
            nn.Embedding(5, 2), "categorical", torch.arange(3), torch.arange(3) % 2
        )
        with pytest.raises(dpbnn.UnsupportedModel, match="cannot be masked"):
            masked(c, {"weight": torch.ones(5, 2)})
        with pytest.raises(dpbnn.UnsupportedModel, match="mask its values"):
            masked(dpbnn.DenseContributions(torch.ones(2, 2)), {})

    def test_bad_fractions(self):
        with pytest.raises(ValueError, match="fraction=0"):
            MaskedSGD(fraction=0.0)


class TestSampledVI:
    def data(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(400, 3, generator=generator)
        return x, (x[:, 0] - x[:, 1] > 0).long()

    def fit(self, data, steps=300, **change):
        method = SampledVI(**{"learning_rate": 1.0, "std": 0.1, "average": 0.1, **change})
        sigma = method.noise_multiplier(40)
        plan = dpbnn.plan(noise_multiplier=sigma, delta=1e-5, n=400, batch_size=40, steps=steps)
        make = lambda: nn.Linear(3, 2)  # noqa: E731
        return dpbnn.fit(make, data, "categorical", dpbnn.Gaussian(1.0), method, plan)

    def test_it_learns_and_what_it_spends_follows_from_the_sampling_noise(self):
        x, y = self.data()
        posterior = self.fit((x, y))
        assert (posterior.predict(x, seed=0).mode == y).double().mean() > 0.85
        assert posterior.privacy.mechanisms[0]["noise_multiplier"] == pytest.approx(4.0)
        assert all((s == 0.1).all() for s in posterior.std.values())

    def test_draws_have_the_declared_spread(self):
        """Without a gradient the draw is N(m, s^2); false-alarm rate 5e-5.

        Records of zero features have gradients of the bias alone.
        """
        seen = []

        class Watched(SampledVI):
            def start(self, problem):
                process = super().start(problem)
                update = process.update

                def noted(state, release):
                    before = state.mean["weight"].clone()
                    state = update(state, release)
                    prior = process.problem.prior.gradient(before) / process.problem.n
                    drift = self.learning_rate * prior
                    seen.append(state.parameters["weight"].detach() - before + drift)
                    return state

                process.update = noted
                return process

        method = Watched(learning_rate=1.0, std=0.1)
        sigma = method.noise_multiplier(40)
        plan = dpbnn.plan(noise_multiplier=sigma, delta=1e-5, n=400, batch_size=40, steps=50)
        data = torch.zeros(400, 200), torch.arange(400) % 2
        dpbnn.fit(lambda: nn.Linear(200, 2), data, method=method, plan=plan)
        draws = torch.cat([s.flatten() for s in seen])  # 20 000 numbers
        assert abs(float(draws.std()) / 0.1 - 1) < 4.1 / math.sqrt(2 * len(draws))

    def test_replay(self):
        replay = dpbnn.replay(lambda d: self.fit(d, steps=4).model.state_dict(), self.data(), 11)
        assert replay.worst <= 1 + 1e-5
        assert [d for d in replay.differences if "record 11" not in d] == []

    def test_a_plan_of_another_noise_is_refused(self):
        plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=400, batch_size=40, steps=5)
        with pytest.raises(ValueError, match=r"gives 4; plan with noise_multiplier=method"):
            dpbnn.fit(nn.Linear(3, 2), self.data(), method=SampledVI(), plan=plan)

    def test_a_resumed_run_goes_on(self, tmp_path):
        from dpbnn.reproduce.sampled_vi import SampledVIProcess

        method = SampledVI()
        plan = dpbnn.plan(noise_multiplier=4.0, delta=1e-5, n=400, batch_size=40, steps=6)
        update, seen = SampledVIProcess.update, []

        def interrupted(self, state, release):
            state = update(self, state, release)
            seen.append(1)
            if len(seen) == 4:
                raise KeyboardInterrupt
            return state

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SampledVIProcess, "update", interrupted)
            with pytest.raises(KeyboardInterrupt):
                dpbnn.fit(nn.Linear(3, 2), self.data(), method=method, plan=plan, out=tmp_path,
                          checkpoint_every=2)  # fmt: skip
        posterior = dpbnn.fit(
            nn.Linear(3, 2), self.data(), method=method, plan=plan, out=tmp_path, resume=True
        )
        assert posterior.privacy.private


class TestRuns:
    def test_the_last_layer_recipe_on_synthetic_features(self):
        result = reproduce.reproduce("bayesian-dp.cifar10", QUICK)
        name, _, accuracy, epsilon, *_ = result.rows[0]
        assert name == "synthetic features"
        assert accuracy > 0.5
        assert 0 < epsilon < 20

    def test_real_features_that_are_not_there_are_asked_for(self, tmp_path):
        with pytest.raises(ValueError, match=r"write x_train, y_train, x_test, y_test there"):
            reproduce.reproduce("bayesian-dp.cifar10", reproduce.Settings(data=tmp_path))

    def test_real_features_are_read(self, tmp_path):
        rng = np.random.default_rng(0)
        (tmp_path / "cifar10").mkdir()
        x, y = rng.normal(size=(60, 5)).astype(np.float32), rng.integers(10, size=60)
        np.savez(
            tmp_path / "cifar10" / "vgg16-features.npz", x_train=x, y_train=y, x_test=x, y_test=y
        )
        result = reproduce.reproduce("bayesian-dp.cifar10", reproduce.Settings(data=tmp_path))
        assert result.rows[0][0] == "cifar10"

    def test_the_estimate_and_the_statement_are_of_the_same_run(self):
        x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
        posterior, observer = last_layer(x, np.arange(200) % 10, steps=5)
        assert observer.raw_estimate().dp is posterior.privacy

    def test_the_papers_network_has_no_batch_norm(self):
        model = tutorial_cnn()
        assert sum(p.numel() for p in model.parameters()) == 1_384_586
        assert model(torch.zeros(1, 1, 28, 28)).shape == (1, 10)

    def test_the_papers_protocol_prints_the_cap(self):
        """Distances of 1/1000 of the noise: what comes out is ln(1e10)/32."""
        x, y = torch.randn(3000, 1, 28, 28), torch.randint(0, 10, (3000,))
        row = paper_protocol(lambda: tutorial_cnn(2, (8, 8)), (x, y), (x, y), QUICK, steps=3)
        assert row[-1] == "32 (cap)"
        assert row[-2] == pytest.approx(math.log(1e10) / 32, rel=0.01)

    def test_mnist_runs_all_weights_a_tenth_and_the_papers_protocol(self, monkeypatch):
        """On random images: nothing can be learnt, the columns and the privacy are as planned."""
        from dpbnn import data

        rng = np.random.default_rng(0)
        x, y = rng.uniform(size=(2000, 1, 28, 28)).astype(np.float32), rng.integers(10, size=2000)
        images = data.Dataset("mnist", "classification", x, y, x[:50], y[:50])
        monkeypatch.setattr(data, "load", lambda name, folder=None: images)
        result = reproduce.reproduce("bayesian-dp.mnist", QUICK)
        everything, tenth, paper = (dict(zip(result.columns, r, strict=True)) for r in result.rows)
        for row in (everything, tenth):
            assert 2.1 < row["epsilon (pld)"] <= 2.2 < row["epsilon (moments)"]
            assert row["epsilon_mu (estimate)"] <= 1.1 * row["epsilon (moments)"]
        assert paper["order"] == "32 (cap)"
        assert paper["epsilon (moments)"] > 1000
        assert "no BatchNorm" in result.markdown()

    def test_tables(self, either_folder, monkeypatch):
        from dpbnn.reproduce import bayesian_dp_runs as runs

        monkeypatch.setenv("DPBNN_DATA", str(either_folder))
        monkeypatch.setattr(runs, "TABLES", {"abalone": runs.TABLES["abalone"]})
        rows = reproduce.reproduce("bayesian-dp.vi", QUICK).rows
        assert [row[1] for row in rows] == [
            "VI, not private",
            "DP-VI, added noise",
            "VI, its own sampling noise",
        ]
        assert all(row[2] > 0.6 for row in rows)
        assert rows[1][3] == pytest.approx(rows[2][3], rel=1e-3) != math.inf
