"""Many DP-SEP settings at once on one GPU, to choose the settings of `dpbnn/reproduce/uci.json`.

    python -m benchmarks.uci_sweep grid.json --device cuda --out tuned.jsonl

The jobs are those of `benchmarks.uci tune`: settings that are trained on nine tenths of a split's
training data and scored on the rest. Jobs of the same dataset, widths and number of steps run
together, as one more axis of every tensor: the update is that of `dpbnn.SEP` in whitened
coordinates, written once more for stacks of networks, and a test holds it against `dpbnn.SEP`. It
is for tuning alone: the noise is not from the gate, nothing is recorded, and what it prints is not
private. `"open": true` among the settings leaves the noise out, and `"clip": 1e9` the clip.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dpbnn
from dpbnn.posteriors.natural import FAR
from dpbnn.reproduce import uci

Job = dict[str, Any]
Layers = list[tuple[Tensor, Tensor]]

_CAP = 0.8  # as in dpbnn.moments.relu_network
_MOST, _FAR = 1e12, 1e3  # as in dpbnn.methods.sep


def forward(layers: Layers, x: Tensor) -> list[tuple[Tensor, ...]]:
    """Return what every layer keeps: its input's moments, its output's, and those of the ReLU.

    Args:
        layers: means and variances of the scaled weights, [runs, out, in + 1] each.
        x: inputs [runs, examples, in].
    """
    z, z_variance, kept = x, None, []
    for mean, variance in layers:
        z = torch.cat([z, torch.ones_like(z[..., :1])], -1)
        scale = 1 / math.sqrt(z.shape[-1])
        m, v = scale * (z @ mean.mT), scale**2 * (z.square() @ variance.mT)
        if z_variance is not None:
            z_variance = torch.cat([z_variance, torch.zeros_like(z[..., :1])], -1)
            v = v + scale**2 * (z_variance @ (variance + mean.square()).mT)
        v = v.clamp(min=1e-24)
        std = v.sqrt()
        r = (m / std).clamp(-FAR, FAR)
        density = torch.exp(-0.5 * r.square()) / math.sqrt(2 * math.pi)
        upper, lower = (0.5 * torch.erfc(s * r / math.sqrt(2)) for s in (-1, 1))
        rectified = (std * density + m * upper).clamp(min=0)
        kept.append((z, z_variance, m, v, std, density, upper, lower, rectified))
        share = upper + r.square() * upper * lower + r * density * (lower - upper)
        z, z_variance = rectified, v * (share - density.square()).clamp(min=0)
    return kept


def clipped_sums(
    layers: Layers, offsets: Layers, weight: Tensor, clip: Tensor, x: Tensor, y: Tensor, s: Tensor
) -> list[Tensor]:
    """Return the clipped sum of all examples, mean and precision coordinates of every layer.

    Args:
        layers: means and variances of the cavity.
        offsets: the shared factor in the same coordinates.
        weight: of the precision coordinates, [runs, 1, 1, 1].
        clip: of every run, [runs, 1].
        x: inputs.
        y: targets.
        s: noise variance, [runs, 1, 1].
    """
    kept = forward(layers, x)
    m, v = kept[-1][2:4]
    g_m = (y.unsqueeze(-1) - m) / (v + s)
    g_v = 0.5 * (g_m.square() - 1 / (v + s))
    vectors: list[Tensor] = []
    for index in reversed(range(len(layers))):
        mean, variance = layers[index]
        z, z_variance = kept[index][:2]
        scale = 1 / math.sqrt(z.shape[-1])
        slope = (scale * g_m).unsqueeze(-1) * z.unsqueeze(-2)
        twice, spread = (2 * scale**2 * g_v).unsqueeze(-1), z.square()
        if z_variance is not None:
            slope = slope + twice * z_variance.unsqueeze(-2) * mean.unsqueeze(1)
            spread = spread + z_variance
        share = (slope.square() - twice * spread.unsqueeze(-2)) * variance.unsqueeze(1)
        share = share.clamp(max=_CAP)
        first = slope * variance.sqrt().unsqueeze(1) / (1 - share) - offsets[index][0].unsqueeze(1)
        second = weight * share / (1 - share) - offsets[index][1].unsqueeze(1)
        vectors += [second.flatten(2), first.flatten(2)]
        if index:
            mean, variance, z = mean[..., :-1], variance[..., :-1], z[..., :-1]
            by_mean = scale * (g_m @ mean) + 2 * scale**2 * z * (g_v @ variance)
            by_variance = scale**2 * (g_v @ (variance + mean.square()))
            *_, std, density, upper, lower, rectified = kept[index - 1]
            g_m = by_mean * upper + by_variance * 2 * rectified * lower
            g_v = by_mean * density / (2 * std)
            g_v = g_v + by_variance * (upper - rectified * density / std)
    norms = torch.stack([c.square().sum(-1) for c in vectors]).sum(0).sqrt()
    factor = torch.where(norms > clip, clip / norms, torch.ones_like(norms))
    factor = torch.where(norms.isfinite(), factor, torch.zeros_like(factor)).unsqueeze(1)
    return [(factor @ c).squeeze(1) for c in reversed(vectors)]


class Stack:
    """Runs of DP-SEP on networks of the same widths, with the same number of steps.

    Args:
        jobs: dataset, split and settings, and optionally seed; see `dpbnn.reproduce.uci`.
        data: the scaled data of every job.
        device: "cpu" or "cuda".
    """

    def __init__(self, jobs: list[Job], data: list[uci.Scaled], device: str) -> None:
        self.jobs, self.device = jobs, device
        self.x, self.y = (torch.stack([d.train[i] for d in data]).to(device) for i in (0, 1))
        self.n, self.steps = self.x.shape[1], jobs[0]["settings"]["steps"]
        rates = [_pair(job["settings"]["step_size"]) for job in jobs]
        self.first, self.last = (self._column([rate[i] for rate in rates]) for i in (0, 1))
        self.prior = self._setting("prior", 1.0).square().reciprocal()
        self.weight, self.floor = self._setting("weight", 1.0), self._setting("floor", 0.5)
        self.momentum, self.trust = self._setting("momentum", 0.0), self._setting("trust", 1.0)
        self.clip, self.noise = self._setting("clip"), self._setting("noise")
        self.heat, self.cooling = self._setting("heat", 1.0), self._setting("cooling", 0.5)
        whole = dpbnn.plan(
            epsilon=uci.EPSILON, delta=uci.DELTA, n=self.n, sampling="full-batch", steps=1
        )
        left = 1 - self._setting("statistics", 0.0)
        self.sigma = whole.noise_multiplier * math.sqrt(self.steps) / left.sqrt()
        self.sigma = self.sigma * (1 - self._setting("open", False))
        starts = [self._start(job) for job in jobs]
        means = [torch.stack(layer).to(device) for layer in zip(*starts, strict=True)]
        variance = self._setting("start_variance", 1.0) / self.prior
        self.second = [torch.ones_like(m) / variance for m in means]
        self.q = [m / variance for m in means]
        self.velocity = [torch.zeros_like(m) for m in means for _ in range(2)]
        self.means = [torch.zeros_like(m) for m in means]
        self.precisions = [torch.zeros_like(m) for m in means]
        self.averaged, self.share = self._column([0.0] * len(jobs)), self._setting("average", 0.5)

    def _column(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device).view(-1, 1, 1)

    def _setting(self, name: str, default: Any = None) -> Tensor:
        return self._column([job["settings"].get(name, default) for job in self.jobs])

    def _start(self, job: Job) -> list[Tensor]:
        settings = job["settings"]
        hidden = settings.get("hidden", uci.DATASETS[job["dataset"]].hidden)
        torch.manual_seed(job.get("seed", job["split"]))
        model = uci.network(self.x.shape[-1], hidden, settings.get("gain", 1.0))
        layers = [m for m in model if isinstance(m, torch.nn.Linear)]
        joined = [torch.cat([m.weight, m.bias[:, None]], 1).detach().double() for m in layers]
        return [weights * math.sqrt(weights.shape[1]) for weights in joined]

    def run(self, sums: Callable[..., list[Tensor]] = clipped_sums) -> None:
        """Take all steps; `sums` may be a compiled `clipped_sums`."""
        for step in range(self.steps):
            self._step(step, sums)

    def _step(self, step: int, sums: Callable[..., list[Tensor]]) -> None:
        cavities, layers, offsets = [], [], []
        for first, second in zip(self.q, self.second, strict=True):
            shared_1, shared_2 = first / self.n, (second - self.prior) / self.n
            variance = 1 / (second - shared_2)
            mean = variance * (first - shared_1)
            cavities.append((mean, variance.sqrt()))
            layers.append((mean.float(), variance.float()))
            whitened = (shared_1 - shared_2 * mean) * variance.sqrt()
            offsets.append((whitened.float(), (self.weight * shared_2 * variance).float()))
        left = (1 - step / self.steps / self.cooling.clamp(min=1e-9)).clamp(min=0)
        clip = self.clip[..., 0].float()
        found = sums(
            layers, offsets, self.weight.float().unsqueeze(-1), clip, self.x, self.y,
            (self.noise * self.heat**left).float(),
        )  # fmt: skip
        rate = self.first * (self.last / self.first) ** (step / max(1, self.steps - 1))
        for index, (mean, root) in enumerate(cavities):
            moves = []
            for kind in (0, 1):
                at = 2 * index + kind
                release = found[at] + self.sigma[..., 0].float() * clip * torch.randn_like(
                    found[at]
                )
                self.velocity[at] = self.momentum * self.velocity[at] + release.view_as(mean)
                moves.append(rate * self.velocity[at])
            most = self.trust * self.weight
            curvature = moves[1].clamp(-most / 2, most) / self.weight / root.square()
            slope = moves[0].clamp(-self.trust, self.trust) / root + curvature * mean
            self._move(index, self.q[index] + slope, self.second[index] + curvature)
        self._average(step + 1)

    def _move(self, index: int, first: Tensor, second: Tensor) -> None:
        first = torch.where(first.isfinite(), first, self.q[index])
        second = torch.where(second.isfinite(), second, self.second[index])
        second = second.clamp(self.floor * self.prior, _MOST * self.prior)
        reach = _FAR * second * self.prior.rsqrt()
        self.q[index], self.second[index] = first.clamp(-reach, reach), second

    def _average(self, done: int) -> None:
        use = (done > (1 - self.share) * self.steps).double()
        self.averaged = self.averaged + use
        for index, (first, second) in enumerate(zip(self.q, self.second, strict=True)):
            by = use / self.averaged.clamp(min=1)
            self.means[index] += by * (first / second - self.means[index])
            self.precisions[index] += by * (second - self.precisions[index])

    def scores(self, data: list[uci.Scaled], targets: list[Tensor]) -> list[Job]:
        """Return the jobs with RMSE and log-likelihood on the rows held out."""
        x = torch.stack([d.test for d in data]).to(self.device)
        pairs = zip(self.means, self.precisions, strict=True)
        *_, last = forward([(m.float(), (1 / p).float()) for m, p in pairs], x)
        found = []
        for index, (job, part, target) in enumerate(zip(self.jobs, data, targets, strict=True)):
            m, v = (value[index, :, 0].double().cpu() for value in last[2:4])
            total = v + job["settings"]["noise"]
            squared = ((target - part.centre) / part.scale - m).square()
            ll = -0.5 * ((2 * math.pi * total).log() + squared / total).mean()
            rmse = part.scale * float(squared.mean().sqrt())
            found.append({**job, "rmse": rmse, "ll": float(ll) - math.log(part.scale)})
        return found


def _pair(rate: float | list[float]) -> tuple[float, float]:
    return (rate, rate) if isinstance(rate, float) else (rate[0], rate[1])


def tuned(jobs: list[Job], device: str, sums: Callable[..., list[Tensor]]) -> list[Job]:
    """Return the scores of jobs that fit together, on the rows that tuning holds out."""
    data, targets = [], []
    for job in jobs:
        rows = uci.indices(job["dataset"], job["split"], tuning=True)
        settings = job["settings"]
        data.append(
            uci.private_data(
                job["dataset"], rows, settings.get("statistics", 0.0), settings.get("whiten", True)
            )
        )
        targets.append(torch.from_numpy(uci.raw(job["dataset"])[1][rows[1]]))
    stack = Stack(jobs, data, device)
    stack.run(sums)
    return stack.scores(data, targets)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("grid")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--together", type=int, default=32, help="most runs at once")
    arguments = parser.parse_args()
    groups: dict[str, list[Job]] = {}
    for job in json.loads(Path(arguments.grid).read_text()):
        settings = job["settings"]
        key = json.dumps([job["dataset"], settings.get("hidden"), settings["steps"]])
        groups.setdefault(key, []).append(job)
    sums = torch.compile(clipped_sums, dynamic=False) if arguments.device == "cuda" else None
    for jobs in groups.values():
        for at in range(0, len(jobs), arguments.together):
            part = jobs[at : at + arguments.together]
            for result in tuned(part, arguments.device, sums or clipped_sums):
                print(f"{result['rmse']:.4g} {result['ll']:.3f} {json.dumps(result)}", flush=True)
                if arguments.out is not None:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
