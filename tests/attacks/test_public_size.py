"""Under add/remove n is a public expected size, and nothing shows the true number of records."""

import itertools
import json
import secrets

import broken_versions as broken
import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import Dataset
from twins import fails_on, twins_of

import dpbnn
from dpbnn import training
from dpbnn.data import private_bounds, private_counts
from dpbnn.privacy.gate import Gate

pytestmark = pytest.mark.long

N, FEATURES = 24, 3  # N is public; the data has other numbers of records
SIZES = (N, N - 1, N + 1)
MORE, FEWER, NONE = 3 * N, 2, 0
KEY = b"a key of enough bytes"


def dataset(records):
    """The first so many records of one long table."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MORE, FEATURES, generator=generator)
    return x[:records], (torch.arange(MORE) % 3)[:records]


def planned(steps=6, sampling="poisson", n=N, **options):
    size = {} if sampling == "full-batch" else {"batch_size": n / 2}
    return dpbnn.plan(
        delta=1e-3, n=n, steps=steps, sampling=sampling, relation="add/remove",
        **{"noise_multiplier": 20.0, **size, **options},
    )  # fmt: skip


def network(dropout=0.0):
    return lambda: dpbnn.mlp(FEATURES, (6,), 3, dropout=dropout)


def masked(units=6):
    """Dropout before two layers: masks are drawn per example."""
    return nn.Sequential(
        nn.Linear(FEATURES, units), nn.Dropout(0.5), nn.Tanh(), nn.Linear(units, 3)
    )


METHODS = {
    "sgd": (dpbnn.SGD(learning_rate=0.5, clip=0.7), network(), dataset),
    "sgld": (dpbnn.SGLD(learning_rate=1e-2, chains=2, keep=2), masked, dataset),
    "sghmc": (dpbnn.SGHMC(learning_rate=1e-2, keep=2), network(), dataset),
    "bbp": (dpbnn.BBP(clip=0.7), masked, dataset),
    "vi": (dpbnn.VI(clip=0.7), network(), dataset),
    "mcdropout": (dpbnn.MCDropout(clip=0.7), network(0.3), dataset),
    "noiseaware": (
        dpbnn.NoiseAware(
            points=50, iterations=12, keep=8, inputs=lambda count: torch.rand(count, FEATURES)
        ),
        network(), dataset,
    ),
    "sep": (
        dpbnn.SEP(), lambda: dpbnn.mlp(FEATURES, (4,), 1),
        lambda records: (dataset(records)[0], dataset(records)[0].sum(1)),
    ),
    "em": (
        dpbnn.EM(), lambda: dpbnn.GaussianMixture(3, FEATURES),
        lambda records: (dataset(records)[0], None),
    ),
}  # fmt: skip


def likelihood(name):
    return "gaussian" if name == "sep" else "categorical"


def files(folder):
    """Everything on disk, by name."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    for name, data in found.items():
        if name.endswith(".safetensors"):  # its metadata are written in a random order
            end = 8 + int.from_bytes(data[:8], "little")
            found[name] = (json.loads(data[8:end]), data[end:])
    return found


# What is public: releases, posterior, statement, files, messages


@fails_on(
    52, broken.sums_are_divided_by_the_true_number, broken.the_data_must_have_n_records,
    broken.masks_move_the_later_draws, broken.batches_are_drawn_over_n, name="sgld",
)  # fmt: skip
@pytest.mark.parametrize("name", METHODS)
def test_item_52_a_record_more_or_less_moves_the_releases_alone(name):
    """Releases move by the clip at most; posterior, settings and statement do not move at all."""
    method, model, data = METHODS[name]
    options = {"model": model, "likelihood": likelihood(name), "plan": planned()}
    for first, second in itertools.pairwise((N - 1, N, N + 1)):
        try:
            found = dpbnn.replay(method, data(first), data(second), **options)
        except (ValueError, IndexError) as error:
            pytest.fail(f"the number of records shows: {error}")
        found.check()
        assert max(found.distances) > 0


def test_item_52_a_record_is_removed_by_its_number():
    method, model, data = METHODS["sgd"]
    found = dpbnn.replay(method, data(N), 3, model=model, plan=planned(sampling="full-batch"))
    assert min(found.check().distances) > 0


@fails_on(
    52, broken.sums_are_divided_by_the_true_number, broken.masks_move_the_later_draws,
    broken.the_true_number_is_printed, broken.the_true_number_is_in_the_settings,
)  # fmt: skip
def test_item_52_everything_on_disk_and_on_screen_is_the_same(tmp_path):
    """The files of a run and of its posterior, byte by byte, and all that is printed."""
    method, model, _ = METHODS["sgld"]
    names = itertools.count()

    def run(data):
        folder = tmp_path / str(next(names))
        screen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(secrets, "token_hex", lambda count: "0" * (2 * count))
            patch.setattr("builtins.print", lambda *args, **rest: screen.append(args))
            posterior = dpbnn.fit(
                model, data, method=method, plan=planned(), out=folder / "out", progress=True,
                checkpoint_every=2,
            )  # fmt: skip
            posterior.save(folder / "saved")
        assert (folder / "out" / "checkpoint.safetensors").exists()
        assert screen
        return {"files": files(folder), "screen": screen, "statement": str(posterior.privacy)}

    for records in (N - 1, N + 1, FEWER, MORE, NONE):
        found = dpbnn.replay(run, dataset(N), dataset(records), trace=False)
        assert [words[:80] for words in found.differences] == []


class Blurred(Dataset):
    """Records that draw something each time they are read."""

    def __len__(self):
        return N

    def __getitem__(self, number):
        x, y = dataset(N)
        return x[number] + torch.randn(FEATURES), y[number]


@fails_on(52, broken.draws_of_records_follow_from_the_seed, kind="masks")
@fails_on(52, broken.draws_of_records_follow_from_the_seed, kind="records")
@pytest.mark.parametrize("kind", ["masks", "records"])
def test_item_52_nobody_knows_what_records_draw(kind):
    """A record less moves others to other masks; whoever knew these would see far over one clip."""

    def first_sum():
        sums, noised = [], Gate._noised
        with pytest.MonkeyPatch.context() as patch:

            def noticed(self, given, sigma):
                sums.append(torch.cat([value.flatten().double() for value in given.values()]))
                return noised(self, given, sigma)

            patch.setattr(Gate, "_noised", noticed)
            dpbnn.fit(
                masked if kind == "masks" else lambda: nn.Linear(FEATURES, 3),
                dataset(N) if kind == "masks" else Blurred(),
                method=dpbnn.SGD(clip=0.7), plan=planned(1, "full-batch"), progress=False,
            )  # fmt: skip
        return sums[0]

    assert not torch.allclose(first_sum(), first_sum())


def test_a_secret_seed_has_more_than_the_32_bits_that_torch_takes():
    """Whoever tries 2^32 seeds would have the masks of a batch."""

    def drawn(seed, secret=True):
        with training._random_state(seed, secret):
            return torch.rand(2000)

    assert torch.equal(drawn(5, False), drawn(5 + 2**32, False))
    assert torch.equal(drawn(5), drawn(5))
    one, other = drawn(5), drawn(5 + 2**32)
    assert not torch.equal(one, other)
    assert not torch.equal(one, drawn(5, False))
    for values in (one, other):
        assert abs(float(values.mean()) - 0.5) < 0.05
        assert abs(float(values.var()) - 1 / 12) < 0.02


@fails_on(
    52, broken.the_data_must_have_n_records, broken.the_gate_looks_at_the_size,
    sampling="full-batch",
)  # fmt: skip
@pytest.mark.parametrize("sampling", ["poisson", "full-batch"])
def test_item_52_the_ledger_is_the_same_for_any_number_of_records(tmp_path, sampling):
    """Entries, statement and plan of real runs, whose noise differs."""
    seen = []
    for records in (*SIZES, MORE, FEWER, NONE):
        book = dpbnn.Ledger(tmp_path / f"{records}", relation="add/remove", delta=1e-3)
        try:
            posterior = dpbnn.fit(
                network(), dataset(records), method=dpbnn.SGD(clip=0.7),
                plan=planned(sampling=sampling), ledger=book, progress=False,
            )  # fmt: skip
        except ValueError as error:
            pytest.fail(f"the number of records shows: {error}")
        lines = [json.loads(line) for line in book.path.read_text().splitlines()]
        for line in lines:
            for private in ("time", "check"):
                line.pop(private, None)
        lines = [{k: v for k, v in line.items() if not _random(v)} for line in lines]
        assert sum(line.get("spend", {}).get("count", 0) for line in lines) == planned().steps
        statement = posterior.privacy.to_dict()
        for mechanism in statement["mechanisms"]:
            assert mechanism.pop("ledger") == book.id
        seen.append((lines, statement, json.dumps(posterior.settings)))
    assert all(entry == seen[0] for entry in seen)


def _random(value):
    """Whether a value of a ledger looks like a name or key drawn for one run."""
    return isinstance(value, str) and len(value) >= 16 and value.isalnum()


@fails_on(52, broken.the_statement_calls_n_the_number_of_records)
def test_item_52_the_statement_says_that_the_true_number_is_not_public():
    """And under the other relations that n is the number of records."""
    text = " ".join(str(planned().statement()).split())
    assert "expected number of records n, chosen without looking at the data" in text
    assert "the true number of records is not public" in text
    other = dpbnn.plan(noise_multiplier=20.0, delta=1e-3, n=N, batch_size=4, steps=2)
    assert other.statement().public[0] == "the number of records n"


@fails_on(52, broken.empty_batches_have_another_type, name="em")
@pytest.mark.parametrize("name", METHODS)
def test_item_52_an_empty_batch_is_released_like_any_other(name):
    """In the same order, shapes and types: whether all records stayed out must not show."""
    method, model, data = METHODS[name]
    kinds = []
    for records in (N, 1, NONE):
        with pytest.MonkeyPatch.context() as patch:
            seen = []

            def noised(original, self, sums, sigma, seen=seen):
                seen.append([(n, v.dtype, v.shape, v.device) for n, v in sums.items()])
                return original(self, sums, sigma)

            broken.around(patch, dpbnn.Gate, "_noised", noised)
            dpbnn.fit(
                model, data(records), likelihood(name), method=method,
                plan=planned(sampling="full-batch"), progress=False,
            )  # fmt: skip
        kinds += seen
    assert all(kind == kinds[0] for kind in kinds)


# Sampling


@fails_on(
    52, broken.batches_are_drawn_over_n, broken.the_rate_follows_the_true_number, records=2 * N
)  # fmt: skip
@pytest.mark.parametrize("records", [N - 4, N, 2 * N])
def test_item_52_batch_sizes_are_binomial_in_the_true_number(records):
    """Of 4000 batches that `fit` draws; chi-squared, false alarms 1e-7."""
    steps, sizes = 4000, []

    def one(original, self, batch):
        sizes.append(len(batch))
        assert not len(batch) or int(batch.max()) < records
        self.step += 1

    with pytest.MonkeyPatch.context() as patch:
        broken.around(patch, dpbnn.training._Run, "_one", one)
        patch.setattr(secrets, "token_bytes", lambda count: KEY.ljust(count, b"."))
        dpbnn.fit(
            network(), dataset(records), method=dpbnn.SGD(), plan=planned(steps), progress=False
        )
    observed = np.bincount(sizes, minlength=records + 1)
    expected = steps * stats.binom.pmf(np.arange(records + 1), records, 0.5)
    likely = expected > 5
    rest = steps - observed[likely].sum(), steps - expected[likely].sum()
    chi = ((observed - expected)[likely] ** 2 / expected[likely]).sum()
    chi += (rest[0] - rest[1]) ** 2 / rest[1]
    assert stats.chi2.sf(chi, likely.sum()) > 1e-7


@pytest.mark.parametrize("rate", [1e-4, 0.05, 0.5, 1.0])
def test_item_52_a_record_joins_by_its_position_alone(rate):
    draw = dpbnn.Poisson(1000, 1000 * rate)
    for records in (0, 1, 999, 1001, 5000):
        fewer = draw.batches(50, key=KEY, records=records)
        for batch, larger in zip(fewer, draw.batches(50, key=KEY, records=5000), strict=True):
            assert torch.equal(batch, larger[larger < records])


def test_item_52_other_samplers_refuse_another_number_of_records():
    assert len(next(dpbnn.FullBatch(5).batches(1, records=8))) == 8
    for draw in (dpbnn.Partition(6, 2), dpbnn.FixedSize(6, 2)):
        with pytest.raises(ValueError, match="takes exactly n=6"):
            next(draw.batches(1, records=7))
    for sampling in ("partition", "fixed-size"):
        with pytest.raises(ValueError, match="add/remove"):
            planned(sampling=sampling, batch_size=4)


# Calibration, statistics, estimators


def calibrated(kind, posteriors, records, book, **options):
    data = dataset(records)
    if kind == "recalibrate":
        return dpbnn.recalibrate(posteriors[0], data, ledger=book, **options).to_dict()
    if kind == "conformalize":
        return dpbnn.conformalize(posteriors[0], data, ledger=book, **options).to_dict()
    found = dpbnn.select(posteriors, data, ledger=book, **options)
    return {"scores": found.scores, "noise_std": found.noise_std, "of": found.privacy.to_dict()}


STEPS = {"recalibrate": 5, "conformalize": 1, "select": 1}


def trained():
    book = dpbnn.Ledger(relation="add/remove", delta=1e-3)
    models = [
        dpbnn.fit(
            network(), dataset(N), method=dpbnn.SGD(clip=0.7), plan=planned(steps), ledger=book,
            progress=False,
        )
        for steps in (3, 4)
    ]  # fmt: skip
    for model in models:
        model.model.double()  # a row's prediction is then the same beside any others
    return models, book


@fails_on(52, broken.calibration_divides_by_the_true_number, kind="select")
@fails_on(52, broken.calibration_counts_the_true_number, kind="conformalize")
@pytest.mark.parametrize("kind", STEPS)
def test_item_52_calibration_takes_n_from_the_plan(kind):
    posteriors, book = trained()
    plan = planned(STEPS[kind], "full-batch", noise_multiplier=0.02)  # a finite threshold

    def run(records):
        return calibrated(kind, posteriors, *records, book, plan=plan)

    for records in (N - 1, N + 1):
        dpbnn.replay(run, (N,), (records,), trace=False).check()
    for records in (MORE, FEWER, NONE):
        assert dpbnn.replay(run, (N,), (records,), trace=False).differences == ()
    with pytest.raises(ValueError, match=r"plan: missing.*n=\.\.\..*add/remove"):
        calibrated(kind, posteriors, N, book, epsilon=1.0)


@fails_on(52, broken.statistics_take_the_true_number)
def test_item_52_statistics_take_n_from_the_plan():
    plan = planned(1, "full-batch", n=10**5)

    def run(data):
        try:
            found = private_counts(data[0], plan=plan)
            return {"found": found, "bounds": private_bounds(data[0], plan=plan)}
        except ValueError as error:
            pytest.fail(f"the number of records shows: {error}")

    for records in (N - 1, N + 1):
        dpbnn.replay(run, dataset(N), dataset(records)).check()
    for records in (MORE, FEWER, NONE):
        assert dpbnn.replay(run, dataset(N), dataset(records)).differences == ()
    book = dpbnn.Ledger(relation="add/remove")
    with pytest.raises(ValueError, match=r"plan: missing.*n=\.\.\..*add/remove"):
        private_counts(dataset(N)[0], noise_multiplier=1.0, ledger=book)
    assert book.releases == 0


def test_item_52_estimators_refuse_a_ledger_that_hides_the_number_of_rows():
    book = dpbnn.Ledger(relation="add/remove", delta=1e-3)
    model = dpbnn.PrivateBayesClassifier(epsilon=1.0, bounds=(-5, 5), classes=range(3), ledger=book)
    with pytest.raises(ValueError, match=r"relation is add/remove.*dpbnn\.fit with plan="):
        model.fit(*dataset(N))
    assert book.releases == 0


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
