"""Methods that a sharded model has besides its class's, or in place of them, and tools that take a shard for a whole
parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

from passes.compat.jit import unjitted
from passes.plan import Level
from shardtrace.model.classes import Methods, compiling
from shardtrace.model.state import ShardedState, link_of, own_state, state_around, state_of, states_in
from shardtrace.training.full import full_params
from shardtrace.training.step import no_sync, set_sync, syncs

import torch.distributed.checkpoint.state_dict as torchs_state_dict
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, UnshardHandle
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

ONCE = (
    "is sharded, and its gradients are reduced already: call the model itself, without a wrapper, or leave out "
    "shardtrace.fsdp. (accelerate and its Trainer take it as it is if accelerate is imported before fsdp is called.)"
)
AROUND = (
    "is sharded, and the {} around it has parameters that are not, such as adapters: call shardtrace.fsdp on the "
    "whole, after get_peft_model, or on trainer.model once SFTTrainer(peft_config=...) has made it"
)
STATE = (
    "is sharded, and what only one rank owns is no DTensor: call shardtrace.full_state_dict and "
    "full_optimizer_state_dict, their load_ relatives, or save_checkpoint"
)


@functools.cache  # once for each process
def refuse_wrappers() -> None:
    """Make the data parallel wrappers of torch and Thunder raise RuntimeError if they are given a sharded model, and
    torch's functions for distributed state dicts if they are given one with owned parameters, on every rank.

    DistributedDataParallel would send the first rank's rows to all. They have no hooks. Therefore methods are replaced,
    which derived classes have, too, and the function that all those for state dicts call first.
    """
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel):
        wrapper.__init__ = _refusing(wrapper.__init__, wrapper.__name__, ONCE)  # type: ignore[method-assign]
    for transform in (DDPTransform, FSDPTransform):
        transform.transform_module = _refusing(transform.transform_module, f"thunder's {transform.__name__}", ONCE)
    FSDPParamGroup.__init__ = _refusing(FSDPParamGroup.__init__, "fully_shard", ONCE)  # type: ignore[method-assign]
    verify = torchs_state_dict._verify_options
    names = "torch.distributed.checkpoint.state_dict"
    refusing = _refusing(verify, names, STATE)

    @functools.wraps(verify)
    def verify_options(model: nn.Module, optimizers: Any, *args: Any, **options: Any) -> Any:
        owned = any(state.owns for state in states_in(unjitted(model)))
        return (refusing if owned else verify)(model, optimizers, *args, **options)

    torchs_state_dict._verify_options = verify_options  # type: ignore[assignment]


def _refusing(function: Callable[..., Any], name: str, why: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        for value in (*args[:2], *kwargs.values()):  # the first argument of a method is the object itself
            if (state := _sharded(value)) is not None:
                module = unjitted(value) if isinstance(value, nn.Module) else state.model
                others = module is not state.model and any(link_of(p) is None for p in module.parameters())
                around = AROUND.format(type(module).__name__) if others and why is ONCE else why
                raise RuntimeError(f"{name}: {state.model_name} {around}")
        return function(*args, **kwargs)

    return refuse


def _sharded(value: Any) -> ShardedState | None:
    """The state of a sharded model that is in a module or a list of parameters."""
    if isinstance(value, nn.Module) and "_modules" in value.__dict__:  # it has been initialized
        return next((state for state in states_in(unjitted(value)) if state.entries), None)
    if isinstance(value, list | tuple):
        return next((link.state for p in value if (link := link_of(p)) is not None), None)
    return None


# Switches of FSDP2 that have one position in a compiled step, and what to do instead of the other one.
CONSTANT = {
    "set_reshard_after_backward": (
        True,
        'pass fsdp(sharding_strategy="ddp") to keep parameters whole, or "zero2" to gather them once for each step',
    ),
    "set_unshard_in_backward": (True, "leave it out, because backward gathers only what it uses"),
}
# What FSDP2's modules have and a compiled step has otherwise: what to do instead.
ELSEWHERE = {
    "set_gradient_divide_factor": "pass fsdp(comm_policy=CommPolicy(gradient_divide_factor=...))",
    "set_reduce_scatter_divide_factor": "pass fsdp(comm_policy=CommPolicy(gradient_divide_factor=...))",
    "set_force_sum_reduction_for_comms": "pass fsdp(comm_policy=CommPolicy(sum_reductions=True))",
    "set_all_reduce_hook": "write a pass that adds a line to the reduction, or register a hook on the parameter",
    "set_custom_all_gather": "write a wire",
    "set_custom_reduce_scatter": "write a wire",
    "set_allocate_memory_from_process_group_for_comm": "leave it out",
    "set_reduce_scatter_max_input_buffers": "pass fsdp(compile_policy=CompilePolicy(max_inflight_bytes=...))",
    "set_reduce_scatter_unused_params": "leave it out: an unused parameter has no gradient",
    "set_separate_reduce_scatter_group": "leave it out",
    "set_symm_mem_for_comm": "leave it out",
    "set_post_optim_event": "leave it out: the schedule orders the streams",
    "set_manual_backward_finalization": "leave it out: gradients are whole when backward returns",
    "finalize_backward": "leave it out: gradients are whole when backward returns",
    "set_keep_unsharded_storage": "leave it out: gathered parameters are in new memory",
}


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
    if state_of(module) is None and state_around(module) is None:
        raise ValueError(f"{type(module).__name__} is not sharded: call shardtrace.fsdp(model) first")
    method = getattr(module, name, None)
    if method is not None:
        setattr(module, name, MethodType(compiling(method.__func__), module))


def unshard(self: nn.Module, async_op: bool = False) -> UnshardHandle | None:
    """Makes the parameters of the model, or of this part of it, whole until ``reshard()``: FSDP2's method.

    Calls without gradients are then run by PyTorch if all parameters of the called module are whole. Any other call,
    and whatever reads or changes all parameters (state dicts, ``full_params``, ``to``), reshards first, because a
    compiled step gathers by itself. What is written into parameters is lost. A collective: every rank must call it.

    Args:
        async_op: returns a handle, whose ``wait`` has nothing to wait for: the parameters are there when this returns.
    """
    state, inside = own_state(self), states_in(self)
    if state.unsharded:  # already
        pass
    elif state_of(self) is None:
        state.unshard(self)
        for inner in inside:
            unshard(inner.model)
    else:
        context = full_params(self, writeback=False)
        context.__enter__()
        for each in inside:
            each.whole = context  # which may be left several times
    return UnshardHandle() if async_op else None


def reshard(self: nn.Module) -> None:
    """Makes the parameters shards again after ``unshard()``; nothing if they are. If ``unshard`` was called on the
    model, its parts stay whole until ``reshard`` is, too."""
    if state_of(self) is None:
        own_state(self).reshard(self)
    for state in states_in(self):
        state.reshard()


def set_is_last_backward(self: nn.Module, is_last_backward: bool) -> None:
    """FSDP2's, which may leave work to the last backward. Here gradients are whole whenever backward returns."""


def _set_requires_gradient_sync(_: Any) -> Callable[..., None]:
    def set_requires_gradient_sync(self: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """FSDP2's switch. False: backwards are as in ``shardtrace.no_sync`` until it is set to True again.

        Args:
            recurse: False: only for parameters that are in no block inside this module. The blocks are those of
                ``"block"`` buckets, or those that ``bucketing_strategy`` names.
        """
        set_sync(self, requires_gradient_sync, recurse=recurse)

    return set_requires_gradient_sync


def _set_requires_all_reduce(_: Any) -> Callable[..., None]:
    def set_requires_all_reduce(self: nn.Module, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """FSDP2's switch. False: backwards are as in ``no_sync(model, reduce_each="shard")`` until it is True.
        ``recurse`` is that of ``set_requires_gradient_sync``."""
        set_sync(self, requires_all_reduce, Level.REPLICAS, recurse=recurse)

    return set_requires_all_reduce


def _set_reshard_after_forward(original: Callable[..., Any] | None) -> Callable[..., Any]:
    def set_reshard_after_forward(self: nn.Module, reshard_after_forward: bool, recurse: bool = True) -> None:
        """FSDP2's switch, which ``fsdp`` decides by its strategy. Nothing if that does the same.

        Raises:
            NotImplementedError: it does not. The error has the call of ``fsdp`` that does.
        """
        state = own_state(self)
        mine = state.numbers_in(self, recurse=recurse)
        strategies = {e.strategy for e in (state.entries[i] for i in mine) if e.home.is_spread}
        if all(strategy.regathers is bool(reshard_after_forward) for strategy in strategies):
            return
        name = next((name for name, module in state.model.named_modules() if module is self), "")
        kind = "hybrid_" if any(strategy.is_hybrid for strategy in strategies) else ""
        wanted, others = (f"{kind}zero{stage}" for stage in ((3, 2) if reshard_after_forward else (2, 3)))
        rules = f'{{"{name}.*": "{wanted}", "*": "{others}"}}' if name else f'"{wanted}"'
        raise NotImplementedError(
            f"set_reshard_after_forward({bool(reshard_after_forward)}): a compiled step does not change any more. Pass "
            f"fsdp(model, sharding_strategy={rules})"
        )

    return original or set_reshard_after_forward


def _constant(name: str, value: bool, instead: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    """A switch of FSDP2 that has one position here."""

    def switch(self: nn.Module, wanted: bool, *, recurse: bool = True) -> None:
        if bool(wanted) is not value:
            raise NotImplementedError(f"{name}({bool(wanted)}) is not possible in a compiled step: {instead}")

    return original or switch


def _prefetch(name: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    def refuse(self: nn.Module, modules: Sequence[nn.Module]) -> None:
        instead = "leave the call out"
        if len(modules) > 1:
            instead += f"; to gather more ahead, pass fsdp(compile_policy=CompilePolicy(prefetch={len(modules)}))"
        raise NotImplementedError(f"{name} does nothing in a compiled step, which gathers ahead by itself: {instead}")

    return original or refuse


def _require_backward_grad_sync(_: Any) -> property:
    """The attribute of DistributedDataParallel by which scripts accumulate gradients."""
    return property(syncs, set_sync)


def _refused(name: str, instead: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} of FSDP2 does nothing in a compiled step: {instead}")

    return original or refuse


METHODS: Methods = {
    "no_sync": _no_sync,
    "generate": _generate,
    "unshard": lambda original: original or unshard,
    "reshard": lambda original: original or reshard,
    "set_is_last_backward": lambda original: original or set_is_last_backward,
    "set_requires_gradient_sync": _set_requires_gradient_sync,
    "set_requires_all_reduce": _set_requires_all_reduce,
    "require_backward_grad_sync": _require_backward_grad_sync,
    "set_reshard_after_forward": _set_reshard_after_forward,
    **{name: functools.partial(_constant, name, value, instead) for name, (value, instead) in CONSTANT.items()},
    **{
        f"set_modules_to_{way}_prefetch": functools.partial(_prefetch, f"set_modules_to_{way}_prefetch")
        for way in ("forward", "backward")
    },
    **{name: functools.partial(_refused, name, instead) for name, instead in ELSEWHERE.items()},
}
METHODS_OF_PARTS: Methods = {
    name: method for name, method in METHODS.items() if name not in ("generate", "require_backward_grad_sync")
}
