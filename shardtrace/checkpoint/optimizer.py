"""An optimizer's state by the names of parameters. A tensor of its parameter's shape is sharded like the parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from shardtrace.checkpoint.files import CheckpointError, SavedTensor, decode, encode, tensor_names
from shardtrace.checkpoint.state import Keep, ModelState, Slot, agreement, model_state
from shardtrace.ranks.failure import communicating
from shardtrace.training.gradients import take_over

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


def named_groups(optimizer: Optimizer, model: ModelState) -> list[list[str]]:
    """The names of the parameters in each group. Raises CheckpointError for one that is not the model's."""
    take_over(optimizer)
    names = {id(slot.local): name for name, slot in model.slots.items()}
    for number, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            if id(p) not in names:
                raise CheckpointError(
                    f"parameter {index} of group {number} of the {type(optimizer).__name__}, of shape "
                    f"{tuple(p.shape)}, is not a parameter of {type(model.module).__name__}"
                )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def optimizer_state(
    optimizer: Optimizer, model: ModelState, tensors: dict[str, torch.Tensor | None], keep: Keep, label: str
) -> dict[str, Any]:
    """The state as JSON. Its tensors are put into ``tensors`` under ``<label>.state.<parameter>.<key>``.

    A tensor of the parameter's shape is laid out like the parameter. Others must be scalars, unless every rank holds
    the whole parameter. Raises CheckpointError that names the parameter and the key of a value that cannot be saved.
    """
    groups = named_groups(optimizer, model)
    own = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in groups for name in group]
    plain: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for number, values in own["state"].items():
        if not isinstance(number, int):
            raise CheckpointError(f"the {type(optimizer).__name__} has state of {number!r}, which is not a parameter")
        name, slot = names[number], model.slots[names[number]]
        of_parameter = state.setdefault(name, {})
        for key, value in values.items():
            where = f"{label}.state.{name}.{key}"
            if is_like(key, value, parameters[number]):
                tensors[where] = slot.distributed(keep(value))
                of_parameter[key] = {"like": where}
            else:
                mine: dict[str, torch.Tensor] = {}
                of_parameter[key] = encode(value, where, mine)
                check_whole(mine, slot)
                plain |= mine
    options = [encode(options_of(g), f"{label}.param_groups.{i}", plain) for i, g in enumerate(optimizer.param_groups)]
    tensors |= {name: keep(value) for name, value in plain.items()}
    saved_groups = [{"params": names, "options": o} for names, o in zip(groups, options, strict=True)]
    return {"class": type(optimizer).__name__, "groups": saved_groups, "state": state}


def is_like(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """Whether ``value`` is a tensor of the parameter's shape. The step is not, even if the parameter is 0-dim."""
    same = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return same and not (key == "step" and value.dim() == 0)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group of parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def of_owners(saved: Mapping[str, Any], model: ModelState) -> dict[str, Any]:
    """The part of a rank's saved state that the first rank may lack: that of parameters that this rank owns."""
    return {name: values for name, values in saved["state"].items() if model.slots[name].is_owned}


def optimizer_load(
    optimizer: Optimizer,
    model: ModelState,
    saved: Mapping[str, Any],
    index: Mapping[str, SavedTensor],
    targets: dict[str, torch.Tensor | None],
) -> dict[str, Any]:
    """The state dict for ``optimizer.load_state_dict``, with new tensors that are still to be read.

    ``targets`` gets the tensors to read into: by name this rank's part of each, None if it has no part. The optimizer
    may be new, and may hold the parameters in another order. Raises CheckpointError if it does not fit.
    """
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(f"the optimizer is a {type(optimizer).__name__}, the checkpoint's was a {saved['class']}")

    def part(key: str, value: Any, name: str) -> Any:
        return _new(key, value, name, model.slots[name], index, targets)

    loaded = packed(optimizer, model, saved, part)
    for group in loaded["param_groups"]:
        options = group.pop("options")
        group |= decode(options, new_tensors(options, index, targets)) or {}
    return loaded


def packed(
    optimizer: Optimizer, model: ModelState, saved: Mapping[str, Any], part: Callable[[str, Any, str], Any]
) -> dict[str, Any]:
    """The state dict for ``optimizer.load_state_dict``, of saved state by the names of parameters.

    ``part(key, value, name)`` is this rank's part of a value. Each group has its saved "options" still apart. Raises
    CheckpointError if the optimizer has other parameters.
    """
    groups = named_groups(optimizer, model)
    names = [name for group in groups for name in group]
    if foreign := set(saved["state"]) - set(names):
        raise CheckpointError(f"there is optimizer state of {min(foreign)}, which is not in the optimizer")
    state = {
        number: {key: part(key, value, name) for key, value in saved["state"][name].items()}
        for number, name in enumerate(names)
        if name in saved["state"]
    }
    options = [_options(number, of_group, saved["groups"]) for number, of_group in enumerate(groups)]
    now = optimizer.state_dict()["param_groups"]
    return {"state": state, "param_groups": [{**n, "options": o} for n, o in zip(now, options, strict=True)]}


def load_optimizer(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load state like ``load_state_dict``, which casts it to its parameter's dtype; here it keeps its own."""
    optimizer.load_state_dict(state_dict)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in state_dict["state"].items():
        loaded = optimizer.state[parameters[number]]
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def new_tensors(
    value: Any, index: Mapping[str, SavedTensor], targets: dict[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """New tensors for those that an encoded value refers to; also put into ``targets``."""
    new = {name: torch.empty(index[name].shape, dtype=index[name].dtype) for name in tensor_names(value)}
    targets |= new
    return new


def _new(
    key: str,
    value: Any,
    name: str,
    slot: Slot,
    index: Mapping[str, SavedTensor],
    targets: dict[str, torch.Tensor | None],
) -> Any:
    if not (isinstance(value, dict) and "like" in value):
        new = new_tensors(value, index, targets)
        check_whole(new, slot)
        return decode(value, new)
    saved = index[value["like"]]
    if saved.shape != slot.full_shape:
        raise CheckpointError(
            f"the optimizer's {key} of {name} has shape {saved.shape}, the parameter has {slot.full_shape}"
        )
    local = torch.zeros_like(slot.local, dtype=saved.dtype, requires_grad=False)
    targets[value["like"]] = slot.distributed(local)
    return local


def _options(number: int, names: list[str], groups: list[dict[str, Any]]) -> Any:
    """The saved options of a group, by its parameters, which may have been in another group; None for an empty one."""
    of_name = {name: group["options"] for group in groups for name in group["params"]}
    for name in names:
        if name not in of_name:
            raise CheckpointError(f"parameter {name} is in no group of the saved optimizer")
        if of_name[name] != of_name[names[0]]:
            raise CheckpointError(
                f"{names[0]} and {name} are in group {number}, and had different options in the saved optimizer: "
                "make the same groups as the run that saved it"
            )
    return of_name[names[0]] if names else None


def check_whole(tensors: Mapping[str, torch.Tensor], slot: Slot) -> None:
    for name, tensor in tensors.items():
        if tensor.numel() != 1 and not slot.is_whole:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}: of a sharded parameter, only state of the parameter's own "
                "shape and scalars can be saved and loaded; use another optimizer, or another strategy ('ddp')"
            )


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
                value = copy.deepcopy(values[number][key])  # a tensor that all ranks have goes on to change
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
    """This rank's part of a value, in memory of its own: the optimizer goes on to change it."""
    if not isinstance(value, torch.Tensor) or slot.entry is None or (key == "step" and value.dim() == 0):
        return copy.deepcopy(value)
    if tuple(value.shape) != slot.full_shape:
        if value.numel() == 1 or slot.is_whole:
            return value.clone()
        raise CheckpointError(
            f"the optimizer's {key} of {name} has shape {tuple(value.shape)}, the parameter has {slot.full_shape}"
        )
    return slot.entry.part(value).clone()
