"""The runner: it makes a pass a Transform of Thunder. It knows no pass: it times, names and verifies what one returns.

Each stage shows up by its name in ``thunder.last_traces`` and its relatives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Literal

from passes.analysis.calls import with_blocks
from passes.analysis.recognise import bucket_of, is_backward, is_issue
from passes.analysis.verify import VerificationError, verify_lines
from passes.choose_backward import Backwards
from passes.comm.symbols import synchronize
from passes.compat.jit import compile_data_and_stats
from passes.facts import Compilation
from passes.plan import Runtime
from passes.proof.prove import Record

from thunder.core.trace import TraceCtx, TraceProvenance
from thunder.core.transform_common import Transform

REMARK = " | "  # in a trace's provenance, between the pass and its remark
Run = Callable[[TraceCtx], TraceCtx]
Observe = Callable[[str, str, TraceCtx], None]  # of what ("prologue", "forward", ...), the pass, its result


class Pass(Transform):
    """One pass as a Transform. ``seconds`` is the duration of its last run.

    :class:`PassBeforeAutodiff` and :class:`PassAfterLowering` turn a function, ours or a user's, into a pass:
    ``thunder.jit(model, transforms=[PassAfterLowering(my_pass)])``. ``passes.pipeline`` gives the order.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0
        self.compilation: Compilation | None = None  # of a pass of ours, which may run before the trace has buckets
        self.observe: Observe | None = None  # is shown each new trace
        self.announces = True  # whether its errors are this rank's own, which the other ranks have to be told
        self.remarks = False  # whether its stage says what tracing remarked

    def __repr__(self) -> str:
        return f"shardtrace.{self.name}"

    @contextmanager
    def running(self, trace: TraceCtx) -> Iterator[None]:
        """Times the work inside. Announces an error on this rank to all ranks of the models, so that they raise it
        instead of waiting for this rank."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            for runtime in self._runtimes(trace) if self.announces else ():
                runtime.announce(f"{type(error).__name__}: {error}")
            raise
        self.seconds = time.perf_counter() - start

    def sign(self, trace: TraceCtx) -> None:
        """Says in a new trace which pass has made it."""
        took = f"shardtrace: {self.name} (took {self.seconds * 1e3:.1f} milliseconds)"
        remark = self.compilation.facts.remarks if self.compilation is not None and self.remarks else ""
        trace.set_provenance(TraceProvenance(took + (REMARK + remark if remark else "")))

    def publish(self, trace: TraceCtx, what: str) -> None:
        """Signs a new trace and shows it. ``what``: "prologue", "forward" and so on."""
        self.sign(trace)
        if self.observe is not None:
            self.observe(what, self.name, trace)

    def _runtimes(self, trace: TraceCtx) -> Iterable[Runtime]:
        """The runtimes of the models that were traced, or whose buckets a trace synchronizes, gathers or reduces."""
        if self.compilation is not None:
            return self.compilation.facts.parameters.runtimes
        lines = (b for b in trace.bound_symbols if is_issue(b) or b.sym.id == synchronize.id)
        return dict.fromkeys(bucket_of(b).plan.runtime for b in lines)


class PassBeforeAutodiff(Pass):
    """A pass over the computation as it was traced: ``run(computation) -> computation``.

    ``name`` defaults to the function's. ``over``: the trace that it works on, which may be the prologue (it fetches and
    checks the arguments of a call) or the epilogue (it returns the results). ``begins``: as for
    :class:`passes.pipeline.Entry`.
    """

    def __init__(
        self,
        run: Run,
        name: str = "",
        *,
        over: Literal["prologue", "computation", "epilogue"] = "computation",
        begins: bool = False,
    ) -> None:
        super().__init__(name or run.__name__)
        self.run, self.over, self.begins = run, over, begins

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        traces: dict[str, Any] = {
            "prologue": prologue_trace,
            "computation": computation_trace,
            "epilogue": epilogue_trace,
        }
        trace = traces[self.over]
        if trace is not None:
            with self.running(trace):
                new = traces[self.over] = self.run(trace)
            if new is not trace:
                self.publish(new, self.over)
        if self.over == "computation" and self.compilation is not None and self.compilation.facts.record is not None:
            known, last = self.compilation.facts.record, traces[self.over]
            self.compilation.facts.record = known._replace(last=last, first=last if self.begins else known.first)
        return traces["prologue"], traces["computation"], traces["epilogue"]


class FirstStage(Pass):
    """The first transform: gives the passes the facts of the call that was traced, and runs those over the prologue and
    the epilogue with the first one over the computation. Thunder would list all three traces again for each of them."""

    def __init__(self, compilation: Compilation, passes: Sequence[PassBeforeAutodiff]) -> None:
        super().__init__("shard_parameters")
        self.compilation: Compilation = compilation
        self.passes = passes

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        with self.running(computation_trace):
            self.compilation.end_tracing()
            self.compilation.facts.record = Record(computation_trace, computation_trace, computation_trace)
            self.compilation.facts.variables = copy_context()
            stages = compile_data_and_stats()[1].last_backward_traces
            self.compilation.facts.choose = Backwards(self.compilation, self.compilation.facts, stages).run
        traces = prologue_trace, computation_trace, epilogue_trace
        for one in self.passes:
            traces = one.transform_traces_pre_prologue(*traces)
        self.seconds += sum(one.seconds for one in self.passes)
        if traces[0] is not prologue_trace:
            self.sign(traces[0])
        return traces


class PassAfterLowering(Pass):
    """A pass over the forward, then the backward, as they will be executed: ``run(trace) -> trace``.

    The result is verified, except for what holds only once all passes have run. ``name`` defaults to the function's.
    ``announces``: as for :class:`passes.pipeline.Entry`.
    """

    def __init__(self, run: Run, name: str = "", *, announces: bool = True) -> None:
        super().__init__(name or run.__name__)
        self.run, self.announces = run, announces

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        with self.running(computation_trace):
            new = self.run(computation_trace)
            if new is not computation_trace:
                self._verify(new)
                new = with_blocks(new)
        if new is not computation_trace:
            self.publish(new, "backward" if is_backward(new) else "forward")
        return new

    def _verify(self, trace: TraceCtx) -> None:
        try:
            verify_lines(trace)
        except VerificationError as error:
            raise VerificationError(f"after pass {self.name}: {error}") from None
