"""Contiguous memory for the shards of a bucket, so that a gather needs no packing and a copy overlaps with compute."""

from __future__ import annotations

from collections.abc import Iterable

from passes.plan import Member, Placement, ShardedParameter
from passes.plan.bucketing import Use, group_uses
from shardtrace.model.materialize import replace_data

import torch
from thunder.core import dtypes
from torch import nn


def lay_out_flat(shards: Iterable[tuple[nn.Parameter, ShardedParameter]]) -> None:
    """Move the shards of each bucket into one buffer. The parameters are views of it from then on.

    The buckets are those of a model that uses its parameters in the order in which it holds them. The gather packs the
    shards if a trace has other buckets, or if a parameter has been given other memory since.
    """
    shards = [(shard, parameter) for shard, parameter in shards if not shard.is_meta]
    for shard, parameter in shards:
        if parameter.plan.placement is Placement.OWNER and parameter.plan.host is not None:
            replace_data(shard, parameter.plan.host.keep(shard.detach()))
    shards = [(shard, parameter) for shard, parameter in shards if parameter.plan.placement is Placement.SHARD]
    uses = [
        Use(Member(parameter, shard.requires_grad), dtypes.to_dtype(shard.dtype), str(shard.device))
        for shard, parameter in shards
    ]
    held = {parameter: shard for shard, parameter in shards}
    for group in group_uses(uses):
        members = [held[u.parameter] for u in group.uses]
        host = group.uses[0].parameter.plan.host
        if len(members) == 1 and host is None:
            continue
        flat = torch.cat([m.detach().reshape(-1) for m in members])
        flat = flat if host is None else host.keep(flat)
        for m, piece in zip(members, flat.split([m.numel() for m in members]), strict=True):
            replace_data(m, piece.view(m.shape))
