"""Methods that a sharded model has in place of its class's, or besides them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

from shardtrace.model.classes import Methods
from shardtrace.model.compiled import compiling
from shardtrace.model.state import own_state, part_of, state_of
from shardtrace.training.accumulation import no_sync
from shardtrace.training.full import full_params

from torch import nn


def _no_sync(_: Any) -> Callable[..., AbstractContextManager[None]]:
    @functools.wraps(no_sync)
    def method(self: nn.Module, **kwargs: Any) -> AbstractContextManager[None]:
        return no_sync(self, **kwargs)

    return method


def _generate(original: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Generation of Hugging Face's models, whose shapes change with each token: with whole parameters, by PyTorch."""
    if original is None:
        return None

    @functools.wraps(original)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not own_state(self).holds_shards:
            return original(self, *args, **kwargs)
        with full_params(self, writeback=False):
            return original(self, *args, **kwargs)

    return generate


def register_forward_method(module: nn.Module, name: str) -> None:
    """Lets a sharded module, or a submodule of one, be called by another method than ``forward``.

    ``module.name(...)`` then compiles and runs a step of its own, with whole parameters, like FSDP2's
    ``register_fsdp_forward_method``. Only this object is changed, not its class. A model without such a method stays as
    it is.

    Raises:
        ValueError: if the module is not sharded.
    """
    if state_of(module) is None and part_of(module) is None:
        raise ValueError(f"{type(module).__name__} is not sharded: call shardtrace.fsdp(model) first")
    method = getattr(module, name, None)
    if method is not None:
        setattr(module, name, MethodType(compiling(method.__func__), module))


METHODS: Methods = {"no_sync": _no_sync, "generate": _generate}
