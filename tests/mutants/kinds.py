"""The kinds of mutants. Each takes a body and a source of random numbers, and gives other lines, or None where it finds
nothing to change."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from passes.analysis.calls import block_function
from passes.analysis.recognise import (
    ends_copies,
    is_deletion,
    is_gather,
    is_issue,
    is_offload,
    is_random,
    is_return,
    is_sequence_wait,
    is_unpack,
    is_wait,
    waits_for_future,
)  # fmt: skip
from passes.borders import fetch, run_rebuild, run_setter
from passes.comm.sequence import SCATTER, Part, cut, widen
from passes.comm.symbols import accumulate, accumulated, keep_shards
from passes.compat.jit import calling_function_of, function_of
from passes.parameters import mark_unused, unless_unused
from passes.plan import Axis, Bucket, Placement

from bodies import (
    Body,
    Lines,
    again,
    alike,
    bodies,
    calling,
    computes,
    exchange_places,
    exchanged,
    is_value,
    pairs_alike,
    put,
    reading,
    reading_from,
    with_leaf,
)  # fmt: skip
from steps import Step
from thunder.core import dtypes
from thunder.core.codeutils import ContextObject
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import from_trace
from thunder.executors import torchex

Random = random.Random
Change = Callable[[Body, Random], Lines | None]
Outside = Callable[[Step, Random], Step | None]


class Kind(NamedTuple):
    """``runs``: False if a mutant of this kind can be wrong although it computes the same here. ``raw``: it sees the
    lines that free memory."""

    name: str
    change: Change | None
    runs: bool = True
    raw: bool = False
    outside: Outside | None = None  # changes the step outside of its lines


KINDS: dict[str, Kind] = {}


def kind(*, runs: bool = True, raw: bool = False) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        name = change.__name__.replace("_", " ")
        KINDS[name] = Kind(name, change, runs, raw)
        return change

    return register


def outside(*, runs: bool = False) -> Callable[[Outside], Outside]:
    def register(change: Outside) -> Outside:
        name = change.__name__.replace("_", " ")
        KINDS[name] = Kind(name, None, runs, outside=change)
        return change

    return register


class Mutant(NamedTuple):
    kind: Kind
    step: Step
    where: str


def mutate(step: Step, rng: Random, only: str = "") -> Mutant | None:
    """A mutant of a step, of a kind that is chosen at random. None if the step has nothing of this kind."""
    chosen = KINDS[only or rng.choice(list(KINDS))]
    if chosen.outside is not None:
        new = chosen.outside(step, rng)
        return Mutant(chosen, new, "outside of the lines") if new is not None else None
    assert chosen.change is not None
    found = list(bodies(step, raw=chosen.raw))
    for _ in range(12):
        body = rng.choices(found, [len(b.lines) for b in found])[0]
        lines = chosen.change(body, rng)
        if lines is None:
            continue
        same = len(lines) == len(body.lines) and all(map(_same, lines, body.lines))
        if not same:
            where = "/".join([body.where, *(f"{what} {at}" for what, at in body.path)])
            try:
                return Mutant(chosen, put(body, lines), f"{where}: {_shown(body.lines, lines)}")
            except Exception:  # Thunder refuses to lower such a fusion
                continue
    return None


def _same(a: BoundSymbol, b: BoundSymbol) -> bool:
    return a is b or (a.sym is b.sym and str(a) == str(b) and not _plans_differ(a, b))


def _plans_differ(a: BoundSymbol, b: BoundSymbol) -> bool:
    found = [[x for x in tree_flatten(s.args)[0] if isinstance(x, (Bucket, Part))] for s in (a, b)]
    return any(x is not y for x, y in zip(*found, strict=False))


def _shown(old: Lines, new: Lines) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if not _same(a, b)), min(len(old), len(new)) - 1
    )
    texts = [str(lines[at].from_bsym(header="")).splitlines()[0][:160] for lines in (old, new)]
    return f"line {at}: {texts[0]}  ->  {texts[1]}"


# ---- arguments ----


def _at_random(body: Body, rng: Random, wanted: Callable[[BoundSymbol], Any]) -> int | None:
    found = [i for i in body.computing() if wanted(body.lines[i])]
    return rng.choice(found) if found else None


def _with(body: Body, at: int, *lines: BoundSymbol) -> Lines:
    return [*body.lines[:at], *lines, *body.lines[at + 1 :]]


@kind()
def swap_arguments(body: Body, rng: Random) -> Lines | None:
    at = _at_random(body, rng, lambda b: len([a for a in b.flat_proxy_args if is_value(a)]) > 1)
    if at is None:
        return None
    values = [a for a in body.lines[at].flat_proxy_args if is_value(a)]
    pairs = pairs_alike(values) or [(0, 1)]
    i, j = rng.choice(pairs)
    return _with(body, at, exchanged(body.lines[at], values[i], values[j]))


@kind()
def read_another_value(body: Body, rng: Random) -> Lines | None:
    at = _at_random(body, rng, lambda b: any(is_value(a) for a in b.flat_proxy_args))
    if at is None:
        return None
    old = rng.choice([a for a in body.lines[at].flat_proxy_args if is_value(a)])
    others = body.others(at, old)
    return _with(body, at, reading(body.lines[at], old, rng.choice(others))) if others else None


@kind()
def drop_line(body: Body, rng: Random) -> Lines | None:
    at = _at_random(body, rng, lambda b: len(b.flat_proxy_outs) == 1 and is_value(b.flat_proxy_outs[0]))
    if at is None:
        return None
    out = body.lines[at].flat_proxy_outs[0]
    others = body.others(at, out)
    inputs = [a for a in body.lines[at].flat_proxy_args if alike(a, out)]
    if not others or any(out.name == o.name for b in body.lines[:at] for o in b.flat_proxy_outs):
        return None
    lines = reading_from(body.lines, at + 1, out, rng.choice(inputs or others))
    return [*lines[:at], *lines[at + 1 :]]


@kind()
def drop_term(body: Body, rng: Random) -> Lines | None:
    def is_sum(b: BoundSymbol) -> bool:
        out = b.flat_proxy_outs[0]
        return any(word in b.sym.name for word in ("add", "sub", "sum")) and any(
            alike(a, out) for a in b.flat_proxy_args
        )

    at = _at_random(body, rng, is_sum)
    if at is None or len(body.lines[at].flat_proxy_outs) != 1:
        return None
    out = body.lines[at].flat_proxy_outs[0]
    kept = rng.choice([a for a in body.lines[at].flat_proxy_args if alike(a, out)])
    lines = reading_from(body.lines, at + 1, out, kept)
    return [*lines[:at], *lines[at + 1 :]]


@kind()
def duplicate_line(body: Body, rng: Random) -> Lines | None:
    at = _at_random(body, rng, lambda b: not body.is_fusion)
    if at is None:
        return None
    bsym, new = again(body.lines[at], "again")
    lines = [*body.lines[: at + 1], bsym, *body.lines[at + 1 :]]
    reads = [i for i in range(at + 2, len(lines)) if {a.name for a in lines[i].flat_proxy_args} & new.keys()]
    if reads:
        i = rng.choice(reads)
        for o in body.lines[at].flat_proxy_outs:
            lines[i] = reading(lines[i], o, new[o.name])
    return lines


def _leaves(bsym: BoundSymbol, wanted: type | tuple[type, ...]) -> list[int]:
    leaves = tree_flatten((bsym.args, bsym.kwargs))[0]
    return [i for i, x in enumerate(leaves) if isinstance(x, wanted) and not isinstance(x, Proxy)]


def _change_leaf(body: Body, rng: Random, wanted: Any, new: Callable[[Any], Any], name: str = "") -> Lines | None:
    at = _at_random(body, rng, lambda b: name in b.sym.name and block_function(b) is None and _leaves(b, wanted))
    if at is None:
        return None
    leaf = rng.choice(_leaves(body.lines[at], wanted))
    old = tree_flatten((body.lines[at].args, body.lines[at].kwargs))[0][leaf]
    value = new(old)
    return None if value == old else _with(body, at, with_leaf(body.lines[at], leaf, value))


@kind()
def change_constant(body: Body, rng: Random) -> Lines | None:
    return _change_leaf(body, rng, (float, bool), lambda x: not x if isinstance(x, bool) else 1.5 * x + 0.25)


@kind()
def change_number(body: Body, rng: Random) -> Lines | None:
    return _change_leaf(body, rng, int, lambda x: not x if isinstance(x, bool) else x + rng.choice([-1, 1]))


@kind()
def change_axis(body: Body, rng: Random) -> Lines | None:
    def is_permutation(a: Any) -> bool:
        found = isinstance(a, (tuple, list)) and len(a) > 1 and all(type(i) is int for i in a)
        return found and sorted(a) == [*range(len(a))]

    at = _at_random(body, rng, lambda b: any(map(is_permutation, b.args)))
    if at is None:
        return _change_leaf(body, rng, int, lambda x: -x - 1 if not isinstance(x, bool) else not x)
    i, j = rng.sample(range(len(next(filter(is_permutation, body.lines[at].args)))), 2)

    def exchange(a: Any) -> Any:
        if not is_permutation(a):
            return a
        new = list(a)
        new[i], new[j] = new[j], new[i]
        return tuple(new)

    return _with(body, at, body.lines[at].from_bsym(args=tuple(map(exchange, body.lines[at].args))))


@kind()
def change_slice(body: Body, rng: Random) -> Lines | None:
    step = rng.choice([-1, 1])
    at = _at_random(body, rng, lambda b: any(w in b.sym.name for w in ("slice", "getitem", "narrow", "split", "roll")))
    if at is None or not (found := _leaves(body.lines[at], int)):
        return None
    leaves = tree_flatten((body.lines[at].args, body.lines[at].kwargs))[0]
    i = rng.choice(found)
    return _with(body, at, with_leaf(body.lines[at], i, max(0, int(leaves[i]) + step)))


@kind()
def change_dtype(body: Body, rng: Random) -> Lines | None:
    """A value is rounded on its way."""
    to = torchex.ex.opmap.get("to") or torchex.to
    at = _at_random(body, rng, lambda b: any(is_value(a) and a.dtype is dtypes.float32 for a in b.flat_proxy_args))
    if at is None or body.is_fusion:
        return None
    old = rng.choice([a for a in body.lines[at].flat_proxy_args if is_value(a) and a.dtype is dtypes.float32])
    half, back = _new(old, "half", dtypes.bfloat16), _new(old, "back", dtypes.float32)
    casts = [
        to.bind(old, dtypes.to_torch_dtype(half.dtype), output=half),
        to.bind(half, dtypes.to_torch_dtype(back.dtype), output=back),
    ]
    return _with(body, at, *casts, reading(body.lines[at], old, back))


def _new(like: TensorProxy, suffix: str, dtype: Any = None) -> TensorProxy:
    from thunder.core.trace import TraceCtx, tracectx

    with tracectx(TraceCtx()):
        return TensorProxy(f"{like.name}_{suffix}", like=like, dtype=dtype or like.dtype)


# ---- parameters ----


@kind()
def exchange_parameters_of_a_collective(body: Body, rng: Random) -> Lines | None:
    """Among the shards of a gather, the gradients of a reduction, or what is waited for."""
    found = [
        i
        for i, b in enumerate(body.lines)
        if is_issue(b) or is_offload(b) or is_wait(b) or b.sym.id in (accumulate.id, accumulated.id)
    ]
    rng.shuffle(found)
    for i in found:
        bsym = body.lines[i]
        if waits_for_future(bsym):
            outs = exchange_places(bsym.output, rng)
            if outs:
                return _with(body, i, bsym.from_bsym(output=outs))
        elif values := exchange_places(bsym.args[0], rng):
            return _with(body, i, bsym.from_bsym(args=(values, *bsym.args[1:])))
    return None


@kind()
def exchange_arguments_of_a_block(body: Body, rng: Random) -> Lines | None:
    at = _at_random(body, rng, lambda b: block_function(b) is not None and pairs_alike(b.args))
    if at is None:
        return None
    return _with(body, at, body.lines[at].from_bsym(args=exchange_places(body.lines[at].args, rng)))


@kind()
def exchange_results_of_a_block(body: Body, rng: Random) -> Lines | None:
    at = _at_random(body, rng, lambda b: block_function(b) is not None and pairs_alike(tuple(b.output)))
    if at is None:
        return None
    return _with(body, at, body.lines[at].from_bsym(output=exchange_places(tuple(body.lines[at].output), rng)))


@kind()
def read_anothers_block(body: Body, rng: Random) -> Lines | None:
    """A call of a block reads a value of another call: a parameter, or what that one saved."""
    calls = [i for i, b in enumerate(body.lines) if block_function(b) is not None]
    rng.shuffle(calls)
    for i in calls:
        others = [j for j in calls if j != i and block_function(body.lines[j]) is block_function(body.lines[i])]
        known = {p.name for p in body.known(i)} | {o.name for b in body.lines[:i] for o in b.flat_proxy_outs}
        for j in others:
            mine, theirs = body.lines[i].args, body.lines[j].args
            places = [
                k for k, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a.name != b.name and b.name in known
            ]
            if places:
                k = rng.choice(places)
                return _with(body, i, body.lines[i].from_bsym(args=(*mine[:k], theirs[k], *mine[k + 1 :])))
    return None


@kind()
def share_blocks_that_differ(body: Body, rng: Random) -> Lines | None:
    calls = [i for i, b in enumerate(body.lines) if block_function(b) is not None]
    rng.shuffle(calls)
    for i in calls:
        for j in calls:
            a, b = body.lines[i], body.lines[j]
            if (
                block_function(a) is not block_function(b)
                and len(a.args) == len(b.args)
                and len(a.output) == len(b.output)
            ):
                return _with(body, i, calling(a, block_function(b)))
    return None


@kind()
def gather_anothers_shards(body: Body, rng: Random) -> Lines | None:
    gathers = [i for i, b in enumerate(body.lines) if is_issue(b)]
    rng.shuffle(gathers)
    for i in gathers:
        for j in gathers:
            a, b = body.lines[i].args[0], body.lines[j].args[0]
            known = {p.name for p in body.known(i)}
            same = [(k, y) for k, x in enumerate(a) for y in b if alike(x, y) and x.name != y.name and y.name in known]
            if i != j and same:
                k, y = rng.choice(same)
                return _with(body, i, body.lines[i].from_bsym(args=((*a[:k], y, *a[k + 1 :]), *body.lines[i].args[1:])))
    return None


# ---- plans ----


def _with_bucket(body: Body, old: Bucket, new: Bucket) -> Lines:
    return [
        b.from_bsym(args=tuple(new if x is old else x for x in b.args)) if any(x is old for x in b.args) else b
        for b in body.lines
    ]


def _bucket(body: Body, rng: Random, wanted: Callable[[Bucket, BoundSymbol], Any]) -> Bucket | None:
    found = [b.args[1] for b in body.lines if is_issue(b) and wanted(b.args[1], b)]
    return rng.choice(found) if found else None


def _copy(bucket: Bucket, plan: Any = None, members: Any = None) -> Bucket:
    plain = bucket.plain
    return Bucket(
        bucket.label,
        f"{bucket.name}_m",
        plan or bucket.plan,
        members or bucket.members,
        bucket.dtype,
        bucket.wire,
        plain,
    )


@kind()
def change_divisor(body: Body, rng: Random) -> Lines | None:
    old = _bucket(body, rng, lambda bucket, b: not is_gather(b))
    if old is None:
        return None
    return _with_bucket(
        body, old, _copy(old, plan=replace(old.plan, divide_by=old.plan.divisor * rng.choice([0.5, 2.0])))
    )


@kind()
def change_group(body: Body, rng: Random) -> Lines | None:
    old = _bucket(body, rng, lambda bucket, b: bucket.plan.runtime is not None and max(body.step.world[::2]) > 1)
    if old is None:
        return None
    axis = rng.choice([a for a in Axis if a is not old.plan.axis])
    size = len(body.step.world.group(axis, 0))
    return _with_bucket(body, old, _copy(old, plan=replace(old.plan, axis=axis, world_size=size)))


@kind()
def change_order_of_a_bucket(body: Body, rng: Random) -> Lines | None:
    """On both ends, or on one."""

    def places(bucket: Bucket) -> list[tuple[int, int]]:
        shapes = [(m.parameter.full_shape, m.parameter.shard_shape) for m in bucket.members]
        return [(i, j) for i in range(len(shapes)) for j in range(i) if shapes[i] == shapes[j]]

    old = _bucket(body, rng, lambda bucket, b: places(bucket))
    if old is None:
        return None
    i, j = rng.choice(places(old))
    members = list(old.members)
    members[i], members[j] = members[j], members[i]
    return _with_bucket(body, old, _copy(old, members=tuple(members)))


@kind()
def change_layout(body: Body, rng: Random) -> Lines | None:
    """Two shards exchange their places in a row, where they are packed or where they are unpacked."""
    old = _bucket(body, rng, lambda bucket, b: len(bucket.members) > 1 and hasattr(bucket.layout, "permutation"))
    if old is None:
        return None
    places = old.layout.places
    pairs = [
        (i, j)
        for i in range(len(places))
        for j in range(i)
        if places[i].shard == places[j].shard and places[i].full == places[j].full
    ]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    new = _copy(old)
    moved = list(new.layout.places)
    moved[i], moved[j] = places[i]._replace(start=places[j].start), places[j]._replace(start=places[i].start)
    new.layout.places = moved
    return _with_bucket(body, old, new)


@kind()
def gather_in_another_dtype(body: Body, rng: Random) -> Lines | None:
    """And use it so."""
    old = _bucket(body, rng, lambda bucket, b: is_gather(b) and bucket.wire is None)
    if old is None:
        return None
    dtype = rng.choice([d for d in (dtypes.bfloat16, dtypes.float16, dtypes.int32) if d != old.dtype])
    new = Bucket(old.label, f"{old.name}_cast", old.plan, old.members, dtype)
    lines = _with_bucket(body, old, new)
    for i, b in enumerate(lines):
        if is_wait(b) and b.args[1] is new:
            outs = tuple(_new(o, "cast", dtype) for o in b.output)
            lines[i] = b.from_bsym(output=outs)
            for o, n in zip(b.output, outs, strict=True):
                lines = reading_from(lines, i + 1, o, n)
    return lines


def _reductions(body: Body, rng: Random) -> Iterator[tuple[int, BoundSymbol, BoundSymbol]]:
    """In random order: the number of the line that waits for a reduction, the line that issues it, and the one that
    waits."""
    waits = [i for i, b in enumerate(body.lines) if is_wait(b) and not is_gather(b)]
    rng.shuffle(waits)
    for i in waits:
        wait = body.lines[i]
        yield i, next(b for b in body.lines if is_issue(b) and b.output.name == wait.args[0].name), wait


@kind()
def reduce_twice(body: Body, rng: Random) -> Lines | None:
    for i, issue, wait in _reductions(body, rng):
        if all(alike(a, b) for a, b in zip(issue.args[0], wait.output, strict=True)):
            second, names = again(issue, "twice")
            second = second.from_bsym(args=(wait.output, issue.args[1]))
            last, new = again(wait.from_bsym(args=(names[issue.output.name], wait.args[1])), "twice")
            lines = [*body.lines[: i + 1], second, last, *body.lines[i + 1 :]]
            for o in wait.output:
                lines = reading_from(lines, i + 3, o, new[o.name])
            return lines
    return None


@kind()
def skip_a_reduction(body: Body, rng: Random) -> Lines | None:
    for i, issue, wait in _reductions(body, rng):
        if all(alike(a, b) for a, b in zip(issue.args[0], wait.output, strict=True)):
            lines = body.lines
            for grad, o in zip(issue.args[0], wait.output, strict=True):
                lines = reading_from(lines, i + 1, o, grad)
            return [b for b in lines if not (b.sym is wait.sym and b.output is wait.output) and b is not issue]
    return None


@kind()
def keep_own_gradients(body: Body, rng: Random) -> Lines | None:
    """A rank takes its shard of its own gradients, to which the others add nothing."""
    for i, issue, wait in _reductions(body, rng):
        bucket, grads = issue.args[1], issue.args[0]
        same = all(g.dtype is o.dtype for g, o in zip(grads, wait.output, strict=True))
        if same and bucket.plan.placement is Placement.SHARD and not bucket.is_cut:
            lines = _with(body, i, keep_shards.bind(tuple(grads), bucket, output=wait.output))
            return [b for b in lines if b is not issue]
    return None


@kind()
def skip_accumulation(body: Body, rng: Random) -> Lines | None:
    found = [i for i, b in enumerate(body.lines) if b.sym.id in (accumulate.id, accumulated.id)]
    if not found:
        return None
    at = rng.choice(found)
    lines = [*body.lines[:at], *body.lines[at + 1 :]]
    if body.lines[at].sym.id == accumulated.id:
        for grad, o in zip(body.lines[at].args[0], body.lines[at].output, strict=True):
            lines = reading_from(lines, at, o, grad)
    return lines


# ---- parts of parameters ----


def _sums(body: Body, rng: Random) -> list[tuple[int, int]]:
    """Where sums over ranks that share a batch are issued, and where they are waited for."""
    issued = {b.output.name: i for i, b in enumerate(body.lines) if isinstance(b.output, Proxy)}
    found = [(issued[b.args[0].name], i) for i, b in enumerate(body.lines) if is_sequence_wait(b)]
    found = [(i, j) for i, j in found if alike(body.lines[i].args[0], body.lines[j].output)]
    rng.shuffle(found)
    return found


@kind()
def leave_a_sum_pending(body: Body, rng: Random) -> Lines | None:
    """Each rank goes on with what it has of the sum, or with its rows of that."""
    for issued, at in _sums(body, rng)[:1]:
        lines = reading_from(body.lines, at + 1, body.lines[at].output, body.lines[issued].args[0])
        return [b for i, b in enumerate(lines) if i not in (issued, at)]
    scatters = {b.output.name: b for b in body.lines if b.sym.id == SCATTER.issue.id}
    waits = [b for b in body.lines if b.sym.id == SCATTER.wait.id]
    if not waits:
        return None
    wait = rng.choice(waits)
    issue = scatters[wait.args[0].name]
    own = cut.bind(*issue.args, output=wait.output)
    return [own if b is wait else b for b in body.lines if b is not issue]


@kind()
def sum_twice(body: Body, rng: Random) -> Lines | None:
    for issued, at in _sums(body, rng)[:1]:
        first, wait = body.lines[issued], body.lines[at]
        issue, names = again(first.from_bsym(args=(wait.output, first.args[1])), "twice")
        last, new = again(wait.from_bsym(args=(names[first.output.name], wait.args[1])), "twice")
        lines = [*body.lines[: at + 1], issue, last, *body.lines[at + 1 :]]
        return reading_from(lines, at + 3, wait.output, new[wait.output.name])
    return None


@kind()
def add_on_each_rank(body: Body, rng: Random) -> Lines | None:
    """A bias or a residual is added to what each rank has, before the sum."""
    for issued, at in _sums(body, rng):
        issue, total = body.lines[issued], body.lines[at].output
        for j, b in enumerate(body.lines):
            others = [a.name for a in b.flat_proxy_args if a.name != total.name]
            if len(others) != 1 or "add" not in b.sym.name or not alike(b.output, total):
                continue
            needed = _needed(body.lines[issued:j], others[0])
            if total.name not in {a.name for x in needed for a in x.flat_proxy_args}:
                early, new = again(reading(b, total, issue.args[0]), "early")
                late = [x for x in body.lines[issued + 1 : j] if not any(x is y for y in needed)]
                issue = issue.from_bsym(args=(new[b.output.name], issue.args[1]))
                after = reading_from(body.lines[j + 1 :], 0, b.output, total)
                return [*body.lines[:issued], *needed, early, issue, *late, *after]
    return None


def _needed(lines: Lines, name: str) -> Lines:
    """The lines that compute a value."""
    found: Lines = []
    wanted = {name}
    for b in reversed(lines):
        if wanted.intersection(o.name for o in b.flat_proxy_outs):
            found.insert(0, b)
            wanted.update(a.name for a in b.flat_proxy_args)
    return found


@kind()
def take_the_part_of_another_rank(body: Body, rng: Random) -> Lines | None:
    """The heads or columns of the next rank: a line cuts them, or a gather or a reduction carries them."""
    found = [i for i, b in enumerate(body.lines) if b.sym.id in (cut.id, widen.id)]
    old = _bucket(body, rng, lambda bucket, b: bucket.is_cut)
    if found and (old is None or rng.random() < 0.5):
        at = rng.choice(found)
        x, part = body.lines[at].args
        return _with(body, at, body.lines[at].from_bsym(args=(x, _of_the_next(part))))
    if old is None:
        return None
    members = tuple(replace(m, parameter=replace(m.parameter, cut=_of_the_next(m.parameter.cut))) for m in old.members)
    return _with_bucket(body, old, _copy(old, members=members))


def _of_the_next(part: Part) -> Part:
    plan = part.plan
    ranks = {"rank": (plan.rank + 1) % plan.ranks, "seats": tuple((s + 1) % plan.ranks for s in plan.seats)}
    return Part(replace(plan, **ranks), part.split, part.fill)


# ---- what is saved and returned ----


def _returned(body: Body) -> tuple[int, BoundSymbol]:
    return len(body.lines) - 1, body.lines[-1]


@kind()
def exchange_saved_values(body: Body, rng: Random) -> Lines | None:
    """In what forward returns, or in what backward unpacks; for a block as for a step."""
    if body.is_fusion:
        return None
    at, last = _returned(body)
    if body.where == "forward" and is_return(last):
        if body.is_whole and len(last.args) == 2:
            result, (saved, others) = last.args
            new = exchange_places(saved, rng)
            return _with(body, at, last.from_bsym(args=(result, (new, others)))) if new else None
        values = last.args[0] if len(last.args) == 1 else last.args
        if isinstance(values, tuple) and values and isinstance(values[-1], list):
            new = exchange_places(values[-1], rng)
            return _with(body, at, last.from_bsym(args=((*values[:-1], list(new)),))) if new else None
        return None
    found = [i for i, b in enumerate(body.lines) if b.sym.name == "unpack_sequence" and pairs_alike(b.output)]
    if not found:
        return None
    i = rng.choice(found)
    return _with(body, i, body.lines[i].from_bsym(output=list(exchange_places(body.lines[i].output, rng))))


@kind()
def save_another_value(body: Body, rng: Random) -> Lines | None:
    at, last = _returned(body)
    if body.where != "forward" or body.is_fusion or not is_return(last):
        return None
    if body.is_whole:
        if len(last.args) != 2:
            return None
        result, (saved, others) = last.args
    else:
        values = last.args[0]
        if not (isinstance(values, tuple) and values and isinstance(values[-1], list)):
            return None
        saved = values[-1]
    places = [k for k, p in enumerate(saved) if is_value(p)]
    rng.shuffle(places)
    for k in places:
        if other := body.others(at, saved[k]):
            new = [*saved[:k], rng.choice(other), *saved[k + 1 :]]
            args = (result, (tuple(new), others)) if body.is_whole else ((*values[:-1], new),)
            return _with(body, at, last.from_bsym(args=args))
    return None


@kind()
def return_gradients_elsewhere(body: Body, rng: Random) -> Lines | None:
    """Two gradients exchanged, moved, or one left out."""
    at, last = _returned(body)
    if body.where != "backward" or body.is_fusion or not is_return(last):
        return None
    values = tuple(last.args[0]) if isinstance(last.args[0], (tuple, list)) else ()
    new = exchange_places(values, rng)
    if body.is_whole and (new is None or rng.random() < 0.3):
        k = rng.choice([k for k, g in enumerate(values) if g is not None] or [-1])
        new = (*values[:k], None, *values[k + 1 :]) if k >= 0 else None
    return _with(body, at, last.from_bsym(args=(new,))) if new else None


def _results(body: Body) -> dict[str, Any] | None:
    """What a forward that has a backward returns; None for other bodies."""
    _, last = _returned(body)
    whole = body.is_whole and body.where == "forward" and len(last.args) == 2
    return last.args[0] if whole else None


def _with_results(body: Body, **changed: Any) -> Lines:
    at, last = _returned(body)
    result, saved = last.args
    return _with(body, at, last.from_bsym(args=({**result, **changed}, saved)))


@kind()
def return_another_output(body: Body, rng: Random) -> Lines | None:
    result = _results(body)
    if result is None:
        return None
    outs = [p for p in result["flat_output"] if is_value(p)]
    if not outs:
        return None
    old = rng.choice(outs)
    others = body.others(_returned(body)[0], old)
    if not others:
        return None
    new = rng.choice(others)
    swap = lambda values: tree_map(lambda x: new if isinstance(x, Proxy) and x.name == old.name else x, values)  # noqa: E731
    return _with_results(body, output=swap(result["output"]), flat_output=swap(result["flat_output"]))


@kind()
def exchange_outputs_of_autograd(body: Body, rng: Random) -> Lines | None:
    """Those that the script gets stay."""
    result = _results(body)
    outs = exchange_places(result["flat_output"], rng) if result is not None else None
    return _with_results(body, flat_output=outs) if outs else None


@kind(runs=False)
def drop_a_source(body: Body, rng: Random) -> Lines | None:
    """A gradient is None, or a part of it minus zero, in a backward that gives it one."""
    at = _at_random(body, rng, lambda b: b.sym.id in (mark_unused.id, unless_unused.id) and b.args[1].obj.sources)
    if at is None:
        return None
    line = body.lines[at]
    uses = line.args[1].obj
    fewer = uses.sources - {rng.choice(sorted(uses.sources))}
    changed = ContextObject(f"{line.args[1].name}_fewer", uses._replace(sources=fewer))
    return _with(body, at, line.from_bsym(args=(line.args[0], changed)))


@kind()
def call_the_function_of_another_fusion(body: Body, rng: Random) -> Lines | None:
    fusions = [(i, b) for i, b in enumerate(body.lines) if b.sym.is_fusion]
    pairs = [
        (i, a, b)
        for i, a in fusions
        for _, b in fusions
        if function_of(a) is not function_of(b)
        and len(a.args) == len(b.args)
        and all(map(alike, a.args, b.args))
        and len(a.output) == len(b.output)
        and all(map(alike, a.output, b.output))
    ]
    if not pairs:
        return None
    i, a, b = rng.choice(pairs)
    return _with(body, i, calling_function_of(b, a))


# ---- outside of the lines ----


@outside(runs=True)
def exchange_parameters_of_the_function(step: Step, rng: Random) -> Step | None:
    """Of the signature alone: the trace keeps its arguments."""
    args = step.forward.args
    pairs = [(i, j) for i in range(len(args)) for j in range(i) if alike(args[i], args[j])]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    new, known = from_trace(step.forward), step.forward.siginfo()
    new.bound_symbols, new._siginfo = list(step.forward.bound_symbols), copy.copy(known)
    new._siginfo.args = list(known.args)
    new._siginfo.args[i], new._siginfo.args[j] = known.args[j], known.args[i]
    return step._replace(forward=new)


def _other_border(step: Step, which: int, change: Callable[[list[BoundSymbol]], Lines | None]) -> Step | None:
    trace = step.border.runs[which] if step.border is not None else None
    lines = change(list(trace.bound_symbols)) if trace is not None else None
    if trace is None or lines is None:
        return None
    new = from_trace(trace)
    new.bound_symbols = lines
    runs = (new, step.border.runs[1]) if which == 0 else (step.border.runs[0], new)
    return step._replace(border=step.border._replace(runs=runs))


@outside()
def exchange_what_the_prologue_returns(step: Step, rng: Random) -> Step | None:
    def change(lines: list[BoundSymbol]) -> Lines | None:
        inputs, others = lines[-1].args[0]
        changed = exchange_places(inputs, rng)
        return [*lines[:-1], lines[-1].from_bsym(args=((changed, others),))] if changed else None

    return _other_border(step, 0, change)


@outside()
def fetch_another_parameter(step: Step, rng: Random) -> Step | None:
    def change(lines: list[BoundSymbol]) -> Lines | None:
        at = [i for i, b in enumerate(lines) if b.sym.id == fetch.id and len(b.args[1].obj) > 1]
        if not at:
            return None
        i = rng.choice(at)
        module, names = lines[i].args
        j, k = rng.sample(range(len(names.obj)), 2)
        mixed = list(names.obj)
        mixed[j], mixed[k] = mixed[k], mixed[j]
        lines[i] = lines[i].from_bsym(args=(module, ContextObject(f"{names.name}_mixed", tuple(mixed))))
        return lines

    return _other_border(step, 0, change)


@outside()
def exchange_what_the_epilogue_gets(step: Step, rng: Random) -> Step | None:
    """Or what it sets on a module, or returns."""

    def change(lines: list[BoundSymbol]) -> Lines | None:
        at = [i for i, b in enumerate(lines) if b.sym.id in (run_setter.id, run_rebuild.id) or is_return(b)]
        rng.shuffle(at)
        for i in at:
            *rest, values = lines[i].args or (None,)
            changed = exchange_places(values, rng) if isinstance(values, tuple) else None
            if changed:
                return [*lines[:i], lines[i].from_bsym(args=(*rest, changed)), *lines[i + 1 :]]
        return None

    return _other_border(step, 1, change)


# ---- memory ----


def _copy_into(value: Proxy, place: Proxy) -> BoundSymbol:
    return torchex.copy_.bind(value, place, grad_enabled=False, output=_new(place, "written"))


@kind()
def write_in_place(body: Body, rng: Random) -> Lines | None:
    """A line puts its result into what it reads."""
    at = _at_random(
        body,
        rng,
        lambda b: len(b.flat_proxy_outs) == 1 and any(alike(a, b.flat_proxy_outs[0]) for a in b.flat_proxy_args),
    )
    if at is None or body.is_fusion:
        return None
    bsym = body.lines[at]
    out = bsym.flat_proxy_outs[0]
    place = rng.choice([a for a in bsym.flat_proxy_args if alike(a, out)])
    return _with(body, at, bsym, _copy_into(out, place))


@kind()
def write_into_a_value(body: Body, rng: Random) -> Lines | None:
    """Into an input, a saved value or any other one."""
    if body.is_fusion or not body.lines:
        return None
    at = rng.randrange(1, len(body.lines)) if len(body.lines) > 1 else 0
    known = body.known(at)
    rng.shuffle(known)
    for place in known:
        if others := body.others(at, place):
            return [*body.lines[:at], _copy_into(rng.choice(others), place), *body.lines[at:]]
    return None


@kind()
def drop_a_write(body: Body, rng: Random) -> Lines | None:
    """Or write another value."""
    found = [i for i, b in enumerate(body.lines) if b.sym.name == "copy_"]
    if not found:
        return None
    at = rng.choice(found)
    bsym = body.lines[at]
    if others := body.others(at, bsym.args[0]):
        return _with(body, at, bsym.from_bsym(args=(rng.choice(others), *bsym.args[1:])))
    if {o.name for o in bsym.flat_proxy_outs} & {a.name for b in body.lines[at + 1 :] for a in b.flat_proxy_args}:
        return None
    return [*body.lines[:at], *body.lines[at + 1 :]]


@kind(runs=False, raw=True)
def drop_a_wait(body: Body, rng: Random) -> Lines | None:
    found = [i for i, b in enumerate(body.lines) if waits_for_future(b) or ends_copies(b)]
    if not found:
        return None
    at = rng.choice(found)
    return [*body.lines[:at], *body.lines[at + 1 :]]


@kind(runs=False, raw=True)
def move_a_wait_behind_a_use(body: Body, rng: Random) -> Lines | None:
    found = [i for i, b in enumerate(body.lines) if waits_for_future(b)]
    rng.shuffle(found)
    for at in found:
        outs = {o.name for o in body.lines[at].flat_proxy_outs}
        use = next(
            (i for i in range(at + 1, len(body.lines)) if outs & {a.name for a in body.lines[i].flat_proxy_args}), None
        )
        if use is not None and not is_return(body.lines[use]):
            return [*body.lines[:at], *body.lines[at + 1 : use + 1], body.lines[at], *body.lines[use + 1 :]]
    return None


@kind(raw=True)
def free_too_early(body: Body, rng: Random) -> Lines | None:
    found = [i for i, b in enumerate(body.lines) if is_deletion(b) and b.sym.name == "python_del" and i > 1]
    rng.shuffle(found)
    for at in found:
        names = {a.name for a in body.lines[at].flat_proxy_args}
        use = next((i for i in range(at - 1, 0, -1) if names & {a.name for a in body.lines[i].flat_proxy_args}), None)
        if use is not None and not is_unpack(body.lines[use]):
            lines = [*body.lines[:at], *body.lines[at + 1 :]]
            return [*lines[:use], body.lines[at], *lines[use:]]
    return None


@kind(raw=True)
def do_not_free(body: Body, rng: Random) -> Lines | None:
    found = [i for i, b in enumerate(body.lines) if is_deletion(b) and b.sym.name == "python_del"]
    if not found:
        return None
    at = rng.choice(found)
    return [*body.lines[:at], *body.lines[at + 1 :]]


# ---- random numbers ----


@kind()
def draw_again(body: Body, rng: Random) -> Lines | None:
    """Backward draws other numbers than forward did, or forward draws twice."""
    if body.is_fusion:
        return None
    forward = next(bodies(body.step))
    kinds = {b.where: b for b in bodies(body.step) if b.path == body.path}
    draws = [
        b
        for b in kinds.get("forward", forward).lines
        if computes(b) and block_function(b) is None and is_random(b) and len(b.flat_proxy_outs) == 1
    ]
    draws = [b for b in draws if not any(is_value(a) for a in b.flat_proxy_args)] or draws
    if not draws:
        return None
    bsym = rng.choice(draws)
    drawn, new = again(bsym, "again")
    out = bsym.flat_proxy_outs[0]
    for i, b in enumerate(body.lines):
        if is_unpack(b) or b is bsym:
            continue
        reads = [a for a in b.flat_proxy_args if alike(a, out)]
        known = {p.name for p in body.known(i)}
        if (
            reads
            and {a.name for a in bsym.flat_proxy_args} <= known
            and (out.name in known or body.where == "backward")
        ):
            old = next((a for a in reads if a.name == out.name), reads[0])
            return [*body.lines[:i], drawn, *reading_from(body.lines, i, old, new[out.name])[i:]]
    return None
