"""The steps of optimizers: refused with gradients that are none, with sums that no backward has reduced, and with a
shard where a whole tensor is needed. ``zero_grad`` drops such sums, too.

Note [Aborted reductions]: nccl reduces while the program goes on, so a reduction may end without a result after the
line that waits for it. Each step of an optimizer that holds shards raises, before it changes them and before it
returns, if a collective has been aborted by then. It does not wait for the device. A reduction that is aborted later
leaves parameters without meaning, and the next communication raises: a run continues from its last checkpoint.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from passes.plan import Axis, Placement
from shardtrace.model.state import Link, link_of
from shardtrace.ranks.failure import failed, reason_to_stop

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# Placements with which such an optimizer is right. Muon orthogonalizes each tensor by itself, and does nothing to an
# empty one. Adafactor divides by a tensor's number of elements. LBFGS takes inner products of all parameters together.
# Classes are known by name because other libraries have an Adafactor or a Muon of their own.
RIGHT_WITH: dict[str, tuple[Placement, ...]] = {
    "Muon": (Placement.REPLICATE, Placement.OWNER),
    "Adafactor": (Placement.REPLICATE,),
    "LBFGS": (Placement.REPLICATE,),
}


@functools.cache  # once for each process
def refuse_wrong_steps() -> None:
    """Make ``step`` of every optimizer, built before or after, raise if it would be wrong on the shards that it holds:
    Note [Aborted reductions], and optimizers that compute with whole tensors.

    The hooks are torch's global ones. Nothing is stored on an optimizer, so that it copies and pickles as before. An
    optimizer that is not in the table pays a few look-ups per step.
    """
    register_optimizer_step_pre_hook(_check_results)
    register_optimizer_step_post_hook(_check_results)
    register_optimizer_step_pre_hook(_check_optimizer)
    register_optimizer_step_pre_hook(_check_sums)
    for cls in (torch.optim.Optimizer, nn.Module):  # torch has no hook there
        cls.zero_grad = _dropping(cls.zero_grad)  # type: ignore[method-assign]


def _dropping(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """``zero_grad`` of optimizers or modules that also drops what no_sync has added up for their parameters."""

    @functools.wraps(zero_grad)
    def dropping(self: Any, *args: Any, **kwargs: Any) -> None:
        zero_grad(self, *args, **kwargs)
        for link, place in _sums(self):
            del link.state.runtime.kept.by_place[place]

    return dropping


def _sums(holder: torch.optim.Optimizer | nn.Module) -> list[tuple[Link, tuple[Axis, int]]]:
    """The parameters of ``holder`` whose gradients were added up and not reduced, and where their sums are."""
    groups = [holder.parameters()] if isinstance(holder, nn.Module) else [g["params"] for g in holder.param_groups]
    links = {id(link): link for group in groups for p in group if (link := link_of(p)) is not None}
    found = [(link, kept) for link in links.values() if (kept := link.state.runtime.kept).by_place]
    index = {id(link): link.state.by_stand_in[id(link.entry.stand_in)].index for link, _ in found}
    return [(link, place) for link, kept in found for place in kept.of(index[id(link)])]


def _check_sums(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raises RuntimeError if gradients were added up and not reduced; after the closure, if there is one."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return _refuse_sums(optimizer)

    def checked() -> Any:
        loss = closure()
        _refuse_sums(optimizer)
        return loss

    return (args, kwargs | {"closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)


def _refuse_sums(optimizer: torch.optim.Optimizer) -> None:
    for link, _ in _sums(optimizer):
        raise RuntimeError(
            f"the gradient of parameter {link.entry.name!r} of {link.state.model_name} was added up inside no_sync, or "
            "without gradient sync, and is not reduced: call the last backward before optimizer.step() outside, with "
            "the switch on, or drop the sums with zero_grad()"
        )


def _check_results(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    reason = reason_to_stop()
    if reason and any(link_of(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise failed(reason, "a step of an optimizer")


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _refuse_whole_state(optimizer)
    name = _known_name(type(optimizer))  # type: ignore[arg-type]
    if name is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            link = link_of(parameter)
            if link is None or link.state.unsharded or not parameter.requires_grad:
                continue
            home = link.entry.home
            if home.is_spread and home.placement not in RIGHT_WITH[name]:
                raise RuntimeError(_refusal(type(optimizer).__name__, name, link.entry.name, link.state.model_name))


def _refuse_whole_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError if the optimizer has the state of a whole parameter, from steps before ``fsdp``. Looks at the
    first parameter of each group that has several elements: a step count is shaped like any other."""
    for group in optimizer.param_groups:
        links = map(link_of, group["params"])
        link = next((link for link in links if link is None or math.prod(link.entry.full_shape) > 1), None)
        if link is None or link.state.unsharded:
            continue
        whole, parameter = link.entry.full_shape, link.entry.shard
        values = optimizer.state.get(parameter, {}).values()
        if whole != tuple(parameter.shape) and any(isinstance(v, torch.Tensor) and v.shape == whole for v in values):
            raise RuntimeError(
                f"{type(optimizer).__name__} has the state of the whole parameter {link.entry.name!r} of "
                f"{link.state.model_name}, from before fsdp(): build it anew, and load that state by "
                "shardtrace.load_full_optimizer_state_dict"
            )


@functools.cache
def _known_name(cls: Any) -> str | None:
    """The name by which a class of optimizers, or the nearest of its bases, is in the table; None if it is not."""
    return next((base.__name__ for base in cls.__mro__ if base.__name__ in RIGHT_WITH), None)


def _refusal(optimizer: str, name: str, parameter: str, model: str) -> str:
    owner = Placement.OWNER in RIGHT_WITH[name]
    strategies = 'sharding_strategy="owner" or "ddp"' if owner else 'sharding_strategy="ddp"'
    return (
        f"{optimizer} computes with whole tensors and would be wrong on parameter {parameter!r} of {model}, which is "
        f"split over ranks: call fsdp() with {strategies} for all parameters of this optimizer, or use an optimizer "
        "that treats each element by itself, such as AdamW or SGD"
    )
