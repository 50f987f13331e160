"""``state_dict`` and ``load_state_dict`` of a sharded model and of its jitted module.

Parameters are DTensors, and so are the values of a state dict. What only one rank owns is in the state dict of that
rank. A state dict to load may hold whole tensors, or DTensors on another mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from passes.compat.jit import unjitted
from passes.plan import Placement
from shardtrace.model.entry import Entry
from shardtrace.model.state import link_of, part_of, state_of, states_in
from shardtrace.training.full import full_state_dict
from shardtrace.training.gradients import no_sync

import torch
from thunder.core.module import ThunderModule
from torch import nn
from torch.distributed.tensor import DTensor


def add_hooks(model: nn.Module) -> None:
    """Adds the hooks to a sharded module and to its parts. Copies of it have them, too."""
    for module in model.modules():
        if module is model or part_of(module) is state_of(model):
            module.register_state_dict_post_hook(_leave_out)
            module.register_load_state_dict_pre_hook(_take_part)
    _ask_the_model()


def _spread(module: nn.Module, prefix: str) -> Iterator[tuple[str, Entry]]:
    """The key in a state dict, and the entry, of each parameter that is a DTensor or that one rank owns.

    None for a part of a model whose whole state dict is made: the model's own hook sees all of it."""
    state = state_of(module) or (None if prefix else part_of(module))  # None for a copy of a model as it was before
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
