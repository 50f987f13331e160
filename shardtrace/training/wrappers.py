"""Tools that take a shard for a whole parameter. They raise before they change anything, and name the right call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from passes.compat.jit import unjitted
from shardtrace.model.state import ShardedState, link_of, states_in

import torch.distributed.checkpoint.state_dict as torchs_state_dict
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
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
