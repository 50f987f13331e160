"""The collectives of values that ranks hold in parts, as symbols of a trace and as the functions that they run.

    whole = gather_parts(x, part)       the parts of all ranks, put together
    x = scatter_parts(whole, part)      this rank's part of the sum over ranks
    total = sum_parts(x, part)          the sum over ranks
    heads = exchange_heads(x, part)        all positions of this rank's share of dim 1 (Ulysses)
    x = exchange_positions(heads, part)    the reverse
    x = cut(whole, part)                   this rank's part; sends nothing

All but the last consist of a line that issues a collective and one that waits for it.

Note [Gradients]. Inside the model, the gradient of a whole value is the sum of what the ranks hold: each rank has what
its own part of the sequence contributes. The gradient of a gather is therefore a scatter of the sum, that of a sum is a
sum, and that of a cut is zero outside of the part. The reduction of parameters' gradients adds them up. At the border
of the model ranks hold equal gradients, which ``to_output`` divides and ``from_input`` sums up.

Ranks that have batches of their own (experts) train the mean of their losses: ``to_own_output`` divides the gradient of
a rank's part of a result, and ``from_own_input`` multiplies that of its part of an argument, of which the user takes
the mean over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from passes.comm.native import InFlight
from passes.comm.symbols import CollectiveOp, Held, Property, symbol
from passes.compat.versions import all_gather_single, reduce_scatter_single
from passes.plan.plan import ContextPlan, Split

import torch
import torch.distributed as dist
from thunder.core import prims
from thunder.core.codeutils import ContextObject
from thunder.core.prims import get_grad, put_grad
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import register_grad

NOT_SPLIT = Split.along(0, 1)  # of values that ranks hold as a whole, or of which they hold parts of a sum


class Part(ContextObject):
    """This rank's part of a value: how it is split, and over which ranks.

    ``fill`` is the value of positions beyond the end of the sequence; None: that of its last position.
    """

    def __init__(self, plan: ContextPlan, split: Split, fill: int | None = None) -> None:
        blocks = "_".join(map(str, split.sections or (split.outer,)))
        outer, inner = f"{blocks}x" * (split.outer > 1), f"x{split.inner}" * (split.inner > 1)
        filled = "" if fill is None else f"_filled_{abs(fill)}"
        where = f"dim{split.dim}_of_{outer}{split.length}{inner}{filled}" if split != NOT_SPLIT else "ranks"
        super().__init__(f"{plan.axis.value}_{where}", self)
        self.plan, self.split, self.fill = plan, split, fill

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and (self.plan, self.split, self.fill) == (other.plan, other.split, other.fill)

    def __hash__(self) -> int:
        return hash((self.plan, self.split, self.fill))

    @property
    def label(self) -> str:
        """Its name in profiles and errors."""
        return self.name

    @cached_property
    def of_gradients(self) -> Part:
        """The same part of a gradient, which is zero beyond the end of the sequence."""
        return Part(self.plan, self.split, 0) if any(missing for *_, missing in self.ranges()) else self

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a part of a whole value of this shape."""
        d = self.split.dim
        return (*shape[:d], self.plan.part_of(self.split), *shape[d + 1 :])

    def is_of(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape may be this part of a value."""
        return self.split.dim < len(shape) and shape[self.split.dim] == self.plan.part_of(self.split)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole value of which a part has this shape."""
        d = self.split.dim
        return (*shape[:d], self.split.size, *shape[d + 1 :])

    def is_in_order(self, shape: tuple[int, ...]) -> bool:
        """Whether the parts of all ranks lie one behind the other in a value of this shape."""
        split, plan = self.split, self.plan
        leads = split.outer == 1 and math.prod(shape[: split.dim]) == 1
        return leads and plan.pieces == 1 and split.length % plan.ranks == 0

    def is_of_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether each rank has as many rows of a value of this shape, one range of each block."""
        split, plan = self.split, self.plan
        return split.dim < len(shape) - 1 and not split.sections and plan.pieces == 1 and split.length % plan.ranks == 0

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """A whole value as (before, outer, length, after)."""
        return _in_blocks(x, self.split, self.split.length)

    def chunks(self, x: torch.Tensor) -> torch.Tensor:
        """A part as (before, outer, chunks, positions of a chunk, after)."""
        pieces, chunk = self.plan.pieces, self.plan.chunk(self.split.length)
        return _in_blocks(x, self.split, pieces * chunk).unflatten(2, (pieces, chunk))

    def ranges(self) -> list[tuple[int, int, int]]:
        """For each of this rank's chunks, its first position, its end, and the number of positions beyond the end."""
        plan, length = self.plan, self.split.length
        size = plan.chunk(length)
        found = []
        for number in plan.chunks_of(plan.rank):
            start, stop = min(number * size, length), min((number + 1) * size, length)
            found.append((start, stop, size - (stop - start)))
        return found


def _in_blocks(x: torch.Tensor, split: Split, length: int) -> torch.Tensor:
    """A value, whose blocks have this length, as (before, outer, length, after)."""
    before, after = math.prod(x.shape[: split.dim]), split.inner * math.prod(x.shape[split.dim + 1 :])
    if not split.sections:
        return x.reshape(before, split.outer, length, after)
    sections = x.split([count * length * split.inner for count in split.sections], split.dim)
    blocks = (s.reshape(before, length, n, after) for s, n in zip(sections, split.sections, strict=True))
    return torch.cat([b.transpose(1, 2) for b in blocks], 1)


def _of_blocks(blocks: torch.Tensor, split: Split, shape: tuple[int, ...]) -> torch.Tensor:
    """The value of this shape, of blocks (before, outer, length, after)."""
    if not split.sections:
        return blocks.reshape(shape)
    sections = (s.transpose(1, 2).flatten(1) for s in blocks.split(split.sections, 1))
    return torch.cat(list(sections), 1).reshape(shape)


# ---- the functions ----


def local_part(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """This rank's part of a whole value."""
    rows, pieces = part.rows(whole), []
    for start, stop, missing in part.ranges():
        pieces.append(rows[:, :, start:stop])
        if missing:
            last = rows[:, :, -1:] if part.fill is None else rows.new_full((), part.fill)
            pieces.append(last.expand(rows.shape[0], rows.shape[1], missing, rows.shape[3]))
    return _of_blocks(torch.cat(pieces, 2), part.split, part.local_shape(tuple(whole.shape)))


def _widen(x: torch.Tensor, part: Part) -> torch.Tensor:
    chunks = part.chunks(x)
    before, outer, *_, after = chunks.shape
    rows = x.new_zeros(before, outer, part.split.length, after)
    for (start, stop, _), chunk in zip(part.ranges(), chunks.unbind(2), strict=True):
        rows[:, :, start:stop] = chunk[:, :, : stop - start]
    return _of_blocks(rows, part.split, part.whole_shape(tuple(x.shape)))


def _group(part: Part) -> Any:
    return part.plan.runtime.group(part.plan.axis)


def _wait(future: InFlight, part: Part) -> None:
    with part.plan.runtime.communicating(part.label):
        future.wait()


def _start(call: Any, received: torch.Tensor, sent: torch.Tensor, part: Part) -> InFlight:
    """Calls a collective of the backend on two contiguous tensors."""
    with part.plan.runtime.communicating(part.label):
        work = call(received.view(-1), sent.view(-1), group=_group(part), async_op=True)
    return InFlight([work], received, sent)


def _issue_gather(x: torch.Tensor, part: Part) -> InFlight:
    sent = x.contiguous()
    return _start(all_gather_single, sent.new_empty(part.plan.ranks, *x.shape), sent, part)


def _wait_gather(future: InFlight, part: Part) -> torch.Tensor:
    _wait(future, part)
    return _in_order(future.received, part)


def _in_order(received: torch.Tensor, part: Part) -> torch.Tensor:
    """The parts of all ranks, (ranks, *part), put together; the same memory if they lie there in order."""
    ranks, pieces, split = part.plan.ranks, part.plan.pieces, part.split
    size = part.plan.chunk(split.length)
    chunks = _in_blocks(received, split._replace(dim=split.dim + 1), pieces * size).unflatten(2, (pieces, size))
    # (before, outer, ranks, chunk, after)
    firsts, *seconds = chunks.unflatten(0, (ranks, -1)).movedim(0, 2).unbind(3)
    in_order = torch.cat([firsts, *(s.flip(2) for s in seconds)], 2) if seconds else firsts
    rows = in_order.flatten(2, 3)[:, :, : split.length]
    whole = _of_blocks(rows, split, part.whole_shape(tuple(received.shape[1:])))
    return whole.contiguous()  # as PyTorch's own modules expect it


def _by_rank(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """The parts for all ranks, (ranks, before, outer, pieces, chunk, after), padded with zeros; the memory of the value
    if they lie there in order."""
    ranks, pieces, size = part.plan.ranks, part.plan.pieces, part.plan.chunk(part.split.length)
    rows = part.rows(whole)
    if missing := pieces * ranks * size - part.split.length:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    firsts, *seconds = rows.unflatten(2, (pieces * ranks, size)).split(ranks, 2)
    by_rank = torch.stack([firsts, *(s.flip(2) for s in seconds)], 3) if seconds else firsts.unsqueeze(3)
    return by_rank.movedim(2, 0).contiguous()


def _issue_scatter(whole: torch.Tensor, part: Part) -> InFlight:
    sent = _by_rank(whole, part)
    if part.plan.direct:
        return _all_to_all(sent, part)
    return _start(reduce_scatter_single, torch.empty_like(sent[0]), sent, part)


def _wait_scatter(future: InFlight, part: Part, shape: tuple[int, ...]) -> torch.Tensor:
    _wait(future, part)
    received = future.received.sum(0) if part.plan.direct else future.received  # in float32 inside, whatever the dtype
    return _of_blocks(received.flatten(2, 3), part.split, part.local_shape(shape))


def _all_to_all(sent: torch.Tensor, part: Part) -> InFlight:
    return _start(dist.all_to_all_single, torch.empty_like(sent), sent, part)


def _issue_to_heads(x: torch.Tensor, part: Part) -> InFlight:
    shares = x.unflatten(1, (part.plan.ranks, -1)).movedim(1, 0)
    return _all_to_all(shares.contiguous(), part)


def _issue_to_positions(heads: torch.Tensor, part: Part) -> InFlight:
    return _all_to_all(_by_rank(heads, part), part)


def _wait_to_positions(future: InFlight, part: Part, shape: tuple[int, ...]) -> torch.Tensor:
    _wait(future, part)
    shares = future.received.view(part.plan.ranks, *part.local_shape(shape))
    return shares.movedim(0, 1).flatten(1, 2)


def _issue_sum(x: torch.Tensor, part: Part) -> InFlight:
    with part.plan.runtime.communicating(part.label):
        total = x.clone(memory_format=torch.contiguous_format)
        return InFlight([dist.all_reduce(total, group=_group(part), async_op=True)], total, total)


def _wait_sum(future: InFlight, part: Part) -> torch.Tensor:
    _wait(future, part)
    return future.received


# ---- the symbols ----


def _future(x: TensorProxy, shape: tuple[int, ...]) -> FutureTensorProxy:
    return FutureTensorProxy(shape=shape, device=x.device, dtype=x.dtype)


def _with_share(shape: tuple[int, ...], factor: float) -> tuple[int, ...]:
    """The shape with so many times the elements of dim 1."""
    return (shape[0], round(shape[1] * factor), *shape[2:])


def _like(x: Any, shape: tuple[int, ...]) -> TensorProxy:
    grad = bool(getattr(x, "requires_grad", False))
    return TensorProxy(shape=shape, device=x.device, dtype=x.dtype, requires_grad=grad)


cut = symbol(
    "cut", lambda whole, part: _like(whole, part.local_shape(tuple(whole.shape))), local_part, properties=Property.PARTS
)
widen = symbol("widen", lambda x, part: _like(x, part.whole_shape(tuple(x.shape))), _widen, properties=Property.PARTS)


def _collective(name: str, issue: Any, wait: Any, takes: Held, gives: Held, *, adds: bool = False) -> CollectiveOp:
    """A collective of parts of values, whose lines have these functions."""

    def future(x: TensorProxy, part: Part) -> FutureTensorProxy:
        shape = tuple(x.shape)
        return _future(x, _with_share(shape, 1 / part.plan.ranks) if gives == "heads" else shape)

    def result(future: FutureTensorProxy, part: Part, *shape: tuple[int, ...]) -> TensorProxy:
        if gives == "part":
            local = part.local_shape(tuple(shape[0]))
            return _like(future, _with_share(local, part.plan.ranks) if takes == "heads" else local)
        return _like(future, tuple(future.shape) if takes == gives else part.whole_shape(tuple(future.shape)))

    packs = Property.FREE if gives == "whole" else Property.PARTS
    unpacks = Property.FREE if takes == gives else Property.PARTS
    lines = symbol(name, future, issue, properties=packs), symbol(f"wait_{name}", result, wait, properties=unpacks)
    return CollectiveOp(*lines, "value", takes, gives, adds)


GATHER = _collective("all_gather_parts", _issue_gather, _wait_gather, "part", "whole")
SCATTER = _collective("reduce_scatter_parts", _issue_scatter, _wait_scatter, "whole", "part", adds=True)
SUM = _collective("all_reduce_parts", _issue_sum, _wait_sum, "whole", "whole", adds=True)
TO_HEADS = _collective("all_to_all_heads", _issue_to_heads, _wait_gather, "part", "heads")
TO_POSITIONS = _collective("all_to_all_positions", _issue_to_positions, _wait_to_positions, "heads", "part")
VALUES = GATHER, SCATTER, SUM, TO_HEADS, TO_POSITIONS


def bytes_of(op: CollectiveOp, x: TensorProxy, part: Part) -> int:
    """The bytes of the whole value that a collective moves for all ranks, padding included."""
    numel = x.numel
    if op.exchanges or op.takes == op.gives:
        return int(numel * x.dtype.bytes)
    local = math.prod(part.local_shape(tuple(x.shape))) if op.adds else numel
    return int(local * part.plan.ranks * x.dtype.bytes)


# ---- products beside a collective of their rows ----


class Product(NamedTuple):
    """A product that computes each row of its result from one row of an operand: the ``function`` with the rows as
    argument ``at``. The other arguments are those of these numbers among the ``others`` of the line."""

    function: Callable[..., torch.Tensor]
    at: int
    others: tuple[int, ...]

    def __call__(self, rows: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        args = [others[i] for i in self.others]
        return self.function(*args[: self.at], rows, *args[self.at :])


class Products(ContextObject):
    """The products of a line, and the shapes of their results. They are called ``name``.

    Each rank's rows travel in so many ``pieces``, the first pieces of all ranks first.
    """

    def __init__(
        self, name: str, products: Sequence[Product], shapes: Sequence[tuple[int, ...]], pieces: int = 1
    ) -> None:
        super().__init__(name, self)
        self.products, self.shapes, self.pieces = tuple(products), tuple(shapes), pieces

    def order(self, part: Part) -> list[tuple[int, int]]:
        """The ranks and the numbers of pieces, in the order in which they travel."""
        return [(rank, piece) for piece in range(self.pieces) for rank in range(part.plan.ranks)]

    def by_piece(self, x: torch.Tensor, part: Part, like: tuple[int, ...], ranks: int) -> torch.Tensor:
        """The rows of so many ranks as (ranks, pieces, before, rows, columns), in the memory of ``x`` if that is
        contiguous. ``like`` is the shape of a value that is split so, whole or in parts: ``x`` may be flattened."""
        split, size = part.split, part.split.length // (part.plan.ranks * self.pieces)
        before, inner = math.prod(like[: split.dim]) * split.outer, split.inner * math.prod(like[split.dim + 1 : -1])
        rows = x.reshape(before, ranks, self.pieces, size * inner, x.shape[-1])
        return rows.permute(1, 2, 0, 3, 4)


def _broadcast(rows: torch.Tensor, root: int, part: Part) -> InFlight:
    with part.plan.runtime.communicating(part.label):
        return InFlight([dist.broadcast(rows, group=_group(part), group_src=root, async_op=True)], rows, rows)


def _reduce(rows: torch.Tensor, root: int, part: Part) -> InFlight:
    with part.plan.runtime.communicating(part.label):
        return InFlight([dist.reduce(rows, group=_group(part), group_dst=root, async_op=True)], rows, rows)


def _gather_products(x: torch.Tensor, part: Part, of: Products, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The whole of ``x``, and the products of its rows. Each rank broadcasts its own. The others' are multiplied when
    they have arrived, while the next ones travel."""
    ranks, mine, order, like = part.plan.ranks, part.plan.rank, of.order(part), tuple(x.shape)
    whole = x.new_empty(part.whole_shape(like))
    places = of.by_piece(whole, part, like, ranks)
    rows = places if places.shape[2] == 1 else torch.empty_like(places, memory_format=torch.contiguous_format)
    rows[mine] = of.by_piece(x, part, like, 1)[0]
    futures = [_broadcast(rows[at], at[0], part) for at in order]
    made: list[torch.Tensor] = []
    for n in sorted(range(len(order)), key=lambda n: order[n][0] != mine):
        at = order[n]
        if at[0] != mine:
            _wait(futures[n], part)
        if rows is not places:
            places[at] = rows[at]
        found = [product(rows[at].flatten(0, 1), others) for product in of.products]
        made = made or [y.new_empty(shape) for y, shape in zip(found, of.shapes, strict=True)]
        for into, y in zip(made, found, strict=True):
            place = of.by_piece(into, part, like, ranks)[at]
            place.copy_(y.view(place.shape))
    for future in futures[mine::ranks]:
        _wait(future, part)
    return whole, *made


def _sum_products(x: torch.Tensor, part: Part, of: Products, *others: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum over ranks of a product. Each rank is sent its rows while the next are computed."""
    (product,), (shape,) = of.products, of.shapes
    rows, futures = of.by_piece(x, part, shape, part.plan.ranks), list[InFlight]()
    for rank, piece in of.order(part):
        y = product(rows[rank, piece].flatten(0, 1), others).contiguous()
        futures.append(_reduce(y, rank, part))
    for future in futures:
        _wait(future, part)
    mine = [future.received for future in futures[part.plan.rank :: part.plan.ranks]]
    if len(mine) == 1:
        return mine[0].view(shape)
    total = mine[0].new_empty(shape)
    for place, y in zip(of.by_piece(total, part, shape, 1)[0], mine, strict=True):
        place.copy_(y.view(place.shape))
    return total


gather_products = symbol("all_gather_products", None, _gather_products, properties=Property.NONE)
sum_products = symbol("reduce_scatter_products", None, _sum_products, properties=Property.NONE)
PRODUCTS = gather_products.id, sum_products.id


# ---- the symbols that autodiff sees ----


def _copy(x: TensorProxy, *_: Any) -> TensorProxy:
    found: TensorProxy = prims.shallow_copy(x)
    return found


gather_parts = symbol("gather_parts", GATHER, None)
scatter_parts = symbol("scatter_parts", SCATTER, None)
sum_parts = symbol("sum_parts", SUM, None)
exchange_heads = symbol("exchange_heads", TO_HEADS, None)
exchange_positions = symbol("exchange_positions", TO_POSITIONS, None)
gather_output = symbol("gather_output", GATHER, None)  # at the border of the model
to_output = symbol("to_output", _copy, None)
from_input = symbol("from_input", _copy, None)
to_own_output = symbol("to_own_output", _copy, None)
from_own_input = symbol("from_own_input", _copy, None)


def _with_gradient(sym: Symbol, forward: Any, backward: Any) -> None:
    """Registers the gradient of a symbol of a value and a part."""

    def rule(x: TensorProxy, part: Part) -> TensorProxy:
        y: TensorProxy = forward(x, part)
        put_grad(x, backward(get_grad(y), part))
        return y

    register_grad(sym, rule)


_with_gradient(cut, cut, widen)
_with_gradient(gather_parts, GATHER, SCATTER)
_with_gradient(scatter_parts, SCATTER, GATHER)
_with_gradient(sum_parts, SUM, SUM)
_with_gradient(exchange_heads, TO_HEADS, TO_POSITIONS)
_with_gradient(exchange_positions, TO_POSITIONS, TO_HEADS)
_with_gradient(gather_output, GATHER, lambda g, part: cut(g, part.of_gradients))
_with_gradient(to_output, _copy, lambda g, part: g * (1.0 / part.plan.ranks))
_with_gradient(from_input, _copy, SUM)
_with_gradient(to_own_output, _copy, lambda g, part: g * (1.0 / part.plan.ranks))
_with_gradient(from_own_input, _copy, lambda g, part: g * float(part.plan.ranks))
