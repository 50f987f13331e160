"""What a line of a lowered trace comes from: each traced line is marked, and autodiff and lowering hand the mark on.

Nothing is computed differently. A line of backward so tells which line of the user's program it is the gradient of.
"""

from __future__ import annotations

from typing import NamedTuple

from thunder.core.symbol import BoundSymbol


class Origin(NamedTuple):
    """A tag of a line: the name of the first result of the traced line that it was made of."""

    result: str


def marked(bsym: BoundSymbol) -> BoundSymbol:
    """A traced line, marked with itself if it has a result."""
    results = bsym.flat_proxy_outs
    return bsym.from_bsym(tags=bsym.tags | {Origin(results[0].name)}) if results else bsym.from_bsym()


def origin_of(bsym: BoundSymbol) -> str | None:
    """The name of the first result of the traced line that a line comes from; None where nothing tells."""
    return next((tag.result for tag in bsym.tags if isinstance(tag, Origin)), None)
