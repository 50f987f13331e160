"""What trainers of other libraries need to train a sharded model. None of these libraries is imported here.

accelerate's ``Accelerator`` takes a sharded model as it is, and saves and loads whole tensors. The ``Trainer`` of
transformers saves sharded models and their optimizers whole, with all ranks taking part; there are files that the first
rank of a trainer writes, and that each rank looks for by itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from passes.compat.jit import unjitted
from shardtrace.checkpoint.state import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    own_optimizer_state_dict,
)
from shardtrace.checkpoint.weights import load_safetensors
from shardtrace.model.state import link_of, state_of, states_in
from shardtrace.ranks.consensus import compare
from shardtrace.ranks.failure import communicating
from shardtrace.training.full import full_state_dict, load_full_state_dict

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

# ---- optimizers ----


def model_of(optimizer: Optimizer) -> nn.Module | None:
    """The sharded model whose parameters an optimizer updates; None if none of them is sharded."""
    links = (link_of(p) for group in optimizer.param_groups for p in group["params"])
    return next((link.state.model for link in links if link is not None), None)


@contextmanager
def saved_whole(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Lets ``state_dict`` of the optimizers give the state of a single process on the first rank, and ``{}`` on others.

    A collective when entered, which gathers the state to the first rank's host memory.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if (model := model_of(optimizer)) is not None:
                whole = full_optimizer_state_dict(model, optimizer, rank0_only=True, cpu=True)
                hook = functools.partial(_given, whole)
                stack.callback(_torchs(optimizer).register_state_dict_post_hook(hook).remove)
        yield


@contextmanager
def loaded_whole(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Lets ``load_state_dict`` of the optimizers take the state of a single process. Every rank must call it."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            if (model := model_of(optimizer)) is not None:
                hook = functools.partial(_own, model)
                stack.callback(_torchs(optimizer).register_load_state_dict_pre_hook(hook).remove)
        yield


def _given(whole: dict[str, Any], _: Optimizer, __: dict[str, Any]) -> dict[str, Any]:
    return whole


def _own(model: nn.Module, optimizer: Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
    return own_optimizer_state_dict(model, optimizer, whole)


def _torchs(optimizer: Any) -> Optimizer:
    """The optimizer inside a wrapper of accelerate, which hands on its calls."""
    while isinstance(inner := optimizer.__dict__.get("optimizer"), Optimizer):
        optimizer = inner
    return optimizer


# ---- accelerate ----


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


# ---- the Trainer of transformers ----


READ = (".safetensors", ".bin", ".pt", ".ckpt")
OF_A_RANK = "training_args.bin"  # may differ between ranks


def after_first(model: nn.Module, value: Any = None) -> Any:
    """The first rank's ``value``, once the first rank has come here; ``value`` itself if nothing is sharded."""
    said = [value]
    if states := states_in(unjitted(model)):
        with communicating("the first rank to save", states[0].group):
            dist.broadcast_object_list(said, group=states[0].group, group_src=0)
    return said[0]


def check_files(model: nn.Module, path: Any, what: str) -> None:
    """Raises RankMismatchError on every rank unless all see the same files at ``path``, from which each reads its
    rows."""
    for state in states_in(unjitted(model))[:1]:
        root = Path(str(path))
        found = (f for f in [root, *root.rglob("*")] if f.suffix in READ and f.is_file() and f.name != OF_A_RANK)
        lines = [str(path), *sorted(f"{file.name} of {file.stat().st_size} bytes" for file in found)]
        hint = "the ranks must read the same checkpoint: pass its path, on a disk that all nodes share"
        compare(state.group, what, lines, timeout=state.options.checks.timeout, hint=hint)


def join_trainer() -> None:
    """Lets the Trainer, if it is imported, save and resume with sharded models."""
    if (transformers := sys.modules.get("transformers.trainer")) is not None:
        _join(transformers.Trainer, transformers.get_last_checkpoint)


@functools.cache  # once for each class
def _join(cls: Any, get_last_checkpoint: Any) -> None:
    """Replaces methods of the Trainer which all ranks call, and in which only the first one saves."""
    _agree_on_checkpoints(cls, get_last_checkpoint)
    save, save_optimizer = cls.save_model, cls._save_optimizer_and_scheduler
    load_optimizer = cls._load_optimizer_and_scheduler

    @functools.wraps(save)
    def save_model(self: Any, *args: Any, **kwargs: Any) -> None:
        if state_of(self.model) is None:
            return save(self, *args, **kwargs)
        whole = full_state_dict(self.model, rank0_only=True, cpu=True)
        self._save = functools.partial(self._save, state_dict=whole)
        try:
            save(self, *args, **kwargs)
        finally:
            del self._save
        after_first(self.model)

    @functools.wraps(save_optimizer)
    def save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        with saved_whole([self.optimizer]):
            save_optimizer(self, output_dir)

    @functools.wraps(load_optimizer)
    def load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        file, scheduler = (Path(checkpoint or "", f"{name}.pt") for name in ("optimizer", "scheduler"))
        model = model_of(self.optimizer)
        if checkpoint is None or model is None or not (file.is_file() and scheduler.is_file()):
            return load_optimizer(self, checkpoint)
        # mapped, because the Trainer's own method would load the whole state to each device
        whole = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        load_full_optimizer_state_dict(model, self.optimizer, whole)
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    cls.save_model = save_model
    cls._save_optimizer_and_scheduler = save_optimizer_and_scheduler
    cls._load_optimizer_and_scheduler = load_optimizer_and_scheduler


def _agree_on_checkpoints(cls: Any, get_last_checkpoint: Any) -> None:
    """Replaces methods in which each rank looks for checkpoints by itself."""
    train_, save_all, load_best = cls.train, cls._save_checkpoint, cls._load_best_model

    @functools.wraps(train_)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = resume_from_checkpoint
        if path is True:
            path = get_last_checkpoint(self.args.output_dir) if Path(self.args.output_dir).is_dir() else None
        check_files(self.model, path or None, "the checkpoint to resume from")
        return train_(self, resume_from_checkpoint, *args, **kwargs)

    @functools.wraps(save_all)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        save_all(self, *args, **kwargs)
        self.state.best_model_checkpoint = after_first(self.model, self.state.best_model_checkpoint)

    @functools.wraps(load_best)
    def load_best_model(self: Any) -> None:
        check_files(self.model, self.state.best_model_checkpoint, "the best checkpoint to load")
        load_best(self)

    cls.train, cls._save_checkpoint, cls._load_best_model = train, save_checkpoint, load_best_model
