"""The pipeline: which passes run, in which order, and the runner between them.

Each pass is one Thunder Transform, so that each stage shows up by its name in ``thunder.last_traces`` and
``thunder.last_backward_traces``. The runner knows no pass: it times, names and verifies what a pass returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from passes.accumulate import accumulate_gradients
from passes.insert_synchronize import insert_synchronize
from passes.meet import meet
from passes.plan import Enlisted
from passes.recognise import bucket_of, is_issue
from passes.regather import regather
from passes.save_shards import Swapped, save_shards
from passes.schedule import schedule
from passes.shard_parameters import shard_parameters
from passes.share_overflow import share_overflow
from passes.traffic import collectives
from passes.verify import verify

from thunder.core.trace import TraceCtx, TraceProvenance
from thunder.core.transform_common import Transform

Stage = Callable[[TraceCtx, TraceCtx, Enlisted], tuple[TraceCtx, TraceCtx]]


class Compilation:
    """What the tracing of one call finds out and its passes need; renewed when the next call is traced."""

    def __init__(self) -> None:
        self.enlisted = Enlisted()
        self.at_end_of_tracing: list[Callable[[], None]] = []
        self.swapped: dict[str, Swapped] = {}  # what forward saves, for the backward that follows
        self._tracing: Any = None

    def begin(self, tracing: Any) -> None:
        """Starts afresh, unless ``tracing`` (Thunder's context of it) is the one that is going on already."""
        if self._tracing is not tracing:
            self.enlisted, self.at_end_of_tracing, self._tracing = Enlisted(), [], tracing

    def end(self) -> None:
        checks, self.at_end_of_tracing, self._tracing = self.at_end_of_tracing, [], None
        for check in checks:
            check()


class Pass(Transform):
    """One pass as a Transform. ``seconds`` is what its last run took."""

    def __init__(self, name: str, compilation: Compilation) -> None:
        self.name = name
        self.compilation = compilation
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"shardtrace.{self.name}"

    @contextmanager
    def announcing_errors(self) -> Iterator[None]:
        """An error of a pass on this rank becomes one on every rank, instead of a wait for this one."""
        try:
            yield
        except Exception as error:
            for announce in dict.fromkeys(plan.announce for plan in self.compilation.enlisted.plans):
                if announce is not None:
                    announce(f"{type(error).__name__}: {error}")
            raise

    def finish(self, trace: TraceCtx, start: float) -> None:
        self.seconds = time.perf_counter() - start
        trace.set_provenance(TraceProvenance(f"shardtrace: {self.name} (took {self.seconds * 1e3:.1f} milliseconds)"))


class PassBeforeAutodiff(Pass):
    """A pass over the prologue and the computation as they were traced."""

    def __init__(self, name: str, compilation: Compilation, stage: Stage) -> None:
        super().__init__(name, compilation)
        self.stage = stage

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        start = time.perf_counter()
        with self.announcing_errors():
            self.compilation.end()
            prologue, computation = self.stage(prologue_trace, computation_trace, self.compilation.enlisted)
        for new, old in ((prologue, prologue_trace), (computation, computation_trace)):
            if new is not old:
                self.finish(new, start)
        return prologue, computation, epilogue_trace


class PassAfterLowering(Pass):
    """A pass over the forward, then the backward, as they will be executed; its result is verified."""

    def __init__(self, name: str, compilation: Compilation, stage: Callable[[TraceCtx], TraceCtx]) -> None:
        super().__init__(name, compilation)
        self.stage = stage

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        start = time.perf_counter()
        with self.announcing_errors():
            new = self.stage(computation_trace)
            if new is not computation_trace:
                verify(new)
        if new is not computation_trace:
            self.finish(new, start)
        return new


class CompareRanks(Pass):
    """Lets each model compare the collectives of what will be executed with those of its other ranks: now, and by a
    line at the top of forward whenever it runs."""

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        start = time.perf_counter()
        enlisted = self.compilation.enlisted
        models: dict[Callable[[list[str]], None] | None, list[str]] = {}
        issues = [b for b in computation_trace.bound_symbols if is_issue(b)]
        for bsym, row in zip(issues, collectives(computation_trace), strict=True):
            plan, line = bucket_of(bsym).plan, f"{row.phase}: {row}"
            models.setdefault(plan.agree, []).append(line)
            enlisted.step_of(plan).collectives.append(line)
        for agree, lines in models.items():
            if agree is not None:
                agree(lines)
        new = meet(computation_trace, enlisted=enlisted)
        if new is not computation_trace:
            self.finish(new, start)
        return new


def pipeline(compilation: Compilation) -> list[Pass]:
    """The passes, in the order in which Thunder calls them."""
    return [
        # parameters are shards from here on; first, as the next pass needs to know which inputs are parameters
        PassBeforeAutodiff("shard_parameters", compilation, lambda p, c, e: shard_parameters(p, c, enlisted=e)),
        # before autodiff: the grad rule of a bucketed synchronize buckets backward too
        PassBeforeAutodiff("insert_synchronize", compilation, lambda p, c, e: (p, insert_synchronize(c, enlisted=e))),
        # before autodiff, as that reads the tags; after the gathers are there
        PassBeforeAutodiff("regather", compilation, lambda p, c, e: (p, regather(c))),
        # after lowering, as it mends what fusions have done to what is saved
        PassAfterLowering("save_shards", compilation, lambda t: save_shards(t, swapped=compilation.swapped)),
        # after lowering, when backward is there; before what is done with reduced gradients
        PassAfterLowering(
            "accumulate", compilation, lambda t: accumulate_gradients(t, steps=compilation.enlisted.steps)
        ),
        # after autodiff and lowering, when it is known what backward returns; before schedule, which puts the waits
        # for gradients before it
        PassAfterLowering("share_overflow", compilation, share_overflow),
        # the last pass: executors and fusions have had their say about the order of lines
        PassAfterLowering("schedule", compilation, schedule),
        CompareRanks("compare_ranks", compilation),
    ]
