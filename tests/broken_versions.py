"""Deliberately broken versions of the library, each with one bug of the list put back.

A version is a function of a monkeypatch that spoils the real code; it returns further arguments for
the test that must fail, or None. `test_privacy_bugs.py` says which test fails on which version.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import types
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import windows
from torch import nn

import dpbnn
from dpbnn import (
    audit,
    checkpoint,
    messages,
    networks,
    rank_rows,
    ranks,
    resume,
    rows,
    silos,
    storage,
    training,
    units,
)
from dpbnn.calibration import release, selection
from dpbnn.captured import CapturedStep
from dpbnn.contributions import (
    Contributions,
    DenseContributions,
    joined,
    outer,
    recorded,
    sites,
)
from dpbnn.contributions.attach import Attached
from dpbnn.contributions.dense import ChunkedContributions
from dpbnn.contributions.outer import Outer
from dpbnn.contributions.probe import _Probe
from dpbnn.contributions.recorded import NetworkContributions
from dpbnn.data import column as columns
from dpbnn.data import statistics
from dpbnn.data import table as tables
from dpbnn.estimators import classifier, fitting, scaling, workspace
from dpbnn.likelihoods import Categorical
from dpbnn.methods.descent import Descent
from dpbnn.methods.method import Method, Problem
from dpbnn.methods.sep import SEPProcess
from dpbnn.methods.sgd import SGDProcess
from dpbnn.methods.sgld import LangevinProcess
from dpbnn.methods.watch import Watch
from dpbnn.networks.sharded import Sharding
from dpbnn.posteriors import IterateWriter, iterate_file
from dpbnn.privacy import (
    accountants,
    events,
    gate,
    group,
    ledger,
    ledger_entries,
    ledger_file,
    module_state,
    noise,
    plan,
    sampling,
    slices,
    statement,
    stream,
    writes,
)
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.module_state import ModuleState
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import Poisson, Sampler
from dpbnn.sources import prefetch, source

Patch = pytest.MonkeyPatch


def around(patch: Patch, owner: object, name: str, wrapper: Callable) -> None:
    """Replace a method by wrapper(original, self, ...)."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *a, **k: wrapper(original, self, *a, **k))


# 1: sensitivity


def nothing_is_clipped(patch: Patch) -> None:
    patch.setattr(Gate, "_weights", lambda self, chunk: torch.ones(chunk.batch_size))


def layers_are_clipped_as_if_alone(patch: Patch) -> None:
    def weights(self, chunk):
        return {n: gate.clip_factors(s.sqrt(), self.clip) for n, s in chunk.squared_norms().items()}

    patch.setattr(Gate, "_weights", weights)


def clip_factors_are_one_percent_too_large(patch: Patch) -> None:
    around(patch, Gate, "_weights", lambda original, self, chunk: 1.01 * original(self, chunk))


def groups_count_as_one_clip(patch: Patch) -> None:
    def made(original, self, *args, **options):
        original(self, *args, **options)
        self.clip = max(self.clips.values())

    around(patch, Gate, "__init__", made)


# 2: terms without data


def the_norm_forgets_the_prior(patch: Patch) -> None:
    def norms(original, self):
        kept = [site.data_free for site in self._sites]
        for site in self._sites:
            site.data_free = {}
        result = original(self)
        for site, constants in zip(self._sites, kept, strict=True):
            site.data_free = constants
        return result

    around(patch, NetworkContributions, "_norms", norms)


def the_prior_is_lost(patch: Patch) -> None:
    def gradient(self, state, release):
        return {name: release[name] / self.problem.batch_size for name in state.parameters}

    patch.setattr(SGDProcess, "gradient", gradient)


def the_prior_counts_once_per_batch(patch: Patch) -> None:
    def gradient(self, state, release):
        b, prior = self.problem.batch_size, self.problem.prior
        return {n: (release[n] + prior.gradient(p)) / b for n, p in state.parameters.items()}

    patch.setattr(SGDProcess, "gradient", gradient)


# 3: cancellation


def gram_norms_are_taken_in_float32(patch: Patch) -> None:
    def naive(self):
        a, g = self.terms[0].factors(slice(None))
        value = (torch.bmm(a, a.mT) * torch.bmm(g, g.mT)).sum((1, 2)).clamp(min=0)
        return dict.fromkeys(self.shapes, value.double()), 0.0

    patch.setattr(Outer, "_gram", naive)


# 4: examples that are not finite


def bad_examples_are_only_multiplied_by_zero(patch: Patch) -> None:
    def norms(original, self):
        squares, _ = original(self)
        self._bad = None
        return squares, None

    around(patch, NetworkContributions, "_norms", norms)


def a_bad_example_empties_the_batch(patch: Patch) -> None:
    bad_examples_are_only_multiplied_by_zero(patch)

    def summed(original, self, *args):
        return {n: v.nan_to_num(0.0, 0.0, 0.0) for n, v in original(self, *args).items()}

    around(patch, Gate, "_clipped_sum", summed)


# 5: averaging


def the_gate_divides_by_the_realised_size(patch: Patch) -> None:
    def call(original, self, contributions, *, mean=False, **options):
        release = original(self, contributions, **options)
        size = max(1, contributions.batch_size)
        return {n: v / size for n, v in release.items()} if mean else release

    around(patch, Gate, "__call__", call)


def the_trainer_divides_by_the_usable_rows(patch: Patch) -> None:
    def one(original, self, batch):
        self.process.usable = max(1, int(self.rows.kept[batch].sum()))
        original(self, batch)

    def gradient(original, self, state, release):
        factor = self.problem.batch_size / self.usable
        return original(self, state, {name: factor * value for name, value in release.items()})

    around(patch, training._Run, "_one", one)
    around(patch, SGDProcess, "gradient", gradient)


# 6: sampling


def batches_are_cut_from_a_shuffle(patch: Patch) -> None:
    def draw(self, step, generator, records):
        each = math.ceil(self.n / self.batch_size)
        order = np.random.default_rng(step // each).permutation(self.n)
        first = step % each * int(self.batch_size)
        return order[first : first + int(self.batch_size)]

    patch.setattr(Poisson, "_draw", draw)


def batches_have_a_fixed_size(patch: Patch) -> None:
    patch.setattr(Poisson, "_draw", dpbnn.FixedSize._draw)


def some_records_are_drawn_more_often(patch: Patch) -> None:
    def draw(self, step, generator, records):
        rates = self.rate * np.linspace(0.8, 1.2, self.n)
        return np.flatnonzero(generator.random(self.n) < rates)

    patch.setattr(Poisson, "_draw", draw)


def any_loader_is_taken_for_poisson(patch: Patch) -> None:
    def event(original, self, sigma, count, start):
        return (self.sampler or Poisson(20, 5)).event(sigma, count, start)

    around(patch, Gate, "_event", event)


def batch_sizes_are_not_looked_at(patch: Patch) -> None:
    patch.setattr(Gate, "_check_size", lambda self, size: None)


# 7: empty batches


def empty_batches_are_not_drawn(patch: Patch) -> None:
    def batches(original, self, *args, **options):
        return (batch for batch in original(self, *args, **options) if len(batch))

    around(patch, Sampler, "batches", batches)


def empty_batches_get_no_noise(patch: Patch) -> None:
    def noised(original, self, sums, sigma):
        empty = not any(value.any() for value in sums.values())
        return sums if empty else original(self, sums, sigma)

    around(patch, Gate, "_noised", noised)


def empty_batches_are_not_recorded(patch: Patch) -> None:
    def call(original, self, contributions, **options):
        if contributions.batch_size:
            return original(self, contributions, **options)
        zeros = {n: torch.zeros(s) for n, s in contributions.shapes.items()}
        return self.noise.normal(zeros, self.noise_multiplier * self.clip)

    around(patch, Gate, "__call__", call)


def the_trainer_skips_empty_batches(patch: Patch) -> None:
    def one(original, self, batch):
        if len(batch):
            original(self, batch)
        else:
            self.step += 1

    around(patch, training._Run, "_one", one)


# 8 and 9: chunks


def chunks_are_clipped_instead_of_examples(patch: Patch) -> None:
    def weights(self, chunk):
        total = chunk.weighted_sum(torch.ones(chunk.batch_size)).values()
        norm = torch.cat([value.flatten() for value in total]).norm()
        return torch.full((chunk.batch_size,), min(1.0, self.clip / float(norm)))

    patch.setattr(Gate, "_weights", weights)


def every_chunk_gets_noise(patch: Patch) -> None:
    def summed(original, self, contributions, *args):
        total = original(self, contributions, *args)
        for _ in list(contributions.chunks())[1:]:
            self.noise.add(total, self.noise_multiplier * self.clip)
        return total

    around(patch, Gate, "_clipped_sum", summed)


def the_first_chunk_counts_twice(patch: Patch) -> None:
    def chunks(original, self):
        yield from list(original(self))[:1]
        yield from original(self)

    around(patch, ChunkedContributions, "chunks", chunks)


def the_first_chunk_is_dropped(patch: Patch) -> None:
    def chunks(original, self):
        yield from list(original(self))[1:]

    around(patch, ChunkedContributions, "chunks", chunks)


# 10: scale of the noise


def _noise_of(patch: Patch, std: Callable) -> None:
    def noised(self, sums, sigma):
        self.noise.add(sums, std(self, sigma))
        return sums

    patch.setattr(Gate, "_noised", noised)


def noise_is_five_percent_too_large(patch: Patch) -> None:
    _noise_of(patch, lambda gate, sigma: 1.05 * sigma * gate.clip)


def noise_is_five_percent_too_small(patch: Patch) -> None:
    _noise_of(patch, lambda gate, sigma: 0.95 * sigma * gate.clip)


def noise_forgets_the_clip(patch: Patch) -> None:
    _noise_of(patch, lambda gate, sigma: sigma)


def the_sum_gets_the_noise_of_a_mean(patch: Patch) -> None:
    _noise_of(patch, lambda gate, sigma: sigma * gate.clip / gate.sampler.batch_size)


# 11: the clip


def the_clip_is_a_constant(patch: Patch) -> None:
    patch.setattr(gate, "clip_factors", lambda norms, clip: torch.clamp(1 / norms, max=1.0))


def the_methods_clip_is_not_passed_on(patch: Patch) -> None:
    patch.setattr(Descent, "settled", lambda self, plan: (plan, 1.0))


# 12: independent noise


def noise_forgets_the_step(patch: Patch) -> None:
    patch.setattr(NoiseSource, "_stream_key", lambda self, use: b"k" * 16)


def tensors_share_their_noise(patch: Patch) -> None:
    def add(original, self, tensors, std, dtype=None):
        noise = {"": torch.zeros(max(t.numel() for t in tensors.values()))}
        original(self, noise, std)
        for tensor in tensors.values():
            tensor += noise[""][: tensor.numel()].view_as(tensor)

    around(patch, NoiseSource, "add", add)


def only_the_first_tensor_gets_noise(patch: Patch) -> None:
    def add(original, self, tensors, std, dtype=None):
        original(self, dict(list(tensors.items())[:1]), std)

    around(patch, NoiseSource, "add", add)


# 14: generators


def noise_comes_from_the_global_generator(patch: Patch) -> None:
    def add(self, tensors, std, dtype=None):
        for tensor in tensors.values():
            tensor.add_(torch.randn_like(tensor), alpha=std)

    patch.setattr(NoiseSource, "add", add)


def noise_moves_the_global_generator(patch: Patch) -> None:
    def add(original, self, tensors, std, dtype=None):
        torch.rand(1)
        original(self, tensors, std, dtype)

    around(patch, NoiseSource, "add", add)


def batches_come_from_the_global_generator(patch: Patch) -> None:
    def draw(self, step, generator, records):
        return (torch.rand(self.n) < self.rate).nonzero()[:, 0].numpy()

    patch.setattr(Poisson, "_draw", draw)


# 15, 16 and 17: what is not per example


def coupling_is_not_looked_for(patch: Patch) -> None:
    patch.setattr(_Probe, "refuse_coupling", lambda self, *args: None)


def nothing_is_refused(patch: Patch) -> None:
    module = importlib.import_module("dpbnn.contributions.attach")
    patch.setattr(module, "refuse_coupling", lambda model: None)
    coupling_is_not_looked_for(patch)
    missing_gradients_are_accepted(patch)
    changed_state_is_accepted(patch)


def the_likelihood_looks_at_the_batch(patch: Patch) -> None:
    nothing_is_refused(patch)

    def log_prob(original, self, outputs, y):
        return original(self, outputs - outputs.std(0), y)

    around(patch, Categorical, "log_prob", log_prob)


def classes_are_balanced_by_the_batch(patch: Patch) -> None:
    nothing_is_refused(patch)

    def log_prob(original, self, outputs, y):
        counts = torch.stack([(y == k).sum() for k in range(outputs.shape[-1])])
        return original(self, outputs, y) * len(y) / counts[y].clamp(min=1)

    around(patch, Categorical, "log_prob", log_prob)


def missing_gradients_are_accepted(patch: Patch) -> None:
    patch.setattr(_Probe, "refuse_missing", lambda self, *args: None)


def frozen_parameters_are_trained_beside_the_gate(patch: Patch) -> None:
    changed_state_is_accepted(patch)
    the_trained_network_becomes_the_posterior(patch)

    def contribute(original, self, state, x, y):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name not in state.parameters and len(x):
                    parameter -= 0.1 * x.mean()
        return original(self, state, x, y)

    around(patch, SGDProcess, "contribute", contribute)


def changed_state_is_accepted(patch: Patch) -> None:
    patch.setattr(ModuleState, "differences", lambda self, thorough=False: [])


def running_means_see_the_data(patch: Patch) -> None:
    def call(original, self, x, y, *args):
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d) and len(x):
                module.running_mean.lerp_(x.mean(), 0.1)
        return original(self, x, y, *args)

    around(patch, Attached, "__call__", call)


def inputs_are_standardised_by_the_data(patch: Patch) -> None:
    original = training.checked_rows

    def checked(*args, **options):
        rows = original(*args, **options)
        return dataclasses.replace(rows, x=(rows.x - rows.x.mean(0)) / rows.x.std(0))

    patch.setattr(training, "checked_rows", checked)


# 19: steps


def the_plan_counts_a_step_less(patch: Patch) -> None:
    original = plan._events

    def events(draw, runs):
        return tuple(dataclasses.replace(e, count=e.count - 1) for e in original(draw, runs))

    patch.setattr(plan, "_events", events)


def a_step_more_runs(patch: Patch) -> None:
    def one(original, self, batch):
        if self.step == 0:
            self.gate(self.process.contribute(self.state, self.x[batch], self.y[batch]))
        original(self, batch)

    around(patch, training._Run, "_one", one)


def the_ledger_counts_a_step_less(patch: Patch) -> None:
    def spend(original, self, event, **details):
        original(self, dataclasses.replace(event, count=event.count - 1), **details)

    around(patch, Ledger, "spend", spend)


# 20: counts


def the_count_is_free(patch: Patch) -> dict[str, Callable]:
    def count(values, ledger):
        return (DenseContributions(values).norms() <= 1.0).sum()

    return {"count": count}


def the_count_gets_no_noise(patch: Patch) -> None:
    def noised(original, self, sums, sigma):
        return sums if self.label == "clip count" else original(self, sums, sigma)

    around(patch, Gate, "_noised", noised)


def the_count_is_not_paid_for(patch: Patch) -> None:
    def spend(original, self, event, *, label="", **details):
        if label != "clip count":
            original(self, event, label=label, **details)

    around(patch, Ledger, "spend", spend)


# 21: relations


def every_relation_moves_by_one_clip(patch: Patch) -> None:
    patch.setattr(Relation, "shift", property(lambda self: 1.0))


def relations_are_not_compared(patch: Patch) -> None:
    for module in (gate, ledger):
        patch.setattr(module, "check_relation", lambda event, relation: None)


# 24: one draw for norm and sum


def chunks_draw_new_masks(patch: Patch) -> None:
    module = importlib.import_module("dpbnn.contributions.attach")
    patch.setattr(module, "same_draws", lambda part, device: part)


def the_sum_is_of_a_second_pass(patch: Patch) -> None:
    def call(original, self, *args):
        first, second = original(self, *args), original(self, *args)
        first.weighted_sum = second.weighted_sum
        return first

    around(patch, Attached, "__call__", call)


def chunks_draw_new_weights(patch: Patch) -> None:
    nothing_is_refused(patch)

    def record(original, self, x, y, draws, *args):
        return original(self, x, y, self.draw(), *args)

    around(patch, Attached, "record", record)


# 25: rejected factors


def _rejected(contributions: Contributions) -> bool:
    return bool((contributions.norms() == 0).any())


def a_rejected_factor_skips_the_step(patch: Patch) -> None:
    def one(original, self, batch):
        found = self.process.contribute(self.state, self.x[batch], self.y[batch])
        if _rejected(found) or not self.rows.kept[batch].all():
            self.step += 1
        else:
            original(self, batch)

    around(patch, training._Run, "_one", one)


def a_rejected_factor_gets_no_noise(patch: Patch) -> None:
    def call(original, self, contributions, *, keep=None, **options):
        self.rejected = _rejected(contributions) or (keep is not None and not keep.all())
        return original(self, contributions, keep=keep, **options)

    def noised(original, self, sums, sigma):
        return sums if self.rejected else original(self, sums, sigma)

    around(patch, Gate, "__call__", call)
    around(patch, Gate, "_noised", noised)


def the_step_follows_the_accepted_factors(patch: Patch) -> None:
    def contribute(original, self, state, x, y):
        found = original(self, state, x, y)
        self.accepted = int((found.norms() > 0).sum()) if len(x) else 1
        return found

    def update(original, self, state, release):
        factor = self.problem.batch_size / max(1, self.accepted)
        return original(self, state, {name: factor * value for name, value in release.items()})

    around(patch, SEPProcess, "contribute", contribute)
    around(patch, SEPProcess, "update", update)


def the_sensitivity_is_damped(patch: Patch) -> None:
    damped = property(lambda self: self.ledger.relation.shift * self.clip / self.sampler.n)
    patch.setattr(Gate, "sensitivity", damped)


# 27: rounding


def norms_are_rounded_to_half_precision(patch: Patch) -> None:
    patch.setattr(recorded, "INFLATION", 1.0)
    around(
        patch, NetworkContributions, "norms",
        lambda original, self: original(self).bfloat16().double(),
    )  # fmt: skip


def sums_are_rounded_to_half_precision(patch: Patch) -> None:
    def summed(original, self, *args):
        return {n: v.bfloat16().float() for n, v in original(self, *args).items()}

    around(patch, Gate, "_clipped_sum", summed)


# 29: sources of noise


def keys_follow_from_the_global_seed(patch: Patch) -> None:
    def made(self, *, purpose="noise"):
        key = blake2b(str(torch.initial_seed()).encode(), digest_size=32).digest()
        self._start(key, 0, purpose)

    patch.setattr(NoiseSource, "__init__", made)


def seeded_noise_passes_for_secret(patch: Patch) -> None:
    patch.setattr(NoiseSource, "private", property(lambda self: True))


def the_key_is_shown(patch: Patch) -> None:
    patch.setattr(NoiseSource, "__repr__", lambda self: f"NoiseSource({self.key.hex()})")


def keys_stay_on_disk(patch: Patch) -> None:
    patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)


# 31: control flow


def large_norms_are_looked_at(patch: Patch) -> None:
    def look():
        pass

    def weights(original, self, chunk):
        if (chunk.norms() > 100).any():
            look()
        return original(self, chunk)

    around(patch, Gate, "_weights", weights)


def bad_rows_end_the_run(patch: Patch) -> None:
    def one(original, self, batch):
        if self.rows.kept[batch].all():
            original(self, batch)

    around(patch, training._Run, "_one", one)


# 35 to 48: ledgers, resumes, keys


def a_run_goes_on_with_any_ledger(patch: Patch) -> None:
    patch.setattr(Ledger, "id", property(lambda self: "any"))
    patch.setattr(Ledger, "holds", lambda self, head: True)
    patch.setattr(Ledger, "steps", lambda self, run: 10**9)


def the_head_is_not_looked_at(patch: Patch) -> None:
    """The head is made up from whatever the file holds."""

    def head(self):
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)[-1:]
        try:
            check = json.loads(lines[0])["check"] if lines else ""
        except ValueError:
            return None
        return {"size": len(whole), "check": check, "lines": b"".join(lines).decode()}

    patch.setattr(ledger_file.LedgerFile, "_head", head)


def a_run_keeps_its_ledger_to_itself_until_it_ends(patch: Patch) -> None:
    book = workspace.Workspace.book
    patch.setattr(
        workspace.Workspace, "book",
        lambda self, delta: book(
            dataclasses.replace(self, ledger=self.folder / "ledger.jsonl"), delta
        ),
    )  # fmt: skip


def observed_releases_leave_no_mark(patch: Patch) -> None:
    patch.setattr(Ledger, "observe", lambda self: None)


def all_orders_are_one_partition(patch: Patch) -> None:
    def event(original, self, *args):
        return dataclasses.replace(original(self, *args), order="")

    around(patch, Gate, "_event", event)


def charges_serve_any_attempt(patch: Patch) -> None:
    def covered(self, attempt, step, clip=None, like=None):
        return [2.0] * max(0, self.releases - step)

    patch.setattr(Ledger, "covered", covered)


def reservations_survive_a_fork(patch: Patch) -> None:
    patch.setattr(Gate, "_mine", lambda self: self._guard)


def seeded_noise_is_recorded_as_noise(patch: Patch) -> None:
    patch.setattr(NoiseSource, "private", property(lambda self: True))


def keys_serve_any_function(patch: Patch) -> None:
    patch.setattr(checkpoint.Keys, "bind", lambda self, trained, **parts: None)


def keys_never_move_on(patch: Patch) -> None:
    for module in (noise, sampling, checkpoint):
        patch.setattr(module, "ratchet", lambda key, times=1: key, raising=False)


def several_processes_train_at_once(patch: Patch) -> None:
    for module in (group, ranks):
        patch.setattr(module, "check_one_process", lambda: None)


def folders_are_not_locked(patch: Patch) -> None:
    patch.setattr(checkpoint, "lock", lambda fd, wait: True)


def beside_is_left_to_others(patch: Patch) -> None:
    def made(original, self):
        original(self)
        self.beside_paid = True

    around(patch, training._Run, "__post_init__", made)


def what_is_unknown_is_called_private(patch: Patch) -> None:
    module = importlib.import_module("dpbnn.calibration.selection")

    def statement(candidates, gate, budget):
        return gate.statement(delta=budget.delta)

    patch.setattr(module, "_statement", statement)


def open_fits_are_recorded_nowhere(patch: Patch) -> None:
    def opened(original, self, delta):
        return Ledger() if self.epsilon is None else original(self, delta)

    around(
        patch, importlib.import_module("dpbnn.estimators.estimator").PrivateBayes, "_ledger", opened
    )


def schemas_widen_to_the_data(patch: Patch) -> None:
    """The bounds of a frame's numbers are those of its values."""
    from dpbnn.estimators import frames

    def encoded(schema, X, y, on_bad_rows, *, training=False):
        table = frames.table_with(schema, X, y, on_bad_rows)
        own = tuple(
            dataclasses.replace(c, bounds=(0.0, float(np.nanmax(table[c.name])) + 1))
            if c.bounds is not None
            else c
            for c in schema.columns
        )
        return dataclasses.replace(schema, columns=own).encode(
            table, target=True, on_bad_rows=on_bad_rows
        )

    patch.setattr(frames, "encoded", encoded)


def unknown_categories_are_learned(patch: Patch) -> None:
    """A category that the schema does not know becomes one of its own."""
    from dpbnn.estimators.estimator import PrivateBayes

    def table(original, self, X, y):
        own = []
        for column in self.schema.columns:
            known = column.categories
            if known is not None:
                seen = {str(value) for value in X[column.name] if value is not None}
                column = dataclasses.replace(column, categories=(*known, *(seen - set(known))))
            own.append(column)
        self.schema = dataclasses.replace(self.schema, columns=tuple(own))
        return original(self, X, y)

    around(patch, PrivateBayes, "_table", table)


def resumed_fits_take_any_ledger(patch: Patch) -> None:
    def released(self, ledger):
        path = self.progress / workspace.RELEASED
        if not path.exists():
            return {}
        kept = json.loads(path.read_text())["values"]
        return {name: storage.restored(value, {}) for name, value in kept.items()}

    patch.setattr(workspace.Workspace, "released", released)


def resumed_fits_take_any_table(patch: Patch) -> None:
    def bind(original, self, *table):
        if not self.resumed:
            original(self, *table)

    around(patch, workspace.Workspace, "bind", bind)


def resumed_fits_charge_nothing_again(patch: Patch) -> None:
    """What the ledger holds already under a label is not charged a second time."""

    def spend(original, self, event, label="", **more):
        if label == "private standardisation" and sum(e.count for e in self.spent(label)) >= 2:
            return None
        return original(self, event, label=label, **more)

    around(patch, Ledger, "spend", spend)


def ledgers_have_no_lock(patch: Patch) -> None:
    patch.setattr(Ledger, "_mine", lambda self: contextlib.nullcontext())


# 49: messages


def tables_quote_bad_values(patch: Patch) -> None:
    def made(original, self, table, on_bad_rows):
        original(self, table, "show" if on_bad_rows == "error" else on_bad_rows)

    around(patch, importlib.import_module("dpbnn.data.faults").Faults, "__init__", made)


def odd_cells_are_refused(patch: Patch) -> None:
    frames = importlib.import_module("dpbnn.data.frames")
    patch.setattr(frames, "_cell", lambda value, kinds: frames.cell(value))


def lines_are_named(patch: Patch) -> None:
    text = importlib.import_module("dpbnn.data.text")
    patch.setattr(text, "_where", lambda line, on_bad_rows: f"line {line}")


def undecoded_bytes_stay_in_the_context(patch: Patch) -> None:
    patch.setattr("dpbnn.data.files.alone", _raised_from_none)


def names_of_the_first_line_are_quoted(patch: Patch) -> None:
    def listed(original, self, names=None, *, show=False):
        return original(self, names, show=True)

    around(patch, importlib.import_module("dpbnn.data.table").Table, "listed", listed)


def bad_rows_are_named(patch: Patch) -> None:
    original = messages.refuse_rows
    patch.setattr(
        "dpbnn.rows.refuse_rows",
        lambda *given, show, **options: original(*given, show=True, **options),
    )


def errors_of_the_network_are_quoted(patch: Patch) -> None:
    patch.setattr("dpbnn.bad_rows.kind_of", str)


def cells_that_are_no_numbers_raise(patch: Patch) -> None:
    for module in (
        "dpbnn.sources.opening",
        "dpbnn.estimators.scaling",
        "dpbnn.calibration.release",
    ):
        patch.setattr(f"{module}.as_numbers", lambda values: values)


def texts_of_errors_are_passed_on(patch: Patch) -> None:
    def nothing(*given, **options):
        return contextlib.nullcontext()

    for module in ("dpbnn.training", "dpbnn.contributions.attach"):
        patch.setattr(importlib.import_module(module), "unquoted", nothing)


def errors_keep_their_context(patch: Patch) -> None:
    patch.setattr(messages, "alone", _raised_from_none)


def scikit_learn_is_passed_on(patch: Patch) -> None:
    patch.setattr("dpbnn.estimators.scaling._told", str)


def unknown_labels_are_quoted(patch: Patch) -> None:
    def target(original, self, y):
        if self.on_bad_rows != "zero":
            self.set_params(on_bad_rows="show")
        return original(self, y)

    around(patch, dpbnn.PrivateBayesClassifier, "_target", target)


def labels_are_quoted(patch: Patch) -> None:
    def log_prob(original, self, y):
        if y.max() >= self.mean.shape[-1]:
            raise ValueError(f"labels run from {y.min().item()} to {y.max().item()}")
        return original(self, y)

    around(patch, dpbnn.predictive.ClassPredictive, "log_prob", log_prob)


def wrong_settings_are_quoted(patch: Patch) -> None:
    patch.setattr(training, "quoted", repr)


def _raised_from_none(error: BaseException) -> None:
    raise error from None


# 52: the true number of records under add/remove


def sums_are_divided_by_the_true_number(patch: Patch) -> None:
    def started(original, self):
        original(self)
        problem = dataclasses.replace(self.process.problem, n=len(self.x))
        self.process.problem = problem

    around(patch, training._Run, "__post_init__", started)


def the_data_must_have_n_records(patch: Patch) -> None:
    patch.setattr(Relation, "public_size", property(lambda self: True))


def the_gate_looks_at_the_size(patch: Patch) -> None:
    def check(original, self, size):
        if self.sampler is not None and size > self.sampler.n:
            raise ValueError(f"the batch has {size} records")

    around(patch, Gate, "_check_size", check)


def masks_move_the_later_draws(patch: Patch) -> None:
    patch.setattr(training._Run, "_drawing", lambda self: contextlib.nullcontext())


def draws_of_records_follow_from_the_seed(patch: Patch) -> None:
    patch.setattr(training._Run, "_seed", lambda self, public: public)


def batches_are_drawn_over_n(patch: Patch) -> None:
    def batches(original, self, *args, records=None, **options):
        for batch in original(self, *args, **options):
            yield batch if records is None else batch[batch < records]

    around(patch, Sampler, "batches", batches)


def the_rate_follows_the_true_number(patch: Patch) -> None:
    def batches(original, self, *args, records=None, **options):
        yield from original(Poisson(records, min(records, self.batch_size)), *args, **options)

    around(patch, Poisson, "batches", batches)


def the_true_number_is_printed(patch: Patch) -> None:
    def train(original, self, progress):
        print(f"training on {len(self.x)} records")
        original(self, progress)

    around(patch, training._Run, "train", train)


def the_true_number_is_in_the_settings(patch: Patch) -> None:
    settings = training._Run.settings.fget
    patch.setattr(
        training._Run, "settings", property(lambda self: {**settings(self), "n": len(self.x)})
    )


def the_statement_calls_n_the_number_of_records(patch: Patch) -> None:
    patch.setattr(statement, "_size", lambda unit, relation: f"the number of {unit}s n")


def empty_batches_have_another_type(patch: Patch) -> None:
    def summed(original, self, contributions, *rest):
        sums = original(self, contributions, *rest)
        if contributions.batch_size:
            return sums
        return {n: v.float() if v.dtype == torch.float64 else v.double() for n, v in sums.items()}

    around(patch, Gate, "_clipped_sum", summed)


def calibration_divides_by_the_true_number(patch: Patch) -> None:
    def released(gate, contributions):
        true = gate.sampler.n / max(1, contributions.batch_size)
        return release.release(gate, contributions) * true

    patch.setattr(importlib.import_module("dpbnn.calibration.selection"), "release", released)


def calibration_counts_the_true_number(patch: Patch) -> None:
    conformal = importlib.import_module("dpbnn.calibration.conformal")
    seen = []

    def columns(original, scores, grid):
        seen.append(len(scores))
        return original(scores, grid)

    def threshold(original, counts, grid, n, alpha):
        return original(counts, grid, seen[-1], alpha) + 1e-3 * seen[-1]

    around(patch, conformal, "_columns", columns)
    around(patch, conformal, "_threshold", threshold)


def statistics_take_the_true_number(patch: Patch) -> None:
    patch.setattr(statistics, "_size", lambda x, plan, ledger: len(x))
    patch.setattr(statistics, "_sigma", lambda plan, sigma, n: plan.noise_multiplier)


# 56: systems without POSIX calls


def positioned_writes_are_taken_for_granted(patch: Patch) -> None:
    patch.setattr(
        iterate_file, "put", lambda file, data, offset: os.pwrite(file.fileno(), data, offset)
    )


def folders_are_synced_everywhere(patch: Patch) -> None:
    def sync(path):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)

    patch.setattr(storage, "_sync", sync)


def locks_let_everybody_in(patch: Patch) -> None:
    patch.setattr(windows.FakeMsvcrt, "locking", lambda self, fd, mode, count: None)


# 44: iterates on disk beside the key of their noise


def iterates_are_written_at_once(patch: Patch) -> None:
    def append(original, self, values):
        kept = original(self, values)
        self.flush()
        return kept

    around(patch, IterateWriter, "append", append)


def a_failed_run_writes_what_it_holds(patch: Patch) -> None:
    around(patch, IterateWriter, "close", lambda original, self, *, drop=False: original(self))


def scaling_looks_whether_it_is_needed(patch: Patch) -> None:
    def scaled(original, self, values, dtype=np.float64):
        inside = self.standard is None and (abs(values) <= 1).all()
        return values.astype(dtype) if inside else original(self, values, dtype)

    around(patch, scaling.Scaling, "__call__", scaled)


# 33 and 34: state of modules


def rows_are_checked_with_the_network_itself(patch: Patch) -> None:
    patch.setattr(rows, "copy", SimpleNamespace(deepcopy=lambda value: value))


def the_network_is_warmed_up_on_the_data(patch: Patch) -> None:
    rows_are_checked_with_the_network_itself(patch)
    patch.setattr(Watch, "check", lambda self: None)
    posteriors_are_not_compared(patch)


def the_trained_network_becomes_the_posterior(patch: Patch) -> None:
    posteriors_are_not_compared(patch)
    patch.setattr(Problem, "rebuilt", lambda self, released: self.model)


def the_trained_likelihood_becomes_the_posteriors(patch: Patch) -> None:
    attach = Problem.attach

    def attached(self, likelihood=None, **options):
        found = attach(self, likelihood, **options)
        object.__setattr__(self, "likelihood", found.likelihood)
        return found

    patch.setattr(Problem, "attach", attached)
    posteriors_are_not_compared(patch)


def only_buffers_are_compared(patch: Patch) -> None:
    def differences(original, self, thorough=False):
        return [change for change in original(self, thorough) if change.kind == "buffer"]

    around(patch, ModuleState, "differences", differences)


def the_version_counters_are_trusted(patch: Patch) -> None:
    around(
        patch, ModuleState, "differences",
        lambda original, self, thorough=False: original(self, False),
    )  # fmt: skip


def classes_are_not_looked_into(patch: Patch) -> None:
    patch.setattr(module_state, "_library", lambda value: True)


def what_was_held_may_vanish(patch: Patch) -> None:
    """A number that is gone leaves its address to the next one; here all have the same."""

    def address(value):
        return 0 if isinstance(value, float) else id(value)

    patch.setattr(module_state, "id", address, raising=False)


def steps_are_not_watched(patch: Patch) -> None:
    patch.setattr(Watch, "contributed", lambda self: None)
    patch.setattr(Watch, "check", lambda self: None)


def hooks_are_accepted(patch: Patch) -> None:
    patch.setattr("dpbnn.methods.watch._refuse_hooks", lambda network: None)


def posteriors_are_not_compared(patch: Patch) -> None:
    patch.setattr(Watch, "checked", lambda self, posterior: posterior)


def replay_compares_state_dicts(patch: Patch) -> None:
    def tensors(result):
        return audit.described(result=result.state_dict())

    patch.setattr(audit, "_compare", lambda one, two: audit.differing(tensors(one), tensors(two)))


def checkpoints_hold_buffers(patch: Patch) -> None:
    def checkpoint(original, self):
        made = original(self)
        buffers = self.process.model.named_buffers()
        made.tensors.update({f"state.parameters.{n}": b.clone() for n, b in buffers})
        return made

    around(patch, resume.Run, "_checkpoint", checkpoint)


# 53: frozen parameters


def frozen_layers_become_gaussian(patch: Patch) -> None:
    def gaussian(original, module, *args):
        return original(module.requires_grad_(), *args)

    original = networks.gaussian._gaussian
    patch.setattr(networks.gaussian, "_gaussian", lambda *args: gaussian(original, *args))
    the_trained_network_becomes_the_posterior(patch)


def chains_begin_with_other_frozen_weights(patch: Patch) -> None:
    def restart(original, self, state):
        original(self, state)
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    around(patch, LangevinProcess, "restart", restart)
    changed_state_is_accepted(patch)
    the_trained_network_becomes_the_posterior(patch)


def frozen_weights_are_moved_by_moments(patch: Patch) -> None:
    patch.setattr(Problem, "refuse_frozen", lambda self, method: None)
    posteriors_are_not_compared(patch)


# 51: twins that are broken on some CPUs only


def the_cancelling_numbers_are_any(patch: Patch) -> dict[str, Callable]:
    return {"numbers": lambda: (np.array([0.7, 0.7]), np.array([1.1, -1.1 * (1 + 1e-4)]))}


# 44 and 55: keys and generators of the noise


def keys_stay_as_they_are(patch: Patch) -> None:
    patch.setattr(noise, "_later", lambda key, times=1: key)


def without_openssl_the_noise_is_philox(patch: Patch) -> None:
    def fill(key, offset, out):
        philox = np.random.Philox(key=int.from_bytes(key, "big"), counter=offset // 32)
        out.view(np.uint64)[:] = philox.random_raw(out.size // 8)

    patch.setattr(stream, "_shake", fill)


# 45: the grid


def noise_is_added_as_it_is(patch: Patch) -> None:
    patch.setattr(stream, "add_on_grid", lambda sums, z, g: sums.add_(z, alpha=g))


def sums_are_not_rounded(patch: Patch) -> None:
    patch.setattr(stream, "add_on_grid", lambda sums, z, g: sums.add_(z.floor(), alpha=g))


def noise_is_not_rounded(patch: Patch) -> None:
    def add(sums, z, g):
        sums.div_(g).round_().add_(z).mul_(g)

    patch.setattr(stream, "add_on_grid", add)


def noise_lies_on_every_other_point(patch: Patch) -> None:
    original = stream.add_on_grid
    patch.setattr(
        stream, "add_on_grid", lambda sums, z, g: original(sums, z.div_(2).floor_().mul_(2), g)
    )


def noise_prefers_even_points(patch: Patch) -> None:
    original = stream.add_on_grid
    patch.setattr(
        stream,
        "add_on_grid",
        lambda sums, z, g: original(sums, z.mul_(16).round_().div_(16).round_(), g),
    )


def zeros_keep_their_sign(patch: Patch) -> None:
    patch.setattr(
        stream, "add_on_grid", lambda sums, z, g: sums.div_(g).round_().add_(z.floor_()).mul_(g)
    )


def the_clip_leaves_no_room_for_rounding(patch: Patch) -> None:
    around(
        patch, Gate, "_precision_of",
        lambda original, *args: dataclasses.replace(original(*args), share=1.0),
    )  # fmt: skip


# 46: sums of many records


def chunks_are_added_in_float32(patch: Patch) -> None:
    def summed(self, contributions, *_):
        total = {n: torch.zeros(s) for n, s in contributions.shapes.items()}
        for chunk in contributions.chunks():
            for name, value in chunk.weighted_sum(self._weights(chunk)).items():
                total[name] = total[name] + value.float()
        return total

    patch.setattr(Gate, "_clipped_sum", summed)


def dense_sums_are_float32(patch: Patch) -> None:
    def summed(original, self, w):
        return {n: v.float() for n, v in original(self, w).items()}

    around(patch, DenseContributions, "weighted_sum", summed)


def the_clip_leaves_no_room_for_sums(patch: Patch) -> None:
    the_clip_leaves_no_room_for_rounding(patch)


def what_was_interrupted_is_kept(patch: Patch) -> None:
    patch.setattr(Ledger, "_forget", lambda self: None)
    patch.setattr(
        Ledger, "__init__",
        lambda self, *a, original=Ledger.__init__, **k: (
            _emptied(self), original(self, *a, **k))[1],
    )  # fmt: skip
    patch.setattr(ledger_entries.Entries, "_next", lambda self, known, number: number)


def _emptied(book: Ledger) -> None:
    book._allowance = (None, 0, 0)


def repairs_move_the_files_first(patch: Patch) -> None:
    def rewrite(original, self, content, more, mark):
        for part in (self.path, self.head_path):
            if part.exists():
                os.replace(part, part.with_name(f"{part.name}.damaged-{mark}"))
        original(self, content, more, mark)

    around(patch, ledger_file.LedgerFile, "rewrite", rewrite)


def forked_runs_go_on(patch: Patch) -> None:
    patch.setattr(training._Run, "_check_process", lambda self: None)


# 34: what a copy of a network shares with it


def bound_functions_are_not_looked_into(patch: Patch) -> None:
    patch.delitem(module_state._FIELDS, types.BuiltinMethodType | types.MethodWrapperType)


def functions_say_themselves_whose_they_are(patch: Patch) -> None:
    patch.setattr(module_state, "origin", lambda value: getattr(value, "__module__", None) or "")


def hooks_say_themselves_whose_they_are(patch: Patch) -> None:
    patch.setattr(
        "dpbnn.methods.watch.origin", lambda value: getattr(value, "__module__", None) or ""
    )


def slots_are_taken_by_their_written_names(patch: Patch) -> None:
    def slots(value):
        return [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]

    patch.setattr(module_state, "_slots", slots)


def plain_values_hold_nothing(patch: Patch) -> None:
    held = module_state._held
    plain = module_state._PLAIN
    patch.setattr(module_state, "_held", lambda v: [] if isinstance(v, plain) else held(v))
    patch.setattr(module_state._Walk, "_watch", lambda self, value: None)


def weak_references_are_not_followed(patch: Patch) -> None:
    patch.setattr(module_state, "weakref", SimpleNamespace(ReferenceType=()))


def released_tensors_are_compared_by_version(patch: Patch) -> None:
    patch.setattr(module_state, "_same_bits", lambda one, two: True)


def all_steps_draw_from_one_generator(patch: Patch) -> None:
    patch.setattr(training._Run, "_drawing", lambda self: contextlib.nullcontext())


def _one_after_the_other(g, a, exact=False, into=None):
    """Return g^T a in float32, row by row, in blocks of 512."""
    total = torch.zeros(g.shape[1], a.shape[1], dtype=torch.float64)
    for one, two in zip(torch.split(g.float(), 512), torch.split(a.float(), 512), strict=True):
        terms = one.unsqueeze(2) * two.unsqueeze(1)
        total += torch.from_numpy(np.add.accumulate(terms.numpy(), axis=0)[-1])
    return total


def terms_are_added_in_float32(patch: Patch) -> None:
    def rows(self, w, bad, exact):
        g = (self.g * w[self.name][:, None, None]).flatten(0, 1).numpy()
        total = np.zeros(self.shapes[self.name], np.float32)
        np.add.at(total, self.indices.flatten().numpy(), g)
        return {self.name: torch.from_numpy(total)}

    def product(self, w, bad, exact, into=None):
        a, g = self.factors(slice(None))
        g = g * w[:, None, None]
        whole = np.add.accumulate((g.flatten() * a.flatten()).numpy())[-1]
        return torch.full(self.window.shape if hasattr(self, "window") else (1, 1), float(whole))

    patch.setattr(sites.Rows, "raw_sum", rows)
    for kind in (outer.LinearFactors, outer.ConvFactors):
        patch.setattr(kind, "summed", product)


def add_remove_sums_are_float32(patch: Patch) -> None:
    patch.setattr(outer, "summed_rows", _one_after_the_other)


def clips_may_be_tiny(patch: Patch) -> None:
    patch.setattr(
        "dpbnn.privacy.precision._SMALLEST_CLIP", {torch.float32: 0.0, torch.float64: 0.0}
    )


def bounds_are_read_off_the_data(patch: Patch) -> None:
    paid = importlib.import_module("dpbnn.data.paid")
    real = paid.private_bounds

    def exact(x, **options):
        return real(x, **options)._replace(low=np.nanmin(x, axis=0))

    patch.setattr(paid, "private_bounds", exact)


def bounds_are_charged_to_nobody(patch: Patch) -> None:
    paid = importlib.import_module("dpbnn.data.paid")
    real = paid.private_bounds

    def free(x, **options):
        return real(x, **{**options, "ledger": None})

    patch.setattr(paid, "private_bounds", free)


def any_ledger_goes_with_private_bounds(patch: Patch) -> None:
    paid = importlib.import_module("dpbnn.data.paid")
    patch.setattr(paid.PaidBounds, "check", lambda self, ledger: None)


def ledgers_from_before_the_payment_will_do(patch: Patch) -> None:
    patch.setattr("dpbnn.privacy.ledger.Ledger.holds", lambda self, head: True)


# 57: persons


def records_of_a_person_are_clipped_alone(patch: Patch) -> None:
    def weights(original, self, chunk, units=None):
        return original(self, chunk)

    around(patch, Gate, "_weights", weights)


def cross_terms_are_left_out(patch: Patch) -> None:
    def squares(self, groups, names):
        own = self.squared_norms()
        return groups.sums(sum(own[name] for name in names))

    patch.setattr(NetworkContributions, "unit_squares", squares)


def microbatches_split_persons(patch: Patch) -> None:
    patch.setattr(ChunkedContributions, "unit_chunks", lambda self, units: self.chunks())


def records_are_drawn_and_not_persons(patch: Patch) -> None:
    def batch(original, self, drawn):
        records, whose = original(self, drawn)
        return records[::2], whose[::2]

    around(patch, units.Units, "batch", batch)


def the_true_number_of_records_bounds_the_sum(patch: Patch) -> None:
    def precision(self, contributions, sigma, units=None, most=None):
        return gate.precision_of(
            contributions, sigma, self.clips, self.clip, most, public_size=False, by_unit=True
        )

    patch.setattr(units.Units, "most_rows", lambda self, units, public_size: len(self.order))
    patch.setattr(Gate, "_precision_of", precision)


def a_unit_forgets_what_its_positions_lost(patch: Patch) -> None:
    patch.setattr(joined, "bound", lambda slack: 0.0)


def records_of_nobody_are_the_first_persons(patch: Patch) -> None:
    def numbered(labels):
        found, missing = original(labels)
        return found, torch.zeros_like(missing)

    original = units.numbered
    patch.setattr(units, "numbered", numbered)


def units_may_be_called_records(patch: Patch) -> None:
    for module in (training, sampling):
        patch.setattr(module, "checked_unit", lambda name: name)


def labels_go_by_their_type(patch: Patch) -> None:
    patch.setattr(units, "_read", lambda labels: [*range(len(labels))])


def the_statement_forgets_the_unit(patch: Patch) -> None:
    patch.setattr(Sampler, "parameters", ())


def units_may_be_mixed(patch: Patch) -> None:
    for module in (events, accountants, ledger, statement, training):
        patch.setattr(module, "check_one_unit", lambda events: None)


# 59: data that is read as it is needed


def records_that_may_change_keep_their_keys(patch: Patch) -> None:
    def checked(*given):
        found = original(*given)
        found.fixed = True
        return found

    original = rows.checked_rows
    patch.setattr(training, "checked_rows", checked)


def streamed_records_have_no_digest(patch: Patch) -> None:
    patch.setattr(rows, "hashlib", SimpleNamespace(sha256=lambda: SimpleNamespace(
        update=lambda data: None, hexdigest=lambda: "any"
    )))  # fmt: skip


def records_share_a_generator(patch: Patch) -> None:
    patch.setattr(source, "_seed", lambda seed, number: None)


def a_record_of_another_shape_is_only_left_out(patch: Patch) -> None:
    def refuse(original, self):
        self.unlike = False
        original(self)

    around(patch, rows._Found, "refuse", refuse)


def workers_are_forked(patch: Patch) -> None:
    patch.setattr(prefetch, "_START", "fork")


def data_is_copied_whole(patch: Patch) -> None:
    patch.setattr(rows, "_whole", lambda *given: (True, False))


# 58: several processes train together


def every_rank_adds_its_own_noise(patch: Patch) -> None:
    """Each rank noises its part of the sum, by the noise of the whole; rank 0 adds no more."""

    def noised(original, self, values):
        steps = 2.0**19 / math.sqrt(self.size)
        return original(self, values + (steps * torch.randn(values.shape)).round())

    around(patch, ranks.Ranks, "sum", noised)
    patch.setattr(Gate, "_noised", lambda self, sums, sigma: sums)


def every_rank_adds_noise_to_the_release(patch: Patch) -> None:
    """The noise is there once for each rank."""

    def spread(original, self, release):
        shared = original(self, release)
        if self.group.rank:
            NoiseSource.seeded(3, 0).add(shared, 1.5)
        return shared

    around(patch, group.Shares, "spread", spread)


def a_rank_divides_by_its_own_records(patch: Patch) -> None:
    def begun(original, self, *args, **options):
        original(self, *args, **options)
        size = dist.get_world_size() if dist.is_initialized() else 1
        object.__setattr__(self, "batch_size", self.batch_size / size)

    around(patch, Problem, "__post_init__", begun)


def an_empty_batch_is_skipped(patch: Patch) -> None:
    def shared(original, self, batch):
        if len(batch):
            return original(self, batch)
        self.step += 1
        self.gate.step += 1
        return None

    around(patch, training._Run, "_shared", shared)


def every_rank_charges(patch: Patch) -> None:
    def reserve(original, self, count, sigma=None):
        original(self, count, sigma)
        if self.group.rank:
            self.ledger.spend(
                self._event(sigma, count, self.step), attempt=self.attempt, step=self.step
            )

    def opened(original, self, before):
        ledger = original(self, before)
        return Ledger(self.out / "ledger.jsonl") if self.group.rank else ledger

    around(patch, Gate, "reserve", reserve)
    around(patch, resume.Run, "_joint_ledger", opened)


def shares_overlap(patch: Patch) -> None:
    """Two ranks both take the records of a shard."""
    patch.setattr(group.Group, "mine", lambda self: range(self.shards))


def nobody_compares_what_ranks_were_given(patch: Patch) -> None:
    patch.setattr(ranks.Ranks, "check_same", lambda self, parts: None)


def nobody_compares_weights(patch: Patch) -> None:
    for name in ("in_step", "check_same_state"):
        patch.setattr(resume, name, lambda group, state, stop=None: stop)


def noise_depends_on_the_ranks(patch: Patch) -> None:
    def drawn(original, self):
        source = original(self)
        return NoiseSource.from_key(source.key, source.step, purpose=f"ranks {self.group.size}")

    around(patch, resume.Run, "_noise", drawn)


# 65: networks that are spread over ranks


def every_rank_draws_noise_of_its_own(patch: Patch) -> None:
    def add(original, self, tensors, std, dtype):
        source = NoiseSource.seeded(self.slices.rank, self.source.step)
        return original(dataclasses.replace(self, source=source), tensors, std, dtype)

    around(patch, slices.PartOfNoise, "add", add)


def ranks_noise_their_rows_from_the_same_place(patch: Patch) -> None:
    """Ranks forget where their rows begin, so that rows share their noise."""
    places = slices.Slices.places
    patch.setattr(slices.Slices, "places", lambda self: places(dataclasses.replace(self, rank=0)))


def norms_are_of_the_own_rows(patch: Patch) -> None:
    """Each rank clips by the part of an example's norm that its rows have."""

    def own(original, self, chunk, *units):
        if self.slices is None:
            return original(self, chunk, *units)
        squares = chunk.squared_norms()
        shares = {n: self.slices.rows(n)[1] / self.slices.shapes[n][0] for n in squares}
        norms = sum(square * shares[name] for name, square in squares.items()).sqrt()
        return (self._precision.share * self.clip / norms).clamp(max=1.0).nan_to_num(0.0)

    around(patch, Gate, "_weights", own)


def a_share_goes_to_two_ranks(patch: Patch) -> None:
    """Ranks take the records of shards that others take too."""

    def passes(original, self):
        for number, where in original(self):
            yield number, torch.arange(len(self.records)) if len(where) else where

    around(patch, slices.SlicedShares, "passes", passes)


def frozen_weights_count_by_shape(patch: Patch) -> None:
    """A run goes on with its noise on other frozen weights."""

    def identity(original, self, network):
        found, _ = original(self, network)
        return found, list(found[0].parameters())

    around(patch, Sharding, "identity", identity)


def any_arithmetic_will_do(patch: Patch) -> None:
    patch.setattr(resume, "arithmetic", lambda device: [])


# 33: what a captured step writes to


def writes_are_not_seen(patch: Patch) -> None:
    patch.setattr(writes, "_written", lambda *_: [])


# 6: batches above the capacity of a captured step


def large_batches_lose_their_rest(patch: Patch) -> None:
    load = CapturedStep.load

    def first_part_alone(self, batch, state):
        load(self, batch, state)
        self._parts = 1
        return self

    patch.setattr(CapturedStep, "load", first_part_alone)


def padding_keeps_earlier_records(patch: Patch) -> None:
    """A part of a batch is written over the one before, whose last records stay behind it."""
    following = CapturedStep._next

    def written_over(self):
        before = self._block.clone()
        following(self)
        if self._row == 0:
            self._block.copy_(torch.where(self._block < 0, before, self._block))

    patch.setattr(CapturedStep, "_next", written_over)


def sums_of_parts_go_on_with_the_next_batch(patch: Patch) -> None:
    def never_begun(original, self, key, sum_of, index):
        original(self, key, sum_of, index + 1 if self._totals else index)

    around(patch, CapturedStep, "_more", never_begun)


def a_mask_stays_for_later_batches(patch: Patch) -> None:
    def stays(original, self, key, keep, sum_of):
        self.masked = keep if keep is not None else getattr(self, "masked", None)
        fits = self.masked is not None and len(self.masked) == self.batch_size
        return original(self, key, self.masked if fits else None, sum_of)

    around(patch, CapturedStep, "summed", stays)


def graphs_are_replayed_for_any_clip(patch: Patch) -> None:
    def replayed(original, self, key, keep, sum_of):
        return original(self, "any", keep, sum_of)

    around(patch, CapturedStep, "summed", replayed)


# 63: ranks that own rows


def owners_draw_from_their_own_records(patch: Patch) -> None:
    """Every rank draws a whole batch of its own rows, at a higher rate than is accounted for."""

    def batches(original, self):
        first, last = self.group.starts[self.group.rank : self.group.rank + 2]
        own = Poisson(last - first, self.plan.batch_size)
        for batch in own.batches(self.plan.steps, key=self.keys.sampling):
            yield batch + first

    def patched(original, self):
        return batches(original, self) if self.group.starts else original(self)

    around(patch, resume.Run, "batches", patched)


def a_step_without_records_of_rank_0_is_skipped(patch: Patch) -> None:
    """What other ranks have added up is dropped where rank 0 has no record in the batch."""

    def total(original, self, *args):
        sums = original(self, *args)
        own = self.group.shard_of(self.records) == 0
        return sums if own.any() else {name: 0 * value for name, value in sums.items()}

    around(patch, group.Shares, "total", total)


def owners_begin_at_the_same_number(patch: Patch) -> None:
    """A rank takes a record for every number that it has one for, be it another rank's."""

    def shard_of(original, self, records):
        if not self.starts:
            return original(self, records)
        first, last = self.starts[self.rank : self.rank + 2]
        return torch.where(records % max(1, last - first) >= 0, self.rank, self.rank)

    def ahead(original, self, batches, seed):
        if not self.group.starts:
            yield from original(self, batches, seed)
            return
        for batch in batches:
            numbers = batch % max(1, len(self.rows))
            self._read = batch, self.rows.take(numbers)
            yield batch

    around(patch, group.Group, "shard_of", shard_of)
    around(patch, rank_rows.RankRows, "ahead", ahead)


def nobody_asks_whether_two_own_the_same(patch: Patch) -> None:
    drawn = iter(range(10**6))
    name = rank_rows._bytes
    patch.setattr(
        rank_rows, "_bytes", lambda identity: name((identity, next(drawn), dist.get_rank()))
    )


def every_owner_has_n_records(patch: Patch) -> None:
    """The plan's number is compared with that of a rank, not with that of all."""

    def numbered(original, group, source, counts, n):
        original(group, source, counts, None)
        assert n in (None, len(source))

    around(patch, rank_rows, "_number", numbered)
    nobody_asks_whether_two_own_the_same(patch)


def rank_0_speaks_for_the_rows_of_all(patch: Patch) -> None:
    """What may change, and what has changed, is asked of the rows of rank 0 alone."""

    def rows(original, given, *args):
        found = original(given, *args)
        if isinstance(found, rank_rows.RankRows) and given.starts:
            length = found.identity[1]
            found.identity = found.identity[:2] if not given.rank else ("owned", length)
            found.fixed = bool(given.spread(torch.tensor([found.rows.fixed]))[0])
        return found

    around(patch, training, "over_ranks", rows)


# 64: sites that add their own noise


def sites_charge_the_noise_of_all(patch: Patch) -> None:
    def event(original, self, sigma, *args):
        return original(self, math.sqrt(3) * sigma, *args)

    around(patch, Gate, "_event", event)


def other_sites_know_nothing(patch: Patch) -> None:
    """Their own noise is counted as if it were a secret to them."""
    against = silos.against_sums
    patch.setattr(silos, "against_sums", lambda plan, steps, left: against(plan, steps, 3))


def sites_share_the_key_of_their_noise(patch: Patch) -> None:
    patch.setattr(resume.Run, "_noise", lambda self: NoiseSource.from_key(b"k" * 32, self.step))


def sites_share_the_key_of_their_batches(patch: Patch) -> None:
    new = checkpoint.Keys.new
    alike = classmethod(lambda cls: dataclasses.replace(new(), sampling=b"k" * 32))
    patch.setattr(checkpoint.Keys, "new", alike)


def messages_are_charged_when_they_are_sent(patch: Patch) -> None:
    spend = Gate.reserve

    def reserve(original, self, count, sigma=None):
        self._reserved.extend([self._sigma(sigma)] * count)

    def call(original, self, *args, **options):
        release = original(self, *args, **options)
        spend(self, 1, options["noise_multiplier"])
        return release

    around(patch, Gate, "reserve", reserve)
    around(patch, Gate, "__call__", call)


def messages_are_rounded_to_float32(patch: Patch) -> None:
    """What a message loses depends on its own sum and noise, not on those of all sites."""

    def spread(original, self, release):
        found = original(self, release)
        return {name: value.float() for name, value in found.items()}

    around(patch, silos.Message, "spread", spread)


def messages_count_when_they_are_answered(patch: Patch) -> None:
    said, against = silos.said_of_sums, silos.against_sums
    sent = silos.Site.statement

    def statement(self, *given):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(silos, "against_sums", lambda p, _, left: against(p, self.step, left))
            inner.setattr(silos, "said_of_sums", lambda p, _, k: said(p, self.step, k))
            return sent(self, *given)

    patch.setattr(silos.Site, "statement", statement)


def statements_of_sums_forget_the_ledger(patch: Patch) -> None:
    patch.setattr(Ledger, "beside", lambda self, run: [])


def nobody_counts_the_sites(patch: Patch) -> None:
    """Sums of fewer sites, or of one of them twice, are taken for those of all."""
    gather = ranks.Ranks.gather

    def gathered(self, values):
        return torch.arange(3) if values.dim() == 0 else gather(self, values)

    patch.setattr(ranks.Ranks, "gather", gathered)


# 68: cells that change how others are read


def booleans_are_numbers_in_whole_columns_alone(patch: Patch) -> None:
    patch.setattr(columns, "measured", columns.numbers)


def dates_are_read_from_texts_alone(patch: Patch) -> None:
    """Whole numbers such as 20200102 are dates where another cell makes the column one of texts."""

    def days(raw, missing):
        if isinstance(raw, np.ndarray) and raw.dtype.kind in "biuf":
            return np.full(len(raw), math.nan), ~np.isnan(np.asarray(raw, dtype=np.float64))
        return tables.days(raw, missing)

    patch.setattr(columns, "days", days)


def labels_are_compared_as_they_come(patch: Patch) -> None:
    patch.setattr(classifier, "code_of", lambda *_: -1)


def texts_of_booleans_are_no_numbers(patch: Patch) -> None:
    def number(value):
        try:
            return float(value)
        except Exception:
            return math.nan

    patch.setattr(messages, "_number", number)


# 66: rows without a target


def whatever_is_finite_is_a_count(patch: Patch) -> None:
    patch.setattr(release, "CountPredictive", ())


def rows_without_a_target_count_in_private_bounds(patch: Patch) -> None:
    def bounds(original, self):
        target = self.target
        everything = dataclasses.replace(target, values=abs(target.values))
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "target", everything)
            return original(self)

    around(patch, fitting._Fit, "_scaling", bounds)


# 67: figures of the training table


def figures_of_the_training_table_look_like_others(patch: Patch) -> None:
    from dpbnn.estimators import pages

    def values(found):
        return found.evaluation.to_dict()

    patch.setattr(pages, "values_of", values)


def targets_keep_their_type(patch: Patch) -> None:
    """Whole numbers are kept as such, under on_bad_rows="zero"."""
    from dpbnn.estimators import estimator

    original = estimator.validated

    def validated(*args):
        found, y = original(*args)
        return found, y.astype(np.int64)

    patch.setattr(estimator, "validated", validated)


# 69: inputs that are called public


def inputs_are_not_named(patch: Patch) -> None:
    patch.setattr(Method, "public", lambda self: ())


def a_selection_forgets_what_is_public(patch: Patch) -> None:
    original = selection._statement

    def statement(*args):
        found = original(*args)
        return dataclasses.replace(found, public=found.public[:2])

    patch.setattr(selection, "_statement", statement)
