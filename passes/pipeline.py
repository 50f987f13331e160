"""The pipeline: two lists of passes, in the order in which they run.

A pass is a function ``pass(trace, *, fact, ...) -> trace``, which returns the very same trace if it has nothing to do.
Its keyword-only parameters are :class:`Facts` of the compilation: what tracing found, and what passes hand to later
ones. :class:`Compilation` binds them. Its docstring says what it takes, what it gives (a pass may fill a fact) and when
it is a no-op. A pass before autodiff works on the computation as it was traced, or on the prologue or the epilogue
around it. A pass after lowering sees the forward, then the backward, as they run.

The runner makes a pass a Transform of Thunder. It knows no pass: it times, names and verifies what one returns. Each
stage shows up by its name in ``thunder.last_traces`` and its relatives.

Note [Backward again]. A script may switch the reduction of gradients on or off between forward and backward (no_sync),
as with FSDP2. The switch is read when a backward begins. Forward saves the same for each treatment of gradients.
Therefore only the passes from ``accumulate`` on run again, once for each treatment.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context as Variables
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import getdoc
from itertools import chain, takewhile
from typing import Any, Literal, NamedTuple

from passes.analysis.recognise import bucket_of, is_backward, is_issue
from passes.analysis.verify import VerificationError, verify_lines, verify_schedule
from passes.blocks import Inner, copy_of, outline, share_fusions
from passes.borders import (
    Guard,
    Rebuild,
    Setter,
    compare_ranks,
    delay_writes,
    insert_guards,
    keep_stream,
    merge_checks,
    rebuild_result,
    set_state,
    watch_backward,
)
from passes.chunk_loss import Chunks, chunk_loss
from passes.comm.symbols import synchronize
from passes.compat.jit import Collections, compile_data_and_stats
from passes.parameters import accumulate_gradients, drop_unused, insert_synchronize, shard_parameters
from passes.plan import Runtime, Step, TracedParameters
from passes.plan.runtime import Unused
from passes.proof.callable import Border
from passes.proof.prove import Proof, Record, has_backward, prove_step
from passes.save import (
    Contract,
    Kept,
    Swapped,
    Trip,
    checkpoint_activations,
    fit_memory,
    keep_random,
    keep_secondary,
    mark_blocks,
    offload_activations,
    regather,
    save_shards,
    verify_memory,
)
from passes.schedule import overlap_sequence, schedule, wait_copies
from passes.sequence import Context
from passes.split import Tensors, split_parameters, split_sequence

import torch
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.core.transform_common import Transform, dce
from thunder.executors.passes import del_last_used, transform_for_execution
from thunder.transforms.autodiff import grad_transform_on_trace, split_into_forward_and_backward

# ---- what passes know besides the trace ----


@dataclass
class Facts:
    """The facts of one compilation. Tracing fills them; the passes only read them, except for the last two."""

    parameters: TracedParameters = field(default_factory=TracedParameters)  # and their models' steps
    models: list[str] = field(default_factory=list)  # the names of the traced models, in order
    guards: list[Guard] = field(default_factory=list)  # raise if the step is not valid any more
    last_guards: list[Guard] = field(default_factory=list)  # likewise, if all other checks have passed
    setters: dict[str, Setter] = field(default_factory=dict)  # set what forward sets, by the name of its tensors
    rebuild: Rebuild | None = None  # makes what a jitted model returns, if Thunder cannot
    unused: Unused = field(default_factory=Unused)  # what has no gradient in the running backward
    remark: str = ""  # about blocks and modules, for the first stage
    at_end: list[Callable[[], None]] = field(default_factory=list)  # refusals that need the whole trace
    before_lowering: list[Callable[[], None]] = field(default_factory=list)  # refusals of another backward
    lowered: list[TraceCtx] = field(default_factory=list)  # the backward that accumulate gets
    choose: Backwards | None = None  # runs a backward, by the treatment of gradients when it begins
    known: dict[int, Any] = field(default_factory=dict)  # for tracing itself: what it has met, by id
    changes: list[Any] = field(default_factory=list)  # likewise, what forwards set
    swapped: dict[str, Swapped] = field(default_factory=dict)  # forward's save_shards fills it for backward's
    tensors: Tensors | None = None  # the parameters of which ranks compute with parts
    context: Context | None = None  # the sequence that ranks hold in parts
    chunks: Chunks = None  # of a loss
    contract: Contract | None = None  # the limit of its memory
    proving: list[str] = field(default_factory=list)  # the names of the models whose steps are to be proven
    record: Record | None = None  # the computation before the first and after the last pass before autodiff
    border: Border | None = None  # the prologue and the epilogue, likewise
    variables: Variables | None = None  # Thunder's variables of the compilation
    proofs: list[Proof] = field(default_factory=list)  # the results
    forwards: list[TraceCtx] = field(default_factory=list)  # the final forward, for the backward that follows
    kept: list[Kept] = field(default_factory=list)  # forward's keep_secondary fills it for backward's
    trips: list[Trip] = field(default_factory=list)  # likewise, offload_activations

    @property
    def remarks(self) -> str:
        """About blocks and modules, and what is computed on whole sequences or with whole parameters."""
        contexts = filter(None, (self.tensors, self.context))
        return "; ".join(filter(None, (self.remark, *(remark for one in contexts for remark in one.remarks))))


class Compilation:
    """Where the passes of a jitted function find the facts of the call that is being compiled."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.finished: list[Facts] = []  # of the compiled steps that are kept
        self.again: Sequence[Transform] = ()  # makes another backward of ``lowered``
        self.rehearse: Rehearsal | None = None
        self.earlier: dict[str, Any] = {}  # for tracing itself: what it has met in earlier compilations
        self.live: set[tuple[int, str]] = set()  # for tracing itself: the tensors that it reads from modules
        self._coming, self._tracing = Facts(), None

    def trace(self, tracing: Any) -> Facts:
        """The facts for ``tracing`` to fill, which is Thunder's context of it: new ones unless it is under way."""
        if self._tracing is not tracing:
            self._coming, self._tracing = Facts(), tracing
        return self._coming

    def end_tracing(self) -> None:
        """Gives the passes the facts of the call that was traced; none if it called no sharded model."""
        self.facts, self._coming, self._tracing = self._coming, Facts(), None
        self.finished.append(self.facts)
        for refuse in self.facts.at_end:
            refuse()
        self.facts.known = {}

    def bind(self, run: Callable[..., TraceCtx], **options: Any) -> Callable[[TraceCtx], TraceCtx]:
        """A pass with the facts that it uses, and those of the ``options`` that it has."""
        names = inspect.signature(run).parameters.keys()
        facts = names & Facts.__dataclass_fields__.keys()
        given = {name: options[name] for name in names & options.keys()}

        def bound(trace: TraceCtx) -> TraceCtx:
            return run(trace, **given, **{name: getattr(self.facts, name) for name in facts})

        return bound


class Rehearsal:
    """Compiles a computation with other facts, as far as to where its collectives are placed. Nothing of it is kept or
    sent, except for the functions of blocks, which later compilations of the same computation share.

    Args:
        before: the passes before autodiff over the computation.
        after: those after lowering.
        inner: what blocks go through.
    """

    def __init__(
        self, before: Sequence[Callable[..., TraceCtx]], after: Sequence[Callable[..., TraceCtx]], inner: Inner
    ):
        self.before, self.after, self.inner = before, after, inner

    def __call__(self, computation: TraceCtx, facts: Facts, recomputed: Mapping[str, str]) -> list[TraceCtx]:
        """The forward and the backward, if there is one. ``recomputed``: as for :func:`mark_blocks`."""
        mine, tensors, context = Compilation(), facts.tensors, facts.context
        mine.facts = replace(
            facts, unused=Unused(), lowered=[], swapped={}, forwards=[], kept=[], trips=[], record=None, contract=None,
            tensors=replace(tensors, differentiated=set(), remarks={}) if tensors is not None else None,
            context=replace(context, differentiated=set(), remarks={}) if context is not None else None,
        )  # fmt: skip
        trace = from_trace(computation)
        trace.bound_symbols = [copy_of(b) for b in computation.bound_symbols]
        trace = mark_blocks(trace, recomputed)
        for run in self.before:
            trace = mine.bind(run, inner=self.inner)(trace)
        data, trace = compile_data_and_stats()[0], dce(trace)
        trains = not data.disable_torch_autograd_support and any(getattr(a, "requires_grad", False) for a in trace.args)
        trace = transform_for_execution(grad_transform_on_trace(trace) if trains else trace, data.executors_list)
        forward, backward = split_into_forward_and_backward(trace) if trains else (trace, None)
        traces = [del_last_used(forward)]
        traces += [del_last_used(backward, clear_mutable_collections=True)] if backward is not None else []
        for run in self.after:
            traces = [mine.bind(run)(trace) for trace in traces]
        return traces


# ---- the runner ----


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
            Collections.become_usual()
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
            self.compilation.facts.record = self.compilation.facts.record.after(traces[self.over], begins=self.begins)
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
            self.compilation.facts.record = Record((computation_trace,), computation_trace, computation_trace)
            outer = prologue_trace, epilogue_trace
            self.compilation.facts.border = Border(outer, outer, self.compilation.facts.setters)
            self.compilation.facts.variables = copy_context()
            stages = compile_data_and_stats()[1].last_backward_traces
            self.compilation.facts.choose = Backwards(self.compilation, self.compilation.facts, stages)
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
        if new is not computation_trace:
            self.publish(new, "backward" if is_backward(new) else "forward")
        return new

    def _verify(self, trace: TraceCtx) -> None:
        try:
            verify_lines(trace)
        except VerificationError as error:
            raise VerificationError(f"after pass {self.name}: {error}") from None


class LastStage(PassAfterLowering):
    """The last transform, which sees what all others leave."""

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        facts = self.compilation.facts if self.compilation is not None else Facts()
        if facts.border is not None:
            facts.border = facts.border._replace(runs=(prologue_trace, epilogue_trace))
        return prologue_trace, computation_trace, epilogue_trace

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        new = super().transform_trace_post_optimization(computation_trace, **kwargs)
        if is_backward(new) or not has_backward(new, self.compilation.facts.record if self.compilation else None):
            Collections.become_usual()
        return new


# ---- a backward for gradients that are treated otherwise ----


class Backward(NamedTuple):
    steps: dict[Runtime, Step]
    function: Callable[..., Any]
    stages: list[TraceCtx]


@dataclass(eq=False)
class Backwards:
    """The backwards of one compiled step. The first is the one that Thunder has compiled.

    Args:
        compilation: has the passes.
        facts: of the step. They and ``stages`` (``thunder.last_backward_traces``) are those of the last that ran.
    """

    compilation: Compilation
    facts: Facts
    stages: list[TraceCtx]
    known: list[Backward] = field(default_factory=list)

    def function_of(self, backward: TraceCtx) -> Callable[..., Any] | None:
        """The function of one of the backwards; None if it has not run."""
        return next((one.function for one in self.known if one.stages[-1] is backward), None)

    def __call__(self, compiled: Callable[..., Any], saved: list[Any], cotangents: list[Any]) -> Any:
        """Runs the one for the current treatment of gradients, which is ``compiled`` if forward has foreseen it."""
        if not self.known:
            self.known.append(Backward(self.facts.parameters.steps, compiled, list(self.stages)))
        first = self.known[0]
        steps = {runtime: runtime.begin_backward(step) for runtime, step in first.steps.items()}
        chosen = self._lowered(steps)
        for runtime, step in chosen.steps.items():
            runtime.compare_step(step, changed=step is not first.steps[runtime])
        if chosen.stages[-1] is not self.stages[-1]:
            self.stages[:], self.facts.parameters.steps = chosen.stages, chosen.steps
        with ExitStack() as running:
            for runtime in steps:
                running.enter_context(runtime.in_backward())
            return (compiled if chosen is first else chosen.function)(saved, cotangents)

    def _lowered(self, steps: dict[Runtime, Step]) -> Backward:
        for one in self.known:
            if all(one.steps[runtime].treats_as(step) for runtime, step in steps.items()):
                return one
        assert self.facts.variables is not None
        self.known.append(self.facts.variables.copy().run(self._lower, steps))
        return self.known[-1]

    @torch.enable_grad()
    def _lower(self, steps: dict[Runtime, Step]) -> Backward:
        for refuse in self.facts.before_lowering:
            refuse()
        data, _ = compile_data_and_stats()
        compiled = self.known[0].stages
        stages = compiled[: compiled.index(self.facts.lowered[0]) + 1]
        parameters = replace(self.facts.parameters, steps=steps)
        facts, self.compilation.facts = self.compilation.facts, replace(self.facts, parameters=parameters)
        enabled, data.is_grad_enabled = data.is_grad_enabled, True
        try:
            for transform in self.compilation.again:
                new = transform.transform_trace_post_optimization(stages[-1], executors_list=data.executors_list)
                if new is not stages[-1]:
                    stages.append(new)
        finally:
            self.compilation.facts, data.is_grad_enabled = facts, enabled
        return Backward(steps, stages[-1].python_callable(), stages)


# ---- the pipeline ----


class Entry(NamedTuple):
    """A pass in a list. ``why`` it stands there; ``needed`` says why it cannot be disabled, and is empty if it can."""

    name: str
    run: Callable[..., TraceCtx]
    why: str
    needed: str = ""
    over: Literal["prologue", "computation", "epilogue"] = "computation"  # of a pass before autodiff
    begins: bool = False  # whether its result is the program that all later passes must keep
    remarks: bool = False  # whether its stage says what tracing remarked
    announces: bool = True  # its errors, which are this rank's own; else every rank raises them

    @property
    def does(self) -> str:
        """The first paragraph of its docstring."""
        return " ".join((getdoc(self.run) or "").partition("\n\n")[0].split())


def yours(trace: TraceCtx) -> TraceCtx:
    """Your passes: those in ``thunder.jit(transforms=[...])``, in their order."""
    return trace


# fmt: off
BEFORE_AUTODIFF = (
    Entry("fit_memory", fit_memory, "first: it tries the others on the computation as it was recorded",
          "the step would need more memory than it was given"),
    Entry("split_parameters", split_parameters, "before all that change the computation as it was recorded",
          "ranks would compute with whole parameters", begins=True),
    Entry("split_sequence", split_sequence, "after split_parameters, whose lines it splits as all others",
          "ranks would compute on whole sequences", begins=True),
    Entry("chunk_loss", chunk_loss, "after split_sequence, which knows the model's own loss; before lines are inserted",
          begins=True),
    Entry("shard_parameters", shard_parameters, "before the next passes, which ask which inputs are parameters",
          "the step is called with shards", remarks=True),  # the first that every model has
    Entry("shard_prologue", shard_parameters, "with the computation, whose inputs the prologue fetches and checks",
          "the step is called with shards", over="prologue"),
    Entry("insert_guards", insert_guards, "before checks are merged: some guards run after all checks",
          "a step would run that is not valid any more", over="prologue"),
    Entry("merge_checks", merge_checks, "after all passes that look for Thunder's own checks", over="prologue"),
    Entry("set_state", set_state, "before other passes add lines that read what the epilogue returns",
          "what forward sets on modules would be lost", over="epilogue"),
    Entry("watch_backward", watch_backward, "before rebuild_result, which may detach results",
          "gradient penalties would be dropped silently", over="epilogue"),
    Entry("keep_stream", keep_stream, "before rebuild_result, which may detach results",
          "backward could read gradients before they are computed", over="epilogue"),
    Entry("rebuild_result", rebuild_result, "last: from here on the epilogue returns an object",
          "Thunder cannot return what the model returns", over="epilogue"),
    Entry("delay_writes", delay_writes, "before autodiff and fusions, which do not look at writes",
          "executors that fuse would drop writes, or read what was written for what was there before"),
    Entry("insert_synchronize", insert_synchronize, "before autodiff: the grad rule of a bucket buckets backward, too",
          "the computation needs whole parameters"),
    Entry("keep_random", keep_random, "before autodiff, which hands tags on; before other passes split lines",
          "backward would draw other random numbers"),
    Entry("checkpoint_activations", checkpoint_activations,
          "before regather, which splits lines that mix activations with parameters: the parts inherit the tags"),
    Entry("regather", regather, "after the gathers are inserted", "ZeRO-3 would save gathered parameters"),
    Entry("your passes", yours, "they find all tags set", "leave them out of thunder.jit(transforms=...)"),
    Entry("outline", outline, "after all passes that see blocks as they were traced",
          "only it can differentiate the calls of blocks: repeated_blocks=\"inline\" makes none"),
)
AFTER_LOWERING = (
    Entry("save_shards", save_shards, "first: it repairs what fusions save",
          "ZeRO-3 would save what fusions have gathered"),
    Entry("keep_secondary", keep_secondary, "after save_shards, which may save more shards",
          "backward would gather from all nodes"),
    Entry("offload_activations", offload_activations, "after keep_secondary: it stores what is saved",
          "the step would need more memory"),
    Entry("share_fusions", share_fusions, "after save_shards, which makes unequal what it repairs"),
    Entry("accumulate", accumulate_gradients, "before the passes that work on reduced gradients",
          "no_sync would reduce gradients"),
    Entry("your passes", yours, "their changes are scheduled", "leave them out of thunder.jit(transforms=...)"),
    Entry("overlap_sequence", overlap_sequence, "before schedule, which keeps the order of all other lines"),
    Entry("schedule", schedule, "after executors and fusions, which change the order of lines"),
    Entry("wait_copies", wait_copies, "after schedule, which places everything else",
          "an optimizer would change shards that are being copied"),
    Entry("drop_unused", drop_unused, "after the waits for gradients and for copies to the host, which it reads",
          "optimizers would move parameters that were not used"),
    Entry("verify_schedule", verify_schedule, "after all passes that add lines, before ranks compare"),
    Entry("verify_memory", verify_memory, "after all passes that change what is alive at a line"),
    Entry("compare_ranks", compare_ranks, "after all passes that add, remove or move collectives", announces=False),
    Entry("prove_step", prove_step, "last, after Thunder's own Transforms: it proves what runs",
          "it ends the compilation; fsdp(checks=Checks(prove=False)) proves nothing"),
)
# fmt: on


def pipeline(
    compilation: Compilation,
    transforms: Sequence[Transform] = (),
    *,
    disable: Collection[str] = (),
    observe: Observe | None = None,
) -> list[Transform]:
    """The passes and the user's ``transforms``, in the order in which Thunder calls them: our own and the user's
    passes, then Thunder's Transforms, such as CUDA graphs, which work on the trace that will run, then the proof.

    Args:
        disable: names of passes to leave out.
        observe: is shown the result of each pass.

    Raises:
        ValueError: if ``disable`` names a pass that does not exist or is needed.
    """
    check_disabled(disable)
    users = [t for t in transforms if isinstance(t, Pass)]
    others = [t for t in transforms if not isinstance(t, Pass)]
    left_out = {*disable}
    if others:  # they may look for Thunder's own lines
        left_out.add(merge_checks.__name__)
    if schedule.__name__ in disable:
        left_out.add(verify_schedule.__name__)
    inner = _inner(users, left_out)

    def before_autodiff(entry: Entry) -> PassBeforeAutodiff:
        one = PassBeforeAutodiff(
            compilation.bind(entry.run, inner=inner), entry.name, over=entry.over, begins=entry.begins
        )
        one.remarks = entry.remarks
        return one

    def after_lowering(entry: Entry) -> PassAfterLowering:
        kind = LastStage if entry is AFTER_LOWERING[-1] else PassAfterLowering
        return kind(compilation.bind(entry.run), entry.name, announces=entry.announces)

    early, before = _cut(BEFORE_AUTODIFF, left_out)
    late, after = _cut(AFTER_LOWERING, left_out)
    compilation.rehearse = _rehearsal((early, users, before), (late, users, after), inner)
    first, rest = [*map(before_autodiff, early)], [*map(after_lowering, late)]
    last: list[Pass] = [*map(before_autodiff, before), *map(after_lowering, after)]
    for one in (*first, *rest, *last):
        one.compilation = compilation
    for one in (*first, *rest, *users, *last):
        one.observe = observe
    around = 1 + max(i for i, one in enumerate(first) if one.over != "computation")
    every = [FirstStage(compilation, first[:around]), *first[around:], *rest, *users, *last[:-1], *others, last[-1]]
    compilation.again = every[every.index(next(one for one in rest if one.name == "accumulate")) :]
    return every


def _rehearsal(before: Sequence[Iterable[Any]], after: Sequence[Iterable[Any]], inner: Inner) -> Rehearsal:
    """The part of a pipeline that a rehearsal runs: neither the choice itself, nor the schedule and what follows."""
    first = [e for e in chain(*before) if getattr(e, "over", "computation") == "computation"]
    last = takewhile(lambda e: e.name not in ("schedule", "wait_copies"), chain(*after))
    runs = [e.run for e in first if not isinstance(e, PassAfterLowering) and e.name != "fit_memory"]
    return Rehearsal(runs, [e.run for e in last if not isinstance(e, PassBeforeAutodiff)], inner)


def _cut(entries: Iterable[Entry], left_out: Collection[str]) -> tuple[list[Entry], list[Entry]]:
    """The entries ahead of the user's passes, and those after them, without those that are ``left_out``."""
    found = [entry for entry in entries if entry.name not in left_out]
    at = next(i for i, entry in enumerate(found) if entry.run is yours)
    return found[:at], found[at + 1 :]


def _inner(users: Sequence[Pass], left_out: Collection[str]) -> Inner:
    """The passes that a block's own trace goes through, which has no collectives."""

    def before(unsharded: Collection[str]) -> list[Run]:
        own: list[Run] = [keep_random, checkpoint_activations, partial(regather, unsharded=unsharded)]
        kept = [run for run in own if getattr(run, "__name__", "") not in left_out]
        return [*kept, *(t.run for t in users if isinstance(t, PassBeforeAutodiff))]

    shared = [] if "share_fusions" in left_out else [share_fusions]
    overlap = [] if "overlap_sequence" in left_out else [overlap_sequence]
    return Inner(before, [*shared, *overlap, *(t.run for t in users if isinstance(t, PassAfterLowering))])


def check_disabled(disable: Collection[str]) -> None:
    """Raises ValueError if a name is none of a pass that can be disabled."""
    entries = {e.name: e for e in (*BEFORE_AUTODIFF, *AFTER_LOWERING)}
    optional = ", ".join(name for name, entry in entries.items() if not entry.needed)
    for name in disable:
        if name not in entries:
            raise ValueError(f"disable_passes: there is no pass {name!r}. Those that can be disabled are {optional}")
        if why := entries[name].needed:
            raise ValueError(f"disable_passes: {name!r} is needed ({why}). Those that can be disabled are {optional}")
