"""Keys that are equal for two calls of blocks only if both trace to the same lines, apart from the names of tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any

from passes.compat import shape_of, traced_device

import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# nn.Module's own, which are compared in another way or do not matter to a forward
OWN = frozenset(vars(nn.Module())) - {"training"}
# Marks a module whose activations are recomputed in backward: all of them, or the cheap ones.
CHECKPOINTED = {"full": "_shardtrace_checkpointed", "cheap": "_shardtrace_checkpointed_cheap"}
PLAIN = (bool, int, float, complex, str)


class CannotShare(Exception):
    """Why a block is traced by itself."""


def recomputed(module: nn.Module) -> str | None:
    """A module's own mark: "full", "cheap", or None."""
    return next((what for what, mark in CHECKPOINTED.items() if mark in module.__dict__), None)


def structure(module: nn.Module) -> Hashable:
    """Equal for two modules that differ only in the values of parameters and buffers, and of plain attributes, and in
    what is recomputed of them. What is recomputed of their submodules is equal.

    Raises CannotShare if tracing the module may do more than its lines tell.
    """
    places: dict[int, int] = {}  # tensors that are shared inside the block

    def tensor(t: torch.Tensor | None) -> Hashable:
        if t is None:
            return None
        place = places.setdefault(id(t), len(places))
        return place, type(t), tuple(t.shape), t.dtype, str(traced_device(t)), t.requires_grad

    def value(v: Any) -> Hashable:
        if v is None or isinstance(v, (*PLAIN, type, torch.dtype, torch.device, Enum)):
            return type(v), v
        if isinstance(v, (list, tuple, set, frozenset)):
            return type(v), tuple(value(x) for x in v)
        if isinstance(v, dict):
            return type(v), tuple((value(k), value(x)) for k, x in v.items())
        return tensor(v) if isinstance(v, torch.Tensor) else (type(v), id(v))

    def attribute(v: Any) -> Hashable:
        return (type(v),) if isinstance(v, PLAIN) else value(v)

    def visit(m: nn.Module) -> Hashable:
        if "_shardtrace" in m.__dict__:
            raise CannotShare(f"{type(m).__name__} has a sharding of its own")
        for hooks in HOOKS:
            if getattr(m, hooks):
                raise CannotShare(f"{type(m).__name__} has hooks")
        if "forward" in m.__dict__:
            raise CannotShare(f"{type(m).__name__} has a forward of its own")
        ignored = OWN.union(CHECKPOINTED.values()) if m is module else OWN
        others = ((k, attribute(v)) for k, v in sorted(m.__dict__.items()) if k not in ignored)
        return (
            type(m),
            tuple((k, tensor(p)) for k, p in m._parameters.items()),
            tuple((k, tensor(b)) for k, b in m._buffers.items()),
            tuple(others),
            tuple((k, None if child is None else visit(child)) for k, child in m._modules.items()),
        )

    return visit(module)


def inputs_key(flat: Sequence[Any], spec: Any) -> Hashable:
    """Equal for two lists of inputs that differ only in the values of tensors, under the same modes of torch.

    Raises CannotShare for an input that may hold a state.
    """
    places: dict[str, int] = {}

    def one(x: Any) -> Hashable:
        if isinstance(x, TensorProxy):
            place = places.setdefault(x.name, len(places))
            detached = ProxyTag.DETACHED_AUTOGRAD_GRAPH in x.tags
            return place, type(x), shape_of(x), x.dtype, str(x.device), x.requires_grad, detached
        if x is None or (isinstance(x, (*PLAIN, type, torch.dtype, torch.device, Enum)) and not isinstance(x, Proxy)):
            return type(x), x
        raise CannotShare(f"takes a {type(x).__name__}")

    data = get_compile_data()
    modes = data.is_grad_enabled, torch.is_grad_enabled(), torch.get_default_dtype(), str(data.autocast_stack.stack)
    return str(spec), tuple(map(one, flat)), modes
