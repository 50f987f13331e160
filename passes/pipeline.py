"""The pipeline: two lists of passes, in the order in which they run.

A pass is a function ``pass(trace, *, fact, ...) -> trace``, which returns the very same trace if it has nothing to do.
Its keyword-only parameters are facts of the compilation (:mod:`passes.facts`), which are bound here. Its docstring says
what it takes, what it gives and when it is a no-op. A pass before autodiff works on the computation as it was traced,
or on the prologue or the epilogue around it. A pass after lowering sees the forward, then the backward, as they run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from inspect import getdoc
from typing import Literal, NamedTuple

from passes.accumulate import accumulate_gradients
from passes.analysis.calls import with_blocks
from passes.analysis.verify import verify_schedule
from passes.delay_writes import delay_writes
from passes.drop_unused import drop_unused
from passes.epilogue import keep_stream, rebuild_result, set_state, watch_backward
from passes.facts import Compilation
from passes.guards import compare_ranks, insert_guards, merge_checks
from passes.insert_synchronize import insert_synchronize
from passes.outline import Inner, outline
from passes.proof.prove_step import prove_step
from passes.runner import FirstStage, Observe, Pass, PassAfterLowering, PassBeforeAutodiff, Run
from passes.save import checkpoint_activations, keep_random, keep_secondary, regather, save_shards
from passes.schedule import schedule, wait_copies
from passes.shard_parameters import shard_parameters
from passes.share_fusions import share_fusions
from passes.split_sequence import overlap_sequence, split_sequence

from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform


class Entry(NamedTuple):
    """A pass in a list. ``why`` it stands there; ``needed`` says why it cannot be disabled, and is empty if it can."""

    name: str
    run: Callable[..., TraceCtx]
    why: str
    needed: str = ""
    over: Literal["prologue", "computation", "epilogue"] = "computation"  # of a pass before autodiff
    begins: bool = False  # whether its result is the program that all later passes must keep
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
    Entry("split_sequence", split_sequence, "first: it needs the computation as it was recorded",
          "ranks would compute on whole sequences", begins=True),
    Entry("shard_parameters", shard_parameters, "before the next passes, which ask which inputs are parameters",
          "the step is called with shards"),
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
    Entry("compare_ranks", compare_ranks, "after all passes that add, remove or move collectives", announces=False),
    Entry("prove_step", prove_step, "after all passes that change what a step computes"),
    Entry("show_blocks", with_blocks, "last, for a trace that no other pass has changed", "a trace would not print"),
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
    passes, then Thunder's Transforms, such as CUDA graphs, which work on the trace that will run.

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
        run = compilation.bound(entry.run, inner=inner)
        return PassBeforeAutodiff(run, entry.name, over=entry.over, begins=entry.begins)

    def after_lowering(entry: Entry) -> PassAfterLowering:
        return PassAfterLowering(compilation.bound(entry.run), entry.name, announces=entry.announces)

    early, before = _cut(BEFORE_AUTODIFF, left_out)
    late, after = _cut(AFTER_LOWERING, left_out)
    first, rest = [*map(before_autodiff, early)], [*map(after_lowering, late)]
    last: list[Pass] = [*map(before_autodiff, before), *map(after_lowering, after)]
    for one in (*first, *rest, *last):
        one.compilation = compilation
    for one in (*first, *rest, *users, *last):
        one.observe = observe
    first[1].remarks = True  # the first that every model has
    around = 1 + max(i for i, one in enumerate(first) if one.over != "computation")
    every = [FirstStage(compilation, first[:around]), *first[around:], *rest, *users, *last, *others]
    compilation.again = every[every.index(next(one for one in rest if one.name == "accumulate")) :]
    return every


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
