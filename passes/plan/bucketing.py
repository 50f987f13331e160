"""Groups parameters into buckets. The result depends only on their plan and on the order of first use in a trace.

Note [Pieces]. The first gather of a step and its last reduction overlap with no compute. Split into p pieces, a block's
bucket shortens both waits to a p-th, and costs p - 1 more latencies for each collective of each block. What is best
follows from the link alone. It must have been measured, because the default constants stand for a slow one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from itertools import groupby
from typing import NamedTuple

from passes.plan.cost import DEFAULT_LINKS, Link
from passes.plan.plan import Member, ShardedParameter

from thunder.core import dtypes

MB = 2**20
MOST_PIECES = 4


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
    - "block": the parameters of one repeated block, in pieces if its plan says so. Those outside the blocks are grouped
      by first use, so that an embedding neither waits for the head nor is held until it.
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
    return [Group(label, members) for bucket in buckets.values() for label, members in _pieces(bucket)]


def choose_pieces(block_bytes: int, blocks: int, world_size: int, link: Link) -> int:
    """The number of buckets for the parameters of a block, by Note [Pieces].

    Args:
        block_bytes: bytes of the unsharded parameters of the largest block.
        blocks: how many blocks there are.
        world_size: ranks that gather them.
        link: their link. A default one counts as unmeasured.
    """
    if world_size < 2 or link in DEFAULT_LINKS:
        return 1
    seconds = block_bytes * (world_size - 1) / world_size / link.bandwidth

    def costs(pieces: int) -> float:
        collectives = 3 * blocks  # a block is gathered twice at most, and reduced once
        return 2 * seconds / pieces + collectives * (pieces - 1) * link.latency

    return min(range(1, MOST_PIECES + 1), key=costs)


def _pieces(bucket: list[Use]) -> list[tuple[str, tuple[Use, ...]]]:
    """A bucket in pieces of consecutive parameters, each with its label. A larger parameter is a piece by itself."""
    plan, block = bucket[0].parameter.plan, bucket[0].parameter.block
    ordered = sorted(bucket, key=lambda u: u.parameter.index)
    pieces = [ordered]
    if plan.pieces > 1 and plan.bucketing == "block" and block is not None:
        pieces = _of_similar_size(ordered, plan.pieces)
    labels = [_label(bucket)] if len(pieces) == 1 else [_range(piece) for piece in pieces]
    return [(label, tuple(piece)) for label, piece in zip(labels, pieces, strict=True)]


def _of_similar_size(uses: list[Use], count: int) -> list[list[Use]]:
    limit = math.ceil(sum(u.bytes for u in uses) / count)
    pieces: list[list[Use]] = []
    size = 0
    for use in uses:
        if not pieces or size + use.bytes > limit:
            pieces.append([])
            size = 0
        pieces[-1].append(use)
        size += use.bytes
    return pieces


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
    return _range(uses)


def _range(uses: list[Use]) -> str:
    first, last = uses[0].parameter.layer or "root", uses[-1].parameter.layer or "root"
    return first if first == last else f"{first}..{last}"
