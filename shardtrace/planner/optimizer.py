"""The cost of an optimizer: the bytes of its state, and the bytes that a step reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIDE = 64  # of the matrix on which an optimizer is tried


class OptimizerCost(NamedTuple):
    """For each element of a parameter: ``state`` bytes that are kept between steps, ``moved`` bytes that a step reads
    and writes, ``temporary`` bytes that it needs if it treats all parameters at once, as torch does on a GPU."""

    name: str
    state: float
    moved: float
    temporary: float


class _Moved(TorchDispatchMode):
    """Adds up the bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        self.bytes += sum(t.nbytes for t in _tensors((args, kwargs, result)))
        self.made += sum(t.nbytes for t in _tensors(result) if t.untyped_storage().data_ptr() not in before)
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.numel() >= SIDE]


def optimizer_cost(optimizer: Callable[..., torch.optim.Optimizer] | str) -> OptimizerCost:
    """Tries an optimizer on a small fp32 matrix.

    Args:
        optimizer: a class of optimizers, a partial one such as ``functools.partial(torch.optim.SGD, momentum=0.9)``, or
            the name of one of ``torch.optim``.

    Raises:
        ValueError: if there is no optimizer of this name.
    """
    make: Any = getattr(torch.optim, optimizer, None) if isinstance(optimizer, str) else optimizer
    if not callable(make):
        raise ValueError(f"torch.optim has no optimizer {optimizer!r}: pass its class")
    parameter = torch.nn.Parameter(torch.ones(SIDE, SIDE))
    parameter.grad = torch.ones_like(parameter)
    found = make([parameter], lr=1e-3)
    found.step()  # makes its state
    with _Moved() as moved:
        found.step()
    state = sum(t.nbytes for t in _tensors(list(found.state.values())))
    numel = parameter.numel()
    return OptimizerCost(type(found).__name__, state / numel, moved.bytes / numel, moved.made / numel)
