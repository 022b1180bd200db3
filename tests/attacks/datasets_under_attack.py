"""Datasets that worker processes can load: their classes must lie in a module."""

import gc
import os
import random
from pathlib import Path

import torch
from runs_under_attack import N, dataset
from torch.utils.data import Dataset

SECRET = 31415926.5


class Plain(Dataset):
    """Records of the usual run, one by one."""

    def __init__(self):
        self.x, self.y = dataset()

    def __len__(self):
        return N

    def __getitem__(self, number):
        return self.x[number], self.y[number]


class Augmented(Plain):
    """Draws as often as the record says, so that a shared generator would move what comes next."""

    def __getitem__(self, number):
        x, y = self.x[number], self.y[number]
        noise = torch.randn(3)
        for _ in range(int(10 * x.abs().sum())):
            torch.rand(1)
            random.random()
        return x + noise + random.random(), y


class Fails(Plain):
    """Raises on one record, with a text that quotes it, from a call on."""

    def __init__(self, record=7, after=0):
        super().__init__()
        self.record, self.after, self.calls = record, after, 0

    def __getitem__(self, number):
        self.calls += 1
        if number == self.record and self.calls > self.after:
            raise OSError(f"cannot decode the person with {SECRET}")
        return super().__getitem__(number)


class Odd(Plain):
    """One record has another shape than the others, or other fields."""

    def __init__(self, record, mapping):
        super().__init__()
        self.record, self.mapping = record, mapping

    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        if self.mapping and number == self.record:
            return {"x": x, "y": y}
        return (torch.cat([x, x]) if number == self.record else x), y


class Shrinking(Plain):
    """Has fewer records from some time on than it said at first."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __len__(self):
        return N if self.calls < N + 5 else 10

    def __getitem__(self, number):
        self.calls += 1
        if number >= len(self):
            raise IndexError(f"{number} {SECRET}")
        return super().__getitem__(number)


class Dying(Plain):
    """Ends the process that loads it."""

    def __getitem__(self, number):
        if number == 20:
            os._exit(3)
        return super().__getitem__(number)


class Spying(Augmented):
    """Writes down which objects of a run live in the process that loads it."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.home = str(folder), os.getpid()

    def __getitem__(self, number):
        if os.getpid() != self.home and number % 9 == 0:
            kinds = {"Gate", "Ledger", "Keys", "NoiseSource", "Attempt"}
            held = (type(value) for value in gc.get_objects())
            found = {k.__name__ for k in held if str(k.__module__).startswith("dpbnn.")} & kinds
            name = f"{os.getpid()}-{number}"
            (Path(self.folder) / name).write_text(" ".join(sorted(found)))
        return super().__getitem__(number)
