"""Which parameters travel together: a function of the order in which a trace first uses them, and of nothing else."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import groupby
from typing import NamedTuple

from passes.plan.plan import Member, ShardedParameter

from thunder.core import dtypes

MB = 2**20


class Use(NamedTuple):
    """A member, with what must be equal for two members to share a collective."""

    member: Member
    dtype: dtypes.dtype
    device: str

    @property
    def parameter(self) -> ShardedParameter:
        return self.member.parameter

    @property
    def bytes(self) -> int:
        """Bytes of the parameter when gathered, padding included."""
        return self.parameter.full_numel * self.parameter.plan.unsharded_dtype(self.dtype).bytes


class Group(NamedTuple):
    label: str
    uses: tuple[Use, ...]


def group_uses(uses: Iterable[Use]) -> list[Group]:
    """Groups parameters, given in order of first use, into buckets; returned in order of first use as well.

    - "none": each parameter by itself.
    - "layer": the parameters that one module owns.
    - "block": those of one repeated block; what lies outside the blocks is grouped by first use, so that an
      embedding does not wait for, and is not held until, the head.
    - "model": all of them.
    - a size in MB: consecutive parameters, as many as fit; a larger one by itself.

    Parameters of different models, dtypes or devices never share a bucket. Within one they are in the model's order,
    as their shards lie in memory.
    """
    uses = list(uses)
    keys = {id(u): key for u, key in zip(uses, _keys(uses), strict=True)}
    buckets: dict[Hashable, list[Use]] = {}
    for use in uses:
        plan = use.parameter.plan
        buckets.setdefault((id(plan), keys[id(use)], use.dtype, use.device), []).append(use)
    return [
        Group(_label(members), tuple(sorted(members, key=lambda u: u.parameter.index))) for members in buckets.values()
    ]


def _keys(uses: list[Use]) -> list[Hashable]:
    """For each use, what names its bucket within its model, dtype and device."""
    keys: list[Hashable] = []
    size_index, size = 0, 0
    run = {id(u): i for i, (_, g) in enumerate(groupby(uses, lambda u: u.parameter.block)) for u in g}
    for use in uses:
        strategy, parameter = use.parameter.plan.bucketing, use.parameter
        if strategy == "none":
            keys.append(id(parameter))
        elif strategy == "model":
            keys.append("model")
        elif strategy == "layer":
            keys.append(parameter.layer)
        elif strategy == "block":
            keys.append(parameter.block if parameter.block is not None else ("outside", run[id(use)]))
        else:
            if size and size + use.bytes > float(strategy) * MB:
                size_index, size = size_index + 1, 0
            size += use.bytes
            keys.append(size_index)
    return keys


def _label(uses: list[Use]) -> str:
    """A name that tells users what is in the bucket: the common block or module, or the first and the last."""
    parameters = [u.parameter for u in uses]
    strategy = parameters[0].plan.bucketing
    if strategy == "none":
        return parameters[0].name
    if strategy == "model":
        return "model"
    blocks = {p.block for p in parameters}
    if strategy == "block" and len(blocks) == 1 and None not in blocks:
        return str(parameters[0].block)
    first, last = parameters[0].layer or "root", parameters[-1].layer or "root"
    return first if first == last else f"{first}..{last}"
