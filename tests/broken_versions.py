"""Deliberately broken versions of the library, each with one bug of the list put back.

A version is a function of a monkeypatch that spoils the real code; it returns further arguments for
the test that must fail, or None. `test_privacy_bugs.py` says which test fails on which version.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpbnn
from dpbnn import training
from dpbnn.contributions import Contributions, DenseContributions, network
from dpbnn.contributions.attach import Attached
from dpbnn.contributions.network import Microbatched, NetworkContributions
from dpbnn.contributions.outer import Outer
from dpbnn.contributions.probe import _Probe
from dpbnn.contributions.tape import layouts
from dpbnn.likelihoods import Categorical
from dpbnn.methods.base import Descent
from dpbnn.methods.sep import SEPProcess
from dpbnn.methods.sgd import SGDProcess
from dpbnn.privacy import gate, ledger, noise, plan
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import Poisson, Sampler

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
        return {n: gate._factor(s.sqrt(), self.clip) for n, s in chunk.squared_norms().items()}

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
    def gradient(self, release):
        return {name: release[name] / self.problem.batch_size for name in self.parameters}

    patch.setattr(SGDProcess, "gradient", gradient)


def the_prior_counts_once_per_batch(patch: Patch) -> None:
    def gradient(self, release):
        b, prior = self.problem.batch_size, self.problem.prior
        return {n: (release[n] + prior.gradient(p)) / b for n, p in self.parameters.items()}

    patch.setattr(SGDProcess, "gradient", gradient)


# 3: cancellation


def gram_norms_are_taken_in_float32(patch: Patch) -> None:
    def naive(self):
        a, g = self.terms[0].factors(slice(None))
        value = (torch.bmm(a, a.mT) * torch.bmm(g, g.mT)).sum((1, 2)).clamp(min=0)
        return dict.fromkeys(self.shapes, value.double())

    patch.setattr(Outer, "_gram", naive)


# 4: examples that are not finite


def bad_examples_are_only_multiplied_by_zero(patch: Patch) -> None:
    def norms(original, self):
        squares, bad = original(self)
        self._bad = bad[:0]
        return squares, self._bad

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

    def gradient(original, self, release):
        factor = self.problem.batch_size / self.usable
        return original(self, {name: factor * value for name, value in release.items()})

    around(patch, training._Run, "_one", one)
    around(patch, SGDProcess, "gradient", gradient)


# 6: sampling


def batches_are_cut_from_a_shuffle(patch: Patch) -> None:
    def draw(self, step, generator):
        each = math.ceil(self.n / self.batch_size)
        order = np.random.default_rng(step // each).permutation(self.n)
        first = step % each * int(self.batch_size)
        return order[first : first + int(self.batch_size)]

    patch.setattr(Poisson, "_draw", draw)


def batches_have_a_fixed_size(patch: Patch) -> None:
    patch.setattr(Poisson, "_draw", dpbnn.FixedSize._draw)


def some_records_are_drawn_more_often(patch: Patch) -> None:
    def draw(self, step, generator):
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

    around(patch, Microbatched, "chunks", chunks)


def the_first_chunk_is_dropped(patch: Patch) -> None:
    def chunks(original, self):
        yield from list(original(self))[1:]

    around(patch, Microbatched, "chunks", chunks)


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
    patch.setattr(gate, "_factor", lambda norms, clip: torch.clamp(1 / norms, max=1.0))


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
    def draw(self, step, generator):
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
    changed_buffers_are_accepted(patch)


def the_likelihood_looks_at_the_batch(patch: Patch) -> None:
    nothing_is_refused(patch)

    def log_prob(original, self, outputs, y):
        return original(self, outputs - outputs.std(0), y)

    around(patch, Categorical, "log_prob", log_prob)


def missing_gradients_are_accepted(patch: Patch) -> None:
    patch.setattr(_Probe, "refuse_missing", lambda self, *args: None)


def frozen_parameters_are_trained_beside_the_gate(patch: Patch) -> None:
    def contribute(original, self, x, y):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name not in self.parameters and len(x):
                    parameter -= 0.1 * x.mean()
        return original(self, x, y)

    around(patch, SGDProcess, "contribute", contribute)


def changed_buffers_are_accepted(patch: Patch) -> None:
    def find(self):
        one, two = (
            self.attached.discover(*self.rows(list(range(size))), self.draws[0]) for size in (3, 4)
        )
        return layouts(one, two, str)

    patch.setattr(_Probe, "find_layouts", find)


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
            self.gate(self.process.contribute(self.x[batch], self.y[batch]))
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
    def chunk(self, index):
        return self._record(self._starts[index], self._starts[index + 1])

    patch.setattr(Microbatched, "_chunk", chunk)


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
        found = self.process.contribute(self.x[batch], self.y[batch])
        if _rejected(found) or not self.rows.kept[batch].all():
            self.step += 1
        else:
            original(self, batch)

    around(patch, training._Run, "_one", one)


def a_rejected_factor_gets_no_noise(patch: Patch) -> None:
    def call(original, self, contributions, **options):
        self.rejected = _rejected(contributions)
        return original(self, contributions, **options)

    def noised(original, self, sums, sigma):
        return sums if self.rejected else original(self, sums, sigma)

    around(patch, Gate, "__call__", call)
    around(patch, Gate, "_noised", noised)


def the_step_follows_the_accepted_factors(patch: Patch) -> None:
    def contribute(original, self, x, y):
        found = original(self, x, y)
        self.accepted = int((found.norms() > 0).sum()) if len(x) else 1
        return found

    def update(original, self, release):
        factor = self.problem.batch_size / max(1, self.accepted)
        original(self, {name: factor * value for name, value in release.items()})

    around(patch, SEPProcess, "contribute", contribute)
    around(patch, SEPProcess, "update", update)


def the_sensitivity_is_damped(patch: Patch) -> None:
    damped = property(lambda self: self.ledger.relation.shift * self.clip / self.sampler.n)
    patch.setattr(Gate, "sensitivity", damped)


# 27: rounding


def norms_are_rounded_to_half_precision(patch: Patch) -> None:
    patch.setattr(network, "INFLATION", 1.0)
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


# 44 and 55: keys and generators of the noise


def keys_stay_as_they_are(patch: Patch) -> None:
    patch.setattr(noise, "_later", lambda key, times=1: key)


def without_openssl_the_noise_is_philox(patch: Patch) -> None:
    def fill(key, offset, out):
        philox = np.random.Philox(key=int.from_bytes(key, "big"), counter=offset // 32)
        out.view(np.uint64)[:] = philox.random_raw(out.size // 8)

    patch.setattr(noise, "_shake", fill)


# 45: the grid


def noise_is_added_as_it_is(patch: Patch) -> None:
    patch.setattr(noise, "add_on_grid", lambda sums, z, g: sums.add_(z, alpha=g))


def sums_are_not_rounded(patch: Patch) -> None:
    patch.setattr(noise, "add_on_grid", lambda sums, z, g: sums.add_(z.floor(), alpha=g))


def noise_is_not_rounded(patch: Patch) -> None:
    def add(sums, z, g):
        sums.div_(g).round_().add_(z).mul_(g)

    patch.setattr(noise, "add_on_grid", add)


def noise_lies_on_every_other_point(patch: Patch) -> None:
    original = noise.add_on_grid
    patch.setattr(
        noise, "add_on_grid", lambda sums, z, g: original(sums, z.div_(2).floor_().mul_(2), g)
    )


def noise_prefers_even_points(patch: Patch) -> None:
    original = noise.add_on_grid
    patch.setattr(
        noise,
        "add_on_grid",
        lambda sums, z, g: original(sums, z.mul_(16).round_().div_(16).round_(), g),
    )


def zeros_keep_their_sign(patch: Patch) -> None:
    patch.setattr(
        noise, "add_on_grid", lambda sums, z, g: sums.div_(g).round_().add_(z.floor_()).mul_(g)
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
