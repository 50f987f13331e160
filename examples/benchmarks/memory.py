"""One meter for the memory of all tensors, which reads the allocator's own records.

On the CPU, the profiler records each allocation and each free, including those of C++ (DDP's buckets, buffers inside
operators, storages that FSDP2 frees and refills). On CUDA, the caching allocator has counters. A meter must start
before a contender is built, because the profiler does not know about earlier allocations.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


class Metered(NamedTuple):
    """Bytes relative to those allocated before: ``kept`` at the end, ``peak`` at the highest point (at least 0)."""

    kept: int
    peak: int
    events: list[Any]  # the profiler's, of the CPU


def metered(fn: Callable[[], T], device: torch.device) -> tuple[T, Metered]:
    """Runs ``fn`` and meters it. ``fn`` may free only memory that was allocated inside a metered call."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=device.type == "cpu", record_shapes=True) as record:
        result = fn()
        gc.collect()  # inside the profile, so that garbage does not count as kept
    events = record.profiler.kineto_results.events()
    if device.type == "cuda":
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        return result, Metered(kept, torch.cuda.max_memory_allocated() - before, events)
    kept = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        kept += event.nbytes()
        peak = max(peak, kept)
    return result, Metered(kept, peak, events)


class Traffic(NamedTuple):
    """The collectives one rank issues in a step, and the bytes of their unsharded buffers (twice for an all_reduce).
    None if one is an all_reduce, and this torch (2.10) does not record its size."""

    collectives: int | None
    bytes: int | None


# For each operator of c10d: the argument that holds the data of the whole group, and how often it is sent.
_WHOLE = {"_allgather_base_": (0, 1), "_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1), "allreduce_": (0, 2)}
_SMALL = 64  # bytes: messages by which DDP compares ranks are not counted


def traffic(events: list[Any], dtype: torch.dtype = torch.float32) -> Traffic:
    """Counts the collectives among the profiler's events of a step. All are taken to move ``dtype``: the profiler does
    not record the dtype of a list's tensors."""
    sizes = []
    for event in events:
        if event.name().removeprefix("c10d::") in _WHOLE:
            at, times = _WHOLE[event.name().removeprefix("c10d::")]
            shape = getattr(event, "structured_input_shapes", event.shapes)()[at]
            if not shape:
                return Traffic(None, None)
            shapes = shape if isinstance(shape[0], list) else [shape]  # a list of tensors, or one tensor
            sizes.append(times * dtype.itemsize * sum(math.prod(s) for s in shapes))
    sizes = [size for size in sizes if size > _SMALL]
    return Traffic(len(sizes), sum(sizes))
