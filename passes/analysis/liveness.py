"""How much tensor memory is alive at each line of an executed trace, and what it is used for. Changes nothing.

A trace's ``del`` lines say when names die. Memory dies with the last of all names that share it.
:mod:`passes.analysis.dry_run` finds out which do, and what the futures of collectives hold.

All sizes are bytes of storages of the device that computes, as requested from a caching allocator. They leave out
what a kernel or the backend of a process group allocates for itself.

It also lists the collectives of a trace, as plain rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from passes.analysis.calls import BlockFunction, block_function
from passes.analysis.dry_run import (
    Layout,
    Memory,
    Result,
    Values,
    blank,
    dry_run,
    layouts,
    memory_of,
    rehearse,
    silent,
    wire_state,
)
from passes.analysis.recognise import (
    GATHER_WAITS,
    GATHERS,
    ISSUED,
    REDUCTIONS,
    TRIP_WAITS,
    bucket_of,
    is_backward,
    is_collective,
    is_deletion,
    is_issue,
    is_offload,
    is_products,
    is_return,
    is_sequence_issue,
    is_sequence_wait,
    is_trip,
    is_unpack,
    is_wait,
    names,
    nbytes,
    part_at,
    unsharded_values,
)
from passes.comm.sequence import bytes_of
from passes.comm.symbols import ALL_GATHER, accumulate, accumulated
from passes.kernels.torch_call import Line
from passes.plan import Bucket

from thunder.core import prims
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import AnyProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag
from torch._ops import OpOverload


class Collective(NamedTuple):
    """One collective of a trace.

    ``bytes`` counts the whole unsharded bucket as it travels, padding included, or the whole value of which ranks hold
    parts of the sequence. Each rank sends and receives ``bytes * (N - 1) / N``, twice for an "all_reduce". ``dtype`` is
    the one on the wire, or the name of a :class:`passes.Wire`. ``phase`` is "forward" or "backward"; ``kind`` is
    "all_gather", "reduce_scatter", "broadcast", "reduce" or "all_reduce", with "_parts" if parts of a sequence
    travel, or "all_to_all_heads" and "all_to_all_positions"; ``bucket`` then says which dimension is split.
    ``parameters`` are the names of the bucket's members.
    """

    kind: str
    phase: str
    bucket: str
    dtype: str
    bytes: int
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        parameters = f": {', '.join(self.parameters)}" if self.parameters else ""
        return f"{self.kind} of {self.bucket} ({self.dtype}, {self.bytes} bytes{parameters})"


def collectives(trace: TraceCtx) -> list[Collective]:
    """The collectives of ``trace``, in the order in which it issues them."""
    phase = "backward" if is_backward(trace) else "forward"
    return [_row(bsym, phase) for bsym in issues(trace)]


def issues(trace: TraceCtx, *, once: bool = False) -> Iterator[BoundSymbol]:
    """The lines that issue the collectives of a trace, in order, with those inside of its lines. ``once``: those of a
    function only at its first call."""
    seen = set[BlockFunction]()
    for bsym in trace.bound_symbols:
        if is_issue(bsym) or is_sequence_issue(bsym):
            yield bsym
        elif (called := block_function(bsym)) is not None:
            if not (once and called in seen):
                yield from issues(called.trace, once=once)
            seen.add(called)
        elif is_products(bsym):
            yield from filter(is_sequence_issue, bsym.subsymbols)


def _row(bsym: BoundSymbol, phase: str) -> Collective:
    if is_sequence_issue(bsym):
        dtype = str(bsym.args[0].dtype.shortname())
        return Collective(bsym.sym.name, phase, part_at(bsym).label, dtype, sequence_bytes(bsym), ())
    bucket = bucket_of(bsym)
    parameters = tuple(m.parameter.name for m in bucket.members)
    return Collective(bsym.sym.name, phase, bucket.label, bucket.travels_as, bucket.bytes, parameters)


def sequence_bytes(bsym: BoundSymbol) -> int:
    """The bytes of the whole value that a collective of a sequence moves, padding included."""
    return bytes_of(ISSUED[bsym.sym.id], bsym.args[0], part_at(bsym))


# inputs: held by the caller during the whole call (shards, the batch); unsharded: gathered parameters; in_flight: held
# by futures; saved: activations kept for backward; gradients: reduced, returned by backward, or passed to it;
# activations: everything else
Kind = Literal["inputs", "unsharded", "in_flight", "activations", "saved", "gradients"]
KINDS: tuple[Kind, ...] = get_args(Kind)

CALLER = "caller's "  # prefix of a name by which the trace's caller holds a value


@dataclass
class Buffer:
    """A piece of memory in one role: alive after the lines ``born`` to ``freed - 1`` (None: beyond the last line).

    ``name`` is the first value that it held. Memory that changes its role, such as a future's that becomes a
    parameter's, is two buffers, one after the other.
    """

    name: str
    kind: Kind
    bytes: int
    born: int
    freed: int | None = None
    inner: str = ""  # in a list of what a block saves: the name that its function has for it


class LineMemory(NamedTuple):
    """Bytes that are alive after line ``line`` of a trace, in total and by kind; ``during``: the most while it runs."""

    line: int
    during: int
    total: int
    inputs: int
    unsharded: int
    in_flight: int
    activations: int
    saved: int
    gradients: int


class Liveness(NamedTuple):
    """The memory of a trace: one row for each line, and every buffer."""

    lines: list[LineMemory]
    buffers: list[Buffer]

    @property
    def peak(self) -> LineMemory:
        """The (first) line that needs the most memory: its ``during`` is the peak in bytes."""
        return max(self.lines, key=lambda row: row.during)


class StepLiveness(NamedTuple):
    """The memory of a forward and of its backward (None if there is none)."""

    forward: Liveness
    backward: Liveness | None

    @property
    def peak(self) -> int:
        """Bytes."""
        return max(part.peak.during for part in (self.forward, self.backward) if part is not None)


def step_liveness(
    forward: TraceCtx, backward: TraceCtx | None, *, persistent: int = 0, facts: dict[Any, Any] | None = None
) -> StepLiveness:
    """The memory of an executed forward and of its backward, which starts with what the forward leaves. Linear in the
    number of lines.

    The forward's arguments and results are alive during backward, because its caller holds them. Saved tensors are
    alive until backward deletes them. Gradients that are kept for a later step are assumed to be there from the start.

    ``persistent`` bytes are added at each line, for memory besides the arguments: the optimizer's state, or gradients
    of the step before. ``facts``: filled with what collectives and calls of torch do with memory, and read for
    other steps of the same model. Default: only for this step.
    """
    sums = sum(m.nbytes for v in _sums(backward).values() for m in memory_of(v)) if backward is not None else 0
    memory = _Memory(persistent + sums, facts)
    before = memory.run(forward)
    if backward is None:
        return StepLiveness(before, None)
    return StepLiveness(before, memory.left_by(forward, persistent).run(backward))


class _Memory:
    """Memory while a trace runs: which names hold which storage, and in which role."""

    def __init__(self, persistent: int = 0, facts: dict[Any, Any] | None = None) -> None:
        self.persistent = persistent
        self.values: Values = {}  # what each name is
        self.held: dict[str, set[Memory]] = {}  # by each name
        self.holders: dict[Memory, int] = {}  # how many names hold it
        self.buffer_of: dict[Memory, Buffer] = {}  # its present role
        self.buffers: list[Buffer] = []
        self.on_host: set[str] = set()  # values that take no memory of the device
        self.copies: set[str] = set()  # gradients on the host, which are not held at all
        self.line = 0
        self.facts: dict[Any, Any] = {} if facts is None else facts  # what lines do with memory

    def run(self, trace: TraceCtx) -> Liveness:
        shards = _shards(trace)
        given = _parameters(trace) | shards.keys()
        unsharded = unsharded_values(trace)
        temporary = []
        self.on_host |= on_host(trace)
        for name, value in _sums(trace).items():
            self._hold(name, value, "gradients", born=0)
        for self.line, bsym in enumerate(trace.bound_symbols):
            temporary.append(0)
            if is_unpack(bsym):
                self._unpack(bsym, given, shards)
            elif bsym.sym.id == prims.PrimIDs.DEL:
                for a in bsym.flat_proxy_args:
                    self._release(a.name)
            elif is_return(bsym):
                self._assign(names(bsym.args) if is_backward(trace) else set(), "gradients")
                self._assign({p.name for p in _saved(trace)}, "saved")
            elif is_offload(bsym) or any(a.name in self.copies for a in bsym.flat_proxy_args):
                self.copies |= names(bsym.output)
            elif not (is_deletion(bsym) or bsym.sym.id in (accumulate.id, accumulated.id)):
                temporary[-1] = self._call(bsym, unsharded)
        return Liveness(_rows(self.buffers, temporary, self.persistent), self.buffers)

    def left_by(self, forward: TraceCtx, persistent: int) -> _Memory:
        """The memory that is alive when ``forward`` has returned, with which its backward starts."""
        then = _Memory(persistent, self.facts)
        then.on_host = self.on_host
        kinds = {memory: buffer.kind for memory, buffer in self.buffer_of.items()}
        by_caller = [(name, name) for name in self.values if name.startswith(CALLER)]
        by_caller += [(CALLER + name, name) for name in sorted(_results(forward))]
        for name, old in [*by_caller, *((p.name, p.name) for p in _saved(forward))]:
            if old in self.values:
                then._hold(name, self.values[old], kinds)
        return then

    def _unpack(self, bsym: BoundSymbol, given: set[str], shards: Values) -> None:
        """Gives names to memory that was alive before. The caller's memory gets a name of the caller's, too."""
        for o in bsym.flat_proxy_outs:
            if not isinstance(o, TensorProxy) or o.name in self.values:
                continue
            value = shards[o.name] if o.name in shards else blank(o)
            kind: Kind = "inputs"
            if bsym.sym.id == prims.PrimIDs.UNPACK_SEQUENCE and o.name not in given:
                kind = "gradients" if bsym.args[0].name == "cotangents" else "saved"
            self._hold(o.name, value, kind, born=0)
            if kind == "inputs":
                self._hold(CALLER + o.name, value, kind)

    def _call(self, bsym: BoundSymbol, unsharded: Container[str]) -> int:
        """Runs a line. Returns the bytes that it needs besides its outputs."""
        if (called := block_function(bsym)) is not None:
            return self._call_part(bsym, called)
        arguments = {a.name: self.values[a.name] for a in bsym.flat_proxy_args if a.name in self.values}
        if bsym.sym.id in REDUCTIONS:
            self._assign(arguments, "gradients")
        outputs, temporary = self._dry_run(bsym, arguments)
        for name, value in outputs.items():
            self._hold(name, value, _kind(bsym, name, unsharded))
        if is_wait(bsym) or is_sequence_wait(bsym) or bsym.sym.id in TRIP_WAITS:
            self._assign(outputs, _kind(bsym, "", unsharded), of="in_flight")
            for name, future in arguments.items():
                self._hold(name, future, "in_flight")  # again: it may have released what it held
        return temporary

    def _dry_run(self, bsym: BoundSymbol, arguments: Values) -> Result:
        """Runs a line on meta tensors. The result of a collective or a call of torch serves all equal ones."""
        what: Hashable
        if is_collective(bsym):
            what = bsym.sym.id, _work_of(bucket_of(bsym))
        elif is_trip(bsym) or bsym.sym.id in TRIP_WAITS:
            away = bsym.args[1]
            what = bsym.sym.id, away.moves, away.nbytes
        elif isinstance(bsym.sym.id, Line | OpOverload):
            flat, spec = bsym.flat_args_and_spec
            numbers = {name: i for i, name in enumerate(arguments)}
            what = bsym.sym.id, spec, tuple(numbers.get(a.name) if isinstance(a, Proxy) else (type(a), a) for a in flat)
        else:
            return dry_run(bsym, arguments)
        made = [o.name for o in bsym.flat_proxy_outs]
        return rehearse(self.facts, what, arguments, made, lambda: dry_run(bsym, arguments))

    def _call_part(self, bsym: BoundSymbol, part: BlockFunction) -> int:
        """Runs the function of a block, with the caller's memory as inputs. What forward saved for it is freed as the
        function uses it."""
        values = {p.name: self.values[a.name] for p, a in zip(part.trace.args, bsym.args, strict=True)}
        if part.saved:
            self._release(next(a.name for p, a in zip(part.trace.args, bsym.args, strict=True) if p.name == part.saved))
            values |= zip((o.name for o in _unpacked(part)), values.pop(part.saved), strict=True)
        by_caller = frozenset(n for n, v in values.items() if any(m in self.holders for m in memory_of(v)))
        results, temporary = rehearse(
            part.facts, by_caller, values, _returned(part), lambda: _run_function(part, values, by_caller)
        )
        for o, result in zip(bsym.output, part.trace.bound_symbols[-1].args[0], strict=True):
            if isinstance(result, list):
                self._hold(o.name, [results[p.name] for p in result], "activations")
                self._name_inside(o.name, {p.name: results[p.name] for p in result})
            else:
                self._hold(o.name, results[result.name], "activations")
        return temporary

    def _name_inside(self, holder: str, values: Values) -> None:
        """Tells what the buffers of ``holder``, a list, are."""
        for name, value in values.items():
            for memory in memory_of(value):
                buffer = self.buffer_of.get(memory)
                if buffer is not None and buffer.name == holder and not buffer.inner:
                    buffer.inner = name

    def _hold(self, name: str, value: Any, kind: Kind | Mapping[Memory, Kind], *, born: int | None = None) -> None:
        """Makes ``name`` hold ``value`` and nothing else. Memory that no name held before comes into being."""
        before = self.held.get(name, set())
        on_device = name.removeprefix(CALLER) not in self.on_host
        now = dict.fromkeys(memory_of(value)) if on_device else {}
        self.values[name], self.held[name] = value, set(now)
        for memory in now:
            if memory in before:
                continue
            if memory not in self.buffer_of:
                role = kind if isinstance(kind, str) else kind[memory]
                since = self.line if born is None else born
                self._begin(memory, Buffer(name.removeprefix(CALLER), role, memory.nbytes, since))
            self.holders[memory] = self.holders.get(memory, 0) + 1
        self._let_go(before - now.keys())

    def _release(self, name: str) -> None:
        held = self.held.pop(name, set())
        self.values.pop(name, None)
        self._let_go(held)

    def _let_go(self, memories: Iterable[Memory]) -> None:
        for memory in memories:
            self.holders[memory] -= 1
            if not self.holders[memory]:
                del self.holders[memory]
                self.buffer_of.pop(memory).freed = self.line

    def _begin(self, memory: Memory, buffer: Buffer) -> None:
        self.buffer_of[memory] = buffer
        self.buffers.append(buffer)

    def _assign(self, holders: Iterable[str], kind: Kind, *, of: Kind = "activations") -> None:
        """Gives memory of kind ``of`` that ``holders`` hold another kind: memory in flight from now on, any other since
        it came into being."""
        for name in holders:
            for memory in self.held.get(name, ()):
                buffer = self.buffer_of[memory]
                if buffer.kind != of:
                    continue
                if of == "in_flight":
                    buffer.freed = self.line
                    self._begin(memory, Buffer(name, kind, buffer.bytes, self.line))
                else:
                    buffer.kind = kind


def _run_function(part: BlockFunction, values: Values, by_caller: Collection[str]) -> Result:
    """Runs the function of a block; ``values`` are its inputs by name, of which the caller holds some meanwhile."""
    inside = _Memory()
    for name, value in values.items():
        inside._hold(name, value, "inputs", born=0)
        if name in by_caller:
            inside._hold(CALLER + name, value, "inputs", born=0)
    rows = inside.run(part.trace).lines
    return Result({name: inside.values[name] for name in _returned(part)}, max(r.during for r in rows) - rows[-1].total)


class SavedMemory(NamedTuple):
    """What a block's forward saves in its list: for each value whether its memory may leave the device, because neither
    the block's inputs nor its results lie there; and the bytes of that memory."""

    own: tuple[bool, ...]
    bytes: int


def saved_memory(part: BlockFunction, free: Collection[str], saved: Collection[str]) -> SavedMemory:
    """``free``: the names of inputs that nothing else reads, of which ``saved`` ones leave the device, too."""
    key = "saved memory", frozenset(free), frozenset(saved)
    if key not in part.facts:
        values: Values = {p.name: blank(p) for p in part.trace.args}
        found = _run_function(part, values, frozenset(values)).outputs
        outputs = part.trace.bound_symbols[-1].args[0]
        stays = [v for name, v in values.items() if name not in free]
        stays += [found[o.name] for o in outputs if not isinstance(o, list)]
        there = {m for v in stays for m in memory_of(v)}
        lists = [found[p.name] for o in outputs if isinstance(o, list) for p in o]
        own = tuple(type(v) is Layout and v.memory not in there for v in lists)
        travel = [v for v, may in zip(lists, own, strict=True) if may] + [values[name] for name in saved]
        part.facts[key] = SavedMemory(own, sum(m.nbytes for m in {m for v in travel for m in memory_of(v)}))
    known: SavedMemory = part.facts[key]
    return known


def _returned(part: BlockFunction) -> list[str]:
    """The results of a function, also those in its list of what is saved."""
    return [p.name for r in part.trace.bound_symbols[-1].args[0] for p in (r if isinstance(r, list) else [r])]


def _work_of(bucket: Bucket) -> Hashable:
    """A key for the memory of a bucket's collectives, equal for the buckets of equal blocks, whenever they travel."""
    members = (
        (p.used_shape, p.shard_shape, p.dtype, p.owner, p.plan, m.trainable)
        for m in bucket.members
        for p in [m.parameter]
    )
    return type(bucket), bucket.dtype, bucket.wire, tuple(members) or bucket.plan


def _kind(bsym: BoundSymbol, name: str, unsharded: Container[str]) -> Kind:
    """The role of memory that a line allocates for its output ``name``."""
    if is_issue(bsym) or is_sequence_issue(bsym) or is_trip(bsym):
        return "in_flight"
    if bsym.sym.id in TRIP_WAITS:
        return "saved"
    if bsym.sym.id in GATHER_WAITS or name in unsharded:
        return "unsharded"
    return "gradients" if is_wait(bsym) else "activations"


def _parameters(trace: TraceCtx) -> set[str]:
    """Names of parameters and buffers, which live in modules."""
    unpacked = (o for b in trace.bound_symbols if is_unpack(b) for o in b.flat_proxy_outs)
    return {o.name for o in unpacked if ProxyTag.STATIC_MEMORY_LOCATION in o.tags}


def _shards(trace: TraceCtx) -> Values:
    """Shards as ``fsdp`` lays them out: a bucket's lie one after the other, so that they need no packing."""
    found: Values = {}
    for bsym in trace.bound_symbols:
        if bsym.sym.id == ALL_GATHER.issue.id:
            flat, begin = Memory(nbytes(bsym.args[0])), 0
            for a in bsym.args[0]:
                found[a.name] = blank(a, flat, begin)
                begin += math.prod(a.shape)
    return found


def on_host(trace: TraceCtx) -> set[str]:
    """Names of shards at rest in host memory. (Copies to the host are not held at all.)"""
    gathers = (b for b in trace.bound_symbols if b.sym.id in GATHERS and bucket_of(b).plan.host is not None)
    return {a.name for b in gathers for a in b.args[0]}


def _sums(trace: TraceCtx) -> Values:
    """Gradients of earlier steps, by the names that they get when they are taken, or by one of the caller's; and the
    errors of their rounding, which wires keep."""
    found: Values = {}
    for bsym in trace.bound_symbols:
        if bsym.sym.id == accumulated.id:
            found |= {o.name: blank(o) for o in bsym.flat_proxy_outs}
        elif bsym.sym.id == accumulate.id:
            bucket = bucket_of(bsym)
            dtype = to_torch_dtype(bucket.plan.summed_dtype(bucket.rest_dtype))
            found |= {f"{CALLER}sum of {g.name}": blank(g, dtype=dtype) for g in bsym.args[0]}
        elif bsym.sym.id in REDUCTIONS:
            errors = enumerate(layouts(wire_state(silent(bucket_of(bsym)))))
            found |= {f"{CALLER}error {i} of {bsym.output.name}": error for i, error in errors}
    return found


def _results(trace: TraceCtx) -> set[str]:
    """The values that a forward returns to its caller."""
    result = trace.bound_symbols[-1].args[0]
    return names(result["output"] if isinstance(result, dict) and "output" in result else result)


def _unpacked(part: BlockFunction) -> list[TensorProxy]:
    """The saved values of a block, by the names that its backward gives them."""
    return list(next(b for b in part.trace.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_SEQUENCE).output)


def _saved(trace: TraceCtx) -> tuple[Proxy, ...]:
    """The values that a forward saves for its backward: tensors, and a list for each call of a block."""
    returned = trace.bound_symbols[-1].args
    if TraceTag.AUGMENTED_FORWARD not in trace.tags or len(returned) != 2:
        return ()
    _, (saved, other) = returned
    return tuple(p for p in (*saved, *other) if isinstance(p, TensorProxy | AnyProxy))


def _rows(buffers: list[Buffer], temporary: list[int], persistent: int) -> list[LineMemory]:
    change: list[dict[Kind, int]] = [{} for _ in temporary]
    for buffer in buffers:
        born, kind = change[buffer.born], buffer.kind
        born[kind] = born.get(kind, 0) + buffer.bytes
        if buffer.freed is not None:
            freed = change[buffer.freed]
            freed[kind] = freed.get(kind, 0) - buffer.bytes
    rows, now, total = [], dict.fromkeys(KINDS, 0), persistent
    for line, changes in enumerate(change):
        before = total
        for kind, added in changes.items():
            now[kind] += added
            total += added
        rows.append(LineMemory(line, max(before, total + temporary[line]), total, *now.values()))
    return rows
