"""Seconds that a line of a trace takes, by the cost model of its plan."""

from __future__ import annotations

from typing import Any

from passes.analysis.calls import part_of
from passes.analysis.flops import bytes_made, bytes_moved, is_free, work
from passes.analysis.recognise import bucket_of, is_gather, is_issue, is_offload, is_wait
from passes.plan import Axis, Bucket, CostModel

from thunder.core.symbol import BoundSymbol


def compute_seconds(cost: CostModel, bsym: BoundSymbol) -> float:
    """One line of compute. 0 for a line that computes nothing (``del``, return, unpacking). A collective takes
    :func:`link_seconds`; its share of the device is counted where it is issued, and :func:`wire_seconds` where they are
    spent."""
    if is_issue(bsym):
        return cost.busy_seconds(**_message(bucket_of(bsym))) + wire_seconds(cost, bsym)
    if is_wait(bsym):
        return wire_seconds(cost, bsym)
    if is_free(bsym):
        return 0.0
    if (part := part_of(bsym)) is not None:
        if cost not in part.facts:
            part.facts[cost] = sum(compute_seconds(cost, b) for b in part.trace.bound_symbols)
        return float(part.facts[cost])
    return cost.compute_seconds(work(bsym), bytes_moved(bsym), bytes_made(bsym))


def wire_seconds(cost: CostModel, bsym: BoundSymbol) -> float:
    """Seconds in which the device works for the wire of a collective: in the line that issues it, before it is sent, or
    in the line that waits for it, after it has arrived. The latter also sends what the wire sends late, and the device
    is idle. 0 without a wire, and for any other line."""
    if is_issue(bsym):
        return cost.kernel_seconds(bucket_of(bsym).work.issue)
    if not is_wait(bsym):
        return 0.0
    bucket = bucket_of(bsym)
    late = bucket.work.late
    sent = cost.collective_seconds(**_message(bucket) | {"nbytes": late}) if late else 0.0
    return cost.kernel_seconds(bucket.work.finish) + sent


def link_seconds(issue: BoundSymbol) -> float:
    """A collective or a copy to the host, from its issue to its arrival on an otherwise idle link.

    If parameters are at rest in host memory, their gather begins with a copy to the device.
    """
    bucket = bucket_of(issue)
    cost = bucket.plan.cost
    if is_offload(issue):
        return copy_seconds(cost, bucket)
    copy = copy_seconds(cost, bucket) if bucket.plan.host is not None and is_gather(issue) else 0.0
    return collective_seconds(cost, bucket) + copy


def latency_seconds(issue: BoundSymbol) -> float:
    """The part of :func:`link_seconds` that does not depend on the bytes."""
    bucket = bucket_of(issue)
    return 0.0 if is_offload(issue) else bucket.plan.cost.collective_seconds(**_message(bucket) | {"nbytes": 0})


def collective_seconds(cost: CostModel, bucket: Bucket) -> float:
    """One collective of a bucket, without what its wire sends late. An all_reduce sends each byte twice."""
    message = _message(bucket)
    return cost.collective_seconds(**message | {"nbytes": message["nbytes"] - bucket.work.late})


def _message(bucket: Bucket) -> dict[str, Any]:
    """The bytes of a bucket's collective, and the ranks among which they travel."""
    plan = bucket.plan
    apart = plan.axis is Axis.REPLICATE
    return {"nbytes": bucket.crossings * bucket.bytes, "ranks": plan.world_size, "apart": apart}


def copy_seconds(cost: CostModel, bucket: Bucket) -> float:
    """A copy of this rank's shards of a bucket, or of their gradients, between host memory and device memory."""
    return cost.copy_seconds(bucket.numel * bucket.rest_dtype.bytes)
