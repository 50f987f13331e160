"""The measured memory of a GPU, beside the prediction of :func:`shardtrace.memory`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass
class MemorySnapshot:
    """Bytes of tensors on the GPU: when the context was entered, and at most until it was left (``peak``). ``path`` is
    the file of this rank, for https://pytorch.org/memory_viz."""

    path: Path
    before: int
    peak: int = 0


@contextmanager
def memory_snapshot(path: str | os.PathLike[str], *, max_entries: int = 100_000) -> Iterator[MemorySnapshot]:
    """Record each allocation and free inside the context, with its stack, and write them to a file. ::

        with shardtrace.memory_snapshot("step.pickle") as measured:
            cmodel(x, y).backward()
        print(measured.peak - measured.before, shardtrace.memory(cmodel).peak)

    The file is also written if an exception leaves the context, such as out of memory. Recording costs time: leave it
    out of a benchmark.

    Args:
        path: each rank writes its own file: ``step.pickle`` becomes ``step-rank0.pickle`` if there are several ranks.
        max_entries: the number of allocations and frees to keep, the latest ones.

    Raises:
        RuntimeError: torch sees no GPU. :func:`shardtrace.memory` predicts the memory on a CPU, too.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "memory_snapshot records the memory of a GPU, and torch sees none: shardtrace.memory(cmodel) predicts the "
            "memory of a step on any device"
        )
    file = Path(path)
    if dist.is_initialized() and dist.get_world_size() > 1:
        file = file.with_stem(f"{file.stem}-rank{dist.get_rank()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.reset_peak_memory_stats()
    snapshot = MemorySnapshot(file, torch.cuda.memory_allocated())
    torch.cuda.memory._record_memory_history(max_entries=max_entries)
    try:
        yield snapshot
    finally:
        snapshot.peak = torch.cuda.max_memory_allocated()
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)
