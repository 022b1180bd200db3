"""Sees to it that a run changes nothing of a network and a likelihood but what was released."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpbnn.contributions.attach import describe, refuse_changes
from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.likelihoods import Likelihood
from dpbnn.methods.method import AnyProcess
from dpbnn.methods.state import State
from dpbnn.networks import to_plain
from dpbnn.networks.layers import registered, rules_in
from dpbnn.networks.sharded import is_sharded, local
from dpbnn.posteriors import Posterior
from dpbnn.privacy.checks import first_line
from dpbnn.privacy.module_state import Found, ModuleState, change, described, origin

__all__ = ["Watch", "taken"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def taken(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the network that `fit` trains: a copy, or what a function makes.

    A sharded network is not copied, and trained as it is.

    Args:
        model: the network or the function.
    """
    network = model
    if isinstance(model, nn.Module) and not is_sharded(model):
        try:
            network = copy.deepcopy(model)
        except Exception as error:
            raise _uncopied(type(model).__name__, error) from None
    elif not isinstance(model, nn.Module):
        network = model()
    for path, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModel(
                f"{describe(network, path)} is scripted, so its layers cannot be recorded; give "
                f"the module as it was before torch.jit"
            )
        if any(map(nn.parameter.is_lazy, module.parameters(recurse=False))):
            raise UnsupportedModel(
                f"{describe(network, path)} has parameters without a shape yet; run the network "
                f"once on a public example, such as zeros, before training"
            )
    return network


def _uncopied(what: str, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"{what} cannot be copied ({first_line(error)}); hold no results of computations, files or "
        f"locks in them"
    )


class Watch:
    """The network and the likelihood as they are before any data, and a look at them later.

    A module can keep what it sees, in a buffer, an attribute, a list, a hook or its class, and a
    likelihood can too. That is refused, here and by the probe; and posteriors are made of `network`
    and `likelihood`, which are copies that no data goes through.

    Args:
        network: the network that is trained.
        likelihood: of the targets.
        shell: a copy without values, where parameters are spread over ranks.

    Attributes:
        network: a copy.
        likelihood: a copy.
    """

    def __init__(
        self, network: nn.Module, likelihood: Likelihood, shell: nn.Module | None = None
    ) -> None:
        _refuse_hooks(network)
        try:
            self.network, self.likelihood = copy.deepcopy((shell or network, likelihood))
        except Exception as error:
            names = f"{type(network).__name__} or {type(likelihood).__name__}"
            raise _uncopied(names, error) from None
        self._state = ModuleState(model=network, likelihood=likelihood, rules=rules_in(network))
        self._before = self._state.before
        # Plain layers of a user's own, which posteriors have in place of Gaussian ones.
        kinds = {registered(module).plain for module in network.modules()} - {None}
        foreign = any(not origin(kind).startswith("torch.") for kind in kinds)
        self._plain = described(model=to_plain(network)) if foreign else {}
        trained = (local(p) for p in network.parameters() if p.requires_grad)
        self._released = self._state.paths(trained)

    def check(self) -> None:
        """Raise where something has changed."""
        refuse_changes(self._state.differences(thorough=True))

    def begin(self, process: AnyProcess[Any], state: State) -> None:
        """Watch what a process trains from now on."""
        likelihood = getattr(getattr(process, "attached", None), "likelihood", None)
        self._tensors = list(state.parameters.values())
        self._released |= self._state.paths(self._tensors)
        self._state = ModuleState(
            model=process.model, likelihood=likelihood, rules=rules_in(process.model)
        )
        self._begun = False

    def contributed(self) -> None:
        """Raise where contributions have changed something; the first time bit by bit."""
        refuse_changes(self._state.differences(thorough=not self._begun))
        self._begun = True

    def updated(self) -> None:
        """Take over the values of the tensors that an update moves, and of no others."""
        self._state.released(self._tensors)

    def checked(self, posterior: Posterior) -> Posterior:
        """Return a posterior that holds nothing but what was there before, and releases."""
        self.check()
        found = described(model=posterior.model, likelihood=posterior.likelihood)
        for path in found:
            if not self._allowed(path, found):
                owner, kind, attribute = change(path, found)
                raise UnsupportedModel(
                    f"{owner} of the posterior has another {kind} {attribute!r} than before the "
                    f"training, which no release has decided; make posteriors of "
                    f"self.problem.rebuilt(...) and self.problem.likelihood"
                )
        return posterior

    def _allowed(self, path: str, found: dict[str, Found]) -> bool:
        here = found[path]
        name = path if here.kind == "submodule" else here.owner
        owner, before = found[name], self._before.get(name)
        if path in self._released or path == f"{here.owner}.training":
            return True
        if here.owner == "likelihood" and owner.token[0].startswith("dpbnn."):
            return not here.digest  # a learned noise
        if before is not None and before.token == owner.token:
            return path in self._before and self._before[path].token == here.token
        plain = self._plain.get(name)
        if plain is not None and plain.token == owner.token:
            mean = here.kind == "parameter" and f"{path}_mu" in self._released
            return mean or (path in self._plain and self._plain[path].token == here.token)
        # A layer in place of another, such as a Linear layer at the means of a Gaussian one.
        ours = owner.token[0].startswith(("torch.nn.modules.", "dpbnn."))
        return ours and (here.kind == "parameter" or not here.digest)


def _refuse_hooks(network: nn.Module) -> None:
    for path, module in network.named_modules():
        for kind in _HOOKS:
            for hook in getattr(module, kind, {}).values():
                if not origin(hook).startswith("torch."):
                    raise UnsupportedModel(
                        f"{describe(network, path)} has a hook ({kind.strip('_')}), which would "
                        f"see the data; remove it, or do the same in the module's forward"
                    )
