"""Sharded networks (FSDP2): one noise, whole norms, the same posterior as unsharded ones."""

import broken_versions as broken
import pytest
import torch
from sharded_runs import encoder, fit, mlp, on_ranks, sharded
from small_runs import METHODS, STEPS, N, dataset, drawn_noise, numbers, plan
from small_runs import fit as fit_whole
from together import together
from twins import fails_on, twins_of

import dpbnn
from dpbnn.privacy.ledger import Ledger


def unsharded(name="sgd", **options):
    """Noise and numbers of the same fit in this process, with whole parameters."""
    with pytest.MonkeyPatch.context() as patch, drawn_noise(patch) as noise:
        posterior = fit(name, spread=False, **options)
    return noise, numbers(posterior)


def same_noise(one, two):
    assert len(one) == len(two) == STEPS
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", ["sgd", "sgld", "sghmc"])
def test_item_59_sharded_ranks_train_what_one_process_trains(name):
    alone = unsharded(name, debug_seed=3)
    two = on_ranks(2, name, debug_seed=3)
    assert same_noise(two[0], alone[0])
    assert torch.allclose(two[1], alone[1], rtol=0, atol=1e-5)
    assert two[2][0] == two[2][1]
    for size in (1, 4):
        other = on_ranks(size, name, debug_seed=3)
        assert same_noise(other[0], two[0])
        assert torch.equal(other[1], two[1])
