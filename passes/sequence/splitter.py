"""Follows the lines of a computation, and writes each on parts or on whole values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from passes.analysis.calls import block_of
from passes.analysis.dims import Placed, TorchLine, follow, lead, torch_line
from passes.analysis.recognise import changes_values, is_random, is_return, is_unpack, names
from passes.analysis.symbols import properties
from passes.comm.properties import Property
from passes.comm.sequence import Part, cut, gather_sequence, sum_sequence
from passes.plan.sequence import ContextPlan, Split
from passes.sequence.writing import Writer, place

from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx

MOVES = Property.VIEW | Property.INDEX | Property.COPY | Property.CAST
EXPANDS = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "reshape"})


class Rules(NamedTuple):
    """How lines that mix positions compute on parts: by the name of the function, False if the rule does not apply; and
    how the call of a block does."""

    by_name: Mapping[str, Callable[[Splitter, BoundSymbol, TorchLine], bool]]
    call_block: Callable[[Splitter, BoundSymbol], None]


@dataclass
class Value:
    """A value of the recorded computation: the line that makes it, and what the new one has of it.

    ``is_split``: it was computed in parts. Else ``parts`` are computed from the whole, or instead of it.
    """

    proxy: TensorProxy
    line: BoundSymbol | None = None
    whole: TensorProxy | None = None
    parts: dict[Split, TensorProxy] = field(default_factory=dict)
    is_split: bool = False

    @property
    def bytes(self) -> int:
        return int(self.proxy.numel * self.proxy.dtype.bytes)


class Splitter:
    """One run over a computation. Values are identified by their names in the recorded computation.

    Args:
        old: the recorded computation.
        plan: the ranks that hold the parts.
        rules: how lines that mix positions compute on parts.
        remarks: is told what is computed on whole sequences.
        inputs: the names of its inputs that need a gradient; None: those that are marked.
    """

    def __init__(
        self,
        old: TraceCtx,
        plan: ContextPlan,
        rules: Rules,
        remarks: dict[str, None],
        inputs: set[str] | None = None,
    ) -> None:
        self.old, self.plan, self.rules, self.remarks = old, plan, rules, remarks
        self.writer = Writer(old, inputs)
        self.values: dict[str, Value] = {}
        self._parts: dict[tuple[Split, int | None], Part] = {}
        self._gathered: set[str] = set()  # new values that come from other ranks, and copies of them
        self._torch_lines: dict[int, TorchLine | None] = {}

    def follow_lines(self) -> None:
        """Writes what the recorded lines compute, except for the inputs and the results."""
        for i, line in enumerate(self.old.bound_symbols):
            if not is_unpack(line) and not is_return(line):
                self._line(line, i)

    # ---- lines ----

    def _line(self, line: BoundSymbol, number: int) -> None:
        outs = [o for o in line.flat_proxy_outs if isinstance(o, TensorProxy)]
        if changes_values(line) or not outs:
            self._finish_pending(number)
            self._as_whole(line)
            return
        for o in outs:
            if o.name not in self.values:  # a line may return its argument
                self.values[o.name] = Value(o, line)
        if not any(self.is_split(a) for a in line.flat_proxy_args):
            return  # written when it is needed
        if block_of(line) is not None:
            self.rules.call_block(self, line)
            return
        call = self.torch_line(line)
        if call is None:
            self._as_whole(line)
            return
        rule = self.rules.by_name.get(call.name)
        if not (rule is not None and rule(self, line, call)) and not self._on_parts(line, call):
            self._mixed(line, call)

    def _on_parts(self, line: BoundSymbol, call: TorchLine) -> bool:
        """Writes a line on parts as the table of dims says; False if it cannot be."""
        choices: list[tuple[int, int, Placed]] = []
        for i, operand in enumerate(call.operands):
            for split in self.splits(operand):
                placed = follow(call, i, split)
                if placed is not None and self._is_possible(placed, split):
                    choices.append((self._bytes_to_gather(call, placed), len(choices), placed))
        if not choices:
            return False
        *_, placed = min(choices)
        self._write(line, call, placed, native=True)
        return True

    def _is_possible(self, placed: Placed, split: Split) -> bool:
        return placed.combine is None or (placed.combine in ("sum", "mean") and self.is_even(split))

    def is_even(self, split: Split) -> bool:
        """False if parts have positions beyond the end of the sequence, which a sum must leave out."""
        return self.plan.local(split.length) * self.plan.ranks == split.length

    def _bytes_to_gather(self, call: TorchLine, placed: Placed) -> int:
        pairs = zip(call.operands, placed.operands, strict=True)
        return sum(self.gather_cost(o) for o, s in pairs if s is None or s not in self.splits(o))

    def _write(self, line: BoundSymbol, call: TorchLine, placed: Placed, *, native: bool) -> None:
        """Writes a line on parts, and the sum of its results if they are parts of sums."""
        pairs = zip(call.operands, placed.operands, strict=True)
        operands = [self.whole(o) if s is None else self.part(o, s) for o, s in pairs]
        shapes = [
            tuple(r.shape) if s is None else self.at(s).local_shape(tuple(r.shape))
            for r, s in zip(call.results, placed.results, strict=True)
        ]
        found = self.writer.on_parts(line, call, operands, shapes)
        if self._moves(line) and not self._gathered.isdisjoint(names(operands)):
            self.regather(self.writer.trace.bound_symbols[-1])
        for old, new, split in zip(call.results, found, placed.results, strict=True):
            if placed.combine is not None:
                self.know_whole(old, self._combined(line, new, placed.combine))
            elif split is None:
                self.know_whole(old, new)
            else:
                self.know_part(old, split, new, native=native)

    def _combined(self, line: BoundSymbol, x: TensorProxy, how: str) -> TensorProxy:
        def combine() -> Any:
            total = sum_sequence(x, self.everywhere)
            return total if how == "sum" else ltorch.mul(total, 1.0 / self.plan.ranks)

        return self.writer.emit(line, combine)[0]

    def _mixed(self, line: BoundSymbol, call: TorchLine) -> None:
        """Computes a line on whole operands. A result of the same sequence is cut again."""
        splits = [s for o in call.operands for s in self.splits(o)]
        if any(self.is_split(o) and dtypes.is_float_dtype(o.dtype) for o in call.operands):
            self.remarks[f"{call.name} is computed on whole sequences{place(line)}"] = None
        self._as_whole(line)
        for result in call.results:
            whole = self.values[result.name].whole
            split = next((s for s in splits if s.dim < result.ndim and result.shape[s.dim] == s.size), None)
            if split is not None and whole is not None:
                self.know_part(result, split, self._cut(whole, self.at(split), line), native=True)

    def _as_whole(self, line: BoundSymbol) -> None:
        """Writes a line on whole operands."""
        if is_random(line):
            raise RuntimeError(
                f"{line.sym.name} draws random numbers for a value that all ranks of a sequence hold as a whole, and "
                f"they would differ{place(line)}: apply it to a value that is computed from the split arguments, pass "
                "the numbers as an argument, or leave it out"
            )
        operands = [a for a in line.flat_proxy_args if isinstance(a, TensorProxy) and a.name in self.values]
        whole = [self.whole(a) for a in operands]
        swap = {variableify(a): w for a, w in zip(operands, whole, strict=True)}
        new = self.writer.swapped(line, swap)
        if self._moves(line) and not self._gathered.isdisjoint(names(whole)):
            self.regather(new)
        for old, found in zip(line.flat_proxy_outs, new.flat_proxy_outs, strict=True):
            if isinstance(old, TensorProxy):
                value = self.values.setdefault(old.name, Value(old, line))
                value.whole = value.whole if value.whole is not None else found

    def _finish_pending(self, number: int) -> None:
        """Writes what later lines read and is not written yet: a line is about to change one of its operands."""
        for later in self.old.bound_symbols[number + 1 :]:
            for a in later.flat_proxy_args:
                value = self.values.get(a.name)
                if value is not None and value.whole is None and not value.parts:
                    self.whole(a)

    # ---- values ----

    def is_split(self, proxy: Any) -> bool:
        return isinstance(proxy, TensorProxy) and proxy.name in self.values and self.values[proxy.name].is_split

    def splits(self, proxy: TensorProxy) -> Sequence[Split]:
        """The splits in which a value was computed."""
        value = self.values[proxy.name]
        return list(value.parts) if value.is_split else []

    def know_part(self, old: TensorProxy, split: Split, new: TensorProxy, *, native: bool = True) -> None:
        """Notes a part of a recorded value. ``native``: that it was computed in parts."""
        value = self.values[old.name]
        value.parts[split] = new
        new.tags.update(old.tags, [self.at(split)])  # whether it is detached; the part, for the inspector
        value.is_split |= native
        self.writer.name(new, old)

    def know_whole(self, old: TensorProxy, new: TensorProxy) -> None:
        """Notes a recorded value that all ranks hold as a whole."""
        self.values[old.name].whole = new
        new.tags.update(old.tags)
        self.writer.name(new, old)

    def whole(self, proxy: TensorProxy) -> TensorProxy:
        """The whole of a value: as it is, computed again from whole operands if less has to be sent, or gathered."""
        value = self.values[proxy.name]
        if value.whole is None and value.line is not None and self.gather_cost(proxy) < value.bytes * value.is_split:
            self._as_whole(value.line)
        elif value.whole is None and not value.is_split:
            assert value.line is not None
            self._as_whole(value.line)
        if value.whole is None:
            split = self.splits(proxy)[0]
            x = self.part(proxy, split)
            (value.whole,) = self.writer.emit(value.line, lambda: gather_sequence(x, self.at(split)))
            if self.writer.has_gradient(proxy):  # of another value, Thunder would repeat only the wait
                self.regather(self.writer.trace.bound_symbols[-1])
        return value.whole

    def part(self, proxy: TensorProxy, split: Split, fill: int | None = None) -> TensorProxy:
        """A part of a value: as it is, computed from parts of the operands, or cut."""
        value = self.values[proxy.name]
        if fill is None and split in value.parts:
            return value.parts[split]
        if fill is None and value.whole is None and not value.is_split and self._lead(value, split):
            return value.parts[split]
        found = self._cut(self.whole(proxy), self.at(split, fill), value.line)
        if fill is None:
            value.parts[split] = found
        return found

    def _lead(self, value: Value, split: Split) -> bool:
        """Computes only a part of a value that is not written yet; False if it cannot be."""
        line = value.line
        call = self.torch_line(line) if line is not None else None
        if call is None or line is None or is_random(line) or len(call.results) != 1:
            return False
        placed = lead(call, 0, split)
        if placed is None or placed.combine is not None:
            return False
        self._write(line, call, placed, native=False)
        return True

    def _cut(self, whole: TensorProxy, part: Part, line: BoundSymbol | None) -> TensorProxy:
        return self.writer.emit(line, lambda: cut(whole, part))[0]

    def gather_cost(self, proxy: TensorProxy, depth: int = 8) -> int:
        """Bytes that have to be gathered for a whole value."""
        value = self.values[proxy.name]
        if value.whole is not None or not value.is_split:
            return 0
        line = value.line
        call = self.torch_line(line) if line is not None and depth and not is_random(line) else None
        if line is None or call is None or (dtypes.is_inexact_dtype(proxy.dtype) and not self._moves(line)):
            return value.bytes
        return min(value.bytes, sum(self.gather_cost(o, depth - 1) for o in call.operands))

    def _moves(self, line: BoundSymbol) -> bool:
        """True for a line that computes nothing."""
        call = self.torch_line(line)
        return bool(properties(line.sym) & MOVES) or (call is not None and call.name in EXPANDS)

    def regather(self, line: BoundSymbol) -> None:
        """Lets backward take again what a line takes from other ranks, so that no rank saves whole sequences, or values
        in two layouts."""
        line.tags = line.tags | {BoundSymbolTag.RECOMPUTE_IN_BACKWARD}
        self._gathered |= names(line.flat_proxy_outs)

    def torch_line(self, line: BoundSymbol) -> TorchLine | None:
        """The line as a call of torch; None if it is none."""
        if id(line) not in self._torch_lines:
            self._torch_lines[id(line)] = torch_line(line)
        return self._torch_lines[id(line)]

    def at(self, split: Split, fill: int | None = None) -> Part:
        """This rank's part in a split."""
        return self._parts.setdefault((split, fill), Part(self.plan, split, fill))

    @property
    def everywhere(self) -> Part:
        """For collectives of values that are not split."""
        return self.at(Split.along(0, 1))
