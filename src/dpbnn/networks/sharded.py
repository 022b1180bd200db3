"""Networks whose parameters are spread over ranks by `fully_shard` (FSDP2 of torch).

Between passes such a network looks like any other one, but that its parameters are DTensors. During
a pass it is the one that `fully_shard` has made: its hooks gather the parameters layer by layer,
and give them back.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from dpbnn.privacy.group import Group
from dpbnn.privacy.module_state import origin
from dpbnn.privacy.slices import Slices

__all__ = ["Sharding", "Whole", "is_sharded", "local", "moved", "parts_of"]

Joined = Callable[[], contextlib.AbstractContextManager[Group]]
_STATE = "__composable_api_state_key"  # how the attributes begin that `fully_shard` adds
_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def is_sharded(network: nn.Module) -> bool:
    """Return whether parameters of a network are spread over ranks."""
    module = sys.modules.get("torch.distributed.tensor")  # otherwise there are no such tensors
    return module is not None and any(isinstance(p, module.DTensor) for p in network.parameters())


def local(parameter: Tensor) -> Tensor:
    """Return this rank's rows of a parameter, which share its memory; a plain one as it is."""
    own: Tensor = getattr(parameter, "_local_tensor", parameter)  # the same object in every call
    return own


def moved(network: nn.Module, device: torch.device | str | None) -> nn.Module:
    """Return a network on a device, if one is given; a sharded one has to be there already."""
    if device is None or not is_sharded(network):
        return network if device is None else network.to(device)
    kinds = {parameter.device.type for parameter in network.parameters()}
    if kinds != {torch.device(device).type}:
        raise ValueError(
            f"device={str(device)!r}: the parameters of a sharded network are where its mesh is, "
            f"and these are on {', '.join(sorted(kinds))}; leave device out, and give "
            f"init_device_mesh the device"
        )
    return network


class Whole:
    """How a network is run and differentiated whose parameters are all here."""

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Let the network be run, and differentiated, in this block."""
        return contextlib.nullcontext()

    def gradients(self, value: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients of a value, of this rank's rows."""
        return list(torch.autograd.grad(value, leaves, allow_unused=True))

    def mine(self, sums: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return this rank's rows of sums by parameter."""
        return dict(sums)

    def norm(self, own: Tensor) -> Tensor:
        """Return the norm over all ranks, given that of this rank's rows."""
        return own

    def shell(self) -> nn.Module | None:
        """Return a copy of the network without values, where it is needed."""
        return None

    def runnable(self, network: nn.Module) -> nn.Module:
        """Return a module that can be called as it is."""
        return network

    def identity(self, network: nn.Module) -> tuple[Any, list[Tensor]]:
        """Return what a digest of the network is made of, and the tensors that are trained."""
        return network, [p for p in network.parameters() if p.requires_grad]


class _Runnable(nn.Module):
    """A sharded network that can be called as it is, for a look at its outputs."""

    def __init__(self, sharding: Sharding) -> None:
        super().__init__()
        self.network, self._gathered = sharding.network, sharding.gathered

    def forward(self, *inputs: Any, **named: Any) -> Any:
        modes = [(module, module.training) for module in self.network.modules()]
        self.network.eval()
        try:
            with self._gathered():
                return self.network(*inputs, **named)
        finally:
            for module, mode in modes:
                module.training = mode

    def train(self, mode: bool = True) -> Self:
        """Leave the network's modes as they are."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@contextlib.contextmanager
def parts_of(network: nn.Module, group: Group, joined: Joined) -> Iterator[Whole]:
    """Give how a network is run; afterwards a sharded one is again what `fully_shard` has made.

    Args:
        network: any one.
        group: the ranks.
        joined: see `Sharding`.
    """
    if not is_sharded(network):
        yield Whole()
        return
    sharding = Sharding(network, group, joined)
    try:
        yield sharding
    finally:
        sharding.close()


class Sharding(Whole):
    """A network on which `fully_shard` was called, over all ranks of a group.

    Args:
        network: its trainable parameters have rows on all ranks. From now on, and until `close`,
            it looks like a plain one outside `gathered`.
        group: the ranks.
        joined: gives a group of them after the run, which lasts as long as a block.
    """

    def __init__(self, network: nn.Module, group: Group, joined: Joined) -> None:
        self.network, self.group, self.joined = network, group, joined
        named = {n: p for n, p in network.named_parameters() if p.requires_grad}
        self._check(named)
        self.slices = Slices({n: p.shape for n, p in named.items()}, group.rank, group.size)
        self._entries: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._kinds: list[tuple[nn.Module, type]] = []
        self._take()

    def _check(self, named: Mapping[str, Tensor]) -> None:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor, Shard

        if not any(isinstance(module, FSDPModule) for module in self.network.modules()):
            raise ValueError(
                "model: its parameters are DTensors, and fully_shard was not called on it; tensor "
                "parallelism is not supported, use torch.distributed.fsdp.fully_shard"
            )
        plain: list[tuple[str, str]] = []
        for name, parameter in self.network.named_parameters():
            if not isinstance(parameter, DTensor):
                if parameter.requires_grad:
                    raise ValueError(
                        f"model: {name!r} is trained and not sharded, while others are; call "
                        f"fully_shard on the whole network too, or freeze it"
                    )
                plain.append((name, parameter.device.type))
                continue
            mesh = parameter.device_mesh
            size, kind = self.group.size, mesh.device_type
            if mesh.size() != size or mesh.ndim != 1 or kind not in ("cpu", "cuda"):
                raise ValueError(
                    f"model: {name!r} is sharded over {mesh}; use one mesh of all {size} ranks, "
                    f"init_device_mesh('cpu', ({size},)) or init_device_mesh('cuda', ({size},))"
                )
            if tuple(parameter.placements) != (Shard(0),):
                raise ValueError(
                    f"model: {name!r} is placed as {parameter.placements}; leave "
                    f"shard_placement_fn out of fully_shard"
                )
        for name, place in plain:
            if place != kind:
                raise ValueError(
                    f"model: {name!r} is on {place}, and others are sharded over a mesh of {kind}; "
                    f"move the network there before fully_shard"
                )
        for module in self.network.modules():
            if isinstance(module, FSDPModule):
                policy = module._get_fsdp_state()._mp_policy
                if (policy.param_dtype, policy.output_dtype) != (None, None):
                    raise ValueError(
                        "model: was sharded with mixed precision; leave mp_policy out of "
                        "fully_shard"
                    )

    @property
    def mesh(self) -> Any:
        """The ranks, as torch's tensors know them."""
        return next(p for p in self.network.parameters() if hasattr(p, "device_mesh")).device_mesh

    def shell(self) -> nn.Module:
        """Return a copy of the network in which sharded parameters have a shape and no values."""
        memo: dict[int, Any] = {}
        for parameter in self.network.parameters():
            if hasattr(parameter, "to_local"):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        return copy.deepcopy(self.network, memo)

    def all_slices(self) -> Slices:
        """Return which rows this rank has of all sharded parameters, frozen ones too."""
        named = self.network.named_parameters()
        shapes = {name: p.shape for name, p in named if hasattr(p, "to_local")}
        return Slices(shapes, self.group.rank, self.group.size)

    def frozen(self) -> dict[str, str]:
        """Return digests of the sharded parameters that are not trained; all ranks call it."""
        found = {}
        for name, parameter in self.network.named_parameters():
            if hasattr(parameter, "to_local") and not parameter.requires_grad:
                value: Any = parameter
                whole = value.full_tensor().cpu().contiguous().view(torch.uint8).numpy()
                found[name] = hashlib.sha256(whole.data).hexdigest()
        return found

    def runnable(self, network: nn.Module) -> nn.Module:
        """Return a module that can be called as it is, by all ranks alike."""
        return _Runnable(self)

    def identity(self, network: nn.Module) -> tuple[Any, list[Tensor]]:
        """Return what a digest of the network is made of; all ranks call it."""
        shell = self.shell()
        return (shell, self.frozen()), [p for p in shell.parameters() if p.is_meta]

    def close(self) -> None:
        """Make the network again what `fully_shard` has made of it."""
        self._give()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Let the network be run, and differentiated, in this block; all ranks do the same."""
        sharded: list[Any] = [module for module, _ in self._kinds]
        self._give()
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()
            self._take()

    def gradients(self, value: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients of a value that is the same on all ranks, of this rank's rows."""
        value.backward()  # type: ignore[no-untyped-call]
        found = [None if leaf.grad is None else local(leaf.grad) for leaf in leaves]
        for parameter in self.network.parameters():
            parameter.grad = None
        return found

    def mine(self, sums: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return this rank's rows of sums by parameter."""
        return {name: self.slices.own(name, value).clone() for name, value in sums}

    def norm(self, own: Tensor) -> Tensor:
        """Return the norm over all ranks, given that of this rank's rows."""
        whole: Tensor = torch.linalg.vector_norm(self.group.gather(own.double().reshape(1)))
        return whole

    def _take(self) -> None:
        """Take off what `fully_shard` has put on the modules; `_give` puts it on again."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.network.modules():
            held, kind = vars(module), cast(Any, type(module))
            for name in _HOOKS:
                hooks = held[name]
                ours = [key for key, hook in hooks.items() if _of_torch(hook)]
                for entries in (hooks, held.get(f"{name}_with_kwargs", {})):
                    self._without(entries, [key for key in ours if key in entries])
            if isinstance(module, FSDPModule):
                self._without(held, [name for name in held if name.startswith(_STATE)])
                self._kinds.append((module, kind))
                module.__class__ = kind.__mro__[kind._orig_cls_mro_index]

    def _without(self, entries: dict[Any, Any], keys: list[Any]) -> None:
        self._entries.append((entries, {key: entries.pop(key) for key in keys}))

    def _give(self) -> None:
        for entries, taken in self._entries:
            entries.update(taken)
        for module, kind in self._kinds:
            module.__class__ = kind
        self._entries, self._kinds = [], []


def _of_torch(hook: Any) -> bool:
    return origin(getattr(hook, "hook", hook)).startswith("torch.distributed.")
