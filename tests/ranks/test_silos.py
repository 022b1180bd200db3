"""Sites with their own data, ledgers and noise: one model, and what each of them can see."""

import math

import broken_versions as broken
import pytest
import torch
import torch.distributed as dist
from false_alarms import LEVEL
from scipy import stats
from together import together
from twins import fails_on, twins_of

import dpbnn
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.group import Group
from dpbnn.privacy.ledger import Ledger
from dpbnn.ranks import Ranks
from dpbnn.silos import Site, train

RECORDS = (17, 11, 20)
N = sum(RECORDS)
METHODS = {
    "sep": dpbnn.SEP(step_size=0.1),
    "vi": dpbnn.VI(learning_rate=0.1),
    "sgd": dpbnn.SGD(learning_rate=0.3),
}


def dataset(kind="vi"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    if kind == "sep":
        return x, x[:, 0] + 0.1 * torch.randn(N, generator=generator)
    return x, torch.randint(0, 3, (N,), generator=generator)


def network(kind="vi", width=5):
    return lambda: dpbnn.mlp(4, (width,), 1 if kind == "sep" else 3)


def settings(kind, chosen):
    likelihood = dpbnn.likelihoods.Gaussian(0.5) if kind == "sep" else "categorical"
    return {"likelihood": likelihood, "method": METHODS[kind], "plan": chosen}


def sites(kind="vi", chosen=None, data=None, width=5, ledgers=(), **options):
    """All sites in this process."""
    data = dataset(kind) if data is None else data
    parts = list(zip(*(torch.split(part, RECORDS) for part in data), strict=True))
    return [
        Site(
            network(kind, width), own, site=number, records=RECORDS,
            ledger=ledgers[number] if ledgers else None, **settings(kind, chosen or plan()),
            **options,
        )
        for number, own in enumerate(parts)
    ]  # fmt: skip


def plan(steps=4, **change):
    given = {"noise_multiplier": 1.5, "delta": 1e-5, "n": N, "batch_size": 12, "steps": steps}
    return dpbnn.plan(**{**given, **change})


def stepped(all_sites):
    """Make a step; return the messages and their sum."""
    messages = [site.message() for site in all_sites]
    total = torch.stack(messages).sum(0)
    for site in all_sites:
        site.apply(total)
    return messages, total


def numbers(posterior):
    parts = [value for value in posterior._parts().values() if isinstance(value, torch.Tensor)]
    parts += list(posterior.model.state_dict().values())
    return torch.cat([part.double().flatten() for part in parts])


def trained(all_sites):
    while all_sites[0].step < all_sites[0].steps:
        stepped(all_sites)
    return [site.posterior() for site in all_sites]


@pytest.mark.parametrize("kind", METHODS)
def test_without_noise_sites_train_what_one_process_trains_on_all_data(kind):
    free = dpbnn.open_plan(n=N, sampling="full-batch", steps=3)
    found = [numbers(posterior) for posterior in trained(sites(kind, free))]
    assert all(torch.equal(one, found[0]) for one in found)
    given = settings(kind, free)
    if kind == "sep":
        whole = dpbnn.fit(network(kind), dataset(kind), **given)
        assert torch.allclose(found[0], numbers(whole), rtol=1e-4, atol=1e-5)
    elif kind == "sgd":
        whole = dpbnn.fit(network(kind), dataset(kind), **given)
        assert torch.allclose(found[0], numbers(whole), rtol=0, atol=1e-5)
    assert (found[0] - numbers(trained(sites(kind, free))[0])).abs().max() == 0


@pytest.mark.parametrize("kind", METHODS)
def test_with_noise_all_sites_have_one_model_and_ledgers_of_their_own(kind, tmp_path):
    ledgers = [Ledger(tmp_path / f"{number}.jsonl") for number in range(3)]
    posteriors = trained(sites(kind, ledgers=ledgers))
    assert torch.equal(numbers(posteriors[0]), numbers(posteriors[2]))
    for number, posterior in enumerate(posteriors):
        said = posterior.privacy
        assert said.private
        (entry,) = said.released
        assert (entry.event.count, entry.event.n) == (4, RECORDS[number])
        assert entry.event.noise_multiplier == pytest.approx(1.5 / math.sqrt(3))
        assert entry.event.rate == pytest.approx(12 / N)
        assert Ledger(tmp_path / f"{number}.jsonl").releases == 4
        assert "one of 3 sites" in str(said)


def residuals(all_sites, steps, *seen):
    """The noise that is left to each who sees something of every step, in clips.

    Everything is zero but the noise: no record is ever in a batch.
    """
    clip, made = all_sites[0]._run.gate.clip, [stepped(all_sites) for _ in range(steps)]
    found = [torch.cat([one(*step) / clip for step in made]) for one in seen]
    return [(len(left), float(left.square().sum())) for left in found]


SEEN = {
    "outside": (0, lambda messages, total: total),
    "another site, which takes its own message off": (1, lambda m, total: total - m[1]),
    "all other sites together": (2, lambda m, total: total - m[1] - m[2]),
    "who collects the messages": (None, lambda m, total: m[0]),
}


@fails_on(64, broken.sites_charge_the_noise_of_all, names=("who collects the messages",))
@fails_on(64, broken.other_sites_know_nothing, names=(list(SEEN)[1],))
@fails_on(64, broken.sites_share_the_key_of_their_noise, names=("outside",))
@pytest.mark.parametrize("names", [tuple(SEEN)], ids=["all"])
def test_item_64_the_noise_that_is_left_is_the_one_that_is_stated(names):
    """Attacks on site 0, by subtraction of what the attacker knows."""
    all_sites = sites("sgd", plan(steps=6, batch_size=1e-6, n=N), width=400)
    left = residuals(all_sites, 6, *(SEEN[who][1] for who in names))
    for who, (count, squares) in zip(names, left, strict=True):
        (entry,) = all_sites[0].statement(SEEN[who][0]).released
        claimed = entry.event.noise_multiplier
        low, high = stats.chi2.ppf([LEVEL / 2, 1 - LEVEL / 2], count)
        assert low <= squares / claimed**2 <= high, (who, math.sqrt(squares / count) / claimed)
        assert entry.event.count == 6


def test_the_noise_of_a_site_that_adds_none_is_missing_and_nothing_that_is_stated_needs_it(
    monkeypatch,
):
    chosen = plan(steps=6, batch_size=1e-6)
    all_sites = sites("sgd", chosen, width=400)
    monkeypatch.setattr(all_sites[1]._run.gate, "_noised", lambda sums, sigma: sums)
    ((count, squares),) = residuals(all_sites, 6, lambda messages, total: total)
    low, high = stats.chi2.ppf([LEVEL / 2, 1 - LEVEL / 2], count)
    outside, one = (all_sites[0].statement(number).released[0].event for number in (0, 1))
    assert squares / outside.noise_multiplier**2 < low  # epsilon of the outside view is false
    assert low <= squares / one.noise_multiplier**2 <= high


def test_epsilon_grows_with_what_others_know():
    all_sites = sites()
    trained(all_sites)
    views = [all_sites[0].statement(number).epsilon for number in (0, 1, 2)]
    assert views[0] < views[1] < views[2]
    assert views[0] == pytest.approx(plan().epsilon, rel=1e-3)
    assert views[2] == pytest.approx(all_sites[0].statement().epsilon, rel=1e-6)
    expected = plan(noise_multiplier=1.5 * math.sqrt(2 / 3)).epsilon
    assert views[1] == pytest.approx(expected, rel=1e-3)


@fails_on(64, broken.messages_count_when_they_are_answered)
def test_item_64_a_message_counts_from_when_it_is_made():
    """Others may have the sum already that this site still waits for."""
    first, second = sites("sgd")[:2]
    total = first.message() + second.message()
    assert [part.event.count for part in first.statement(0).released] == [1]
    said = [first.statement(0).epsilon, str(first.statement())]
    first.apply(total)
    assert said == [first.statement(0).epsilon, str(first.statement())]


@fails_on(64, broken.statements_of_sums_forget_the_ledger)
def test_item_64_a_site_that_begins_anew_counts_what_it_has_sent_before(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=1e-5)
    views = []
    for _ in range(2):
        data = tuple(part[: RECORDS[0]] for part in dataset())
        one = Site(
            network(), data, site=0, records=RECORDS, ledger=ledger, **settings("vi", plan())
        )
        one.message()
        views.append(one.statement(0).epsilon)
        assert one.statement(2).epsilon <= one.statement().epsilon
    assert ledger.releases == 8
    earlier = plan(noise_multiplier=1.5 / math.sqrt(3)).epsilon
    assert views[0] < earlier < views[1]
    ledger.observe()
    assert not one.statement(0).private


def test_a_step_that_failed_is_not_made_again(monkeypatch):
    """Another batch in place of one that failed would be chosen by the data."""
    first = sites("sgd")[0]
    monkeypatch.setattr(first._run.process, "contribute", lambda *given: 1 / 0)
    with pytest.raises(Exception, match="raised an error"):
        first.message()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="a step has failed"):
        first.message()


@fails_on(64, broken.messages_are_rounded_to_float32)
def test_item_64_sums_of_messages_are_exact():
    """What a message lost by itself would depend on its own sum and noise, and not on all noise."""
    chosen = plan(noise_multiplier=0.01, sampling="full-batch", batch_size=None)
    all_sites = sites("sgd", chosen)
    made, noised = [], Gate._noised
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gate, "_noised", lambda *args: made.append(noised(*args)) or made[-1])
        messages, total = stepped(all_sites)
    (g,) = {site._run.gate._precision.step for site in all_sites}
    for message, release in zip(messages, made, strict=True):
        exact = torch.cat([value.flatten() for value in release.values()])
        assert torch.equal(message, exact)
        assert (message / g).abs().max() > 2**25  # more than float32 holds
    assert torch.equal(messages[2] + messages[0] + messages[1], total)
    assert torch.equal(total, g * (total / g).round())


@fails_on(64, broken.sites_share_the_key_of_their_batches)
def test_item_64_no_site_knows_the_batches_of_another():
    all_sites = sites("sgd", plan(batch_size=24))
    keys = {site._run.keys.sampling for site in all_sites}
    assert len(keys) == 3


@fails_on(64, broken.messages_are_charged_when_they_are_sent)
def test_item_64_a_message_is_charged_before_its_sum_is_formed():
    held = []
    with pytest.MonkeyPatch.context() as patch:
        summed = Gate._summed

        def looked(self, *args):
            held.append(self.ledger.releases)
            return summed(self, *args)

        patch.setattr(Gate, "_summed", looked)
        sites("sgd")[0].message()
    assert held == [4]


@fails_on(64, broken.nothing_is_clipped, kind="sgd")
@pytest.mark.parametrize("kind", METHODS)
def test_item_64_neighbours_at_one_site(kind):
    data = dataset(kind)
    other = (data[0].clone(), data[1].clone())
    other[0][3] = float("nan")
    chosen = plan(sampling="full-batch", batch_size=None, steps=3)

    def run(given):
        posteriors = trained(sites(kind, chosen, given, on_bad_rows="zero"))
        return [numbers(posterior) for posterior in posteriors]

    report = dpbnn.replay(run, data, other)
    assert report.passed, report
    assert len(report.distances) == 9
    moved = report.distances[::3]
    assert max(moved) > 0.1 * report.sensitivities[0]
    assert not any(report.distances[1::3] + report.distances[2::3])


REFUSED = {
    "the sites have 48": {"chosen": dpbnn.open_plan(n=50, batch_size=5, steps=2)},
    "under zero-out": {"chosen": plan(relation="add-remove")},
    "Poisson or full-batch": {"chosen": plan(sampling="partition")},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_sites_cannot_do_is_refused(words):
    with pytest.raises(ValueError, match=words):
        sites("sgd", **REFUSED[words])


def test_a_site_takes_turns_and_finite_sums_alone():
    first = sites("sgd")[0]
    with pytest.raises(RuntimeError, match="no message waits"):
        first.apply(torch.zeros(3))
    message = first.message()
    with pytest.raises(RuntimeError, match="waits for its sum"):
        first.message()
    for wrong in (message[:-1], message * math.nan):
        with pytest.raises(ValueError, match="a site has sent something else"):
            first.apply(wrong)
    with pytest.raises(RuntimeError, match="4 steps are left"):
        first.posterior()
    first.apply(message)
    assert first.step == 1


@fails_on(64, broken.nobody_counts_the_sites)
def test_item_64_sites_over_processes(tmp_path):
    """The same over torch.distributed: every process is a site, and each site one process."""

    def begun(number, file="own", noise=1.5):
        data = dataset()
        own = tuple(torch.split(part, RECORDS)[number] for part in data)
        ledger = Ledger(tmp_path / f"{number} {file}.jsonl")
        chosen = plan(noise_multiplier=noise)
        return Site(
            network(), own, site=number, records=RECORDS, ledger=ledger, **settings("vi", chosen)
        )

    def work(rank):
        group = Ranks(rank, 3, 3)
        site = begun(rank)
        found = numbers(train(site, group)), site.statement(0).epsilon
        with pytest.raises(RuntimeError, match="plan: rank 1 has something else than rank 0"):
            train(begun(rank, "other plan", noise=1.5 + rank), group)
        with pytest.raises(ValueError, match=r"has the sites \[0, 1, 1\] where 3"):
            train(begun(min(rank, 1), f"twice {rank}"), group)
        pair = dist.new_group([0, 1], backend="gloo")
        if rank < 2:
            with pytest.raises(ValueError, match=r"has the sites \[0, 1\] where 3"):
                train(begun(rank, "two of three"), Ranks(rank, 2, 2, pair))
        return found

    found = together(3, work)
    assert all(isinstance(one, tuple) for one in found), found
    assert all(torch.equal(one[0], found[0][0]) for one in found)
    assert [Ledger(tmp_path / f"{rank} own.jsonl").releases for rank in range(3)] == [4, 4, 4]
    assert Ledger(tmp_path / "0 two of three.jsonl").releases == 0


def test_one_process_is_a_group_of_its_own():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        with pytest.raises(RuntimeError, match="several processes"):
            Group().check_alone()


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
