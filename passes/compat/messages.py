"""Operators of torch.distributed where no message may be sent: on fake tensors, and in a trial of a module."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

FUNCTIONAL = frozenset({"_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
NAMESPACES = FUNCTIONAL | {"c10d"}


class NoMessages(TorchDispatchMode):
    """Collectives have results of the right shapes at once, and this rank waits for no other."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in NAMESPACES:
            return func(*args, **kwargs or {})
        return unsent(func, *args, **kwargs or {}) if func.namespace == "c10d" else _by_shape(func, args, kwargs or {})


def unsent(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an operator of c10d. Its outputs get what this rank sends, or zeros; all that it may write into
    counts as written. (Torch's own kernels for this draw Python's random numbers.)"""
    sent = _tensors((args[1:], kwargs))
    for t in _tensors(args[:1]) if not func.__name__.startswith("send") else ():
        if func._schema.arguments[0].name.startswith("output") or func.__name__.startswith("recv"):
            like = [s for s in sent if (s.shape, s.dtype) == (t.shape, t.dtype)]
            t.detach().copy_(like[0]) if like else t.detach().zero_()
        increment_version(t)
    work = FakeWork().boxed()
    return (None, work, (args[0], work))[len(func._schema.returns)]


def _by_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Zeros of the shapes that a functional collective gives."""
    [device, *_] = (t.device for t in _tensors((args, kwargs)))
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    return pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device=device), func(*args, **kwargs))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
