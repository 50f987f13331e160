"""Wires: other ways in which a bucket's tensors travel than in their own dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from passes.plan.cost import Kernels

import torch

Bucket = Any  # passes.plan.Bucket, which refers to this file


def _always(bucket: Bucket) -> bool:
    return True


def _nothing(bucket: Bucket) -> None:
    return None


def _no_state(bucket: Bucket, device: torch.device) -> Sequence[torch.Tensor]:
    return ()


class Ends(NamedTuple):
    """The work of a wire on the device, besides sending: what ``issue`` does before the message leaves, and ``finish``
    after it has arrived. ``late``: those of the bucket's bytes that ``finish`` sends, and waits for."""

    issue: Kernels = Kernels()
    finish: Kernels = Kernels()
    late: int = 0


def _no_work(bucket: Bucket) -> Ends:
    return Ends()


@dataclass(frozen=True)
class Wire:
    """A custom way to gather a bucket's shards, or to reduce its gradients: compressed for example.

    A plan has one for its gathers and one for its reductions (``CommPolicy.gather_dtype`` and ``reduce_wire``),
    and a pass may put one on any bucket of a gather.

    Args:
        issue: ``issue(tensors, bucket)`` starts to send this rank's shards, or its gradients of the unsharded
            parameters. Returns a future of any type.
        finish: ``finish(future, bucket)`` waits. Returns the unsharded parameters in their compute dtype, equal on all
            ranks, or this rank's shards of the averaged gradients.
        bytes: ``bytes(bucket)`` is the number of bytes that travel for the whole group: each of N ranks sends, and
            receives, ``(N - 1) / N`` of them.
        name: an identifier for traces and tables, which stands in the place of a dtype. Empty: the bucket's dtype.
        takes: whether it carries a bucket. Others travel as they are.
        prepare: what ``issue`` and ``finish`` need to know of a bucket, computed once: ``bucket.prepared``.
        state: ``state(bucket, device)`` are the tensors that the wire keeps from step to step, in the runtime's
            ``errors``. Makes those that are missing.
        reduces: it carries gradients, not parameters.
        work: ``work(bucket)`` is what the cost model counts for it beside the bytes. Default: nothing. Must be equal on
            all ranks, because the order of collectives depends on it.
    """

    issue: Callable[[tuple[torch.Tensor, ...], Bucket], Any]
    finish: Callable[[Any, Bucket], tuple[torch.Tensor, ...]]
    bytes: Callable[[Bucket], int]
    name: str = ""
    takes: Callable[[Bucket], bool] = _always
    prepare: Callable[[Bucket], Any] = _nothing
    state: Callable[[Bucket, torch.device], Sequence[torch.Tensor]] = _no_state
    reduces: bool = False
    work: Callable[[Bucket], Ends] = _no_work
