"""Data of every kind trains the same network; what draws batches itself is refused."""

import functools
import math
from collections import deque
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import dpbnn
from dpbnn.rows import StreamedRows, checked_rows

N, STREAMED = 300, 4000  # bytes: a batch fits, the data does not


def values():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def fitted(data, network=None, method=None, **options):
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-4, n=N, batch_size=32, steps=6)
    options = {"method": method or dpbnn.SGD(learning_rate=0.5), "debug_seed": 1, **options}
    return dpbnn.fit(network or (lambda: nn.Linear(4, 2)), data, plan=plan, **options)


def weights(data, **options):
    model = fitted(data, **options).model
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@functools.cache
def usual_weights():
    return weights(values())


class Pairs(Dataset):
    def __init__(self):
        self.x, self.y = values()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, number):
        return self.x[number], int(self.y[number])


class Named(Pairs):
    def __getitem__(self, number):
        return {"features": self.x[number].numpy(), "label": self.y[number], "name": "text"}


class Columns:
    """The interface of a Hugging Face dataset: columns of records, by number or by many numbers."""

    def __init__(self, custom=False):
        x, y = values()
        self.held = {"features": x.tolist(), "label": y.tolist()}
        self.features = dict.fromkeys(self.held)
        self.column_names = list(self.held)
        self.format = {"type": "custom" if custom else None}
        self.asked = deque(maxlen=10000)

    def __len__(self):
        return N

    def __getitem__(self, numbers):
        self.asked.append(type(numbers))
        if isinstance(numbers, int):
            return {name: column[numbers] for name, column in self.held.items()}
        return {name: [column[n] for n in numbers] for name, column in self.held.items()}


def memory_map(folder):
    x, _ = values()
    np.save(folder / "x.npy", x.numpy())
    return np.load(folder / "x.npy", mmap_mode="r")


def big_endian(folder):
    x, _ = values()
    np.save(folder / "x.npy", x.numpy().astype(">f8"))
    return np.load(folder / "x.npy", mmap_mode="r")


def tables(folder, kind="parquet"):
    x, y = values()
    columns = {f"x{j}": x[:, j].numpy() for j in range(4)}
    table = pa.table({**columns, "y": y.numpy(), "v": pa.array(list(x.numpy()))})
    (folder / "t").mkdir()
    if kind == "parquet":
        pq.write_table(table.slice(0, 100), folder / "t" / "a.parquet", row_group_size=30)
        pq.write_table(table.slice(100), folder / "t" / "b.parquet")
    else:
        feather.write_feather(table, folder / "t" / "a.arrow")
    return folder / "t"


FOUR = ["x0", "x1", "x2", "x3"]
KINDS = {
    "float64": lambda _: (values()[0].double(), values()[1]),
    "memory map": lambda f: (memory_map(f), values()[1]),
    "memory map of the other byte order": lambda f: (big_endian(f), values()[1].numpy()),
    "TensorDataset": lambda _: TensorDataset(*values()),
    "Dataset": lambda _: Pairs(),
    "Dataset of mappings": lambda _: dpbnn.DataSource(Named(), inputs="features", target="label"),
    "Hugging Face": lambda _: dpbnn.DataSource(Columns(), inputs="features", target="label"),
    "Hugging Face, transformed": lambda _: dpbnn.DataSource(
        Columns(custom=True), inputs="features", target="label"
    ),
    "Parquet": lambda f: dpbnn.DataSource(tables(f), inputs=FOUR, target="y"),
    "Parquet, lists": lambda f: dpbnn.DataSource(tables(f), inputs="v", target="y"),
    "Arrow": lambda f: dpbnn.DataSource(tables(f, "arrow"), inputs=FOUR, target="y"),
    "columns": lambda _: dpbnn.DataSource(
        {f"x{j}": values()[0][:, j] for j in range(4)} | {"y": values()[1]}, FOUR, "y"
    ),
}


@pytest.mark.parametrize("memory", [2**30, STREAMED])
@pytest.mark.parametrize("name", list(KINDS))
def test_data_of_every_kind_trains_the_same_network(name, memory, tmp_path):
    data = KINDS[name](tmp_path)
    source = data if isinstance(data, dpbnn.DataSource) else dpbnn.DataSource(data)
    again = dpbnn.DataSource(source.data, source.inputs, source.target, memory=memory)
    for on_bad_rows in ("error", "zero"):
        assert torch.equal(weights(again, on_bad_rows=on_bad_rows), usual_weights())


def test_what_code_of_the_users_has_made_is_read_record_by_record():
    for custom in (False, True):
        data = Columns(custom)
        fitted(dpbnn.DataSource(data, "features", "label", memory=STREAMED))
        assert (list in data.asked) is not custom


class Attending(nn.Module):
    """A network that takes its inputs by name, and not in the order of the data."""

    def __init__(self, outputs=2):
        super().__init__()
        self.words, self.drop = nn.Embedding(7, 4), nn.Dropout(0.1)
        self.out = nn.Linear(4, outputs)

    def forward(self, input_ids, unused=None, attention_mask=None):
        weight = attention_mask / attention_mask.sum(1, keepdim=True).clamp(min=1)
        return self.out(self.drop((self.words(input_ids) * weight.unsqueeze(-1)).sum(1)))


def words():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 7, (N, 5), generator=generator)
    mask = (torch.rand(N, 5, generator=generator) < 0.7).float()
    return {"attention_mask": mask, "input_ids": ids}, torch.arange(N) % 2


class Tokens(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, number):
        x, y = words()
        return {name: part[number] for name, part in x.items()}, y[number]


@pytest.mark.parametrize(
    "method", [dpbnn.SGD(), dpbnn.VI(), dpbnn.MCDropout(), dpbnn.SGLD(learning_rate=1e-3, keep=3)]
)
def test_inputs_by_name_reach_the_network_by_name(method):
    x, y = words()
    posterior = fitted((x, y), Attending, method)
    same = fitted(dpbnn.DataSource(Tokens()), Attending, method)
    few = {name: part[:9] for name, part in x.items()}
    one, two = (p.predict(few, samples=3, seed=0) for p in (posterior, same))
    assert torch.equal(one.mean, two.mean)
    assert one.mean.shape == (9, 2)
    swapped = {"input_ids": few["input_ids"], "attention_mask": few["attention_mask"]}
    assert torch.equal(posterior.predict(swapped, samples=3, seed=0).mean, one.mean)


def test_inputs_by_name_are_checked_and_replayed():
    x, y = words()
    x["input_ids"][3] = 9
    with pytest.raises(ValueError, match=r"1 row cannot be used.*indices from 0 to 6"):
        fitted((x, y), Attending)
    fitted((x, y), Attending, on_bad_rows="zero")
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-4, n=N, batch_size=60, steps=3)
    for data in (words(), Tokens()):
        dpbnn.replay(dpbnn.SGD(clip=0.1), data, 7, model=Attending, plan=plan).check()


def test_a_tuple_of_inputs_is_given_by_position():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 2)

        def forward(self, left, right):
            return self.out(torch.cat([left, right], 1))

    x, y = values()
    several = (x[:, :1], x[:, 1:])
    for data in ((several, y), TensorDataset(*several, y), ((several[0].numpy(), x[:, 1:]), y)):
        torch.manual_seed(0)
        assert torch.equal(weights(data, network=Two), usual_weights())


def test_methods_of_one_input_refuse_several():
    aware = dpbnn.NoiseAware(points=50, chains=2, iterations=12, keep=8)
    with pytest.raises(dpbnn.UnsupportedModel, match="does not begin with a Linear layer"):
        fitted(words(), Attending, aware)
    data = words()[0], values()[1].double()
    with pytest.raises(ValueError, match="needs Linear"):
        fitted(data, lambda: Attending(1), dpbnn.SEP(), likelihood="gaussian")
    with pytest.raises(ValueError, match="the network cannot take inputs"):
        fitted(words(), lambda: dpbnn.mlp(5, (3,), 2))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class Endless:
    """As a Hugging Face dataset that streams: columns, but no records by number."""

    column_names = ("a", "b")

    def __iter__(self):
        return iter(())


class Unsized(Dataset):
    def __getitem__(self, number):
        return torch.zeros(4), 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: DataLoader(Pairs(), 8), "DataLoader; .* draws them itself.* data=loader.dataset"),
        (lambda: RandomSampler(range(9)), "is a RandomSampler; .* the dataset alone"),
        (
            lambda: DistributedSampler(range(9), 2, 0),
            "DistributedSampler; .* draws them itself",
        ),
        (Stream, "is Stream, which has no records by number"),
        (Endless, "is Endless, which has no records by number"),
        (lambda: iter([1]), "no records by number"),
        (Unsized, "Unsized has no __len__"),
        (lambda: values()[0], "give a pair"),
        (lambda: Named(), "target: missing"),
        (lambda: {"a": values()[0]}, "target: missing"),
        (lambda: {"train": Columns(), "test": Columns()}, "is a mapping of datasets"),
        (lambda: dpbnn.DataSource(Named(), ["nothing"], "label"), "are no columns"),
        (lambda: dpbnn.DataSource(Named(), ["label"], "label"), "hold the target"),
        (lambda: dpbnn.DataSource(values(), target="y"), "name columns"),
        (lambda: dpbnn.DataSource(values(), workers=2), "without worker processes"),
        (lambda: dpbnn.DataSource("nowhere.parquet", FOUR, "y"), "no such file"),
        (lambda: dpbnn.DataSource(values(), memory=-1), "must be a whole number"),
        (lambda: dpbnn.DataSource((*values(),), memory=STREAMED // 10, fixed=False), None),
    ],
)
def test_what_cannot_be_read_by_number_is_refused_in_a_line(data, message):
    if message is None:
        fitted(data())
        return
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        fitted(data())
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux lists its pages")
def test_pages_beside_a_record_are_not_read_while_a_run_reads_here_and_there(tmp_path):
    def at_random():
        """Whether the system was told so of the file's pages."""
        parts = Path("/proc/self/smaps").read_text().split(str(tmp_path / "x.npy"))
        return ["rr" in part.partition("VmFlags:")[2].split("\n")[0].split() for part in parts[1:]]

    data = dpbnn.DataSource((memory_map(tmp_path), values()[1]), memory=STREAMED)
    rows = checked_rows(
        data, nn.Linear(4, 2), dpbnn.likelihoods.likelihood("categorical"), N,
        torch.device("cpu"), "error",
    )  # fmt: skip
    assert at_random() == [False]
    batches = rows.ahead(iter([torch.tensor([3, 5]), torch.tensor([7])]), 0)
    next(batches)
    assert at_random() == [True]
    assert len([*batches]) == 1
    assert at_random() == [False]


def test_a_batch_above_the_limit_is_refused_before_anything_is_spent(tmp_path):
    ledger = dpbnn.Ledger()
    data = dpbnn.DataSource((memory_map(tmp_path), values()[1]), memory=2000)
    with pytest.raises(ValueError, match=r"a batch of up to 99 records takes .* memory=2000"):
        fitted(data, ledger=ledger)
    plan = dpbnn.plan(noise_multiplier=9.0, delta=1e-4, n=N, sampling="full-batch", steps=2)
    with pytest.raises(ValueError, match="a batch of up to 300 records"):
        dpbnn.fit(nn.Linear(4, 1), data, "gaussian", method=dpbnn.SEP(), plan=plan, ledger=ledger)
    assert ledger.releases == 0


@pytest.mark.parametrize("kind", ["lists that differ", "text", "empty cells"])
def test_columns_that_are_no_equal_numbers(kind, tmp_path):
    x, y = values()
    lists = x.tolist()
    if kind == "lists that differ":
        lists[0] = [1.0]
    table = pa.table({"v": lists, "y": y.numpy(), "text": ["a"] * N})
    if kind == "empty cells":
        gaps = [None if i in (3, 4) else float(v) for i, v in enumerate(x[:, 0])]
        table = pa.table({"v": gaps, "y": y.numpy()})
    pq.write_table(table, tmp_path / "t.parquet")
    path = str(tmp_path / "t.parquet")
    if kind == "empty cells":
        data = dpbnn.DataSource(path, ["v"], "y")
        with pytest.raises(ValueError, match="2 rows cannot be used"):
            fitted(data, lambda: nn.Linear(1, 2))
        fitted(data, lambda: nn.Linear(1, 2), on_bad_rows="zero")
        return
    column, message = ("v", "differ in length") if "lists" in kind else ("text", "give numbers")
    with pytest.raises(ValueError, match=message):
        fitted(dpbnn.DataSource(path, column, "y"))


@pytest.mark.parametrize("memory", [2**30, STREAMED])
def test_bad_rows_of_a_map_contribute_nothing_or_are_counted(memory, tmp_path):
    x, y = values()
    x[5, 2], x[250, 0], y[7] = math.nan, math.inf, 4
    np.save(tmp_path / "x.npy", x.numpy())
    data = dpbnn.DataSource((np.load(tmp_path / "x.npy", mmap_mode="r"), y), memory=memory)
    with pytest.raises(ValueError, match=r"^3 rows cannot be used"):
        fitted(data)
    with pytest.raises(ValueError, match=r"the first ones \[5, 7, 250\]"):
        fitted(data, on_bad_rows="show")
    assert torch.equal(weights(data, on_bad_rows="zero"), weights((x, y), on_bad_rows="zero"))


def test_data_is_read_batch_by_batch_above_the_limit_alone(tmp_path):
    def rows(data, on_bad_rows="error", dtype=torch.float32):
        network = nn.Linear(4, 2, dtype=dtype)
        made = dpbnn.likelihoods.likelihood("categorical")
        return checked_rows(data, network, made, N, torch.device("cpu"), on_bad_rows)

    x, y = values()
    held = rows(dpbnn.DataSource((x, y), memory=0))
    assert held.x.data_ptr() == x.data_ptr()  # no copy at all
    for options in ({"on_bad_rows": "zero"}, {"dtype": torch.float64}):
        assert isinstance(rows(dpbnn.DataSource((x, y), memory=0), **options), StreamedRows)
        assert not isinstance(rows((x, y), **options), StreamedRows)
    assert isinstance(rows(dpbnn.DataSource((memory_map(tmp_path), y), memory=0)), StreamedRows)
    assert isinstance(rows(Pairs()), StreamedRows)  # may be another one when it is read again
    assert not isinstance(rows(dpbnn.DataSource(Pairs(), fixed=True)), StreamedRows)


def test_tokens_are_whole_numbers_of_any_width(tmp_path):
    x, y = words()
    np.save(tmp_path / "ids.npy", x["input_ids"].numpy().astype(np.uint16))
    x["input_ids"] = np.load(tmp_path / "ids.npy", mmap_mode="r")
    for memory in (2**30, 8000):
        data = dpbnn.DataSource((x, y), memory=memory)
        assert torch.equal(weights(data, network=Attending), weights(words(), network=Attending))


def test_methods_that_visit_records_stream_or_refuse(tmp_path):
    x = memory_map(tmp_path)
    y = torch.as_tensor(np.array(x[:, 0]))
    data = dpbnn.DataSource((x, y), memory=STREAMED)
    plan = dpbnn.open_plan(n=N, batch_size=20, steps=2, sampling="partition")

    def outputs(data, method):
        posterior = dpbnn.fit(lambda: dpbnn.mlp(4, (3,), 1), data, "gaussian", None, method, plan)
        return posterior.predict(np.array(x[:5])).mean

    held = (torch.as_tensor(np.array(x)), y)
    assert torch.equal(outputs(data, dpbnn.ADF()), outputs(held, dpbnn.ADF()))
    with pytest.raises(ValueError, match="EP keeps a factor of every record"):
        outputs(data, dpbnn.EP())
