"""Equal calls of blocks become calls of one function: one line of the trace for each.

Note [Safe]. The record of a block has all that its lines are made of. Two blocks with equal records therefore give
equal lines, apart from the tensors that they read. Those are the arguments of the function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from passes.analysis.calls import Block, CallOf, unique_name
from passes.analysis.recognise import names
from passes.blocks import executor as block_calls
from passes.compat.jit import compile_data_and_stats, names_of_users
from passes.plan import ShardedParameter
from shardtrace.record.calls import PLAIN, Call, Record, Span, storage
from shardtrace.record.kinds import Kind, Mark, Outline, Uses, find_kinds, is_whole, outermost
from shardtrace.record.replay import Replay

import torch
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.trace import get_tracectx
from torch.utils import _pytree as pytree

ParameterOf = Callable[[torch.Tensor], ShardedParameter | None]


class Function:
    """The block of a kind. ``pattern`` tells which inputs are the same value; ``used`` which ones the lines read."""

    def __init__(self, block: Block, used: Sequence[int], pattern: tuple[int, ...]) -> None:
        self.block, self.used, self.pattern = block, tuple(used), pattern


class Blocks:
    """Writes a record, with one line for each call of a block that has others of its kind.

    Args:
        repeated, marked: the names of the modules that may be called, and of those whose activations are recomputed
            ("full" or "cheap").
        parameter_of: gives the sharded parameter of a tensor, or None.
        obstacle: why all lines must stand in the trace; empty if they need not.
    """

    def __init__(
        self,
        record: Record,
        replay: Replay,
        *,
        repeated: Collection[str],
        marked: Mapping[str, str],
        parameter_of: ParameterOf,
        obstacle: str = "",
    ) -> None:
        self._record, self._replay, self._parameter_of = record, replay, parameter_of
        self._repeated, self._obstacle = repeated, obstacle
        self._marks = [Mark(s.begin, s.end, marked[s.name] == "cheap") for s in record.spans if s.name in marked]
        self._spans: list[Span] = []
        self._functions: dict[Kind, Function | None] = {}
        self.apart: dict[str, str] = {}  # why a block's lines stand in the trace, by its name
        self.called: dict[Kind, list[str]] = {}  # the names of the blocks that are called

    def write(self, returned: Iterable[torch.Tensor]) -> None:
        """Adds the lines of the record to the running trace. ``returned``: the tensors that are read after it."""
        calls, done = self._record.calls, 0
        kinds = self._kinds(Uses(self._record, returned))
        for span in sorted(kinds, key=lambda s: s.begin):
            self._replay.write(calls[done : span.begin], done, self._marks)
            done = span.begin
            if self._call(kinds[span], span):
                done = span.end
        self._replay.write(calls[done:], done, self._marks)

    def _kinds(self, uses: Uses) -> dict[Span, Kind]:
        spans = self._spans = outermost([s for s in self._record.spans if s.name in self._repeated])
        whole = [s for s in spans if is_whole(self._record, s, self._marks)]
        self.apart.update((s.name, "it is recomputed with others as a whole") for s in spans if s not in whole)
        if self._obstacle:
            self.apart.update((s.name, self._obstacle) for s in whole)
            return {}
        return find_kinds(self._record, whole, uses, self._marks, self._why_apart, self.apart)

    def _why_apart(self, outline: Outline) -> str:
        """Why a block cannot be a function because of its parameters' buckets; empty if it can."""
        found = [p for t in outline.inputs if (p := self._parameter_of(t)) is not None and p.plan.world_size > 1]
        for p in found:
            if p.plan.bucketing not in ("block", "model") or (p.plan.bucketing == "block" and p.plan.pieces > 1):
                return "its parameters are in several buckets"
        if len({p.block for p in found if p.plan.bucketing == "block"}) > 1:
            return "it has buckets within"
        return ""

    def _call(self, kind: Kind, span: Span) -> bool:
        """Adds a line that calls the block. False if the block's lines must stand in the trace."""
        [outline] = (m for m in kind.members if m.span is span)
        trace, replay = get_tracectx(), self._replay
        inputs = [replay.proxy(t) for t in outline.inputs]
        pattern = tuple(map([p.name for p in inputs].index, (p.name for p in inputs)))
        calls = self._record.calls[span.begin : span.end]
        if kind not in self._functions:
            self._functions[kind] = self._function(kind, outline, calls, inputs, pattern)
        function = self._functions[kind]
        if function is None or function.pattern != pattern:
            why = "its results are no tensors that it makes" if function is None else "it is given one tensor twice"
            self.apart[span.name] = why
            return False
        results = function.block.symbol(*(inputs[i] for i in function.used))
        trace.scopes[-1][-1].tags.add(CallOf(span.name, _digest(calls)))
        for (i, j), proxy in zip(kind.exports, results, strict=True):
            replay.values.know(calls[i].results[j], proxy)
        self.called.setdefault(kind, []).append(span.name)
        return True

    def _function(
        self, kind: Kind, outline: Outline, calls: Sequence[Call], inputs: Sequence[Any], pattern: tuple[int, ...]
    ) -> Function | None:
        """The function of the first call of its kind; None if its results are no tensors that its lines make."""
        trace, replay = get_tracectx(), self._replay
        trace.push_scope([])
        try:
            replay.write(calls, outline.span.begin, self._marks)
            outputs = [replay.proxy(calls[i].results[j]) for i, j in kind.exports]
        finally:
            lines = trace.pop_scope()
        made = {o.name for b in lines for o in b.flat_proxy_outs}
        distinct = len({o.name for o in outputs}) == len(outputs)
        read = _live(lines, {o.name for o in outputs})
        used = [i for i, p in enumerate(inputs) if pattern[i] == i and p.name in read]
        tensors = all(type(p) is TensorProxy for p in (*outputs, *(inputs[i] for i in used)))
        if not (used and distinct and tensors and all(o.name in made for o in outputs)):
            outside = {storage(t) for t in outline.inputs}
            replay.values.forget(t for call in calls for t in call.results if storage(t) not in outside)
            return None
        data, _ = compile_data_and_stats()
        block_calls.join(data)
        swap, name = names_of_users(), type(outline.span.module).__name__
        block = Block(
            unique_name(trace, name if name.isidentifier() else "Block"),
            [b.from_bsym_swap_proxies(swap) for b in lines],
            [swap.get(variableify(inputs[i]), inputs[i]) for i in used],
            [swap.get(variableify(o), o) for o in outputs],
            trace.names,
            outline.span.name,
        )
        return Function(block, used, pattern)

    def __str__(self) -> str:
        parts = [f"{called[0]} is compiled once for {len(called)} calls" for called in self.called.values()]
        reasons: dict[str, list[str]] = {}
        kinds = Counter(type(s.module) for s in self._spans)
        for span in self._spans:
            if kinds[type(span.module)] > 1 and span.name in self.apart:  # a single block has no equal
                reasons.setdefault(self.apart[span.name], []).append(span.name)
        for why, names_ in reasons.items():
            more = ", ..." if len(names_) > 4 else ""
            each = ", each" if len(names_) > 1 else ""
            parts.append(f"{', '.join(names_[:4])}{more}{each} by itself: {why}")
        return "; ".join(parts)


def _digest(calls: Sequence[Call]) -> str:
    """A digest of calls of torch: their functions, constants and tensors, which are numbers. The proof compares those
    of blocks that are taken for one. It is found otherwise than their kinds on purpose."""
    text, numbers = sha256(), dict[int, int]()
    for call in calls:
        leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        function = call.function if isinstance(call.function, Hashable) else id(call.function)
        said: list[Any] = [hash(function), str(spec), call.grad, len(call.written)]
        for value in (*leaves, *call.results):
            if isinstance(value, torch.Tensor):
                said += [numbers.setdefault(id(value), len(numbers)), tuple(value.shape), value.dtype]
            else:
                said.append(repr(value) if isinstance(value, PLAIN) else id(value))
        text.update(repr(said).encode())
    return text.hexdigest()


def _live(lines: Sequence[Any], read: set[str]) -> set[str]:
    """The names of all values that the lines behind the values ``read`` need."""
    for bsym in reversed(lines):
        if not read.isdisjoint(names(bsym.flat_proxy_outs)):
            read |= {a.name for a in bsym.flat_proxy_args if isinstance(a, Proxy)}
    return read
