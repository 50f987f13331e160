"""Contiguous memory for the shards of a bucket, so that a gather needs no packing and a copy overlaps with compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from passes.plan import Member, Placement, ShardedParameter
from passes.plan.bucketing import Use, group_uses

import torch
from thunder.core import dtypes


def lay_out_flat(
    rows: Mapping[ShardedParameter, torch.Tensor], trainable: Iterable[ShardedParameter]
) -> dict[ShardedParameter, torch.Tensor]:
    """The rows of each bucket as views of one buffer. Rows that may stay where they are are left out.

    The buckets are those of a model that uses its parameters in the order in which it holds them. The gather packs the
    rows if a trace has other buckets, or if a parameter has been given other memory since.
    """
    rows = {parameter: t for parameter, t in rows.items() if not t.is_meta}
    owned = [p for p in rows if p.plan.placement is Placement.OWNER and p.plan.host is not None]
    laid = {p: p.plan.host.keep(rows[p]) for p in owned if p.plan.host is not None}
    held = {p: t for p, t in rows.items() if p.plan.placement is Placement.SHARD}
    trainable = set(trainable)
    uses = [Use(Member(p, p in trainable), dtypes.to_dtype(t.dtype), str(t.device)) for p, t in held.items()]
    for group in group_uses(uses):
        members = [u.parameter for u in group.uses]
        host = group.uses[0].parameter.plan.host
        if len(members) == 1 and host is None:
            continue
        flat = torch.cat([held[m].reshape(-1) for m in members])
        flat = flat if host is None else host.keep(flat)
        for m, piece in zip(members, flat.split([held[m].numel() for m in members]), strict=True):
            laid[m] = piece.view(held[m].shape).data  # with a version of its own
    return laid
