"""An integer program over the steps of a family: how many blocks of each class recompute what, and how many buckets are
kept."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from passes.analysis.recognise import bucket_of, is_collective, is_gather, is_issue, nbytes
from passes.analysis.seconds import block_seconds, compute_seconds, link_seconds
from passes.plan import Bucket
from shardtrace.planner.family import Candidate, Family, Rounding

import numpy as np


class Program:
    """Minimises the seconds of backward, the longer of compute and communication, under a limit of the bytes that
    forward leaves for it. Variables: for each class and variant a number of blocks; for each class, and each bucket
    outside, a number of kept buckets; the seconds.
    """

    def __init__(self, family: Family, rounding: Rounding) -> None:
        self.family, self.empty = family, Candidate(family.name, rounding=rounding)
        self.variants = list(family.variants)
        cost, backward = family.task.setting.cost, family.step(self.empty).backward.bound_symbols
        pairs = [[family.variants[v][c.calls[0]] for v in self.variants] for c in family.classes]
        self.seconds = [[block_seconds(cost, pair.backward.id).total for pair in row] for row in pairs]
        self.bytes = [[_saved_bytes(pair.forward.id) for pair in row] for row in pairs]
        self.groups = [c.labels for c in family.classes] + [(label,) for label in family.outside]
        self.compute = sum(compute_seconds(cost, b) for b in backward)
        self.link = sum(link_seconds(b) for b in backward if is_issue(b))
        gathers = [b for b in backward if is_collective(b) and is_gather(b)]
        issues = {bucket_of(b).label: b for b in gathers if is_issue(b)}
        self.gather = [link_seconds(issues[labels[0]]) if labels else 0.0 for labels in self.groups]
        firsts = {labels[0] for labels in self.groups if labels}
        load = dict.fromkeys(firsts, 0.0)  # seconds that a gather and its wait take from compute
        for b in gathers:
            if bucket_of(b).label in load:
                load[bucket_of(b).label] += compute_seconds(cost, b)
        self.load = [load[labels[0]] if labels else 0.0 for labels in self.groups]
        self.whole = [whole_bytes(family.buckets[labels[0]]) if labels else 0 for labels in self.groups]

    @cached_property
    def most(self) -> float:
        """The bytes of the combination that saves and keeps everything."""
        blocks = sum(max(row) * len(c.calls) for row, c in zip(self.bytes, self.family.classes, strict=True))
        return float(blocks + sum(w * len(labels) for w, labels in zip(self.whole, self.groups, strict=True)))

    def solve(self, memory: float) -> Candidate | None:
        """The fastest combination whose saved and kept bytes are at most ``memory``."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        classes, v = self.family.classes, len(self.variants)
        blocks = len(classes) * v
        n = blocks + len(self.groups) + 1
        extra = np.array([s - row[0] for row in self.seconds for s in row])
        gather, load, whole = np.array(self.gather), np.array(self.load), np.array(self.whole, dtype=float)
        scale = 1 / max(self.compute, self.link, 1e-12)
        # beside the seconds, a little for all work and all messages, which choose among equals
        objective = scale * np.concatenate([0.01 * extra, -0.01 * gather, [1.0]])
        limit = np.concatenate([[b for row in self.bytes for b in row], whole, [0.0]])
        rules = [
            LinearConstraint(limit / max(self.most, 1.0), -np.inf, memory / max(self.most, 1.0)),
            LinearConstraint(scale * np.concatenate([-extra, load, [1.0]]), scale * self.compute, np.inf),
            LinearConstraint(scale * np.concatenate([0 * extra, gather, [1.0]]), scale * self.link, np.inf),
        ]
        for k, c in enumerate(classes):
            row = np.zeros(n)
            row[k * v : (k + 1) * v] = 1
            rules.append(LinearConstraint(row, len(c.calls), len(c.calls)))
        keeps = self.family.keeps is not False
        most = [len(c.calls) for c in classes for _ in self.variants]
        most += [len(labels) if keeps else 0 for labels in self.groups]
        with _without_stdout():
            found = milp(
                objective,
                integrality=[*[1] * (n - 1), 0],
                bounds=Bounds(0, np.array([*most, np.inf])),
                constraints=rules,
                options={"mip_rel_gap": 0.0},  # the best, not the first good one that the solver meets
            )
        return self._candidate(np.rint(found.x[:-1]).astype(int)) if found.success else None

    def _candidate(self, numbers: Sequence[int]) -> Candidate:
        """The first blocks recompute, because their backward comes last, when memory is free again. The last buckets
        are kept, because their backward comes first."""
        v = len(self.variants)
        recomputed: list[tuple[str, str]] = []
        for k, c in enumerate(self.family.classes):
            names = list(dict.fromkeys(name for name, _ in c.calls))
            for variant, number in zip(
                reversed(self.variants[1:]), numbers[k * v + 1 : (k + 1) * v][::-1], strict=True
            ):
                recomputed += [(name, variant) for name in names[:number]]
                names = names[number:]
        counts = numbers[len(self.family.classes) * v :]
        kept = (labels[len(labels) - n :] for labels, n in zip(self.groups, counts, strict=True) if n)
        labels = frozenset(label for found in kept for label in found)
        return self.empty._replace(recomputed=self.family.in_order(recomputed), kept=labels)


@contextmanager
def _without_stdout() -> Iterator[None]:
    """Drops what libraries print by C's printf, as HiGHS does whatever its options are (HiGHS, issue 2734)."""
    sys.stdout.flush()
    flush, kept = ctypes.CDLL(None).fflush, os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
        flush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _saved_bytes(part: Any) -> int:
    """The bytes of what a block's forward saves. Values that share memory count twice."""
    return sum(nbytes(r) for r in part.trace.bound_symbols[-1].args[0] if isinstance(r, list))


def whole_bytes(bucket: Bucket) -> int:
    """The bytes of the unsharded parameters, however they travel."""
    return (bucket.plain or bucket).bytes
