import dataclasses
import math
import os

import pytest
import torch
from false_alarms import LEVEL
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import dpbnn
from dpbnn.contributions import DenseContributions
from dpbnn.contributions.dense import ChunkedContributions
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.noise import NoiseSource


def open_gate(**arguments):
    return Gate(clip=math.inf, noise_multiplier=0.0, **arguments)


def silent_gate(clip, **arguments):
    """A gate that clips and adds no noise, to look at the sums."""
    return Gate(clip=clip, noise_multiplier=0.0, **arguments)


rows = st.lists(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=6
)


@given(rows, st.floats(1e-3, 1e3))
def test_the_sum_is_that_of_clipped_rows(values, clip):
    rows = torch.tensor(values, dtype=torch.float32)
    release = silent_gate(clip)(DenseContributions(rows))["value"].double()
    norms = rows.double().norm(dim=1, keepdim=True)
    expected = (rows.double() * torch.clamp(clip / norms.clamp_min(1e-300), max=1.0)).sum(0)
    scale = min(clip, float(norms.max())) * len(rows)
    torch.testing.assert_close(release, expected, atol=1e-3 * scale + 1e-30, rtol=0)


@given(rows, st.floats(1e-3, 1e3))
def test_one_examples_share_never_exceeds_the_clip(values, clip):
    """In float64, up to four units in the last place of float32."""
    for row in torch.tensor(values, dtype=torch.float32):
        release = silent_gate(clip)(DenseContributions(row[None]))["value"]
        assert release.double().norm() <= clip * (1 + 4 * torch.finfo(torch.float32).eps)


@pytest.mark.os_entropy(2 * LEVEL)
def test_noise_has_the_declared_scale_and_the_test_sees_five_percent_more():
    """KS test at sigma * C on every tensor; 1.05 sigma is missed less than once in 10^13 runs."""
    gate = Gate(clip=0.5, noise_multiplier=3.0)
    zeros = DenseContributions({"a": torch.zeros(4, 500, 500), "b": torch.zeros(4, 250_000)})
    for value in gate(zeros).values():
        sample = value.flatten().numpy()
        assert stats.kstest(sample, "norm", (0, 1.5)).pvalue > LEVEL
        assert stats.kstest(sample, "norm", (0, 1.5 / 1.05)).pvalue < LEVEL


@pytest.mark.os_entropy(LEVEL)
def test_an_empty_batch_releases_noise_and_is_recorded():
    gate = Gate(clip=1.0, noise_multiplier=2.0, sampler=dpbnn.Poisson(1000, 1))
    release = gate(DenseContributions(torch.zeros(0, 40_000)))["value"]
    assert stats.kstest(release.numpy(), "norm", (0, 2.0)).pvalue > LEVEL
    assert gate.ledger.releases == 1


class NoChunks(DenseContributions):
    """Contributions that come in chunks, of which an empty batch has none."""

    def chunks(self):
        yield from ()


def test_a_batch_without_chunks_releases_noise_too():
    gate = Gate(clip=1.0, noise_multiplier=2.0)
    release = gate(NoChunks(torch.zeros(0, 20_000)))["value"]
    assert release.std() == pytest.approx(2.0, rel=0.05)


def test_a_scale_without_a_grid_is_refused_before_anything_is_spent():
    for clip, width in ((1e-38, 1), (1.0, 10**6)):
        gate = Gate(clip=clip, noise_multiplier=1.0 if width == 1 else 1e10)
        with pytest.raises(ValueError, match=r"std=1e-38|noise_multiplier=1e\+10"):
            gate(DenseContributions(torch.zeros(1, width)))
        assert gate.ledger.releases == gate.noise.draws == gate.step == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_of_a_release_does_not_show_an_empty_batch(dtype):
    for kind, rows in ((NoChunks, 0), (DenseContributions, 0), (DenseContributions, 5)):
        gate = Gate(clip=1.0, noise_multiplier=2.0)
        assert gate(kind(torch.zeros(rows, 3, dtype=dtype)))["value"].dtype == dtype


def test_a_grid_that_would_cost_too_much_of_the_clip_is_made_finer():
    """d = 1e6: 0.2 percent of the clip at sigma = 1, and 19 percent at sigma = 100."""
    wide = DenseContributions(torch.zeros(1, 10**6))
    fine, coarse = (Gate(1.0, sigma)._precision_of(wide, sigma) for sigma in (100.0, 1.0))
    assert (fine.dtype, coarse.dtype) == (torch.float64, torch.float32)
    assert 0.997 < coarse.share < 0.999 < fine.share < 1
    gate = Gate(clip=1.0, noise_multiplier=100.0)
    release = gate(wide)["value"]
    assert release.dtype == torch.float32
    assert release.std() == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_an_example_that_is_not_finite_counts_as_absent(bad):
    values = torch.randn(5, 4)
    expected = silent_gate(1.0)(DenseContributions(values[1:]))["value"]
    values[0, 2] = bad
    values[0, 1] = bad
    release = silent_gate(1.0)(DenseContributions(values))["value"]
    assert release.isfinite().all()
    torch.testing.assert_close(release, expected)


def test_division_is_by_the_expected_batch_size_and_on_request_only():
    draw = dpbnn.Poisson(100, 8)
    contributions = DenseContributions(torch.full((3, 2), 0.1))
    total = silent_gate(1.0, sampler=draw)(contributions)["value"]
    mean = silent_gate(1.0, sampler=draw)(contributions, mean=True)["value"]
    torch.testing.assert_close(total, torch.full((2,), 0.3))
    torch.testing.assert_close(mean, torch.full((2,), 0.3 / 8))
    with pytest.raises(ValueError, match="needs a sampler"):
        silent_gate(1.0)(contributions, mean=True)


def test_the_ledger_gets_the_samplers_event_and_this_sigma():
    draw = dpbnn.Poisson(1000, 50)
    ledger = dpbnn.Ledger()
    gate = Gate(clip=2.0, noise_multiplier=1.5, sampler=draw, ledger=ledger, label="training")
    for size in (40, 0, 61):
        gate(DenseContributions(torch.randn(size, 3)))
    assert ledger.events == (draw.event(1.5, 3),)
    mechanism = gate.statement(delta=1e-5).mechanisms[0]
    assert (mechanism["label"], mechanism["clip"], mechanism["releases"]) == ("training", 2.0, 3)


def test_without_a_sampler_nothing_is_amplified():
    gate = Gate(clip=1.0, noise_multiplier=5.0)
    gate(DenseContributions(torch.randn(10, 3)))
    assert gate.ledger.events == (dpbnn.Event("full-batch", 5.0, 1),)


class LateGate(Gate):
    """Records a release after it was made."""

    def reserve(self, count, noise_multiplier=None):
        self._reserved.extend([self.noise_multiplier] * count)

    def __call__(self, contributions, **options):
        release = super().__call__(contributions, **options)
        super().reserve(1)
        return release


def recorded_before_the_noise(tmp_path, monkeypatch, kind):
    """Whether an entry of a gate was on disk before noise was drawn."""
    order = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), order.append("fsync")))
    source = NoiseSource()
    add = source.add
    monkeypatch.setattr(source, "add", lambda *a, **k: (order.append("noise"), add(*a, **k)))
    ledger = dpbnn.Ledger(tmp_path / "ledger.jsonl")
    order.clear()
    kind(clip=1.0, noise_multiplier=1.0, ledger=ledger, noise=source)(
        DenseContributions(torch.zeros(1, 2))
    )
    assert {"noise", "fsync"} == set(order)
    return order[-1] == "noise"


def test_the_entry_is_on_disk_before_the_noise_is_drawn(tmp_path, monkeypatch):
    assert recorded_before_the_noise(tmp_path, monkeypatch, Gate)


def test_a_gate_that_records_too_late_is_rejected(tmp_path, monkeypatch):
    assert not recorded_before_the_noise(tmp_path, monkeypatch, LateGate)


def test_a_budget_stops_the_gate_before_anything_is_released():
    ledger = dpbnn.Ledger(epsilon=1.0, delta=1e-5)
    source = NoiseSource()
    gate = Gate(clip=1.0, noise_multiplier=6.0, ledger=ledger, noise=source)
    gate(DenseContributions(torch.zeros(1, 2)))
    assert gate.ledger.epsilon() < 1.0
    with pytest.raises(dpbnn.BudgetExceeded):
        gate(DenseContributions(torch.zeros(1, 2)), noise_multiplier=2.0)
    assert source.draws == ledger.releases


def test_reserved_releases_are_spent_at_once_and_used_one_by_one():
    draw = dpbnn.Partition(20, 5)
    gate = Gate(clip=1.0, noise_multiplier=1.0, sampler=draw)
    gate.reserve(3)
    assert gate.ledger.releases == 3
    for _ in range(4):
        gate(DenseContributions(torch.zeros(5, 2)))
    event = dataclasses.replace(draw.event(1.0, 4), order=gate.attempt.key)
    assert gate.ledger.events == (event,)
    gate.reserve(1, noise_multiplier=2.0)
    with pytest.raises(ValueError, match="another value was reserved"):
        gate(DenseContributions(torch.zeros(5, 2)))


def test_a_schedule_is_recorded_as_it_runs():
    gate = Gate(clip=1.0, noise_multiplier=1.0)
    gate(DenseContributions(torch.zeros(1, 2)))
    release = gate(DenseContributions(torch.zeros(1, 50_000)), noise_multiplier=4.0)["value"]
    assert release.std() == pytest.approx(4.0, rel=0.02)
    assert [event.noise_multiplier for event in gate.ledger.events] == [1.0, 4.0]


def test_an_open_gate_passes_everything_and_says_so():
    gate = open_gate()
    values = torch.randn(7, 3) * 1000
    release = gate(DenseContributions(values))["value"]
    torch.testing.assert_close(release, values.sum(0), rtol=1e-5, atol=1e-2)
    assert "NOT PRIVATE" in str(gate.statement(delta=1e-5))


def test_a_seeded_source_stamps_the_statement():
    gate = Gate(clip=1.0, noise_multiplier=1.0, noise=NoiseSource.seeded(0))
    gate(DenseContributions(torch.zeros(1, 2)))
    assert "DEBUG: NOT PRIVATE" in str(gate.statement(delta=1e-5))
    assert gate.ledger.epsilon(1e-5) == math.inf
    other = Gate(clip=1.0, noise_multiplier=1.0, ledger=gate.ledger)
    assert "NOT PRIVATE" in str(other.statement(delta=1e-5))


def test_groups_are_clipped_by_themselves_and_share_the_sensitivity():
    values = {
        "a.w": torch.full((1, 4), 10.0),
        "a.b": torch.full((1, 1), 10.0),
        "b": torch.ones(1, 1),
    }
    gate = silent_gate({"a": 3.0, "b": 4.0})
    release = gate(DenseContributions(values))
    joint = torch.cat([release["a.w"].flatten(), release["a.b"].flatten()])
    assert joint.norm() == pytest.approx(3.0, rel=1e-3)
    assert release["b"].item() == pytest.approx(1.0)
    assert gate.sensitivity == pytest.approx(5.0)
    noisy = Gate(clip={"a": 3.0, "b": 4.0}, noise_multiplier=2.0)
    wide = DenseContributions({"a": torch.zeros(1, 40_000), "b": torch.zeros(1, 40_000)})
    for value in noisy(wide).values():
        assert value.std() == pytest.approx(10.0, rel=0.02)


@pytest.mark.parametrize(
    ("clips", "message"),
    [
        ({"a": 1.0}, "belong to no group"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "no parameter of its own"),
        ({"a": 1.0, "": 1.0}, "no parameter of its own"),
    ],
)
def test_groups_must_cover_every_parameter_once(clips, message):
    values = DenseContributions({"a": torch.ones(1, 1), "b": torch.ones(1, 1)})
    with pytest.raises(ValueError, match=message):
        silent_gate(clips)(values)


def test_sensitivity_doubles_under_replace_one():
    ledger = dpbnn.Ledger(relation="replace-one")
    assert Gate(clip=1.5, noise_multiplier=1.0, ledger=ledger).sensitivity == 3.0
    assert Gate(clip=1.5, noise_multiplier=1.0).sensitivity == 1.5


def test_a_sampler_that_the_relation_does_not_allow_is_refused_at_once():
    ledger = dpbnn.Ledger(relation="replace-one")
    with pytest.raises(dpbnn.UnsupportedEvent):
        Gate(clip=1.0, noise_multiplier=1.0, sampler=dpbnn.Poisson(10, 2), ledger=ledger)


@pytest.mark.parametrize(
    ("draw", "relation", "size"),
    [
        (dpbnn.FullBatch(10), "zero-out", 9),
        (dpbnn.Partition(10, 4), "zero-out", 3),
        (dpbnn.FixedSize(10, 4), "replace-one", 5),
        (dpbnn.Poisson(10, 4), "zero-out", 11),
    ],
)
def test_batches_that_the_sampler_cannot_have_drawn_are_refused(draw, relation, size):
    ledger = dpbnn.Ledger(relation=relation)
    gate = Gate(clip=1.0, noise_multiplier=1.0, sampler=draw, ledger=ledger)
    with pytest.raises(ValueError, match=rf"the batch has {size} records"):
        gate(DenseContributions(torch.zeros(size, 2)))
    assert ledger.releases == 0


@pytest.mark.parametrize(
    ("clip", "sigma", "message"),
    [
        (0.0, 1.0, "clip=0"),
        (-1.0, 1.0, "clip=-1"),
        (math.nan, 1.0, "clip=nan"),
        (math.inf, 1.0, "clip=inf"),
        (1.0, -1.0, "noise_multiplier=-1"),
        (1.0, math.nan, "noise_multiplier=nan"),
        (1.0, math.inf, "noise_multiplier=inf"),
        ({}, 1.0, "no groups"),
    ],
)
def test_bad_settings_say_so(clip, sigma, message):
    with pytest.raises(ValueError, match=message):
        Gate(clip=clip, noise_multiplier=sigma)


def test_examples_that_are_not_kept_count_as_zero():
    values = torch.randn(6, 3)
    keep = torch.tensor([True, False, True, True, False, True])
    expected = silent_gate(1.0)(DenseContributions(values[keep]))["value"]
    for bad in (1e30, math.inf, math.nan):
        values[1] = bad
        release = silent_gate(1.0)(DenseContributions(values), keep=keep)["value"]
        torch.testing.assert_close(release, expected)
    grouped = silent_gate({"a": 1.0, "b": 1.0})
    release = grouped(DenseContributions({"a": values, "b": values}), keep=keep)
    torch.testing.assert_close(release["b"], expected)


def test_keeping_all_changes_no_bit_and_watchers_see_no_norm_of_what_is_left_out():
    values, norms = DenseContributions(torch.randn(5, 3)), []
    whole = silent_gate(1.0)(values)["value"]
    assert torch.equal(
        silent_gate(1.0)(values, keep=torch.ones(5, dtype=torch.bool))["value"], whole
    )
    gate = silent_gate(1.0, watchers=[lambda event, clip, seen: norms.append(seen)])
    gate(values, keep=torch.zeros(5, dtype=torch.bool))
    assert norms[0].tolist() == [0.0] * 5


def test_what_is_not_kept_is_still_of_the_batch():
    gate = Gate(1.0, 1.0, dpbnn.FullBatch(5))
    gate(DenseContributions(torch.ones(5, 2)), keep=torch.zeros(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="the batch has 4 records"):
        gate(DenseContributions(torch.ones(4, 2)), keep=torch.zeros(4, dtype=torch.bool))


def test_chunks_get_their_part_of_what_is_kept():
    model, keep = dpbnn.mlp(3, (4,), 2), torch.arange(7) % 3 != 0
    x, y = torch.randn(7, 3), torch.arange(7) % 2
    whole = dpbnn.contributions(model, "categorical", x[keep], y[keep])
    chunked = dpbnn.attach(model, "categorical", microbatch_size=2)(x, y)
    expected, release = silent_gate(1.0)(whole), silent_gate(1.0)(chunked, keep=keep)
    for name, value in expected.items():
        torch.testing.assert_close(release[name], value)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (torch.ones(4, dtype=torch.bool), r"shape \(4,\); give one of true or false"),
        (torch.ones(5, 1, dtype=torch.bool), r"shape \(5, 1\)"),
        (torch.ones(5), r"torch.float32 and shape \(5,\)"),
    ],
)
def test_a_mask_of_another_kind_is_refused_before_anything_is_spent(keep, message):
    gate = Gate(1.0, 1.0)
    with pytest.raises(ValueError, match=f"keep: .*{message}"):
        gate(DenseContributions(torch.ones(5, 2)), keep=keep)
    assert gate.ledger.releases == 0


def test_a_wrong_mask_does_not_show_how_many_records_there_are_where_that_is_secret():
    gate = Gate(1.0, 1.0, ledger=dpbnn.Ledger(relation="add/remove"))
    with pytest.raises(ValueError, match="keep: is wrong") as caught:
        gate(DenseContributions(torch.ones(5, 2)), keep=torch.ones(5))
    assert "5" not in str(caught.value)


@pytest.mark.parametrize("clip", [1.0, {"a": 0.6, "b": 0.8}])
@pytest.mark.parametrize("size", [5, 2])
def test_examples_that_are_not_kept_weigh_nothing(clip, size):
    """Whatever they contribute, in whatever chunk; watchers see them with norm zero."""
    source_of_rows = torch.Generator().manual_seed(0)
    values = {name: torch.randn(5, 3, generator=source_of_rows) for name in "ab"}
    values["a"][1] = math.nan
    values["b"][4] = 1e30
    kept = torch.tensor([True, False, True, True, False])
    seen = []

    def release(rows, **options):
        contributions = ChunkedContributions(
            lambda i, j: DenseContributions({n: v[i:j] for n, v in rows.items()}),
            len(rows["a"]), size, {n: v.shape[1:] for n, v in rows.items()},
            torch.device("cpu"), torch.float32,
        )  # fmt: skip
        gate = Gate(clip, 0.0, watchers=[lambda event, c, norms: seen.append(norms)])
        return gate(contributions, **options)

    found = release(values, keep=kept)
    alone = release({n: v[kept] for n, v in values.items()})
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value)
    assert torch.equal(seen[0][kept], seen[1])
    assert not seen[0][~kept].any()
    everything = release(values, keep=torch.ones(5, dtype=torch.bool))
    assert all(torch.equal(everything[n], v) for n, v in release(values).items())
