"""The ``Trainer`` of transformers saves sharded models and their optimizers whole, with all ranks taking part.

Files that the first rank of a trainer writes, and that each rank looks for by itself.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from passes.compat.jit import unjitted
from shardtrace.checkpoint.optimizer import load_full_optimizer_state_dict
from shardtrace.model.state import state_of, states_in
from shardtrace.ranks.consensus import compare
from shardtrace.ranks.failure import communicating
from shardtrace.trainers.optimizers import model_of, saved_whole
from shardtrace.training.full import full_state_dict

import torch
import torch.distributed as dist
from torch import nn

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
