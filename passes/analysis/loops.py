"""Loops: calls of equal blocks in a row, with the gathers of what they read.

An iteration takes what the one before has made, and calls the same functions. It may read inputs of the computation
that no other line reads, such as its parameters, and values that all iterations read and none differentiates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence, Set
from itertools import chain, count, islice, pairwise
from typing import Any, NamedTuple

from passes.analysis.recognise import is_return, is_unpack, names
from passes.comm.symbols import synchronize
from passes.plan import Bucket

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

KEPT = 3  # iterations that are compiled: the first, the second, the last
LEAST = 2  # calls that must be left out; fewer are not worth it
LONGEST = 8  # calls in an iteration: blocks of several kinds may take turns

Lines = Sequence[BoundSymbol]
# The numbers of the arguments of a block's call that get a gradient; None for a line that calls no block.
GradientsOf = Callable[[BoundSymbol], Collection[int] | None]


class Loop(NamedTuple):
    """Successive iterations of the same lines. ``inputs``: for each, the inputs of the computation that it alone
    reads."""

    iterations: Sequence[Lines]
    inputs: Sequence[Sequence[TensorProxy]]

    @property
    def last(self) -> int:
        return len(self.iterations) - 1

    def number(self, kept: int) -> int:
        """The number of an iteration that is kept, the ``kept``-th of three."""
        return self.last if kept == KEPT - 1 else kept

    def left_out(self) -> Iterator[int]:
        """The numbers of the iterations that are left out."""
        return iter(range(KEPT - 1, self.last))


class Turn(NamedTuple):
    """A tag of the lines of loops that are compiled: from which loop, which of the kept iterations, and which of its
    lines they come."""

    loop: int
    kept: int
    line: int


class Place(NamedTuple):
    """The origin of a value: the number of its loop, of the kept iteration, and of the value in that iteration."""

    loop: int
    kept: int
    value: int


class Rolled:
    """The loops that ``roll`` has shortened, and the computation before that. Each run of ``roll`` begins it anew.

    ``values`` are the values of each loop's iterations: their own inputs, then what forward makes, then backward.
    """

    def __init__(self) -> None:
        self.begin(None, ())

    def begin(self, computation: TraceCtx | None, loops: Sequence[Loop]) -> None:
        self.computation, self.loops = computation, loops
        self.values = [[list(inputs) for inputs in loop.inputs] for loop in loops]
        self.places: dict[str, Place] = {}
        for n, loop in enumerate(loops):
            for kept in range(KEPT):
                for k, p in enumerate(loop.inputs[loop.number(kept)]):
                    self.places[p.name] = Place(n, kept, k)

    def __str__(self) -> str:
        left_out = sum(len(loop.iterations) - KEPT for loop in self.loops)
        return f"Thunder lowers {KEPT} iterations of each loop, unroll writes the other {left_out}" if left_out else ""


def made_by(lines: Lines) -> list[Proxy]:
    """The values that lines make, in order."""
    return [o for b in lines for o in b.flat_proxy_outs]


def returning(bsym: BoundSymbol, inputs: Sequence[Proxy]) -> BoundSymbol:
    """The return line of a computation, which lists its inputs as they are by then."""
    return bsym.from_bsym(args=({**bsym.args[0], "flat_args": list(inputs)}, *bsym.args[1:]))


# ---- which lines are a loop ----


def loops_in(computation: TraceCtx, gradients_of: GradientsOf) -> Iterator[Loop]:
    """The loops of a computation that nothing comes between. If a value gets gradients from two lines, autodiff adds
    them up in further lines: such loops are left alone."""
    for calls in _rows(computation.bound_symbols, gradients_of):
        keys = [_key(lines) for lines in calls]
        start = 0
        while start < len(keys):
            times, period = _longest(keys, start)
            if (times - KEPT) * period < LEAST:
                start += 1
                continue
            ends = range(start, start + times * period + 1, period)
            iterations = [list(chain(*calls[i:j])) for i, j in pairwise(ends)]
            if (loop := _loop(computation, iterations, gradients_of)) is not None:
                yield loop
            start += times * period


def _rows(lines: Lines, gradients_of: GradientsOf) -> Iterator[list[list[BoundSymbol]]]:
    """The calls of blocks that follow one another, each with the gathers right before it."""
    row: list[list[BoundSymbol]] = []
    gathers: list[BoundSymbol] = []
    for bsym in lines:
        if gradients_of(bsym) is not None:
            row.append([*gathers, bsym])
            gathers = []
        elif bsym.sym.id == synchronize.id:
            gathers.append(bsym)
        else:
            if row:
                yield row
            row, gathers = [], []


def _key(lines: Lines) -> Hashable:
    """Equal for two calls that autodiff and lowering treat alike, and so their gathers."""
    *gathers, call = lines
    return call.sym.id, tuple(_kind(b.args[1]) for b in gathers)


def _kind(bucket: Bucket) -> Hashable:
    """Equal for buckets that differ only in which parameters they hold."""
    members = (
        (m.trainable, p.full_shape, p.dtype, p.owner, p.rest_device) for m in bucket.members if (p := m.parameter)
    )
    return type(bucket), id(bucket.plan), bucket.dtype, id(bucket.wire), tuple(members)


def _longest(keys: Sequence[Hashable], start: int) -> tuple[int, int]:
    """The number of iterations from ``start`` on and the number of calls in each, by which most calls are left out."""
    found = []
    for period in range(1, LONGEST + 1):
        end = min(start + period, len(keys))
        while end < len(keys) and keys[end] == keys[end - period]:
            end += 1
        found.append(((end - start) // period, period))
    return max(found, key=lambda f: (f[0] - KEPT) * f[1])


class _Own(NamedTuple):
    """A value that an iteration reads: made by itself (0) or by the one before (-1), and as which of its values."""

    iteration: int
    value: int


def _loop(computation: TraceCtx, iterations: Sequence[Lines], gradients_of: GradientsOf) -> Loop | None:
    """The loop of these iterations; None if one is not like the others, or shares what it may not."""
    read = [_reads(lines, before) for lines, before in zip(iterations, [[], *iterations], strict=False)]
    given = names(computation.args)
    shared: set[str] = set()
    inputs: list[dict[str, tuple[int, TensorProxy]]] = [{} for _ in iterations]  # numbered, by their names
    for first, second, *others in zip(*read, strict=True):
        if isinstance(second, _Own):
            if any(o != second for o in others) or (second.iteration == 0 and first != second):
                return None
            continue
        values = [first, second, *others]
        if any(isinstance(v, _Own) for v in values):
            return None
        if len({v.name for v in values}) == 1:
            shared.add(first.name)
            continue
        numbers = {own.setdefault(v.name, (len(own), v))[0] for own, v in zip(inputs, values, strict=True)}
        if len(numbers) > 1 or not given.issuperset(v.name for v in values):
            return None
    alone = set(chain(*inputs))
    if not alone.isdisjoint(shared) or len(alone) < sum(map(len, inputs)):
        return None
    if _is_differentiated_twice(iterations[1], read[1], shared, gradients_of):
        return None
    if _is_read_elsewhere(alone | names(made_by(list(chain(*iterations[:-1])))), computation, iterations):
        return None
    return Loop(iterations, [[v for _, v in own.values()] for own in inputs])


def _reads(lines: Lines, before: Lines) -> list[_Own | TensorProxy]:
    """The values that the lines read, in order."""
    known = {o.name: _Own(-1, k) for k, o in enumerate(made_by(before))}
    found: list[_Own | TensorProxy] = []
    made = count()
    for bsym in lines:
        found += (known.get(a.name, a) for a in bsym.flat_proxy_args)
        known.update((o.name, _Own(0, next(made))) for o in bsym.flat_proxy_outs)
    return found


def _is_differentiated_twice(
    lines: Lines, read: Iterable[_Own | TensorProxy], shared: Collection[str], gradients_of: GradientsOf
) -> bool:
    """True if a value gets a gradient from two places, or one that all iterations read gets any."""
    rest, times = iter(read), Counter[Any]()
    for bsym in lines:
        values = list(islice(rest, len(bsym.flat_proxy_args)))
        if (numbers := gradients_of(bsym)) is not None:
            values = [values[i] for i in numbers]
        times.update(v.value if isinstance(v, _Own) else v.name for v in values)
    return any(n > 1 or value in shared for value, n in times.items())


def _is_read_elsewhere(own: Set[str], computation: TraceCtx, iterations: Sequence[Lines]) -> bool:
    """True if lines of no iteration read one of these values."""
    inside = {id(b) for lines in iterations for b in lines}
    others = (b for b in computation.bound_symbols if id(b) not in inside and not is_unpack(b))
    return any(not own.isdisjoint(names(b.args[0]["output"] if is_return(b) else b.flat_proxy_args)) for b in others)
