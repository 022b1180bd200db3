import math

import pytest

import dpbnn


def test_subsampling_beats_fixed_batches_by_about_the_root_of_the_rate():
    """The DP-BBB note calls the two bounds equal; they are not."""
    result = dpbnn.compare_passes(
        noise_multiplier=4.0, n=10_000, batch_size=100, epochs=10, delta=1e-5
    )
    assert result.mu_partition == pytest.approx(math.sqrt(10) / 4)
    assert result.mu_poisson / result.mu_partition == pytest.approx(math.sqrt(0.01), rel=0.05)
    assert result.poisson < result.partition / 5


def test_without_amplification_the_papers_run_costs_seventeen():
    result = dpbnn.compare_passes(1.27207, 60_000, 256, 15, 1e-5)
    assert result.partition == pytest.approx(17.0, abs=0.05)
    assert result.poisson == pytest.approx(0.8938, abs=1e-3)
