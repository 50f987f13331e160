"""The memory of shards: contiguous for a bucket, so that a gather needs no packing; and what parameters leave when they
are sharded, in which whatever else lies there keeps the values of then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from passes.plan import Member, Placement, ShardedParameter
from passes.plan.bucketing import Use, group_uses
from shardtrace.record.memory import Extent

import torch
from thunder.core import dtypes
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

REMEDY = "read the parameter itself in forward, or keep a clone() where the values before training are meant"


class ParameterMemory:
    """The memory of several parameters, by their names. Weak references keep the addresses of storages from being used
    again."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._extents: dict[int, list[tuple[StorageWeakRef, Extent, str]]] = {}
        for name, t in named:
            self.add(name, t)

    def add(self, name: str, t: torch.Tensor) -> None:
        if _has_memory(t):
            storage = StorageWeakRef(t.untyped_storage())
            self._extents.setdefault(storage.cdata, []).append((storage, Extent.of(t), name))

    def owner(self, t: torch.Tensor) -> str:
        """The name of a parameter on whose memory a tensor lies; empty if there is none."""
        if not self._extents or not _has_memory(t):
            return ""
        mine, others = Extent.of(t), self._extents.get(StorageWeakRef(t.untyped_storage()).cdata, ())
        return next((name for _, other, name in others if mine.begin < other.end and other.begin < mine.end), "")


def _has_memory(t: torch.Tensor) -> bool:
    return not is_lazy(t) and not is_traceable_wrapper_subclass(t) and t.layout == torch.strided and t.numel() > 0


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
