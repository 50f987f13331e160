"""Steps that were not compiled, composed of the lines of steps that were.

A step of blocks is one line for each block in forward and one in backward, and the collectives between them. Another
choice for a block (it recomputes its activations; its parameters stay gathered until backward) changes these lines and
the values that forward saves, and nothing else. So a few compiled steps give the traces of all combinations, which the
schedule, the cost model and the prediction of memory then take for compiled ones.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from passes.analysis.calls import ON_HOST, block_function, called_module
from passes.analysis.recognise import (
    bucket_of,
    is_backward,
    is_collective,
    is_deletion,
    is_gather,
    is_issue,
    is_offload,
    is_return,
    is_unpack,
    is_wait,
    names,
    unsharded_values,
)
from passes.plan import Bucket, BucketPlan, Wire
from passes.save import given, loaded, stored
from passes.schedule import schedule, wait_copies

import thunder
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors.passes import del_last_used

Call = tuple[str, int]  # the name of a block's module, and how often forward had called it before
SCHEDULED = "shardtrace: schedule"  # how the provenance of a scheduled trace begins


class Choice(NamedTuple):
    """The labels of the buckets that stay gathered until backward, how many are gathered ahead of use, the wires of
    gathers and of reductions in place of those of the base, and the names of the blocks that keep what they save in
    host memory."""

    kept: frozenset[str] = frozenset()
    prefetch: int = 1
    gather: Wire | None = None
    reduction: Wire | None = None
    on_host: frozenset[str] = frozenset()


class Pair(NamedTuple):
    """The symbols of a block's functions, which a step calls in forward and in backward."""

    forward: Symbol
    backward: Symbol


class ComposedStep(NamedTuple):
    """The traces of a step."""

    forward: TraceCtx
    backward: TraceCtx


class Compiled(NamedTuple):
    """A step before its collectives are placed, and the functions of blocks that it calls."""

    step: ComposedStep
    calls: Mapping[Call, Pair]


def compiled(function: Any) -> Compiled:
    """The last step that a jitted function has compiled.

    Raises ValueError if it has no backward.
    """
    backward = thunder.last_backward_traces(function)
    if not backward:
        raise ValueError("there is nothing to train: no parameter requires a gradient")
    return compiled_step(*map(_before_schedule, (thunder.last_traces(function), backward)))


def compiled_step(forward: TraceCtx, backward: TraceCtx) -> Compiled:
    """A step as it is before its collectives are placed."""
    step = ComposedStep(forward, backward)
    there = {call: b.sym for call, b in _calls(step.forward.bound_symbols)}
    back = {call: b.sym for call, b in _calls(step.backward.bound_symbols, backwards=True)}
    return Compiled(step, {call: Pair(there[call], back[call]) for call in there if call in back})


def _before_schedule(traces: Sequence[TraceCtx]) -> TraceCtx:
    scheduled = (i for i, t in enumerate(traces) if str(t.get_provenance()).lstrip("# ").startswith(SCHEDULED))
    return traces[next(scheduled, len(traces)) - 1]


def _calls(lines: Iterable[BoundSymbol], *, backwards: bool = False) -> Iterator[tuple[Call, BoundSymbol]]:
    """The lines that call blocks. ``backwards``: in the reverse order of forward, by which they are numbered."""
    number: Counter[str] = Counter()
    calls = [(called_module(b) or "", b) for b in lines if block_function(b) is not None]
    for module, bsym in reversed(calls) if backwards else calls:
        yield (module, number[module]), bsym
        number[module] += 1


def compose(base: Compiled, pairs: Mapping[Call, Pair], choice: Choice) -> ComposedStep:
    """The executed traces of a step in which blocks call the functions of ``pairs``, or else those of the base, and
    buckets travel as ``choice`` says. No bucket of ``base`` is kept."""
    forward, backward = ([b for b in t.bound_symbols if not is_deletion(b)] for t in base.step)
    again = _gathered_again(forward, backward)
    there, back = _with_calls(base, forward, backward, pairs, again)
    back = _without_gathers(back, {new.name: old for old, new in again.values()}, choice.kept)
    if choice.on_host:
        there, back = _on_host(base, there, back, choice.on_host)
    plans = _Plans(choice, {bucket_of(b).plan for b in forward if is_wait(b)})
    there, back = ([plans.line(b) for b in lines] for lines in (there, back))
    saved = _saved(there, back)
    return ComposedStep(
        placed(base.step.forward, _returning(there, saved)), placed(base.step.backward, given(back, saved))
    )


def placed(like: TraceCtx, lines: list[BoundSymbol]) -> TraceCtx:
    """The executed trace of lines without deletions, with collectives where the schedule places them."""
    new = from_trace(like)
    new.bound_symbols = lines
    if any(is_collective(b) for b in lines):
        return wait_copies(schedule(new))
    return del_last_used(new, clear_mutable_collections=is_backward(like))


def _on_host(
    base: Compiled, forward: Sequence[BoundSymbol], backward: Sequence[BoundSymbol], blocks: Collection[str]
) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """The lines of a step whose ``blocks`` keep what they save in host memory."""
    there = [
        b.from_bsym(tags=b.tags | {ON_HOST}) if block_function(b) is not None and called_module(b) in blocks else b
        for b in forward
    ]
    saved, parameters = names(_saved(forward, backward)), unsharded_values(base.step.forward)
    new, trips = stored(there, saved - names(forward[-1].args[0]), parameters, from_trace(base.step.forward))
    return new, loaded(backward, trips, from_trace(base.step.backward))


# ---- gathers ----


class Gathered(NamedTuple):
    """A parameter as forward has gathered it, and as backward gathers it again."""

    old: TensorProxy
    new: TensorProxy


def _gathered_again(forward: Sequence[BoundSymbol], backward: Sequence[BoundSymbol]) -> dict[str, Gathered]:
    """The parameters that backward gathers again, by the names that they have in forward."""
    first, second = _gathered(forward), _gathered(backward)
    return {first[name].name: Gathered(first[name], new) for name, new in second.items() if name in first}


def _gathered(lines: Iterable[BoundSymbol]) -> dict[str, TensorProxy]:
    """The values that lines gather, by the names of the model's parameters, from first or second shards."""
    waits = (b for b in lines if is_wait(b) and is_gather(b))
    pairs = (zip(bucket_of(b).members, b.flat_proxy_outs, strict=True) for b in waits)
    return {m.parameter.name: out for found in pairs for m, out in found}


def _without_gathers(
    backward: Iterable[BoundSymbol], old: Mapping[str, TensorProxy], kept: frozenset[str]
) -> list[BoundSymbol]:
    """The lines of a backward that reads the kept parameters as forward has gathered them."""
    lines, swap = [], dict[Variable, Proxy]()
    for bsym in backward:
        if (is_issue(bsym) or is_wait(bsym)) and is_gather(bsym) and bucket_of(bsym).label in kept:
            swap |= {variableify(o): old[o.name] for o in bsym.flat_proxy_outs if is_wait(bsym)}
        else:
            lines.append(bsym.from_bsym_swap_proxies(swap) if swap and bsym.has_input(swap) else bsym)
    return lines


class _Plans:
    """The buckets of a step with the plans and wires of a choice: a plan of kept buckets, and one of those gathered
    again. ``first``: the plans of the gathers of forward."""

    def __init__(self, choice: Choice, first: Iterable[BucketPlan]) -> None:
        self.choice = choice
        self._second = {plan.secondary for plan in first} - {None}
        self._plans: dict[tuple[int, bool], BucketPlan] = {}
        self._buckets: dict[tuple[int, Wire | None], Bucket] = {}

    def line(self, bsym: BoundSymbol) -> BoundSymbol:
        args = [self._bucket(a, self._wire(bsym, a)) if isinstance(a, Bucket) else a for a in bsym.args]
        if not any(new is not old for new, old in zip(args, bsym.args, strict=True)):
            return bsym
        tags = bsym.tags
        if bucket_of(bsym).label in self.choice.kept:
            tags = tags - {BoundSymbolTag.RECOMPUTE_IN_BACKWARD}
        return bsym.from_bsym(args=tuple(args), tags=tags)

    def _wire(self, bsym: BoundSymbol, bucket: Bucket) -> Wire | None:
        """The wire that is chosen for a line. Second shards travel as they are."""
        if not (is_collective(bsym) or is_offload(bsym)):
            return None
        if is_gather(bsym):
            return self.choice.gather if bucket.plan not in self._second else None
        return self.choice.reduction

    def _bucket(self, bucket: Bucket, wire: Wire | None) -> Bucket:
        key = id(bucket), wire
        if key not in self._buckets:
            new = copy.copy(bucket)
            new.plan = self._plan(bucket.plan, bucket.label in self.choice.kept)
            self._buckets[key] = new.carried_by(wire)
        return self._buckets[key]

    def _plan(self, plan: BucketPlan, kept: bool) -> BucketPlan:
        key = id(plan), kept
        if key not in self._plans:
            regather = plan.regather and not kept
            self._plans[key] = replace(plan, regather=regather, prefetch=self.choice.prefetch)
        return self._plans[key]


# ---- calls ----


def _with_calls(
    base: Compiled,
    forward: Sequence[BoundSymbol],
    backward: Sequence[BoundSymbol],
    pairs: Mapping[Call, Pair],
    again: Mapping[str, Gathered],
) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """The lines of a forward and backward whose blocks call the functions of ``pairs``."""
    new: dict[int, BoundSymbol] = {}
    lines_back = dict(_calls(backward, backwards=True))
    for call, line in list(_calls(forward)):
        pair, own = pairs.get(call), base.calls.get(call)
        if pair is None or own is None or pair.forward is own.forward:
            continue
        values = _Values(line, own.forward.id, again)
        new[id(line)] = values.forward_line(pair.forward, call)
        new[id(lines_back[call])] = values.backward_line(lines_back[call], own.backward.id, pair)
    return [new.get(id(b), b) for b in forward], [new.get(id(b), b) for b in backward]


class _Values:
    """The values that a block takes and returns: those of a line of forward, by the numbers of its arguments."""

    def __init__(self, line: BoundSymbol, part: Any, again: Mapping[str, Gathered]) -> None:
        self.line = line
        self.args = [again[a.name].new if a.name in again else a for a in line.args]  # as backward knows them
        self.inputs = {p.name: i for i, p in enumerate(part.trace.args)}
        self.results = [o for o in line.output if isinstance(o, TensorProxy)]
        self.saved = next((o for o in line.output if not isinstance(o, TensorProxy)), None)

    def forward_line(self, symbol: Symbol, call: Call) -> BoundSymbol:
        if not _saves(symbol.id):
            self.saved = None
        elif self.saved is None:
            with tracectx(TraceCtx()):
                self.saved = AnyProxy(None, name=f"saved_{call[0]}_{call[1]}")
        output = (*self.results, *([self.saved] if self.saved is not None else []))
        return self.line.from_bsym(sym=symbol, output=output)

    def backward_line(self, line: BoundSymbol, own: Any, pair: Pair) -> BoundSymbol:
        """The line of backward that calls ``pair`` in place of ``own``."""
        known = {own.saved, *self.inputs, *_names_of_results(self.line.sym.id)}
        gradients = [a for p, a in zip(own.trace.args, line.args, strict=True) if p.name not in known]
        part, inputs = pair.backward.id, {p.name: i for i, p in enumerate(pair.forward.id.trace.args)}
        results = {name: i for i, name in enumerate(_names_of_results(pair.forward.id))}
        args: list[Any] = []
        for p in part.trace.args:
            if p.name == part.saved:
                args.append(self.saved)
            elif p.name in inputs:
                args.append(self.args[inputs[p.name]])
            elif p.name in results:
                args.append(self.results[results[p.name]])
            else:
                args.append(gradients.pop(0))
        return line.from_bsym(sym=pair.backward, args=tuple(args))


def _names_of_results(part: Any) -> list[str]:
    return [r.name for r in part.trace.bound_symbols[-1].args[0] if isinstance(r, TensorProxy)]


def _saves(part: Any) -> bool:
    return any(isinstance(r, list) for r in part.trace.bound_symbols[-1].args[0])


# ---- what forward saves ----


def _saved(forward: Sequence[BoundSymbol], backward: Sequence[BoundSymbol]) -> list[Proxy]:
    """The values of forward that backward reads, in order of use."""
    made = {o.name for b in backward if not is_unpack(b) for o in b.flat_proxy_outs}
    there = {p.name: p for b in forward for p in (*b.flat_proxy_args, *b.flat_proxy_outs)}
    read = (a.name for b in backward if not is_unpack(b) for a in (*b.flat_proxy_args, *_returned(b)))
    return [there[name] for name in dict.fromkeys(read) if name in there and name not in made]


def _returned(bsym: BoundSymbol) -> list[Any]:
    return [p for p in bsym.flat_args if isinstance(p, Proxy)] if is_return(bsym) else []


def _is_list(p: Proxy) -> bool:
    return not isinstance(p, TensorProxy)


def _returning(forward: Sequence[BoundSymbol], saved: Sequence[Proxy]) -> list[BoundSymbol]:
    *lines, last = forward
    parts = tuple(p for p in saved if not _is_list(p)), tuple(p for p in saved if _is_list(p))
    return [*lines, last.from_bsym(args=(last.args[0], parts))]
