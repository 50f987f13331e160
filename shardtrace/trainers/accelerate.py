"""accelerate's ``Accelerator`` takes a sharded model as it is, and saves and loads whole tensors."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from passes.compat.jit import unjitted
from shardtrace.checkpoint.weights import load_safetensors
from shardtrace.model.state import state_of
from shardtrace.trainers.huggingface import after_first, check_files, join_trainer
from shardtrace.trainers.optimizers import loaded_whole, saved_whole
from shardtrace.training.full import full_state_dict, load_full_state_dict

import torch
from torch import nn


def join_trainers() -> None:
    """Lets the Accelerator and the Trainer of Hugging Face, if they are imported, take sharded models."""
    if (accelerate := sys.modules.get("accelerate.accelerator")) is not None:
        _join_accelerator(accelerate.Accelerator)
    if (local := sys.modules.get("accelerate.local_sgd")) is not None:
        _refuse_local_sgd(local.LocalSGD)
    join_trainer()


@functools.cache  # once for each class
def _join_accelerator(cls: Any) -> None:
    """Replaces methods of the Accelerator, which has no hook for a model that reduces its own gradients."""
    prepare, get, save, load = cls.prepare_model, cls.get_state_dict, cls.save_state, cls.load_state
    join = cls.join_uneven_inputs

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
            folder = save(self, *args, **kwargs)
        after_first(nn.ModuleList(self._models))
        return folder

    @functools.wraps(load)
    def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_sharded, self._models)):
            return load(self, *args, **kwargs)
        kwargs.setdefault("map_location", "cpu")  # the device has room for shards only
        hook = self.register_load_state_pre_hook(_load_models)
        try:
            with loaded_whole(self._optimizers):
                return load(self, *args, **kwargs)
        finally:
            hook.remove()

    @functools.wraps(join)
    def join_uneven_inputs(self: Any, joinables: Any, *args: Any, **kwargs: Any) -> Any:
        if self.num_processes > 1 and any(map(_is_sharded, joinables)):
            raise RuntimeError(
                "accelerator.join_uneven_inputs cannot join sharded models, whose steps need all ranks: iterate over "
                "shardtrace.join(model, batches), which repeats the last batch with weight 0, or leave even_batches on"
            )
        return join(self, joinables, *args, **kwargs)

    cls.prepare_model, cls.get_state_dict = prepare_model, get_state_dict
    cls.join_uneven_inputs = join_uneven_inputs
    cls.save_state, cls.load_state = save_state, load_state


@functools.cache
def _refuse_local_sgd(cls: Any) -> None:
    enter = cls.__enter__

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        if self.enabled and _is_sharded(self.model):
            raise RuntimeError(
                "LocalSGD averages the models of ranks, and each rank of a sharded one has other rows: leave it out, "
                "and add up gradients by accelerator.accumulate(model)"
            )
        return enter(self)

    cls.__enter__ = __enter__


def _load_models(models: list[nn.Module], folder: str) -> None:
    """A hook of ``load_state``, which loads models by a function of safetensors that cannot read shards."""
    if not all(map(_is_sharded, models)):
        raise RuntimeError(
            "accelerate loads sharded models and others together: load the state of the sharded ones with "
            "shardtrace.load_checkpoint, and prepare only the others"
        )
    check_files(nn.ModuleList(models), folder, "the state that accelerate loads")
    for number, model in enumerate(models):
        ending = f"_{number}" if number else ""
        if (file := Path(folder, f"model{ending}.safetensors")).is_file():
            load_safetensors(file, model)
        else:
            pickled = torch.load(Path(folder, f"pytorch_model{ending}.bin"), map_location="cpu", mmap=True)
            load_full_state_dict(model, pickled)
    models.clear()  # what is left on the list is loaded by accelerate


def _is_sharded(model: Any) -> bool:
    return state_of(unjitted(model)) is not None
