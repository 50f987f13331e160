"""``save_checkpoint``: a new directory for each step, which is complete or not a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrace.checkpoint.agreement import agree
from shardtrace.checkpoint.codec import encode
from shardtrace.checkpoint.files import CheckpointError, step_directory
from shardtrace.checkpoint.optimizer import of_owners, optimizer_state
from shardtrace.checkpoint.progress_bar import ProgressBar
from shardtrace.checkpoint.rng import rng_state
from shardtrace.checkpoint.state import Keep, ModelState, check_second, model_state
from shardtrace.checkpoint.sums import sums_of
from shardtrace.checkpoint.writer import SafetensorsWriter
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone
from shardtrace.training.buffers import warn_of_differing_buffers

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.optim import Optimizer

Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """The data that a rank saves: tensors, its ``own`` other state, and ``shared`` state from the first rank."""

    root: Path
    step: int
    tensors: dict[str, torch.Tensor]
    own: dict[str, Any]
    shared: dict[str, Any]
    keep_last: int | None


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    schedulers: Any = (),
    scaler: Any = None,
    extra: Any = None,
    ema: nn.Module | None = None,
    keep_last: int | None = None,
) -> Path:
    """Save model, optimizer and random number generators to ``path/step-<step>``; return that directory.

    A collective: every rank of the model's group must call it, with a ``path`` that is the same directory for all. If
    the model is not sharded, only the calling process saves it. Each rank writes its shards; data that several ranks
    hold is written once. Files are safetensors, the index is JSON. The index is written last, once all files are on
    disk; a directory without it is not a checkpoint. An interrupted save leaves earlier checkpoints as they are.

    The first rank's buffers are saved (see :func:`shardtrace.sync_buffers`). Gradients that ``no_sync`` has added up
    and no step has reduced are saved by each rank. ``.grad`` is not saved: save after ``optimizer.step()``.

    Args:
        path: the directory that holds all checkpoints of a training run, created if it does not exist.
        optimizer: the optimizer, or several in a list.
        step: the training step, greater than that of every checkpoint in ``path``.
        schedulers: one or more objects with ``state_dict()``, such as learning rate schedulers.
        scaler: the ``torch.amp.GradScaler``.
        ema: a second model of the same ranks, such as torch's ``AveragedModel`` of ``model``, in its own slot.
        extra: other values to keep, for each rank its own: None, bool, int, float, str, tensors, and lists, tuples and
            dicts of them.
        keep_last: remove all but this many checkpoints in ``path`` once this one is complete. Default: remove none.

    Raises:
        CheckpointError: on every rank, naming the value that cannot be saved, or the file and what went wrong with it.
    """
    state = model_state(model)
    prepared = prepare(
        state,
        path,
        optimizer,
        step=step,
        schedulers=schedulers,
        scaler=scaler,
        extra=extra,
        ema=ema,
        keep_last=keep_last,
    )
    write(prepared, state.group, ProgressBar("save", show=state.rank == 0))
    return step_directory(prepared.root, step)


def prepare(
    model: ModelState,
    path: str | os.PathLike[str],
    optimizer: Optimizers,
    *,
    step: int,
    schedulers: Any,
    scaler: Any,
    extra: Any,
    ema: nn.Module | None,
    keep_last: int | None,
    keep: Keep = torch.Tensor.detach,
) -> Prepared:
    """Collect what to save. ``keep`` is applied to each tensor: it returns the tensor itself, or a copy.

    Raises CheckpointError on every rank.
    """
    root, error, prepared = Path(path).absolute(), None, None
    if model.group is not None:
        warn_of_differing_buffers(model.module, model.group)
    try:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"step must be a whole number of at least 0, not {step!r}")
        if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
            raise CheckpointError(f"keep_last must be a whole number of at least 1, or None, not {keep_last!r}")
        tensors, own, shared = _collect(model, optimizer, schedulers, scaler, extra, keep)
        if ema is not None:
            second = model_state(ema)
            check_second(second, model)
            tensors |= _tensors("ema", second, keep)
            if model.rank == 0:
                shared["tied"] |= _tied("ema", second)
        prepared = Prepared(root=root, step=step, tensors=tensors, own=own, shared=shared, keep_last=keep_last)
    except CheckpointError as problem:
        error = problem
    agree(model, f"a checkpoint to save to {root}", [f"step {step}, keep_last={keep_last}"], error)
    assert prepared is not None
    return prepared


def _collect(
    model: ModelState, optimizer: Optimizers, schedulers: Any, scaler: Any, extra: Any, keep: Keep
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """The tensors, this rank's own other state, and the state that the first rank saves for all."""
    tensors: dict[str, torch.Tensor | None] = {**_tensors("model", model, keep)}
    saved = [optimizer_state(o, model, tensors, keep, label(number)) for number, o in enumerate(as_list(optimizer))]
    plain: dict[str, torch.Tensor] = {}
    own: dict[str, Any] = {
        "rng": encode(rng_state(model.device), f"ranks.{model.rank}.rng", plain),
        "extra": encode(extra, f"ranks.{model.rank}.extra", plain),
        "accumulated": encode(sums_of(model), f"ranks.{model.rank}.accumulated", plain),
        "optimizers": [of_owners(one, model) for one in saved],
    }
    shared: dict[str, Any] = {}
    if model.rank == 0:
        states = [scheduler.state_dict() for scheduler in as_list(schedulers)]
        shared = {
            "tied": _tied("model", model),
            "extra_state": {key: encode(value, f"extra_state.{key}", plain) for key, value in model.extra.items()},
            "optimizers": saved,
            "schedulers": encode(states, "schedulers", plain),
            "scaler": encode(scaler.state_dict() if scaler is not None else None, "scaler", plain),
        }
    tensors |= {name: keep(value) for name, value in plain.items()}
    return {name: value for name, value in tensors.items() if value is not None}, own, shared


def _tensors(label: str, model: ModelState, keep: Keep) -> dict[str, torch.Tensor]:
    """This rank's parts of a model's tensors. Unsharded ones, which may differ as buffers do, are the first rank's."""
    parts = {
        f"{label}.{name}": slot.distributed(keep(slot.local))
        for name, slot in model.slots.items()
        if slot.home is not None or model.rank == 0
    }
    return {name: part for name, part in parts.items() if part is not None}


def _tied(label: str, model: ModelState) -> dict[str, str]:
    return {f"{label}.{name}": f"{label}.{first}" for name, first in model.tied.items()}


def as_list(values: Any) -> Sequence[Any]:
    return values if isinstance(values, (list, tuple)) else [values] if values is not None else []


def label(number: int) -> str:
    """The beginning of the names of an optimizer's tensors."""
    return f"optimizer.{number}" if number else "optimizer"


def write(prepared: Prepared, group: dist.ProcessGroup | None, progress: ProgressBar) -> None:
    """Write a checkpoint through torch.distributed.checkpoint. Raises CheckpointError on every rank."""
    writer = SafetensorsWriter(
        prepared.root,
        step=prepared.step,
        own=prepared.own,
        shared=prepared.shared,
        keep_last=prepared.keep_last,
        progress=progress,
    )
    alone = group is None or is_alone(group)
    together = nullcontext() if group is None else communicating("a checkpoint to be saved", group)
    try:
        with together, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                prepared.tensors,
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=None if alone else group,
                no_dist=alone,
            )
    except CheckpointException as exception:
        writer.discard()
        raise failed(f"step {prepared.step} was not saved to {prepared.root}", exception) from None


def failed(what: str, exception: CheckpointException) -> CheckpointError:
    """The failures of all ranks in one error."""
    failures = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(exception.failures.items())]
    return CheckpointError(f"{what}: {'; '.join(failures)}")
