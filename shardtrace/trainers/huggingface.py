"""The ``Trainer`` of transformers saves sharded models and their optimizers whole, with all ranks taking part."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from shardtrace.checkpoint.optimizer import load_full_optimizer_state_dict
from shardtrace.model.state import state_of
from shardtrace.trainers.files import after_first, check_files
from shardtrace.trainers.optimizers import model_of, saved_whole
from shardtrace.training.full import full_state_dict

import torch


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
