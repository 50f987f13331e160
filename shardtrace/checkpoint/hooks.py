"""``state_dict`` and ``load_state_dict`` of a sharded model and of its jitted module: shards are DTensors, as in FSDP2.

So ``torch.save``, torch.distributed.checkpoint and ``get_model_state_dict`` see a tensor of the full shape and which
rows are here, and no rank's rows pass for the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from passes.compat.jit import unjitted
from shardtrace.checkpoint.state import Slot
from shardtrace.model.entry import Entry
from shardtrace.model.home import shard
from shardtrace.model.state import link_of, part_of, state_of, states_in
from shardtrace.training.accumulation import no_sync
from shardtrace.training.full import full_state_dict

import torch
from thunder.core.module import ThunderModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def add_hooks(model: nn.Module) -> None:
    """Adds the hooks to a sharded module and to its parts. Copies of it have them, too."""
    for module in model.modules():
        if module is model or part_of(module) is state_of(model):
            module.register_state_dict_post_hook(_distribute)
            module.register_load_state_dict_pre_hook(_take_rows)
    _ask_the_model()


def _spread(module: nn.Module, prefix: str) -> Iterator[tuple[str, Entry]]:
    """The key in a state dict, and the entry, of each parameter of which the ranks hold different parts.

    None for a part of a model whose whole state dict is made: the model's own hook sees all of it."""
    state = state_of(module) or (None if prefix else part_of(module))  # None for a copy of a model as it was before
    if state is None or state.unsharded:
        return
    for name, owner in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
        for attribute, p in owner._parameters.items():
            if (link := link_of(p)) is not None and link.state is state and link.entry.home.is_spread:
                yield f"{name}.{attribute}" if name else attribute, link.entry


def _distribute(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Makes shards DTensors, except with ``keep_vars``. What one rank holds is whole there, and left out elsewhere."""
    mesh_of = functools.cache(DeviceMesh.from_group)
    made: dict[int, torch.Tensor | None] = {}  # tied weights stay one tensor
    for key, entry in _spread(module, prefix):
        value = state_dict.get(key)
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            continue
        if id(entry) not in made:
            made[id(entry)] = Slot(_alone(value), entry.full_shape, entry.home, mesh_of).distributed()
        if (one := made[id(entry)]) is None:
            del state_dict[key]
        else:
            state_dict[key] = one


def _alone(shard: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: torch cannot pickle the DTensor of a view that begins further on."""
    first = shard.storage_offset() * shard.element_size()
    storage = shard.untyped_storage()[first : first + shard.nbytes]
    return shard.new_empty(0).set_(storage, 0, shard.shape, shard.stride())


def _take_rows(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes this rank's rows of DTensors and of whole tensors. A collective if there are DTensors."""
    for key, entry in _spread(module, prefix):
        value = state_dict.get(key)
        if isinstance(value, DTensor):
            state_dict[key] = shard(value.full_tensor(), entry.home)
        elif isinstance(value, torch.Tensor) and tuple(value.shape) == entry.full_shape != entry.shard_shape:
            state_dict[key] = shard(value, entry.home)
        elif value is None and Slot(entry.shard, entry.full_shape, entry.home, DeviceMesh.from_group).part()[0] is None:
            state_dict[key] = entry.shard.detach()  # this rank has no part of it


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
