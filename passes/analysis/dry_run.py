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
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from passes.analysis.flops import is_library_call
from passes.analysis.recognise import TRIP_WAITS, TRIPS, identity, is_foreign, properties
from passes.comm.activations import Away
from passes.comm.sequence import Part
from passes.comm.symbols import Property
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


class _Layout(NamedTuple):
    """How a tensor lies in the memory with this number."""

    storage: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Outcome(NamedTuple):
    """A :class:`Result` with layouts in place of tensors, in order of the outputs. The first storages are those of the
    inputs; ``made`` are the bytes of the others."""

    outputs: Sequence[Any]
    made: Sequence[int]
    temporary: int


class _Unknown(Exception):
    """A value that cannot be made again."""


class _Storages:
    """Storages of meta tensors, numbered in the order in which they are met."""

    def __init__(self) -> None:
        self.all: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def layout(self, value: torch.Tensor) -> _Layout:
        storage = value.untyped_storage()
        number = self._numbers.setdefault(storage_key(storage), len(self.all))
        if number == len(self.all):
            self.all.append(storage)
        return _Layout(number, int(value.storage_offset()), value.shape, value.stride(), value.dtype)

    def tensor(self, layout: _Layout) -> torch.Tensor:
        empty = torch.empty(0, dtype=layout.dtype, device="meta")
        source: Any = self.all[layout.storage]
        return empty.set_(source, layout.offset, layout.shape, layout.strides)

    def layouts(self, value: Any) -> Any:
        """A tensor, or what a collective returned as its future, with layouts in place of tensors.

        Raises:
            _Unknown: if it holds anything else, which the future of a user's wire may.
        """
        if isinstance(value, torch.Tensor):
            return self.layout(value)
        if value is None or value is DONE or (isinstance(value, list) and _is_done(value)):
            return value
        if isinstance(value, tuple | list):
            return _like(value, map(self.layouts, value))
        raise _Unknown

    def tensors(self, layouts: Any) -> Any:
        """The reverse of :meth:`layouts`."""
        if isinstance(layouts, _Layout):
            return self.tensor(layouts)
        if not isinstance(layouts, tuple | list) or _is_done(layouts):
            return layouts
        return _like(layouts, map(self.tensors, layouts))


def _like(value: Any, parts: Any) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _frozen(layouts: Any) -> Hashable:
    if isinstance(layouts, list) and _is_done(layouts):
        return len(layouts)
    if isinstance(layouts, tuple | list) and not isinstance(layouts, _Layout):
        return tuple(map(_frozen, layouts))
    known: Hashable = layouts
    return known


def _is_done(values: tuple[Any, ...] | list[Any]) -> bool:
    """True for the messages of a collective, of which there may be thousands."""
    return values.count(DONE) == len(values)


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
    known = _Storages()
    try:
        layouts = tuple(map(known.layouts, inputs.values()))
        key = what, _frozen(layouts), tuple(s.nbytes() for s in known.all)
        if key not in facts:
            facts[key] = _outcome(inputs, outputs, run())
    except _Unknown:
        return run()
    outcome: _Outcome = facts[key]
    known.all += [torch.UntypedStorage(nbytes, device="meta") for nbytes in outcome.made]
    made: Values = dict(zip(outputs, map(known.tensors, outcome.outputs), strict=True))
    return Result(made, outcome.temporary)


def _outcome(inputs: Mapping[str, Any], outputs: Sequence[str], result: Result) -> _Outcome:
    known = _Storages()
    for value in inputs.values():
        known.layouts(value)
    given = len(known.all)
    made = [known.layouts(result.outputs[name]) for name in outputs]
    return _Outcome(made, [s.nbytes() for s in known.all[given:]], result.temporary)


Values = dict[str, Any]  # by name: a meta tensor, what a collective returned as its future, or a list that is saved


class Result(NamedTuple):
    """A line's outputs by name, and the bytes that it needs besides them while it runs."""

    outputs: Values
    temporary: int


def dry_run(bsym: BoundSymbol, values: Mapping[str, Any]) -> Result:
    """Runs one line; ``values`` are its inputs by name.

    A fusion is not run: its views are known and its temporaries are estimated. If a line cannot run on meta tensors,
    its outputs are taken to be contiguous and to share no memory.
    """
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
    return Result({o.name: blank(o) for o in _outputs(bsym)} | _lists(bsym), 0)


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


def blank(proxy: TensorProxy | FutureTensorProxy) -> torch.Tensor:
    """A contiguous meta tensor like ``proxy``."""
    shape = tuple(int(s) for s in proxy.shape)
    return torch.empty(shape, dtype=dtypes.to_torch_dtype(proxy.dtype), device="meta")


HOLDERS = (torch.Tensor, tuple, list)


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor, or of all tensors in a future."""
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()
    elif isinstance(value, HOLDERS) and not _is_of_works(value):
        for part in value:
            if isinstance(part, HOLDERS):
                yield from storages(part)


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
        self.seen = {storage_key(s) for value in known for s in storages(value)}
        self.new: list[tuple[StorageWeakRef, int]] = []  # the weak reference keeps the key from being used again
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        result = (fake_kernel(func, args) or func)(*args, **kwargs)
        for storage in storages(result):
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
    outputs = {o.name: local[o.name] if o.name in local else blank(o) for o in _outputs(bsym)}
    given = {storage_key(s) for value in values.values() for s in storages(value)}
    return Result(outputs, _temporary(parts, local, set(map(_key, outputs.values())), given))


def _prims(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    for part in bsym.subsymbols:
        if part.sym.id in VIEWS or is_library_call(part.sym) or not part.subsymbols:
            yield part
        else:
            yield from _prims(part)


def _run_part(bsym: BoundSymbol, local: Values) -> None:
    """Adds the outputs of a prim to ``local``: views of its arguments, or new contiguous tensors."""
    view = VIEWS.get(bsym.sym.id)
    for o in _outputs(bsym):
        if view is not None:
            local[o.name] = view(*_concrete(bsym.args, local), **_concrete(bsym.kwargs, local))
        elif o.name not in local:
            local[o.name] = blank(o)


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
