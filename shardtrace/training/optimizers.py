"""Optimizers of shards: steps that are refused, and parameters for several of them.

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

from passes.compat.jit import unjitted
from passes.plan import Axis, Placement
from shardtrace.model.entry import Entry
from shardtrace.model.shards import current
from shardtrace.model.state import Link, link_of
from shardtrace.ranks.failure import failed, reason_to_stop

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def split_parameters(
    model: nn.Module, predicate: Callable[[str, nn.Parameter], bool]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters for which ``predicate(name, parameter)`` is true, and all others, each in the order of the model.

    The predicate sees each parameter with its full shape, without values, also if the model is sharded: a rank holds a
    0-dim parameter with shape (1,), and an owned one with no rows on the other ranks. ::

        is_matrix = lambda name, p: p.ndim == 2 and "embed" not in name
        shardtrace.fsdp(model, sharding_strategy={is_matrix: "owner", "*": "zero3"})
        matrices, others = shardtrace.split_parameters(model, is_matrix)
        optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]

    Args:
        model: sharded or not, before or after ``thunder.jit``.
    """
    module = unjitted(model)
    chosen: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        (chosen if predicate(name, _whole(parameter)) else others).append(parameter)
    return chosen, others


def _whole(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the full shape, on the meta device."""
    link = link_of(parameter)
    shape = parameter.shape if link is None else link.entry.full_shape
    return nn.Parameter(parameter.detach().new_empty(shape, device="meta"), requires_grad=parameter.requires_grad)


# Optimizers that are wrong on parameters of which each is whole on one rank and empty elsewhere. Adafactor divides by a
# tensor's number of elements. LBFGS takes inner products of all parameters together. They are known by name because
# other libraries have an Adafactor of their own.
WRONG_WITH_OWNERS = ("Adafactor", "LBFGS")


@functools.cache  # once for each process
def refuse_wrong_steps() -> None:
    """Make ``step`` of every optimizer, built before or after, raise if it would be wrong on the parameters that it
    holds: Note [Aborted reductions], and optimizers that mix tensors of which one rank owns each.

    The hooks are torch's global ones. Nothing is stored on an optimizer, so that it copies and pickles as before.
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
    name = _known_name(type(optimizer))  # type: ignore[arg-type]
    take_over(optimizer)
    for group in optimizer.param_groups:
        _part_kinds(group)
        for parameter in group["params"] if name is not None else ():
            link = link_of(parameter)
            if link is not None and link.entry.home.placement is Placement.OWNER and parameter.requires_grad:
                raise RuntimeError(
                    f"{type(optimizer).__name__} computes with all tensors together and would be wrong on parameter "
                    f"{link.entry.name!r} of {link.state.model_name}, which only one rank owns: call fsdp() with "
                    'another sharding_strategy than "owner" for all parameters of this optimizer'
                )


def _part_kinds(group: dict[str, Any]) -> None:
    """Keeps a group from updating DTensors and plain tensors together, for which torch would raise: they are updated
    one by one unless the group chooses; then parameters without elements lose their gradient."""
    plain = [p for p in group["params"] if not isinstance(p, DTensor)]
    if not plain or len(plain) == len(group["params"]):
        return
    if group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = None if all(p.device.type == "cpu" for p in plain) else False  # the default of a CPU
    elif group.get("foreach") or group.get("fused"):
        for p in plain:
            p.grad = p.grad if p.numel() else None


def take_over(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer that was built before ``fsdp`` the parameters of now, and their part of its state."""
    for group in optimizer.param_groups:
        _take_over(optimizer, group["params"])


def _take_over(optimizer: torch.optim.Optimizer, parameters: list[Any]) -> None:
    for i, old in enumerate(parameters):
        if (new := current(old)) is not old:
            parameters[i] = new
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
    links = [link for p in parameters if (link := link_of(p)) is not None and not link.state.unsharded]
    # of others, the number of steps would be taken for state that is laid out like the parameter
    several = next((link.entry for link in links if math.prod(link.entry.full_shape) > 1), None)
    keys = _whole_state(optimizer.state.get(several.shard, {}), several) if several is not None else []
    for entry in (link.entry for link in links if keys):
        state = optimizer.state.get(entry.shard, {})
        if entry.home.mesh is not None or tuple(entry.shard.shape) != entry.full_shape:
            state |= {key: entry.part(state[key]) for key in _whole_state(state, entry) if key in keys}


def _whole_state(state: dict[str, Any], entry: Entry) -> list[str]:
    """The keys of an optimizer's state of a parameter that have its whole shape, and are plain tensors."""
    plain = ((k, v) for k, v in state.items() if isinstance(v, torch.Tensor) and not isinstance(v, DTensor))
    return [k for k, v in plain if tuple(v.shape) == entry.full_shape]


@functools.cache
def _known_name(cls: Any) -> str | None:
    """The name by which a class of optimizers, or the nearest of its bases, is in the list; None if it is not."""
    return next((base.__name__ for base in cls.__mro__ if base.__name__ in WRONG_WITH_OWNERS), None)
