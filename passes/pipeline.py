"""The pipeline: which passes run, in which order, and the runner between them.

Each pass is one Thunder Transform, so that each stage shows up by its name in ``thunder.last_traces`` and
``thunder.last_backward_traces``. The runner knows no pass: it times, names and verifies what a pass returns.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from passes.accumulate import accumulate_gradients
from passes.analysis.calls import with_blocks
from passes.analysis.recognise import bucket_of, is_issue
from passes.analysis.verify import VerificationError, verify
from passes.checkpoint_activations import checkpoint_activations
from passes.comm.symbols import synchronize
from passes.compare_ranks import compare_ranks
from passes.drop_unused import Unused, drop_unused, insert_notes
from passes.insert_guards import Guard, insert_guards
from passes.insert_synchronize import insert_synchronize
from passes.keep_random import keep_random
from passes.keep_secondary import Kept, keep_secondary
from passes.merge_checks import merge_checks
from passes.outline import Inner, outline
from passes.plan import Enlisted, Runtime
from passes.rebuild_result import Rebuild, rebuild_result
from passes.refuse_double_backward import insert_refusal
from passes.regather import regather
from passes.save_shards import Swapped, save_shards
from passes.schedule import schedule
from passes.set_state import Setter, set_state
from passes.shard_parameters import shard_parameters
from passes.share_fusions import share_fusions
from passes.wait_copies import wait_copies

from thunder.core.trace import TraceCtx, TraceProvenance
from thunder.core.transform_common import Transform

REMARK = " | "  # in a trace's provenance, between the pass and its remark
Run = Callable[[TraceCtx], TraceCtx]


class Compilation:
    """Facts from the tracing of one call that its passes need. Renewed when the next call is traced."""

    def __init__(self) -> None:
        self.enlisted = Enlisted()
        self.models: dict[str, None] = {}  # the names of the traced models, in order
        self.at_end_of_tracing: list[Callable[[], None]] = []
        self.swapped: dict[str, Swapped] = {}  # values that forward saves, for the backward that follows
        self.kept: list[Kept] = []  # second shards that forward saves, likewise
        self.known: dict[int, Any] = {}  # of the tracer: the parameters and buffers that it has met, by id
        self.guards: list[Guard] = []  # of the tracer: raise if the step is not valid any more
        self.last_guards: list[Guard] = []  # likewise, if all other checks have passed
        self.setters: dict[str, Setter] = {}  # likewise: set what forward sets, by the name of its tensors
        self.rebuild: Rebuild | None = None  # likewise: makes what a jitted model returns, if Thunder cannot
        self.unused = Unused()
        self.remarks = ""  # likewise: what it says of blocks and modules, in the trace's provenance
        self._tracing: Any = None

    def begin(self, tracing: Any) -> None:
        """Starts afresh, unless ``tracing`` (Thunder's context of it) is already under way."""
        if self._tracing is not tracing:
            self.enlisted, self.at_end_of_tracing, self._tracing = Enlisted(), [], tracing
            self.models, self.known, self.remarks = {}, {}, ""
            self.guards, self.last_guards, self.setters, self.rebuild = [], [], {}, None
            self.unused = Unused()

    def end(self) -> None:
        checks, self.at_end_of_tracing, self._tracing = self.at_end_of_tracing, [], None
        for check in checks:
            check()


class Pass(Transform):
    """One pass as a Transform. ``seconds`` is the duration of its last run.

    :class:`PassBeforeAutodiff` and :class:`PassAfterLowering` turn a function, ours or a user's, into a pass:
    ``thunder.jit(model, transforms=[PassAfterLowering(my_pass)])``. :func:`pipeline` gives the order.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"shardtrace.{self.name}"

    @contextmanager
    def running(self, runtimes: Iterable[Runtime]) -> Iterator[None]:
        """Times the work inside. Announces an error on this rank to all ranks of the models, so that they raise it
        instead of waiting for this rank."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            for runtime in runtimes:
                runtime.announce(f"{type(error).__name__}: {error}")
            raise
        self.seconds = time.perf_counter() - start

    def sign(self, trace: TraceCtx, remark: str = "") -> None:
        took = f"shardtrace: {self.name} (took {self.seconds * 1e3:.1f} milliseconds)"
        trace.set_provenance(TraceProvenance(took + (REMARK + remark if remark else "")))


class ShardParameters(Pass):
    """The first pass, and the only one that also changes the prologue and the epilogue.

    ``merge``: whether checks of the prologue are merged. Transforms of others may look for Thunder's own lines.
    """

    def __init__(self, compilation: Compilation, *, merge: bool = True) -> None:
        super().__init__("shard_parameters")
        self.compilation = compilation
        self.merge = merge

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        enlisted = self.compilation.enlisted
        with self.running(enlisted.runtimes):
            self.compilation.end()
            prologue, computation = shard_parameters(prologue_trace, computation_trace, enlisted=enlisted)
            of_ranks = [functools.partial(r.check_step, enlisted.step_of(r)) for r in enlisted.runtimes]
            guards: list[Guard] = [*of_ranks, *self.compilation.guards]
            prologue = insert_guards(prologue, guards=guards, last=self.compilation.last_guards)
            if self.merge and computation is not computation_trace:
                prologue = merge_checks(prologue)
        if computation is not computation_trace:
            self.sign(prologue)
            self.sign(computation, self.compilation.remarks)
        if epilogue_trace is not None and self.compilation.models:
            epilogue_trace = set_state(epilogue_trace, setters=self.compilation.setters)
            epilogue_trace = insert_refusal(epilogue_trace, model=" and ".join(self.compilation.models))
            epilogue_trace = insert_notes(epilogue_trace, unused=self.compilation.unused)
            epilogue_trace = rebuild_result(epilogue_trace, rebuild=self.compilation.rebuild)
        return prologue, computation, epilogue_trace


class PassBeforeAutodiff(Pass):
    """A pass over the computation as it was traced: ``run(computation) -> computation``.

    ``name`` defaults to the function's.
    """

    def __init__(self, run: Run, name: str = "", compilation: Compilation | None = None) -> None:
        super().__init__(name or run.__name__)
        self.run = run
        self.compilation = compilation  # for a pass that runs before the trace has buckets

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        found = self.compilation.enlisted.runtimes if self.compilation is not None else runtimes_in(computation_trace)
        with self.running(found):
            computation = self.run(computation_trace)
        if computation is not computation_trace:
            self.sign(computation)
        return prologue_trace, computation, epilogue_trace


class PassAfterLowering(Pass):
    """A pass over the forward, then the backward, as they will be executed: ``run(trace) -> trace``.

    The result is verified; limits of memory are checked only if the trace is ``scheduled`` by then. ``name`` defaults
    to the function's.
    """

    def __init__(self, run: Run, name: str = "", *, scheduled: bool = False) -> None:
        super().__init__(name or run.__name__)
        self.run = run
        self.scheduled = scheduled

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        with self.running(runtimes_in(computation_trace)):
            new = self.run(computation_trace)
            if new is not computation_trace:
                self._verify(new)
                new = with_blocks(new)
        if new is not computation_trace:
            self.sign(new)
        return new

    def _verify(self, trace: TraceCtx) -> None:
        try:
            verify(trace, scheduled=self.scheduled)
        except VerificationError as error:
            raise VerificationError(f"after pass {self.name}: {error}") from None


def runtimes_in(trace: TraceCtx) -> tuple[Runtime, ...]:
    """The runtimes of the models whose buckets a trace synchronizes, gathers or reduces."""
    lines = (b for b in trace.bound_symbols if is_issue(b) or b.sym.id == synchronize.id)
    return tuple(dict.fromkeys(bucket_of(b).plan.runtime for b in lines))


class CompareRanks(Pass):
    """The last of our passes. Its errors need no announcement, because every rank raises them."""

    def __init__(self, compilation: Compilation) -> None:
        super().__init__("compare_ranks")
        self.compilation = compilation

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        with self.running(()):
            new = compare_ranks(computation_trace, enlisted=self.compilation.enlisted)
        new = with_blocks(new)  # if no pass before has made a new trace
        if new is not computation_trace:
            self.sign(new)
        return new


def _inner(users: Sequence[Pass]) -> Inner:
    """The passes of :func:`pipeline` that a block's own trace goes through, which has no collectives."""

    def before(unsharded: Collection[str]) -> list[Run]:
        own: list[Run] = [keep_random, checkpoint_activations, functools.partial(regather, unsharded=unsharded)]
        return [*own, *(t.run for t in users if isinstance(t, PassBeforeAutodiff))]

    return Inner(before, [share_fusions, *(t.run for t in users if isinstance(t, PassAfterLowering))])


def pipeline(compilation: Compilation, transforms: Sequence[Transform] = ()) -> list[Transform]:
    """The passes and the user's ``transforms``, in the order in which Thunder calls them."""
    users = [t for t in transforms if isinstance(t, Pass)]
    return [
        # first, because the next pass needs to know which inputs are parameters; they are shards from here on
        ShardParameters(compilation, merge=len(users) == len(transforms)),
        # before autodiff: the grad rule of a bucketed synchronize buckets backward too
        PassBeforeAutodiff(
            lambda c: insert_synchronize(c, enlisted=compilation.enlisted), "insert_synchronize", compilation
        ),
        # before autodiff, which hands a line's tags on to its successors; before other passes split lines
        PassBeforeAutodiff(keep_random),
        # before autodiff, which reads the tags; before regather, which splits lines that mix activations with
        # parameters: the parts inherit the tags
        PassBeforeAutodiff(checkpoint_activations),
        # before autodiff, which reads the tags; after the gathers are inserted
        PassBeforeAutodiff(regather),
        # after lowering, because it repairs the changes that fusions make to the saved values
        PassAfterLowering(lambda t: save_shards(t, swapped=compilation.swapped), "save_shards"),
        # after lowering, which splits the joint trace; after save_shards, which may save more shards
        PassAfterLowering(lambda t: keep_secondary(t, kept=compilation.kept), "keep_secondary"),
        # after lowering, when fusions exist; after save_shards, which makes unequal what it repairs
        PassAfterLowering(share_fusions),
        # after lowering, when backward exists; before the passes that work on reduced gradients
        PassAfterLowering(lambda t: accumulate_gradients(t, steps=compilation.enlisted.steps), "accumulate"),
        # a user's passes: those before autodiff find the tags set, those after lowering have their changes scheduled
        *users,
        # after all passes that see blocks as they were traced: autodiff differentiates what it makes of their calls
        PassBeforeAutodiff(lambda c: outline(c, inner=_inner(users)), "outline"),
        # last, because executors and fusions change the order of lines; then a stop after all copies from the host
        PassAfterLowering(lambda t: wait_copies(schedule(t)), "schedule", scheduled=True),
        # after the waits for gradients and for copies to the host, because it reads them
        PassAfterLowering(lambda t: drop_unused(t, unused=compilation.unused), "drop_unused", scheduled=True),
        CompareRanks(compilation),
        # Thunder's own Transforms, such as CUDA graphs, work on the trace that will run
        *(t for t in transforms if not isinstance(t, Pass)),
    ]
