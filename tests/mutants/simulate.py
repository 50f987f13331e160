"""Runs a step for all ranks at once, in one process: each line for one rank after the other, collectives by their laws.

A line that computes runs as Thunder prints it. What communicates is a function of the values of all ranks:

    gather      the unsharded parameters are the shards of the group's ranks, by the bucket's layout
    reduction   the gradients of the group's ranks, added up, divided by the plan's divisor, cut by the layout
    a wire      carries values as they are; a copy to the host is the value itself
    parts       a part of a parameter is cut from the whole, and its gradient widened; ranks that share a batch gather or
                add up what they have

Random lines draw by the names of the values that they make: a line that moves draws the same numbers, and one that is
repeated under other names draws others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from passes.analysis.calls import block_function
from passes.analysis.recognise import (
    GATHER_WAITS,
    GATHERS,
    OFFLOADS,
    is_products,
    is_random,
    is_return,
    is_sequence_issue,
    is_sequence_wait,
    is_unpack,
    issues_future,
    waits_for_future,
)
from passes.blocks import release
from passes.comm import sequence
from passes.comm.sequence import Part, cut, local_part, widen
from passes.comm.symbols import (
    ALL_REDUCE,
    KeptGradients,
    accumulate,
    accumulated,
    keep_shards,
    replicated,
    wait_copies,
)
from passes.comm.symbols import note as note_step
from passes.parameters import mark_unused, unless_unused
from passes.plan import Axis, Bucket, Member, Placement

import torch
from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

Env = dict[str, Any]  # the values of a rank, by name
COMMUNICATES = (issues_future, waits_for_future, is_sequence_issue, is_sequence_wait)
NOTHING = {wait_copies.id, release.id, note_step.id, "shardtrace.check_ranks"}


class World(NamedTuple):
    """A mesh of ranks, ``(replicas, shards)``. Of the shards, so many neighbours have parts of the ``tensors``."""

    replicas: int
    shards: int
    tensors: int = 1

    @property
    def size(self) -> int:
        return self.replicas * self.shards

    def group(self, axis: Axis, rank: int) -> list[int]:
        """The ranks of a rank's group."""
        replica, shard = divmod(rank, self.shards)
        if axis is Axis.SHARD:
            return [replica * self.shards + s for s in range(self.shards)]
        if axis is Axis.TENSOR:
            first = rank - rank % self.tensors
            return [first + t for t in range(self.tensors)]
        if axis is Axis.REPLICATE:
            return [r * self.shards + shard for r in range(self.replicas)]
        return list(range(self.size))


@dataclass
class Rank:
    """What a rank has outside its traces."""

    number: int
    kept: KeptGradients = field(default_factory=KeptGradients)


class Simulation:
    """Ranks that run traces together."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ranks = [Rank(r) for r in range(world.size)]

    def run(self, trace: TraceCtx, args: Sequence[Sequence[Any]]) -> list[Any]:
        """What a trace returns, for each rank. ``args``: for each rank."""
        names = [name for name, _ in trace.siginfo().args]  # backward takes two lists
        envs = [dict(zip(names, given, strict=True)) for given in args]
        with torch.no_grad():
            return self._lines(trace.bound_symbols, envs, self.ranks, "")

    def _lines(self, lines: Sequence[BoundSymbol], envs: list[Env], ranks: list[Rank], path: str) -> list[Any]:
        code: list[BoundSymbol] = []

        def flush() -> None:
            if code:
                text, context = source(code)
                for env in envs:
                    env.update(context)
                    exec(text, env)
            code.clear()

        for bsym in lines:
            if bsym.sym.id == prims.PrimIDs.UNPACK_TRIVIAL or bsym.sym.id in NOTHING:
                continue
            if is_return(bsym):
                flush()
                return [_read(bsym.args[0] if len(bsym.args) == 1 else bsym.args, env) for env in envs]
            communicates, block = any(says(bsym) for says in COMMUNICATES), block_function(bsym)
            alone = not communicates and block is None and not is_products(bsym)
            if alone and bsym.sym.id not in LOCAL and not _draws(bsym):
                code.append(bsym)
                continue
            flush()
            if communicates:
                args = [_read(bsym.args[0], env) for env in envs]
                outs = self._communicate(bsym, args)
            elif is_products(bsym):
                outs = self._products(bsym, [_read(bsym.args, env) for env in envs])
            elif block is not None:
                inside = [
                    dict(zip((a.name for a in block.trace.args), _read(bsym.args, env), strict=True)) for env in envs
                ]
                outs = self._lines(block.trace.bound_symbols, inside, ranks, f"{path} {_names(bsym)}")
            else:
                outs = [self._local(bsym, env, rank, path) for env, rank in zip(envs, ranks, strict=True)]
            for env, out in zip(envs, outs, strict=True):
                _write(bsym.output, out, env)
        flush()
        return [None] * len(envs)

    def _local(self, bsym: BoundSymbol, env: Env, rank: Rank, path: str) -> Any:
        """The result of a line that asks for more than its arguments."""
        if bsym.sym.id in LOCAL:
            return LOCAL[bsym.sym.id](_read(bsym.args[0], env), bsym.args[-1], rank, self.world)
        torch.default_generator.manual_seed(zlib.crc32(f"{path} {_names(bsym)}".encode()) + rank.number)
        text, context = source([bsym])
        env.update(context)
        exec(text, env)
        return _read(bsym.output, env)

    def _products(self, bsym: BoundSymbol, given: list[Any]) -> list[Any]:
        """Products of rows that are put together, or sums of products, of which each rank gets its rows."""
        results: list[Any] = []
        for rank in range(len(given)):
            _, part, of, *others = given[rank]
            group, mine = self.world.group(part.plan.axis, rank), of_seat(part, rank, self.world)
            if bsym.sym.id == sequence.gather_products.id:
                whole = ON_PARTS[sequence.GATHER.wait.id](tuple(given[r][0] for r in group), mine)
                found = [product(whole.flatten(0, -2), others) for product in of.products]
                results.append((whole, *(y.view(shape) for y, shape in zip(found, of.shapes, strict=True))))
                continue
            (product,), (shape,) = of.products, of.shapes
            terms = [product(given[r][0].flatten(0, -2), given[r][3:]) for r in group]
            results.append(
                ON_PARTS[sequence.SCATTER.wait.id](tuple(t.view(part.whole_shape(shape)) for t in terms), mine)
            )
        return results

    def _communicate(self, bsym: BoundSymbol, args: list[Any]) -> list[Any]:
        if is_sequence_issue(bsym):
            return [tuple(args[r] for r in self.world.group(bsym.args[1].plan.axis, rank)) for rank in range(len(args))]
        if is_sequence_wait(bsym):
            parts = [of_seat(bsym.args[1], rank, self.world) for rank in range(len(args))]
            return [ON_PARTS[bsym.sym.id](sent, part) for sent, part in zip(args, parts, strict=True)]
        bucket: Bucket = bsym.args[1]
        if waits_for_future(bsym):
            return [_finish(bucket, bsym, future, rank) for rank, future in enumerate(args)]
        if bsym.sym.id in OFFLOADS:
            return [tuple(t.clone() for t in value) for value in args]
        sent = [self._packed(bsym, bucket, value, rank) for rank, value in enumerate(args)]
        results = []
        for rank in range(self.world.size):
            group = self.world.group(bucket.plan.axis, rank)
            assert len(group) == bucket.plan.world_size, f"{bucket.label} is not of the group {bucket.plan.axis}"
            if bsym.sym.id in GATHERS:
                results.append(Future(group.index(rank), torch.cat([sent[r] for r in group])))
                continue
            total = sum(sent[r].to(bucket.layout.dtype) for r in group) / bucket.plan.divisor
            mine = of_rank(bucket, group.index(rank))
            start = 0 if bsym.sym.id == ALL_REDUCE.issue.id else sum(mine.layout.row_sizes[: group.index(rank)])
            size = len(total) if bsym.sym.id == ALL_REDUCE.issue.id else mine.layout.numel
            results.append(Future(group.index(rank), total[start : start + size]))
        return results

    def _packed(self, bsym: BoundSymbol, bucket: Bucket, value: Any, rank: int) -> torch.Tensor:
        mine = of_rank(bucket, self.world.group(bucket.plan.axis, rank).index(rank))
        if bucket.is_cut and bsym.sym.id not in GATHERS:
            value = [_widened(grad, m.parameter.cut, rank) for grad, m in zip(value, mine.members, strict=True)]
        if bsym.sym.id in GATHERS:
            return mine.layout.flat_row(value).to(mine.layout.dtype).clone()
        return mine.layout.pack_rows(value).to(torch.float64)


class Future(NamedTuple):
    """What has arrived at a rank, which has this number in the group."""

    rank: int
    row: torch.Tensor


def _finish(bucket: Bucket, bsym: BoundSymbol, future: Any, rank: int) -> Any:
    if not isinstance(future, Future):  # a copy to the host
        return future
    mine = of_rank(bucket, future.rank)
    row = future.row.clone()
    if bsym.sym.id in GATHER_WAITS:
        whole = mine.layout.unpack_rows(row)
        if not bucket.is_cut:
            return whole
        return tuple(local_part(w, _of_bucket(m.parameter.cut, rank)) for w, m in zip(whole, mine.members, strict=True))
    return mine.layout.unpack_row(row.to(bucket.torch_reduced_dtype))


@lru_cache(maxsize=4096)
def of_rank(bucket: Bucket, rank: int) -> Bucket:
    """The bucket as another rank of its group has it. The same one if that is this rank."""
    plan = bucket.plan
    if rank == plan.rank:
        return bucket
    plan = replace(plan, rank=rank)
    members = tuple(Member(replace(m.parameter, plan=plan), m.trainable) for m in bucket.members)
    mine = Bucket(bucket.label, bucket.name, plan, members, bucket.dtype)
    if plan.placement is not Placement.OWNER:  # rows are the same on all ranks
        mine.layout = bucket.layout
    return mine


# ---- parts ----


def of_seat(part: Part, rank: int, world: World) -> Part:
    """The part that another rank has where rank 0, for which the step was compiled, has this one."""
    return _with_seat(part, (part.plan.rank + rank) % world.tensors)


def _of_bucket(part: Part, rank: int) -> Part:
    """The part of a parameter that a gather gives a rank."""
    return _with_seat(part, part.plan.seats[rank])


def _with_seat(part: Part, seat: int) -> Part:
    return Part(replace(part.plan, rank=seat), part.split, part.fill)


def _widened(grad: torch.Tensor, part: Part, rank: int) -> torch.Tensor:
    return sequence._widen(grad, _of_bucket(part, rank))


def _put_together(sent: Sequence[torch.Tensor], part: Part) -> torch.Tensor:
    return sum(sequence._widen(x, _with_seat(part, seat)) for seat, x in enumerate(sent))


ON_PARTS: dict[Any, Callable[[Sequence[torch.Tensor], Part], torch.Tensor]] = {
    sequence.GATHER.wait.id: _put_together,
    sequence.SCATTER.wait.id: lambda sent, part: local_part(sum(sent), part.of_gradients),
    sequence.SUM.wait.id: lambda sent, part: sum(sent),
}


# ---- lines that change or read what a rank has ----


def _keep(full: Any, bucket: Bucket, rank: Rank, world: World) -> Any:
    group = world.group(bucket.plan.axis, rank.number)
    return _kept_parts(full, of_rank(bucket, group.index(rank.number)))


def _kept_parts(full: Any, bucket: Bucket) -> Any:
    shards = bucket.layout.unpack_row(full[0].new_zeros(bucket.numel))
    for shard, tensor, m in zip(shards, full, bucket.members, strict=True):
        start, stop = m.parameter.pieces[bucket.plan.rank]
        shard.view(-1)[: stop - start].copy_(tensor.reshape(-1)[start:stop])
    return shards


def _add(grads: Any, bucket: Bucket, rank: Rank, world: World) -> None:
    rank.kept.add(grads, bucket)


def _take(grads: Any, bucket: Bucket, rank: Rank, world: World) -> Any:
    return rank.kept.take(grads, bucket)


LOCAL: dict[Any, Callable[[Any, Any, Rank, World], Any]] = {
    keep_shards.id: _keep,
    accumulate.id: _add,
    accumulated.id: _take,
    cut.id: lambda whole, part, rank, world: local_part(whole, of_seat(part, rank.number, world)),
    widen.id: lambda x, part, rank, world: sequence._widen(x, of_seat(part, rank.number, world)),
    replicated.id: lambda params, bucket, rank, world: tuple(p.to(bucket.layout.dtype) for p in params),
    **dict.fromkeys((mark_unused.id, unless_unused.id), lambda gradient, uses, rank, world: gradient),
}


# ---- lines as code ----


def source(lines: Sequence[BoundSymbol]) -> tuple[Any, dict[str, Any]]:
    """The code of some lines, and what it refers to besides their values."""
    scratch = TraceCtx()
    with tracectx(scratch):  # names the objects that lines refer to
        fresh = [bsym.from_bsym() for bsym in lines]
        text = "\n".join(line for bsym in fresh for line in bsym.python(indent=0, print_depth=1))
    context: dict[str, Any] = {"torch": torch}
    for bsym in fresh:
        for names in bsym.gather_ctxs():
            context.update(names)
    return _compiled(text.replace("cuda:0", "cpu")), context


@lru_cache(maxsize=2048)
def _compiled(text: str) -> Any:
    return compile(text, "<step>", "exec")


def _draws(bsym: BoundSymbol) -> bool:
    return not is_unpack(bsym) and _is_random(bsym)


_KNOWN: dict[int, tuple[BoundSymbol, bool]] = {}


def _is_random(bsym: BoundSymbol) -> bool:
    if id(bsym) not in _KNOWN:
        _KNOWN[id(bsym)] = bsym, is_random(bsym)
    return _KNOWN[id(bsym)][1]


def _names(bsym: BoundSymbol) -> str:
    return ",".join(p.name for p in bsym.flat_proxy_outs)


def _read(values: Any, env: Env) -> Any:
    return tree_map(lambda x: env[x.name] if isinstance(x, Proxy) else x, values)


def _write(places: Any, values: Any, env: Env) -> None:
    if isinstance(places, Proxy):
        env[places.name] = values
    elif isinstance(places, (tuple, list)):
        for place, value in zip(places, values, strict=True):
            _write(place, value, env)


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(values)[0] if isinstance(t, torch.Tensor)]
