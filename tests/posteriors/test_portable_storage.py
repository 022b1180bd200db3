"""Iterates are stored by the same file where positioned reads and writes are missing."""

import errno
import os
import shutil

import pytest
import torch
import windows

from dpbnn.posteriors import iterate_file

LIKE = {"weight": torch.zeros(97, 113), "bias": torch.zeros(4099), "scale": torch.zeros(())}
MISSING = {
    "windows": windows.POSIX_ONLY,
    "no-pwrite": ("pwrite",),
    "no-pread": ("pread", "pwrite"),
    "no-fallocate": ("posix_fallocate",),
}


@pytest.fixture(params=MISSING)
def portable(request, monkeypatch):
    for name in MISSING[request.param]:
        monkeypatch.delattr(os, name, raising=False)
    return windows.again(iterate_file)


def iterate(number):
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(value.shape, generator=generator) for name, value in LIKE.items()}


def write(module, path, numbers, **settings):
    with module.IterateWriter(path, LIKE, 4, **settings) as writer:
        for number in numbers:
            writer.append(iterate(number))


def check(path, numbers, dtype=torch.float32):
    store = iterate_file.IterateStore(path)
    assert store.numbers == list(numbers)
    for name, found in store.read(range(len(store))).items():
        assert torch.equal(found, torch.stack([iterate(i)[name] for i in numbers]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_iterates_written_by_a_thread_come_back(tmp_path, portable, dtype):
    write(portable, tmp_path / "file", range(1, 12), dtype=dtype)
    check(tmp_path / "file", range(1, 5), dtype)


def test_the_file_is_the_same_byte_by_byte(tmp_path, portable, monkeypatch):
    write(portable, tmp_path / "portable", range(1, 4))
    monkeypatch.undo()
    write(iterate_file, tmp_path / "usual", range(1, 4))
    assert (tmp_path / "portable").read_bytes() == (tmp_path / "usual").read_bytes()


def test_a_run_is_resumed(tmp_path, portable):
    write(portable, tmp_path / "file", range(1, 4))
    write(portable, tmp_path / "file", range(3, 7), start=2)
    check(tmp_path / "file", range(1, 5))
    with pytest.raises(ValueError, match="settings of the first run"):
        portable.IterateWriter(tmp_path / "file", LIKE, 5, start=2)


def test_a_full_disk_is_an_error_before_training(tmp_path, portable, monkeypatch):
    if hasattr(os, "posix_fallocate"):
        pytest.skip("the system reserves the space itself")
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(OSError, match=r"no room for 4 iterates.*MB free") as caught:
        portable.IterateWriter(tmp_path / "file", LIKE, 4)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "file").exists()


def test_where_links_bind_an_exported_file_is_a_copy(tmp_path, portable, monkeypatch):
    monkeypatch.setattr(portable, "_LINKS", False)
    write(portable, tmp_path / "file", range(1, 5))
    portable.IterateStore(tmp_path / "file").export(tmp_path / "copy")
    check(tmp_path / "copy", range(1, 5))
    assert (tmp_path / "file").stat().st_nlink == 1
