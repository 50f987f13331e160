"""Whether collectives do what their laws say: each is run once in this process, on tiny tensors, for a few ranks.

A law (:mod:`passes.proof.laws`) says what a collective means. Here the very functions that a step's lines call run for
two or three ranks, one thread for each, whose process groups are a table in memory. What they return is compared with
the law, written down once more and without the layouts, plans and buffers of the real thing:

    rank r holds the rows r k to (r + 1) k of a parameter, with k = ceil(rows / ranks), or the whole, or nothing
    gathered: the whole, in the dtype of its use                        whatever the padding holds
    reduced: this rank's part of the sum, by the divisor                padded with zeros
    if members are cut: each rank gets its chunk, and adds the gradient of its chunk
    a sequence of L positions: chunks r and 2 N - 1 - r of ceil(L / 2 N), or the whole, or some heads of the whole
    a dim of a parameter of L positions: chunk r of ceil(L / N)

The gradient of a collective A of sequences is its adjoint A': <A x, y> = <x, A' y> for all x and y. Inside the model
<a, b> is the sum over ranks of what each one holds; at its border, where all hold the same, it is that of one rank.

Collectives that differ only in their members or in the length of a sequence are run once, and the result is kept.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from queue import Queue
from typing import Any, Literal, NamedTuple

from passes.analysis.calls import block_functions, block_of
from passes.analysis.recognise import (
    AWAITED,
    GATHERS,
    ISSUED,
    TRIP_WAITS,
    TRIPS,
    bucket_of,
    is_issue,
    is_products,
    is_sequence_issue,
    part_at,
)
from passes.comm import quantized, sequence
from passes.comm.sequence import Part
from passes.comm.symbols import Away, CollectiveOp
from passes.compat.jit import function_of, grad_rule_of
from passes.kernels.parts import ChunkedLoss, LossOfParts, PartOfEmbedding, PartOfLoss
from passes.kernels.torch_call import call_of
from passes.plan import Bucket, BucketPlan, Member, Placement, ShardedParameter
from passes.plan.plan import ContextPlan, Split, Wire
from passes.plan.runtime import HostMemory, PlainRuntime

import torch
import torch.distributed as dist
import torch.nn.functional as F
from thunder.core import devices, dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

SHAPES = ((5, 2), (3,), (4, 3))  # of the members: the last rank has padding, or nothing
CUTS = {  # of the members of which two ranks have parts of one or two pieces: how they are cut
    1: {(6, 4): Split(0, 1, 2, 3), (4,): Split(0, 1, 2, 2), (5, 4): Split(1, 1, 2, 2), (12, 2): Split(0, 3, 2, 2)},
    2: {(8, 4): Split(0, 1, 4, 2), (4,): Split(0, 1, 4, 1), (5, 4): Split(1, 1, 4, 1), (12, 2): Split(0, 3, 4, 1)},
}  # fmt: skip
CUTS[1][16, 2] = Split(0, 4, 2, 2, (2, 1, 1))  # queries that share keys
LARGE = ((7, 12000), *SHAPES)  # with one that is a message by itself, and is large enough for wires
PATIENCE = 20.0  # seconds until a rank is taken for lost


# ---- ranks in one process ----


class _Table:
    """The messages of a group's ranks. The nth operation of a rank is matched with the nth one of the others."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.here = threading.Condition()
        self.given: dict[int, dict[int, Any]] = defaultdict(dict)  # by operation and rank
        pairs = product(range(ranks), repeat=2)
        self.messages: dict[Any, Queue[torch.Tensor]] = {pair: Queue() for pair in pairs}  # by sender and receiver

    def all_given(self, operation: int) -> list[Any]:
        with self.here:
            if not self.here.wait_for(lambda: len(self.given[operation]) == self.ranks, PATIENCE):
                raise TimeoutError("a rank did not come to a collective")
            return [self.given[operation][rank] for rank in range(self.ranks)]


class _Work:
    """The rest of an operation on one rank, in the place of torch's ``Work``. ``finish`` fills the rank's buffers."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self, *args: Any) -> bool:
        self._finish()
        self._finish = lambda: None
        return True


class _Group:
    """One rank's group, with the methods of torch's process groups that collectives use."""

    def __init__(self, table: _Table, rank: int) -> None:
        self._table, self._rank, self._next = table, rank, 0

    def size(self) -> int:
        return self._table.ranks

    def rank(self) -> int:
        return self._rank

    def _meet(self, given: Any, finish: Callable[[list[Any]], None]) -> _Work:
        operation, self._next = self._next, self._next + 1
        with self._table.here:
            self._table.given[operation][self._rank] = given
            self._table.here.notify_all()
        return _Work(lambda: finish(self._table.all_given(operation)))

    def _allgather_base(self, into: torch.Tensor, row: torch.Tensor, *options: Any) -> _Work:
        return self._meet(row.clone(), lambda rows: _copy(into.view(-1), torch.cat([r.view(-1) for r in rows])))

    def allgather(self, into: Sequence[Sequence[torch.Tensor]], row: Sequence[torch.Tensor], *options: Any) -> _Work:
        def finish(rows: list[torch.Tensor]) -> None:
            for place, value in zip(into[0], rows, strict=True):
                _copy(place, value)

        return self._meet(row[0].clone(), finish)

    def _reduce_scatter_base(self, into: torch.Tensor, rows: torch.Tensor, options: Any) -> _Work:
        def finish(found: list[torch.Tensor]) -> None:
            total = self._total(found, options).view(-1)
            _copy(into.view(-1), total[self._rank * into.numel() : (self._rank + 1) * into.numel()])

        return self._meet(rows.clone(), finish)

    def reduce_scatter(
        self, into: Sequence[torch.Tensor], rows: Sequence[Sequence[torch.Tensor]], options: Any
    ) -> _Work:
        def finish(found: list[list[torch.Tensor]]) -> None:
            _copy(into[0], self._total([row[self._rank] for row in found], options))

        return self._meet([r.clone() for r in rows[0]], finish)

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> _Work:
        return self._meet(tensors[0].clone(), lambda found: _copy(tensors[0], self._total(found, options)))

    def alltoall_base(
        self, into: torch.Tensor, rows: torch.Tensor, into_sizes: Sequence[int], sizes: Sequence[int], *options: Any
    ) -> _Work:
        given = rows.split(list(sizes) or len(rows) // self.size())

        def finish(found: list[list[torch.Tensor]]) -> None:
            _copy(into, torch.cat([pieces[self._rank] for pieces in found]))

        return self._meet([piece.clone() for piece in given], finish)

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> _Work:
        return self._meet(tensors[0].clone(), lambda found: _copy(tensors[0], found[options.rootRank]))

    def reduce(self, tensors: Sequence[torch.Tensor], options: Any) -> _Work:
        def finish(found: list[torch.Tensor]) -> None:
            is_root = options.rootRank == self._rank
            _copy(tensors[0], self._total(found, options) if is_root else torch.full_like(tensors[0], 7.0))

        return self._meet(tensors[0].clone(), finish)

    all_gather_single = _allgather_base  # as torch 2.13 names them
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> _Work:
        self._table.messages[self._rank, to].put(tensors[0].clone())
        return _Work(lambda: None)

    def recv(self, tensors: Sequence[torch.Tensor], fro: int, tag: int) -> _Work:
        queue = self._table.messages[fro, self._rank]
        return _Work(lambda: _copy(tensors[0], queue.get(timeout=PATIENCE)))

    def _total(self, found: Sequence[torch.Tensor], options: Any) -> torch.Tensor:
        total = torch.stack(list(found)).sum(0)
        return total / self.size() if options.reduceOp == dist.ReduceOp.AVG else total


def _copy(place: torch.Tensor, value: torch.Tensor) -> None:
    place.copy_(value.view_as(place))


def _on_ranks(ranks: int, run: Callable[[int, PlainRuntime], Any]) -> list[Any]:
    """The results of ``run(rank, runtime)``, which is called for all ranks at once. Raises the first error."""
    table, results, errors = _Table(ranks), [None] * ranks, list[BaseException]()

    def work(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = run(rank, PlainRuntime(_Group(table, rank)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# ---- buckets ----


class Case(NamedTuple):
    """Everything that decides the result of a bucket's collective, except for the bucket's members."""

    issue: Any  # the functions of the two lines
    finish: Any
    gathers: bool
    placement: Placement
    ranks: int
    direct: bool
    averages: bool
    sums: bool
    share: float  # the divisor for each rank
    dtype: dtypes.dtype
    rest: dtypes.dtype
    param: dtypes.dtype | None
    inner: bool  # whether other ranks reduce the result next
    wire: Wire | None
    seats: tuple[int, ...] = ()  # of each rank, with which part of the members it computes; none: with the whole
    pieces: Literal[1, 2] = 1  # of a part

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        if self.seats:
            return tuple(CUTS[self.pieces])
        return LARGE if self.direct or self.wire is not None else SHAPES


def uncertified(forward: TraceCtx, backward: TraceCtx | None) -> Iterator[str]:
    """The collectives of a step that do not do what their laws say, and what they do instead."""
    traces = [trace for trace in (forward, backward) if trace is not None]
    trips = [b for trace in traces for b in trace.bound_symbols if b.sym.id in {*TRIPS, *TRIP_WAITS}]
    if trips and (text := _outcome(_found_of_trip, tuple(dict.fromkeys(map(function_of, trips))))):
        yield f"activations do not come back from the host as they were: {text}"
    seen: set[Any] = set()
    for trace in (*traces, *(called.trace for called in block_functions(*traces))):
        waits = {b.args[0].name: b for b in trace.bound_symbols if b.sym.id in AWAITED}
        for line in trace.bound_symbols:
            find, case = _trial(line, waits)
            if find is None or case in seen:
                continue
            seen.add(case)
            if text := _outcome(find, case):
                yield f"{line.sym.name} does not do what its law says: {text}"


def _trial(line: BoundSymbol, waits: Mapping[str, BoundSymbol]) -> tuple[Callable[[Any], str] | None, Any]:
    """How a collective is tried, and what decides its result; None for other lines."""
    if is_products(line):
        return _found_of_products, _beside(line)
    if is_sequence_issue(line):
        return _found_of_sequence, _exchange(line, waits[line.output.name])
    if is_issue(line) and not _is_by_a_users_wire(line):
        return _found, _case(line, waits[line.output.name])
    return None, None


def _outcome(find: Callable[[Any], str], case: Any) -> str:
    """The text that ``find`` returns for a case, or the error that it raises."""
    try:
        return find(case)
    except Exception as error:
        return f"it raises {type(error).__name__}: {error}"


def _is_by_a_users_wire(line: BoundSymbol) -> bool:
    """A wire of one's own may work with the real ranks only. The proof says that the bucket travels by it."""
    wire = bucket_of(line).wire
    return wire is not None and wire.issue.__module__ != quantized.__name__


def _case(line: Any, wait: Any) -> Case:
    bucket = bucket_of(line)
    plan, seats = bucket.plan, _seats(bucket)
    pieces: Literal[1, 2] = bucket.members[0].parameter.cut.plan.pieces if bucket.is_cut else 1
    return Case(
        function_of(line), function_of(wait), line.sym.id in GATHERS, plan.placement,
        len(seats) or min(plan.world_size, 3),
        plan.direct, plan.averages, plan.sums, plan.divisor / plan.world_size, bucket.dtype, bucket.rest_dtype,
        plan.param_dtype, plan.outer is not None, bucket.wire, seats, pieces,
    )  # fmt: skip


def _seats(bucket: Bucket) -> tuple[int, ...]:
    """The seats of two or four ranks that are like those of a bucket; none if its members are whole."""
    if not bucket.is_cut:
        return ()
    given = bucket.members[0].parameter.cut.plan.seats
    if len(given) == max(given) + 1:  # one for data
        return 0, 1
    return (0, 1, 0, 1) if given[1] == 1 else (0, 0, 1, 1)


@lru_cache(maxsize=256)
def _found(case: Case) -> str:
    """How a collective differs from its law; empty if it does not."""
    draw = torch.Generator().manual_seed(0)
    values = [[torch.randint(-8, 9, s, generator=draw).float() for s in case.shapes] for _ in range(case.ranks)]
    whole = values[0]

    def run(rank: int, runtime: PlainRuntime) -> Any:
        bucket = _bucket(case, rank, runtime)
        if case.wire is not None and not case.wire.takes(bucket):
            return None
        rest = dtypes.to_torch_dtype(case.rest)
        if case.gathers:
            given = [_part(v, i, case, rank, padding=7.0).to(rest) for i, v in enumerate(whole)]
        else:
            given = [_used(v, case, rank).to(dtypes.to_torch_dtype(case.dtype)) for v in values[rank]]
        return case.finish(case.issue(tuple(given), bucket), bucket)

    found = _on_ranks(case.ranks, run)
    added = [[_contributed(v, case, rank) for v in own] for rank, own in enumerate(values)]
    total = [torch.stack(same).sum(0) / (case.share * case.ranks) for same in zip(*added, strict=True)]
    for rank, tensors in enumerate(found):
        for i, tensor in enumerate(tensors or ()):
            expected = _used(whole[i], case, rank) if case.gathers else _part(total[i], i, case, rank)
            if tensor.shape != expected.shape:
                return f"rank {rank} gets {tuple(tensor.shape)} for {tuple(expected.shape)}"
            if not expected.numel():
                continue
            off = (tensor.float() - expected).abs().max().item()
            if not off <= _tolerance(case) * max(8.0 * case.ranks, expected.abs().max().item()):
                return f"rank {rank} gets {tensor.flatten()[:4].tolist()} ... for {expected.flatten()[:4].tolist()} ..."
    return ""


def _bucket(case: Case, rank: int, runtime: PlainRuntime) -> Bucket:
    outer = BucketPlan("certificate", case.ranks, rank, runtime=runtime) if case.inner else None
    plan = BucketPlan(
        "certificate", case.ranks, rank, placement=case.placement, direct=case.direct, averages=case.averages,
        sums=case.sums, divide_by=case.share * case.ranks, param_dtype=case.param, outer=outer, runtime=runtime,
    )  # fmt: skip
    members = tuple(
        Member(
            ShardedParameter(
                plan, f"p{i}", s, "", index=i, dtype=case.rest, owner=i % case.ranks, cut=_cut_of(s, case, rank)
            ),
            trainable=True,
        )
        for i, s in enumerate(case.shapes)
    )
    return Bucket("certificate", "b", plan, members, case.dtype, case.wire)


def _cut_of(shape: tuple[int, ...], case: Case, rank: int) -> Part | None:
    if not case.seats:
        return None
    plan = ContextPlan(2, case.seats[rank], pieces=case.pieces, seats=case.seats)
    return Part(plan, CUTS[case.pieces][shape])


def _chunks(case: Case, rank: int) -> torch.Tensor:
    """The chunks that a rank has of each member."""
    seat = case.seats[rank]
    return torch.tensor([seat] if case.pieces == 1 else [seat, 3 - seat])


def _held(value: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """Which elements a rank has along the dim of a value that is cut, according to the law."""
    _, outer, length, inner, sections = CUTS[case.pieces][tuple(value.shape)]
    chunks = [torch.arange(length).repeat_interleave(count * inner) for count in sections or (1,) * outer]
    return torch.isin(torch.cat(chunks), _chunks(case, rank))


def _used(value: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """What a rank computes with, of a value, according to the law."""
    if not case.seats:
        return value
    dim = CUTS[case.pieces][tuple(value.shape)].dim
    return value.index_select(dim, _held(value, case, rank).nonzero().flatten())


def _contributed(gradient: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A gradient of a whole value, of which a rank has that of what it computes with."""
    if not case.seats:
        return gradient
    dim = CUTS[case.pieces][tuple(gradient.shape)].dim
    held = _held(gradient, case, rank)
    return gradient * held.view(-1, *[1] * (gradient.dim() - dim - 1))


def _part(value: torch.Tensor, i: int, case: Case, rank: int, padding: float = 0.0) -> torch.Tensor:
    """A rank's part of a value according to the law."""
    if case.placement is Placement.REPLICATE:
        return value
    if case.placement is Placement.OWNER:
        return value if rank == i % case.ranks else value[:0]
    rows = -(-len(value) // case.ranks)
    mine = value[rank * rows : (rank + 1) * rows]
    return torch.cat([mine, value.new_full((rows - len(mine), *value.shape[1:]), padding)])


def _tolerance(case: Case) -> float:
    """Relative to the largest value. A wire keeps about as much as its bits can."""
    if case.wire is None:
        both = [dtypes.to_torch_dtype(d) for d in (case.dtype, case.rest)]
        return max(torch.finfo(d).eps if d.is_floating_point else 1e-6 for d in both)
    return 0.1


# ---- sequences ----


LENGTH = 7  # of 4 or 6 chunks: the last ones are short or empty


class Setting(NamedTuple):
    """The properties of a sequence on which its collectives depend, except for its length. The values that are tried
    are (2, 2 heads for each rank, LENGTH, 3)."""

    ranks: int
    direct: bool
    flattened: bool  # whether the dim of positions is flattened with others
    sections: bool  # whether the sequences that it is flattened with are several values
    pieces: Literal[1, 2]  # chunks of each rank

    @classmethod
    def of(cls, part: Part) -> Setting:
        plan, split = part.plan, part.split
        return cls(min(plan.ranks, 3), plan.direct, split.outer * split.inner > 1, bool(split.sections), plan.pieces)

    def values(self, draw: torch.Generator) -> list[torch.Tensor]:
        """A whole value of small integers for each rank."""
        shape = (2, 2 * self.ranks, LENGTH, 3)
        return [torch.randint(-8, 9, shape, generator=draw).float() for _ in range(self.ranks)]

    def part(self, rank: int, runtime: PlainRuntime) -> Part:
        """A rank's part of such a value."""
        plan = ContextPlan(self.ranks, rank, pieces=self.pieces, direct=self.direct, runtime=runtime)
        sections = (2, 4 * self.ranks - 2) if self.sections else ()
        return Part(plan, Split(0, 4 * self.ranks, LENGTH, 3, sections) if self.flattened else Split.along(2, LENGTH))

    def held(self, form: str, whole: torch.Tensor, rank: int, padding: float) -> torch.Tensor:
        """A rank's share of a value: its "part", its "heads", or all of it."""
        if form in ("part", "own"):
            return _cut(whole, _positions(rank, self.ranks, self.pieces), padding)
        return whole[:, 2 * rank : 2 * rank + 2] if form == "heads" else whole

    def is_part(self, found: torch.Tensor, whole: torch.Tensor, rank: int) -> bool:
        """Whether a rank's part of a whole value is that of the law, padding aside."""
        inside = _positions(rank, self.ranks, self.pieces) < LENGTH
        expected = self.held("part", whole, rank, 0.0)
        return torch.equal(self.read(found, expected.shape)[:, :, inside], expected[:, :, inside])

    def laid_out(self, value: torch.Tensor) -> torch.Tensor:
        if self.sections:  # two sequences, then the others: each begins with the first positions of all its sequences
            return torch.cat([s.transpose(0, 1).flatten() for s in value.flatten(0, 1).tensor_split([2])])
        return value.reshape(-1) if self.flattened else value.contiguous()

    def read(self, found: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The inverse: a value of this shape."""
        if not self.sections:
            return found.view(shape)
        first, others = found.split([2 * shape[2:].numel(), (shape[0] * shape[1] - 2) * shape[2:].numel()])
        return torch.cat([s.view(shape[2], -1, shape[3]).transpose(0, 1) for s in (first, others)]).view(shape)


class Exchange(NamedTuple):
    """Everything that decides the result of a sequence's collective."""

    issue: Any  # the functions of the two lines
    finish: Any
    op: CollectiveOp
    setting: Setting


def _exchange(line: Any, wait: Any) -> Exchange:
    return Exchange(function_of(line), function_of(wait), ISSUED[line.sym.id], Setting.of(part_at(line)))


@lru_cache(maxsize=256)
def _found_of_sequence(case: Exchange) -> str:
    """As ``_found``. All positions of a rank are compared that are in the sequence."""
    setting, op = case.setting, case.op
    whole = setting.values(torch.Generator().manual_seed(0))
    result = torch.stack(whole).sum(0) if op.adds else whole[0]

    def run(rank: int, runtime: PlainRuntime) -> Any:
        part = setting.part(rank, runtime)
        given = setting.laid_out(setting.held(op.takes, whole[rank if op.adds else 0], rank, 7.0))
        shape = [tuple(given.shape)] if op.needs_shape else []
        return case.finish(case.issue(given, part), part, *shape)

    for rank, found in enumerate(_on_ranks(setting.ranks, run)):
        expected = setting.held(op.gives, result, rank, 0.0)
        if found.numel() != expected.numel():
            return f"rank {rank} gets {found.numel()} values for {expected.numel()}"
        found = setting.read(found, expected.shape)
        if op.gives == "part":
            inside = _positions(rank, setting.ranks, setting.pieces) < LENGTH
            found, expected = found[:, :, inside], expected[:, :, inside]
        if not torch.equal(found, expected):
            return f"rank {rank} gets {found.flatten()[:4].tolist()} ... for {expected.flatten()[:4].tolist()} ..."
    return ""


# ---- products beside a collective of their rows ----


class Beside(NamedTuple):
    """Everything that decides what a line with products computes, except for these."""

    run: Any
    gathers: bool
    ranks: int
    pieces: int
    leads: bool  # whether the rows are the first dim


def _beside(line: BoundSymbol) -> Beside:
    part, of = line.args[1:3]
    gathers = line.sym.id == sequence.gather_products.id
    return Beside(function_of(line), gathers, min(part.plan.ranks, 3), of.pieces, part.split.dim == 0)


@lru_cache(maxsize=64)
def _found_of_products(case: Beside) -> str:
    """As ``_found``: rank r has rows r k to (r + 1) k of a value, or gets those of the sum of products over ranks."""
    draw, count, dim = torch.Generator().manual_seed(0), 2 * case.ranks * case.pieces, 0 if case.leads else 1
    before = (count, 2) if case.leads else (2, count)
    shapes = [(*before, 3), (3, 4), (5,), (3, 5)]  # of rows, and of the other operands of two products
    given = [[torch.randint(-8, 9, s, generator=draw).float() for s in shapes] for _ in range(case.ranks)]
    if case.gathers:
        given = [given[0]] * case.ranks
    first = sequence.Product(lambda x, w: x @ w, 0, (0,))
    second = sequence.Product(lambda b, x, w: b + x @ w, 1, (1, 2))

    def run(rank: int, runtime: PlainRuntime) -> Any:
        part = Part(ContextPlan(case.ranks, rank, pieces=1, runtime=runtime), Split.along(dim, count))
        x, *others = given[rank]
        if case.gathers:
            x, products, shapes = x.chunk(case.ranks, dim)[rank], [first, second], [(*before, 4), (2 * count, 5)]
        else:
            products, shapes = [first], [part.local_shape((*before, 4))]
        return case.run(x.contiguous(), part, sequence.Products("products", products, shapes, case.pieces), *others)

    x, w, b, v = given[0]
    of_all, total = (x, x @ w, b + (x @ v).flatten(0, 1)), torch.stack([x @ w for x, w, *_ in given]).sum(0)
    for rank, found in enumerate(_on_ranks(case.ranks, run)):
        expected = of_all if case.gathers else (total.chunk(case.ranks, dim)[rank],)
        for f, e in zip(found if case.gathers else (found,), expected, strict=True):
            if not torch.equal(f, e):
                return f"rank {rank} gets {f.flatten()[:4].tolist()} ... for {e.flatten()[:4].tolist()} ..."
    return ""


# ---- activations in host memory ----


@lru_cache(maxsize=8)
def _found_of_trip(functions: Sequence[Any]) -> str:
    """As ``_found``. Values that share memory are stored, beside one that stays; their memory is used again; then they
    are loaded."""
    store, stored, load, loaded = functions
    memory, stays = torch.arange(24.0).view(4, 6), torch.ones(2)
    values = memory[1:], [memory.t(), stays, torch.tensor([True, False])]
    away = Away("", HostMemory(torch.device("cpu")), (True, (True, False, True)), 0)
    expected = [t.clone() for t in (values[0], *values[1])]
    copies = stored(store(values, away), away)
    for t in (memory, values[1][2]):
        t.zero_()
    first, others = loaded(load(copies, away), away)
    for found, value, like in zip((first, *others), expected, (values[0], *values[1]), strict=True):
        if not torch.equal(found, value) or found.stride() != like.stride():
            return f"{found.tolist()} for {value.tolist()}"
    shared = first.untyped_storage().data_ptr() == others[0].untyped_storage().data_ptr()
    return "" if shared and others[1] is stays else "they do not share memory as before"


def _positions(rank: int, ranks: int, pieces: Literal[1, 2]) -> torch.Tensor:
    """The positions that a rank holds according to the law. Positions from LENGTH on are padding."""
    size = -(-LENGTH // (pieces * ranks))
    numbers = (rank,) if pieces == 1 else (rank, 2 * ranks - 1 - rank)
    return torch.cat([torch.arange(size) + number * size for number in numbers])


def _cut(whole: torch.Tensor, positions: torch.Tensor, padding: float) -> torch.Tensor:
    found = whole[:, :, positions.clamp(max=LENGTH - 1)]
    return found.masked_fill((positions >= LENGTH)[None, None, :, None], padding)


# ---- gradients of the collectives of sequences ----


class Gradient(NamedTuple):
    """Everything that decides the gradient of a sequence's collective."""

    rule: Any  # writes the lines of the collective and of its gradient
    id: Any
    setting: Setting


# By collective, the form of the value that it takes, and of the one that it makes. "equal" is a whole value that all
# ranks share, and "own" the part of a batch that only this rank has: ranks average their losses.
FORMS = {
    sequence.cut.id: ("whole", "part"),
    sequence.gather_parts.id: ("part", "whole"),
    sequence.scatter_parts.id: ("whole", "part"),
    sequence.sum_parts.id: ("whole", "whole"),
    sequence.exchange_heads.id: ("part", "heads"),
    sequence.exchange_positions.id: ("heads", "part"),
    sequence.gather_output.id: ("part", "border"),
    sequence.to_output.id: ("equal", "border"),
    sequence.from_input.id: ("border", "whole"),
    sequence.to_own_output.id: ("part", "own"),
    sequence.from_own_input.id: ("own", "part"),
}


def wrong_gradients(split: TraceCtx) -> Iterator[str]:
    """The collectives of a computation on parts whose gradients are not their adjoints, and cuts of other parts."""
    blocks = [block for line in split.bound_symbols if (block := block_of(line)) is not None]
    lines = [line for trace in (split, *(b.trace for b in dict.fromkeys(blocks))) for line in trace.bound_symbols]
    cases = {
        Gradient(grad_rule_of(line), line.sym.id, Setting.of(line.args[1])): line
        for line in lines
        if line.sym.id in FORMS
    }
    for case, line in cases.items():
        if text := _outcome(_found_of_gradient, case):
            yield f"{line.sym.name}, or its gradient, is not what its law says: {text}"


@lru_cache(maxsize=256)
def _found_of_gradient(case: Gradient) -> str:
    """How a gradient differs from the adjoint; empty if it does not."""
    setting, draw, forms = case.setting, torch.Generator().manual_seed(0), FORMS[case.id]
    takes, gives = forms
    x, y = (
        [values[0]] * setting.ranks if form in ("border", "equal") else values
        for form, values in ((form, setting.values(draw)) for form in forms)
    )

    def run(rank: int, runtime: PlainRuntime) -> tuple[float, float, bool]:
        given = setting.laid_out(setting.held(takes, x[rank], rank, 7.0))
        cotangent = setting.laid_out(setting.held(gives, y[rank], rank, 0.0))
        trace = TraceCtx()
        with tracectx(trace):
            a = TensorProxy(shape=given.shape, device=devices.cpu, dtype=dtypes.float32, requires_grad=True)
            result = case.rule(a, setting.part(rank, runtime))
        values = {a.name: given}
        gradient = _run_with_gradient(trace.bound_symbols, values, cotangent)
        is_part = case.id != sequence.cut.id or setting.is_part(values[result.name], x[rank], rank)
        return (values[result.name] * cotangent).sum().item(), (given * gradient).sum().item(), is_part

    outs, ins, are_parts = zip(*_on_ranks(setting.ranks, run), strict=True)
    if not all(are_parts):
        return f"rank {are_parts.index(False)} cuts another part"

    def total(form: str, products: Sequence[float]) -> float:
        return products[0] if form == "border" else sum(products) / (setting.ranks if form == "own" else 1)

    left, right = total(gives, outs), total(takes, ins)
    return "" if abs(left - right) < 0.5 else f"<A x, y> = {left:g}, <x, A' y> = {right:g}"


def _run_with_gradient(lines: Sequence[BoundSymbol], values: dict[str, torch.Tensor], cotangent: torch.Tensor) -> Any:
    """Runs lines of a collective and its gradient. Returns that of their input."""
    gradient = None
    for line in lines:
        args = [values.get(a.name, a) if isinstance(a, Proxy) else a for a in line.args]
        function = function_of(line) or PLAIN.get(line.sym.id)
        if line.sym.id == PrimIDs.GET_GRAD:
            values[line.output.name] = cotangent
        elif line.sym.id == PrimIDs.PUT_GRAD:
            gradient = args[1]
        elif function is not None:
            values[line.output.name] = function(*args)
        else:
            inside = _run_with_gradient(line.subsymbols, values, cotangent)
            gradient = gradient if inside is None else inside
    return gradient


PLAIN: dict[Any, Callable[..., Any]] = {PrimIDs.SHALLOW_COPY: lambda x: x, PrimIDs.MUL: torch.mul}


# ---- losses in chunks, and of parts of a vocabulary ----


def wrong_losses(first: TraceCtx) -> Iterator[str]:
    """The lines that compute a loss in chunks, or of parts of a vocabulary, and are not the loss, with its gradients;
    and parts of embeddings that are not the embedding."""
    functions = {call.function: None for line in first.bound_symbols if (call := call_of(line.sym)) is not None}
    for loss in (f for f in functions if isinstance(f, ChunkedLoss)):
        if text := _outcome(_found_of_loss, loss):
            yield f"a loss in {loss.chunks} chunks is not the loss of all rows: {text}"
    for function in (f for f in functions if isinstance(f, LossOfParts | PartOfEmbedding)):
        if text := _outcome(_found_of_vocabulary, type(function)):
            yield f"the {function.__name__} of parts of a vocabulary is not that of all: {text}"


@lru_cache
def _found_of_vocabulary(kind: type) -> str:
    """How a loss or an embedding of three ranks' parts, or its gradient, differs; empty if it does not."""
    whole = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plans = [ContextPlan(3, rank, pieces=1) for rank in range(3)]
    if kind is PartOfEmbedding:
        ids, whole, dim = torch.tensor([0, 5, 3, 2, 1, 1, 4]), whole[:6], 0
        every: Callable[..., Any] = F.embedding
        options: dict[str, Any] = {"padding_idx": 3}
    else:
        ids, dim, every, options = torch.tensor([0, 5, -1, 2, 1, 1, 3]), 1, F.cross_entropy, {"ignore_index": -1}

    def of_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if kind is PartOfEmbedding:
            rows = [PartOfEmbedding(p)(ids, x, **options) for p, x in zip(plans, parts, strict=True)]
            return torch.stack(rows).sum(0)
        numbers = torch.cat([PartOfLoss(p, -1)(x, ids) for p, x in zip(plans, parts, strict=True)], -1)
        return LossOfParts(torch.float64)(numbers, ids, **options)

    results = []
    with torch.enable_grad():
        given = whole.requires_grad_()
        all_at_once = every(ids, given, **options) if kind is PartOfEmbedding else every(given, ids, **options)
        for found in (of_parts(given.chunk(3, dim)), all_at_once):
            results.append((found, *torch.autograd.grad((found * (1 + found.detach())).sum(), given)))
    same = all(torch.allclose(one, other) for one, other in zip(*results, strict=True))
    return "" if same else f"{results[0][0].flatten()[:3].tolist()} for {results[1][0].flatten()[:3].tolist()}"


@lru_cache(maxsize=256)
def _found_of_loss(loss: ChunkedLoss) -> str:
    """How a loss in three chunks, or its gradients, differ from those of all rows; empty if they do not."""
    draw = torch.Generator().manual_seed(0)
    rows, weight, bias = (
        torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((LENGTH, 3), (5, 3), (5,))
    )
    labels = torch.tensor([0, 4, loss.ignored, 2, 1, 1, 3])
    results = []
    for function in (replace(loss, chunks=3), loss.at_once):
        given = [t.clone().requires_grad_() for t in (rows, weight, bias)]
        with torch.enable_grad():
            total = function(given[0], given[1], labels, given[2])
            results.append([total, *torch.autograd.grad(total, given, torch.tensor(2.0, dtype=total.dtype))])
    for what, found, expected in zip(("loss", "rows", "weight", "bias"), *results, strict=True):
        eps = 4 * torch.finfo(found.dtype).eps
        if not torch.allclose(found.double(), expected.double(), rtol=max(eps, 1e-5), atol=max(eps, 1e-6)):
            return f"{what}: {found.flatten()[:3].tolist()} for {expected.flatten()[:3].tolist()}"
    return ""
