import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpbnn.privacy.events import Event, UnsupportedEvent
from dpbnn.privacy.keys import ratchet
from dpbnn.privacy.sampling import FixedSize, FullBatch, Partition, Poisson, sampler

KEY = b"a key of enough bytes for a test"
FALSE_ALARM = 1e-4


def counts(draw, steps, key=KEY):
    """How often every record, and every pair of records, was drawn."""
    single = np.zeros(draw.n)
    pair = np.zeros((draw.n, draw.n))
    for batch in draw.batches(steps, key=key):
        inside = np.zeros(draw.n)
        inside[batch.numpy()] = 1
        single += inside
        pair += np.outer(inside, inside)
    return single, pair


def suspicious(draw, steps):
    """Which rates differ from those of Poisson sampling; every false alarm has a rate of 1e-4.

    Chi-squared of the records' counts, and the largest score of the pairs' counts.
    """
    single, pair = counts(draw, steps)
    q, found = draw.rate, []
    chi = ((single - steps * q) ** 2 / (steps * q * (1 - q))).sum()
    if stats.chi2.sf(chi, draw.n) <= FALSE_ALARM:
        found.append("records")
    pairs = pair[np.triu_indices(draw.n, 1)]
    score = (pairs - steps * q * q) / math.sqrt(steps * q * q * (1 - q * q))
    if abs(score).max() >= stats.norm.isf(FALSE_ALARM / 2 / len(pairs)):
        found.append("pairs")
    return found


class Uneven(Poisson):
    """Draws some records more often than others."""

    def _draw(self, step, generator, records):
        rates = self.rate * np.linspace(0.8, 1.2, self.n)
        return np.flatnonzero(generator.random(self.n) < rates)


class Doubled(Poisson):
    """Draws neighbouring records together."""

    def _draw(self, step, generator, records):
        half = np.flatnonzero(generator.random(self.n // 2) < self.rate)
        return np.concatenate([2 * half, 2 * half + 1])


class SamplerContract:
    def make(self, n=20, batch_size=5):
        raise NotImplementedError

    def test_batches_are_distinct_indices_of_records(self):
        draw = self.make()
        for batch in draw.batches(50, key=KEY):
            assert batch.dtype == torch.int64
            assert len(set(batch.tolist())) == len(batch)
            assert all(0 <= i < draw.n for i in batch.tolist())

    def test_a_batch_depends_on_key_and_position_alone(self):
        draw = self.make()
        whole = [b.tolist() for b in draw.batches(10, key=KEY)]
        rest = [b.tolist() for b in draw.batches(4, start=6, key=ratchet(KEY, 6))]
        assert whole[6:] == rest

    def test_the_event_is_the_samplers_own(self):
        draw = self.make()
        event = draw.event(1.5, 7)
        assert event == Event(draw.name, 1.5, 7, draw.n, draw.batch_size)

    def test_global_seeds_do_not_touch_the_batches(self):
        draw = self.make()
        first = [b.tolist() for b in draw.batches(5, key=KEY)]
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        state = torch.get_rng_state()
        assert [b.tolist() for b in draw.batches(5, key=KEY)] == first
        assert torch.equal(state, torch.get_rng_state())

    @pytest.mark.parametrize(
        ("n", "batch_size", "word"),
        [
            (0, 1, "n=0"),
            (10, 11, "batch_size=11"),
            (10, 0, "batch_size=0"),
            (10, math.nan, "batch_size=nan"),
            (math.nan, 1, "n=nan"),
            (10.5, 1, "n=10.5"),
        ],
    )
    def test_bad_sizes_name_the_value(self, n, batch_size, word):
        with pytest.raises(ValueError, match=word):
            self.make(n, batch_size)


class TestPoisson(SamplerContract):
    def make(self, n=20, batch_size=5):
        return Poisson(n, batch_size)

    def test_inclusion_and_co_inclusion_follow_the_rate(self):
        assert suspicious(self.make(), 8000) == []

    @pytest.mark.parametrize(
        ("wrong", "steps", "found"),
        [(FixedSize, 8000, "pairs"), (Uneven, 3000, "records"), (Doubled, 1000, "pairs")],
    )
    def test_the_same_test_rejects_other_samplers(self, wrong, steps, found):
        assert found in suspicious(wrong(20, 5), steps)

    def test_batch_sizes_are_binomial(self):
        sizes = [len(b) for b in self.make().batches(4000, key=KEY)]
        observed = np.bincount(sizes, minlength=21)[:21]
        expected = 4000 * stats.binom.pmf(np.arange(21), 20, 0.25)
        keep = expected > 5
        chi = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
        assert stats.chi2.sf(chi, keep.sum() - 1) > FALSE_ALARM

    def test_empty_batches_are_batches(self):
        batches = list(Poisson(1000, 0.1).batches(100, key=KEY))
        assert len(batches) == 100
        assert sum(len(b) == 0 for b in batches) > 50

    def test_two_runs_differ(self):
        draw = self.make(1000, 100)
        first, second = (next(iter(draw.batches(1))).tolist() for _ in range(2))
        assert first != second

    def test_epochs_round_up_to_steps(self):
        assert Poisson(60_000, 256).steps(15) == 3516
        assert Poisson(75, 1).steps(3) == 225
        assert Poisson(100, 10).steps(0.1) == 1

    def test_tiny_rates_on_many_records_are_quick(self):
        batches = list(Poisson(10**6, 1).batches(200, key=KEY))
        assert 120 < sum(len(b) for b in batches) < 290


class TestFixedSize(SamplerContract):
    def make(self, n=20, batch_size=5):
        return FixedSize(n, batch_size)

    def test_every_batch_has_the_size_and_every_record_its_share(self):
        draw, steps = self.make(), 4000
        assert {len(b) for b in draw.batches(20, key=KEY)} == {5}
        single, _ = counts(draw, steps)
        chi = ((single - steps / 4) ** 2 / (steps * 0.25 * 0.75)).sum() * (draw.n - 1) / draw.n
        assert stats.chi2.sf(chi, draw.n - 1) > FALSE_ALARM

    def test_fractional_batches_are_refused(self):
        with pytest.raises(ValueError, match=r"batch_size=2.5"):
            self.make(10, 2.5)


class TestPartition(SamplerContract):
    def make(self, n=20, batch_size=6):
        return Partition(n, batch_size)

    def test_every_pass_visits_every_record_once_in_the_same_batches(self):
        draw = self.make()
        assert draw.batches_per_pass == 4
        first = [b.tolist() for b in draw.batches(4)]
        second = [b.tolist() for b in draw.batches(4, start=4)]
        assert sorted(i for batch in first for i in batch) == list(range(20))
        assert first == second
        assert draw.steps(3) == 12

    def test_the_event_keeps_its_position(self):
        assert self.make().event(1.0, 2, start=5).start == 5


class TestFullBatch(SamplerContract):
    def make(self, n=20, batch_size=None):
        return FullBatch(n, batch_size)

    def test_a_batch_is_everything(self):
        assert next(iter(FullBatch(4).batches(1))).tolist() == [0, 1, 2, 3]

    def test_a_smaller_batch_is_refused(self):
        with pytest.raises(ValueError, match="leave batch_size out"):
            FullBatch(10, 5)


@pytest.mark.parametrize("name", ["poisson", "fixed-size", "partition", "Full Batch", "full"])
def test_samplers_by_name(name):
    draw = sampler(name, 10, 10)
    assert draw.n == 10


def test_unknown_sampling_lists_the_choices():
    with pytest.raises(ValueError, match=r"sampling='shuffle'.*'poisson'"):
        sampler("shuffle", 10, 5)


def test_a_missing_batch_size_says_so():
    with pytest.raises(ValueError, match="batch_size: missing"):
        sampler("poisson", 10)


def test_short_keys_are_refused():
    with pytest.raises(ValueError, match="must have 16 to 64"):
        next(Poisson(10, 5).batches(1, key=b"short"))


def test_events_check_themselves():
    with pytest.raises(ValueError, match="sampling="):
        Event("shuffle", 1.0)
    with pytest.raises(ValueError, match="noise_multiplier=-1"):
        Event("full-batch", -1.0)
    with pytest.raises(ValueError, match="needs n"):
        Event("poisson", 1.0)
    assert issubclass(UnsupportedEvent, ValueError)
    event = Event("partition", 1.0, 3, 10, 5, 1)
    assert Event.from_dict(event.to_dict()) == event


@pytest.mark.parametrize(("n", "batch"), [(100, 1), (1000, 3.5), (60_000, 256), (10**6, 10**4)])
def test_no_batch_is_larger_than_the_largest_that_is_reckoned_with(n, batch):
    assert stats.binom.sf(Poisson(n, batch).most(0), n, batch / n) <= math.exp(-32)
    assert Poisson(n, n).most(0) == FullBatch(n).most(0) == n
    assert [Partition(10, 4).most(step) for step in range(3)] == [4, 4, 2]
