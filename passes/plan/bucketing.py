"""Groups parameters into buckets. The result depends only on their plan and on the order of first use in a trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import groupby
from typing import NamedTuple

from passes.plan.plan import Member, ShardedParameter

from thunder.core import dtypes

MB = 2**20


class Use(NamedTuple):
    """A member with its dtype and device, which must be equal for two members to share a collective."""

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
    """Groups parameters into buckets. Takes and returns them in order of first use.

    - "none": each parameter by itself.
    - "layer": the parameters that one module owns.
    - "block": the parameters of one repeated block. Those outside the blocks are grouped by first use, so that an
      embedding neither waits for the head nor is held until it.
    - "model": all parameters.
    - a size in MB: as many consecutive parameters as fit; a larger one by itself.

    Parameters of different models, dtypes or devices never share a bucket. Within a bucket they are in the model's
    order, like their shards in memory.
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
    """For each use, the key of its bucket among those of the same model, dtype and device."""
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
    """The name of a bucket for users: the common block or module, or the first and the last."""
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
