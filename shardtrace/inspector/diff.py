"""Patience diff of two lists of lines. It also detects moved lines, because scheduling only moves lines."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


class Mark(IntEnum):
    KEPT = 0
    ADDED = 1
    MOVED = 2
    REMOVED = 3


class Row(NamedTuple):
    """``place`` is an index of the new list; for a removed line, of the old list."""

    mark: Mark
    place: int


def diff(old: Sequence[T], new: Sequence[T]) -> list[Row]:
    """The lines of ``new`` in order, and between them the removed lines of ``old`` at their places. O(n log n)."""
    kept = _longest_common(old, new)
    shared = Counter(old) & Counter(new)
    gone = _surplus(old, shared, set(kept.values()))
    added = _surplus(new, shared, set(kept))
    rows: list[Row] = []
    at = 0
    for i in range(len(new)):
        if i in kept:
            rows += [Row(Mark.REMOVED, k) for k in range(at, kept[i]) if k in gone]
            at = kept[i] + 1
            rows.append(Row(Mark.KEPT, i))
        else:
            rows.append(Row(Mark.ADDED if i in added else Mark.MOVED, i))
    return rows + [Row(Mark.REMOVED, k) for k in range(at, len(old)) if k in gone]


def _longest_common(old: Sequence[T], new: Sequence[T]) -> dict[int, int]:
    """Index in ``new`` -> index in ``old``: the longest common subsequence of the lines that are unique in both."""
    in_old, in_new = Counter(old), Counter(new)
    place = {line: k for k, line in enumerate(old)}
    pairs = [(i, place[line]) for i, line in enumerate(new) if in_new[line] == in_old[line] == 1]
    ends: list[int] = []  # the smallest last index of an increasing sequence of each length
    last: list[int] = []  # the pair at this index
    before: dict[int, int] = {}
    for p, (_, k) in enumerate(pairs):
        length = bisect_left(ends, k)
        if length:
            before[p] = last[length - 1]
        ends[length : length + 1] = [k]
        last[length : length + 1] = [p]
    found: dict[int, int] = {}
    p = last[-1] if last else -1
    while p >= 0:
        found[pairs[p][0]] = pairs[p][1]
        p = before.get(p, -1)
    return _extended(found, old, new)


def _extended(found: dict[int, int], old: Sequence[T], new: Sequence[T]) -> dict[int, int]:
    """Extends each match to the equal lines that follow it, such as lines that a list has twice."""
    used = set(found.values())
    for i, k in [(-1, -1), *sorted(found.items())]:
        while (i := i + 1) < len(new) and (k := k + 1) < len(old) and new[i] == old[k]:
            if i in found or k in used:
                break
            found[i] = k
            used.add(k)
    return found


def _surplus(lines: Sequence[T], shared: Counter[T], kept: set[int]) -> set[int]:
    """Indices of lines that the other list lacks, or has fewer times; kept lines are excluded."""
    seen = Counter(lines[k] for k in kept)
    found = set()
    for k, line in enumerate(lines):
        if k not in kept:
            seen[line] += 1
            if seen[line] > shared[line]:
                found.add(k)
    return found
