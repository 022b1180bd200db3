"""Files and folders: whole or not at all, hashed once, and nothing of anybody else's replaced."""

import json
import math
import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

import dpbnn
from dpbnn import storage
from dpbnn.storage import new_folder, plain, read_manifest, replace_file, restored, write_manifest


def saved(folder, text="one", **options):
    with new_folder(folder, "thing", **{"overwrite": False, **options}) as partial:
        (partial / "part").write_text(text)
        (partial / "inner").mkdir()
        (partial / "inner" / "deep").write_text(text)
        write_manifest(partial / "inner", "dpbnn-inner", {})
        write_manifest(partial, "dpbnn-thing", {"value": text})
    return folder


def read(folder):
    read_manifest(folder / "inner", "dpbnn-inner", "a test")
    return read_manifest(folder, "dpbnn-thing", "a test")


@pytest.mark.parametrize("private", [False, True])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, private):
    path = tmp_path / "file"
    replace_file(path, lambda part: part.write_text("one"), private=private)
    assert path.read_text() == "one"
    if private and sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def fail(part):
        part.write_text("tw")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, fail, private=private)
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_private_from_the_start(tmp_path):
    def write(part):
        assert stat.S_IMODE(part.stat().st_mode) == 0o600
        part.write_text("secret")

    (tmp_path / "keys.json.partial").write_text("left by a process that was killed")
    replace_file(tmp_path / "keys.json", write, private=True)
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]


def test_a_folder_is_read_as_it_was_saved(tmp_path):
    manifest = read(saved(tmp_path / "a"))
    assert manifest["value"] == "one"
    assert manifest["versions"]["dpbnn"] == dpbnn.__version__


def test_every_file_is_hashed_once(tmp_path, monkeypatch):
    hashed, original = [], storage._hash

    def counted(path):
        hashed.append(path.name if path.parent.name != "inner" else f"inner/{path.name}")
        return original(path)

    monkeypatch.setattr(storage, "_hash", counted)
    files = ["inner/deep", "inner/manifest.json", "part"]
    folder = saved(tmp_path / "a")
    assert sorted(hashed) == files
    hashed.clear()
    read(folder)
    assert sorted(hashed) == files


@pytest.mark.parametrize("name", ["part", "inner/deep", "inner/manifest.json"])
def test_a_changed_or_missing_file_is_noticed(tmp_path, name):
    folder = saved(tmp_path / "a")
    text = (folder / name).read_text()
    (folder / name).write_text(text + " ")
    with pytest.raises(ValueError, match=f"{Path(name).name} is not what was saved"):
        read(folder)
    (folder / name).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=Path(name).name):
        read(folder)


@pytest.mark.parametrize("name", ["../secret", "{}/secret"])
def test_a_manifest_reaches_no_file_outside(tmp_path, name):
    (tmp_path / "secret").write_text("secret")
    folder = saved(tmp_path / "a")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name.format(tmp_path)] = storage._hash(tmp_path / "secret")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="lacks the file"):
        read(folder)


@pytest.mark.parametrize("broken", ["not a mapping", "no files", "null files", "empty files"])
def test_a_manifest_that_checks_nothing_is_refused(tmp_path, broken):
    folder = saved(tmp_path / "a")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]
    changed = {
        "not a mapping": [manifest],
        "no files": manifest,
        "null files": {**manifest, "files": None},
        "empty files": {**manifest, "files": {}},
    }
    (folder / "manifest.json").write_text(json.dumps(changed[broken]))
    with pytest.raises(ValueError, match=r"manifest\.json .* copy the whole folder"):
        read(folder)


def test_a_manifest_without_one_of_its_entries_is_one_clear_error(tmp_path):
    folder = tmp_path / "point"
    dpbnn.posteriors.PointPosterior(dpbnn.mlp(2, (3,), 2), "categorical").save(folder)
    whole = json.loads((folder / "manifest.json").read_text())
    for name in whole.keys() - {"versions", "model"}:  # these are for readers
        rest = {key: value for key, value in whole.items() if key != name}
        (folder / "manifest.json").write_text(json.dumps(rest))
        with pytest.raises(ValueError, match=r"manifest\.json|Install") as caught:
            dpbnn.load(folder)
        assert type(caught.value) is ValueError
    (folder / "manifest.json").write_text(json.dumps({**whole, "version": 9, "versions": 3}))
    with pytest.raises(ValueError, match="unknown"):
        dpbnn.load(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
@pytest.mark.parametrize("there", ["saved", "empty", "missing"])
def test_a_link_to_a_folder_stays_a_link(tmp_path, there):
    target, link = tmp_path / "a", tmp_path / "link"
    if there == "saved":
        saved(target)
    elif there == "empty":
        target.mkdir()
    link.symlink_to(target, target_is_directory=True)
    saved(link, "two", overwrite=True)
    assert read(target)["value"] == "two"
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link"]


def test_a_folder_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    folder = saved(tmp_path / "a")

    def fail():
        with new_folder(folder, "thing", overwrite=True) as partial:
            (partial / "part").write_text("two")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert read(folder)["value"] == "one"
    real, calls = os.rename, []

    def rename(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise PermissionError("in use")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(PermissionError):
        saved(folder, "two", overwrite=True)
    assert read(folder)["value"] == "one"
    assert list(tmp_path.iterdir()) == [folder]


def test_nothing_is_replaced_unasked_and_nothing_of_others_ever(tmp_path):
    folder = saved(tmp_path / "a")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        saved(folder)
    assert read(saved(folder, "two", overwrite=True))["value"] == "two"
    (folder / "inner" / "notes").write_text("precious")
    with pytest.raises(FileExistsError, match=r"more than a saved thing \(inner/notes\)"):
        saved(folder, "three", overwrite=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "manifest.json").write_text('{"name": "of another program", "files": {}}')
    with pytest.raises(FileExistsError, match=r"manifest\.json"):
        saved(other, overwrite=True)
    assert read(folder)["value"] == "two"


VALUES = [
    None, True, 3, 2.5, "text", (1, (2.0, "x")), {"a": (1, 2), 3: None}, math.inf,
    dpbnn.SGLD(learning_rate=1e-3), dpbnn.ScaleMixture(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_from_json(value):
    classes = {"SGLD": dpbnn.SGLD, "ScaleMixture": dpbnn.ScaleMixture}
    assert restored(json.loads(json.dumps(plain(value))), classes) == value


def test_other_values_come_back_alike_or_are_refused():
    array = np.array([[1.5, math.nan]], dtype=np.float32)
    found = restored(json.loads(json.dumps(plain(array))), {})
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
    assert restored(plain(range(3)), {}) == (0, 1, 2)
    assert restored(plain(Path("a/b")), {}) == str(Path("a/b"))
    with pytest.raises(TypeError, match="a object cannot be saved"):
        plain([object()])
    assert restored(plain([object()], as_text=True), {})[0].startswith("<object")
