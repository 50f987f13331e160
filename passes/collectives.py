"""The collectives of a bucket, as symbols of a trace and as the functions that they run.

    full = synchronize(shards, bucket)          what a pass inserts; autodiff and lowering turn it into
    future = all_gather(shards, bucket)         the shards of all ranks, on their way
    full = wait_all_gather(future, bucket)      the unsharded, unpadded parameters
    future = reduce_scatter(grads, bucket)      gradients, averaged over ranks, on their way to their shards' owners
    grads = wait_reduce_scatter(future, bucket) this rank's shards of the averaged gradients

``shards``, ``full`` and ``grads`` are tuples of tensors in the order of the bucket's members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from passes import direct, native
from passes.plan import Bucket

import torch
from thunder.core.prims import OpTags, get_grad, put_grad
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.transforms import register_grad
from thunder.extend import OperatorExecutor

# Symbols of an executor are kept by Thunder's lowering as they are, whichever executors the user chose.
executor = OperatorExecutor("shardtrace", version="0.1")


def _issue_all_gather(shards: tuple[torch.Tensor, ...], bucket: Bucket) -> Any:
    return (direct if bucket.plan.direct else native).issue_all_gather(shards, bucket)


def _finish_all_gather(future: Any, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    return (direct if bucket.plan.direct else native).finish_all_gather(future, bucket)


def _issue_reduce_scatter(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> Any:
    return (direct if bucket.plan.direct else native).issue_reduce_scatter(grads, bucket)


def _finish_reduce_scatter(future: Any, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    return (direct if bucket.plan.direct else native).finish_reduce_scatter(future, bucket)


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
