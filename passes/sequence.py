"""Rewrites a computation for parts of sequences or parameters: values, lines, blocks, and what a model returns.

Lines are written on other operands with the names, tags and sources of the recorded ones. What a gather needs comes
first among them, so that other lines compute while it is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from passes.analysis.calls import Block, block_of, differentiated, unique_name
from passes.analysis.dims import Placed, TorchLine, follow, lead, product_of, resized, torch_line
from passes.analysis.recognise import changes_values, is_random, is_return, is_unpack, names, part_at, properties
from passes.comm.sequence import (
    NOT_SPLIT,
    Part,
    cut,
    exchange_heads,
    gather_output,
    gather_parts,
    scatter_parts,
    sum_parts,
    to_output,
)
from passes.comm.symbols import Property
from passes.compat.jit import compile_data_and_stats, exempt_from_autocast, renamed, symbols_of_torch
from passes.compat.versions import Fakes
from passes.kernels.aten import Meta
from passes.kernels.torch_call import TorchCall, call_of
from passes.kernels.torch_call import executor as torch_calls
from passes.plan import Axis
from passes.plan.dims import views
from passes.plan.plan import ContextPlan, Split

import torch
from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.devices import to_torch_device
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transforms import is_constant_for_vjp
from torch.utils import _pytree as pytree

# ---- lines on other operands ----


def gathers_first(lines: Iterable[BoundSymbol]) -> list[BoundSymbol]:
    """The lines with each gather or exchange as early as possible. A line moves behind a gather only if it does not
    follow the first use of what was gathered, so that values live little longer: queries are computed after keys and
    values."""
    placed: list[BoundSymbol] = []
    waiting: list[BoundSymbol] = []  # lines since the last use of a gathered value
    gathered: set[str] = set()
    for bsym in lines:
        if bsym.sym.id in (gather_parts.id, exchange_heads.id):
            needed = _needed(waiting, names(bsym.flat_proxy_args))
            placed += [*needed, bsym]
            taken = set(map(id, needed))
            waiting = [b for b in waiting if id(b) not in taken]
            gathered |= names(bsym.flat_proxy_outs)
            continue
        waiting.append(bsym)
        fixed = is_unpack(bsym) or is_return(bsym) or changes_values(bsym)
        if fixed or not gathered.isdisjoint(names(bsym.flat_proxy_args)):
            placed += waiting
            waiting = []
    return placed + waiting


def _needed(lines: Sequence[BoundSymbol], wanted: set[str]) -> list[BoundSymbol]:
    """The lines that compute the values ``wanted``."""
    found = []
    for bsym in reversed(lines):
        if not wanted.isdisjoint(names(bsym.flat_proxy_outs)):
            found.append(bsym)
            wanted = wanted | names(bsym.flat_proxy_args)
    return found[::-1]


@contextmanager
def writing() -> Iterator[None]:
    """Around what writes lines of a recorded computation again, before autodiff. Casts are lines already, and detached
    values are marked, whatever the modes in which tracing has ended."""
    data, _ = compile_data_and_stats()
    torch_calls.join(data)
    enabled, data.is_grad_enabled = data.is_grad_enabled, True
    try:
        with exempt_from_autocast(data), langctx(Languages.TORCH):
            yield
    finally:
        data.is_grad_enabled = enabled


class Writer:
    """A new computation, which begins without lines.

    Args:
        old: the recorded computation.
        inputs: the names of its inputs that need a gradient; None: those that are marked.
    """

    def __init__(self, old: TraceCtx, inputs: set[str] | None = None) -> None:
        self.trace = from_trace(old)
        self.taken: set[str] = set()  # names of the recorded computation that new values have
        self._named: dict[Variable, TensorProxy] = {}  # by new value: the one of that name
        self._differentiated = differentiated(old, inputs)

    def emit(self, line: BoundSymbol | None, write: Callable[[], Any]) -> list[TensorProxy]:
        """Adds the lines that ``write`` makes, with the tags and the source of ``line``. Returns its results, which are
        detached if those of ``line`` are."""
        self.trace.push_scope([])
        try:
            with tracectx(self.trace):
                result = write()
        finally:
            lines = self.trace.pop_scope()
        for bsym in lines:
            if line is not None:
                bsym.tags |= line.tags
                bsym.source_filename, bsym.source_positions = line.source_filename, line.source_positions
        self.trace.bound_symbols += lines
        results = [p for p in tree_flatten(result)[0] if isinstance(p, Proxy)]
        if line is not None and any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in o.tags for o in line.flat_proxy_outs):
            for p in results:
                p.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        return results

    def swapped(self, line: BoundSymbol, swap: dict[Variable, Proxy]) -> BoundSymbol:
        """Adds a line as it was recorded, on other operands. Its results keep their names unless these are taken."""
        for o in line.flat_proxy_outs:
            if o.name in self.taken and variableify(o) not in swap:
                swap[variableify(o)] = renamed(o, self.trace.make_name())
            self.taken.add(o.name)
        new = line.from_bsym_swap_proxies(swap)
        new.tags = set(line.tags)
        self.trace.bound_symbols.append(new)
        return new

    def on_parts(
        self, line: BoundSymbol, call: TorchLine, operands: Sequence[TensorProxy], shapes: Sequence[tuple[int, ...]]
    ) -> list[TensorProxy]:
        """Adds a line on other operands, with results of these shapes."""
        args, kwargs = resized(call, shapes)
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_proxy)
        given = iter(operands)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, TensorProxy) else x for x in flat], spec)
        found = self.as_call(line, call, args, kwargs)
        for new, shape in zip(found, shapes, strict=True):
            if tuple(new.shape) != tuple(shape):
                raise AssertionError(f"{call.name} of a part has shape {tuple(new.shape)}, not {shape}{place(line)}")
        return found

    def as_call(self, line: BoundSymbol, call: TorchLine, args: Any, kwargs: Any) -> list[TensorProxy]:
        """Adds a call of the line's function with other arguments, but as many tensors."""
        made = call_of(line.sym)
        if made is None:
            return self.emit(line, lambda: line.sym(*args, **kwargs))
        return self.torch(line, made.function, args, kwargs, self.grads(line, call), like=made)

    def torch(
        self,
        line: BoundSymbol,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        grads: Sequence[bool],
        *,
        like: TorchCall | None = None,
        name: str = "",
    ) -> list[TensorProxy]:
        """Adds a line that calls torch's function, in the modes of the call ``like``. ``grads``: which of its tensors
        need a gradient. ``name``: of the function in the trace, by default that of a part."""
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_proxy)
        places = [i for i, x in enumerate(flat) if isinstance(x, TensorProxy)]
        operands = [flat[i] for i in places]
        absent = _absent(operands)
        inputs = [_meta(p, grad, absent) for p, grad in zip(operands, grads, strict=True)]
        flat = [None if isinstance(x, TensorProxy) else x for x in flat]
        options: dict[str, Any] = {"random": is_random(line)}
        if like is not None:
            options = {"random": like.random, "written": like.written, "autocast": like.autocast}
        name = name or f"torch_{getattr(function, '__name__', 'call').strip('_')}_part"
        call = TorchCall(
            name=unique_name(self.trace, name), function=function, flat=flat, spec=spec, places=places,
            inputs=inputs, results=(), absent=absent, **options,
        )  # fmt: skip
        with Fakes(allow_non_fake_inputs=True), torch.set_grad_enabled(any(grads)):
            call.results = [Meta.of(t) for t in call.call([m.empty().requires_grad_(m.grad) for m in inputs])]
        if not call.results:  # the function returns its argument, if that lies as asked for
            return self.emit(line, lambda: symbols_of_torch()[function](*args, **kwargs))
        return self.emit(line, lambda: call.symbol(*operands))

    def grads(self, line: BoundSymbol, call: TorchLine) -> list[bool]:
        """Which operands of a line need a gradient."""
        flows = not is_constant_for_vjp(line)
        return [flows and self.has_gradient(o) for o in call.operands]

    def has_gradient(self, proxy: TensorProxy) -> bool:
        """Whether a value of the recorded computation has a gradient."""
        return proxy.name in self._differentiated and dtypes.is_inexact_dtype(proxy.dtype)

    def name(self, new: TensorProxy, old: TensorProxy) -> None:
        """Gives a new value the name of the recorded one, if no other has it."""
        if old.name not in self.taken:
            self.taken.add(old.name)
            self._named[variableify(new)] = renamed(new, old.name)

    def finished(self) -> TraceCtx:
        """The new computation."""
        lines = gathers_first(self.trace.bound_symbols)
        self.trace.bound_symbols = [b.from_bsym_swap_proxies(self._named) for b in lines]
        return self.trace

    def final(self, proxy: TensorProxy) -> TensorProxy:
        """A value as it is called in the finished computation."""
        return self._named.get(variableify(proxy), proxy)


def place(line: BoundSymbol | None) -> str:
    """The line of the user's program, in parentheses; empty if it is not known."""
    if line is None or line.source_filename is None or line.source_positions is None:
        return ""
    return f" ({line.source_filename}:{line.source_positions.lineno})"


def _is_proxy(value: Any) -> bool:
    return isinstance(value, Proxy)


def _absent(operands: Sequence[TensorProxy]) -> torch.device | None:
    """The device of the step if torch sees none here. The CPU then stands for it."""
    devices = (to_torch_device(p.device) for p in operands)
    return next((d for d in devices if d.type == "cuda" and not torch.cuda.is_available()), None)


def _meta(p: TensorProxy, grad: bool, absent: torch.device | None) -> Meta:
    shape = tuple(p.shape)
    stride = torch.empty(shape, device="meta").stride()
    device = to_torch_device(p.device) if absent is None else torch.device("cpu")
    return Meta(shape, stride, dtypes.to_torch_dtype(p.dtype), device, grad)


# ---- the walk ----


MOVES = Property.VIEW | Property.INDEX | Property.COPY | Property.CAST
EXPANDS = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "reshape"})


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

    ``is_split``: it was computed in parts. Else ``parts`` are computed from the whole, or instead of it. ``rows``: of
    these, which follow from rows of the sum of a product.
    """

    proxy: TensorProxy
    line: BoundSymbol | None = None
    whole: TensorProxy | None = None
    parts: dict[Split, TensorProxy] = field(default_factory=dict)
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
        """Adds up what ranks have of a product's result, of which each gets its rows if they divide."""
        dims = range(old.ndim - 1) if self.rules.rows and (bias is None or bias.ndim == 1) else ()
        splits = (Split(d, 1, self.plan.ranks, old.shape[d] // self.plan.ranks) for d in dims)
        split = next((s for s in splits if s.inner and s.size == old.shape[s.dim]), None)

        def total() -> Any:
            found = sum_parts(x, self.everywhere) if split is None else scatter_parts(x, self.at(split))
            return found if bias is None else ltorch.add(found, bias)

        (found,) = self.writer.emit(line, total)
        if split is None:
            return self.know_whole(old, found)
        self.know_part(old, split, found, rows=True)

    def _combined(self, line: BoundSymbol, x: TensorProxy, how: str) -> TensorProxy:
        def combine() -> Any:
            total = sum_parts(x, self.everywhere)
            return total if how == "sum" else ltorch.mul(total, 1.0 / self.plan.ranks)

        return self.writer.emit(line, combine)[0]

    def _mixed(self, line: BoundSymbol, call: TorchLine) -> None:
        """Computes a line on whole operands. A result of the same sequence is cut again."""
        operands = [o for o in call.operands if self.is_split(o) and not self.values[o.name].rows]
        splits = [s for o in operands for s in self.splits(o)]
        if any(dtypes.is_float_dtype(o.dtype) for o in operands):
            what = "sequences" if self.plan.axis is Axis.CONTEXT else "values"
            self.remarks[f"{call.name} is computed on whole {what}{place(line)}"] = None
        self.as_whole(line)
        for result in call.results:
            whole = self.values[result.name].whole
            split = next((s for s in splits if s.dim < result.ndim and result.shape[s.dim] == s.size), None)
            if split is not None and whole is not None:
                self.know_part(result, split, self._cut(whole, self.at(split), line), native=True)

    def as_whole(self, line: BoundSymbol) -> None:
        """Writes a line on whole operands."""
        if is_random(line) and self.rules.eager and self._drawn_in_parts(line):
            return
        if is_random(line):
            ranks, remedy = "tensor_parallel", ""
            if self.plan.axis is Axis.CONTEXT:
                ranks, remedy = "a sequence", "apply it to a value that is computed from the split arguments, "
            raise RuntimeError(
                f"{line.sym.name} draws random numbers for a value that all ranks of {ranks} hold as a whole, and they "
                f"would differ{place(line)}: {remedy}pass the numbers as an argument, or leave it out"
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

    def splits(self, proxy: TensorProxy) -> Sequence[Split]:
        """The splits in which a value was computed."""
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
        """The whole of a value: as it is, computed again from whole operands if less has to be sent, or gathered."""
        value = self.values[proxy.name]
        if value.whole is None and value.line is not None and self.gather_cost(proxy) < value.bytes * value.is_split:
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


# ---- arguments of lines ----


def attention_arguments(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    **options: Any,
) -> tuple[Any, ...]:
    return query, key, value, attn_mask, dropout_p, is_causal, options


def loss_arguments(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Any, ...]:
    return input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing


def is_plain_embedding(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    scale_grad_by_freq: Any = False,
    sparse: Any = False,
) -> bool:
    """Whether an embedding with these arguments only takes rows, and its gradient only adds them up."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        return False
    return padding_idx is None or (isinstance(padding_idx, int) and padding_idx >= 0)


def of_each_dim(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """An index with a slice or a number for each dim; None if it is another one."""
    each = views.of_each_dim(index, ndim)
    return tuple(each) if all(type(i) in (slice, int) for i in each) else None


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
                self._inputs[number, split] = TensorProxy(like=proxy, shape=shape)
        return self._inputs[number, split]


# ---- the border of a model ----


@dataclass
class Context:
    """The ranks that hold the parts of a sequence, and the dimension of the arguments that is the sequence.

    ``kept`` are the histories of inputs that are no arguments: parameters and buffers. ``returns_parts``: whether the
    model returns this rank's parts. The pass adds to ``differentiated`` the names of arguments with a gradient, and to
    ``remarks`` what is computed on whole sequences.
    """

    plan: ContextPlan
    dim: int = 1
    kept: list[Any] = field(default_factory=list)
    differentiated: set[str] = field(default_factory=set)
    returns_parts: bool = False
    remarks: dict[str, None] = field(default_factory=dict)


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
                raise RuntimeError(
                    f'returns="part" needs sequences that divide into {2 * to.plan.ranks} chunks, and this one has '
                    f'{split.length} positions: pad the batch, or choose returns="whole"'
                )
            return x
        return to.writer.emit(line, lambda: gather_output(x, to.at(split)))[0]
    whole = to.whole(value.proxy)
    if not dtypes.is_inexact_dtype(whole.dtype):
        return whole
    return to.writer.emit(line, lambda: to_output(whole, to.everywhere))[0]
