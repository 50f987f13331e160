"""Passes: of many calls of equal blocks in a row, Thunder differentiates and lowers three.

Blocks in a row are a loop: each iteration gathers its parameters, takes what the one before has made, and calls the
same function. :func:`roll` leaves the first iteration, the second and the last one in the computation, so that the
passes of Thunder see no more of them, however many there are:

    x1 = Block(x0, w0)                  x1 = Block(x0, w0)
    x2 = Block(x1, w1)                  x2 = Block(x1, w1)
    ...                                 x64 = Block(x2, w63)
    x64 = Block(x63, w63)

What lowering makes of the second one, in forward and in backward, tells what it would have made of those left out.
:func:`unroll` writes their lines, each with its own parameters, buckets and neighbours.

An iteration consists of calls and of the ``synchronize`` of what they read, which autodiff and lowering take one by
one. Loops that do more stay as they are, and so do those in which several iterations differentiate the same value,
since autodiff adds up their gradients in further lines.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain, count, groupby, islice, pairwise
from typing import Any, NamedTuple

from passes.analysis.recognise import is_backward, is_deletion, is_return, is_unpack, names
from passes.comm.symbols import synchronize
from passes.compat import copied_line, set_signature
from passes.merge_arguments import naming
from passes.outline import Variant
from passes.plan import Bucket

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors.passes import del_last_used

KEPT = 3  # iterations: the first, the second, the last
LEAST = 2  # calls that must be left out; fewer are not worth it
LONGEST = 8  # calls in an iteration: blocks of several kinds may take turns
REPORT = "please report this with the model, and pass fsdp(..., repeated_blocks='inline') until it is mended"

Lines = Sequence[BoundSymbol]


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
    """Where a value is made: in which loop, in which of the kept iterations, and as which of its values."""

    loop: int
    kept: int
    value: int


class Rolled:
    """What :func:`roll` has left out of a computation. Renewed by each run of it.

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
        return f"{left_out} iterations are left out until lowering is done" if left_out else ""


# ---- before autodiff ----


def roll(computation: TraceCtx, *, rolled: Rolled) -> TraceCtx:
    """Returns the computation with three iterations of each loop. Fills ``rolled`` for :func:`unroll`."""
    loops = list(_loops(computation))
    rolled.begin(computation, loops)
    if not loops:
        return computation
    turns: dict[int, Turn | None] = {}  # by the ids of lines; None: left out
    ends: dict[str, Proxy] = {}  # what the last iterations read, and what they read instead
    absent: set[str] = set()
    for n, loop in enumerate(loops):
        for i in loop.left_out():
            turns.update((id(b), None) for b in loop.iterations[i])
            absent |= names(loop.inputs[i])
        for kept in range(KEPT):
            turns.update((id(b), Turn(n, kept, k)) for k, b in enumerate(loop.iterations[loop.number(kept)]))
        before, instead = (_made(loop.iterations[i]) for i in (loop.last - 1, KEPT - 2))
        ends |= {old.name: new for old, new in zip(before, instead, strict=True)}
    new = from_trace(computation)
    new.args = tuple(p for p in computation.args if p.name not in absent)
    set_signature(new, computation.siginfo().name)
    for bsym in computation.bound_symbols:
        turn = turns.get(id(bsym))
        if turn is not None:
            args = tuple(ends.get(a.name, a) if isinstance(a, Proxy) else a for a in bsym.args)
            new.bound_symbols.append(bsym.from_bsym(args=args, tags=bsym.tags | {turn}))
        elif is_return(bsym):
            new.bound_symbols.append(_with_inputs(bsym, new.args))
        elif is_unpack(bsym):
            new.bound_symbols += _naming([p for p in bsym.flat_proxy_outs if p.name not in absent])
        elif id(bsym) not in turns:
            new.bound_symbols.append(bsym)
    return new


def _made(lines: Lines) -> list[Proxy]:
    return [o for b in lines for o in b.flat_proxy_outs]


def _naming(inputs: Sequence[Proxy]) -> list[BoundSymbol]:
    return [naming(inputs)] if inputs else []


def _with_inputs(bsym: BoundSymbol, inputs: Sequence[Proxy]) -> BoundSymbol:
    """The return line of a computation, which lists all its inputs."""
    return bsym.from_bsym(args=({**bsym.args[0], "flat_args": list(inputs)}, *bsym.args[1:]))


# ---- which lines are a loop ----


def _loops(computation: TraceCtx) -> Iterator[Loop]:
    calls = list(_with_gathers(computation.bound_symbols))
    keys = [_key(lines) for lines in calls]
    start = 0
    while start < len(keys):
        times, period = _longest(keys, start)
        if (times - KEPT) * period < LEAST:
            start += 1
            continue
        ends = range(start, start + times * period + 1, period)
        loop = _loop(computation, [list(chain(*calls[i:j])) for i, j in pairwise(ends)])
        if loop is not None:
            yield loop
        start += times * period


def _with_gathers(lines: Lines) -> Iterator[list[BoundSymbol]]:
    """Each call of a block, with the gathers right before it."""
    gathers: list[BoundSymbol] = []
    for bsym in lines:
        if isinstance(bsym.sym.id, Variant):
            yield [*gathers, bsym]
        gathers = [*gathers, bsym] if bsym.sym.id == synchronize.id else []


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


def _loop(computation: TraceCtx, iterations: Sequence[Lines]) -> Loop | None:
    """The loop of these iterations; None if one has something of its own."""
    read = [_reads(lines, before) for lines, before in zip(iterations, [[], *iterations], strict=False)]
    given = names(computation.args)
    shared: set[str] = set()
    inputs: list[dict[str, TensorProxy]] = [{} for _ in iterations]
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
        elif all(v.name in given for v in values):
            for own, v in zip(inputs, values, strict=True):
                own[v.name] = v
        else:
            return None
    alone = [names(own.values()) for own in inputs]
    if len(set().union(shared, *alone)) != len(shared) + sum(map(len, alone)) or len(set(map(len, alone))) > 1:
        return None
    if _is_differentiated_twice(iterations[1], read[1], shared) or _is_read_elsewhere(computation, iterations, alone):
        return None
    return Loop(iterations, [list(own.values()) for own in inputs])


def _reads(lines: Lines, before: Lines) -> list[_Own | TensorProxy]:
    """What the lines read, in order."""
    known = {o.name: _Own(-1, k) for k, o in enumerate(_made(before))}
    found: list[_Own | TensorProxy] = []
    made = count()
    for bsym in lines:
        found += (known.get(a.name, a) for a in bsym.flat_proxy_args)
        known.update((o.name, _Own(0, next(made))) for o in bsym.flat_proxy_outs)
    return found


def _is_differentiated_twice(lines: Lines, read: Iterable[_Own | TensorProxy], shared: Collection[str]) -> bool:
    """True if a value gets a gradient from two places, or one that all iterations read gets any."""
    rest, times = iter(read), Counter[Any]()
    for bsym in lines:
        values = list(islice(rest, len(bsym.flat_proxy_args)))
        if isinstance(bsym.sym.id, Variant):
            values = [values[i] for i in bsym.sym.id.needs.gradients]
        times.update(v.value if isinstance(v, _Own) else v.name for v in values)
    return any(n > 1 or value in shared for value, n in times.items())


def _is_read_elsewhere(computation: TraceCtx, iterations: Sequence[Lines], inputs: Iterable[set[str]]) -> bool:
    """True if lines of no iteration read a value that is not of the last one, or the inputs of one."""
    own = set().union(*inputs, *(names(_made(lines)) for lines in iterations[:-1]))
    inside = {id(b) for lines in iterations for b in lines}
    others = (b for b in computation.bound_symbols if id(b) not in inside and not is_unpack(b))
    return any(not own.isdisjoint(names(b.args[0]["output"] if is_return(b) else b.flat_proxy_args)) for b in others)


# ---- after lowering ----


def unroll(trace: TraceCtx, *, rolled: Rolled) -> TraceCtx:
    """Returns a lowered forward, or the backward that follows, with the lines of all iterations.

    Raises:
        RuntimeError: if lowering did something else with one iteration than with the next.
    """
    if not rolled.loops:
        return trace
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    new = from_trace(trace)
    turns = _turns(lines, rolled.loops)
    _number_values(new, turns, rolled)
    loops = [_Unrolling(n, rolled, found) for n, found in enumerate(turns)]
    new.bound_symbols = _unrolled(lines, loops, backwards=is_backward(trace))
    (_complete_backward if is_backward(trace) else _complete_forward)(new, rolled)
    return del_last_used(new, clear_mutable_collections=is_backward(trace))


def _turn(bsym: BoundSymbol) -> Turn | None:
    return next((tag for tag in bsym.tags if isinstance(tag, Turn)), None)


def _turns(lines: Lines, loops: Sequence[Loop]) -> list[list[list[BoundSymbol]]]:
    """For each loop, the lines of each of its kept iterations."""
    found: list[list[list[BoundSymbol]]] = [[[] for _ in range(KEPT)] for _ in loops]
    for bsym in lines:
        if (turn := _turn(bsym)) is not None:
            found[turn.loop][turn.kept].append(bsym)
    for first, second, last in found:
        if not [b.sym.id for b in first] == [b.sym.id for b in second] == [b.sym.id for b in last]:
            raise RuntimeError(f"equal blocks were lowered to different lines: {REPORT}")
    return found


def _number_values(trace: TraceCtx, turns: Sequence[Sequence[Lines]], rolled: Rolled) -> None:
    """Adds what the lines make to the values of their iterations, with new values for those that were left out."""
    for n, (loop, kept_lines) in enumerate(zip(rolled.loops, turns, strict=True)):
        values = rolled.values[n]
        for kept, lines in enumerate(kept_lines):
            own = values[loop.number(kept)]
            for o in _made(lines):
                rolled.places[o.name] = Place(n, kept, len(own))
                own.append(o)
        for i in loop.left_out():
            values[i] += (_renamed(p, trace) for p in _made(kept_lines[1]))


def _renamed(proxy: Proxy, trace: TraceCtx) -> Proxy:
    name = trace.make_name(prefix=proxy.name.rstrip("0123456789"))
    with tracectx(TraceCtx()):  # the name is taken already
        return proxy.replace(name=name)


class _Unrolling:
    """Writes the lines of a loop's iterations."""

    def __init__(self, number: int, rolled: Rolled, turns: Sequence[Lines]) -> None:
        self.number, self.loop, self.turns = number, rolled.loops[number], turns
        self.values, self.places = rolled.values[number], rolled.places
        self._paths: dict[int, tuple[int, tuple[str, ...]]] = {}
        for k, bsym in enumerate(self.loop.iterations[1]):
            for path, bucket in _relatives(bsym):
                self._paths[id(bucket)] = k, path

    def position(self, lines: Lines, *, backwards: bool) -> int:
        """The number of the line ahead of which the lines of the iterations that were left out are written.

        It follows the second iteration in forward, and precedes it in backward, if what they read is there.
        """
        upstream, downstream = (KEPT - 1, 1) if backwards else (1, KEPT - 1)
        numbers = {id(b): n for n, b in enumerate(lines)}
        own = [numbers[id(b)] for b in self.turns[1]]
        made = names(_made(self.turns[upstream]))
        read = set[str]()
        readers = []
        for bsym in self.turns[downstream]:
            if found := made & names(bsym.flat_proxy_args):
                read |= found
                readers.append(numbers[id(bsym)])
        makers = [numbers[id(b)] for b in self.turns[upstream] if not read.isdisjoint(names(b.flat_proxy_outs))]
        preferred = min(own) if backwards else max(own) + 1
        return min(max(preferred, *(n + 1 for n in makers)), *readers) if readers else preferred

    def left_out(self, *, backwards: bool) -> Iterator[BoundSymbol]:
        """The lines of the iterations that were left out."""
        numbers = list(self.loop.left_out())
        for i in reversed(numbers) if backwards else numbers:
            yield from (self.line(b, i) for b in self.turns[1])

    def kept(self, bsym: BoundSymbol, turn: Turn) -> BoundSymbol:
        """A line of an iteration that was kept, with its new neighbours."""
        return self.line(bsym, self.loop.number(turn.kept))

    def line(self, bsym: BoundSymbol, number: int) -> BoundSymbol:
        """The line of a kept iteration as that of iteration ``number``."""
        turn = _turn(bsym)
        assert turn is not None
        old, new = (self.loop.iterations[i][turn.line].tags for i in (self.loop.number(turn.kept), number))
        return copied_line(
            bsym,
            args=self._moved(bsym.args, turn.kept, number),
            output=self._moved(bsym.output, turn.kept, number),
            tags=(bsym.tags - {turn} - (old - new)) | (new - old),
        )

    def _moved(self, value: Any, kept: int, number: int) -> Any:
        """What an argument or result of a kept iteration is in iteration ``number``."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._moved(v, kept, number) for v in value)
        if isinstance(value, Proxy):
            place = self.places.get(value.name)
            if place is None or place.loop != self.number:
                return value
            return self.values[number + place.kept - kept][place.value]
        if id(value) in self._paths:
            k, path = self._paths[id(value)]
            return functools.reduce(getattr, path, self.loop.iterations[number][k].args[1])
        return value


def _relatives(bsym: BoundSymbol) -> Iterator[tuple[tuple[str, ...], Bucket]]:
    """The buckets that lowering may derive from that of a ``synchronize``, with the attributes that lead to them."""
    if bsym.sym.id != synchronize.id:
        return
    found: list[tuple[tuple[str, ...], Bucket]] = [((), bsym.args[1])]
    for path, bucket in found:
        yield path, bucket
        others = ((name, getattr(bucket, name)) for name in ("trainable", "outer"))
        found += [((*path, name), b) for name, b in others if b is not None and all(b is not f for _, f in found)]


def _unrolled(lines: Lines, loops: Sequence[_Unrolling], *, backwards: bool) -> list[BoundSymbol]:
    places = loops[0].places
    positions = [loop.position(lines, backwards=backwards) for loop in loops]
    found: list[BoundSymbol] = []
    for n, bsym in enumerate(lines):
        for loop, position in zip(loops, positions, strict=True):
            if position == n:
                found += loop.left_out(backwards=backwards)
        turn = _turn(bsym)
        if turn is not None:
            found.append(loops[turn.loop].kept(bsym, turn))
            continue
        read = () if is_unpack(bsym) or is_return(bsym) else bsym.flat_proxy_args
        if any(a.name in places and places[a.name].kept == 1 for a in read):
            raise RuntimeError(f"line {bsym.sym.name!r} reads a value of one of many blocks: {REPORT}")
        found.append(bsym)
    return found


def _complete_forward(forward: TraceCtx, rolled: Rolled) -> None:
    """Gives a forward all inputs, and what all iterations save."""
    computation = rolled.computation
    assert computation is not None
    known = {p.name: p for p in forward.args}
    forward.args = tuple(known.get(p.name, p) for p in computation.args)
    set_signature(forward, forward.siginfo().name)
    *lines, last = (b for b in forward.bound_symbols if not is_unpack(b))
    last = _with_inputs(last, forward.args)
    if len(last.args) > 1:
        saved = tuple(tuple(_all(proxies, rolled)) for proxies in last.args[1])
        last = last.from_bsym(args=(last.args[0], saved))
    forward.bound_symbols = [*_naming(forward.args), *lines, last]


def _complete_backward(backward: TraceCtx, rolled: Rolled) -> None:
    """Lets a backward unpack what all iterations have saved, and return all gradients."""
    computation = rolled.computation
    assert computation is not None
    *lines, last = backward.bound_symbols
    for n, bsym in enumerate(lines):
        if bsym.sym.id == prims.PrimIDs.UNPACK_SEQUENCE:
            saved = list(_all(bsym.output, rolled))
            if len(saved) > len(bsym.output):
                lines[n] = bsym.from_bsym(args=(bsym.args[0], len(saved)), output=saved)
    numbers = {
        p.name: (n, i, k)
        for n, loop in enumerate(rolled.loops)
        for i in loop.left_out()
        for k, p in enumerate(loop.inputs[i])
    }
    gradients = dict(zip((p.name for p in computation.args if p.name not in numbers), last.args[0], strict=True))
    for name, (n, i, k) in numbers.items():
        like = gradients[rolled.loops[n].inputs[1][k].name]
        gradients[name] = rolled.values[n][i][rolled.places[like.name].value] if like is not None else None
    backward.bound_symbols = [*lines, last.from_bsym(args=(tuple(gradients[p.name] for p in computation.args),))]


def _all(proxies: Iterable[Proxy], rolled: Rolled) -> Iterator[Proxy]:
    """The values, with those of each iteration that was left out ahead of the second one's."""

    def loop_of(proxy: Proxy) -> int | None:
        place = rolled.places.get(proxy.name)
        return place.loop if place is not None and place.kept == 1 else None

    for n, group in groupby(proxies, loop_of):
        found = list(group)
        if n is None:
            yield from found
        else:
            for i in range(rolled.loops[n].last - 1, 0, -1):
                yield from (rolled.values[n][i][rolled.places[p.name].value] for p in found)
