"""Traces each line of a lowered trace back to the traced line that it comes from.

Each traced line is marked with a tag, which autodiff and lowering hand on. A backward line thus tells which line of
the user's program it differentiates. The tags change nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from thunder.core.symbol import BoundSymbol


class Origin(NamedTuple):
    """A tag of a line: the name of the first result of the traced line that it comes from."""

    result: str


class InModule(NamedTuple):
    """A tag of a line: the qualified name of the module whose forward asked for it; empty for the traced model itself.
    In a block's function it is that of the block's first call."""

    name: str


def module_of(bsym: BoundSymbol) -> str | None:
    """The module whose forward asked for a line; None if the line has no tag."""
    return next((tag.name for tag in bsym.tags if isinstance(tag, InModule)), None)


def marked(bsym: BoundSymbol) -> BoundSymbol:
    """A traced line, tagged with its own first result if it has one."""
    results = bsym.flat_proxy_outs
    return bsym.from_bsym(tags=bsym.tags | {Origin(results[0].name)}) if results else bsym.from_bsym()


def origin_of(bsym: BoundSymbol) -> str | None:
    """The name of the first result of the traced line that a line comes from; None if the line has no tag."""
    return next((tag.result for tag in bsym.tags if isinstance(tag, Origin)), None)
