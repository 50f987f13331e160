"""Sequences that ranks hold in parts: context parallelism, as data.

A whole sequence of ``length`` positions is cut into ``2 * ranks`` chunks of equal size (the last ones may be shorter,
and are padded). Rank r holds chunks r and ``2 * ranks - 1 - r``: with a causal mask, all ranks then have the same work.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NamedTuple

from passes.plan.runtime import Axis, PlainRuntime, Runtime


class Split(NamedTuple):
    """How one dimension of a value is split over ranks.

    The whole dimension has ``outer * length * inner`` elements, as if it had been reshaped from ``(outer, length,
    inner)``. Ranks hold parts of the middle one: (batch, sequence) flattened to rows is ``Split(0, batch, length, 1)``.
    """

    dim: int
    outer: int
    length: int
    inner: int

    @classmethod
    def along(cls, dim: int, length: int) -> Split:
        """A dimension that is the sequence itself."""
        return cls(dim, 1, length, 1)

    @property
    def size(self) -> int:
        """Elements of the whole dimension."""
        return self.outer * self.length * self.inner


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """The ranks that hold the parts of a sequence.

    Args:
        ranks: how many they are.
        rank: this rank's number among them.
        attention: how queries of one rank see the keys of others: "gather" gathers keys and values, "ulysses" exchanges
            heads for positions where heads divide, "auto" does what sends less.
        axis: their process group in ``runtime``.
        direct: whether ranks exchange messages, because the group's own reduce_scatter sends all to all (gloo).
    """

    ranks: int
    rank: int = 0
    _: KW_ONLY
    attention: Literal["auto", "gather", "ulysses"] = "auto"
    axis: Axis = Axis.CONTEXT
    direct: bool = False
    runtime: Runtime = field(default_factory=PlainRuntime)

    def chunk(self, length: int) -> int:
        """Positions of one chunk of a sequence, padding included."""
        return -(-length // (2 * self.ranks))

    def local(self, length: int) -> int:
        """Positions that each rank holds of a sequence, padding included."""
        return 2 * self.chunk(length)

    def chunks_of(self, rank: int) -> tuple[int, int]:
        """The numbers of the two chunks that a rank holds, in this order."""
        return rank, 2 * self.ranks - 1 - rank

    def part_of(self, split: Split) -> int:
        """Elements that each rank holds of a split dimension."""
        return split.outer * self.local(split.length) * split.inner
