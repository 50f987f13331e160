"""``fsdp(model, memory=...)``: the fastest step that fits, chosen when a call is compiled.

The trace of the call is recorded once. It is compiled as the options say, up to where collectives are placed, and if
that fits, nothing else is tried. Otherwise it is compiled again with the loss in chunks and with each thing that blocks
may recompute, and the steps between these are composed and predicted, as for :func:`shardtrace.plan`. The fastest one
that fits is compiled to the end, and its memory is proven from the traces that will run.

Note [All ranks alike]. The choice is a function of the trace, the options and the cost model, which are equal on all
ranks, and of the rank with the most parameters if ranks own whole ones. Ranks whose batches have other shapes may
choose otherwise; then the comparison of their collectives says so.

Note [Same numbers]. Recomputed blocks, kept parameters and prefetches change no result. Batch norms are recomputed by
other kernels, so that a block with one is left alone. A loss in chunks rounds otherwise, and is chosen only where
``CompilePolicy(chunk_loss="auto")`` allows it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from passes.analysis.calls import block_of, called_module, way_of
from passes.analysis.liveness import step_liveness
from passes.analysis.recognise import bucket_of, is_deletion, nbytes
from passes.chunk_loss import CHUNKS, Chunks, chunk_loss
from passes.pipeline import Compilation, Facts
from passes.plan import BucketPlan, Placement, ShardedParameter, TracedParameters
from passes.plan.cost import hardware
from passes.save import block_around
from shardtrace.inspector.step_data import size
from shardtrace.model.state import ShardedState
from shardtrace.options.policies import MemoryBudget
from shardtrace.options.strategy import RECOMPUTED, repeated_blocks
from shardtrace.planner.compose import Compiled, ComposedStep, compiled_step, placed
from shardtrace.planner.estimate import (
    NO_OPTIMIZER,
    Estimate,
    OptimizerCost,
    Setting,
    Task,
    estimate,
    memory_reserved,
    optimizer_cost,
)
from shardtrace.planner.search import (
    NOT_WORTH_IT,
    NOTHING,
    Candidate,
    Family,
    Point,
    explore_near,
    fastest,
    on_host,
    prefetched,
    recomputing,
)

import torch.distributed as dist
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.trace import TraceCtx, TraceTag


class MemoryBudgetError(RuntimeError):
    """No step fits into the memory that ``fsdp`` was given. Raised before anything runs."""


KERNELS = 0.01  # of tensors' bytes: what kernels on a CPU allocate for themselves
TOLERANCE = 0.01  # of a budget, between what was chosen and what was compiled


class Choice(NamedTuple):
    """How a call is compiled: what blocks recompute or keep in host memory, the chunks of its loss, the names of the
    parameters that stay gathered until backward (None: as their plans say), and how many buckets are gathered ahead of
    use (likewise)."""

    recomputed: Mapping[str, str]
    chunks: Chunks
    kept: frozenset[str] | None = None
    prefetch: int | None = None


@dataclass
class Contract:
    """The budget of the models that one call computes. The passes ask it what to do, and whether it is kept."""

    compilation: Compilation
    facts: Facts
    states: list[ShardedState]
    inputs: list[TensorProxy] = field(default_factory=list)  # of the computation: the batch and buffers
    forward: TraceCtx | None = None  # the final one, for the backward that follows

    # ---- what the passes call ----

    def choose(self, computation: TraceCtx) -> Mapping[str, str]:
        """Chooses for a computation as it was recorded. Raises MemoryBudgetError if nothing fits."""
        proxies = (a for a in computation.args if isinstance(a, TensorProxy))
        self.inputs = [a for a in proxies if self.facts.parameters.get(a) is None]
        asked = Choice({}, self.facts.chunks, frozenset() if self.may_keep else None)
        first = self.rehearse(computation, asked)
        if isinstance(first, TraceCtx):
            choice = self._choose_forward(computation, asked, first)
        else:
            choice = Steps(self, computation, asked, first).choose()
        self.facts.chunks = choice.chunks
        self.facts.parameters.by_history |= self.parameters(choice).by_history
        return choice.recomputed

    def check(self, trace: TraceCtx) -> None:
        """Raises MemoryBudgetError if the step that will run does not fit."""
        if TraceTag.AUGMENTED_FORWARD in trace.tags:
            self.forward = trace
            return
        step = ComposedStep(self.forward, trace) if self.forward is not None else None
        peak = self.peak_of(trace) if step is None else estimate(step, self.setting).peak
        if peak > (1 + TOLERANCE) * self.budget:
            raise MemoryBudgetError(
                f"the step of {self.state.model_name} that was chosen for {self.given} needs {size(peak)}: "
                f'pass memory="{2 * self.budget - peak:.0f}B", and please report it'
            )

    # ---- what is given ----

    @cached_property
    def state(self) -> ShardedState:
        """Of the model with the smallest budget."""
        return min((s for s in self.states if s.options.memory is not None), key=lambda s: _budget(s).bytes)

    @property
    def budget(self) -> float:
        return _budget(self.state).bytes

    @property
    def given(self) -> str:
        """The budget in words."""
        found = _budget(self.state).size
        return found.strip() if isinstance(found, str) else size(found)

    @cached_property
    def pinned(self) -> int | None:
        """The prefetch that is not to be changed."""
        return next((n for s in self.states if (n := s.options.compile.prefetch) is not None), None)

    @cached_property
    def plans(self) -> list[BucketPlan]:
        found = (parameter.plan for _, parameter in self.facts.parameters.by_history.values())
        return list(dict.fromkeys(found))

    @cached_property
    def may_keep(self) -> bool:
        """Whether the buckets that stay gathered until backward may be chosen one by one."""
        return all(
            p.placement is Placement.SHARD and p.secondary is None and p.pieces == 1 and isinstance(p.bucketing, str)
            for p in self.plans
        )

    @cached_property
    def setting(self) -> Setting:
        """Its hardware has the memory of the budget."""
        device = next(iter(self.state.entries)).device.type if self.state.entries else "cpu"
        optimizer = _budget(self.state).optimizer
        cost = optimizer_cost(optimizer, device) if optimizer is not None else NO_OPTIMIZER
        found = replace(hardware("cpu" if device == "cpu" else "cuda"), memory=self.budget)
        found = replace(found, allocator=max(found.allocator, KERNELS))
        setting = Setting(self.state.cost, found, cost, losses=True)
        traced, others = {(p.plan.runtime, p.index) for _, p in self.facts.parameters.by_history.values()}, 0.0
        for state in self.states:
            unused = [
                e for i, e in enumerate(state.entries) if (state.runtime, i) not in traced and e.home.host is None
            ]
            others += sum(self.kept_for(e.rows.nbytes, trains=e.shard.requires_grad, cost=cost) for e in unused)
            others += _of_largest_owner(state, partial(self.kept_for, gradients=True, cost=cost))
            others += sum(b.nbytes for b in {*state.model.buffers()} if not b.is_meta)
        used = [a for a in self.inputs if ProxyTag.STATIC_MEMORY_LOCATION in a.tags]
        return setting._replace(others=int(max(others - nbytes(used), 0)))

    def kept_for(self, values: int, *, trains: bool, cost: OptimizerCost, gradients: bool = False) -> float:
        """The bytes that live on for so many bytes of parameters."""
        return values * (1 + trains * (cost.state / 4 + gradients))

    # ---- compiling ----

    def rehearse(self, computation: TraceCtx, choice: Choice) -> Compiled | TraceCtx:
        """A step before its collectives are placed; a forward, if there is nothing to differentiate."""
        facts = replace(self.facts, chunks=choice.chunks, parameters=self.parameters(choice))
        assert self.compilation.rehearse is not None
        traces = self.compilation.rehearse(computation, facts, choice.recomputed)
        return compiled_step(*traces) if len(traces) > 1 else traces[0]

    def parameters(self, choice: Choice) -> TracedParameters:
        """The traced parameters, with the plans of a choice."""
        plans: dict[tuple[BucketPlan, bool | None], BucketPlan] = {}
        found: dict[ShardedParameter, ShardedParameter] = {}
        prefetch = choice.prefetch if self.pinned is None else self.pinned
        for _, p in self.facts.parameters.by_history.values():
            kept = None if choice.kept is None else p.name in choice.kept
            if (p.plan, kept) not in plans:
                changes: dict[str, Any] = {} if prefetch is None else {"prefetch": prefetch}
                changes |= {} if kept is None else {"regather": not kept}
                plans[p.plan, kept] = replace(p.plan, **changes)
            found[p] = replace(p, plan=plans[p.plan, kept])
        by_history = {i: (history, found[p]) for i, (history, p) in self.facts.parameters.by_history.items()}
        return TracedParameters(by_history, self.facts.parameters.steps)

    # ---- steps without a backward ----

    def peak_of(self, forward: TraceCtx) -> int:
        """The bytes of an executed forward without a backward."""
        setting, trained = self.setting, (e for s in self.states for e in s.entries if e.shard.requires_grad)
        state = sum(e.rows.nbytes for e in trained if e.home.host is None) * setting.optimizer.state / 4
        tensors = step_liveness(forward, None, persistent=int(state) + setting.others).peak
        return tensors + sum(memory_reserved([forward], tensors, setting.hardware).values())

    def _choose_forward(self, computation: TraceCtx, asked: Choice, first: TraceCtx) -> Choice:
        """The first that fits of: what the options say, fewer buckets ahead of use, and a loss in chunks."""
        asked = asked._replace(kept=None)
        fewer = [asked._replace(prefetch=n) for n in (1, 0) if self.pinned is None]
        more = asked.chunks == "auto" and makes_chunks(computation, "auto")
        chunked = [c._replace(chunks=CHUNKS) for c in (asked, *fewer) if more]
        peaks = []
        for choice in (asked, *fewer, *chunked):
            trace = first if choice is asked else self.rehearse(computation, choice)
            assert isinstance(trace, TraceCtx)
            peaks.append(self.peak_of(placed(trace, [b for b in trace.bound_symbols if not is_deletion(b)])))
            if peaks[-1] <= self.budget:
                if choice is not asked:
                    self.say(f"peak {size(peaks[-1])} without gradients, {_words(choice)}")
                return choice
        raise self.error(computation, f"a forward without gradients needs {size(min(peaks))} or more", min(peaks))

    # ---- in words ----

    def say(self, line: str) -> None:
        """Says what was chosen: in the trace, and on the first rank."""
        self.facts.remark = "; ".join(filter(None, (self.facts.remark, f"memory: {line}")))
        group = self.state.group
        if group.rank() == 0 and dist.get_backend(group) != "fake":
            print(f"shardtrace: {self.state.model_name} fits into {self.given}: {line}", file=sys.stderr)

    def error(self, computation: TraceCtx, least: str, peak: int, batch: float | None = None) -> MemoryBudgetError:
        """``batch``: bytes at the peak that are proportional to the batch, if they are known."""
        short = peak - self.budget
        needed = [*self._remedies(short / (1 + self.setting.hardware.allocator), batch)]
        others = [*self._savers(computation)]
        unit, name = next((10.0**n, name) for n, name in ((9, "GB"), (6, "MB"), (3, "KB"), (0, "B")) if peak >= 10.0**n)
        fits = f'memory="{math.ceil(100 * peak / unit) / 100:g}{name}" would fit'
        return MemoryBudgetError(
            f"no step of {self.state.model_name} with these inputs fits into {self.given}: {least}, {size(short)} more "
            f"({fits})"
            + (f". Smallest changes that would do: {', or '.join(needed)}" if needed else "")
            + (f". Other options that save memory: {', '.join(others)}" if others else "")
        )

    def _remedies(self, short: float, batch: float | None) -> Iterator[str]:
        """What saves so many bytes."""
        ranks, cost = self.state.group.size(), self.setting.optimizer
        sharded = replicated = 0.0
        for e in (e for s in self.states for e in s.entries if e.home.host is None):
            mine = self.kept_for(e.rows.nbytes, trains=e.shard.requires_grad, cost=cost, gradients=True)
            replicated += mine if e.home.placement is Placement.REPLICATE and ranks > 1 else 0
            sharded += mine if e.home.placement is Placement.SHARD or ranks == 1 else 0
        batches = (a.shape[0] for a in self.inputs if a.ndim and ProxyTag.STATIC_MEMORY_LOCATION not in a.tags)
        rows = next(batches, 1)
        if batch is not None and batch > short and (fewer := int(rows * (1 - short / batch))) >= 1:
            yield f"a batch of about {fewer} instead of {rows}"
        if ranks > 1 and replicated * (1 - 1 / ranks) > short:
            yield 'sharding_strategy="zero3" for parameters that are whole on every rank now'
        if sharded > short:
            yield f"about {max(ranks + 1, math.ceil(ranks * sharded / (sharded - short)))} ranks instead of {ranks}"

    def _savers(self, computation: TraceCtx) -> Iterator[str]:
        if any("cross_entropy" in b.sym.name for b in computation.bound_symbols):
            if self.state.options.compile.returns == "all" and not makes_chunks(computation, None):
                yield 'CompilePolicy(returns="loss")'
            elif self.facts.chunks is None:
                yield 'CompilePolicy(chunk_loss="auto")'
        if self.setting.hardware.name != "cpu" and self.state.options.offload is None:
            yield "offload_policy=CPUOffloadPolicy()"
        if self.state.options.precision is None:
            yield 'mp_policy="bf16"'


def _budget(state: ShardedState) -> MemoryBudget:
    assert state.options.memory is not None
    return state.options.memory


def _of_largest_owner(state: ShardedState, kept_for: Callable[..., float]) -> float:
    """The bytes that the rank has which owns most, beyond those of this rank."""
    owned: dict[int, float] = {}
    for e in (e for e in state.entries if e.home.placement is Placement.OWNER and e.home.host is None):
        values = math.prod(e.full_shape) * e.dtype.itemsize
        owned[e.home.owner] = owned.get(e.home.owner, 0.0) + kept_for(values, trains=e.shard.requires_grad)
    return max(owned.values(), default=0.0) - owned.get(state.group.rank(), 0.0)


def makes_chunks(computation: TraceCtx, chunks: Chunks) -> bool:
    """Whether a loss can be computed in more chunks than ``chunks`` makes of it."""
    found = (chunk_loss(computation, chunks=n) for n in (chunks, CHUNKS))
    return len({len(trace.bound_symbols) for trace in found}) > 1


def _words(choice: Choice) -> str:
    """What a choice changes."""
    groups: dict[str, list[str]] = {}
    for name, what in choice.recomputed.items():
        groups.setdefault(what, []).append(name)
    said = []
    for what, names in groups.items():
        named = ", ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]} ({len(names)})"
        recomputed, away = way_of(what)
        does = [f"recomputing {'all' if recomputed == 'full' else 'what is cheap'} of"] if recomputed else []
        does += ["keeping in host memory what is saved of"] if away else []
        said.append(f"{' and '.join(does)} {named}")
    if isinstance(choice.chunks, int):
        said.append(f"the loss in {choice.chunks} chunks")
    if choice.prefetch is not None:
        said.append(f"prefetch {choice.prefetch}")
    return ", ".join(said)


# ---- steps with a backward ----


class Steps:
    """The steps of one call. ``first`` is the one that the options ask for."""

    def __init__(self, contract: Contract, computation: TraceCtx, asked: Choice, first: Compiled) -> None:
        self.contract, self.computation, self.asked = contract, computation, asked
        self.budget = contract.budget
        fixed = {} if contract.pinned is None else {"prefetch": contract.pinned}
        self.task = Task(contract.state.model, None, contract.state.group.size(), None, contract.setting, fixed, {}, {})
        self.families: dict[str, tuple[Family, Choice]] = {}
        self.plain = self._add(asked, first, {NOTHING: first.calls})

    def choose(self) -> Choice:
        self._small_steps(self.plain)
        asked = self._points[0]
        best = fastest(self._points, self.budget)
        if best is None or best.estimate.seconds > (1 + NOT_WORTH_IT) * min(p.estimate.seconds for p in self._points):
            self._large_steps()
            best = fastest(self._points, self.budget)
            exact = [p for family, c in self.families.values() if c.chunks == self.asked.chunks for p in family.points]
            same = fastest(exact, self.budget)
            if (
                best is not None
                and same is not None
                and (1 - NOT_WORTH_IT) * same.estimate.seconds < best.estimate.seconds
            ):
                best = same  # rather than a loss in chunks, which rounds otherwise
        if best is None:
            raise self._error()
        family, base = self.families[best.candidate.family]
        choice = self._choice(family, base, best.candidate)
        self._say(choice, family, best.estimate, asked.estimate)
        return choice

    # ---- the steps ----

    @property
    def _points(self) -> list[Point]:
        return [point for family, _ in self.families.values() for point in family.points]

    def _add(self, choice: Choice, base: Compiled, variants: Mapping[str, Any]) -> Family:
        note = f" {len(self.families)}" if self.families else ""
        keeps = None if self.contract.may_keep else False
        family = Family(self.task, "given", base, variants, keeps, {}, note)
        self.families[family.name] = family, choice
        return family

    def _small_steps(self, family: Family) -> None:
        """Those that recompute nothing more: with parameters gathered again or kept, as far ahead as is allowed."""
        asked = {p.name for p in self._parameters if not p.plan.regather}
        labels = frozenset(label for label, b in family.buckets.items() if b.members[0].parameter.name in asked)
        own = max((plan.prefetch for plan in self.contract.plans), default=1)
        asking = family.point(Candidate(family.name, (), family.allowed_kept(labels), own)).estimate
        if asking.peak <= self.budget and asking.exposed < NOT_WORTH_IT * asking.seconds:
            return
        for kept in dict.fromkeys((labels, frozenset(), frozenset(family.buckets))):
            prefetched(family, Candidate(family.name, (), family.allowed_kept(kept)), self.budget)

    def _large_steps(self) -> None:
        """Those whose blocks recompute something, and whose loss is in chunks."""
        variants = {NOTHING: self.plain.base.calls}
        if self.plain.base.calls:
            variants |= recomputing(self.plain.base, self._tried)
        more = self.asked.chunks == "auto" and makes_chunks(self.computation, "auto")
        chunks = [self.asked.chunks, *([CHUNKS] if more else [])]
        inline = [name for name, may in self._blocks.items() if may and name not in self._called]
        for number in chunks:
            for what in (None, *reversed(RECOMPUTED)) if inline else (None,):
                marks = dict.fromkeys(inline, what) if what is not None else {}
                self._explore(self.asked._replace(chunks=number, recomputed=marks), variants)
            if self.contract.setting.hardware.name != "cpu" and len(variants) > 1:
                self._explore(self.asked._replace(chunks=number), {**variants, **on_host(variants)})
        best = fastest(self._points, self.budget)
        if best is not None and self.families[best.candidate.family][1].recomputed:
            self._fewer(self.families[best.candidate.family][1], variants)
        if best is None and self.contract.pinned is None:
            for point in sorted(self._points, key=lambda p: p.estimate.peak)[:3]:
                self.families[point.candidate.family][0].point(point.candidate._replace(prefetch=0))

    def _fewer(self, choice: Choice, variants: Mapping[str, Any]) -> None:
        """Fewer of the blocks that are no functions, by halving: the first ones, whose backward comes last."""
        marks = list(choice.recomputed.items())
        low, high = 0, len(marks)
        while high - low > 1:
            family = self._explore(choice._replace(recomputed=dict(marks[: (low + high) // 2])), variants)
            fits = fastest(family.points, self.budget) is not None
            low, high = (low, (low + high) // 2) if fits else ((low + high) // 2, high)

    def _explore(self, choice: Choice, variants: Mapping[str, Any]) -> Family:
        known = (family.base for family, made in self.families.values() if made == choice)
        base = next(known, None) or self._compiled(choice)
        shared = {what: {c: pairs[c] for c in base.calls if c in pairs} for what, pairs in variants.items()}
        family = self._add(choice, base, shared)
        explore_near(family, self.budget)
        return family

    def _tried(self, *, activation_checkpointing: Any) -> Compiled:
        what, names = activation_checkpointing, (name for name, _ in self.plain.base.calls)
        marks = what if isinstance(what, Mapping) else dict.fromkeys(names, what)
        return self._compiled(self.asked._replace(recomputed=self._allowed(marks)))

    def _compiled(self, choice: Choice) -> Compiled:
        found = self.contract.rehearse(self.computation, choice)
        assert isinstance(found, Compiled)
        return found

    def _allowed(self, marks: Mapping[str, str]) -> dict[str, str]:
        return {name: what for name, what in marks.items() if self._blocks.get(name)}

    @cached_property
    def _called(self) -> set[str]:
        """The blocks that are functions."""
        return {called_module(b) or "" for b in self.computation.bound_symbols}

    @cached_property
    def _blocks(self) -> dict[str, bool]:
        """The blocks of the computation by name, and whether they may recompute: no batch norm is in them. None if the
        script says what blocks recompute."""
        if any(s.options.checkpointing is not None for s in self.contract.states):
            return {}
        names, found = {n for s in self.contract.states for n in repeated_blocks(s.model)}, dict[str, bool]()
        for bsym in self.computation.bound_symbols:
            if (name := block_around(bsym, names)) is not None:
                block = block_of(bsym)
                inside = block.trace.bound_symbols if block is not None else [bsym]
                found[name] = found.get(name, True) and not any("batch_norm" in b.sym.name for b in inside)
        return found

    @property
    def _parameters(self) -> list[ShardedParameter]:
        return [p for _, p in self.contract.facts.parameters.by_history.values()]

    # ---- the result ----

    def _choice(self, family: Family, base: Choice, candidate: Candidate) -> Choice:
        recomputed = {**base.recomputed, **self._allowed(dict(candidate.recomputed))}
        kept: frozenset[str] | None = None
        if self.contract.may_keep:
            buckets = (b for b in map(bucket_of, family.issues) if b.label in candidate.kept)  # a label may have two
            kept = frozenset(m.parameter.name for b in buckets for m in b.members)
            if kept and candidate.kept.issuperset(family.buckets):
                kept = frozenset(p.name for p in self._parameters)
        return Choice(recomputed, base.chunks, kept, candidate.prefetch)

    def _say(self, choice: Choice, family: Family, found: Estimate, asked: Estimate) -> None:
        changed = choice._replace(
            chunks=None if choice.chunks == self.asked.chunks else choice.chunks,
            prefetch=choice.prefetch if family.buckets else None,
        )
        nothing = [] if choice.recomputed else ["recomputing nothing"]
        said = [f"peak {size(found.peak)}, predicted", *nothing, *filter(None, [_words(changed)])]
        if family.buckets and choice.kept is not None:
            kept = sum(b.members[0].parameter.name in choice.kept for b in family.buckets.values())
            said.append(f"{kept} of {len(family.buckets)} buckets stay gathered until backward")
        if asked.peak > self.budget:
            slower = found.seconds / asked.seconds - 1
            time, less = f"{abs(slower):.1%} {'more' if slower > 0 else 'less'} time", size(asked.peak - found.peak)
            said.append(f"a step takes {time} and {less} less memory than without a budget")
        self.contract.say(", ".join(said))

    def _error(self) -> MemoryBudgetError:
        least = min(self._points, key=lambda p: p.estimate.peak)
        family, base = self.families[least.candidate.family]
        choice = self._choice(family, base, least.candidate)
        words = _words(choice if family.buckets else choice._replace(prefetch=None))
        memory = least.estimate.memory
        batch = sum(memory.get(kind, 0) for kind in ("activations", "saved"))
        said = f"the least is {size(least.estimate.peak)}{f', {words}' if words else ''}"
        return self.contract.error(self.computation, said, least.estimate.peak, batch)
