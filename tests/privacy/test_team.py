"""Work on torch's own threads, and the stream of noise that they fill together."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dpbnn.privacy import noise, stream, team


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


needs_team = pytest.mark.skipif(
    team._PARALLEL is None, reason="torch's OpenMP library has no GOMP_parallel"
)


@needs_team
@pytest.mark.usefixtures("_two_threads")
def test_work_runs_on_several_threads_at_once() -> None:
    together = threading.Barrier(2, timeout=30)
    seen: list[int] = []

    def work() -> None:
        together.wait()
        seen.append(threading.get_native_id())

    team.run_on_team(work)
    assert len(set(seen)) == 2
    assert threading.get_native_id() in seen


@needs_team
@pytest.mark.usefixtures("_two_threads")
def test_an_error_on_any_thread_is_raised_after_all_have_ended() -> None:
    here, ended = threading.get_native_id(), []

    def work() -> None:
        try:
            if threading.get_native_id() != here:
                raise MemoryError("on the other thread")
        finally:
            ended.append(1)

    with pytest.raises(MemoryError, match="other thread"):
        team.run_on_team(work)
    assert len(ended) == 2


def test_without_a_team_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_PARALLEL", None)
    seen: list[int] = []
    team.run_on_team(lambda: seen.append(threading.get_native_id()))
    assert seen == [threading.get_native_id()]
    assert team.team_size() == 1


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("library", ["OpenSSL", "NumPy"])
@pytest.mark.parametrize("size", [2 * stream._SHARE, 2 * stream._SHARE + 8, 5 * stream._SHARE - 40])
def test_threads_fill_the_stream_that_one_fills(
    size: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "NumPy":
        monkeypatch.setattr(stream, "_LIBCRYPTO", None)
    key, together, alone = b"k" * 16, np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    stream.fill(key, 64, together)
    torch.set_num_threads(1)
    stream.fill(key, 64, alone)
    assert np.array_equal(together, alone)
    assert np.count_nonzero(alone.view(np.uint64)) == size // 8


@pytest.mark.usefixtures("_two_threads")
def test_a_thread_that_fails_fails_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("OpenSSL failed to encrypt")

    monkeypatch.setattr(stream, "fill_serially", fail)
    with pytest.raises(RuntimeError, match="failed to encrypt"):
        noise.NoiseSource().normal({"w": torch.zeros(2 * stream._SHARE)}, 1.0)
