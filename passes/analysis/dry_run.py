"""Runs single lines of an executed trace on meta tensors, to learn which results share memory and what a line needs
while it runs.

A trace does not tell whether a reshape copies, because it does not show strides, or what a collective's future holds.
Therefore the function that a line calls is called here with meta tensors, which have shapes, strides and storages but
no memory, and with a process group that sends nothing. Nothing is computed, no random number is drawn, no device is
touched.

Remembers what lines of a trace do with memory, for further lines that do the same with inputs that lie alike.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

from passes.analysis.flops import is_library_call
from passes.analysis.recognise import TRIP_WAITS, TRIPS, identity, is_foreign, properties
from passes.comm.sequence import Part
from passes.comm.symbols import Away, Lies, Property, Rows
from passes.compat.jit import function_of
from passes.compat.versions import fake_kernel
from passes.kernels.torch_call import Line, Saved
from passes.plan import Bucket, PlainRuntime
from passes.plan.runtime import DONE, HostMemory

import torch
from thunder.core import dtypes, prims
from thunder.core.proxies import AnyProxy, FutureTensorProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.torch import scaled_dot_product_attention
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Memory:
    """A storage, of which only the size is known."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Layout(NamedTuple):
    """How a tensor lies in memory, which is a :class:`Memory` or its number."""

    memory: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Outcome(NamedTuple):
    """A :class:`Result`, in order of the outputs. Memory is numbered, that of the inputs first; ``made`` are the bytes
    of the rest."""

    outputs: Sequence[Any]
    made: Sequence[int]
    temporary: int


class _Unknown(Exception):
    """A value that cannot be made again."""


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A value, or what a collective returned as its future, with ``leaf`` of what it holds."""
    if type(value) is Layout or type(value) is Lies:
        return leaf(value)
    if isinstance(value, tuple | list):
        return value if isinstance(value, list) and _is_done(value) else _like(value, [_mapped(v, leaf) for v in value])
    return value if value is None or value is DONE else leaf(value)


def _like(value: Any, parts: Any) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _frozen(layouts: Any) -> Hashable:
    if type(layouts) is Layout or type(layouts) is Lies:
        return layouts
    if isinstance(layouts, tuple | list):
        return len(layouts) if isinstance(layouts, list) and _is_done(layouts) else tuple(map(_frozen, layouts))
    known: Hashable = layouts
    return known


def _is_done(values: list[Any]) -> bool:
    """True for the messages of a collective, of which there may be thousands."""
    return not values or (values[0] is DONE and values.count(DONE) == len(values))


class _Numbers(dict[Memory, int]):
    """Memory, numbered in the order in which it is met."""

    def of(self, value: Any) -> Any:
        """A value with numbers in place of memory.

        Raises:
            _Unknown: if it holds anything but layouts and copies on the host. The future of a user's wire may.
        """
        return _mapped(value, self._leaf)

    def _leaf(self, value: Any) -> Any:
        if type(value) is Layout:
            return Layout(self.setdefault(value.memory, len(self)), *value[1:])
        if isinstance(value, Rows | Lies):
            return value
        raise _Unknown


def rehearse(
    facts: dict[Any, Any],
    what: Hashable,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    run: Callable[[], Result],
) -> Result:
    """Returns the result of ``run``, or one like it if ``facts`` have it of a run before.

    Args:
        facts: what runs before have found out; grows.
        what: is done with the inputs. It determines the result together with how the inputs lie in memory.
        inputs: the values that are read, by name.
        outputs: the names of the values that are made.
    """
    known = _Numbers()
    try:
        numbered = tuple(map(known.of, inputs.values()))
        given = [*known]
        key = what, _frozen(numbered), tuple(m.nbytes for m in given)
        if key not in facts:
            facts[key] = _outcome(known, outputs, run())
    except _Unknown:
        return run()
    outcome: _Outcome = facts[key]
    memory = given + [Memory(nbytes) for nbytes in outcome.made]

    def lay(value: Any) -> Any:
        return Layout(memory[value.memory], *value[1:]) if type(value) is Layout else value

    made = [_mapped(o, lay) for o in outcome.outputs]
    return Result(dict(zip(outputs, made, strict=True)), outcome.temporary)


def _outcome(known: _Numbers, outputs: Sequence[str], result: Result) -> _Outcome:
    given = len(known)
    made = [known.of(result.outputs[name]) for name in outputs]
    return _Outcome(made, [m.nbytes for m in [*known][given:]], result.temporary)


Values = dict[str, Any]  # by name: a layout, what a collective returned as its future, or a list that is saved


class Result(NamedTuple):
    """A line's outputs by name, and the bytes that it needs besides them while it runs."""

    outputs: Values
    temporary: int


def dry_run(bsym: BoundSymbol, values: Mapping[str, Any]) -> Result:
    """Runs one line; ``values`` are its inputs by name.

    A fusion is not run: its views are known and its temporaries are estimated. If a line cannot run on meta tensors,
    its outputs are taken to be contiguous and to share no memory.
    """
    storages = _MetaStorages()
    found = _on_meta(bsym, {name: _mapped(value, storages.tensor) for name, value in values.items()})
    return found._replace(outputs={name: storages.layouts(value) for name, value in found.outputs.items()})


def layouts(value: Any) -> Any:
    """Meta tensors, as layouts in memory of their own."""
    return _MetaStorages().layouts(value)


class _MetaStorages:
    """Storages of meta tensors, and the memory that they stand for."""

    def __init__(self) -> None:
        self._storages: dict[Memory, torch.UntypedStorage] = {}
        self._memory: dict[int, tuple[Memory, torch.UntypedStorage]] = {}  # a storage that lives keeps its key

    def tensor(self, layout: Any) -> Any:
        """A meta tensor that lies so. What is no layout stays as it is."""
        if type(layout) is not Layout:
            return layout
        storage = self._storages.get(layout.memory)
        if storage is None:
            storage = self._storages[layout.memory] = torch.UntypedStorage(layout.memory.nbytes, device="meta")
            self._memory[storage_key(storage)] = layout.memory, storage
        empty, source = torch.empty(0, dtype=layout.dtype, device="meta"), cast(Any, storage)
        return empty.set_(source, layout.offset, layout.shape, layout.strides)

    def layouts(self, value: Any) -> Any:
        return _mapped(value, self._layout)

    def _layout(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        memory, _ = self._memory.setdefault(storage_key(storage), (Memory(storage.nbytes()), storage))
        return Layout(memory, int(value.storage_offset()), tuple(value.shape), value.stride(), value.dtype)


def _on_meta(bsym: BoundSymbol, values: Mapping[str, Any]) -> Result:
    """The result of a line on meta tensors, as such."""
    if bsym.sym.is_fusion:
        return _run_fusion(bsym, values)
    if bsym.sym.id in TRIPS or bsym.sym.id in TRIP_WAITS:  # allocate nothing but what they return
        args, _ = _concrete((bsym.args, {}), values)
        return Result(_named(bsym, function_of(bsym)(*args)) or {}, 0)
    function = _function(bsym)
    if function is not None:
        args, kwargs = _concrete((bsym.args, bsym.kwargs), values)
        meter = _Meter([*values.values(), [wire_state(a) for a in args if isinstance(a, Bucket)]])
        try:
            args = _with_graph(bsym, args)
            with torch.no_grad(), meter:
                outputs = _named(bsym, function(*args, **kwargs))
        except Exception:  # no kernel for meta tensors, or a value is asked for
            outputs = None
        if outputs is not None:
            return Result(outputs, meter.peak - meter.live())
    return Result({o.name: _blank(o) for o in _outputs(bsym)} | _lists(bsym), 0)


def _lists(bsym: BoundSymbol) -> Values:
    """The lists that a call of torch saves for its backward, by name: contiguous meta tensors."""
    names = [o.name for o in bsym.flat_proxy_outs if isinstance(o, AnyProxy)]
    saved = bsym.sym.id.call.reads.saved if isinstance(bsym.sym.id, Line) else ()
    return {name: [torch.empty(m.shape, dtype=m.dtype, device="meta") for m in saved] for name in names}


def _with_graph(bsym: BoundSymbol, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a line. One that goes back through a graph of torch gets a graph of its own, which has saved the
    tensors that are given: gradients may be computed in their memory."""
    line = bsym.sym.id
    if not (isinstance(line, Line) and line.kind == "_backward"):
        return args
    given = (torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="meta") for m in line.call.inputs)
    saved, *others = line.call.forward(*given)[-1], *args[1:]
    of_memory = dict(zip({storage_key(t.untyped_storage()): t for t in saved if t is not None}, args[0], strict=False))
    for i, t in enumerate(saved):
        known = None if t is None else of_memory.get(storage_key(t.untyped_storage()))
        if known is not None and known.shape == t.shape:
            saved[i] = known
    return saved, *others


def blank(
    proxy: TensorProxy | FutureTensorProxy,
    memory: Memory | None = None,
    offset: int = 0,
    dtype: torch.dtype | None = None,
) -> Layout:
    """A contiguous value like ``proxy``, in memory of its own or at an offset (in elements) of ``memory``."""
    shape, dtype = tuple(map(int, proxy.shape)), dtype or dtypes.to_torch_dtype(proxy.dtype)
    numel, strides = _contiguous(shape)
    return Layout(memory or Memory(numel * dtype.itemsize), offset, shape, strides, dtype)


@functools.cache
def _contiguous(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """The number of elements and the strides of a contiguous tensor."""
    empty = torch.empty(shape, device="meta")
    return empty.numel(), empty.stride()


def _blank(proxy: TensorProxy | FutureTensorProxy) -> torch.Tensor:
    """A contiguous meta tensor like ``proxy``."""
    return torch.empty(tuple(map(int, proxy.shape)), dtype=dtypes.to_torch_dtype(proxy.dtype), device="meta")


HOLDERS = (torch.Tensor, tuple, list)


def memory_of(value: Any) -> Iterator[Memory]:
    """The memory of a value, or of all that a future holds."""
    if type(value) is Layout:
        yield value.memory
    elif isinstance(value, tuple | list) and type(value) is not Lies and not _is_of_works(value):
        for part in value:
            yield from memory_of(part)


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of a meta tensor, or of all those in a future."""
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()
    elif isinstance(value, HOLDERS) and not _is_of_works(value):
        for part in value:
            if isinstance(part, HOLDERS):
                yield from _storages(part)


def _is_of_works(value: Any) -> bool:
    """True for the works of a collective: with many ranks they are ten thousands, and hold no memory."""
    return isinstance(value, list) and bool(value) and not any(isinstance(v, HOLDERS) for v in (value[0], value[-1]))


def storage_key(storage: torch.UntypedStorage) -> int:
    """A key that no other memory has at the same time."""
    return storage._cdata


class _Meter(TorchDispatchMode):
    """Makes every new tensor a meta tensor and measures the peak of the bytes that are not ``known``."""

    def __init__(self, known: Iterable[Any]) -> None:
        super().__init__()
        self.seen = {storage_key(s) for value in known for s in _storages(value)}
        self.new: list[tuple[StorageWeakRef, int]] = []  # the weak reference keeps the key from being used again
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        result = (fake_kernel(func, args) or func)(*args, **kwargs)
        for storage in _storages(result):
            if storage_key(storage) not in self.seen:
                self.seen.add(storage_key(storage))
                self.new.append((StorageWeakRef(storage), storage.nbytes()))
                self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        return sum(nbytes for ref, nbytes in self.new if not ref.expired())


class _SilentGroup:
    """A process group whose collectives move nothing and are done at once."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world_size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: DONE


def silent(bucket: Bucket) -> Bucket:
    """A bucket with a group that sends nothing. It keeps its rank, which tells how much of the shards is padding."""
    plan = bucket.plan
    host = HostMemory(torch.device("meta")) if plan.host is not None else None
    runtime = PlainRuntime(_SilentGroup(plan.rank, plan.world_size))
    plan = dataclasses.replace(plan, runtime=runtime, host=host)
    return Bucket(bucket.label, bucket.name, plan, bucket.members, bucket.dtype, bucket.wire)


def _silent_part(part: Part) -> Part:
    """A part of a sequence with a group that sends nothing."""
    plan = part.plan
    runtime = PlainRuntime(_SilentGroup(plan.rank, plan.ranks))
    return Part(dataclasses.replace(plan, runtime=runtime), part.split, part.fill)


def wire_state(bucket: Bucket) -> list[torch.Tensor]:
    """The tensors that a :func:`silent` bucket's wire keeps from step to step, on the meta device."""
    return list(bucket.wire.state(bucket, torch.device("meta"))) if bucket.wire is not None else []


def _function(bsym: BoundSymbol) -> Callable[..., Any] | None:
    """The function that a line calls; None if the line may do more than compute its outputs."""
    sym = bsym.sym
    if sym.executor is None or is_foreign(sym) or Property.STATEFUL in properties(sym) or not bsym.flat_proxy_outs:
        return None
    if identity(sym) == scaled_dot_product_attention.id:
        return _attention
    function: Callable[..., Any] | None = function_of(bsym)
    if function is None and sym.module is not None:
        function = attrgetter(sym.name)(sym.module)
    return function


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The result of a fused kernel, with heads after positions in memory. On meta tensors torch does not call these."""
    *batch, heads, length, _ = query.shape
    return query.new_empty(*batch, length, heads, value.shape[-1]).transpose(-3, -2)


def _concrete(args: Any, values: Mapping[str, Any]) -> Any:
    def concrete(arg: Any) -> Any:
        if isinstance(arg, NumberProxy):
            return arg.value
        if isinstance(arg, Bucket):
            return silent(arg)
        if isinstance(arg, Part):
            return _silent_part(arg)
        if isinstance(arg, Away):
            return Away(arg.label, HostMemory(torch.device("meta")), arg.moves, arg.nbytes)
        return values[arg.name] if isinstance(arg, Proxy) else arg

    return tree_map(concrete, args)


def _outputs(bsym: BoundSymbol) -> list[TensorProxy | FutureTensorProxy]:
    return [o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy | FutureTensorProxy)]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list) and not isinstance(value, Saved):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _named(bsym: BoundSymbol, result: Any) -> Values | None:
    """``result`` by the names of the line's outputs; None if the trace says otherwise."""
    if isinstance(bsym.output, FutureTensorProxy | AnyProxy):
        return {bsym.output.name: result}
    if bsym.sym.id in TRIP_WAITS:
        return {o.name: value for o, value in zip(bsym.output, result, strict=True)}
    proxies, results = list(_leaves(bsym.output)), list(_leaves(result))
    if len(proxies) != len(results):
        return None
    found: Values = {}
    for proxy, value in zip(proxies, results, strict=True):
        if isinstance(proxy, TensorProxy):
            if not isinstance(value, torch.Tensor) or not value.is_meta or value.shape != tuple(proxy.shape):
                return None
            found[proxy.name] = value
        elif isinstance(proxy, AnyProxy):
            found[proxy.name] = list(value)
    return found


# ---- fusions ----


def _broadcast_in_dim(a: torch.Tensor, shape: Any, dims: Any) -> torch.Tensor:
    unsqueezed = [1] * len(shape)
    for size, dim in zip(a.shape, dims, strict=True):
        unsqueezed[dim] = size
    return a.reshape(unsqueezed).expand(shape)


def _slice(a: torch.Tensor, starts: Any, ends: Any, strides: Any = None) -> torch.Tensor:
    return a[tuple(slice(*s) for s in zip(starts, ends, strides or [1] * a.ndim, strict=True))]


# The prims of a fusion that are views, as functions of meta tensors.
VIEWS: dict[Any, Callable[..., torch.Tensor]] = {
    prims.PrimIDs.RESHAPE: torch.reshape,
    prims.PrimIDs.TRANSPOSE: torch.permute,
    prims.PrimIDs.SQUEEZE: torch.squeeze,
    prims.PrimIDs.BROADCAST_IN_DIM: _broadcast_in_dim,
    prims.PrimIDs.SLICE: _slice,
    prims.PrimIDs.SHALLOW_COPY: lambda a: a,
}
# In a fusion, only what goes into a library call and what comes out lies in memory. Other values are computed where
# they are used, unless they are made of more than MAX_READS tensors. (torch.compile has this limit.)
MAX_READS = 8


def _run_fusion(bsym: BoundSymbol, values: Mapping[str, Any]) -> Result:
    local, parts = dict(values), list(_prims(bsym))
    for part in parts:
        _run_part(part, local)
    outputs = {o.name: local[o.name] if o.name in local else _blank(o) for o in _outputs(bsym)}
    given = {storage_key(s) for value in values.values() for s in _storages(value)}
    return Result(outputs, _temporary(parts, local, set(map(_key, outputs.values())), given))


def _prims(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    for part in bsym.subsymbols:
        if part.sym.id in VIEWS or is_library_call(part.sym) or not part.subsymbols:
            yield part
        else:
            yield from _prims(part)


def _run_part(bsym: BoundSymbol, local: Values) -> None:
    """Adds the outputs of a prim, or of a line of torch, to ``local``: views of its arguments, or new contiguous
    tensors."""
    view = VIEWS.get(bsym.sym.id)
    if view is None and Property.VIEW in properties(bsym.sym) and not bsym.subsymbols:
        local |= _on_meta(bsym, local).outputs
    for o in _outputs(bsym):
        if view is not None:
            local[o.name] = view(*_concrete(bsym.args, local), **_concrete(bsym.kwargs, local))
        elif o.name not in local:
            local[o.name] = _blank(o)


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _temporary(parts: list[BoundSymbol], local: Values, outputs: set[int], given: set[int]) -> int:
    """Bytes that the parts of a fusion need at once, besides the storages ``outputs`` and ``given``."""
    stored = outputs | given
    for part in parts:
        if is_library_call(part.sym):
            stored |= {_key(local[p.name]) for p in (*part.flat_proxy_args, *_outputs(part)) if p.name in local}
    reads = {key: frozenset([key]) for key in stored}  # the storages that are read to compute each value
    sizes: dict[int, int] = {}
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, part in enumerate(parts):
        arguments = [_key(local[a.name]) for a in part.flat_proxy_args if a.name in local]
        sources = frozenset[int]().union(*(reads.get(key, ()) for key in arguments))
        for o in _outputs(part):
            key = _key(local[o.name])
            if key in arguments or key in given:
                continue
            if key not in stored and len(sources) <= MAX_READS:
                reads[key] = sources
                continue
            reads[key] = frozenset([key])
            sizes[key] = local[o.name].untyped_storage().nbytes()
            born.setdefault(key, i)
            last.update(dict.fromkeys((key, *sources), i))
    change = [0] * (len(parts) + 1)
    for key, at in born.items():
        change[at] += sizes[key]
        if key not in outputs:
            change[last[key] + 1] -= sizes[key]
    return max(itertools.accumulate(change)) - sum(sizes[key] for key in sizes.keys() & outputs)
