"""Pass: writes the lines of the iterations that :mod:`passes.roll` has kept from Thunder.

The lines that lowering made of the second iteration are written for each that was left out, in forward and in backward,
with its own parameters, buckets and neighbours. The result is what Thunder would have made of the whole loop.

The pass sees forward first. It tells the backward that follows which values it has added.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from passes.analysis.loops import KEPT, Lines, Loop, Place, Rolled, Turn, made_by, returning
from passes.analysis.recognise import is_backward, is_deletion, is_return, is_unpack, names
from passes.comm.symbols import synchronize
from passes.compat import copied_line, renamed, set_signature
from passes.plan import Bucket

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import del_last_used

REPORT = "please report this with the model, and pass fsdp(..., repeated_blocks='inline') until it is mended"


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
    for turns in found:
        first, second, last = ([b.sym.id for b in _by_origin(lines)] for lines in turns)
        if not first == second == last:
            raise RuntimeError(f"equal blocks were lowered to different lines: {REPORT}")
    return found


def _by_origin(lines: Lines) -> list[BoundSymbol]:
    """The lines of an iteration in the order of those that they come from, as executors may move lines. Those that come
    from one line depend on one another, and so keep their order."""
    return sorted(lines, key=lambda b: turn.line if (turn := _turn(b)) is not None else 0)


def _number_values(trace: TraceCtx, turns: Sequence[Sequence[Lines]], rolled: Rolled) -> None:
    """Adds what the lines make to the values of their iterations, with new values for those that were left out."""
    for n, (loop, kept_lines) in enumerate(zip(rolled.loops, turns, strict=True)):
        values = rolled.values[n]
        for kept, lines in enumerate(kept_lines):
            own = values[loop.number(kept)]
            for o in made_by(_by_origin(lines)):
                rolled.places[o.name] = Place(n, kept, len(own))
                own.append(o)
        for i in loop.left_out():
            values[i] += (_renamed(p, trace) for p in made_by(_by_origin(kept_lines[1])))


def _renamed(proxy: Proxy, trace: TraceCtx) -> Proxy:
    return renamed(proxy, trace.make_name(prefix=proxy.name.rstrip("0123456789")))


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
        made = names(made_by(self.turns[upstream]))
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
        """The value in iteration ``number`` that corresponds to an argument or result of a kept iteration."""
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
            unrolling = loops[turn.loop]
            found.append(unrolling.line(bsym, unrolling.loop.number(turn.kept)))  # with its new neighbours
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
    *lines, last = (b for b in forward.bound_symbols if not is_unpack(b))
    listed = {p.name: now for p, now in zip(forward.args, last.args[0]["flat_args"], strict=True)}
    forward.args = computation.args
    set_signature(forward, forward.siginfo().name)
    last = returning(last, [listed.get(p.name, p) for p in computation.args])
    if len(last.args) > 1:
        saved = tuple(tuple(_all(proxies, rolled)) for proxies in last.args[1])
        last = last.from_bsym(args=(last.args[0], saved))
    forward.bound_symbols = [*filter(is_unpack, computation.bound_symbols), *lines, last]


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
