"""``load_checkpoint``: all ranks together verify everything before anything is changed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrace.checkpoint.agreement import agreement, together
from shardtrace.checkpoint.contents import Contents, checked_contents
from shardtrace.checkpoint.files import INDEX, CheckpointError, checksum
from shardtrace.checkpoint.optimizer import load_optimizer
from shardtrace.checkpoint.own import set_rng_state, set_sums
from shardtrace.checkpoint.progress_bar import ProgressBar
from shardtrace.checkpoint.reader import SafetensorsReader
from shardtrace.checkpoint.state import ModelState, Optimizers, companions, model_state

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner

SLOWEST = 50e6  # bytes per second; files are expected to be read at least as fast


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded.

    ``ranks`` is the number of ranks that saved it. ``extra`` is what this rank had saved, or what the first rank had
    saved if the number of ranks has changed.
    """

    path: Path
    step: int
    ranks: int
    extra: Any


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    schedulers: Any = (),
    scaler: Any = None,
    ema: nn.Module | None = None,
) -> Checkpoint:
    """Load a checkpoint into a model, its optimizer, schedulers and scaler, in place.

    A collective: every rank of the model's group must call it. If the model is not sharded, only the calling process
    loads it. The number of ranks and the strategy may differ from those of the run that saved. Random number generators
    are set if the number of ranks is the same; training then continues bit for bit as if it had not been interrupted.

    Nothing in a checkpoint is ever run or unpickled. Before anything is changed, all ranks together verify every file:
    its name, size and checksum, and that its keys, shapes and dtypes are those of the model and the optimizer. If the
    disk fails after that, the model is left partly loaded.

    Args:
        path: a checkpoint, or a directory of checkpoints, from which the latest complete one is loaded.
        optimizer: new, or in use; or several in a list, in the order in which they were saved. Default: the saved state
            of optimizers is ignored. Likewise ``schedulers``, ``scaler`` and ``ema``.

    Raises:
        CheckpointError: on every rank, naming the file, tensor or parameter that is wrong.
    """
    state, others = model_state(model), companions(optimizer, schedulers, scaler, ema)
    with agreement(state, "the checkpoint to load", OSError, SafetensorError) as said:
        try:
            contents = checked_contents(Path(path), state, others)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as problem:
            if isinstance(problem, CheckpointError):
                raise
            raise CheckpointError(f"the index of {path} is not one: {type(problem).__name__}: {problem}") from None
        said.timeout = sum(size for size, _ in contents.index.files.values()) / SLOWEST
        said.lines = [f"{contents.path} with an index of checksum {checksum(contents.path / INDEX):08x}"]
    _read(contents, state)
    set_sums(state, contents.sums)
    for key, value in contents.extra_state.items():
        state.module.get_submodule(key.rpartition(".")[0]).set_extra_state(value)
    for one, values in zip(others.optimizers, contents.optimizers, strict=True):
        load_optimizer(one, values)
    for scheduler, values in zip(others.schedulers, contents.schedulers, strict=False):
        scheduler.load_state_dict(values)
    if scaler is not None:
        scaler.load_state_dict(contents.scaler)
    if contents.rng is not None:
        set_rng_state(contents.rng, state.device)
    return Checkpoint(contents.path, contents.index.step, len(contents.index.ranks), contents.extra)


def _read(contents: Contents, model: ModelState) -> None:
    reader = SafetensorsReader(contents.path, contents.tensors, ProgressBar("load", show=model.rank == 0))
    failure = f"{contents.path} was loaded only in part"
    with together(model.group, "a checkpoint to be loaded", failure) as arguments, torch.no_grad():
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(contents.targets, storage_reader=reader, planner=planner, **arguments)
