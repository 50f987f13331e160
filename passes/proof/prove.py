"""The proof that a compiled step computes the unsharded program.

The final forward and backward are evaluated with the laws that erase communication (:mod:`passes.proof.laws`), the
unsharded program (:mod:`passes.proof.reference`) without them, both to numbers that are equal only for equal values
(:mod:`passes.proof.program`). Every output, every gradient, every write into memory that outlives the step must have
the same number. So must what the prologue fetches and where the epilogue puts it (:mod:`passes.proof.callable`), and
Python must run the lines that were evaluated (:mod:`passes.proof.callable`).

No line may write into a value that another line reads later, backward included. A value that is read by the name by
which it was written has the number of what was written; :func:`hazards` finds the reads by other names: views, and what
forward saved.

What is trusted: the record of the model's calls, Thunder's autodiff and executors, the gradients of kernels, the plan,
and that each law is what its collective does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from passes.analysis.calls import block_function, block_functions, differentiated
from passes.analysis.recognise import is_backward, is_deletion, is_return, is_unpack, names, properties, updated_by
from passes.borders import sent
from passes.compat.jit import compile_data_and_stats
from passes.plan import Gradients, Level, ShardedParameter, TracedParameters
from passes.plan.runtime import Step
from passes.proof.callable import Border, other_borders, other_text
from passes.proof.certificates import uncertified, wrong_gradients, wrong_losses
from passes.proof.laws import LAWS, expected_gradient, mean, part, unless_absent
from passes.proof.parts import unproven
from passes.proof.program import (
    WRITTEN,
    Arguments,
    Evaluation,
    Numbers,
    UnprovenError,
    Values,
    has_fusions,
    shape_text,
    signature,
    text_of,
    type_of,
)
from passes.proof.reference import (
    REFERENCE_LAWS,
    Reference,
    cotangents,
    first_values,
    leaves_lines,
    lowered_line,
    reference,
    results_of,
)
from passes.sequence import Context

from thunder.core.dtypes import is_inexact_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag

# ---- memory ----


SAVED = "saved_for_backward"  # as Thunder names this argument of backward


def hazards(forward: TraceCtx, backward: TraceCtx | None) -> Iterator[str]:
    """The reads of values that a line has written before, in words."""
    if not any(_writes(trace) for trace in (forward, backward) if trace is not None):
        return
    memory = Memory()
    yield from memory.read(forward.bound_symbols)
    if backward is None:
        return
    memory.rename({new.name: old.name for old, new in handed_over(forward, backward)})
    yield from memory.read(backward.bound_symbols)


def handed_over(forward: TraceCtx, backward: TraceCtx) -> Iterator[tuple[Proxy, Proxy]]:
    """What forward saves, with the name that backward gives it. What backward does not name is left out."""
    last = forward.bound_symbols[-1]
    unpacks = [b for b in backward.bound_symbols if b.sym.id == PrimIDs.UNPACK_SEQUENCE]
    named = {b.args[0].name: b.output for b in unpacks}
    groups = last.args[1] if len(last.args) > 1 else ()
    for saved, collection in zip(groups, named.get(SAVED, ()), strict=False):
        taken = named.get(collection.name, ()) if isinstance(collection, Proxy) else ()
        for old, new in zip(saved, taken, strict=False):
            if isinstance(old, Proxy) and isinstance(new, Proxy):
                yield old, new


def _writes(trace: TraceCtx) -> bool:
    parts = (called.trace for called in block_functions(trace))
    return any(_written(line) for t in (trace, *parts) for line in t.bound_symbols)


class Memory:
    """The memory behind names, and which of it has been written."""

    def __init__(self) -> None:
        self._behind: dict[str, str] = {}
        self._written: dict[str, set[str]] = {}  # for each memory, the names that show its content now

    def rename(self, old: dict[str, str]) -> None:
        """New names of values."""
        moved = {new: self._behind.get(name, name) for new, name in old.items()}
        for new, name in old.items():
            if (fresh := self._written.get(moved[new])) is not None and name in fresh:
                fresh.add(new)
        self._behind |= moved

    def read(self, lines: list[BoundSymbol]) -> Iterator[str]:
        """The hazards of further lines."""
        for line in lines:
            if is_unpack(line) or is_deletion(line):
                continue
            written = _written(line)
            called = block_function(line)
            if called is not None:
                written |= self._written_inside(line)
                yield from Memory().read(called.trace.bound_symbols)
            used = names(line.args[1]) if is_return(line) and len(line.args) > 1 else names(line.flat_proxy_args)
            for name in sorted(used - written) if not is_return(line) else ():
                fresh = self._written.get(self._behind.get(name, name))
                if fresh is not None and name not in fresh and line.sym.id != PrimIDs.UPDATE_ALIASES:
                    yield f"{name} is read after its memory was written: {text_of(line)}"
            self._apply(line, written)

    def _written_inside(self, line: BoundSymbol) -> set[str]:
        called = block_function(line)
        assert called is not None
        inside = {name for b in called.trace.bound_symbols for name in _written(b)}
        return {a.name for a, p in zip(line.args, called.trace.args, strict=True) if p.name in inside}

    def _apply(self, line: BoundSymbol, written: set[str]) -> None:
        results = names(line.flat_proxy_outs) if line.sym.id not in WRITTEN else set[str]()
        sources = [a.name for a in line.flat_proxy_args]
        for name in written:
            memory = self._behind.get(name, name)
            self._written[memory] = results | {name}
            self._behind |= dict.fromkeys(results, memory)
        if line.sym.id == PrimIDs.UPDATE_ALIASES:
            for a, o in zip(line.args[0], line.output, strict=True):
                memory = self._behind[o.name] = self._behind.get(a.name, a.name)
                if memory in self._written:
                    self._written[memory].add(o.name)
        elif sources and properties(line.sym).is_alias:
            memory = self._behind.get(sources[0], sources[0])
            self._behind |= dict.fromkeys(results, memory)
            if sources[0] in self._written.get(memory, ()):
                self._written[memory] |= results


def _written(line: BoundSymbol) -> set[str]:
    """The names of values that a line writes into."""
    if line.sym.id == PrimIDs.UPDATE_ALIASES:
        return set()
    known = (line.args[i] for i in WRITTEN.get(line.sym.id, ()))
    return {*updated_by(line), *(a.name for a in known if a is not None)}


# ---- the proof ----


class Record(NamedTuple):
    """A computation at its first ``stages`` (as it was traced, as ranks split its parameters, then its sequences), as
    ``first`` all later passes must keep it, and as the ``last`` pass gives it to autodiff."""

    stages: tuple[TraceCtx, ...]
    first: TraceCtx
    last: TraceCtx

    @property
    def traced(self) -> TraceCtx:
        return self.stages[0]

    def after(self, last: TraceCtx, *, begins: bool) -> Record:
        """The record after one more pass. ``begins``: whether all later passes must keep what it gives."""
        return Record((*self.stages, last), last, last) if begins else self._replace(last=last)


@dataclass(frozen=True)
class Difference:
    """Values that are not those of the unsharded program, for one reason.

    ``what`` has their names, such as "output 0" or "the gradient of w". ``found`` and ``expected`` are the smallest
    expressions that differ, ``place`` is the line of the model's source, if it is known.
    """

    what: tuple[str, ...]
    found: str
    expected: str
    place: str = ""

    def __str__(self) -> str:
        others = len(self.what) - 1
        what = self.what[0] + (f" and {others} other{'s' * (others > 1)}" if others else "")
        where = f" ({self.place})" if self.place else ""
        return f"{what}{where}:\n    the step computes {self.found}\n    the unsharded program computes {self.expected}"


@dataclass(frozen=True)
class Proof:
    """The result for one compiled step.

    ``verdict`` is "proven", "rounding" (equal, except for what travels with less precision: ``rounding`` says what) or
    "unproven" (``differences`` says why). ``values`` counts what was compared, ``lines`` the step's lines.
    """

    verdict: Literal["proven", "rounding", "unproven"]
    values: int = 0
    lines: int = 0
    rounding: tuple[str, ...] = ()
    differences: tuple[Difference | str, ...] = ()

    def __str__(self) -> str:
        if self.verdict == "unproven":
            return "\n".join(["unproven", *(f"  {d}" for d in self.differences)])
        one = self.values == 1
        results = "1 result" if one else f"{self.values} results"
        head = f"{results} of {self.lines} lines {'is that' if one else 'are those'} of the unsharded program"
        if self.verdict == "proven":
            return f"proven: {head}"
        return "\n".join([f"proven up to rounding: {head}", *(f"  {r}" for r in self.rounding)])


@dataclass
class Claim:
    """What a step must compute: the numbers of the unsharded program's outputs, gradients and writes."""

    reference: Reference
    parameters: TracedParameters
    numbers: Numbers
    opened: bool
    outputs: tuple[Any, ...]
    gradients: dict[str, int]  # by the name of the input
    writes: list[tuple[Hashable, ...]]
    cotangents: tuple[Any, ...]


def claim(record: Record, parameters: TracedParameters, forward: TraceCtx, backward: TraceCtx | None) -> Claim:
    """Makes and evaluates the unsharded program of a record. Runs inside Thunder's compilation.

    Raises UnprovenError if a line of it has no law.
    """
    program = reference(record.first, parameters, record.last, differentiated=needs_backward(record.first))
    numbers = Numbers()
    opened = has_fusions(*(t for t in (forward, backward) if t is not None))
    lower = lowered_line if leaves_lines() else None
    evaluation = Evaluation(numbers, REFERENCE_LAWS, opened=opened, trusted=True, lower=lower)
    values: Values = {**first_values(numbers, program.inputs)}
    results = results_of(program.trace)
    outs = results["fw_flat_out"] if program.joint else _flat(results["output"])
    given = tuple(numbers.of("cotangent", i) for i in range(len(outs)))
    numbers.outputs = frozenset(range(len(outs)))
    values["cotangents of"] = cotangents(outs, given)
    evaluation.run([s for s in evaluation.program(program.trace).steps if not is_deletion(s.line)], values)
    gradients: dict[str, int] = {}
    for argument, gradient in zip(results["flat_args"], results["output"] if program.joint else (), strict=False):
        if isinstance(gradient, TensorProxy):
            gradients[argument.name] = values[gradient.name]
    found = evaluation.value(tuple(outs), values)
    return Claim(program, parameters, numbers, opened, found, gradients, evaluation.effects, given)


def needs_backward(record: TraceCtx) -> bool:
    """Whether Thunder differentiates a computation. Nothing has a gradient where they are off."""
    return any(isinstance(p, TensorProxy) and p.requires_grad for p in record.args)


def has_backward(forward: TraceCtx, record: Record | None) -> bool:
    """Whether Thunder has made a backward of a computation. It marks the forward even if no gradient reaches a result,
    as under ``torch.no_grad``."""
    if TraceTag.AUGMENTED_FORWARD not in forward.tags:
        return False
    if record is None:
        return True
    inputs = {p.name for p in record.last.args if isinstance(p, TensorProxy) and p.requires_grad}
    reached = differentiated(record.last) if compile_data_and_stats()[0].is_grad_enabled else inputs
    returned = _flat(record.last.bound_symbols[-1].args[0]["output"])
    return any(isinstance(o, TensorProxy) and o.name in reached and is_inexact_dtype(o.dtype) for o in returned)


def _flat(structure: Any) -> tuple[Any, ...]:
    return tuple(tree_flatten(structure)[0])


def check(claim: Claim, forward: TraceCtx, backward: TraceCtx | None) -> Proof:
    """Whether the lowered traces of a step compute what a claim says."""
    differences: list[Difference | str] = []
    pairs: list[tuple[str, Any, Any]] = []  # what is compared
    evaluation = Evaluation(claim.numbers, LAWS, opened=claim.opened)
    lines = len(forward.bound_symbols) + (len(backward.bound_symbols) if backward is not None else 0)
    try:
        outputs, saved = _run_forward(claim, evaluation, forward)
        pairs += [(f"output {i}", o, e) for i, (o, e) in _paired(outputs, claim.outputs)]
        if backward is not None:
            differences += _handed_over(forward, backward)
            found = _run_backward(claim, evaluation, backward, saved)
            differences += _types_of_gradients(forward, backward)
            names = [p.name if isinstance(p, Proxy) else None for p in _arguments(forward)]
            pairs += _gradients(claim, dict(zip(names, found, strict=True)))
        elif claim.gradients:
            differences.append(
                f"the step has no backward, the unsharded program gives {len(claim.gradients)} gradients"
            )
        differences += [*_wrong_plans(claim), *_effects(claim, evaluation)]
        differences += hazards(forward, backward)
    except UnprovenError as error:
        differences.append(str(error))
    except Exception as error:  # about odd ends of a trace: no right step raises
        differences.append(f"the step cannot be evaluated ({type(error).__name__}: {error})")
    differences[:0] = _compare(claim, pairs)
    compared = len(claim.outputs) + len(claim.gradients)
    if differences:
        return Proof("unproven", compared, lines, (), tuple(differences))
    return Proof("rounding" if evaluation.rounding else "proven", compared, lines, tuple(evaluation.rounding))


def _paired(found: Sequence[Any], expected: Sequence[Any]) -> Iterator[tuple[int, tuple[Any, Any]]]:
    if len(found) != len(expected):
        raise UnprovenError(f"the step returns {len(found)} outputs, the unsharded program {len(expected)}")
    return enumerate(zip(found, expected, strict=True))


def _compare(claim: Claim, pairs: Iterable[tuple[str, Any, Any]]) -> list[Difference]:
    """The differences of some values, those that are computed first at the front."""
    numbers = claim.numbers
    named: dict[tuple[Any, Any], list[str]] = {}
    for what, found, expected in pairs:
        if found == expected:
            continue
        both = isinstance(found, int) and isinstance(expected, int)
        named.setdefault(numbers.difference(found, expected) if both else (found, expected), []).append(what)
    order = sorted(named, key=lambda pair: max(n if isinstance(n, int) else 0 for n in pair))
    return [Difference(tuple(named[a, b]), _text(claim, a), _text(claim, b), _place(claim, b)) for a, b in order]


def _text(claim: Claim, value: Any) -> str:
    if value is None:
        return "nothing"
    return claim.numbers.text(value) if isinstance(value, int) else str(value)


def _place(claim: Claim, value: Any) -> str:
    return claim.numbers.place(value) if isinstance(value, int) else ""


# ---- the step ----


def _run_forward(claim: Claim, evaluation: Evaluation, forward: TraceCtx) -> tuple[tuple[Any, ...], Any]:
    """The numbers of a forward's outputs, and of what it saves."""
    values: Values = {}
    given, names = first_values(claim.numbers, claim.reference.inputs), signature(forward)
    if len(names) != len(given):
        raise UnprovenError(f"the step has {len(names)} inputs, the unsharded program {len(given)}")
    for name, (parameter, number) in zip(
        names, zip(claim.reference.inputs.values(), given.values(), strict=True), strict=True
    ):
        values[name] = number if parameter is None else part(claim.numbers, parameter, number)
    for p in forward.args:
        if isinstance(p, TensorProxy):
            evaluation.check_type(p, values.get(p.name))
    evaluation.run(evaluation.program(forward).steps, values)
    last = forward.bound_symbols[-1]
    saved = evaluation.value(last.args[1], values) if len(last.args) > 1 else ()
    results = last.args[0]
    output = results["output"] if isinstance(results, dict) else results
    found = evaluation.value(_flat(output), values)
    autograd = results.get("flat_output") if isinstance(results, dict) else None
    if autograd is not None and evaluation.value(_flat(autograd), values) != found:
        raise UnprovenError("autograd gets other outputs, or in another order, than the epilogue (flat_output)")
    return found, saved


def _handed_over(forward: TraceCtx, backward: TraceCtx) -> Iterator[str]:
    """What backward takes for a tensor of another shape or dtype than forward saves."""
    for a, b in handed_over(forward, backward):
        if not isinstance(a, TensorProxy) or not isinstance(b, TensorProxy):
            continue
        if type_of(a) != type_of(b):
            yield f"forward saves {a.name} of shape {tuple(a.shape)}, backward takes {b.name} of {tuple(b.shape)}"


def _wrong_plans(claim: Claim) -> Iterator[str]:
    """Plans that are not of the group's ranks, or that divide gradients by another number than the mesh and the user's
    factor say."""
    parameters = {p.plan: p for p in claim.reference.inputs.values() if p is not None}
    for plan, parameter in parameters.items():
        for one in filter(None, (plan, plan.outer, plan.secondary)):
            group = one.group
            if group is not None and (one.world_size, one.rank) != (found := (group.size(), group.rank())):
                yield f"{parameter.name} is planned for rank {one.rank} of {one.world_size}, its group has {found}"
        divided = plan.divisor * (plan.outer.divisor if plan.outer is not None else 1)
        right = plan.runtime.divisor
        if right is not None and not math.isclose(divided, right):
            yield f"the gradient of {parameter.name} is divided by {divided:g}, by the mesh it is {right:g}"


def _types_of_gradients(forward: TraceCtx, backward: TraceCtx) -> Iterator[str]:
    """The gradients that have another shape or dtype than their input."""
    for given, gradient in zip(_arguments(forward), backward.bound_symbols[-1].args[0], strict=True):
        if isinstance(gradient, TensorProxy) and (one := type_of(gradient)) != (other := type_of(given)):
            yield f"the gradient of {given.name}, which is {shape_text(other)}, is {shape_text(one)}"


def _arguments(forward: TraceCtx) -> Sequence[Any]:
    found: Sequence[Any] = results_of(forward)["flat_args"]
    return found


def _run_backward(claim: Claim, evaluation: Evaluation, backward: TraceCtx, saved: Any) -> tuple[Any, ...]:
    """The numbers of the gradients that a backward returns."""
    values: Values = dict(zip(signature(backward), (saved, claim.cotangents), strict=True))
    evaluation.run(evaluation.program(backward).steps, values)
    found: tuple[Any, ...] = evaluation.value(tuple(backward.bound_symbols[-1].args[0]), values)
    return found


def _gradients(claim: Claim, found: dict[str | None, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What is compared for each input: its name, the gradient that the step returns, the one that it should."""
    keeps = Keeping(claim)
    for name, parameter in claim.reference.inputs.items():
        expected = claim.gradients.get(name)
        actual = found.get(name)
        what = f"the gradient of {parameter.name if parameter is not None else name}"
        if expected is not None:
            origin = claim.numbers.origin(expected)
            if parameter is not None:
                expected = keeps.expected(parameter, expected)
            if expected is not None and not (origin.is_shared and actual == expected):  # it may be there in each step
                expected = unless_absent(claim.numbers, expected, origin.outputs)
        if expected is None and actual is not None and _is_zero(claim, actual):
            continue
        yield what, actual, expected


def _is_zero(claim: Claim, number: int) -> bool:
    """True for zeros, whatever their part or mean."""
    expressions = claim.numbers.expressions
    while expressions[number][0] in ("part", "mean", "unless unused"):
        (number,) = expressions[number][2]
    operation, constants, _ = expressions[number]
    if operation in (PrimIDs.FULL, "torch.full"):
        assert isinstance(constants, Arguments)
        return constants.args[1] in ((int, 0), (float, "0.0"))
    return operation == "torch.zeros"


class Keeping:
    """What a step does with gradients that are kept over steps (no_sync)."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim

    def step_of(self, parameter: ShardedParameter) -> Step | None:
        return self.claim.parameters.steps.get(parameter.plan.runtime)

    def expected(self, parameter: ShardedParameter, gradient: int) -> int | None:
        """The gradient that the step returns; None if it keeps it."""
        step = self.step_of(parameter)
        if step is None or step.gradients in (None, Gradients.REDUCED):
            return expected_gradient(self.claim.numbers, parameter, gradient)
        if step.gradients is Gradients.KEPT and step.keep is not None and self.keeps(step, parameter):
            return None
        adds = step.adds if step.gradients is Gradients.ADDED or step.keep is None else frozenset[Level]()
        return expected_gradient(self.claim.numbers, parameter, gradient, adds)

    def keeps(self, step: Step, parameter: ShardedParameter) -> bool:
        assert step.keep is not None
        chosen = step.keep.parameters is None or parameter.index in step.keep.parameters
        return chosen and (step.keep.level is Level.WHOLE or parameter.plan.outer is not None)

    def effects(self) -> Iterator[tuple[Hashable, ...]]:
        """What the step must keep."""
        numbers = self.claim.numbers
        for name, gradient in self.claim.gradients.items():
            parameter = self.claim.reference.inputs[name]
            step = self.step_of(parameter) if parameter is not None else None
            if parameter is None or step is None or step.gradients is not Gradients.KEPT or step.keep is None:
                continue
            if not self.keeps(step, parameter):
                continue
            if step.keep.level is Level.WHOLE:
                yield "keep", parameter.index, parameter.plan, gradient
            else:
                reduced = part(numbers, parameter, mean(numbers, parameter.plan, gradient))
                yield "keep", parameter.index, parameter.plan.outer, reduced


def _effects(claim: Claim, evaluation: Evaluation) -> Iterator[str]:
    """What the step writes or keeps and should not, and the reverse."""
    expected = [*claim.writes, *Keeping(claim).effects()]
    zero = [e for e in evaluation.effects if e[0] == "keep" and isinstance(e[3], int) and _is_zero(claim, e[3])]
    found = [e for e in evaluation.effects if e in expected or e not in zero]
    for some, others, verdict in ((found, expected, "which it should not"), (expected, found, "")):
        left = list(others)
        for effect in some:
            if effect in left:
                left.remove(effect)
                continue
            text = _text(claim, effect[-1])
            yield f"the step {effect[0]}s {text}, {verdict}" if verdict else f"the step does not {effect[0]} {text}"


# ---- as a pass ----


def prove(
    record: Record,
    parameters: TracedParameters,
    forward: TraceCtx,
    backward: TraceCtx | None,
    contexts: Sequence[Context | None] = (),
    border: Border | None = None,
    functions: Sequence[tuple[TraceCtx, Callable[..., Any] | None]] = (),
) -> Proof:
    """Proves a compiled step, inside Thunder's compilation.

    Args:
        record: the computation before any pass of ours, and as they gave it to autodiff.
        parameters: the sharded parameters among its inputs, and the models' steps.
        forward: the final trace.
        backward: likewise; None if nothing is differentiated.
        contexts: the ranks that hold the parts of parameters, and those of sequences; None if each has whole ones.
        border: the prologue and the epilogue; None if they are not known.
        functions: traces that run, each with its function; None: as it will be compiled.
    """
    stages = zip(contexts, pairwise(record.stages), strict=False)
    splits = [(one, before, after) for one, (before, after) in stages if one is not None and one.plan.ranks > 1]
    if differences := tuple(text for one, before, after in splits for text in unproven(before, after, one)):
        return Proof("unproven", differences=differences)
    try:
        made = claim(record, parameters, forward, backward)
    except UnprovenError as error:
        return Proof("unproven", differences=(f"the unsharded program: {error}",))
    proof = check(made, forward, backward)
    others = [*(other_borders(border) if border is not None else ()), *uncertified(forward, backward)]
    others += [*(wrong_gradients(splits[-1][2]) if splits else ()), *wrong_losses(record.first)]
    others += [text for trace, function in functions for text in other_text(trace, function)]
    return replace(proof, verdict="unproven", differences=(*proof.differences, *others)) if others else proof


# ---- the pass ----


class UnprovenStepError(AssertionError):
    """A compiled step could not be shown to be the unsharded program. The message has the differences."""


def prove_step(
    trace: TraceCtx,
    *,
    record: Record | None,
    parameters: TracedParameters,
    proofs: list[Proof],
    forwards: list[TraceCtx],
    proving: Sequence[str],
    tensors: Context | None,
    context: Context | None,
    border: Border | None,
) -> TraceCtx:
    """Proves that the step computes the unsharded program.

    Takes: a final forward, then its backward, and the computation as it was recorded. ``proving`` has the names of the
    models that ask for it.
    Gives: the same trace. Adds the result to ``proofs``. Raises :class:`UnprovenStepError`.
    No-op when: no model asks for it.
    """
    if not proving or record is None:
        return trace
    forward, backward = trace, None
    if is_backward(trace):
        forward, backward = forwards[-1], trace
    elif has_backward(trace, record):
        forwards[:] = [trace]
        return trace
    traces = [t for t in (forward, backward) if t is not None]
    proof = prove(record, parameters, forward, backward, (tensors, context), border, [(t, None) for t in traces])
    proofs.append(proof)
    if proof.verdict == "unproven":
        raise UnprovenStepError(
            f"the compiled step of {' and '.join(proving)} could not be proven to be the unsharded program:\n{proof}"
        )
    for one in traces:  # so that all ranks raise it, if the proof fails on one
        for runtime, lines in sent(one).items():
            runtime.compare_trace(["proven", *lines])
    return trace
