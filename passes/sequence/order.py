"""The order of new lines: what a gather needs comes first, so that other lines compute while it is under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from passes.analysis.recognise import changes_values, is_return, is_unpack, names
from passes.comm.sequence import exchange_heads, gather_sequence

from thunder.core.symbol import BoundSymbol


def gathers_first(lines: Iterable[BoundSymbol]) -> list[BoundSymbol]:
    """The lines with each gather or exchange as early as possible. A line moves behind a gather only if it does not
    follow the first use of what was gathered, so that values live little longer: queries are computed after keys and
    values."""
    placed: list[BoundSymbol] = []
    waiting: list[BoundSymbol] = []  # lines since the last use of a gathered value
    gathered: set[str] = set()
    for bsym in lines:
        if bsym.sym.id in (gather_sequence.id, exchange_heads.id):
            needed = _needed(waiting, names(bsym.flat_proxy_args))
            placed += [*needed, bsym]
            taken = set(map(id, needed))
            waiting = [b for b in waiting if id(b) not in taken]
            gathered |= names(bsym.flat_proxy_outs)
            continue
        waiting.append(bsym)
        fixed = is_unpack(bsym) or is_return(bsym) or changes_values(bsym)
        if fixed or not gathered.isdisjoint(names(bsym.flat_proxy_args)):
            placed += waiting
            waiting = []
    return placed + waiting


def _needed(lines: Sequence[BoundSymbol], wanted: set[str]) -> list[BoundSymbol]:
    """The lines that compute the values ``wanted``."""
    found = []
    for bsym in reversed(lines):
        if not wanted.isdisjoint(names(bsym.flat_proxy_outs)):
            found.append(bsym)
            wanted = wanted | names(bsym.flat_proxy_args)
    return found[::-1]
