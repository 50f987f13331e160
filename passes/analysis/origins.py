"""A tag that tells which module's forward asked for a line. Autodiff and lowering hand it on."""

from __future__ import annotations

from typing import NamedTuple

from thunder.core.symbol import BoundSymbol


class InModule(NamedTuple):
    """A tag of a line: the qualified name of the module whose forward asked for it; empty for the traced model itself.
    In a block's function it is that of the block's first call."""

    name: str


def module_of(bsym: BoundSymbol) -> str | None:
    """The module whose forward asked for a line; None if the line has no tag."""
    return next((tag.name for tag in bsym.tags if isinstance(tag, InModule)), None)
