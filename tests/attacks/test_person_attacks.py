"""A person as the unit: all records of one are sampled, clipped and left out together."""

import json
import math

import broken_versions as broken
import numpy as np
import pytest
import torch
from torch import nn
from twins import fails_on, twins_of

import dpbnn
from dpbnn.contributions import DenseContributions, attach
from dpbnn.estimators.persons import unit_name
from dpbnn.privacy.contracts import Replayed
from dpbnn.privacy.events import UnsupportedEvent
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.units import Groups, unit_norms
from dpbnn.units import Units, numbered

FEATURES, CLASSES = 4, 3
SIZES = [1, 6, 2, 1, 9, 3, 2, 4]
WHO = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
N, RECORDS = len(SIZES), sum(SIZES)
ORDER = torch.randperm(RECORDS, generator=torch.Generator().manual_seed(3))
IDS = [f"patient {int(who)}" for who in WHO[ORDER]]  # a person's records lie apart
MANY = IDS.index("patient 4")


def dataset(scale=1.0):
    """Records of one person are alike, so that their gradients add up."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(N, FEATURES, generator=generator)
    x = centres[WHO] + 0.1 * torch.randn(RECORDS, FEATURES, generator=generator)
    return scale * x[ORDER], (WHO % CLASSES)[ORDER]


def planned(n=N, batch_size=4, steps=4, **options):
    return dpbnn.plan(
        **{"noise_multiplier": 20.0, "delta": 1e-3, "n": n, "batch_size": batch_size,
           "steps": steps, **options})  # fmt: skip


def units_of(labels):
    return numbered(labels)[0].tolist()


def network():
    return dpbnn.mlp(FEATURES, (6,), CLASSES)


def fitted(data=None, method=None, **options):
    options = {"plan": planned(), "units": IDS, "progress": False, **options}
    return dpbnn.fit(
        options.pop("model", network), data or dataset(),
        method=method or dpbnn.SGD(clip=0.5), **options,
    )  # fmt: skip


METHODS = {
    "sgd": dpbnn.SGD(clip=0.3, optimizer="adam"),
    "sgld": dpbnn.SGLD(learning_rate=1e-3, keep=3),
    "sghmc": dpbnn.SGHMC(learning_rate=1e-3, keep=3),
    "bbp": dpbnn.BBP(clip=0.3),
    "vi": dpbnn.VI(clip=0.3, draws=2),
    "mcdropout": dpbnn.MCDropout(clip=0.3),
}


@fails_on(57, broken.records_of_a_person_are_clipped_alone, name="sgd")
@fails_on(57, broken.cross_terms_are_left_out, name="sgd")
@pytest.mark.parametrize("name", list(METHODS))
def test_item_57_leaving_out_a_person_moves_no_release_by_more_than_the_clip(name):
    model = dpbnn.mlp(FEATURES, (6,), CLASSES, dropout=0.2 if name == "mcdropout" else 0.0)
    for plan in (planned(sampling="full-batch", batch_size=None), planned()):
        result = dpbnn.replay(
            METHODS[name], dataset(5.0), MANY, model=model, plan=plan, units=IDS
        ).check()
        assert 0 < result.worst <= 1 + 1e-5


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(1, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(self.block(self.lift(x.unsqueeze(-1))).mean(1))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(FEATURES)), nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.last(torch.tanh(x * self.scale))


@pytest.mark.parametrize("make", [Sequence, Own])
@pytest.mark.parametrize("person", [0, 4])
def test_item_57_the_same_holds_for_sequences_and_layers_of_ones_own(make, person):
    plan = planned(sampling="full-batch", batch_size=None, steps=2)
    record = IDS.index(f"patient {person}")
    dpbnn.replay(
        dpbnn.SGD(clip=0.1), dataset(3.0), record, model=make, plan=plan, units=IDS
    ).check()


@fails_on(57, broken.microbatches_split_persons)
def test_item_57_microbatches_do_not_split_a_person():
    def train(data):
        return fitted(
            data, microbatch_size=4, on_bad_rows="zero",
            plan=planned(sampling="full-batch", batch_size=None),
        ).model  # fmt: skip

    x, y = dataset(5.0)
    rest = x.clone()
    rest[torch.tensor([label == "patient 4" for label in IDS])] = math.nan
    dpbnn.replay(train, (x, y), (rest, y)).check()


@fails_on(57, broken.records_are_drawn_and_not_persons)
def test_item_57_a_batch_has_all_records_of_a_person_or_none():
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        call = Gate.__call__

        def watched(self, contributions, **options):
            seen.append(options["units"])
            return call(self, contributions, **options)

        patch.setattr(Gate, "__call__", watched)
        fitted(plan=planned(steps=30))
    first = list(dict.fromkeys(IDS))
    for units in seen:
        for unit, count in zip(*units.unique(return_counts=True), strict=True):
            assert int(count) == IDS.count(first[int(unit)])
    sizes = [len(units.unique()) for units in seen]
    assert 0 < sum(sizes) < 30 * N
    assert len({len(units) for units in seen}) > 3


@fails_on(57, broken.the_statement_forgets_the_unit)
def test_item_57_statement_ledger_and_saved_run_say_one_patient(tmp_path):
    posterior = fitted(unit="patient", out=tmp_path / "run")
    statement = posterior.privacy
    assert statement.unit == "one patient"
    assert "one patient with all its records" in str(statement)
    assert "the number of patients n, and the number of all records" in " ".join(
        str(statement).split()
    )
    assert "whether a patient was used" in " ".join(str(statement).split())
    assert statement.mechanisms[0]["parameters"] == {"unit": "patient"}
    assert dpbnn.Ledger(tmp_path / "run" / "ledger.jsonl").statement().unit == "one patient"
    posterior.save(tmp_path / "saved")
    assert dpbnn.load(tmp_path / "saved").privacy.unit == "one patient"
    again = dpbnn.PrivacyStatement.from_json(statement.to_json())
    assert (again.unit, again.released) == (statement.unit, statement.released)
    assert json.loads(statement.to_json())["unit"] == "one patient"


@fails_on(57, broken.units_may_be_mixed)
def test_item_57_releases_for_a_record_and_for_a_person_share_no_ledger(tmp_path):
    book = dpbnn.Ledger(tmp_path / "ledger.jsonl", delta=1e-3)
    fitted(ledger=book)
    spent = book.releases
    plan = planned(n=RECORDS)
    with pytest.raises(UnsupportedEvent, match="one person and some one record"):
        fitted(units=None, plan=plan, ledger=book)
    with pytest.raises(UnsupportedEvent, match="one person and some one record"):
        dpbnn.data.private_counts(dataset()[0].numpy(), noise_multiplier=9.0, ledger=book)
    assert book.releases == spent
    with pytest.raises(UnsupportedEvent, match="one person and some one record"):
        fitted(plan=planned(beside=[plan]))


def test_item_57_calibration_after_a_fit_for_persons_is_refused():
    book = dpbnn.Ledger(delta=1e-3)
    posterior = fitted(ledger=book)
    for given in (book, dpbnn.Ledger(delta=1e-3)):
        spent = given.releases
        with pytest.raises((UnsupportedEvent, ValueError), match="one person"):
            dpbnn.recalibrate(posterior, dataset(), epsilon=0.1, ledger=given)
        assert given.releases == spent


# What the gate is given


def door(**options):
    return Gate(1.0, 1.0, dpbnn.Poisson(100, 10, unit="person"), **options)


def test_a_sampler_of_persons_needs_to_know_whose_examples_they_are():
    with pytest.raises(ValueError, match="say which one each example belongs to"):
        door()(DenseContributions(torch.ones(3, 2)))


def test_units_need_a_sampler_of_units():
    gate = Gate(1.0, 1.0, dpbnn.Poisson(100, 10))
    with pytest.raises(ValueError, match="goes with a sampler that draws units"):
        gate(DenseContributions(torch.ones(3, 2)), units=torch.arange(3))


@pytest.mark.parametrize("units", [torch.arange(2), torch.tensor([1, 0, 0]), torch.rand(3)])
def test_units_that_do_not_fit_the_batch_are_refused_before_anything_is_charged(units):
    gate = door()
    with pytest.raises(ValueError, match="units: "):
        gate(DenseContributions(torch.ones(3, 2)), units=units)
    assert gate.ledger.releases == 0


def test_the_number_of_units_and_not_of_rows_must_fit_the_sampler():
    gate = Gate(1.0, 1.0, dpbnn.FullBatch(3, unit="person"))
    gate(DenseContributions(torch.ones(7, 2)), units=torch.tensor([0, 0, 0, 0, 1, 2, 2]))
    with pytest.raises(ValueError, match="the batch has 7 persons"):
        gate(DenseContributions(torch.ones(7, 2)), units=torch.arange(7))


@pytest.mark.parametrize("most", [7, 10**5, None])
def test_a_person_is_scaled_as_one(most):
    """Records with one direction: their sum has norm 6, and becomes the clip."""
    values = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 0.25], [0.0, 0.5]])
    gate = Gate(1.0, 1e-6, dpbnn.FullBatch(2, unit="person"))
    release = gate(DenseContributions(values), units=torch.tensor([0, 0, 0, 1, 1]), most_rows=most)[
        "value"
    ]
    assert release == pytest.approx(np.array([1.0, 0.75]), rel=2e-3)


def test_clips_by_group_are_those_of_the_person():
    values = {"a.w": torch.tensor([[3.0], [4.0]]), "b.w": torch.tensor([[0.1], [0.1]])}
    gate = Gate({"a": 1.0, "b": 1.0}, 1e-6, dpbnn.FullBatch(1, unit="person"))
    release = gate(DenseContributions(values), units=torch.zeros(2, dtype=torch.int64))
    assert float(release["a.w"]) == pytest.approx(1.0, rel=2e-3)
    assert float(release["b.w"]) == pytest.approx(0.2, rel=2e-3)


def test_add_remove_takes_any_number_of_persons_and_replace_one_is_refused():
    plan = planned(n=10, relation="add/remove")
    assert "expected number of persons" in str(fitted(plan=plan).privacy)
    result = dpbnn.replay(
        dpbnn.SGD(clip=0.3), dataset(5.0), MANY, model=network, plan=plan, units=IDS
    ).check()
    assert result.worst > 0.1
    with pytest.raises(ValueError, match="relation: under replace-one"):
        fitted(plan=planned(relation="replace-one", sampling="full-batch", batch_size=None))


@fails_on(57, broken.the_true_number_of_records_bounds_the_sum, most=None)
@pytest.mark.parametrize("most", [None, 9])
def test_item_57_under_add_remove_a_person_more_or_less_leaves_the_clip_as_it_is(most):
    """Rounding takes its share off the clip: by numbers that are public, not by that of records."""

    def shares(left_out):
        found, original = set(), Gate._precision_of
        x, y = dataset()
        stay = [i for i, label in enumerate(IDS) if label != left_out]
        with pytest.MonkeyPatch.context() as patch:

            def noticed(self, *given):
                precision = original(self, *given)
                found.add(precision)
                return precision

            patch.setattr(Gate, "_precision_of", noticed)
            fitted(
                (x[stay], y[stay]), units=[IDS[i] for i in stay], max_records=most,
                plan=planned(n=10, relation="add/remove"),
            )  # fmt: skip
        return found

    assert shares("nobody") == shares("patient 4")


def test_under_add_remove_there_may_be_more_persons_than_expected():
    """A bound on the sum's rounding is for more rows than n persons have."""
    gate = Gate(1.0, 1.0, dpbnn.Poisson(10, 5, unit="person"), dpbnn.Ledger(relation="add/remove"))
    values = DenseContributions(torch.ones(4, 2))
    gate(values, units=torch.arange(4), most_rows=20)
    few = gate._precision.share
    gate(values, units=torch.arange(4))
    assert gate._precision.share == few


def test_replayed_contributions_are_no_persons():
    class Graph(Replayed):
        def __init__(self):
            self.batch_size, self.shapes = 4, {"value": torch.Size([2])}
            self.device, self.dtype = torch.device("cpu"), torch.float32
            self.summed_in = torch.float32

        def sum_error(self, rows):
            return 0.0

        def summed(self, key, keep, sum_of):
            raise AssertionError("summed")

        def released(self, release):
            raise AssertionError("released")

    gate = Gate(1.0, 1.0, dpbnn.FullBatch(2, unit="person"))
    with pytest.raises(ValueError, match="no units"):
        gate(Graph(), units=torch.tensor([0, 0, 1, 1]))


class Sequence(nn.Module):
    """Adds a bias at every position."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Linear(1, 1)

    def forward(self, x):
        return self.bias(x).flatten(1)


@fails_on(57, broken.a_unit_forgets_what_its_positions_lost)
def test_item_57_what_the_sum_over_positions_lost_is_in_the_norm_of_a_person():
    """2^25 + 1 - 2^25 is 0 in float32: a person with 40 such records has 40, not 0."""
    factors = torch.tensor([2.0**25, 1.0, -(2.0**25)]).repeat(40, 1)
    model = Sequence()
    c = attach(model, lambda outputs, y: (outputs * y).sum(1))(torch.zeros(40, 3, 1), factors)
    groups = Groups.of_rows(torch.zeros(40, dtype=torch.int64))
    assert unit_norms(c, groups, ["bias.bias"]) >= 40


@fails_on(57, broken.units_may_be_called_records)
def test_item_57_persons_are_not_called_records():
    """One record of a person can move its clipped sum by two clips, not by one."""
    for name in ("record", "Record"):
        with pytest.raises(ValueError, match="is what a single row is called"):
            fitted(unit=name)
    assert unit_name("record_id") == "record group"
    assert unit_name("patient_id") == "patient"


# What `fit` is given


def test_the_plan_counts_persons():
    with pytest.raises(ValueError, match=f"n={RECORDS} persons and the data has {N}"):
        fitted(plan=planned(n=RECORDS))


def test_a_plan_for_persons_needs_units():
    with pytest.raises(ValueError, match="the plan counts persons"):
        fitted(units=None, plan=dpbnn.Plan.from_json(fitted_plan().to_json()))


def fitted_plan():
    from dpbnn.privacy.units import by_unit

    return by_unit(planned(), "person")


@pytest.mark.parametrize("missing", [None, math.nan, "", "  "])
def test_records_that_are_nobodys_are_refused_or_contribute_nothing(missing):
    labels = [*IDS]
    labels[MANY] = missing
    with pytest.raises(ValueError, match="1 record cannot be used: no label says which person"):
        fitted(units=labels)
    assert fitted(units=labels, on_bad_rows="zero").privacy.private
    assert not Units.of(labels, N, on_bad_rows="zero").kept[MANY]


def test_the_same_person_with_spaces_around_is_the_same_person():
    labels = [f" {label} " if i % 2 else label for i, label in enumerate(IDS)]
    assert len(Units.of(labels, N)) == N


@fails_on(57, broken.labels_go_by_their_type)
def test_item_57_a_person_whose_label_is_a_text_here_and_a_number_there_is_one_person():
    """As pandas gives a column of numbers with a few texts, which it reads in parts."""
    labels = [7, "7", 7.0, " 007", "7.0", b"7", np.int64(7), "x7", 8, "8", 2**60, f"{2**60 + 1}"]
    numbers = units_of(labels)
    assert numbers == [0] * 7 + [1, 2, 2, 3, 4]
    assert units_of(np.array(labels, dtype=object)) == numbers
    assert units_of(["nan", "inf", "1_0", "10"]) == [0, 1, 2, 3]


def test_a_label_in_a_table_does_not_depend_on_the_labels_of_others():
    schema = dpbnn.data.Schema.from_dict(
        {"target": {"name": "y", "bounds": [0, 1]}, "columns": {"x": {"bounds": [0, 1]}},
         "unit": "who"})  # fmt: skip
    numbers = np.zeros(4)
    for last, other in (("9", 2), ("nobody", 2), ("NA", 0)):
        labels = schema.units({"who": ["007", "7.0", "8", last], "x": numbers, "y": numbers})
        assert units_of(labels) == [0, 0, 1, other]
    large = schema.units({"who": 2**60 + np.arange(4), "x": numbers, "y": numbers})
    assert units_of(large) == [0, 1, 2, 3]


def test_a_public_number_of_records_bounds_those_that_count():
    with pytest.raises(ValueError, match="their person has more records than max_records=5"):
        fitted(max_records=5)
    units = Units.of(IDS, N, most=5, on_bad_rows="zero")
    counts = np.unique(np.array(IDS)[units.kept.numpy()], return_counts=True)[1]
    assert sorted(counts) == sorted(min(size, 5) for size in SIZES)
    assert units.most_rows(3) == 15
    assert units.most_rows(100) == RECORDS
    assert fitted(max_records=5, on_bad_rows="zero").privacy.private


def test_records_that_are_nobodys_take_no_place_of_a_persons():
    labels = [None, None, "a", "b", "a", "a"]
    units = Units.of(labels, 2, most=2, on_bad_rows="zero")
    assert units.kept.tolist() == [False, False, True, True, True, False]


@fails_on(57, broken.records_of_nobody_are_the_first_persons)
def test_item_57_records_that_are_nobodys_change_what_no_person_adds():
    """Without the first person they would be the next one's, who would change too."""
    with_them = Units.of([None, "a", None, "b", "a"], None, on_bad_rows="zero")
    records, whose = with_them.batch(torch.arange(2))
    assert (records.tolist(), whose.tolist()) == ([1, 4, 3], [0, 0, 1])
    values = np.array([[9.0], [1.0], [9.0], [5.0], [2.0]])
    of_units = with_them.means(0, 2, values[with_them.records(0, 2)], None)
    assert of_units.tolist() == [[1.5], [5.0]]
    assert len(Units.of([None, None], None, on_bad_rows="zero")) == 0


def test_messages_name_no_label():
    for labels in ([*IDS[:-1], None], IDS[:-1], "patient 4", [[label] for label in IDS]):
        with pytest.raises(ValueError, match=r"units|records? cannot be used") as caught:
            fitted(units=labels, plan=planned())
        assert "patient 4" not in str(caught.value)


@pytest.mark.parametrize(
    "method", [dpbnn.Moments(), dpbnn.NoiseAware(), dpbnn.SEP(), dpbnn.EP(), dpbnn.BBP.paper()]
)
def test_methods_for_single_records_refuse_units_in_one_line(method):
    book = dpbnn.Ledger()
    with pytest.raises(ValueError, match=r"^units: ") as caught:
        fitted(method=method, ledger=book)
    assert "\n" not in str(caught.value)
    assert book.untouched


def test_observers_are_refused():
    book = dpbnn.Ledger()
    with pytest.raises(ValueError, match="single records"):
        fitted(observers=[dpbnn.BayesianAccountant()], ledger=book)
    assert book.untouched


def test_keys_of_a_run_are_bound_to_its_labels():
    """Noise may serve the same steps of the same computation alone, so also the same persons."""
    from dpbnn.computed import digest

    def of(labels):
        return digest((*dataset(), Units.of(labels, None)), b"a key of enough bytes")

    assert of(IDS) == of([f"person {label}" for label in IDS])
    assert of(IDS) != of([*IDS[1:], IDS[0]])


def test_an_interrupted_run_goes_on_only_with_the_same_labels(tmp_path):
    from dpbnn import training

    whole = fitted(debug_seed=1, out=tmp_path / "whole")
    one = training._Run._one
    with pytest.MonkeyPatch.context() as patch:

        def stopped(self, batch):
            if self.step == 2:
                raise KeyboardInterrupt
            one(self, batch)

        patch.setattr(training._Run, "_one", stopped)
        with pytest.raises(KeyboardInterrupt):
            fitted(debug_seed=1, out=tmp_path / "run", checkpoint_every=1)
    again = fitted(debug_seed=1, out=tmp_path / "run", checkpoint_every=1, resume=True)
    for one_weight, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one_weight, other)


def test_one_record_each_gives_what_records_give():
    """The same clipped sums, whether the unit is a record or a person with one record."""
    plan = planned(n=RECORDS, sampling="full-batch", batch_size=None)
    one = fitted(units=None, plan=plan, debug_seed=0)
    two = fitted(units=range(RECORDS), plan=plan, debug_seed=0)
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
