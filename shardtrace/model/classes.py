"""The class of a sharded module: it compiles itself when it is called, and Thunder records it as a whole.

The class of a sharded module is swapped for a subclass, and so are the classes of the submodules that have parameters.
Both call their own compiled step, unless their forward is being recorded or their parameters are whole. Thunder's
interpreter finds a lookaside for ``__call__`` and ``forward``.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from passes.compat.jit import interrupt_of
from passes.compat.versions import functional_transform
from shardtrace.model.distribute import INPUTS, Chosen, cast, inputs_of_blocks, make_plain, with_casts
from shardtrace.model.state import ShardedState, own_state, reshard_in, state_around, state_of, states_in
from shardtrace.model.tracing import recorded, recorded_in_place
from shardtrace.ranks.consensus import AnnouncedError, RankMismatchError
from shardtrace.record.watcher import ATTRIBUTE, CHECKPOINTED, EAGER, PART_ATTRIBUTE, REPEATED

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
        state = state_of(self) or state_around(self)  # None for a plain copy
        if state is None or not state.is_to_run(self):
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
    state.runtime.check_call(name)
    reshard_in(module)
    try:
        return _jitted(module, key, function, name)(*args, **kwargs)
    except RankMismatchError as error:  # all ranks raise it
        if state.variants is None or isinstance(error, AnnouncedError):
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
        state.check_traceable()  # the jitted module keeps what it finds
        state.compiled[key] = thunder.jit(function, **state.jit_options(name))
    return state.compiled[key]


def _transform_around() -> str | None:
    """What is about to trace or transform the call of a model, if anything does."""
    if functional_transform() is not None:
        return "a transform of torch.func"
    return "torch.jit.trace" if torch.jit.is_tracing() else None


# By these, thunder.last_traces, compile_stats and their relatives read a jitted module.
OF_JITTED = ("_lc_cd", "_lc_cs", "_lc_transforms")
# The method of a sharded class by its name: made of the method of the class, or of None if it has none.
Methods = Mapping[str, Callable[[Any], Any]]


def attach(model: nn.Module, state: ShardedState, chosen: Chosen, methods: Methods, of_parts: Methods) -> None:
    """Makes ``model`` an instance of its sharded class, and its submodules parts of it: those with parameters, and
    those that are checkpointed or repeated, have a ``save_pretrained``, or cast their inputs."""
    model.__dict__[ATTRIBUTE] = state
    model.__class__ = sharded_class(type(model), root=True, methods=tuple(methods.items()))  # type: ignore[arg-type]
    for module, what in chosen.checkpointed.values():
        module.__dict__[CHECKPOINTED] = what
    for module in chosen.by_torch:
        module.__dict__[EAGER] = True
    cast_layers = {e.layer for e in state.entries if e.precision is not None}
    inputs = inputs_of_blocks(model, chosen.blocks, cast_layers, state.options.precision)
    for module, dtype in inputs.items():
        module.__dict__[INPUTS] = dtype
    names = {module: name for name, module in chosen.repeated.items()}
    parts = {module for module in model.modules() if any(True for _ in module.parameters())}
    parts |= {*names, *inputs, *(module for module, _ in chosen.checkpointed.values())}
    parts |= {module for module in model.modules() if hasattr(module, "save_pretrained")}
    for module in parts - {model}:
        # a forward on the instance overrides the class's; submodules with their own sharding are no parts
        if "forward" not in module.__dict__ and not module.__dict__.keys() & {ATTRIBUTE, PART_ATTRIBUTE}:
            module.__dict__[PART_ATTRIBUTE] = state
            if module in names:
                module.__dict__[REPEATED] = names[module]
            module.__class__ = sharded_class(type(module), root=False, methods=tuple(of_parts.items()))  # type: ignore[arg-type]


@functools.cache
def sharded_class(cls: Any, *, root: bool, methods: tuple[tuple[str, Callable[[Any], Any]], ...] = ()) -> type:
    """A subclass of ``cls`` for a sharded module (printed as ``FSDP<cls>``), or for a submodule of one.

    Keeps ``__name__``, which libraries write into files and look up, and the signature and docstring of ``forward``.
    Instances can be deep-copied, but not pickled. A copy that is made inside ``full_params`` is a plain module.
    """
    name = f"FSDP{cls.__name__}" if root else cls.__name__

    def __new__(_: Any, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)  # a new module is not sharded, such as model[:2], which has parts of this one

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        raise TypeError(
            f"{name} is sharded and cannot be pickled: it holds a process group and this rank's shards. "
            "Save shardtrace.full_state_dict(model), or model.state_dict() with the shards as DTensors, or "
            "copy.deepcopy(model), which is a plain model inside shardtrace.full_params"
        )

    def __prepare_scriptable__(self: nn.Module) -> Any:
        raise TypeError(f"torch.jit.script cannot compile {name}: call it inside shardtrace.full_params, on a copy")

    namespace = {
        "__call__": _call(cls),
        "forward": _forward(cls.forward),
        "__new__": __new__,
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": __reduce_ex__,
        "__prepare_scriptable__": __prepare_scriptable__,
        "_load_from_state_dict": _loading(cls._load_from_state_dict),
        "_apply": _converting(cls._apply),
        "__module__": cls.__module__,
        "__qualname__": name,
        "seen_as": cls,  # by forward, which may ask for its type
        "__doc__": cls.__doc__,
        **{name: property(functools.partial(_of_jitted, name)) for name in OF_JITTED},
    }
    if root:
        # transformers then keeps the ranks in step while it generates
        namespace["_is_fsdp_managed_module"] = property(lambda self: not own_state(self).unsharded)
        namespace["__repr__"] = lambda self: f"FSDP{cls.__repr__(self)}"
    if hasattr(cls, "save_pretrained"):
        namespace["save_pretrained"] = whole_only(cls.save_pretrained)
    made = {name: make(getattr(cls, name, None)) for name, make in methods}
    return type(cls.__name__, (cls,), namespace | {name: method for name, method in made.items() if method is not None})


def _call(cls: Any) -> Callable[..., Any]:
    @functools.wraps(cls.__call__)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if own_state(self).is_to_run(self):
            return run(self, args, kwargs)
        return cls.__call__(self, *args, **kwargs)

    return recorded_in_place(__call__)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (state := own_state(self)).is_to_run(self):
            return run(self, args, kwargs)
        if not (state.unsharded or state.opened):
            args, kwargs = cast((args, kwargs), self.__dict__.get(INPUTS))
        with state.casting() as precision:
            return with_casts(original, precision)(self, *args, **kwargs)

    return recorded_in_place(forward)


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Copies values into the shards, also with ``assign=True``, which would put others in their place."""

    @functools.wraps(original)
    def _load_from_state_dict(self: nn.Module, state_dict: Any, prefix: str, metadata: Any, *args: Any) -> None:
        reshard_in(self)  # values that are written into whole parameters are lost
        copying = {**metadata, "assign_to_params_buffers": False}
        original(self, state_dict, prefix, metadata if own_state(self).unsharded else copying, *args)

    return _load_from_state_dict


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Converts parameters, as ``to`` and ``half`` do. torch exchanges DTensors for new ones, and loses their attributes
    and hooks."""

    @functools.wraps(original)
    def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        reshard_in(self)
        parameters = list(self.parameters(recurse))
        kept = [(dict(p.__dict__), p._backward_hooks, p._post_accumulate_grad_hooks) for p in parameters]
        original(self, fn, recurse)
        for p, (attributes, hooks, last_hooks) in zip(parameters, kept, strict=True):
            p.__dict__.update(attributes)
            if hooks:
                p._backward_hooks = hooks
            if last_hooks:
                p._post_accumulate_grad_hooks = last_hooks
        return self

    return _apply


def _of_jitted(name: str, module: nn.Module) -> Any:
    """What Thunder keeps on the jitted module. Before the first call there is none."""
    return getattr(own_state(module).compiled.get(module), name)


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A sharded copy, or a plain one while the parameters are whole."""
    state = own_state(self)
    if not state.unsharded:
        reshard_in(self)
    if state.unsharded:
        memo[id(state)] = None  # the copy has none
    new = object.__new__(type(self))
    memo[id(self)] = new
    kept = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__  # a LightningModule leaves some out
    new.__setstate__(copy.deepcopy(kept, memo))
    if state.unsharded:
        make_plain(new)
    return new


# ---- save_pretrained ----


def whole_only(save: Callable[..., Any]) -> Callable[..., Any]:
    """A ``save_pretrained`` that raises RuntimeError if it would write this rank's shards."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict", signature.bind(self, *args, **kwargs).arguments.get("state_dict"))
        if given is None and any(e.home.is_spread for s in _states(self) if not s.unsharded for e in s.entries):
            takes_values = "state_dict" in signature.parameters
            whole = "pass state_dict=shardtrace.full_state_dict(model), or " if takes_values else ""
            raise RuntimeError(
                f"save_pretrained would write this rank's shards of {type(self).__name__}: {whole}call it inside "
                "shardtrace.full_params(model), on one rank"
            )
        return save(self, *args, **kwargs)

    return save_pretrained


def _states(module: nn.Module) -> list[ShardedState]:
    """The states of the module, of its submodules, and of the sharded module that it is part of."""
    outer = state_around(module)
    return states_in(module) if outer is None else [*states_in(module), outer]
