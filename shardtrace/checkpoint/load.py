"""``load_checkpoint``: all ranks together verify everything before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardtrace.checkpoint.agreement import agreement, together
from shardtrace.checkpoint.files import INDEX, CheckpointError, ProgressBar, checksum, find_checkpoint
from shardtrace.checkpoint.index import Index, SavedTensor, check_files, decode, read_index
from shardtrace.checkpoint.optimizer import load_optimizer, new_tensors, optimizer_load
from shardtrace.checkpoint.save import set_rng_state, set_sums
from shardtrace.checkpoint.state import Companions, ModelState, Optimizers, companions, model_state
from shardtrace.checkpoint.storage import SafetensorsReader

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
            found = _checked(Path(path), state, others)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as problem:
            if isinstance(problem, CheckpointError):
                raise
            raise CheckpointError(f"the index of {path} is not one: {type(problem).__name__}: {problem}") from None
        said.timeout = sum(size for size, _ in found.index.files.values()) / SLOWEST
        said.lines = [f"{found.path} with an index of checksum {checksum(found.path / INDEX):08x}"]
    reader = SafetensorsReader(found.path, found.tensors, ProgressBar("load", show=state.rank == 0))
    failure = f"{found.path} was loaded only in part"
    with together(state.group, "a checkpoint to be loaded", failure) as arguments, torch.no_grad():
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(found.targets, storage_reader=reader, planner=planner, **arguments)
    for restore in found.restores:
        restore()
    return Checkpoint(found.path, found.index.step, len(found.index.ranks), found.extra)


@dataclass(frozen=True, eq=False)
class _Found:
    """A checkpoint that fits the model. ``targets`` are the tensors to read into, by name. ``restores`` are called once
    they are read."""

    path: Path
    index: Index
    tensors: dict[str, SavedTensor]
    targets: dict[str, torch.Tensor]
    restores: list[Callable[[], object]]
    extra: Any


def _checked(path: Path, model: ModelState, others: Companions) -> _Found:
    """The checkpoint at ``path``. This rank checks its share of the files.

    Raises CheckpointError that says what is wrong; nothing has been changed.
    """
    directory = find_checkpoint(path.absolute())
    index = read_index(directory)
    tensors = {**index.tensors, **{name: index.tensors[first] for name, first in index.tied.items()}}
    targets: dict[str, torch.Tensor | None] = {}
    for label, one in others.models(model).items():
        _check_model(label, one, tensors)
        targets |= {f"{label}.{name}": slot.distributed() for name, slot in one.slots.items()}
    _check_companions(directory, index, others)
    same = len(index.ranks) == model.ranks
    if any(rank["accumulated"] != {"dict": []} for rank in index.ranks) and not (same and model.states):
        raise CheckpointError(
            f"{directory} was saved inside an accumulation of gradients (no_sync) on {len(index.ranks)} ranks, and can "
            "be loaded only by a sharded model on as many ranks"
        )

    def decoded(value: Any) -> Any:  # adds to targets
        return decode(value, new_tensors(value, tensors, targets))

    restores: list[Callable[[], object]] = []
    for number, optimizer in enumerate(others.optimizers):
        values = optimizer_load(optimizer, model, _saved_optimizer(index, number), tensors, targets)
        restores.append(partial(load_optimizer, optimizer, values))
    restores += _restores(index, model, others, decoded)
    own = index.ranks[model.rank if same else 0]
    restores.append(partial(set_sums, model, decoded(own["accumulated"]) if same else {}))
    if same:
        restores.append(partial(set_rng_state, decoded(own["rng"]), model.device))
    extra = decoded(own["extra"])
    check_files(directory, index, model.rank, model.ranks, ProgressBar("verify", show=model.rank == 0))
    mine = {name: target for name, target in targets.items() if target is not None}
    return _Found(directory, index, tensors, mine, restores, extra)


def _restores(
    index: Index, model: ModelState, others: Companions, decoded: Callable[[Any], Any]
) -> Iterator[Callable[[], object]]:
    """Calls that hand their state to the model's modules, the schedulers and the scaler."""
    saved = index.state["extra_state"]
    if saved.keys() != model.extra.keys():
        raise CheckpointError(f"the checkpoint holds the extra states {[*saved]}, the model {[*model.extra]}")
    for key, value in saved.items():
        yield partial(model.module.get_submodule(key.rpartition(".")[0]).set_extra_state, decoded(value))
    states = decoded(index.state["schedulers"]) if others.schedulers else []
    for scheduler, value in zip(others.schedulers, states, strict=True):
        yield partial(scheduler.load_state_dict, value)
    if others.scaler is not None:
        yield partial(others.scaler.load_state_dict, decoded(index.state["scaler"]))


def _check_companions(directory: Path, index: Index, others: Companions) -> None:
    saved, wanted = len(index.state["optimizers"]), len(others.optimizers)
    if wanted and not saved:
        raise CheckpointError(f"{directory} holds no optimizer: pass none to load only the model")
    if wanted and wanted != saved:
        raise CheckpointError(f"{directory} holds {saved} optimizer(s), {wanted} are to be loaded")
    saved, wanted = len(index.state["schedulers"]), len(others.schedulers)
    if wanted and wanted != saved:
        raise CheckpointError(f"{directory} holds {saved} schedulers, {wanted} are to be loaded")
    if others.scaler is not None and index.state["scaler"] is None:
        raise CheckpointError(f"{directory} holds no scaler")


def _saved_optimizer(index: Index, number: int) -> dict[str, Any]:
    """The state of one of the optimizers that the first rank saved, and that of the parameters that other ranks own."""
    saved = index.state["optimizers"][number]
    state = {**saved["state"]}
    for rank in index.ranks:
        state |= rank["optimizers"][number]
    return {**saved, "state": state}


def _check_model(label: str, model: ModelState, tensors: dict[str, SavedTensor]) -> None:
    """Raise CheckpointError that names what the checkpoint and the model do not have in common."""
    prefix = f"{label}."
    saved = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    if not saved and model.slots:
        raise CheckpointError(f"the checkpoint holds no {label}")
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
