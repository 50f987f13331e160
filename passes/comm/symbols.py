"""The collectives of a bucket, and copies to the host, as symbols of a trace and as the functions that they run.

    full = synchronize(shards, bucket)          inserted by a pass; autodiff and lowering turn it into
    future = all_gather(shards, bucket)         the shards of all ranks, in flight
    full = wait_all_gather(future, bucket)      the unsharded, unpadded parameters
    future = reduce_scatter(grads, bucket)      gradients, averaged over ranks, in flight to their shards' owners
    grads = wait_reduce_scatter(future, bucket) this rank's shards of the averaged gradients

``shards``, ``full`` and ``grads`` are tuples of tensors in the order of the bucket's members. If ranks own whole
parameters, the two pairs are broadcast, wait_broadcast and reduce, wait_reduce. If every rank has whole parameters:

    full = replicated(params, bucket)           the same tensors, or copies in their compute dtype
    future = all_reduce(grads, bucket)          gradients, averaged over ranks, in flight
    grads = wait_all_reduce(future, bucket)

If parameters are at rest in host memory, a gather begins with the copy of the shards to the device, and two more lines
follow the reduction of gradients:

    future = offload(grads, bucket)             this rank's shards of the gradients, in flight to the host
    grads = wait_offload(future, bucket)        the same shards, on the host, complete at the end of the trace
    wait_copies(memory)                         the last line of a trace that copies to or from host memory

If backward gathers from second shards inside the node, forward keeps them:

    second = keep_shards(full, bucket)          this rank's parts of the unsharded parameters, in memory of their own

Gradients may be kept from step to step, whole and unreduced. Two symbols add to them and take them:

    accumulate(grads, bucket)               replaces a reduction: adds gradients to the kept ones
    grads = accumulated(grads, bucket)      precedes a reduction: adds the kept ones to the gradients and clears them

Activations may be kept in the memory of the host:

    future = store(values, away)        starts to copy what a block saves for backward to the host
    stored = wait_store(future, away)   the copies; the device may use the memory again
    future = load(stored, away)         starts to copy it back, into new memory
    values = wait_load(future, away)    as they were

``values`` are tensors, and lists of what blocks save. Memory travels as a whole, and once if several tensors share it:
they share it again, and lie in it as before. What does not travel (inputs, results, parameters) stays where it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, Literal, NamedTuple

from passes.comm import cuts, direct, native
from passes.compat.jit import symbol_that_calls
from passes.compat.versions import is_profiling
from passes.plan import Axis, Bucket, Level, Placement, ShardedParameter
from passes.plan.bucket import summed_to
from passes.plan.runtime import HostMemory

import torch
from thunder.core import dtypes
from thunder.core.codeutils import ContextObject
from thunder.core.devices import cpu, to_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import OpTags, get_grad, put_grad
from thunder.core.proxies import AnyProxy, FutureTensorProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import register_grad
from thunder.extend import OperatorExecutor

# ---- properties of symbols ----


class Property(Flag):
    """The properties of a symbol, any number of them. Those of Thunder's symbols are listed in
    :mod:`passes.analysis.recognise`; our own symbols carry theirs as tags."""

    NONE = 0
    FREE = auto()  # computes nothing: a comment, a line for Python's names, or one that takes time only on a link
    VIEW = auto()  # the results share the memory of the first argument (a reshape copies if its strides demand it)
    INDEX = auto()  # a view if indexed by numbers and slices, a look-up if indexed by a tensor
    CAST = auto()  # the arguments in another dtype or on another device; moves nothing if they have these already
    COPY = auto()  # the first argument in new memory, or in the same memory if it has the wanted layout already
    LOOK_UP = auto()  # reads no more of its table, the first argument, than it writes
    PARTS = auto()  # copies parts of the arguments: reads as much of them as it writes
    CONSTANT = auto()  # makes a tensor from numbers, the same one each time
    RANDOM = auto()  # may draw random numbers
    IN_PLACE = auto()  # changes an argument
    STATEFUL = auto()  # reads and changes tensors that outlive the step and are not among its arguments

    @property
    def is_alias(self) -> bool:
        """True if the results hold the values of the first argument, perhaps in the same memory."""
        return bool(self & (Property.VIEW | Property.INDEX | Property.CAST | Property.COPY))


class Folds(str):
    """A tag of symbols: successive lines of one print as a single comment, which says this of each."""


# ---- copies to the host ----


def issue_offload(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> torch.Tensor:
    """Starts to copy this rank's shards of a bucket's gradients to the host."""
    assert bucket.plan.host is not None
    return bucket.plan.host.send(bucket.layout.flat_row(grads))


def finish_offload(row: torch.Tensor, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """This rank's shards. Nobody may read them before :func:`finish_copies`."""
    return bucket.layout.unpack_row(row)


def finish_copies(memory: ContextObject) -> None:
    """Blocks the program until gradients have arrived and shards are read, because the optimizer runs next."""
    memory.obj.finish()


# ---- collectives ----


# Thunder's lowering keeps an executor's symbols as they are, whichever executors the user chose.
executor = OperatorExecutor("shardtrace", version="0.1")


Run = Callable[[Any, Bucket], Any]


def _pair(name: str) -> tuple[Run, Run]:
    """The functions that issue a collective of this name and wait for it: those of the bucket's wire, or of its plan's
    transport. An error says so if another rank is the cause."""

    def finish(future: Any, bucket: Bucket) -> Any:
        runtime = bucket.plan.runtime
        if runtime.progress is not None:
            runtime.progress.finished(future)
        with runtime.communicating(bucket.label):
            run = _function(f"finish_{name}", bucket) if bucket.wire is None else _finish_wire
            return run(future, bucket)

    def issue(value: tuple[torch.Tensor, ...], bucket: Bucket) -> Any:
        runtime = bucket.plan.runtime
        try:
            future = (_function(f"issue_{name}", bucket) if bucket.wire is None else _issue_wire)(value, bucket)
        except RuntimeError:
            with runtime.communicating(bucket.label):  # says so if another rank is the cause
                raise
        if runtime.progress is not None:
            runtime.progress.issued(future, finish, bucket)
        return future

    return issue, finish


def _function(name: str, bucket: Bucket) -> Run:
    transport = cuts if bucket.is_cut else direct if bucket.plan.direct else native
    found: Run = getattr(transport, name)
    return found


def _issue_wire(value: tuple[torch.Tensor, ...], bucket: Bucket) -> Any:
    wire, host = bucket.wire, bucket.plan.host
    assert wire is not None
    if host is None or wire.reduces:  # gradients are on the device
        return wire.issue(value, bucket)
    places = tuple(torch.empty_like(shard, device=host.device) for shard in value)
    with host.ahead():
        for shard, place in zip(value, places, strict=True):
            host.load(shard, place)
        return _FromHost(wire.issue(places, bucket), host.mark(), places)


def _finish_wire(future: Any, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    assert bucket.wire is not None
    if isinstance(future, _FromHost):
        future.issued.wait()
        future = future.of_wire
    return bucket.wire.finish(future, bucket)


class _FromHost(NamedTuple):
    """The future of a wire that issued on the stream of copies to the device. ``places`` must outlive its work."""

    of_wire: Any
    issued: Any
    places: tuple[torch.Tensor, ...]


def _cast(params: tuple[torch.Tensor, ...], bucket: Bucket) -> tuple[torch.Tensor, ...]:
    return tuple(p.to(bucket.layout.dtype) for p in params)


def _keep(full: tuple[torch.Tensor, ...], bucket: Bucket) -> tuple[torch.Tensor, ...]:
    row = full[0].new_zeros(bucket.numel)  # as a gather wants them: one after the other, padded with zeros
    shards = bucket.layout.unpack_row(row)
    for shard, tensor, m in zip(shards, full, bucket.members, strict=True):
        start, stop = m.parameter.pieces[bucket.plan.rank]
        shard.view(-1)[: stop - start].copy_(tensor.reshape(-1)[start:stop])
    return shards


# ---- symbols ----


def _profiled(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, with a range of the symbol and its bucket in the profile while a profiler of torch is on."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        if not is_profiling():
            return fn(*args)
        label = getattr(args[-1], "label", "")
        with torch.profiler.record_function(f"shardtrace::{name} {label}".rstrip()):
            return fn(*args)

    return run


def symbol(
    name: str,
    meta: Callable[..., Any] | None,
    fn: Callable[..., Any] | None,
    *,
    properties: Property = Property.FREE,
    tags: Sequence[Any] = (),
) -> Symbol:
    """Makes a symbol that runs ``fn``. A symbol without a function is lowered to its subsymbols.

    ``properties`` describe its work besides sending. Most of our symbols compute nothing.
    """
    fn = _profiled(name, fn) if fn is not None else None
    return symbol_that_calls(
        name, meta, fn, id=f"shardtrace.{name}", executor=executor if fn else None, is_prim=fn is not None,
        tags=[*tags, properties],
    )  # fmt: skip


def _all_gather_meta(shards: tuple[TensorProxy, ...], bucket: Bucket) -> FutureTensorProxy:
    host = bucket.plan.host
    device = shards[0].device if host is None else to_device(host.device)
    return FutureTensorProxy(shape=(bucket.full_numel,), device=device, dtype=bucket.dtype)


def _wait_all_gather_meta(future: FutureTensorProxy, bucket: Bucket) -> tuple[TensorProxy, ...]:
    dtype = bucket.plan.unsharded_dtype(bucket.rest_dtype)
    return tuple(
        TensorProxy(
            shape=m.parameter.used_shape,
            device=future.device,
            dtype=dtype,
            requires_grad=m.trainable,
            tags={m.parameter.cut} if m.parameter.cut is not None else None,
        )
        for m in bucket.members
    )


def _reduce_scatter_meta(grads: tuple[TensorProxy, ...], bucket: Bucket) -> FutureTensorProxy:
    return FutureTensorProxy(shape=(bucket.numel,), device=grads[0].device, dtype=bucket.dtype)


def _shards(device: Any, bucket: Bucket, dtype: Any) -> tuple[TensorProxy, ...]:
    """This rank's parts of the members, as proxies."""
    return tuple(TensorProxy(shape=m.parameter.shard_shape, device=device, dtype=dtype) for m in bucket.members)


def _wait_reduce_scatter_meta(future: FutureTensorProxy, bucket: Bucket) -> tuple[TensorProxy, ...]:
    return _shards(future.device, bucket, bucket.reduced_dtype)


def _wait_offload_meta(future: FutureTensorProxy, bucket: Bucket) -> tuple[TensorProxy, ...]:
    return _shards(future.device, bucket, bucket.rest_dtype)


def _offload_meta(grads: tuple[TensorProxy, ...], bucket: Bucket) -> FutureTensorProxy:
    return FutureTensorProxy(shape=(bucket.numel,), device=cpu, dtype=bucket.rest_dtype)


def _replicated_meta(params: tuple[TensorProxy, ...], bucket: Bucket) -> tuple[TensorProxy, ...]:
    return tuple(
        TensorProxy(like=p, dtype=bucket.dtype, requires_grad=m.trainable)
        for p, m in zip(params, bucket.members, strict=True)
    )


def _keep_shards_meta(full: tuple[TensorProxy, ...], bucket: Bucket) -> tuple[TensorProxy, ...]:
    return _shards(full[0].device, bucket, bucket.dtype)


Held = Literal["part", "heads", "whole"]


@dataclass(frozen=True, eq=False)
class CollectiveOp:
    """A collective: the symbol that issues it, the one that waits for it, and what a pass, a cost or a law asks of it.

    ``carries``: a bucket's "parameters" or "gradients", a "value" of which ranks hold parts
    (:mod:`passes.comm.sequence`), or what each rank copies by itself: a "copy" of gradients to the host, and
    "activations" to the host and back.
    ``takes``, ``gives``: what a rank has before and afterwards. ``adds``: the values of ranks are added up.
    """

    issue: Symbol
    wait: Symbol
    carries: Literal["parameters", "gradients", "value", "copy", "activations"]
    takes: Held
    gives: Held
    adds: bool = False

    @property
    def crossings(self) -> int:
        """How often each byte is sent: twice if all ranks get the whole of a sum."""
        return 2 if self.adds and self.gives == "whole" else 1

    @property
    def exchanges(self) -> bool:
        """Whether each rank sends other bytes to each rank."""
        return "heads" in (self.takes, self.gives)

    @property
    def needs_shape(self) -> bool:
        """Whether the wait takes the shape of the value that was sent, which the future does not tell."""
        return self.carries == "value" and self.gives == "part"

    def __call__(self, value: Any, of: Any) -> Any:
        """Adds both lines to the trace that is being made, for a bucket or a part."""
        issue, wait = self.issue, self.wait
        shape = (tuple(value.shape),) if self.needs_shape else ()
        return wait(issue(value, of), of, *shape)


def _of_buckets(name: str, carries: Literal["parameters", "gradients"], gives: Held, runs: str = "") -> CollectiveOp:
    """A collective of buckets. ``runs``: the functions of transports that it calls, if they have another name."""
    issue, finish = _pair(runs or name)
    metas: tuple[Callable[..., Any], Callable[..., Any]] = _all_gather_meta, _wait_all_gather_meta
    if carries == "gradients":
        metas = _reduce_scatter_meta, _wait_reduce_scatter_meta
    lines = symbol(name, metas[0], issue), symbol(f"wait_{name}", metas[1], finish)
    return CollectiveOp(*lines, carries, "part" if carries == "parameters" else "whole", gives, carries == "gradients")


ALL_GATHER = _of_buckets("all_gather", "parameters", "whole")
BROADCAST = _of_buckets("broadcast", "parameters", "whole", "all_gather")
REDUCE_SCATTER = _of_buckets("reduce_scatter", "gradients", "part")
REDUCE = _of_buckets("reduce", "gradients", "part", "reduce_scatter")
ALL_REDUCE = _of_buckets("all_reduce", "gradients", "whole")
OFFLOAD = CollectiveOp(
    symbol("offload", _offload_meta, issue_offload), symbol("wait_offload", _wait_offload_meta, finish_offload),
    "copy", "part", "part",
)  # fmt: skip
BUCKETS = ALL_GATHER, BROADCAST, REDUCE_SCATTER, REDUCE, ALL_REDUCE, OFFLOAD

replicated = symbol("replicated", _replicated_meta, _cast, properties=Property.CAST)
keep_shards = symbol("keep_shards", _keep_shards_meta, _keep, properties=Property.PARTS)
wait_copies = symbol("wait_copies", lambda memory: None, finish_copies, tags=[OpTags.DONT_DCE])

GATHER_OF = {Placement.SHARD: ALL_GATHER, Placement.OWNER: BROADCAST, Placement.REPLICATE: replicated}
REDUCTION_OF = {Placement.SHARD: REDUCE_SCATTER, Placement.OWNER: REDUCE, Placement.REPLICATE: ALL_REDUCE}


def unshard(shards: tuple[TensorProxy, ...], bucket: Bucket) -> tuple[TensorProxy, ...]:
    """Adds the lines that unshard a bucket's parameters to the trace that is being made."""
    full: tuple[TensorProxy, ...] = GATHER_OF[bucket.plan.placement](shards, bucket)
    return full


def _average(grads: tuple[TensorProxy, ...], bucket: Bucket) -> tuple[TensorProxy, ...]:
    """Averages gradients of unsharded parameters over ranks, and places them like the parameters at rest."""
    grads = REDUCTION_OF[bucket.plan.placement](grads, bucket)
    return grads if bucket.outer is None else _average(grads, bucket.outer)


# Has no function: lowering takes its subsymbols. Thunder's autodiff takes a symbol for a constant and leaves it whole
# if all of its arguments are frozen, except for symbols named "synchronize".
synchronize = symbol("synchronize", unshard, None)


def _synchronize_grad(shards: tuple[TensorProxy, ...], bucket: Bucket) -> tuple[TensorProxy, ...]:
    full = unshard(shards, bucket)
    if bucket.trainable is not None:
        trainable = [i for i, m in enumerate(bucket.members) if m.trainable]
        grads = _average(tuple(get_grad(full[i]) for i in trainable), bucket.trainable)
        if bucket.plan.host is not None:
            grads = OFFLOAD(grads, bucket.trainable)
        for i, grad in zip(trainable, grads, strict=True):
            put_grad(shards[i], grad)
    return full


register_grad(synchronize, _synchronize_grad)


def _call(check: ContextObject) -> None:
    check.obj()


# The first line of a forward: raises if ranks are about to run different steps.
check_ranks = symbol("check_ranks", lambda meet: None, _call, tags=[OpTags.DONT_DCE])
# Notes for the next check_ranks that a forward ends, or that a backward begins or ends.
note = symbol("note", lambda progress: None, _call, tags=[OpTags.DONT_DCE])


# ---- kept gradients ----


class Kept(NamedTuple):
    parameter: ShardedParameter
    total: torch.Tensor


def _check_same_part(kept: Kept, parameter: ShardedParameter) -> None:
    """Raises RuntimeError if a step has kept the gradient of another part than this one has."""
    one, other = (p.cut.split if p.cut is not None else None for p in (kept.parameter, parameter))
    if one != other:
        raise RuntimeError(
            f"no_sync has added up gradients of parameter {parameter.name!r} from steps that compute with another part "
            "of it: reduce them before another method or part of the model is called, or choose its part by "
            "TensorParallel(parameters={...})"
        )


class KeptGradients:
    """The gradients of a model that are not reduced yet, or not over replicas. They live from step to step."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[Axis, int], Kept] = {}  # the group to reduce over, and the parameter's index
        self.used: set[Level] = set()  # on which levels a step has ever kept gradients
        self.reducing = False  # gradients have been taken since the last that were added, or some were left behind

    def add(self, grads: tuple[torch.Tensor, ...], bucket: Bucket) -> None:
        self.reducing &= bool(self.by_place)
        sums, addends = [], []
        for grad, m in zip(grads, bucket.members, strict=True):
            grad = summed_to(grad, m.parameter.used_shape)
            place = bucket.plan.axis, m.parameter.index
            known = self.by_place.get(place)
            if known is not None:
                _check_same_part(known, m.parameter)
            if known is None:
                dtype = to_torch_dtype(bucket.plan.summed_dtype(bucket.rest_dtype))
                # a copy: two parameters may share a gradient, and backward's caller may own it
                total = grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
                self.by_place[place] = Kept(m.parameter, total)
            else:
                sums.append(known.total)
                addends.append(grad)
        if sums:
            torch._foreach_add_(sums, addends)

    def take(self, grads: tuple[torch.Tensor, ...], bucket: Bucket) -> tuple[torch.Tensor, ...]:
        self.reducing = True
        known = [self.by_place.pop((bucket.plan.axis, m.parameter.index), None) for m in bucket.members]
        for kept, m in zip(known, bucket.members, strict=True):
            if kept is not None:
                _check_same_part(kept, m.parameter)
        dtype = to_torch_dtype(bucket.plan.summed_dtype(bucket.rest_dtype))
        return tuple(
            grad.to(dtype) if kept is None else kept.total.add_(summed_to(grad, m.parameter.used_shape))
            for grad, kept, m in zip(grads, known, bucket.members, strict=True)
        )

    def left_behind(self) -> list[str]:
        """The names of parameters that the last reduction missed."""
        return [kept.parameter.name for kept in self.by_place.values()] if self.reducing else []

    def of(self, index: int) -> list[tuple[Axis, int]]:
        """The places that hold gradients of a parameter."""
        return [place for axis in Axis if (place := (axis, index)) in self.by_place]

    def clear(self) -> None:
        self.by_place.clear()
        self.reducing = False


def _accumulated_meta(grads: tuple[TensorProxy, ...], bucket: Bucket) -> tuple[TensorProxy, ...]:
    dtype = bucket.plan.summed_dtype(bucket.rest_dtype)
    return tuple(TensorProxy(like=g, dtype=dtype, requires_grad=False) for g in grads)


def _add(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> None:
    bucket.plan.runtime.kept.add(grads, bucket)


def _take(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> tuple[torch.Tensor, ...]:
    taken: tuple[torch.Tensor, ...] = bucket.plan.runtime.kept.take(grads, bucket)
    return taken


accumulate = symbol(
    "accumulate",
    lambda grads, bucket: None,
    _add,
    properties=Property.STATEFUL,
    tags=[OpTags.DONT_DCE],
)


accumulated = symbol("accumulated", _accumulated_meta, _take, properties=Property.STATEFUL)


# ---- activations in host memory ----


Moves = Sequence[bool | Sequence[bool]]  # for each value whether it travels; for a list, which of its tensors


class Away(ContextObject):
    """The saved values of a block that travel to the host.

    Args:
        label: the block's name.
        host: the memory.
        moves: what of the values travels.
        nbytes: how much.
        like: the values, as proxies.
    """

    def __init__(self, label: str, host: HostMemory, moves: Moves, nbytes: int, like: Sequence[Any] = ()) -> None:
        name = "".join(c if c.isalnum() else "_" for c in label)
        super().__init__(f"away_{name}", self)
        self.label, self.host, self.moves, self.nbytes, self.like = label, host, tuple(moves), nbytes, tuple(like)


# ---- activations in host memory: the functions ----


class Lies(NamedTuple):
    """How a tensor lay in the memory with this number."""

    memory: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]


class Rows:
    """Memory as flat tensors of bytes, which are not on the device that computes."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self.rows = rows


class Stored(NamedTuple):
    """Values in host memory: how those lay that have travelled, and the others as they are."""

    rows: Rows
    values: Sequence[Any]


class Moving(NamedTuple):
    """A copy under way: ``mark`` is its end, ``rows`` the memory of the device."""

    mark: Any
    rows: Sequence[torch.Tensor]
    stored: Stored


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def _each(values: Any, moves: Any, do: Callable[[Any], Any]) -> Any:
    if isinstance(moves, bool):
        return do(values) if moves else values
    return [_each(v, m, do) for v, m in zip(values, moves, strict=True)]


def issue_store(values: Sequence[Any], away: Away) -> Moving:
    numbers: dict[int, int] = {}
    memory: list[torch.Tensor] = []

    def leave(t: torch.Tensor) -> Lies:
        storage = t.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(memory))
        if number == len(memory):
            memory.append(_bytes(storage, t.device))
        return Lies(number, t.dtype, int(t.storage_offset()), t.shape, t.stride())

    left = _each(values, away.moves, leave)
    with away.host.back():
        rows = [away.host.copy(row) for row in memory]
        return Moving(away.host.mark(), memory, Stored(Rows(rows), left))


def finish_store(future: Moving, away: Away) -> Stored:
    future.mark.wait()
    return future.stored


def issue_load(stored: Stored, away: Away) -> Moving:
    """The memory is allocated on the compute stream, which can reuse it once it has waited."""
    host, there = away.host, stored.rows.rows
    rows = [torch.empty(row.shape, dtype=row.dtype, device=host.device) for row in there]
    with host.ahead():
        for row, place in zip(there, rows, strict=True):
            host.load(row, place)
        return Moving(host.mark(), rows, stored)


def finish_load(future: Moving, away: Away) -> Sequence[Any]:
    future.mark.wait()

    def lay(old: Lies) -> torch.Tensor:
        row = future.rows[old.memory]
        t = torch.empty(0, dtype=old.dtype, device=row.device)
        return t.set_(row.untyped_storage(), old.offset, old.shape, old.strides)

    found: Sequence[Any] = _each(future.stored.values, away.moves, lay)
    return found


# ---- activations in host memory: the symbols ----


def _store_meta(values: Sequence[Any], away: Away) -> FutureTensorProxy:
    return FutureTensorProxy(shape=(away.nbytes,), device=cpu, dtype=dtypes.uint8)


def _load_meta(stored: AnyProxy, away: Away) -> FutureTensorProxy:
    return FutureTensorProxy(shape=(away.nbytes,), device=to_device(away.host.device), dtype=dtypes.uint8)


def _loaded_meta(future: FutureTensorProxy, away: Away) -> tuple[Any, ...]:
    return tuple(
        TensorProxy(like=v, requires_grad=False) if isinstance(v, TensorProxy) else AnyProxy(None, prefix="saved")
        for v in away.like
    )


STORE = CollectiveOp(
    symbol("store", _store_meta, issue_store),
    symbol("wait_store", lambda future, away: AnyProxy(None, prefix="stored"), finish_store),
    "activations", "part", "part",
)  # fmt: skip
LOAD = CollectiveOp(
    symbol("load", _load_meta, issue_load),
    symbol("wait_load", _loaded_meta, finish_load),
    "activations",
    "part",
    "part",
)
ACTIVATIONS = STORE, LOAD
