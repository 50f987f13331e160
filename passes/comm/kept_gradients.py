"""Gradients that are kept from step to step, whole and unreduced, and the two symbols that add to them and take them.

accumulate(grads, bucket)               replaces a reduction: adds gradients to the kept ones
grads = accumulated(grads, bucket)      precedes a reduction: adds the kept ones to the gradients and clears them
"""

from __future__ import annotations

from typing import NamedTuple

from passes.comm.properties import Property
from passes.comm.symbols import symbol
from passes.plan import Axis, Bucket, Level, ShardedParameter
from passes.plan.layout import summed_to

import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy


class Kept(NamedTuple):
    parameter: ShardedParameter
    total: torch.Tensor


class KeptGradients:
    """The gradients of a model that are not reduced yet, or not over replicas. They live from step to step."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[Axis, int], Kept] = {}  # the group to reduce over, and the parameter's index
        self.used: set[Level] = set()  # on which levels a step has ever kept gradients
        self.reducing = False  # gradients have been taken since the last that were added, or some were left behind

    def add(self, grads: tuple[torch.Tensor, ...], bucket: Bucket) -> None:
        self.reducing &= bool(self.by_place)
        sums, addends = [], []
        for grad, m in zip(grads, bucket.members, strict=True):
            grad = summed_to(grad, m.parameter.full_shape)
            place = bucket.plan.axis, m.parameter.index
            if (known := self.by_place.get(place)) is None:
                dtype = to_torch_dtype(bucket.plan.summed_dtype(bucket.rest_dtype))
                # a copy: two parameters may share a gradient, and backward's caller may own it
                total = grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
                self.by_place[place] = Kept(m.parameter, total)
            else:
                sums.append(known.total)
                addends.append(grad)
        if sums:
            torch._foreach_add_(sums, addends)

    def take(self, grads: tuple[torch.Tensor, ...], bucket: Bucket) -> tuple[torch.Tensor, ...]:
        self.reducing = True
        known = [self.by_place.pop((bucket.plan.axis, m.parameter.index), None) for m in bucket.members]
        dtype = to_torch_dtype(bucket.plan.summed_dtype(bucket.rest_dtype))
        return tuple(
            grad.to(dtype) if kept is None else kept.total.add_(summed_to(grad, m.parameter.full_shape))
            for grad, kept, m in zip(grads, known, bucket.members, strict=True)
        )

    def left_behind(self) -> list[str]:
        """The names of parameters that the last reduction missed."""
        return [kept.parameter.name for kept in self.by_place.values()] if self.reducing else []

    def of(self, index: int) -> list[tuple[Axis, int]]:
        """The places that hold gradients of a parameter."""
        return [place for axis in Axis if (place := (axis, index)) in self.by_place]

    def clear(self) -> None:
        self.by_place.clear()
        self.reducing = False


def _accumulated_meta(grads: tuple[TensorProxy, ...], bucket: Bucket) -> tuple[TensorProxy, ...]:
    dtype = bucket.plan.summed_dtype(bucket.rest_dtype)
    return tuple(TensorProxy(like=g, dtype=dtype, requires_grad=False) for g in grads)


def _add(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> None:
    bucket.plan.runtime.kept.add(grads, bucket)


def _take(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> tuple[torch.Tensor, ...]:
    taken: tuple[torch.Tensor, ...] = bucket.plan.runtime.kept.take(grads, bucket)
    return taken


accumulate = symbol(
    "accumulate",
    lambda grads, bucket: None,
    _add,
    properties=Property.STATEFUL,
    tags=[OpTags.DONT_DCE],
)


accumulated = symbol("accumulated", _accumulated_meta, _take, properties=Property.STATEFUL)
