"""The papers' datasets by name: found, checked, downloaded, or refused with what to do."""

import functools
import gzip
import http.server
import shutil
import threading

import generated_data
import numpy as np
import pytest

import dpbnn
from dpbnn.data import DATASETS, Schema, TableError, datasets, load, load_table
from dpbnn.data.download import BadDownload, fetch, sha256

SHAPES = {
    "mnist": ((60000, 1, 28, 28), (10000, 1, 28, 28)),
    "digits": ((1437, 64), (360, 64)),
    "naval": ((10741, 16), (1193, 16)),
    "kin8nm": ((7373, 8), (819, 8)),
    "power": ((8611, 4), (957, 4)),
    "wine": ((1439, 11), (160, 11)),
    "protein": ((41157, 9), (4573, 9)),
    "adult": ((32561, 107), (16281, 107)),
    "abalone": ((3341, 10), (836, 10)),
    "abalone-rings": ((3341, 10), (836, 10)),
}


def test_every_dataset_has_a_shape_here():
    assert set(SHAPES) == set(DATASETS)


def generated_rows(name):
    if name == "digits":
        return tuple(shape[0] for shape in SHAPES[name])
    return generated_data.ROWS.get(name.removesuffix("-rings"), generated_data.REGRESSION)


@pytest.mark.parametrize("name", SHAPES)
def test_every_dataset_loads(either_folder, name):
    data = dpbnn.data.load(name, either_folder)
    shapes = data.x_train.shape, data.x_test.shape
    if either_folder.name.startswith("generated"):
        assert tuple(shape[0] for shape in shapes) == generated_rows(name)
        assert [shape[1:] for shape in shapes] == [shape[1:] for shape in SHAPES[name]]
    else:
        assert shapes == SHAPES[name]
    assert len(data.y_train) == len(data.x_train)
    assert len(data.y_test) == len(data.x_test)
    assert np.isfinite(data.x_train).all()
    if data.task == "classification":
        assert np.unique(data.y_train).tolist() == list(range(len(data.classes)))
    else:
        assert data.classes is None


def test_the_rates_of_the_papers(data_folder):
    """Adult and the DP-VI code's Abalone: the shares of the second class, over all rows."""
    adult, abalone = load("adult", data_folder), load("abalone", data_folder)
    assert np.r_[adult.y_train, adult.y_test].mean() == pytest.approx(0.2393, abs=1e-4)
    assert np.r_[abalone.y_train, abalone.y_test].mean() == pytest.approx(0.498, abs=5e-4)


def test_abalone_splits_are_fifths_in_order(either_folder):
    train, test, _ = load_table("abalone", either_folder)
    assert test.where(0).endswith(f"line {train.n + 1}")
    seen = np.concatenate([load("abalone", either_folder, split=s).y_test for s in range(5)])
    assert len(seen) == train.n + test.n


def test_digits_splits_cover_everything_once():
    parts = [load("digits", split=s) for s in range(5)]
    assert sum(len(part.x_test) for part in parts) == 1797
    assert all(len(part.x_train) + len(part.x_test) == 1797 for part in parts)


def test_the_shipped_schemas_have_no_bound_from_the_data(data_folder):
    """A bound that equals a column's smallest or largest value must be one of the known facts."""
    known = {
        ("age", 90.0), ("education-num", 1.0), ("education-num", 16.0), ("hours-per-week", 99.0),
        ("capital-gain", 0.0), ("capital-gain", 99999.0), ("capital-loss", 0.0), ("height", 0.0),
    }  # fmt: skip
    for name in ("adult", "abalone-rings"):
        train, _, schema = load_table(name, data_folder)
        assert schema.public
        for column in schema.columns:
            if column.bounds is not None:
                ends = {float(train[column.name].min()), float(train[column.name].max())}
                for bound in column.bounds:
                    assert bound not in ends or (column.name, bound) in known


def test_the_shipped_schemas_are_in_the_package():
    for name in ("adult", "abalone-age", "abalone-rings"):
        schema = Schema.from_toml(datasets._resource(f"schemas/{name}.toml"))
        assert Schema.from_toml(schema.to_toml()) == schema


def test_unknown_names_and_splits_are_refused():
    with pytest.raises(TableError, match=r"'cifar'.*mnist"):
        load("cifar")
    with pytest.raises(TableError, match="split=5: protein has splits 0 to 4"):
        load("protein", split=5)
    with pytest.raises(TableError, match="split=1: mnist has splits 0 to 0"):
        load("mnist", split=1)
    with pytest.raises(TableError, match="'mnist': is no table"):
        load_table("mnist")


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """No data folder, an empty cache, and no way out: returns the cache."""
    monkeypatch.delenv("DPBNN_DATA", raising=False)
    monkeypatch.setenv("DPBNN_CACHE", str(tmp_path / "cache"))

    def refuse(url, **_):
        raise OSError(f"the tests do not use the network: {url}")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    return tmp_path / "cache"


def served(monkeypatch, root, name):
    """Let a dataset's sources be files below a folder, reached over HTTP on this machine."""
    handler = functools.partial(Quiet, directory=root)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    source = {**datasets._sources()[name]}
    source["files"] = [
        {**entry, "urls": [f"{base}/none", f"{base}/{entry['path']}"]} for entry in source["files"]
    ]
    if "source" in source:
        source["source"] = f"{base}/{source['folder']}"
    monkeypatch.setattr(datasets, "_sources", lambda: {name: source})
    return server


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("DPBNN_DATA", raising=False)
    monkeypatch.setenv("DPBNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def published(files, root):
    """Lay wine out as its source does: the table, and one file of row numbers per part."""
    folder = root / "uci" / "wine-quality-red"
    folder.mkdir(parents=True)
    shutil.copy(files / "uci" / "wine-quality-red" / "data.txt", folder)
    with np.load(files / "uci" / "wine-quality-red" / "splits.npz") as splits:
        for part in ("train", "test"):
            np.savetxt(folder / f"index_{part}_3.txt", splits[f"{part}_3"])
    return folder


def test_a_download_is_the_same_as_a_local_copy(either_folder, cache, tmp_path, monkeypatch):
    published(either_folder, tmp_path / "www")
    server = served(monkeypatch, tmp_path / "www", "wine")
    try:
        got = load("wine", split=3)
    finally:
        server.shutdown()
        server.server_close()
    again = load("wine", split=3)
    local = load("wine", either_folder, split=3)
    for part in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(got, part), getattr(local, part))
        np.testing.assert_array_equal(getattr(again, part), getattr(local, part))
    assert not list(cache.rglob("*.part"))


@pytest.mark.parametrize("spoilt", ["data.txt", "index_test_3.txt"])
def test_other_content_is_refused_and_not_kept(either_folder, cache, tmp_path, monkeypatch, spoilt):
    folder = published(either_folder, tmp_path / "www")
    text = (folder / spoilt).read_text()
    (folder / spoilt).write_text(text.replace("1", "2", 1))
    server = served(monkeypatch, tmp_path / "www", "wine")
    try:
        with pytest.raises(TableError, match=r"instead of .* put"):
            load("wine", split=3)
    finally:
        server.shutdown()
        server.server_close()
    assert not list(cache.rglob(f"{spoilt}*"))


def test_a_spoilt_local_file_is_refused(either_folder, alone, tmp_path):
    folder = tmp_path / "uci" / "abalone"
    folder.mkdir(parents=True)
    shutil.copy(either_folder / "uci" / "abalone" / "abalone.data", folder)
    load("abalone", tmp_path)
    (folder / "abalone.data").write_text("M,0.455\n")
    with pytest.raises(TableError, match=r"abalone.data: has sha256 .* replace"):
        load("abalone", tmp_path)


def test_gzipped_and_plain_files_are_the_same(either_folder, alone, tmp_path):
    folder = tmp_path / "uci" / "adult"
    folder.mkdir(parents=True)
    for name in ("adult.data", "adult.test"):
        with gzip.open(either_folder / "uci" / "adult" / f"{name}.gz") as file:
            (folder / name).write_bytes(file.read())
    plain, packed = load("adult", tmp_path), load("adult", either_folder)
    np.testing.assert_array_equal(plain.x_train, packed.x_train)
    (folder / "adult.data.gz").write_bytes(b"\x1f\x8b nothing")
    (folder / "adult.data").unlink()
    with pytest.raises(TableError, match="damaged gzip"):
        load("adult", tmp_path)


@pytest.mark.parametrize("name", [n for n in DATASETS if n != "digits"])
def test_without_network_the_error_says_what_to_do(alone, tmp_path, name):
    with pytest.raises(TableError) as caught:
        load(name, tmp_path / "mine")
    message = str(caught.value)
    assert "could not be downloaded" in message
    assert "https://" in message
    assert str(tmp_path / "mine") in message
    assert "\n" not in message
    assert not [path for path in alone.rglob("*") if path.is_file()]


def test_the_folder_can_be_named_by_the_environment(either_folder, alone, monkeypatch):
    monkeypatch.setenv("DPBNN_DATA", str(either_folder))
    named = load("power", either_folder)
    np.testing.assert_array_equal(load("power").x_test, named.x_test)


def test_a_download_that_ends_early_is_not_kept(tmp_path):
    class Short(Quiet):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"only this")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Short)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(BadDownload, match=r"9 of 1000 bytes|incomplete|9 bytes read"):
            fetch(f"http://127.0.0.1:{server.server_port}/x", tmp_path / "x", lambda part: None)
    finally:
        server.shutdown()
        server.server_close()
    assert not list(tmp_path.iterdir())


def test_a_download_from_a_file_address(tmp_path):
    (tmp_path / "source").write_bytes(b"content")
    target = tmp_path / "folder" / "copy"

    def check(part):
        return None if sha256(part.read_bytes()) == sha256(b"content") else "differs"

    fetch((tmp_path / "source").as_uri(), target, check)
    assert target.read_bytes() == b"content"
    (tmp_path / "source").write_bytes(b"other")
    with pytest.raises(BadDownload, match="differs"):
        fetch((tmp_path / "source").as_uri(), target, check)
    assert target.read_bytes() == b"content"
    assert [path.name for path in target.parent.iterdir()] == ["copy"]
