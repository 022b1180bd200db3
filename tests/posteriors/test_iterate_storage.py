"""Iterates on disk: whole, interrupted, and when the disk is full."""

import errno
import os
import threading
import time
from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpbnn.posteriors import IterateStore, IterateWriter, iterate_file

LIKE = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3), "scale": torch.zeros(())}


def iterate(i):
    return {name: torch.full_like(value, float(i)) for name, value in LIKE.items()}


def write(path, count, capacity=4, **settings):
    with IterateWriter(path, LIKE, capacity, **settings) as writer:
        return [writer.append(iterate(i)) for i in range(1, count + 1)]


def values(path):
    store = IterateStore(path)
    if not len(store):
        return []
    read = store.read(range(len(store)))
    for name, value in LIKE.items():
        assert read[name].shape == (len(store), *value.shape)
        assert (read[name] == read["scale"].view(-1, *[1] * value.dim())).all()
    assert store.numbers == sorted(store.numbers)
    return read["scale"].tolist()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_are_kept_in_order(tmp_path, count, dtype):
    kept = write(tmp_path / "file", count, dtype=dtype)
    assert values(tmp_path / "file") == list(range(1, min(count, 4) + 1))
    assert kept == [i < 4 for i in range(count)]
    assert IterateStore(tmp_path / "file").dtype == dtype


def test_it_is_one_plain_safetensors_file(tmp_path):
    write(tmp_path / "file", 4)
    tensors = load_file(tmp_path / "file")
    assert tensors["weight"].shape == (4, 3, 2)
    assert tensors["__index__"].tolist() == [1, 2, 3, 4]


def test_an_interrupted_file_is_read_as_far_as_it_goes(tmp_path):
    writer = IterateWriter(tmp_path / "file", LIKE, 10)
    for i in range(1, 4):
        writer.append(iterate(i))
    writer.flush()
    assert values(tmp_path / "file") == [1, 2, 3]  # the writer is still open
    writer.close()


def test_an_iterate_half_written_is_not_read(tmp_path, monkeypatch):
    """A slot of an earlier attempt is being replaced when the process stops."""
    real, calls = iterate_file.put, []

    def put(file, data, offset):
        if len(calls) >= 2:
            raise OSError(errno.EIO, "unplugged")
        calls.append(offset)
        real(file, data, offset)

    write(tmp_path / "file", 4)
    writer = IterateWriter(tmp_path / "file", LIKE, 4, start=2)
    monkeypatch.setattr(iterate_file, "put", put)
    writer.append(iterate(5))
    with pytest.raises(OSError, match="unplugged"):
        writer.close()
    assert values(tmp_path / "file") == [1, 2]


def test_a_full_disk_is_an_error_before_training(tmp_path, monkeypatch):
    def full(file, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"no room for 4 iterates.*MB free.*bfloat16") as caught:
        IterateWriter(tmp_path / "file", LIKE, 4)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "file").exists()


def test_space_is_reserved_at_once(tmp_path):
    with IterateWriter(tmp_path / "file", {"w": torch.zeros(1000)}, 100):
        assert (tmp_path / "file").stat().st_blocks * 512 >= 400_000


@pytest.mark.parametrize("at", ["append", "close"])
def test_a_write_error_stops_cleanly_and_the_rest_is_loadable(tmp_path, monkeypatch, at):
    real, before = iterate_file.put, set(threading.enumerate())
    writer = IterateWriter(tmp_path / "file", LIKE, 10)
    writer.append(iterate(1))
    writer.append(iterate(2))
    writer.flush()

    def full(file, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(iterate_file, "put", full)
    writer.append(iterate(3))
    if at == "append":
        while not writer._error:
            time.sleep(0.001)
        monkeypatch.setattr(iterate_file, "put", real)
        with pytest.raises(OSError, match="Free disk space") as caught:
            writer.append(iterate(4))
        assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="Free disk space"):
        writer.close()
    writer.close()
    assert values(tmp_path / "file") == [1, 2]
    assert not set(threading.enumerate()) - before


def test_an_error_of_the_training_is_not_hidden(tmp_path):
    def train():
        with IterateWriter(tmp_path / "file", LIKE, 10) as writer:
            writer.append(iterate(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert values(tmp_path / "file") == [1]


@pytest.mark.parametrize("count", [6, 13])
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path, count):
    write(tmp_path / "whole", count, capacity=8)
    write(tmp_path / "parts", 5, capacity=8)
    with IterateWriter(tmp_path / "parts", LIKE, 8, start=3) as writer:
        assert values(tmp_path / "parts") == [1, 2, 3]
        for i in range(4, count + 1):
            writer.append(iterate(i))
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    with pytest.raises(ValueError, match="settings of the first run"):
        IterateWriter(tmp_path / "parts", LIKE, 5, start=3)


@pytest.mark.parametrize("missing", [1, 30])
def test_a_file_that_was_cut_off_is_not_gone_on_with(tmp_path, missing):
    """Its lost iterates would be read as zeros once the file has its length again."""
    write(tmp_path / "file", 4)
    os.truncate(tmp_path / "file", (tmp_path / "file").stat().st_size - missing)
    with pytest.raises(ValueError, match="is cut off"):
        IterateWriter(tmp_path / "file", LIKE, 4, start=4)


def test_a_resumed_run_leaves_an_exported_copy_alone(tmp_path):
    write(tmp_path / "file", 4)
    IterateStore(tmp_path / "file").export(tmp_path / "copy")
    with IterateWriter(tmp_path / "file", LIKE, 4, start=3) as writer:
        writer.append(iterate(5))
    assert values(tmp_path / "copy") == [1, 2, 3, 4]
    assert values(tmp_path / "file") == [1, 2, 3, 5]


@pytest.mark.parametrize("count", [2, 4, 6])
def test_an_exported_copy_has_no_spare_room(tmp_path, count):
    write(tmp_path / "file", count)
    IterateStore(tmp_path / "file").export(tmp_path / "copy")
    assert values(tmp_path / "copy") == values(tmp_path / "file")
    assert IterateStore(tmp_path / "copy").capacity == min(count, 4)


def test_training_may_go_on_changing_the_weights(tmp_path):
    weights = iterate(0)
    with IterateWriter(tmp_path / "file", LIKE, 50) as writer:
        for _ in range(50):
            for value in weights.values():
                value += 1
            writer.append(weights)
    assert values(tmp_path / "file") == list(range(1, 51))


@pytest.mark.parametrize("end", ["flush", "close"])
def test_held_iterates_reach_the_file_at_the_end_alone(tmp_path, end):
    """More of them than are queued."""
    writer = IterateWriter(tmp_path / "file", LIKE, 8, hold=True)
    before = (tmp_path / "file").read_bytes()
    assert writer.held_bytes == 0
    for i in range(1, 8):
        writer.append(iterate(i))
        assert writer.held_bytes >= 4 * i * sum(value.numel() for value in LIKE.values())
    time.sleep(0.05)
    assert (tmp_path / "file").read_bytes() == before
    getattr(writer, end)()
    assert writer.held_bytes == 0
    assert values(tmp_path / "file") == [1, 2, 3, 4, 5, 6, 7]
    if end == "flush":
        writer.append(iterate(8))
        assert values(tmp_path / "file") == [1, 2, 3, 4, 5, 6, 7]
        writer.close()
        assert values(tmp_path / "file") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_held_iterates_can_be_dropped(tmp_path):
    writer = IterateWriter(tmp_path / "file", LIKE, 4, hold=True)
    writer.append(iterate(1))
    writer.flush()
    writer.append(iterate(2))
    writer.close(drop=True)
    assert values(tmp_path / "file") == [1]

    def train():
        with IterateWriter(tmp_path / "file", LIKE, 4, hold=True, start=1) as writer:
            writer.append(iterate(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert values(tmp_path / "file") == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hold", [False, True])
def test_iterates_come_from_a_gpu(tmp_path, dtype, hold):
    weights = {name: value.cuda() for name, value in iterate(0).items()}
    with IterateWriter(tmp_path / "file", weights, 100, dtype=dtype, hold=hold) as writer:
        for _ in range(100):
            for value in weights.values():
                value += 1
            writer.append(weights)
    assert values(tmp_path / "file") == list(range(1, 101))


def test_memory_holds_a_few_iterates_and_never_all(tmp_path):
    """1000 iterates of 400 kB: anonymous memory stays far below 400 MB, writing and reading."""

    def anonymous():
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    weights = {"w": torch.zeros(100_000)}
    before, most = anonymous(), 0
    with IterateWriter(tmp_path / "file", weights, 1000) as writer:
        for _ in range(1000):
            writer.append(weights)
            most = max(most, anonymous())
    store = IterateStore(tmp_path / "file")
    for position in range(1000):
        store.read([position])
        most = max(most, anonymous())
    assert len(store) == 1000
    assert most - before < 40e6


def test_wrong_arguments_are_refused(tmp_path):
    for settings, message in (
        ({"capacity": 0}, "capacity=0"),
        ({"dtype": torch.float16}, "bfloat16"),
        ({"start": -1}, "start=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            IterateWriter(tmp_path / "file", LIKE, **({"capacity": 2} | settings))
    with pytest.raises(ValueError, match="named_parameters"):
        IterateWriter(tmp_path / "file", {}, 2)
    write(tmp_path / "file", 1)
    with pytest.raises(FileExistsError, match="another path"):
        IterateWriter(tmp_path / "file", LIKE, 2)
    writer = IterateWriter(tmp_path / "other", LIKE, 2)
    with pytest.raises(ValueError, match="bias"):
        writer.append({"bias": torch.zeros(4)})
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append(iterate(1))
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "plain")
    with pytest.raises(ValueError, match="IterateWriter"):
        IterateStore(tmp_path / "plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [None, 1000])
def test_iterates_of_many_pages_come_back(tmp_path, monkeypatch, dtype, most):
    """Parameters of many pages, none a whole number of them; the system may write less a call."""
    generator = torch.Generator().manual_seed(0)
    like = {"a": torch.zeros(97, 113), "b": torch.zeros(5), "c": torch.zeros(4099)}
    iterates = [
        {name: torch.randn(value.shape, generator=generator) for name, value in like.items()}
        for _ in range(9)
    ]
    for i in iterates:
        i["a"] = i["a"].T.contiguous().T  # not in the order of the file

    class Slow(FileIO):
        def write(self, data):
            return super().write(memoryview(data)[:most])

    monkeypatch.setattr(iterate_file, "FileIO", Slow)
    with IterateWriter(tmp_path / "file", like, 5, dtype=dtype) as writer:
        for i in iterates:
            writer.append(i)
    store = IterateStore(tmp_path / "file")
    for name, found in store.read(range(5)).items():
        assert torch.equal(found, torch.stack([i[name] for i in iterates[:5]]).to(dtype))
