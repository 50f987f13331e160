"""Stand-ins that let lightning-thunder 0.2.6 be imported on torch 2.13 and later.

Thunder looks up every method of ``torch.Tensor`` that it knows when it is imported, to map it to its own symbol
or to mark it as unsupported. torch 2.13 removed named tensors, and with them five of those methods, so that
``import thunder`` raises AttributeError. :func:`install` sets a stand-in for each that is missing: a function that
bears the method's name (Thunder checks it) and raises when it is called, as the removed method would.

Where nothing is missing (torch up to 2.12, or a Thunder that no longer asks), nothing is done.

torch 2.13 also gave two collectives new names; :data:`all_gather_single` and :data:`reduce_scatter_single` are them
under whichever name this torch has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REMOVED_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


def _stand_in(name: str) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError(f"torch.Tensor.{name} was removed from torch {torch.__version__} (named tensors)")

    method.__name__ = name
    method.__qualname__ = f"Tensor.{name}"
    return method


def install() -> tuple[str, ...]:
    """Adds the missing methods to ``torch.Tensor`` and returns their names (empty where nothing is missing)."""
    missing = tuple(name for name in REMOVED_METHODS if not hasattr(torch.Tensor, name))
    for name in missing:
        setattr(torch.Tensor, name, _stand_in(name))
    return missing
