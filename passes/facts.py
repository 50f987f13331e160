"""What the passes of a compilation know besides the trace: what tracing found, and what passes hand to later ones.

A pass names the facts that it uses as keyword-only parameters, and :class:`Compilation` binds them. A pass that gives
something to a later one fills a fact; both docstrings say so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import Context as Variables
from dataclasses import dataclass, field
from typing import Any

from passes.epilogue import Rebuild, Setter
from passes.guards import Guard
from passes.plan import TracedParameters
from passes.plan.step import Unused
from passes.proof.prove import Proof, Record
from passes.save import Kept, Swapped
from passes.split_sequence import Context

from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform

Run = Callable[..., TraceCtx]


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
    choose: Callable[..., Any] | None = None  # runs a backward, by the treatment of gradients when it begins
    known: dict[int, Any] = field(default_factory=dict)  # for tracing itself: what it has met, by id
    changes: list[Any] = field(default_factory=list)  # likewise, what forwards set
    swapped: dict[str, Swapped] = field(default_factory=dict)  # forward's save_shards fills it for backward's
    context: Context | None = None  # the sequence that ranks hold in parts
    proving: list[str] = field(default_factory=list)  # the names of the models whose steps are to be proven
    record: Record | None = None  # the computation before the first and after the last pass before autodiff
    variables: Variables | None = None  # Thunder's variables of the compilation
    proofs: list[Proof] = field(default_factory=list)  # the results
    forwards: list[TraceCtx] = field(default_factory=list)  # the final forward, for the backward that follows
    kept: list[Kept] = field(default_factory=list)  # forward's keep_secondary fills it for backward's

    @property
    def remarks(self) -> str:
        """About blocks and modules, and what is computed on whole sequences."""
        return "; ".join(filter(None, (self.remark, *(self.context.remarks if self.context is not None else ()))))


class Compilation:
    """Where the passes of a jitted function find the facts of the call that is being compiled."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.finished: list[Facts] = []  # of the compiled steps that are kept
        self.again: Sequence[Transform] = ()  # makes another backward of ``lowered``
        self.earlier: dict[str, Any] = {}  # for tracing itself: what it has met in earlier compilations
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

    def bound(self, run: Run, **options: Any) -> Callable[[TraceCtx], TraceCtx]:
        """A pass with the facts that it uses, and those of the ``options`` that it has."""
        names = inspect.signature(run).parameters.keys()
        facts = names & Facts.__dataclass_fields__.keys()
        given = {name: options[name] for name in names & options.keys()}

        def bound(trace: TraceCtx) -> TraceCtx:
            return run(trace, **given, **{name: getattr(self.facts, name) for name in facts})

        return bound
