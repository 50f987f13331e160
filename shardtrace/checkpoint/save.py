"""``save_checkpoint``: a new directory for each step, which is complete or not a checkpoint.

``AsyncCheckpointer`` writes it while training continues.

State that only one rank has: its random number generators, and gradients that ``no_sync`` has added up and no step
has reduced yet, which are whole.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from passes.comm.kept_gradients import Kept, KeptGradients
from passes.plan import Axis, Level, ShardedParameter
from shardtrace.checkpoint.agreement import agreement, together
from shardtrace.checkpoint.files import CheckpointError, ProgressBar, step_directory
from shardtrace.checkpoint.index import encode
from shardtrace.checkpoint.optimizer import of_owners, optimizer_state
from shardtrace.checkpoint.state import Companions, Keep, ModelState, Optimizers, companions, model_state
from shardtrace.checkpoint.storage import Prepared, SafetensorsWriter
from shardtrace.ranks.mesh import is_alone
from shardtrace.training.buffers import warn_of_differing_buffers

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of Python's generator, torch's (for the CPU and a GPU ``device``), and NumPy's if it is imported."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "cpu": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.tensor(keys.tolist(), dtype=torch.int64), *rest)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`rng_state` returned, except for generators that do not exist here."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy().astype("uint32"), *rest))


def sums_of(model: ModelState) -> dict[str, torch.Tensor]:
    """This rank's sums by the names of their parameters; usually none.

    Raises CheckpointError for sums of shards, which are still to be reduced over replicas.
    """
    found = {}
    for name, sums, parameter in _parameters(model):
        if (Axis.REPLICATE, parameter.index) in sums.by_place:
            raise CheckpointError(
                f"the gradient of parameter {name!r} is not reduced over replicas yet: save after the step that does, "
                "outside of no_sync"
            )
        if (kept := sums.by_place.get((parameter.plan.axis, parameter.index))) is not None:
            found[name] = kept.total
    return found


def set_sums(model: ModelState, values: Mapping[str, torch.Tensor]) -> None:
    """Replace the model's sums by saved ones. What rounded reductions of the steps before have lost is forgotten."""
    for state in model.states:
        state.runtime.kept.clear()
        state.runtime.errors.clear()
    for name, sums, parameter in _parameters(model):
        if name in values:
            sums.used.add(Level.WHOLE)
            sums.by_place[parameter.plan.axis, parameter.index] = Kept(parameter, values[name].to(model.device))


def _parameters(model: ModelState) -> Iterator[tuple[str, KeptGradients, ShardedParameter]]:
    names = {id(slot.local): name for name, slot in model.slots.items()}
    for state in model.states:
        for entry in state.entries:
            yield names[id(entry.shard)], state.runtime.kept, state.by_stand_in[id(entry.stand_in)]


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
    state, others = model_state(model), companions(optimizer, schedulers, scaler, ema)
    prepared = _prepare(state, path, others, extra, step=step, keep_last=keep_last)
    _write(prepared, state.group, ProgressBar("save", show=state.rank == 0))
    return step_directory(prepared.root, step)


def _prepare(
    model: ModelState,
    path: str | os.PathLike[str],
    others: Companions,
    extra: Any,
    *,
    step: int,
    keep_last: int | None,
    keep: Keep = torch.Tensor.detach,
) -> Prepared:
    """Collect what to save. ``keep`` is applied to each tensor: it returns the tensor itself, or a copy.

    Raises CheckpointError on every rank.
    """
    root = Path(path).absolute()
    if model.group is not None:
        warn_of_differing_buffers(model.module, model.group)
    with agreement(model, f"a checkpoint to save to {root}") as said:
        said.lines = [f"step {step}, keep_last={keep_last}"]
        if not _is_count(step, 0):
            raise CheckpointError(f"step must be a whole number of at least 0, not {step!r}")
        if keep_last is not None and not _is_count(keep_last, 1):
            raise CheckpointError(f"keep_last must be a whole number of at least 1, or None, not {keep_last!r}")
        tensors, own, shared = _collect(model, others, extra, keep)
    return Prepared(root=root, step=step, tensors=tensors, own=own, shared=shared, keep_last=keep_last)


def _is_count(number: Any, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _collect(
    model: ModelState, others: Companions, extra: Any, keep: Keep
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """The tensors, this rank's own other state, and the state that the first rank saves for all."""
    tensors: dict[str, torch.Tensor | None] = {}
    tied: dict[str, str] = {}
    for label, one in others.models(model).items():
        tensors |= {
            f"{label}.{name}": slot.distributed(keep(slot.local))
            for name, slot in one.slots.items()
            if slot.home is not None or model.rank == 0  # buffers may differ: the first rank's are saved
        }
        tied |= {f"{label}.{name}": f"{label}.{first}" for name, first in one.tied.items()}
    saved = [
        optimizer_state(optimizer, model, tensors, keep, f"optimizer.{number}" if number else "optimizer")
        for number, optimizer in enumerate(others.optimizers)
    ]
    plain: dict[str, torch.Tensor] = {}
    own: dict[str, Any] = {
        "rng": encode(rng_state(model.device), f"ranks.{model.rank}.rng", plain),
        "extra": encode(extra, f"ranks.{model.rank}.extra", plain),
        "accumulated": encode(sums_of(model), f"ranks.{model.rank}.accumulated", plain),
        "optimizers": [of_owners(one, model) for one in saved],
    }
    shared: dict[str, Any] = {}
    if model.rank == 0:
        states = [scheduler.state_dict() for scheduler in others.schedulers]
        scaler = others.scaler.state_dict() if others.scaler is not None else None
        shared = {
            "tied": tied,
            "extra_state": {key: encode(value, f"extra_state.{key}", plain) for key, value in model.extra.items()},
            "optimizers": saved,
            "schedulers": encode(states, "schedulers", plain),
            "scaler": encode(scaler, "scaler", plain),
        }
    tensors |= {name: keep(value) for name, value in plain.items()}
    return {name: value for name, value in tensors.items() if value is not None}, own, shared


def _write(prepared: Prepared, group: dist.ProcessGroup | None, progress: ProgressBar) -> None:
    """Write a checkpoint through torch.distributed.checkpoint. Raises CheckpointError on every rank."""
    writer = SafetensorsWriter(prepared, progress)
    failure = f"step {prepared.step} was not saved to {prepared.root}"
    try:
        with together(group, "a checkpoint to be saved", failure) as arguments:
            planner = DefaultSavePlanner(flatten_state_dict=False)
            dcp.save(prepared.tensors, storage_writer=writer, planner=planner, **arguments)
    except CheckpointError:
        writer.discard()
        raise


class AsyncCheckpointer:
    """Saves checkpoints in a thread: ``save`` returns once this rank's tensors are copied to host memory.

    Only one save runs at a time, so that there is only one copy: ``save`` waits for the previous one. An error in the
    thread is raised on every rank by the next ``save`` or by ``wait``. Leave the context, or call ``wait``, before
    training ends:

        with shardtrace.AsyncCheckpointer() as checkpointer:
            for step in range(steps):
                ...
                checkpointer.save("checkpoints", model, optimizer, step=step)
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardtrace-checkpoint")
        self._pending: Future[None] | None = None
        self._groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def save(
        self,
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
        """Save like :func:`shardtrace.save_checkpoint`; return the directory, which will be complete later."""
        self.wait()
        state, others = model_state(model), companions(optimizer, schedulers, scaler, ema)
        prepared = _prepare(state, path, others, extra, step=step, keep_last=keep_last, keep=_copied)
        self._pending = self._thread.submit(_write, prepared, self._group(state), ProgressBar("save", show=False))
        return step_directory(prepared.root, step)

    def wait(self) -> None:
        """Wait until no save is in progress. Raises CheckpointError, on every rank, if the last one failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _group(self, model: ModelState) -> dist.ProcessGroup | None:
        """A group of the same ranks for the thread only: in one group, collectives of two threads would mix."""
        group = model.group
        if group is None or is_alone(group):
            return None
        if group not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            part = len(ranks) < dist.get_world_size()  # ranks outside do not call this
            self._groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=part)
        return self._groups[group]

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for the save in progress; its error does not replace another one."""
        try:
            if kind is None:
                self.wait()
        finally:
            self._thread.shutdown(wait=True)  # its group stays: another of the same ranks could get the same name


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory that nothing else changes."""
    return tensor.detach().to("cpu", copy=True)
