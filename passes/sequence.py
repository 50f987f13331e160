"""Rewrites a computation for parts of sequences or parameters: values, lines, blocks, and what a model returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from passes.analysis.calls import Block, block_of, unique_name
from passes.analysis.dims import Placed, TorchLine, follow, lead, product_of, torch_line
from passes.analysis.recognise import (
    changes_values,
    is_random,
    is_return,
    is_unpack,
    names,
    nbytes,
    part_at,
    properties,
    readers_of,
)
from passes.comm.sequence import (
    NOT_SPLIT,
    Part,
    cut,
    from_input,
    gather_output,
    gather_parts,
    scatter_parts,
    sum_parts,
    to_output,
    to_own_output,
)
from passes.comm.symbols import Property
from passes.plan import Axis
from passes.plan.dims import is_linear
from passes.plan.dims.reductions import RESHAPES
from passes.plan.plan import ContextPlan, Split
from passes.writer import Writer, place

from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

# ---- the walk ----


NO_SPLITS: Mapping[str, Split] = MappingProxyType({})
MOVES = Property.VIEW | Property.INDEX | Property.COPY | Property.CAST
EXPANDS = frozenset(
    {"getitem", "index_select", "expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "reshape"}
)


class Rules(NamedTuple):
    """How lines that mix positions compute on parts: by the name of the function, False if the rule does not apply; and
    how the call of a block does. ``eager``: whether lines on whole values are written where they were recorded, and
    not when others need them. ``rows``: whether each rank gets only rows of the sums of products."""

    by_name: Mapping[str, Callable[[Splitter, BoundSymbol, TorchLine], bool]]
    call_block: Callable[[Splitter, BoundSymbol], None]
    eager: bool = False
    rows: bool = False


@dataclass
class Value:
    """A value of the recorded computation: the line that makes it, and what the new one has of it.

    ``pending``: what this rank adds to it, before ranks add it up. ``is_split``: it was computed in parts. Else
    ``parts`` are computed from the whole, or instead of it. ``rows``: of these, which follow from rows of a sum.
    """

    proxy: TensorProxy
    line: BoundSymbol | None = None
    whole: TensorProxy | None = None
    parts: dict[Split, TensorProxy] = field(default_factory=dict)
    pending: TensorProxy | None = None
    is_split: bool = False
    rows: bool = False

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
        chosen: how inputs are cut that are parameters, by name: where they are used first, so that they are gathered
            there.
    """

    def __init__(
        self,
        old: TraceCtx,
        plan: ContextPlan,
        rules: Rules,
        remarks: dict[str, None],
        inputs: set[str] | None = None,
        chosen: Mapping[str, Split] = NO_SPLITS,
    ) -> None:
        self.old, self.plan, self.rules, self.remarks, self.chosen = old, plan, rules, remarks, chosen
        self.writer = Writer(old, inputs)
        self.values: dict[str, Value] = {}
        self._parts: dict[tuple[Split, int | None], Part] = {}
        self._gathered: set[str] = set()  # new values that come from other ranks, and copies of them
        self._torch_lines: dict[int, TorchLine | None] = {}
        self._readers = readers_of(old.bound_symbols)

    def follow_lines(self) -> None:
        """Writes what the recorded lines compute, except for the inputs and the results."""
        for i, line in enumerate(self.old.bound_symbols):
            unread = names(line.flat_proxy_outs).isdisjoint(self._readers) and not is_random(line)
            if is_unpack(line) or (unread and not is_return(line) and not changes_values(line)):
                continue
            if not self._of_pending(line) and not is_return(line):
                self._line(line, i)

    # ---- lines ----

    def _line(self, line: BoundSymbol, number: int) -> None:
        outs = [o for o in line.flat_proxy_outs if isinstance(o, TensorProxy)]
        if changes_values(line) or not outs:
            self._finish_pending(number)
            self.as_whole(line)
            return
        for o in outs:
            if o.name not in self.values:  # a line may return its argument
                self.values[o.name] = Value(o, line)
        if not any(self.is_split(a) for a in line.flat_proxy_args):
            if self.rules.eager and block_of(line) is not None and is_random(line):
                self.rules.call_block(self, line)
            elif self.rules.eager:
                self.as_whole(line)
            return  # else it is written when it is needed
        if block_of(line) is not None:
            self.rules.call_block(self, line)
            return
        call = self.torch_line(line)
        if call is None:
            self.as_whole(line)
            return
        rule = self.rules.by_name.get(call.name)
        if not (rule is not None and rule(self, line, call)) and not self._on_parts(line, call):
            self._mixed(line, call)

    def _on_parts(self, line: BoundSymbol, call: TorchLine) -> bool:
        """Writes a line on parts as the table of dims says; False if it cannot be."""
        choices: list[tuple[int, int, Placed]] = []
        for i, operand in enumerate(call.operands):
            if self.values[operand.name].rows and product_of(call) is not None:
                continue
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
        if placed.combine == "sum" and product_of(call) is not None:
            if not self.rules.eager and nbytes(found) > nbytes(operands[:1]):
                self.regather(self.writer.trace.bound_symbols[-1])  # the factor takes less memory than the product
            return self.add_up(line, call.results[0], found[0])
        if self._moves(line) and not self._gathered.isdisjoint(names(operands)):
            self.regather(self.writer.trace.bound_symbols[-1])
        for old, new, split in zip(call.results, found, placed.results, strict=True):
            if placed.combine is not None:
                self.know_whole(old, self._combined(line, new, placed.combine))
            elif split is None:
                self.know_whole(old, new)
            else:
                rows = native and any(self.values[o.name].rows for o in call.operands)
                self.know_part(old, split, new, native=native, rows=rows)

    def add_up(self, line: BoundSymbol, old: TensorProxy, x: TensorProxy, bias: TensorProxy | None = None) -> None:
        """Adds up, now or later, what ranks have of a product's result, of which each gets its rows if they divide."""
        if bias is None and (not self.rules.eager or self._waits(old)):
            self.values[old.name].pending = x
        else:
            self._total(line, old, x, bias)

    def _total(
        self,
        line: BoundSymbol,
        old: TensorProxy,
        x: TensorProxy,
        bias: TensorProxy | None,
        wanted: Split | None = None,
    ) -> None:
        split = self._rows_of(old) if self.rules.rows and (bias is None or bias.ndim == 1) else None
        split = wanted if split is None else split

        def total() -> Any:
            found = sum_parts(x, self.everywhere) if split is None else scatter_parts(x, self.at(split))
            return found if bias is None else ltorch.add(found, bias)

        (found,) = self.writer.emit(line, total)
        if split is None:
            return self.know_whole(old, found)
        self.know_part(old, split, found, rows=self.rules.rows)

    def _rows_of(self, value: TensorProxy) -> Split | None:
        """Rows of the batch, or else of the sequence; None if neither divides. Of a sequence of which other ranks hold
        parts, each of their chunks is cut."""
        ranks, within = self.plan.ranks, self.plan.within
        if within > 1 and value.ndim == 2:  # of sequences one behind the other: as of what they are reshaped to
            call = next((self.torch_line(line) for line in self._only_reader(value.name)), None)
            after = call.results[0] if call is not None and call.name in RESHAPES else value
            split = self._rows_of(after) if after.ndim > 2 else None
            placed = lead(call, 0, split) if call is not None and split is not None else None
            return placed.operands[0] if placed is not None else None
        blocks = ((d, within if d else 1) for d in range(value.ndim - 1))
        splits = (Split(d, n, ranks, value.shape[d] // (n * ranks)) for d, n in blocks)
        return next((s for s in splits if s.inner and s.size == value.shape[s.dim]), None)

    # ---- sums that wait for smaller values ----

    def _of_pending(self, line: BoundSymbol) -> bool:
        """Writes a line on what ranks have to add up if it is linear. Else they do so, and the line is not written."""
        args = [a for a in line.flat_proxy_args if a.name in self.values]
        pending = {a.name: p for a in args if (p := self.values[a.name].pending) is not None}
        linear = bool(pending) and self._is_linear(line, pending.keys())
        if linear or (pending and self._leads_to(line, names(args), nbytes(pending.values()) - 1)):
            call = self.torch_line(line)
            assert call is not None
            share = self._share if not linear else self.whole
            swap = {variableify(o): pending[o.name] if o.name in pending else share(o) for o in call.operands}
            (result,) = call.results
            self.values[result.name] = Value(result, line)
            self.add_up(line, result, self.writer.swapped(line, swap).flat_proxy_outs[0])
            return True
        for name in pending:
            self._settle(self.values[name], self._wanted(line, name))
        return False

    def _share(self, proxy: TensorProxy) -> TensorProxy:
        """This rank's share of a value: the shares of all ranks add up to it."""
        whole, share = self.whole(proxy), 1.0 / self.plan.ranks
        return self.writer.emit(self.values[proxy.name].line, lambda: ltorch.mul(whole, share))[0]

    def _is_linear(self, line: BoundSymbol, given: Set[str]) -> bool:
        """Whether a line is linear in the values ``given``."""
        call = self.torch_line(line) if not is_random(line) and not changes_values(line) else None
        if call is None or len(call.results) != 1 or any(map(self._only_in_parts, call.operands)):
            return False
        numbers = [i for i, o in enumerate(call.operands) if o.name in given]
        inexact = all(dtypes.is_inexact_dtype(p.dtype) for p in (*call.results, *(call.operands[i] for i in numbers)))
        return inexact and is_linear(call.name, len(call.operands), numbers)

    def _leads_to(self, line: BoundSymbol, given: Set[str], most: int) -> bool:
        """Whether a line is linear in the values ``given``, and its result, or that of linear lines on it, has at
        ``most`` so many bytes."""
        if not self._is_linear(line, given):
            return False
        (result,) = line.flat_proxy_outs
        readers = self._only_reader(result.name)
        return nbytes([result]) <= most or any(self._leads_to(b, {result.name}, most) for b in readers)

    def _only_reader(self, name: str) -> Sequence[BoundSymbol]:
        readers = self._readers.get(name, [])
        return readers if len(readers) == 1 else ()

    def _waits(self, value: TensorProxy) -> bool:
        """Whether only one line reads a value, and linear lines lead to one that has no more bytes, or may be added to
        another sum before."""
        for line in self._only_reader(value.name):
            together = [a for a in line.flat_proxy_args if isinstance(a, TensorProxy)]
            return any(self._leads_to(line, names(given), nbytes(given)) for given in ((value,), tuple(together)))
        return False

    def _settle(self, value: Value, wanted: Split | None = None) -> None:
        x, value.pending = value.pending, None
        assert value.line is not None
        assert x is not None
        self._total(value.line, value.proxy, x, None, wanted)

    def _wanted(self, line: BoundSymbol, name: str) -> Split | None:
        """The part of a value that a line needs if another operand is there in parts only."""
        call = self.torch_line(line)
        if call is None:
            return None
        for i, operand in enumerate(call.operands):
            for split in self.splits(operand) if self._only_in_parts(operand) else ():
                placed = follow(call, i, split)
                if placed is not None and placed.combine is None:
                    pairs = zip(call.operands, placed.operands, strict=True)
                    return next((s for o, s in pairs if o.name == name and s is not None and self.is_even(s)), None)
        return None

    def _combined(self, line: BoundSymbol, x: TensorProxy, how: str) -> TensorProxy:
        def combine() -> Any:
            total = sum_parts(x, self.everywhere)
            return total if how == "sum" else ltorch.mul(total, 1.0 / self.plan.ranks)

        return self.writer.emit(line, combine)[0]

    def _mixed(self, line: BoundSymbol, call: TorchLine) -> None:
        """Computes a line on whole operands. A result of the same sequence is cut again, unless it holds positions, for
        lines that need all of them."""
        operands = [o for o in call.operands if self.is_split(o) and not self.values[o.name].rows]
        splits = [s for o in operands for s in self.splits(o)]
        if any(dtypes.is_float_dtype(o.dtype) for o in operands):
            what = "sequences" if self.plan.axis is Axis.CONTEXT else "values"
            self.remarks[f"{call.name} is computed on whole {what}{place(line)}"] = None
        self.as_whole(line)
        for result in call.results:
            whole = self.values[result.name].whole
            if not dtypes.is_inexact_dtype(result.dtype):
                continue
            split = next((s for s in splits if s.dim < result.ndim and result.shape[s.dim] == s.size), None)
            if split is not None and whole is not None:
                self.know_part(result, split, self._cut(whole, self.at(split), line), native=True)

    def as_whole(self, line: BoundSymbol) -> None:
        """Writes a line on whole operands."""
        random = is_random(line)
        if random and self.rules.eager and self._drawn_in_parts(line):
            return
        operands = [a for a in line.flat_proxy_args if isinstance(a, TensorProxy) and a.name in self.values]
        whole = [self.whole(a) for a in operands]
        swap = {variableify(a): w for a, w in zip(operands, whole, strict=True)}
        new = self.writer.swapped(line, swap)
        if self._moves(line) and not self._gathered.isdisjoint(names(whole)):
            self.regather(new)
        for old, found in zip(line.flat_proxy_outs, new.flat_proxy_outs, strict=True):
            if isinstance(old, TensorProxy):
                value = self.values.setdefault(old.name, Value(old, line))
                found = self._of_first_rank(line, found) if random else found
                value.whole = value.whole if value.whole is not None else found

    def _of_first_rank(self, line: BoundSymbol, x: TensorProxy) -> TensorProxy:
        """The first rank's result, on all ranks: each of them draws other numbers. The first dimension is gathered as
        if it were a single position, which is the first rank's part. The other parts are padding."""
        if not x.ndim:
            raise RuntimeError(
                f"{line.sym.name} draws random numbers for one number that all ranks of a batch hold, and they would "
                f"differ{place(line)}: let it have a dimension, pass it as an argument, or leave it out"
            )
        part = self.at(Split(0, 1, 1, x.shape[0]))
        return self.writer.emit(line, lambda: gather_parts(cut(x, part), part))[0]

    def _drawn_in_parts(self, line: BoundSymbol) -> bool:
        """Writes a line that draws random numbers for a value that all ranks hold: each draws a part of them, which are
        gathered. False if it cannot be."""
        call = self.torch_line(line)
        if call is None or len(call.results) != 1:
            return False
        (result,) = call.results
        for dim in reversed(range(result.ndim)):
            inner, rest = divmod(result.shape[dim], self.plan.ranks)
            placed = lead(call, 0, Split(dim, 1, self.plan.ranks, inner)) if inner and not rest else None
            if placed is None or placed.combine is not None or placed.results[0] is None:
                continue
            part = self.at(placed.results[0])
            pairs = zip(call.operands, placed.operands, strict=True)
            operands = [self.whole(o) if s is None else self.part(o, s) for o, s in pairs]
            (found,) = self.writer.on_parts(line, call, operands, [part.local_shape(tuple(result.shape))])
            self.know_whole(result, self.writer.emit(line, partial(gather_parts, found, part))[0])
            return True
        return False

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

    def _only_in_parts(self, proxy: Any) -> bool:
        """Whether a value was computed in parts, and the whole of it would have to be gathered."""
        return self.is_split(proxy) and self.gather_cost(proxy) > 0

    def splits(self, proxy: TensorProxy) -> Sequence[Split]:
        """The splits in which a value was computed."""
        if proxy.name in self.chosen:
            return [self.chosen[proxy.name]]
        value = self.values[proxy.name]
        return list(value.parts) if value.is_split else []

    def know_part(
        self, old: TensorProxy, split: Split, new: TensorProxy, *, native: bool = True, rows: bool = False
    ) -> None:
        """Notes a part of a recorded value. ``native``: that it was computed in parts. ``rows``: as for a value."""
        value = self.values[old.name]
        value.parts[split] = new
        new.tags.update(old.tags, [self.at(split)])  # whether it is detached; the part, for the inspector
        value.is_split |= native
        value.rows |= rows
        self.writer.name(new, old)

    def know_whole(self, old: TensorProxy, new: TensorProxy) -> None:
        """Notes a recorded value that all ranks hold as a whole."""
        self.values[old.name].whole = new
        new.tags.update(old.tags)
        self.writer.name(new, old)

    def whole(self, proxy: TensorProxy) -> TensorProxy:
        """The whole of a value: as it is, computed again from whole operands if less has to be sent, or gathered. Rows
        are gathered before they are moved, so that all that only moves them needs one gather."""
        value = self.values[proxy.name]
        if value.pending is not None:
            self._settle(value)
        most = value.bytes * value.is_split + (value.rows and value.line is not None and self._moves(value.line))
        if value.whole is None and value.line is not None and self.gather_cost(proxy) < most:
            self.as_whole(value.line)
        elif value.whole is None and not value.is_split:
            assert value.line is not None
            self.as_whole(value.line)
        if value.whole is None:
            split = self.splits(proxy)[0]
            x = self.part(proxy, split)
            (value.whole,) = self.writer.emit(value.line, lambda: gather_parts(x, self.at(split)))
            if self.writer.has_gradient(proxy) and not value.rows:  # Thunder would repeat only the wait of another one
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
        """The line as a call of torch; None if it is none, or a gather of what is given in parts."""
        if id(line) not in self._torch_lines:
            is_own = line.sym.id == gather_parts.id and part_at(line).plan is self.plan
            self._torch_lines[id(line)] = torch_line(line) if not is_own else None
        return self._torch_lines[id(line)]

    def at(self, split: Split, fill: int | None = None) -> Part:
        """This rank's part in a split."""
        return self._parts.setdefault((split, fill), Part(self.plan, split, fill))

    @property
    def everywhere(self) -> Part:
        """For collectives of values that are not split."""
        return self.at(NOT_SPLIT)


# ---- blocks ----


class Given(NamedTuple):
    """What a block is told about an argument: in which splits the caller has computed it, and whether the caller has
    the whole of it without gathering. ``rows``: as for a value."""

    splits: tuple[Split, ...]
    whole: bool
    rows: bool


class Made(NamedTuple):
    """A rewritten block: the arguments that it takes, in which split (None: whole), and the splits of its results."""

    block: Block
    takes: tuple[tuple[int, Split | None], ...]
    splits: tuple[Split | None, ...]
    rows: tuple[bool, ...]


class Blocks:
    """Rewrites blocks for the calls of one computation."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Made] = {}

    def call(self, to: Splitter, line: BoundSymbol) -> None:
        """Writes a call on parts."""
        block = block_of(line)
        assert block is not None
        args = [a for a in line.args if isinstance(a, TensorProxy)]
        known = ((tuple(to.splits(a)), to.gather_cost(a), to.values[a.name]) for a in args)
        given = tuple(Given(splits, cost < value.bytes, value.rows) for splits, cost, value in known)
        key = (id(block), given)
        if key not in self._made:
            name = unique_name(to.writer.trace, block.name)
            self._made[key] = _Inside(block, given, to).made(name, to.writer.trace.names)
        made = self._made[key]
        operands = [to.whole(args[i]) if split is None else to.part(args[i], split) for i, split in made.takes]
        found = to.writer.emit(line, lambda: made.block.symbol(*operands))
        for old, new, split, rows in zip(line.flat_proxy_outs, found, made.splits, made.rows, strict=True):
            if split is None:
                to.know_whole(old, new)
            else:
                to.know_part(old, split, new, rows=rows)


class _Inside(Splitter):
    """The lines of a block. Its arguments are taken as they are needed."""

    def __init__(self, block: Block, given: Sequence[Given], caller: Splitter) -> None:
        inexact = {p.name for p in block.inputs if dtypes.is_inexact_dtype(p.dtype)}
        rules = caller.rules._replace(call_block=Blocks().call)
        super().__init__(block.trace, caller.plan, rules, caller.remarks, inexact)
        self._block = block
        self._given = {p.name: (i, g) for i, (p, g) in enumerate(zip(block.inputs, given, strict=True))}
        self._inputs: dict[tuple[int, Split | None], TensorProxy] = {}
        pairs = zip(block.inputs, given, strict=True)
        self.values |= {p.name: Value(p, is_split=bool(g.splits), rows=g.rows) for p, g in pairs}

    def made(self, name: str, taken: set[str]) -> Made:
        self.follow_lines()
        outs = self._block.outputs
        splits = tuple(next(iter(self.splits(o)), None) for o in outs)
        outputs = [self.whole(o) if s is None else self.part(o, s) for o, s in zip(outs, splits, strict=True)]
        lines = self.writer.finished().bound_symbols
        inputs = tuple(self._inputs.values())
        final = [self.writer.final(o) for o in outputs]
        taken = taken | self.writer.trace.names
        block = Block(name, lines, inputs, final, taken, self._block.module)
        return Made(block, tuple(self._inputs), splits, tuple(self.values[o.name].rows for o in outs))

    def splits(self, proxy: TensorProxy) -> Sequence[Split]:
        if proxy.name in self._given:
            return self._given[proxy.name][1].splits
        return super().splits(proxy)

    def whole(self, proxy: TensorProxy) -> TensorProxy:
        if proxy.name in self._given and self._given[proxy.name][1].whole:
            return self._input(proxy, None)
        return super().whole(proxy)

    def part(self, proxy: TensorProxy, split: Split, fill: int | None = None) -> TensorProxy:
        if fill is None and proxy.name in self._given:
            splits = self.splits(proxy)
            if split in splits or not splits:
                return self._input(proxy, split)
        return super().part(proxy, split, fill)

    def gather_cost(self, proxy: TensorProxy, depth: int = 8) -> int:
        if proxy.name in self._given and self._given[proxy.name][1].whole:
            return 0
        return super().gather_cost(proxy, depth)

    def _input(self, proxy: TensorProxy, split: Split | None) -> TensorProxy:
        """An argument of the new block."""
        number, _ = self._given[proxy.name]
        if (number, split) not in self._inputs:
            shape = tuple(proxy.shape) if split is None else self.at(split).local_shape(tuple(proxy.shape))
            with tracectx(self.writer.trace):
                found = self._inputs[number, split] = TensorProxy(like=proxy, shape=shape)
            if split is not None and self._given[proxy.name][1].whole:  # a part of a parameter
                self._gathered.add(found.name)
        return self._inputs[number, split]


# ---- the border of a model ----


@dataclass
class Context:
    """The ranks that hold the parts of a sequence, and the dimension of the arguments that is the sequence.

    ``kept`` are the histories of inputs that are no arguments: parameters and buffers. ``returns_parts``: whether the
    model returns this rank's parts; ``experts``: whether it must have experts, for parts that are ranks' own batches.
    The pass adds to ``differentiated`` the names of arguments with a gradient, and to ``remarks`` what is computed on
    whole sequences.
    """

    plan: ContextPlan
    dim: int = 1
    kept: list[Any] = field(default_factory=list)
    differentiated: set[str] = field(default_factory=set)
    returns_parts: bool = False
    experts: bool = False
    remarks: dict[str, None] = field(default_factory=dict)


def add_input(to: Splitter, line: BoundSymbol, context: Context, *, sharded: bool) -> Value | None:
    """Adds an input, and returns what is known of it, if it is a tensor. ``sharded``: it is a parameter whose gradient
    is reduced, which adds up what ranks contribute."""
    to.writer.trace.bound_symbols.append(line)
    p = line.output
    if not isinstance(p, TensorProxy):
        return None
    value = to.values[p.name] = Value(p, whole=p, is_split=p.name in to.chosen)
    to.writer.taken.add(p.name)
    if p.requires_grad and not sharded and p.numel:
        context.differentiated.add(p.name)
        (value.whole,) = to.writer.emit(line, lambda: from_input(p, to.everywhere))
    return value


def add_return(to: Splitter, line: BoundSymbol, context: Context) -> None:
    """Adds the return line, with what the model returns for each value."""
    results = line.args[0]

    def returned(x: Any) -> Any:
        return _output(to, to.values[x.name], line, context) if _is_known(to, x) else x

    args = ({**results, "output": tree_map(returned, results["output"])},)
    to.writer.trace.bound_symbols.append(line.from_bsym(args=args))


def _is_known(to: Splitter, x: Any) -> bool:
    return isinstance(x, TensorProxy) and x.name in to.values


def _output(to: Splitter, value: Value, line: BoundSymbol, context: Context) -> TensorProxy:
    """What the model returns for a value: the whole, or this rank's part."""
    if value.line is None:  # an input
        return value.proxy
    if value.is_split and (value.whole is None or context.returns_parts):
        split = to.splits(value.proxy)[0]
        x = to.part(value.proxy, split)
        if context.returns_parts:
            if not to.is_even(split):
                chunks = to.plan.pieces * to.plan.ranks
                raise RuntimeError(
                    f'returns="part" needs sequences that divide into {chunks} chunks, and this one has '
                    f'{split.length} positions: pad the batch, or choose returns="whole"'
                )
            own = context.experts and dtypes.is_inexact_dtype(x.dtype)
            return to.writer.emit(line, lambda: to_own_output(x, to.at(split)))[0] if own else x
        return to.writer.emit(line, lambda: gather_output(x, to.at(split)))[0]
    whole = to.whole(value.proxy)
    if not dtypes.is_inexact_dtype(whole.dtype):
        return whole
    return to.writer.emit(line, lambda: to_output(whole, to.everywhere))[0]
