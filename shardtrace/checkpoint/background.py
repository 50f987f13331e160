"""Saves that run while training continues."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardtrace.checkpoint.files import step_directory
from shardtrace.checkpoint.progress_bar import ProgressBar
from shardtrace.checkpoint.save import prepare, write
from shardtrace.checkpoint.state import ModelState, Optimizers, companions, model_state
from shardtrace.ranks.mesh import is_alone

import torch
import torch.distributed as dist
from torch import nn


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
        prepared = prepare(state, path, others, extra, step=step, keep_last=keep_last, keep=_copied)
        self._pending = self._thread.submit(write, prepared, self._group(state), ProgressBar("save", show=False))
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
