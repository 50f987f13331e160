"""accelerate's ``Accelerator`` takes a sharded model as it is, and saves and loads whole tensors."""

from __future__ import annotations

import functools
import sys
from typing import Any

from passes.compat.jit import unjitted
from shardtrace.model.state import state_of
from shardtrace.trainers.huggingface import join_trainer
from shardtrace.trainers.optimizers import loaded_whole, saved_whole
from shardtrace.training.full import full_state_dict


def join_trainers() -> None:
    """Lets the Accelerator and the Trainer of Hugging Face, if they are imported, take sharded models."""
    if (accelerate := sys.modules.get("accelerate.accelerator")) is not None:
        _join_accelerator(accelerate.Accelerator)
    join_trainer()


@functools.cache  # once for each class
def _join_accelerator(cls: Any) -> None:
    """Replaces methods of the Accelerator, which has no hook for a model that reduces its own gradients."""
    prepare, get, save, load = cls.prepare_model, cls.get_state_dict, cls.save_state, cls.load_state

    @functools.wraps(prepare)
    def prepare_model(self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        if not _is_sharded(model):
            return prepare(self, model, device_placement, evaluation_mode)
        join_trainer()  # it may have been imported after fsdp()
        return prepare(self, model, device_placement=False, evaluation_mode=True)  # only autocast: no device, no DDP

    @functools.wraps(get)
    def get_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_sharded(model):
            return full_state_dict(model, rank0_only=True, cpu=True)
        return get(self, model, *args, **kwargs)

    @functools.wraps(save)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        with saved_whole(self._optimizers):
            return save(self, *args, **kwargs)

    @functools.wraps(load)
    def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(_is_sharded, self._models)):
            kwargs.setdefault("map_location", "cpu")  # the device has room for shards only
        with loaded_whole(self._optimizers):
            return load(self, *args, **kwargs)

    cls.prepare_model, cls.get_state_dict = prepare_model, get_state_dict
    cls.save_state, cls.load_state = save_state, load_state


def _is_sharded(model: Any) -> bool:
    return state_of(unjitted(model)) is not None
