"""What kinds of things the arguments of `fit` are, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpbnn.methods.method import Method
from dpbnn.priors import Prior
from dpbnn.privacy.checks import first_line, quoted
from dpbnn.privacy.group import Group
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan

__all__ = ["alone", "check_kinds"]


def check_kinds(**given: Any) -> None:
    """Raise where an argument of `fit` is of another kind than it must be; None is left out.

    Args:
        **given: any of model, method, plan, prior and device.
    """
    kinds: dict[str, tuple[Any, str]] = {
        "model": (nn.Module | Callable, "a network, or a function that makes one"),
        "method": (Method, "a method's settings, such as dpbnn.SGLD(learning_rate=1e-5)"),
        "plan": (Plan, "what dpbnn.plan(...) or dpbnn.open_plan(...) returns"),
        "prior": (Prior, "a prior, such as dpbnn.Gaussian(1.0)"),
        "ledger": (Ledger, "a ledger, such as dpbnn.Ledger('ledger.jsonl')"),
    }
    for name, value in given.items():
        if name in kinds and value is not None and not isinstance(value, kinds[name][0]):
            raise ValueError(f"{name}={quoted(value)}: must be {kinds[name][1]}")
    device = given.get("device")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = first_line(error).split(". ")[0]
            raise ValueError(
                f"device={quoted(device)}: cannot be used here ({reason}); pass device='cpu'"
            ) from None


def alone(group: Group, what: str, sharded: bool = False) -> Group:
    """Return a group of one process; raises where there are more, or the network is sharded.

    Args:
        group: the processes.
        what: works in one process.
        sharded: whether it is.
    """
    if sharded:
        raise ValueError(f"{what}: does not take a sharded network; use a plain one")
    if group.size > 1:
        raise ValueError(
            f"{what}: works in one process, and {group.size} were started together; start one, or "
            f"use SGD, SGLD, SGHMC, BBP, VI or MCDropout without observers and units"
        )
    return Group()
