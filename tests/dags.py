"""Synthetic traces in the form that lowering leaves: any shape of graph, without a model and without tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from passes.comm.symbols import ALL_GATHER, REDUCE_SCATTER
from passes.plan import Bucket, BucketPlan, Member, ShardedParameter

import torch
from thunder.core import devices, dtypes, prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, TraceTag, tracectx
from thunder.executors import torchex
from thunder.executors.passes import del_last_used

WIDTH = 8  # elements of each value; parameters have rows of them


@dataclass(frozen=True)
class Step:
    """One line of compute: it adds up earlier values and the parameters of buckets, both by index.

    If ``reduce`` is the index of a bucket, its gradients are reduced afterwards.
    """

    values: tuple[int, ...]
    buckets: tuple[int, ...]
    reduce: int | None = None


def build(plan: BucketPlan, rows: list[list[int]], steps: list[Step], *, backward: bool = False) -> TraceCtx:
    """A trace of ``steps`` whose bucket i has members of ``rows[i]`` rows. It returns all values and reduced gradients.

    Collectives stand where autodiff leaves them: a gather is issued and waited for at its first use, and a reduction
    is waited for at once.
    """
    trace = TraceCtx()
    buckets = [_bucket(plan, i, sizes) for i, sizes in enumerate(rows)]
    with tracectx(trace):
        x = _tensor("x", (1, WIDTH))
        shards = [
            tuple(_tensor(f"{b.name}_{k}", m.parameter.shard_shape) for k, m in enumerate(b.members)) for b in buckets
        ]
        trace.args = [x, *(s for row in shards for s in row)]
        for arg in trace.args:
            prims.unpack_trivial(arg, name=arg.name)
        values, reduced, full = [x], [], {}
        for step in steps:
            total = values[step.values[0]]
            for v in step.values[1:]:
                total = torchex.add(total, values[v])
            for i in step.buckets:
                if i not in full:
                    full[i] = ALL_GATHER(shards[i], buckets[i])
                for member in full[i]:
                    total = torchex.add(total, torchex.sum(member))
            values.append(torchex.mul(total, 0.5))
            if step.reduce is not None:
                grads = tuple(torchex.expand(values[-1], m.parameter.full_shape) for m in buckets[step.reduce].members)
                reduced += REDUCE_SCATTER(grads, buckets[step.reduce])
        prims.python_return((*values, *reduced))
    trace._siginfo = _signature(trace)
    if backward:
        trace.tags.add(TraceTag.BACKWARD)
    return del_last_used(trace)


def run(trace: TraceCtx) -> tuple[torch.Tensor, ...]:
    """The results of a trace in the current process group."""
    generator = torch.Generator().manual_seed(0)
    function: Callable[..., Any] = trace.python_callable()
    return function(*(torch.randn(a.shape, generator=generator) for a in trace.args))


def _bucket(plan: BucketPlan, index: int, rows: list[int]) -> Bucket:
    members = tuple(
        Member(ShardedParameter(plan, f"{index}.{k}", (r * plan.world_size, WIDTH), str(index)), True)
        for k, r in enumerate(rows)
    )
    return Bucket(str(index), f"b_{index}", plan, members, dtypes.float32)


def _tensor(name: str, shape: tuple[int, ...]) -> TensorProxy:
    return TensorProxy(name, shape=shape, device=devices.cpu, dtype=dtypes.float32, requires_grad=False)


def _signature(trace: TraceCtx) -> SigInfo:
    signature = SigInfo("made_up")
    signature.args = [(a.name, None) for a in trace.args]
    return signature
