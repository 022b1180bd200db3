import torch
from contributions_contract import ContributionsContract

from dpbnn.contributions import DenseContributions


class TestDense(ContributionsContract):
    def make(self, batch):
        g = torch.Generator().manual_seed(0)
        values = {
            "m": torch.randn(batch, 7, generator=g),
            "v": torch.randn(batch, 2, 3, generator=g),
        }
        return DenseContributions(values), {n: v.double() for n, v in values.items()}

    def make_with(self, value):
        _, truth = self.make(5)
        values = {n: v.float() for n, v in truth.items()}
        values["m"][2, 3] = value
        return DenseContributions(values), {n: v[[0, 1, 3, 4]] for n, v in truth.items()}


def test_a_plain_tensor_is_one_name():
    c = DenseContributions(torch.ones(2, 3, dtype=torch.bfloat16))
    assert dict(c.shapes) == {"value": torch.Size([3])}
    assert c.dtype == torch.float32
    assert c.weighted_sum(torch.ones(2))["value"].dtype == torch.float64
