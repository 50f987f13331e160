"""The state of a model and of its optimizer: tensors for torch.distributed.checkpoint, and state dicts.

The tensors have their original shapes, without padding. ``state_dict`` and ``load_state_dict`` are those of a sharded
model and of its jitted module. Parameters are DTensors, and so are the values of a state dict. What only one rank owns
is in the state dict of that rank. A state dict to load may hold whole tensors, or DTensors on another mesh.

An optimizer's state goes by the names of parameters. A tensor of its parameter's shape is sharded like the parameter.

If one rank fails, all ranks raise one error.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from passes.compat.jit import unjitted
from passes.plan import Placement, Shape
from shardtrace.checkpoint.files import CheckpointError, SavedTensor, decode, encode, tensor_names
from shardtrace.model.shards import Entry, Home
from shardtrace.model.state import ShardedState, link_of, state_around, state_of, states_in
from shardtrace.ranks.consensus import RankMismatchError, compare
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone
from shardtrace.training.full import full_state_dict, sharded_entries
from shardtrace.training.step import no_sync, take_over

import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Keep = Callable[[torch.Tensor], torch.Tensor]  # the tensor to save: the same, or a copy


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter or buffer of a model. ``local`` is the tensor that this rank has of it.

    ``entry`` is None for an unsharded tensor, which is whole on every rank.
    """

    local: torch.Tensor
    entry: Entry | None

    @property
    def home(self) -> Home | None:
        return None if self.entry is None else self.entry.home

    @property
    def full_shape(self) -> Shape:
        return tuple(self.local.shape) if self.entry is None else self.entry.full_shape

    @property
    def is_owned(self) -> bool:
        return self.home is not None and self.home.placement is Placement.OWNER

    @property
    def is_whole(self) -> bool:
        home = self.home
        return home is None or home.placement is Placement.REPLICATE or math.prod(self.full_shape) == 0

    def part(self, local: torch.Tensor | None = None) -> tuple[torch.Tensor | None, int]:
        """This rank's rows, as a view of the parameter or of a tensor that is laid out like it; and the first of them.
        None if this rank has no part in it."""
        local = self.local.detach() if local is None else local
        local = local.to_local() if isinstance(local, DTensor) else local
        if self.is_whole or self.entry is None:
            return local, 0
        home = self.entry.home
        if self.is_owned:
            return (local if home.group.rank() == home.owner else None), 0
        return local, home.group.rank() * self.entry.rows.shape[0] if home.is_spread else 0

    def whole(self) -> torch.Tensor:
        """The whole tensor. A collective if it is sharded."""
        return self.local.detach() if self.entry is None else self.entry.whole(self.local)

    def distributed(self, local: torch.Tensor | None = None) -> torch.Tensor | None:
        """This rank's part for torch.distributed.checkpoint: a DTensor if ranks hold different rows. A tensor that only
        one rank owns is a plain tensor there and None on the others. A tensor that is whole on every rank is a plain
        tensor."""
        local = self.local.detach() if local is None else local
        return local if isinstance(local, DTensor) and not self.is_whole else self.part(local)[0]


@dataclass(frozen=True, eq=False)
class ModelState:
    """The contents of a model's state dict.

    Args:
        states: the states of the sharded modules in it. There are none if the model is not sharded; the calling process
            then saves and loads it by itself.
        slots: each parameter and buffer, by its first name.
        tied: for each other name of one of them, its first name.
        extra: extra states, by key.
    """

    module: nn.Module
    states: list[ShardedState]
    slots: dict[str, Slot]
    tied: dict[str, str]
    extra: dict[str, Any]

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.states[0].group if self.states else None

    @property
    def rank(self) -> int:
        return self.group.rank() if self.group is not None else 0

    @property
    def ranks(self) -> int:
        return self.group.size() if self.group is not None else 1

    @property
    def sharing(self) -> dict[str, int]:
        """How many ranks compute a batch together, by option of ``fsdp``; none if each rank has its own."""
        if not self.states:
            return {}
        groups, options = self.states[0].groups, self.states[0].options
        context = options.context.option if options.context is not None else ""
        found = {context: groups.context, "tensor_parallel": groups.tensor}
        return {option: group.size() for option, group in found.items() if group is not None and group.size() > 1}

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        if self.states and self.states[0].entries:
            return self.states[0].entries[0].device
        return next((slot.local.device for slot in self.slots.values()), torch.device("cpu"))


def model_state(model: nn.Module) -> ModelState:
    """The state of a model.

    Raises CheckpointError if the model holds DTensors of another library, RuntimeError inside full_params.
    """
    module = unjitted(model)
    states = states_in(module)
    entries = sharded_entries(module)[2] if states else {}
    slots: dict[str, Slot] = {}
    tied: dict[str, str] = {}
    extra: dict[str, Any] = {}
    names: dict[int, str] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        if key.endswith("_extra_state") or not isinstance(value, torch.Tensor):
            extra[key] = value
        elif isinstance(value, DTensor) and id(value) not in entries:
            raise CheckpointError(
                f"{key} is a DTensor that shardtrace did not make: save it with torch.distributed.checkpoint"
            )
        elif id(value) in names:
            tied[key] = names[id(value)]
        else:
            names[id(value)] = key
            slots[key] = Slot(value, entries.get(id(value)))
    return ModelState(module, states, slots, tied, extra)


Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass(frozen=True, eq=False)
class Companions:
    """The objects whose state is saved and loaded with a model's. ``ema`` is a second model."""

    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    scaler: Any
    ema: nn.Module | None

    def models(self, model: ModelState) -> dict[str, ModelState]:
        """The model and, if there is one, the second model, by their labels in a checkpoint.

        Raises CheckpointError for a second model that cannot be in a checkpoint of the first one.
        """
        if self.ema is None:
            return {"model": model}
        ema = model_state(self.ema)
        if ema.group != model.group:
            raise CheckpointError("ema and model are not sharded over the same ranks: make ema from the sharded model")
        if ema.extra:
            raise CheckpointError(f"{min(ema.extra)} of ema is an extra state, which a second model cannot have")
        return {"model": model, "ema": ema}


def companions(optimizer: Optimizers, schedulers: Any, scaler: Any, ema: nn.Module | None) -> Companions:
    def as_list(values: Any) -> Sequence[Any]:
        return values if isinstance(values, (list, tuple)) else [values] if values is not None else []

    return Companions(as_list(optimizer), as_list(schedulers), scaler, ema)


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of a sharded model for torch.distributed.checkpoint: ``dcp.save`` and, in place, ``dcp.load``.
    So has ``model.state_dict()``.

    Keys and shapes are those of the unsharded model. Sharded parameters are DTensors on the model's memory: loading
    into them changes the model. A tensor that only one rank owns is a plain tensor there, and the other ranks omit its
    key.

    Raises:
        ValueError: the model is not sharded. RuntimeError: inside ``full_params``.
    """
    return dict(sharded_entries(model)[0].state_dict())


# ---- state_dict ----


def add_hooks(model: nn.Module) -> None:
    """Adds the hooks to a sharded module and to its parts. Copies of it have them, too."""
    for module in model.modules():
        if module is model or state_around(module) is state_of(model):
            module.register_state_dict_post_hook(_leave_out)
            module.register_load_state_dict_pre_hook(_take_part)
    _ask_the_model()


def _spread(module: nn.Module, prefix: str) -> Iterator[tuple[str, Entry]]:
    """The key in a state dict, and the entry, of each parameter that is a DTensor or that one rank owns.

    None for a part of a model whose whole state dict is made: the model's own hook sees all of it."""
    state = state_of(module) or (
        None if prefix else state_around(module)
    )  # None for a copy of a model as it was before
    if state is None or state.unsharded:
        return
    for name, owner in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
        for attribute, p in owner._parameters.items():
            if (link := link_of(p)) is None or link.state is not state:
                continue
            if link.entry.home.is_spread or link.entry.home.mesh is not None:
                yield f"{name}.{attribute}" if name else attribute, link.entry


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Leaves out what only other ranks own, except with ``keep_vars``."""
    for key, entry in _spread(module, prefix):
        value = state_dict.get(key)
        owned = entry.home.placement is Placement.OWNER and entry.home.group.rank() != entry.home.owner
        if owned and isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            del state_dict[key]


def _take_part(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes this rank's part of whole tensors, and of DTensors on another mesh, which are gathered for that."""
    for key, entry in _spread(module, prefix):
        value = state_dict.get(key)
        mesh = value.device_mesh if isinstance(value, DTensor) else None
        if isinstance(value, DTensor) and (mesh, value.placements) != (entry.home.mesh, entry.home.placements):
            value = value.full_tensor()
        whole = value if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else None
        if value is None and entry.home.placement is Placement.OWNER and not entry.shard.numel():
            state_dict[key] = entry.shard.detach()  # this rank has no part of it
        elif whole is not None and tuple(whole.shape) == entry.full_shape:
            state_dict[key] = entry.part(whole)


@functools.cache  # once for each process
def _ask_the_model() -> None:
    """Lets a jitted module ask a sharded model. Thunder's own methods list parameters and call no hooks; its no_sync is
    for its own sharding."""

    def of_model(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def ask(self: ThunderModule, *args: Any, **kwargs: Any) -> Any:
            model = unjitted(self)
            own = {*model.parameters(), *model.buffers()}
            held = {*self._overrides_parameters.values(), *self._overrides_buffers.values()} - {None}
            if states_in(model) and held <= own:  # no transform of Thunder has changed them
                return getattr(model, method.__name__)(*args, **kwargs)
            return method(self, *args, **kwargs)

        return ask

    def whole(self: ThunderModule, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        if not states_in(unjitted(self)):
            return original(self, destination=destination, prefix=prefix, keep_vars=keep_vars)
        found = {prefix + key: value for key, value in full_state_dict(self).items()}
        if destination is None:
            return found
        destination.update(found)
        return destination

    def sync(self: ThunderModule) -> Any:
        return no_sync(self) if states_in(unjitted(self)) else without_sync(self)

    without_sync = ThunderModule.no_sync
    ThunderModule.no_sync = functools.wraps(without_sync)(sync)
    original = ThunderModule.original_state_dict
    ThunderModule.original_state_dict = functools.wraps(original)(whole)
    ThunderModule.state_dict = of_model(ThunderModule.state_dict)
    ThunderModule.load_state_dict = of_model(ThunderModule.load_state_dict)


# ---- one error for all ranks ----


@dataclass
class Said:
    """The message of a rank before ranks are compared: its lines, and for how many seconds the others may be busy, in
    addition to the timeout of ``fsdp``."""

    lines: list[str] = field(default_factory=list)
    timeout: float = 0.0


@contextmanager
def agreement(model: ModelState, what: str, *errors: type[Exception]) -> Iterator[Said]:
    """Around a block that runs on every rank and communicates nothing; yields what it fills in.

    Raises CheckpointError on every rank if a block has raised one of ``errors`` or a CheckpointError, or if the ranks
    have said different lines.
    """
    said, found = Said(), ""
    caught: tuple[type[Exception], ...] = (CheckpointError, *errors)
    try:
        yield said
    except caught as error:
        found = str(error)
    if model.group is not None:
        timeout = said.timeout + model.states[0].options.checks.timeout
        try:
            compare(model.group, what, said.lines, timeout=timeout, error=found)
        except RankMismatchError as mismatch:
            found = found or str(mismatch)
    if found:
        raise CheckpointError(found) from None


@contextmanager
def together(group: dist.ProcessGroup | None, what: str, failure: str) -> Iterator[dict[str, Any]]:
    """Around a call of torch.distributed.checkpoint; yields its arguments for the ranks of ``group``.

    Raises CheckpointError that begins with ``failure`` and has the failures of all ranks.
    """
    alone = group is None or is_alone(group)
    try:
        with nullcontext() if group is None else communicating(what, group), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield {"process_group": None if alone else group, "no_dist": alone}
    except CheckpointException as exception:
        failures = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(exception.failures.items())]
        raise CheckpointError(f"{failure}: {'; '.join(failures)}") from None


# ---- the state of an optimizer ----


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
