"""Small fits by ranks that share one GPU, and what they draw.

A process that has used a GPU cannot be forked, so ranks come from a server that has not. What a
rank is to do is a function of this module, with arguments that can be pickled.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_runs import METHODS, STEPS, N, dataset, network, numbers, plan
from small_runs import sharded as spread

import dpbnn
from dpbnn import checkpoint, training
from dpbnn.methods.sgd import SGDProcess
from dpbnn.privacy.noise import NoiseSource

KIND = "cuda"
DEADLINE = 150.0  # seconds of a group; it takes some ten
NCCL, GLOO = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"  # NCCL refuses two ranks on one GPU
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a look for GPUs that uses none
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch.distributed.checkpoint.hf_storage", "gpu_runs"])


def together(size, work, *given, backend=GLOO, killed=False):
    """Return what `work(rank, *given)` returns on each rank; without a backend there is no group.

    Where ranks are to be killed, None stands for those that left nothing.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        args = [(folder, work, rank, size, backend, given) for rank in range(size)]
        ranks = [_SERVER.Process(target=_rank, args=own) for own in args]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + DEADLINE
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            if any(process.exitcode for process in ranks):
                deadline = min(deadline, time.monotonic() + 10.0)  # as torchrun ends the others
            time.sleep(0.01)
        late = [process for process in ranks if process.is_alive()]
        for process in late:
            process.kill()
        for process in ranks:
            process.join()
        files = [folder / f"{rank}.pickle" for rank in range(size)]
        left = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    if killed:
        return left
    for rank, found in enumerate(left):
        assert not isinstance(found, str), f"rank {rank}: {found}"
        assert found is not None, f"rank {rank} ended with {ranks[rank].exitcode} and left nothing"
    return [found[0] for found in left]


def _rank(folder, work, rank, size, backend, given):
    """Do the work of a rank, and leave what it returns, or what it raised as text."""
    torch.set_num_threads(1)
    if backend is not None:
        bound = torch.device(KIND, 0) if "nccl" in backend else None  # connects at once
        dist.init_process_group(
            backend, store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size,
            timeout=timedelta(seconds=DEADLINE / 2), device_id=bound,
        )  # fmt: skip
    try:
        left = (work(rank, *given),)
    except Exception:
        left = traceback.format_exc()
    (folder / f"{rank}.new").write_bytes(pickle.dumps(left))
    (folder / f"{rank}.new").rename(folder / f"{rank}.pickle")
    os._exit(0)


def fit(name="sgd", sharded=False, **options):
    """Fit on the GPU, a whole network or one that is spread over ranks."""
    settings = {"method": METHODS[name], "plan": plan(), "progress": False, **options}
    if not sharded:
        return dpbnn.fit(network(name), dataset(), device=KIND, **settings)
    return dpbnn.fit(spread(network(name), KIND), dataset(), **settings)


@contextlib.contextmanager
def drawn_noise():
    """Collect the noise of every release that this process adds, by name, without the sums."""
    found, original = [], NoiseSource.add

    def add(self, tensors, std, dtype=None, **at):
        zeros = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in tensors.items()}
        again = NoiseSource.from_key(self.key, self.step, purpose=self._purpose)
        original(again, zeros, std, dtype, **at)
        found.append({name: value.cpu() for name, value in zeros.items()})
        return original(self, tensors, std, dtype, **at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseSource, "add", add)
        yield found


def traced(rank, runs, folder):
    """Make fits one after the other; of each return noise, numbers (if all are here), statement."""
    left = []
    for number, options in enumerate(runs):
        here = folder / f"{number}"
        with drawn_noise() as noise:
            posterior = fit(out=here, **options)
        posterior_numbers = None
        if options.get("sharded"):
            posterior.save(folder / f"saved {number}")
        else:
            posterior_numbers = numbers(posterior)
        left.append((noise, posterior_numbers, posterior.privacy.to_dict()))
    return left


def one_of(rank, runs, folder):
    """The same without any group, and operation by operation, as ranks do it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training._Run, "_captured", lambda self: None)
        return traced(rank, runs, folder)


def killed_at(rank, folder, sharded, exact):
    """Train, and let rank 1 be killed after step 4; checkpoints come after steps 2 and 4."""
    repeating(exact)
    update = SGDProcess.update

    def dying(self, state, release):
        state = update(self, state, release)
        if state.steps == 4 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Keys, "new", classmethod(lambda cls: fixed_keys()))
        patch.setattr(SGDProcess, "update", dying)
        fit(sharded=sharded, out=folder, checkpoint_every=2)


def repeating(exact):
    """Let torch repeat sums bit for bit, if so; cuBLAS reads its setting when it begins."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(exact)


def fixed_keys():
    return checkpoint.Keys("name", *(bytes([i]) * 32 for i in range(3)))


def gone_on(rank, folder, saved, sharded, exact, resume):
    """Train to the end, and save; without `resume` from the start, with the same keys."""
    repeating(exact)
    with pytest.MonkeyPatch.context() as patch:
        if not resume:
            patch.setattr(checkpoint.Keys, "new", classmethod(lambda cls: fixed_keys()))
        posterior = fit(sharded=sharded, out=folder, checkpoint_every=2, resume=resume)
    if sharded or rank == 0:
        posterior.save(saved)
    return posterior.privacy.to_dict()


def replayed(rank, names, sharded):
    """Run methods on the data and on a neighbour; return what passed, and distances."""
    chosen, found = plan(batch_size=24, steps=4), []
    for name in names:
        model = spread(network(name), KIND) if sharded else network(name)().to(KIND)
        result = dpbnn.replay(METHODS[name], dataset(), 7, model=model, plan=chosen)
        found.append((result.passed, result.differences, result.distances, str(result)))
    return found


def opened(rank, sharded, saved):
    """Train without noise; return the numbers, those of a sharded network from its file."""
    free = dpbnn.open_plan(n=N, batch_size=12, steps=STEPS)
    posterior = fit(sharded=sharded, plan=free, debug_seed=3)
    if not sharded:
        return numbers(posterior)
    posterior.save(saved)
    return None


def elsewhere(rank):
    """Say what is refused where a network is on another device than the mesh."""
    with pytest.raises(ValueError, match="of a sharded network are where its mesh is") as refused:
        fit(sharded=True, device="cpu" if KIND == "cuda" else "meta")
    return str(refused.value)
