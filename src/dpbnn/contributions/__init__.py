"""Per-example contributions: norms and weighted sums, not matrices of gradients.

The package itself is callable: `dpbnn.contributions(model, likelihood, x, y)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from dpbnn.contributions.attach import Attached, attach, contributions
from dpbnn.contributions.dense import Contributions, DenseContributions, UnsupportedModel
from dpbnn.contributions.recorded import NetworkContributions

__all__ = [
    "Attached",
    "Contributions",
    "DenseContributions",
    "NetworkContributions",
    "UnsupportedModel",
    "attach",
    "contributions",
]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Contributions:
        """Return the contributions of one batch; see `contributions`."""
        return contributions(*args, **options)


sys.modules[__name__].__class__ = _Callable
