"""A model's tensors for torch.distributed.checkpoint, and its ``state_dict``.

The tensors have their original shapes, without padding. ``state_dict`` and ``load_state_dict`` are those of a sharded
model and of its jitted module. Parameters are DTensors, and so are the values of a state dict. What only one rank owns
is in the state dict of that rank. A state dict to load may hold whole tensors, or DTensors on another mesh.

If one rank fails, all ranks raise one error.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from passes.compat.jit import unjitted
from passes.plan import Placement, Shape
from shardtrace.checkpoint.files import CheckpointError
from shardtrace.model.shards import Entry, Home
from shardtrace.model.state import ShardedState, link_of, state_around, state_of, states_in
from shardtrace.ranks.consensus import RankMismatchError, compare
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone
from shardtrace.training.full import full_state_dict, sharded_entries
from shardtrace.training.gradients import no_sync

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
    """What a rank says before ranks are compared: its lines, and for how many seconds the others may be busy, in
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
