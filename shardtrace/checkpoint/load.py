"""``load_checkpoint``: everything is verified, by all ranks together, before anything is changed."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrace.checkpoint.accumulated import set_accumulated
from shardtrace.checkpoint.agree import agree
from shardtrace.checkpoint.codec import decode
from shardtrace.checkpoint.files import INDEX, CheckpointError, checksum, find_checkpoint
from shardtrace.checkpoint.index import Index, SavedTensor, read_index
from shardtrace.checkpoint.optimizer import load_optimizer, new_tensors, optimizer_load
from shardtrace.checkpoint.progress import Progress
from shardtrace.checkpoint.rng import set_rng_state
from shardtrace.checkpoint.save import as_list, failed
from shardtrace.checkpoint.state import ModelState, model_state
from shardtrace.checkpoint.storage import SafetensorsReader
from shardtrace.checkpoint.verify import verify_files
from shardtrace.mesh import is_alone

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


@dataclass(frozen=True, eq=False)
class Plan:
    """What a verified checkpoint will be loaded into: ``targets`` by name, and the values that hold their tensors."""

    path: Path
    index: Index
    tensors: dict[str, SavedTensor]
    targets: dict[str, torch.Tensor]
    optimizer: dict[str, Any] | None
    extra_state: dict[str, Any]
    schedulers: list[Any]
    scaler: Any
    rng: dict[str, Any] | None
    extra: Any
    accumulated: dict[str, torch.Tensor]


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
        plan = _verify(Path(path), state, optimizer, as_list(schedulers), scaler)
    except (CheckpointError, OSError, SafetensorError) as problem:
        error = problem
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as problem:
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


def _verify(path: Path, model: ModelState, optimizer: Optimizer | None, schedulers: Any, scaler: Any) -> Plan:
    """What to load, when nothing is wrong with it; this rank checks its share of the files."""
    directory = find_checkpoint(path.absolute())
    index = read_index(directory)
    tensors = {**index.tensors, **{name: index.tensors[first] for name, first in index.tied.items()}}
    targets: dict[str, torch.Tensor | None] = {}

    def decoded(value: Any) -> Any:
        return decode(value, new_tensors(value, tensors, targets))

    _check_model(model, tensors)
    targets |= {f"model.{name}": slot.distributed() for name, slot in model.slots.items()}
    saved = index.state["optimizer"]
    if optimizer is not None:
        if saved is None:
            raise CheckpointError(f"{directory} holds no optimizer: pass none to load the model alone")
        state = {**saved["state"]}
        for of_rank in index.ranks:
            state |= of_rank["optimizer"]
        saved = optimizer_load(optimizer, model, {**saved, "state": state}, tensors, targets)
    if schedulers and len(schedulers) != len(index.state["schedulers"]):
        raise CheckpointError(
            f"{directory} holds {len(index.state['schedulers'])} schedulers, {len(schedulers)} are to be loaded"
        )
    if scaler is not None and index.state["scaler"] is None:
        raise CheckpointError(f"{directory} holds no scaler")
    same = len(index.ranks) == model.ranks
    own = index.ranks[model.rank if same else 0]
    if any(rank["accumulated"] != {"dict": []} for rank in index.ranks) and not (same and model.states):
        raise CheckpointError(
            f"{directory} was saved inside an accumulation of gradients (no_sync) on {len(index.ranks)} ranks, and can "
            "be loaded by a sharded model on as many ranks alone"
        )
    plan = Plan(
        directory,
        index,
        tensors,
        {},
        saved if optimizer is not None else None,
        {key: decoded(value) for key, value in index.state["extra_state"].items()},
        decoded(index.state["schedulers"]) if schedulers else [],
        decoded(index.state["scaler"]) if scaler is not None else None,
        decoded(own["rng"]) if same else None,
        decoded(own["extra"]),
        decoded(own["accumulated"]) if same else {},
    )
    plan.targets.update({name: target for name, target in targets.items() if target is not None})
    if plan.extra_state.keys() != model.extra.keys():
        raise CheckpointError(f"{directory} holds the extra states {[*plan.extra_state]}, the model {[*model.extra]}")
    verify_files(directory, index, model.rank, model.ranks, Progress("verify", show=model.rank == 0))
    return plan


def _check_model(model: ModelState, tensors: dict[str, SavedTensor]) -> None:
    """Raises CheckpointError that names what the checkpoint and the model do not have in common."""
    saved = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    names = {name: name for name in model.slots} | model.tied
    problems = [f"missing key {name}" for name in names if name not in saved]
    problems += [f"unexpected key {name}" for name in saved if name not in names]
    for name, slot in model.slots.items():
        if name in saved and saved[name].shape != slot.full_shape:
            problems.append(f"{name} has shape {saved[name].shape}, the model's is {slot.full_shape}")
        elif name in saved and saved[name].dtype != slot.local.dtype:
            problems.append(f"{name} is {saved[name].dtype}, the model's is {slot.local.dtype}")
    for name, first in model.tied.items():
        if name in saved and first in saved and saved[name] is not saved[first]:
            problems.append(f"{name} and {first} are tied in the model, and two tensors in the checkpoint")
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise CheckpointError(
            f"the checkpoint does not fit {type(model.module).__name__}: {'; '.join(problems[:8])}{more}"
        )


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
