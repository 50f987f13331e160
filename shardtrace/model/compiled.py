"""A sharded module that is called without ``thunder.jit`` compiles itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from shardtrace.model.state import own_state
from shardtrace.model.tracing import recorded

import thunder
from torch import nn


def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the sharded ``module``, or a part of one, as a jitted module. Its first call jits it."""
    return _jitted(module, module, module, type(module).__name__)(*args, **kwargs)


def compiling(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of sharded modules and of parts of them. It runs a compiled step of its own while they hold shards."""
    call = recorded(method)

    @functools.wraps(method)
    def compiled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not own_state(self).is_to_run():
            return method(self, *args, **kwargs)
        bound = functools.wraps(method)(lambda *args, **kwargs: call(self, *args, **kwargs))
        return _jitted(self, (self, compiled), bound, f"{type(self).__name__}.{method.__name__}")(*args, **kwargs)

    return compiled


def _jitted(module: nn.Module, key: Hashable, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The result of ``thunder.jit`` for ``function``, which is kept under ``key``."""
    state = own_state(module)
    if key not in state.compiled:
        state.compiled[key] = thunder.jit(function, **state.jit_options(name))
    return state.compiled[key]
