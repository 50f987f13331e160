"""Pass: collectives of values run beside compute.

A collective of a value, such as a part of a sequence or of a sum over ranks, is issued as early as its operand exists,
and waited for as late as its result is used:

    ft3 = all_gather_parts(k, dim2_of_16)        right after k
    ...                                             compute that needs no keys
    keys = wait_all_gather_parts(ft3, ...)       right before the attention

Where compute would have to wait, lines that it does not need yet are moved in between. In the backward of a product,
gradients of parameters are such lines:

    t5 = mm(t1, w)                               the gradient of the product's operand
    ft6 = reduce_scatter_parts(t5, ...)
    t4 = mm(t2, x)                               that of its parameter, moved here from above t5
    t7 = wait_reduce_scatter_parts(ft6, ...)

Note [Moved lines]. What a line needs still comes before it. Only lines of torch's own operators move, not those that
change a value in place or draw random numbers, and none moves past such a change. The cost model says how many move:
twice what the collective takes, the last ones first, for it and the next one. A line stays behind two collectives at
most, because its operands take memory until then. In a trace that reduces gradients itself none moves: they would be
in flight later, beside activations of the next block.

Note [Products in pieces]. Rows that are gathered for a product, or a product's that are summed and scattered, need not
wait for each other. One line stands for the collective and the products next to it:

    (h, y) = all_gather_products(x, part, products_y, w)      y = linear(h, w), h = all_gather_parts(x, part)
    t8 = reduce_scatter_products(x, part, products_t8, w)     t8 = reduce_scatter_parts(linear(x, w), part)

It broadcasts the rows of each rank, or reduces them to it, and multiplies some while others travel, in as many pieces
as the cost model says. The lines that it stands for are its subsymbols: the proof, FLOPs and the list of collectives
read these. It is put where it is ready sooner than these would be, one after the other. Source: Wang et al., Overlap
communication with dependent computation via decomposition in large deep learning models (2023,
https://doi.org/10.1145/3567955.3567959).

All of it is a function of the trace and its plans. These are equal on all ranks, and so is the order of collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from passes.analysis.recognise import (
    ISSUED,
    InModule,
    changes_values,
    identity,
    is_backward,
    is_collective,
    is_deletion,
    is_foreign,
    is_random,
    is_return,
    is_sequence_issue,
    is_sequence_wait,
    is_unpack,
    names,
    part_at,
)
from passes.analysis.seconds import Clock, Flight, compute_seconds, products_seconds, sequence_seconds
from passes.comm.sequence import GATHER, SCATTER, Product, Products, gather_products, sum_products
from passes.compat.jit import function_of
from passes.kernels.aten import operator_of
from passes.kernels.torch_call import Line
from passes.plan import CostModel

import torch
import torch.nn.functional as F
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors import torchex
from thunder.executors.passes import del_last_used


def overlap_sequence(trace: TraceCtx) -> TraceCtx:
    """Lets collectives of values run beside compute.

    Takes: a lowered forward or backward, or that of a block.
    Gives: products in pieces beside collectives of their rows, where that is sooner; each other collective of a value
    issued right after the line that makes its operand, and waited for right before the first line that reads its
    result; lines in between as Note [Moved lines] says.
    No-op when: the trace has none.
    """
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    first = next(filter(is_sequence_issue, lines), None)
    if first is None:
        return trace
    new, cost = from_trace(trace), part_at(first).plan.cost
    placed = _apart(_Pieces(lines, cost).run())
    new.bound_symbols = placed if any(map(is_collective, lines)) else _Walk(cost).run(placed)
    return del_last_used(new, clear_mutable_collections=is_backward(trace))


# ---- products in pieces ----


PIECES = (1, 2, 4)  # of a rank's rows
# The argument that has the rows of a product, by function and by operator
ROWS: Mapping[Any, int] = {
    F.linear: 0, torch.mm: 0, torch.matmul: 0, torch.addmm: 1,
    torch.ops.aten.linear.default: 0, torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1,
}  # fmt: skip
# Lines that give a contiguous value other dimensions
RESHAPES = frozenset({
    prims.PrimIDs.RESHAPE, torchex.torch_prims_reshape_impl.id, "torch.flatten", "torch.reshape", "Tensor.view",
    torch.ops.aten.view.default, torch.ops.aten.reshape.default,
})  # fmt: skip


def rows_at(bsym: BoundSymbol) -> int | None:
    """The argument of a line of whose rows its result is a product; None if the line is no such product."""
    line = bsym.sym.id
    function = line.call.function if isinstance(line, Line) and not line.kind else operator_of(bsym.sym)
    at = ROWS.get(function)
    tensors = all(isinstance(a, TensorProxy) for a in bsym.args) and not bsym.kwargs
    if at is None or not tensors or not isinstance(bsym.output, TensorProxy):
        return None
    rows, others = bsym.args[at], [a for i, a in enumerate(bsym.args) if i != at]
    each = rows.ndim > 1 and bsym.output.shape[:-1] == rows.shape[:-1]
    return at if each and sorted(o.ndim for o in others) in ([2], [1, 2]) else None


class _Pieces:
    """Finds products that can be computed while their rows travel, and are ready sooner so."""

    def __init__(self, lines: Sequence[BoundSymbol], cost: CostModel) -> None:
        self.lines, self.cost = lines, cost
        self.makers = {o.name: i for i, b in enumerate(lines) for o in b.flat_proxy_outs}
        self.readers: dict[str, list[int]] = {}
        for i, b in enumerate(lines):
            for name in _read(b):
                self.readers.setdefault(name, []).append(i)
        self.gone: set[int] = set()  # lines that others stand for
        self.instead: dict[int, list[BoundSymbol]] = {}

    def run(self) -> list[BoundSymbol]:
        for i, bsym in enumerate(self.lines):
            if is_sequence_issue(bsym):
                op, of_rows = ISSUED[bsym.sym.id], part_at(bsym).is_of_rows(tuple(bsym.args[0].shape))
                if of_rows and op is SCATTER:
                    self._sum(i)
                elif of_rows and op is GATHER:
                    self._gather(i)
        lines = enumerate(self.lines)
        return [new for i, b in lines for new in self.instead.get(i, () if i in self.gone else (b,))]

    def _sum(self, issue: int) -> None:
        """Rows of a product that are sent."""
        (wait,), value, path = self.readers[self.lines[issue].output.name], self.lines[issue].args[0], list[int]()
        while self.readers[value.name] == [path[0] if path else issue]:
            maker = self.makers.get(value.name)
            if maker is None or maker in self.gone or any(map(changes_values, self.lines[maker:issue])):
                return
            path.insert(0, maker)
            line = self.lines[maker]
            if (at := rows_at(line)) is not None:
                self._put(issue, [*path, issue, wait], path[:1], line.args[at])
            if not _reshapes(line):
                return
            value = line.args[0]

    def _gather(self, issue: int) -> None:
        """Products of rows that arrive: the first one, and others whose operands are there by then."""
        (wait,) = self.readers[self.lines[issue].output.name]
        whole = self.lines[wait].output.name
        reads, views = self._products_of(whole)
        if not reads or (later := self._later(wait, first := min(reads))) is None:
            return
        late = names([self.lines[i].flat_proxy_outs for i in (wait, *later)])
        taken = [i for i in sorted(reads) if self._has_operands(i, reads[i], first, late)]
        path = sorted({v for i in taken for v in views[reads[i]]})
        if not self._put(first, [issue, wait, *path, *taken], taken, self.lines[issue].args[0]):
            return
        for v in reversed(path):  # others may read these, too
            if not self.gone.issuperset(self.readers[self.lines[v].output.name]):
                self.gone.discard(v)
        self.instead[first] += [self.lines[i] for i in later if i not in self.gone]
        self.gone |= set(later)

    def _products_of(self, whole: str) -> tuple[dict[int, str], dict[str, tuple[int, ...]]]:
        """The products of a value's rows, each with the name by which it reads them, and the reshapes that lead to
        each name."""
        reads, views = dict[int, str](), {whole: tuple[int, ...]()}
        left = [whole]
        while left:
            name = left.pop()
            for i in self.readers.get(name, ()):
                line = self.lines[i]
                if _reshapes(line):
                    views[line.output.name] = (*views[name], i)
                    left.append(line.output.name)
                elif i not in self.gone and (at := rows_at(line)) is not None and line.args[at].name == name:
                    reads[i] = name
        return reads, views

    def _has_operands(self, product: int, rows: str, first: int, late: Collection[str]) -> bool:
        """Whether all operands but its rows are there before the line ``first``, and not ``late``."""
        others = names(self.lines[product].args) - {rows}
        return others.isdisjoint(late) and all(self.makers.get(name, -1) < first for name in others)

    def _later(self, wait: int, first: int) -> list[int] | None:
        """The lines between the arrival of rows and the first product that depend on them: they come after it. None if
        one of them has to stay."""
        depends, found = names(self.lines[wait].output), list[int]()
        for i in range(wait + 1, first):
            line = self.lines[i]
            if changes_values(line):
                return None
            if not depends.isdisjoint(_read(line)):
                if not _moves(line):
                    return None
                found.append(i)
                depends |= names(line.flat_proxy_outs)
        return found

    def _put(self, at: int, covered: Sequence[int], products: Sequence[int], rows: TensorProxy) -> bool:
        """Puts a line that stands for those which are ``covered`` in the place of one, if it is ready sooner."""
        lines = [self.lines[i] for i in covered]
        (issue,) = filter(is_sequence_issue, lines)
        apart = sequence_seconds(self.cost, issue) + sum(compute_seconds(self.cost, b) for b in lines)
        count = part_at(issue).split.length // part_at(issue).plan.ranks
        seconds = {n: products_seconds(self.cost, lines, n).total for n in PIECES if count % n == 0}
        pieces = min(seconds, key=lambda n: seconds[n])
        if seconds[pieces] >= apart:
            return False
        self.instead[at] = [line_in_pieces(lines, [self.lines[i] for i in products], rows, pieces)]
        self.gone |= {*covered}
        return True


def _reshapes(bsym: BoundSymbol) -> bool:
    """Whether a line gives the rows of a value other dimensions."""
    if identity(bsym.sym) not in RESHAPES or not isinstance(bsym.output, TensorProxy):
        return False
    return bsym.output.ndim > 0 and bsym.output.shape[-1:] == bsym.args[0].shape[-1:]


def line_in_pieces(
    lines: Sequence[BoundSymbol], products: Sequence[BoundSymbol], rows: TensorProxy, pieces: int
) -> BoundSymbol:
    """The line that stands for ``lines``: the collective of ``rows``, and ``products``."""
    (issue,), (wait,) = filter(is_sequence_issue, lines), filter(is_sequence_wait, lines)
    gathers = ISSUED[issue.sym.id] is GATHER
    others = {a.name: a for b in products for i, a in enumerate(b.args) if i != rows_at(b)}
    made, results = list[Product](), [b.output for b in products] if gathers else [wait.output]
    for b in products:
        at, order = rows_at(b), list(others)
        assert at is not None
        numbers = [order.index(a.name) for i, a in enumerate(b.args) if i != at]
        made.append(Product(function_of(b), at, tuple(numbers)))
    name, shapes = "_".join(["products", *(o.name for o in results)]), [tuple(o.shape) for o in results]
    of = Products(name, made, shapes, pieces)
    sym, output = (gather_products, (wait.output, *results)) if gathers else (sum_products, wait.output)
    line = sym.bind(rows, part_at(issue), of, *others.values(), output=output, subsymbols=tuple(lines))
    first, place = products[0], {tag for tag in products[0].tags if isinstance(tag, InModule)}
    return line.from_bsym(tags=place, source_filename=first.source_filename, source_positions=first.source_positions)


def not_in_pieces(line: BoundSymbol) -> str:
    """Why a line with products does not compute, in pieces of rows, what its subsymbols do; empty if it does."""
    rows, part, of, *others = line.args
    products = [b for b in line.subsymbols if rows_at(b) is not None]
    (issue,), (wait,) = (list(filter(f, line.subsymbols)) for f in (is_sequence_issue, is_sequence_wait))
    gathers = ISSUED[issue.sym.id] is GATHER
    if len(products) != len(of.products):
        return f"it calls {len(of.products)} functions for {len(products)} products"
    if (line.sym.id == gather_products.id) is not gathers or (ISSUED[issue.sym.id] is not SCATTER and not gathers):
        return f"{issue.sym.name} is another collective"
    rows_of_piece = part.split.length % (part.plan.ranks * of.pieces) == 0
    if part_at(issue) != part or not part.is_of_rows(tuple(issue.args[0].shape)) or not rows_of_piece:
        return f"{part.name} is no part of rows"
    begins = wait.output if gathers else products[0].output
    same = {begins.name} | {b.output.name for b in line.subsymbols if _reshapes(b)}
    sent, results = issue.args[0], [wait.output, *(b.output for b in products)] if gathers else [wait.output]
    read = {b.args[rows_at(b)].name for b in products}
    if not (read <= same and rows.name == sent.name if gathers else sent.name in same and read == {rows.name}):
        return "rows are others"
    for product, b in zip(of.products, products, strict=True):
        called = [a.name for i, a in enumerate(b.args) if i != product.at]
        if product.function is not function_of(b) or product.at != rows_at(b):
            return f"{b.sym.name} is another function"
        if [others[i].name for i in product.others] != called:
            return f"{b.sym.name} has other operands"
    shapes, made = [tuple(o.shape) for o in results[gathers:]], [o.name for o in line.flat_proxy_outs]
    return "" if list(of.shapes) == shapes and made == [o.name for o in results] else "results are others"


def _apart(lines: list[BoundSymbol]) -> list[BoundSymbol]:
    """Collectives as early as their operands exist, and waits as late as results are used."""
    issues: dict[str, list[BoundSymbol]] = {}  # by operand
    for b in filter(is_sequence_issue, lines):
        issues.setdefault(b.args[0].name, []).append(b)
    waits = {b.output.name: b for b in lines if is_sequence_wait(b)}  # by result
    placed: list[BoundSymbol] = []
    ready: list[BoundSymbol] = []  # whose operands exist, before the first line of compute
    sent = {issue.output.name: issue.args[0].name for found in issues.values() for issue in found}

    def add(bsym: BoundSymbol) -> None:
        placed.append(bsym)
        for o in bsym.flat_proxy_outs:
            for issue in issues.pop(o.name, ()):
                if is_unpack(bsym):
                    ready.append(issue)
                else:
                    add(issue)

    def finish(name: str) -> None:
        wait = waits.pop(name)
        if (operand := sent[wait.args[0].name]) in waits:  # gathered over some ranks, then over others
            finish(operand)
        add(wait)

    for bsym in lines:
        if is_sequence_issue(bsym) or is_sequence_wait(bsym):
            continue
        if not is_unpack(bsym):
            while ready:
                add(ready.pop(0))
        read = _read(bsym)
        for name in [name for name in waits if name in read]:
            finish(name)
        add(bsym)
    return placed


def _read(bsym: BoundSymbol) -> set[str]:
    return names(bsym.args) if is_return(bsym) else names(bsym.flat_proxy_args)


class _Walk:
    """One walk over the lines, with the time of compute and that at which links are free."""

    def __init__(self, cost: CostModel) -> None:
        self.clock = Clock(cost)
        self.flights: dict[str, Flight] = {}  # by future
        self.lines: list[BoundSymbol] = []
        self.start = 0  # lines from here on may still be moved
        self.later: deque[BoundSymbol] = deque()  # lines that have been moved, and come after a collective's issue
        self.made_later: set[str] = set()
        self.left = 0  # how many of them have stayed behind one collective

    def run(self, lines: Iterable[BoundSymbol]) -> list[BoundSymbol]:
        for bsym in lines:
            if is_return(bsym) or changes_values(bsym):
                self._emit_later(len(self.later))
            read = _read(bsym) if self.later else set[str]()
            while not self.made_later.isdisjoint(read):
                self._emit_later(1)
            if is_sequence_wait(bsym):
                self._wait(self.flights[bsym.args[0].name])
            if is_sequence_issue(bsym):
                self._issue(bsym)
            else:
                self._emit(bsym)
            if changes_values(bsym) or is_sequence_wait(bsym):
                self.start = len(self.lines)
        return self.lines

    def _emit(self, bsym: BoundSymbol) -> None:
        self.lines.append(bsym)
        self.clock.compute(compute_seconds(self.clock.cost, bsym))

    def _emit_later(self, count: int) -> None:
        for _ in range(count):
            bsym = self.later.popleft()
            self.made_later -= {o.name for o in bsym.flat_proxy_outs}
            self.left -= 1
            self._emit(bsym)
            self.start = len(self.lines)  # it moves once

    def _issue(self, issue: BoundSymbol) -> None:
        self._move(issue, 2 * sequence_seconds(self.clock.cost, issue))
        self.lines.append(issue)
        self.flights[issue.output.name] = self.clock.issue(issue)
        self.start = len(self.lines)

    def _wait(self, flight: Flight) -> None:
        while self.later and self.clock.now < flight.done:
            self._emit_later(1)
        self._emit_later(max(self.left, 0))
        self.left = len(self.later)
        self.clock.wait(flight)

    def _move(self, issue: BoundSymbol, seconds: float) -> None:
        """Moves lines that a collective's operand does not need, for so many seconds, to ``later``."""
        kept, moved, needed = [], [], _read(issue)
        for bsym in reversed(self.lines[self.start :]):
            made = {o.name for o in bsym.flat_proxy_outs}
            if seconds > 0 and needed.isdisjoint(made) and _moves(bsym):
                moved.append(bsym)
                took = compute_seconds(self.clock.cost, bsym)
                seconds -= took
                self.clock.compute(-took)
                self.made_later |= made
            else:
                kept.append(bsym)
                needed |= _read(bsym)
        self.lines[self.start :] = reversed(kept)
        self.later.extend(reversed(moved))


def _moves(bsym: BoundSymbol) -> bool:
    """Whether a line may come later: an operator of ATen, or a function of torch or Thunder, that makes a value."""
    sym = bsym.sym
    known = operator_of(sym) is not None or sym.executor is None or sym.executor.name == "torch"
    makes = bool(bsym.flat_proxy_outs) and not is_unpack(bsym)
    return known and makes and not (is_foreign(sym) or changes_values(bsym) or is_random(bsym))
