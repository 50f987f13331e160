"""``load_checkpoint``: everything is verified, by all ranks together, before anything is changed."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrace.checkpoint.accumulated import set_accumulated
from shardtrace.checkpoint.agree import agree
from shardtrace.checkpoint.files import INDEX, CheckpointError, checksum
from shardtrace.checkpoint.optimizer import load_optimizer
from shardtrace.checkpoint.plan import Plan, verified_plan
from shardtrace.checkpoint.progress import Progress
from shardtrace.checkpoint.reader import SafetensorsReader
from shardtrace.checkpoint.rng import set_rng_state
from shardtrace.checkpoint.save import as_list, failed
from shardtrace.checkpoint.state import ModelState, model_state
from shardtrace.ranks.mesh import is_alone

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.optim import Optimizer

SLOWEST = 50e6  # bytes in a second at which files are expected to be read, at least


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded. ``ranks``: how many saved it. ``extra``: what this rank had saved, the first rank's if the
    number of ranks is another."""

    path: Path
    step: int
    ranks: int
    extra: Any


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    schedulers: Any = (),
    scaler: Any = None,
) -> Checkpoint:
    """Loads a checkpoint into a model, its optimizer and the others, in place.

    A collective: every rank of the model's group must call it; a model that is not sharded is loaded by the calling
    process alone. The number of ranks and the strategy may be other than those that saved. Generators of random numbers
    are set if the number of ranks is the same: then a training goes on bit for bit as if it had not been interrupted.

    Nothing in a checkpoint is ever run or unpickled. Before anything is changed, all ranks together verify every file:
    its name, size and checksum, and the keys, shapes and dtypes in it, and that they are those of the model and the
    optimizer. If the disk fails after that, the model is left partly loaded.

    Args:
        path: a checkpoint, or a directory of checkpoints, of which the latest that is complete is loaded.
        optimizer: new, or in use; default: what is saved of one is left alone. Likewise ``schedulers``, ``scaler``.

    Raises:
        CheckpointError: on every rank; which file, tensor or parameter is not as it should be.
    """
    state, plan, error = model_state(model), None, None
    try:
        plan = verified_plan(Path(path), state, optimizer, as_list(schedulers), scaler)
    except (CheckpointError, OSError, SafetensorError) as problem:
        error = problem
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as problem:
        error = CheckpointError(f"the index of {path} is not one: {type(problem).__name__}: {problem}")
    seconds = sum(size for size, _ in plan.index.files.values()) / SLOWEST if plan is not None else 0.0
    lines = [f"{plan.path} with an index of checksum {checksum(plan.path / INDEX):08x}"] if plan is not None else []
    agree(state, "the checkpoint to load", lines, error, timeout=seconds)
    assert plan is not None
    _read(plan, state)
    set_accumulated(state, plan.accumulated)
    for key, value in plan.extra_state.items():
        state.module.get_submodule(key.rpartition(".")[0]).set_extra_state(value)
    if optimizer is not None and plan.optimizer is not None:
        load_optimizer(optimizer, plan.optimizer)
    for scheduler, values in zip(as_list(schedulers), plan.schedulers, strict=False):
        scheduler.load_state_dict(values)
    if scaler is not None:
        scaler.load_state_dict(plan.scaler)
    if plan.rng is not None:
        set_rng_state(plan.rng, state.device)
    return Checkpoint(plan.path, plan.index.step, len(plan.index.ranks), plan.extra)


def _read(plan: Plan, model: ModelState) -> None:
    alone = model.group is None or is_alone(model.group)
    reader = SafetensorsReader(plan.path, plan.tensors, Progress("load", show=model.rank == 0))
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                plan.targets,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=None if alone else model.group,
                no_dist=alone,
            )
    except CheckpointException as exception:
        raise failed(f"{plan.path} was loaded in part only", exception) from None
