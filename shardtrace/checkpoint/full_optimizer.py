"""An optimizer's state as a single process has it: conversion from shards and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrace.checkpoint.agreement import agreement
from shardtrace.checkpoint.files import CheckpointError
from shardtrace.checkpoint.optimizer import check_whole, is_like, load_optimizer, named_groups, options_of, packed
from shardtrace.checkpoint.state import ModelState, Slot, model_state
from shardtrace.ranks.failure import communicating

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = False, cpu: bool = False
) -> dict[str, Any]:
    """The optimizer's state dict in a single process: tensors have the full shapes, parameters are numbered.

    A collective: every rank of the model's group must call it. Tensors are gathered one at a time. An optimizer of the
    unsharded model loads it with ``load_state_dict``.

    Args:
        model: the sharded model, before or after ``thunder.jit``.
        optimizer: an optimizer of its parameters.
        rank0_only: only the first rank of the group keeps the values; the others return an empty dict.
        cpu: move each tensor to host memory as it is gathered.

    Raises:
        CheckpointError: on every rank, naming a parameter that is not the model's, or a state that is not laid out like
            its parameter.
    """
    state, own = model_state(model), optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values = {number: own["state"].get(number, {}) for number in range(len(parameters))}
    with agreement(state, f"the state of the {type(optimizer).__name__} to gather") as said:
        slots = [state.slots[name] for group in named_groups(optimizer, state) for name in group]
        said.lines = [f"{n}: {_kinds(values[n], parameters[n])}" for n, slot in enumerate(slots) if not slot.is_owned]
        for number, slot in enumerate(slots):
            for key, value in values[number].items():
                if isinstance(value, torch.Tensor) and not is_like(key, value, parameters[number]):
                    check_whole({f"{key} of parameter {number}": value}, slot)
    keep = not rank0_only or state.rank == 0
    full: dict[int, dict[str, Any]] = {}
    for number, slot in enumerate(slots):
        kinds = _of_owner(_kinds(values[number], parameters[number]), slot)
        whole = {}
        for key, (dtype, value) in kinds.items():
            if dtype is not None and slot.entry is not None:
                value = slot.entry.whole(values[number].get(key, torch.empty_like(slot.local, dtype=dtype)))
            elif key in values[number]:
                value = values[number][key]
            if keep:
                whole[key] = value.cpu() if cpu and isinstance(value, torch.Tensor) else value
        if whole:
            full[number] = whole
    return {"state": full, "param_groups": own["param_groups"]} if keep else {}


def load_full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the state dict of an optimizer of the unsharded model. Each rank copies its rows.

    Every rank passes the whole state dict; its tensors may be mapped from a file (``torch.load(path, mmap=True)``), of
    which only this rank's rows are then read.

    Args:
        state_dict: with numbers for parameters, as ``Optimizer.state_dict`` has them, or with names, as in the full
            state dicts of PyTorch's FSDP and of ``torch.distributed.checkpoint.state_dict``.

    Raises:
        CheckpointError: on every rank, naming the parameter or key that does not fit; nothing has been loaded then.
    """
    load_optimizer(optimizer, own_optimizer_state_dict(model, optimizer, state_dict))


def own_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of the state dict of an optimizer of the unsharded model, which every rank passes.

    Raises CheckpointError as :func:`load_full_optimizer_state_dict` does.
    """
    state = model_state(model)
    with agreement(state, f"the state of the {type(optimizer).__name__} to load"):
        try:
            return _mine(optimizer, state, state_dict)
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            raise CheckpointError(
                f"this is no state dict of an optimizer: {type(problem).__name__}: {problem}"
            ) from None


def _kinds(values: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, tuple[torch.dtype | None, Any]]:
    """For each key, the dtype of a tensor that is laid out like its parameter; or None, and the value itself."""
    return {k: (v.dtype, None) if is_like(k, v, parameter) else (None, v) for k, v in sorted(values.items())}


def _of_owner(
    kinds: dict[str, tuple[torch.dtype | None, Any]], slot: Slot
) -> dict[str, tuple[torch.dtype | None, Any]]:
    """The owner's, because the other ranks hold no part of the parameter and may have no state for it."""
    if slot.home is None or not slot.is_owned or slot.home.group.size() == 1:
        return kinds
    said = [kinds]
    with communicating("the state of an optimizer", slot.home.group):
        dist.broadcast_object_list(said, group=slot.home.group, group_src=slot.home.owner)
    return said[0]


def _mine(optimizer: Optimizer, model: ModelState, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of a whole state dict, with numbers for parameters. Raises CheckpointError for a misfit."""
    named = named_groups(optimizer, model)
    groups = state_dict["param_groups"]
    sizes, found = ([len(group) for group in named], [len(group["params"]) for group in groups])
    if sizes != found:
        raise CheckpointError(
            f"the {type(optimizer).__name__} has groups of {sizes} parameters, the state dict has groups of {found}"
        )
    order, names = ([p for group in groups for p in group["params"]], [name for group in named for name in group])
    by_name = any(isinstance(p, str) for p in order)
    name_of = dict(zip(order, order if by_name else names, strict=True))
    if unknown := sorted(set(name_of.values()) - set(names)):
        raise CheckpointError(f"{unknown[0]} of the state dict is not in the {type(optimizer).__name__}")
    saved = {
        "state": {name_of[key]: values for key, values in state_dict["state"].items()},
        "groups": [{"params": [name_of[p] for p in group["params"]], "options": options_of(group)} for group in groups],
    }
    mine = packed(optimizer, model, saved, lambda key, value, name: _part(key, value, name, model.slots[name]))
    for group in mine["param_groups"]:
        group |= group.pop("options") or {}
    return mine


def _part(key: str, value: Any, name: str, slot: Slot) -> Any:
    if not isinstance(value, torch.Tensor) or slot.entry is None or (key == "step" and value.dim() == 0):
        return value
    if tuple(value.shape) != slot.full_shape:
        if value.numel() == 1 or slot.is_whole:
            return value
        raise CheckpointError(
            f"the optimizer's {key} of {name} has shape {tuple(value.shape)}, the parameter has {slot.full_shape}"
        )
    return slot.entry.part(value).clone() if slot.is_whole else slot.entry.part(value)
