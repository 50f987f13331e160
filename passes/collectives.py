"""The collectives of a bucket, as symbols of a trace and as the functions that they run.

    full = synchronize(shards, bucket)          what a pass inserts; autodiff and lowering turn it into
    future = all_gather(shards, bucket)         the shards of all ranks, on their way
    full = wait_all_gather(future, bucket)      the unsharded, unpadded parameters
    future = reduce_scatter(grads, bucket)      gradients, averaged over ranks, on their way to their shards' owners
    grads = wait_reduce_scatter(future, bucket) this rank's shards of the averaged gradients

``shards``, ``full`` and ``grads`` are tuples of tensors in the order of the bucket's members.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from passes import compat
from passes.plan import Bucket, Shape

import torch
from thunder.core.prims import OpTags, get_grad, put_grad
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.transforms import register_grad
from thunder.extend import OperatorExecutor

# Symbols of an executor are kept by Thunder's lowering as they are, whichever executors the user chose.
executor = OperatorExecutor("shardtrace", version="0.1")


class InFlight(NamedTuple):
    """A collective that was issued: ``input`` must outlive it."""

    work: Any
    output: torch.Tensor
    input: torch.Tensor


def _issue_all_gather(shards: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    row = _flatten(shards)  # (numel,)
    rows = row.new_empty(bucket.plan.world_size * bucket.numel)
    work = compat.all_gather_single(rows, row, group=bucket.plan.group, async_op=True)
    return InFlight(work, rows, row)


def _finish_all_gather(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    future.work.wait()
    return unpack_rows(future.output, bucket)


def _issue_reduce_scatter(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> InFlight:
    rows = pack_rows(grads, bucket, divisor=bucket.plan.world_size)
    row = rows.new_empty(bucket.numel)
    work = compat.reduce_scatter_single(row, rows, group=bucket.plan.group, async_op=True)
    return InFlight(work, row, rows)


def _finish_reduce_scatter(future: InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    future.work.wait()
    pieces = future.output.split([m.numel for m in bucket.members])
    return tuple(piece.view(m.parameter.shard_shape) for piece, m in zip(pieces, bucket.members, strict=True))


def _flatten(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    flat = [t.reshape(-1) for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unpack_rows(rows: torch.Tensor, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """Turns the gathered ``(world_size * numel,)`` buffer into the unsharded parameters.

    A bucket of one parameter needs no copy; with several, each is copied out once, so that it is contiguous and keeps
    no other's memory.
    """
    table, start, full = rows.view(bucket.plan.world_size, bucket.numel), 0, []
    for m in bucket.members:
        shape = m.parameter.full_shape
        columns = table[:, start : start + m.numel]
        columns = columns if len(bucket.members) == 1 else columns.clone(memory_format=torch.contiguous_format)
        padded = columns.reshape(-1, *m.parameter.shard_shape[1:])
        full.append(padded[: shape[0]] if shape else padded[0])
        start += m.numel
    return tuple(full)


def pack_rows(tensors: tuple[torch.Tensor, ...], bucket: Bucket, *, divisor: int = 1) -> torch.Tensor:
    """The inverse of :func:`unpack_rows`: a ``(world_size * numel,)`` buffer of the tensors divided by ``divisor``.

    Dividing before the sum keeps fp16 gradients from overflowing in the reduction.
    """
    world_size = bucket.plan.world_size
    padded = any(m.parameter.shard_shape[0] * world_size != (m.parameter.full_shape or (1,))[0] for m in bucket.members)
    allocate = tensors[0].new_zeros if padded else tensors[0].new_empty
    rows = allocate(world_size, bucket.numel)
    start = 0
    for tensor, m in zip(tensors, bucket.members, strict=True):
        columns = rows[:, start : start + m.numel]
        # ranks whose shards have no padding, and the elements of the next one
        whole, rest = divmod(math.prod(m.parameter.full_shape), m.numel)
        flat = _reduced(tensor, m.parameter.full_shape).reshape(-1)
        torch.div(flat[: whole * m.numel].view(whole, m.numel), divisor, out=columns[:whole])
        if rest:
            torch.div(flat[whole * m.numel :], divisor, out=columns[whole, :rest])
        start += m.numel
    return rows.view(-1)


def _reduced(grad: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Sums a gradient over the dims by which its parameter was broadcast.

    Thunder leaves that to the end for 0-dim tensors (torch's autograd engine does it where it receives a gradient).
    """
    return grad if tuple(grad.shape) == shape else grad.sum_to_size(shape)


# ---- symbols ----


def _symbol(name: str, meta: Callable[..., Any], fn: Callable[..., Any] | None, **kwargs: Any) -> Symbol:
    def bind_function(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: fn}

    return Symbol(
        name=name, meta=meta, id=f"shardtrace.{name}", executor=executor if fn else None,
        is_prim=fn is not None, _bind_postprocess=bind_function, **kwargs,
    )  # fmt: skip


def _all_gather_meta(shards: tuple[TensorProxy, ...], bucket: Bucket) -> FutureTensorProxy:
    return FutureTensorProxy(
        shape=(bucket.plan.world_size * bucket.numel,), device=shards[0].device, dtype=shards[0].dtype
    )


def _wait_all_gather_meta(future: FutureTensorProxy, bucket: Bucket) -> tuple[TensorProxy, ...]:
    return tuple(
        TensorProxy(shape=m.parameter.full_shape, device=future.device, dtype=future.dtype, requires_grad=m.trainable)
        for m in bucket.members
    )


def _reduce_scatter_meta(grads: tuple[TensorProxy, ...], bucket: Bucket) -> FutureTensorProxy:
    return FutureTensorProxy(shape=(bucket.numel,), device=grads[0].device, dtype=grads[0].dtype)


def _wait_reduce_scatter_meta(future: FutureTensorProxy, bucket: Bucket) -> tuple[TensorProxy, ...]:
    return tuple(
        TensorProxy(shape=m.parameter.shard_shape, device=future.device, dtype=future.dtype) for m in bucket.members
    )


all_gather = _symbol("all_gather", _all_gather_meta, _issue_all_gather)
wait_all_gather = _symbol("wait_all_gather", _wait_all_gather_meta, _finish_all_gather)
reduce_scatter = _symbol("reduce_scatter", _reduce_scatter_meta, _issue_reduce_scatter)
wait_reduce_scatter = _symbol("wait_reduce_scatter", _wait_reduce_scatter_meta, _finish_reduce_scatter)


def _synchronize_meta(shards: tuple[TensorProxy, ...], bucket: Bucket) -> tuple[TensorProxy, ...]:
    return wait_all_gather(all_gather(shards, bucket), bucket)


# Has no function of its own: lowering takes its two subsymbols. Thunder's autodiff treats a symbol whose arguments
# all are frozen as a constant and leaves it whole, but never one that is called "synchronize".
synchronize = _symbol("synchronize", _synchronize_meta, None)


def _synchronize_grad(shards: tuple[TensorProxy, ...], bucket: Bucket) -> tuple[TensorProxy, ...]:
    full = wait_all_gather(all_gather(shards, bucket), bucket)
    if bucket.trainable is not None:
        trainable = [i for i, m in enumerate(bucket.members) if m.trainable]
        future = reduce_scatter(tuple(get_grad(full[i]) for i in trainable), bucket.trainable)
        for i, grad in zip(trainable, wait_reduce_scatter(future, bucket.trainable), strict=True):
            put_grad(shards[i], grad)
    return full


register_grad(synchronize, _synchronize_grad)


def _check_parameters(guard: Any) -> None:
    guard.obj()


# A line of the prologue: raises, and so makes Thunder trace again, if a parameter was replaced since it was sharded.
check_parameters = _symbol("check_parameters", lambda guard: None, _check_parameters, tags=[OpTags.DONT_DCE])
