"""Attacks on the keys of the noise and on its generator, items 44 and 55; no false alarms."""

import broken_versions as broken
import numpy as np
import pytest
import torch
from twins import fails_on, twins_of

import dpbnn
from dpbnn.privacy import stream
from dpbnn.privacy.noise import NoiseSource

LIKE = {"a": torch.empty(50), "b": torch.empty(3, dtype=torch.float64)}


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in LIKE)


def secrets_of(source):
    """Return every key that the state of a source holds."""
    values = [source.key, *vars(source).values()]
    return {bytes(v) for v in values if isinstance(v, bytes) and len(v) == 32}


def fail(*_):
    raise MemoryError


@fails_on(44, broken.keys_stay_as_they_are, make=NoiseSource)
@pytest.mark.parametrize("make", [NoiseSource, lambda: NoiseSource.seeded(3)])
def test_item_44_no_key_gives_the_noise_of_earlier_releases_back(make):
    """The attack: who finds the key of an interrupted run takes the noise off its releases."""
    source, releases = make(), []
    for count in range(5):
        releases.append(source.normal(LIKE, 1.0))
        source.prepare(LIKE, ahead=count % 2 == 0)
    assert secrets_of(source)
    for key in secrets_of(source):
        for step, release in enumerate(releases):
            assert not equal(NoiseSource.from_key(key, step).normal(LIKE, 1.0), release)
    resumed = NoiseSource.from_key(source.key, source.step)
    for _ in range(3):
        assert equal(resumed.normal(LIKE, 1.0), source.normal(LIKE, 1.0))
    assert (resumed.key, resumed.step) == (source.key, source.step)


@fails_on(44, broken.keys_stay_as_they_are)
def test_item_44_a_release_that_failed_half_way_uses_its_key_up():
    source = NoiseSource()
    before = source.key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseSource, "_add_on_devices", fail)
        with pytest.raises(MemoryError):
            source.normal(LIKE, 1.0)
    assert before not in secrets_of(source)


@fails_on(55, broken.without_openssl_the_noise_is_philox, offset=0)
@pytest.mark.parametrize("offset", [0, 32, (1 << 16) - 32, 5 << 16])
def test_item_55_without_openssl_the_noise_is_shake(offset):
    """SHAKE-128 of key and block number, wherever it is read; the statement says so."""
    key = bytes(range(16))
    known = {
        0: "96e093d9861c8fb3620383c2baf000638ab3a18a465a9e017b3689de3e7c2de3",
        5 << 16: "7e81f2b66a0bf25e8b3a8b4876fac9b634f62445b8051d3cd9e8c79ccc2a0609",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_LIBCRYPTO", None)
        words, whole = np.empty(64, np.uint8), np.empty(offset + 64, np.uint8)
        stream.fill(key, offset, words)
        stream.fill(key, 0, whole)
        assert words.tobytes() == whole[offset:].tobytes()
        assert words.tobytes().hex().startswith(known.get(offset, ""))
        gate = dpbnn.Gate(1.0, 1.0)
        assert "SHAKE-128" in gate.noise.source
        gate.reserve(1)
        assert "SHAKE-128" in str(gate.statement(delta=1e-5))


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
