"""What per-example clipping costs, side by side with other libraries, in one interleaved run.

    python -m benchmarks.clipping [--device cuda] [--rounds 60] [--models mlp,cnn]
        [--contenders dpbnn] [--json FILE]

A step is a whole training step: forward, backward, clipping, sum, noise, and the update of the
parameters by torch.optim.SGD. Times are ratios to the plain non-private step of the same model;
every round runs every contender, in changing order, and the median over rounds of the ratio within
a round is reported. As in training, a contender has a process of its own, idle while others run,
and a timed step follows an untimed one, so that it does not pay for what others left in heap and
caches (no untimed one for contenders above ten times the plain step). Memory is the peak of one
step above what stays allocated between steps (model, data, gradients).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpbnn

CLIP, SIGMA = 1.0, 1.0
RATE = 1e-6
Step = Callable[[], object]


class Encoder(nn.Module):
    """A transformer encoder of 4 layers, width 256, over sequences of 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)).mean(1))


def images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,))


def tokens(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 1000, (count, 128)), torch.randint(0, 10, (count,))


MODELS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": ("MLP 784-1200-1200-10, batch 256", dpbnn.mlp, lambda: images(256)),
    "cnn": ("CNN of the DP-BNN paper, batch 256", dpbnn.cnn, lambda: images(256)),
    "gaussian": (
        "Gaussian MLP 784-1200-1200-10, batch 256, (mu, rho) clipped jointly",
        lambda: dpbnn.to_gaussian(dpbnn.mlp()),
        lambda: images(256),
    ),
    "gaussian-weights": (
        "Gaussian MLP 784-1200-1200-10, batch 256, drawn weights clipped",
        lambda: dpbnn.to_gaussian(dpbnn.mlp()),
        lambda: images(256),
    ),
    "encoder": ("Transformer encoder 4 x 256, sequence 128, batch 32", Encoder, lambda: tokens(32)),
}


def plain(name: str, model: nn.Module, x: Tensor, y: Tensor, noise: bool) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(name: str, model: nn.Module, x: Tensor, y: Tensor, noise: bool) -> Step:
    space = "parameters" if name == "gaussian" else "weights"
    attached = dpbnn.attach(model, "categorical", space=space)
    gate = dpbnn.Gate(clip=CLIP, noise_multiplier=SIGMA if noise else 0.0)
    gate.reserve(10**5)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    parameters = dict(model.named_parameters())

    def step() -> None:
        contributions = attached(x, y)
        release = gate(contributions)
        if name == "gaussian-weights":
            release = in_parameters(model, release, contributions.draws[0])
        descend(optimizer, parameters, release)

    return step


def descend(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], g: dict[str, Tensor]
) -> None:
    for path, gradient in g.items():
        parameters[path].grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def in_parameters(
    model: nn.Module, release: dict[str, Tensor], draw: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of mu and rho that a release of weight gradients implies."""
    found = {}
    for path, gradient in release.items():
        layer, which = path.rsplit(".", 1)
        scale = model.get_submodule(layer).at_with_scale({which: draw[path]})[1][which]
        found |= {f"{path}_mu": gradient, f"{path}_rho": scale.mul_(gradient)}
    return found


def vmap(name: str, model: nn.Module, x: Tensor, y: Tensor, noise: bool) -> Step:
    named = dict(model.named_parameters())
    parameters = {k: v.detach() for k, v in named.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(model, parameters, (x.unsqueeze(0),))
        return F.cross_entropy(out, y.unsqueeze(0))

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0), randomness="same")

    def step() -> None:
        g = gradients(parameters, x, y)
        norms = torch.stack([v.flatten(1).norm(dim=1) for v in g.values()]).norm(dim=0)
        w = (CLIP / norms).clamp(max=1.0)
        sums = {k: torch.tensordot(w, v, 1) for k, v in g.items()}
        if noise:
            for v in sums.values():
                v += SIGMA * CLIP * torch.randn_like(v)
        descend(optimizer, named, sums)

    return step


def opacus_hooks(name: str, model: nn.Module, x: Tensor, y: Tensor, noise: bool) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model)
    sgd = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    sigma = SIGMA if noise else 0.0
    optimizer = DPOptimizer(
        sgd, noise_multiplier=sigma, max_grad_norm=CLIP, expected_batch_size=len(x)
    )

    def step() -> None:
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus_ghost(name: str, model: nn.Module, x: Tensor, y: Tensor, noise: bool) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=CLIP, use_ghost_clipping=True
    )
    sgd = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    sigma = SIGMA if noise else 0.0
    optimizer = DPOptimizerFastGradientClipping(
        sgd, noise_multiplier=sigma, max_grad_norm=CLIP, expected_batch_size=len(x)
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step() -> None:
        criterion(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CONTENDERS: dict[str, Callable[..., Step]] = {
    "dpbnn": ours,
    "Opacus ghost": opacus_ghost,
    "Opacus hooks": opacus_hooks,
    "torch.func vmap": vmap,
}


def build(name: str, contender: str, noise: bool, device: str) -> Step:
    torch.manual_seed(0)
    _, make, data = MODELS[name]
    model = make().to(device)
    x, y = (t.to(device) for t in data())
    return {"plain": plain, **CONTENDERS}[contender](name, model, x, y, noise)


def timed(step: Step, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def serve(pipe: Connection, name: str, contender: str, noise: bool, device: str) -> None:
    """Take steps of one contender when asked to, and send what they took."""
    prepare(device)
    step: Step | None = None
    for question in iter(pipe.recv, "end"):
        try:
            step = step or build(name, contender, noise, device)
            if question == "memory":
                pipe.send(peak(step, device))
                continue
            if question == "follow":
                step()
            pipe.send(timed(step, device))
        except Exception as error:
            pipe.send(type(error).__name__)


def prepare(device: str) -> None:
    if device == "cpu":
        torch.set_num_threads(min(2, os.cpu_count() or 1))
        torch.empty(31 * 2**18)  # keeps glibc from giving large buffers back after every step


class Runner:
    """A contender in a process of its own, which waits while the others run."""

    def __init__(self, name: str, contender: str, noise: bool, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        arguments = (other, name, contender, noise, device)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        other.close()

    def ask(self, question: str) -> float:
        self._pipe.send(question)
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return float(answer)

    def end(self) -> None:
        if self._process.is_alive():
            self._pipe.send("end")
        self._process.join()


def start(name: str, contenders: list[str], device: str) -> dict[tuple[str, bool], Runner]:
    """Return the plain step and every contender that can run the model, without and with noise."""
    keys = [("plain", False), *((c, noise) for c in contenders for noise in (False, True))]
    runners = {(c, noise): Runner(name, c, noise, device) for c, noise in keys}
    for (contender, noise), runner in list(runners.items()):
        try:
            runner.ask("step")
        except (EOFError, RuntimeError) as error:
            runners.pop((contender, noise)).end()
            if not noise:
                print(f"  {contender} cannot run {name}: {error or 'it ended'}", flush=True)
    return runners


def times(
    runners: dict[tuple[str, bool], Runner], rounds: int
) -> tuple[float, dict[str, dict[str, float]]]:
    """Return the plain step's seconds, and per contender its ratios without and with noise."""
    seconds: dict[tuple[str, bool], dict[int, float]] = {key: {} for key in runners}
    slow: set[tuple[str, bool]] = set()
    chance = random.Random(0)
    for index in range(rounds):
        order = list(runners)
        chance.shuffle(order)
        for key in order:
            if key not in slow or index % 20 == 0:
                question = "step" if key in slow else "follow"
                seconds[key][index] = runners[key].ask(question)
        if index == 0:
            slow = {key for key in runners if seconds[key][0] > 10 * seconds["plain", False][0]}
    plain = seconds["plain", False]
    ratios: dict[str, dict[str, float]] = {}
    for (contender, noise), values in seconds.items():
        label = "with noise" if noise else "clip only"
        ratio = statistics.median(value / plain[index] for index, value in values.items())
        ratios.setdefault(contender, {})[label] = ratio
    return statistics.median(plain.values()), ratios


def peak(step: Step, device: str) -> float:
    """Return the most megabytes a step needs above what stays between steps."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - before
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        step()
        used = _status("VmHWM") - before
    return used / 2**20


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]


def report(name: str, contenders: list[str], rounds: int, device: str) -> dict[str, object]:
    title = MODELS[name][0]
    runners = start(name, contenders, device)
    base, ratios = times(runners, rounds)
    rows: dict[str, dict[str, float | None]] = {c: {**ratios[c]} for c in ratios}
    for (contender, noise), runner in runners.items():
        if noise or contender == "plain":
            rows[contender]["memory MB"] = runner.ask("memory")
        runner.end()
    print(f"\n**{title}** (plain step {1e3 * base:.1f} ms)\n")
    print("| | clip only | with noise | peak memory |\n|---|---|---|---|")
    plain_memory = rows["plain"]["memory MB"]
    for contender, row in rows.items():
        used = row.get("memory MB")
        share = f"{used:.0f} MB ({used / plain_memory:.2f} x)" if used and plain_memory else "-"
        values = [f"{row[k]:.2f}" if k in row else "-" for k in ("clip only", "with noise")]
        print(f"| {contender} | {' | '.join(values)} | {share} |", flush=True)
    return {"title": title, "plain_ms": 1e3 * base, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prepare(arguments.device)
    if arguments.device == "cpu":
        print(f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}")
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = {
        name: report(name, arguments.contenders.split(","), arguments.rounds, arguments.device)
        for name in arguments.models.split(",")
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
