"""The hook into ``thunder.jit``: a sharded module enlists its own passes when Thunder traces its forward.

A sharded module's class is a subclass of its former class whose ``forward`` calls :func:`run_forward`. Thunder's
interpreter finds a lookaside for that function, the one below; without Thunder the function's own body runs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from passes.pipeline import Compilation, Pass, pipeline
from shardtrace.state import ATTRIBUTE, ShardedState, state_of

from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import _interpret_call, get_interpreterruntimectx, unwrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx, register_general_jit_lookaside
from torch import nn


def run_forward(forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Runs without Thunder: an error, except inside ``full_params``, where parameters are whole."""
    state = state_of(module)
    assert state is not None
    if not state.unsharded:
        raise RuntimeError(
            f"{type(module).__name__} is sharded and was called without Thunder: wrap it in thunder.jit, "
            "or call it inside shardtrace.full_params(model)"
        )
    return forward(module, *args, **kwargs)


@register_general_jit_lookaside(run_forward)
def _trace_forward(forward: Any, module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Traces the forward at full shapes. All arguments are wrapped by Thunder's interpreter."""
    state = state_of(unwrap(module))
    assert state is not None
    if state.unsharded:
        raise RuntimeError(
            f"a jitted {state.model_name} was called inside full_params: call the model itself, or leave the context"
        )
    state.check_unchanged()
    if state.plan.world_size == 1:
        return _interpret_call(forward, module, *args, **kwargs)

    compilation = _compilation()
    compilation.begin(get_jit_ctx())
    proxied = get_interpreterruntimectx()._proxied_values  # grows until tracing ends
    with state.stand_ins():
        result = _interpret_call(forward, module, *args, **kwargs)
        for value in proxied:
            parameter = state.by_stand_in.get(id(value.original_value))
            if parameter is not None:
                compilation.enlisted.add(value.value.history, parameter)
    compilation.at_end_of_tracing.append(functools.partial(_refuse_values, state, proxied))
    return result


def _compilation() -> Compilation:
    """The compilation that is going on; its passes are enlisted in the jitted function, once."""
    transforms = get_compile_data().transforms
    for transform in transforms:
        if isinstance(transform, Pass):
            return transform.compilation
    compilation = Compilation()
    transforms[:0] = pipeline(compilation)  # the list that thunder.jit goes through after tracing
    return compilation


def _refuse_values(state: ShardedState, proxied: set[Any]) -> None:
    for value in proxied:
        entry = state.by_shard.get(id(value.original_value))
        if entry is not None:
            raise RuntimeError(
                f"parameter {entry.name!r} of {state.model_name} is used outside the forward of the sharded module, "
                "where it is this rank's shard: use it inside, or apply fsdp() to the module that uses it"
            )


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` named ``FSDP<cls>`` whose forward is traced with full parameters.

    Keeps the signature and docstring of ``forward``. Instances copy deeply and refuse to be pickled.
    """
    original = cls.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_forward(original, self, *args, **kwargs)

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} is sharded and cannot be pickled: it holds a process group and this rank's shards. "
            "Save shardtrace.full_state_dict(model), or model.state_dict() for the shards"
        )

    namespace = {
        "forward": forward,
        "__deepcopy__": __deepcopy__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": cls.__module__,
        "__qualname__": f"FSDP{cls.__qualname__}",
        "__doc__": cls.__doc__,
    }
    return type(f"FSDP{cls.__name__}", (cls,), namespace)


class RefuseShards:
    """A forward pre-hook of each module inside that owns shards: see :meth:`ShardedState.refuse_shards`."""

    def __init__(self, state: ShardedState) -> None:
        self.state = state

    def __call__(self, module: nn.Module, args: Any) -> None:
        refuse_shards(self, module)


def refuse_shards(hook: RefuseShards, module: nn.Module) -> None:
    hook.state.refuse_shards(module)


@register_general_jit_lookaside(refuse_shards)
def _refuse_shards_in_tracing(hook: Any, module: Any) -> Any:
    unwrap(hook).state.refuse_shards(unwrap(module))
    return wrap_const(None)


def attach(model: nn.Module, state: ShardedState) -> None:
    """Makes ``model`` an instance of its sharded class; the modules inside refuse to be called by themselves."""
    model.__dict__[ATTRIBUTE] = state
    model.__class__ = sharded_class(type(model))
    hook = RefuseShards(state)
    for module in {module for entry in state.entries for module, _ in entry.owners} - {model}:
        module.register_forward_pre_hook(hook, prepend=True)
