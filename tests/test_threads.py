"""Small fits run on one thread and give the others back, whatever happens."""

import pytest
import torch
from torch import nn

import dpbnn
from dpbnn.privacy.gate import Gate
from dpbnn.threads import SMALL, threads_for


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def seen_in_a_fit(monkeypatch, network, x, fail=False):
    seen, original = [], Gate.__call__

    def call(self, *arguments, **options):
        seen.append(torch.get_num_threads())
        if fail:
            raise KeyboardInterrupt
        return original(self, *arguments, **options)

    monkeypatch.setattr(Gate, "__call__", call)
    y = torch.zeros(len(x), dtype=torch.long)
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-4, n=len(x), sampling="full-batch", steps=2)
    dpbnn.fit(network, (x, y), "categorical", method=dpbnn.SGD(learning_rate=0.1), plan=plan)
    return seen


def test_a_small_table_uses_one_thread(monkeypatch):
    assert seen_in_a_fit(monkeypatch, nn.Linear(3, 2), torch.randn(40, 3)) == [1, 1]
    assert torch.get_num_threads() == 2


def test_images_keep_all_threads(monkeypatch):
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    assert seen_in_a_fit(monkeypatch, network, torch.randn(40, 3, 4)) == [2, 2]


def test_an_interrupt_gives_the_threads_back(monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        seen_in_a_fit(monkeypatch, nn.Linear(3, 2), torch.randn(40, 3), fail=True)
    assert torch.get_num_threads() == 2


def test_large_steps_keep_all_threads():
    with threads_for(1000, int(SMALL / 6000) + 1, torch.Size([5])):
        assert torch.get_num_threads() == 2
    with threads_for(1000, int(SMALL / 6000) - 1, torch.Size([5])):
        assert torch.get_num_threads() == 1
