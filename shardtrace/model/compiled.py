"""A sharded module that is called compiles itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from passes.compat.failures import interrupt_of
from passes.compat.versions import functional_transform
from shardtrace.model.state import own_state, part_of, state_of
from shardtrace.model.tracing import recorded
from shardtrace.ranks.consensus import RankMismatchError

import thunder
import torch
from torch import nn


@torch.compiler.disable  # torch.compile(model) leaves a sharded model to Thunder
def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the sharded ``module``, or a part of one, as a jitted module. Its first call jits it."""
    return _run(module, module, module, type(module).__name__, args, kwargs)


def compiling(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of sharded modules and of parts of them. It runs a compiled step of its own while they hold shards."""
    call = recorded(method)

    @functools.wraps(method)
    def compiled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self) or part_of(self)  # None for a plain copy
        if state is None or not state.is_to_run():
            return method(self, *args, **kwargs)
        bound = functools.wraps(method)(lambda *args, **kwargs: call(self, *args, **kwargs))
        return _run(self, (self, compiled), bound, f"{type(self).__name__}.{method.__name__}", args, kwargs)

    return compiled


def _run(
    module: nn.Module,
    key: Hashable,
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    state = own_state(module)
    try:
        return _jitted(module, key, function, name)(*args, **kwargs)
    except RankMismatchError:  # all ranks raise it
        if state.variants is None:
            raise
        state.stop_reading()  # values that this rank or another has read may be the reason
        return _run(module, key, function, name, args, kwargs)
    except RuntimeError as error:
        if (interrupt := interrupt_of(error)) is not None:
            raise interrupt from None
        raise


def _jitted(module: nn.Module, key: Hashable, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The result of ``thunder.jit`` for ``function``, which is kept under ``key``."""
    if (around := _transform_around()) is not None:
        raise RuntimeError(
            f"{around} cannot see into the compiled step of the sharded {name}: call it inside "
            "shardtrace.full_params(model), where the model is a plain one"
        )
    state = own_state(module)
    if key not in state.compiled:
        state.compiled[key] = thunder.jit(function, **state.jit_options(name))
    return state.compiled[key]


def _transform_around() -> str | None:
    """What is about to trace or transform the call of a model, if anything does."""
    if functional_transform() is not None:
        return "a transform of torch.func"
    return "torch.jit.trace" if torch.jit.is_tracing() else None
