"""The contents of a checkpoint, once its files are checked, and the tensors into which they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrace.checkpoint.codec import decode
from shardtrace.checkpoint.files import CheckpointError, find_checkpoint
from shardtrace.checkpoint.index import Index, SavedTensor, read_index
from shardtrace.checkpoint.integrity import check_files
from shardtrace.checkpoint.optimizer import new_tensors, optimizer_load
from shardtrace.checkpoint.progress_bar import ProgressBar
from shardtrace.checkpoint.state import Companions, ModelState

import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class Contents:
    """A checkpoint that fits the model. ``targets`` are the tensors to read into, by name; other values hold them."""

    path: Path
    index: Index
    tensors: dict[str, SavedTensor]
    targets: dict[str, torch.Tensor]
    optimizers: list[dict[str, Any]]
    extra_state: dict[str, Any]
    schedulers: list[Any]
    scaler: Any
    rng: dict[str, Any] | None
    extra: Any
    sums: dict[str, torch.Tensor]


def checked_contents(path: Path, model: ModelState, others: Companions) -> Contents:
    """The contents of the checkpoint at ``path``. This rank checks its share of the files.

    Raises CheckpointError that says what is wrong; nothing has been changed.
    """
    directory = find_checkpoint(path.absolute())
    index = read_index(directory)
    tensors = {**index.tensors, **{name: index.tensors[first] for name, first in index.tied.items()}}
    targets: dict[str, torch.Tensor | None] = {}

    def decoded(value: Any) -> Any:
        return decode(value, new_tensors(value, tensors, targets))

    for label, one in others.models(model).items():
        _check_model(label, one, tensors)
        targets |= {f"{label}.{name}": slot.distributed() for name, slot in one.slots.items()}
    _check_companions(directory, index, others)
    same = len(index.ranks) == model.ranks
    own = index.ranks[model.rank if same else 0]
    if any(rank["accumulated"] != {"dict": []} for rank in index.ranks) and not (same and model.states):
        raise CheckpointError(
            f"{directory} was saved inside an accumulation of gradients (no_sync) on {len(index.ranks)} ranks, and can "
            "be loaded only by a sharded model on as many ranks"
        )
    new_optimizers = [  # these calls and the following ones add to targets
        optimizer_load(optimizer, model, _saved_optimizer(index, number), tensors, targets)
        for number, optimizer in enumerate(others.optimizers)
    ]
    extra_state = {key: decoded(value) for key, value in index.state["extra_state"].items()}
    if extra_state.keys() != model.extra.keys():
        raise CheckpointError(f"{directory} holds the extra states {[*extra_state]}, the model {[*model.extra]}")
    values = {
        "schedulers": decoded(index.state["schedulers"]) if others.schedulers else [],
        "scaler": decoded(index.state["scaler"]) if others.scaler is not None else None,
        "rng": decoded(own["rng"]) if same else None,
        "extra": decoded(own["extra"]),
        "sums": decoded(own["accumulated"]) if same else {},
    }
    check_files(directory, index, model.rank, model.ranks, ProgressBar("verify", show=model.rank == 0))
    return Contents(
        path=directory,
        index=index,
        tensors=tensors,
        targets={name: target for name, target in targets.items() if target is not None},
        optimizers=new_optimizers,
        extra_state=extra_state,
        **values,
    )


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
