"""What transports enqueue: a recorder runs the lines of a trace, and notes each access to memory and each wait between
streams as :mod:`passes.analysis.verify` has them.

Tensors of the device that computes are on the meta device, those of the host on the CPU. Process groups, streams and
events are stand-ins. An event is a stream that waits once, for the stream that records it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import shardtrace  # noqa: F401  before thunder
from passes.analysis.recognise import is_deletion, is_return, is_unpack, names
from passes.analysis.verify import COMPUTE, HOST, Wait, Work
from passes.compat.jit import function_of
from passes.plan.runtime import HostMemory

import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import AnyProxy, FutureTensorProxy, Proxy
from thunder.core.pytree import tree_map
from thunder.core.trace import TraceCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
REUSE = -1  # the line of a write by whoever gets the memory that was freed
ONLY_WRITTEN = ("copy_", "zero_", "fill_")


class Part(NamedTuple):
    """The elements of a storage that a tensor spans, in bytes."""

    storage: str
    start: int = 0
    stop: int | None = None


class Recorder(TorchDispatchMode):
    """What the lines of a trace enqueue. ``bound`` has, for each name of the trace, the storages behind it."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[int, str, Any, Any]] = []  # as Work or Wait, with parts for memory
        self.bound: dict[str, set[str]] = {}
        self.line, self.current = -1, COMPUTE
        self._storages: dict[int, _Storage] = {}
        self._reusable: dict[str, list[Part]] = {}  # freed memory, by the stream that allocates from it next
        self._numbers: dict[str, int] = {}

    # ---- what tensors do ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = list(zip(func._schema.arguments, args, strict=False))
        arguments += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        result = self._between_devices(func, args, kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        for t in _tensors(result):
            if t.untyped_storage().nbytes():
                self.name_of(t)
        if not func.is_view and not any(name in func.overloadpacket.__name__ for name in ("empty", "set_")):
            self._note(func, arguments, result)
        return result

    @staticmethod
    def _between_devices(func: Any, args: Any, kwargs: Any) -> Any:
        """A copy to or from the host, which torch refuses for tensors without memory."""
        aten = torch.ops.aten
        if func is aten.copy_.default and args[0].device != args[1].device:
            return args[0]
        if func is aten._to_copy.default and kwargs.get("device") not in (None, args[0].device):
            return torch.empty_like(args[0], device=kwargs["device"], dtype=kwargs.get("dtype"))
        return NotImplemented

    def _note(self, func: Any, arguments: list[Any], result: Any) -> None:
        given = [(a, t) for a, value in arguments for t in _tensors(value)]
        is_written = lambda a: a.alias_info is not None and a.alias_info.is_write  # noqa: E731
        overwrites = func.overloadpacket.__name__ in ONLY_WRITTEN or "out" in func._overloadname
        reads = [t for a, t in given if not (is_written(a) and (overwrites or a.is_out))]
        writes = [t for a, t in given if is_written(a)]
        outs = _tensors(result)
        on_host = all(t.device != DEVICE for t in (*reads, *writes, *outs))
        stream = HOST if on_host else self.current
        self.work(stream, reads, [*writes, *outs])
        if len({t.device for t in (*reads, *writes, *outs)}) > 1 and not _is_non_blocking(arguments):
            self.wait(HOST, stream)

    # ---- what streams do ----

    def work(self, stream: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        self.poll()
        read, written = ([self.part_of(t) for t in tensors if t.numel()] for tensors in (reads, writes))
        if read or written:
            if reused := self._reusable.pop(stream, None):
                self._seen.append((REUSE, stream, [], reused))
            self._seen.append((self.line, stream, read, written))

    def wait(self, stream: str, other: str) -> None:
        self.poll()
        self._seen.append((self.line, stream, other, None))

    @property
    def events(self) -> list[Work | Wait]:
        """All accesses and waits. The memory ``"a:0"`` is the first part of storage ``a``: parts begin and end where
        any tensor does."""
        ends: dict[str, set[int]] = {}
        for _, _, *parts in self._seen:
            for part in (p for some in parts if isinstance(some, list) for p in some):
                ends.setdefault(part.storage, {0}).update({part.start, part.stop} - {None})
        cuts = {storage: sorted(found) for storage, found in ends.items()}

        def memory(parts: list[Part]) -> frozenset[str]:
            return frozenset(
                f"{storage}:{cut}"
                for storage, start, stop in parts
                for cut in cuts[storage]
                if start <= cut and (stop is None or cut < stop)
            )

        return [
            Wait(line, stream, what) if isinstance(what, str) else Work(line, stream, memory(what), memory(written))
            for line, stream, what, written in self._seen
        ]

    def new_stream(self, kind: str) -> str:
        self._numbers[kind] = number = self._numbers.get(kind, -1) + 1
        return f"{kind}.{number}"

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    # ---- what memory does ----

    def part_of(self, tensor: torch.Tensor) -> Part:
        size = tensor.element_size()
        extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * size
        return Part(self.name_of(tensor), start, start + extent * size)

    def name_of(self, tensor: torch.Tensor) -> str:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None or known.reference.expired():
            self.poll()
            stream = self.current if tensor.device == DEVICE else HOST
            known = _Storage(self.new_stream("memory"), StorageWeakRef(storage), stream, set())
            self._storages[storage._cdata] = known
            if stream != HOST:  # memory that earlier work on this stream may use
                self._seen.append((self.line, stream, [], [Part(known.name)]))
        return known.name

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        """``Tensor.record_stream``."""
        self.name_of(tensor)
        self._storages[tensor.untyped_storage()._cdata].users.add(stream.name)

    def poll(self) -> None:
        """Frees the memory that no tensor has any more. The next work on its stream may write it; if others have
        recorded that they use it, only after them."""
        for key, (name, reference, stream, users) in list(self._storages.items()):
            if not reference.expired():
                continue
            del self._storages[key]
            if users:
                free = self.new_stream("free")
                self._seen += [(self.line, free, other, None) for other in (stream, *sorted(users))]
                self._seen.append((REUSE, free, [], [Part(name)]))
            elif stream != HOST:
                self._reusable.setdefault(stream, []).append(Part(name))

    def bind(self, name: str, value: Any) -> None:
        tensors = _tensors(value)
        self.bound.setdefault(name, set()).update(self.name_of(t) for t in tensors)


class _Storage(NamedTuple):
    name: str
    reference: StorageWeakRef
    stream: str  # that allocated it
    users: set[str]  # streams that were recorded for it


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def _is_non_blocking(arguments: list[Any]) -> bool:
    return any(a.name == "non_blocking" and value for a, value in arguments)


class Collective:
    """A collective, or a message, on a stream of its own."""

    def __init__(self, recorder: Recorder, kind: str, reads: Any, writes: Any) -> None:
        self.recorder, self.stream = recorder, recorder.new_stream(kind)
        recorder.wait(self.stream, recorder.current)
        recorder.work(self.stream, _tensors(reads), _tensors(writes))

    def wait(self, timeout: Any = None) -> bool:
        self.recorder.wait(self.recorder.current, self.stream)
        return True


class RecordedGroup:
    """The process group of a rank, by torch's names. Sends nothing."""

    def __init__(self, recorder: Recorder, rank: int, size: int) -> None:
        self._recorder, self._rank, self._size = recorder, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _run(self, reads: Any, writes: Any) -> Collective:
        return Collective(self._recorder, "collective", reads, writes)

    def send(self, tensors: Any, *_: Any) -> Collective:
        return self._run(tensors, [])

    def recv(self, tensors: Any, *_: Any) -> Collective:
        return self._run([], tensors)

    def allreduce(self, tensors: Any, opts: Any) -> Collective:
        return self._run(tensors, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Collective:
        return self._run(inputs, outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Collective:
        return self._run(inputs, outputs)

    def all_gather_single(self, output: Any, mine: Any, opts: Any) -> Collective:
        return self._run(mine, output)

    def reduce_scatter_single(self, mine: Any, rows: Any, opts: Any) -> Collective:
        return self._run(rows, mine)

    def all_to_all_single(self, received: Any, rows: Any, *_: Any) -> Collective:
        return self._run(rows, received)

    def broadcast(self, tensors: Any, opts: Any) -> Collective:
        mine = opts.rootRank == self._rank
        return self._run(tensors if mine else [], [] if mine else tensors)

    def reduce(self, tensors: Any, opts: Any) -> Collective:
        return self._run(tensors, tensors)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # torch before 2.13
    alltoall_base = all_to_all_single


class Streams:
    """torch.cuda, as far as transports use it."""

    def __init__(self, recorder: Recorder) -> None:
        recorder_of = self.recorder = recorder

        class Stream:
            def __init__(self, device: Any = None, *, name: str = "") -> None:
                self.name = name or recorder_of.new_stream("stream")

            def wait_stream(self, other: Stream) -> None:
                recorder_of.wait(self.name, other.name)

            wait_event = wait_stream

            def synchronize(self) -> None:
                recorder_of.wait(HOST, self.name)

            def record_event(self, event: Any = None) -> Any:
                event = event or Event()
                event.record(self)
                return event

        class Event:
            def __init__(self, *args: Any, **options: Any) -> None:
                self.name = recorder_of.new_stream("event")

            def record(self, stream: Stream | None = None) -> None:
                recorder_of.wait(self.name, stream.name if stream else recorder_of.current)

            def wait(self, stream: Stream | None = None) -> None:
                recorder_of.wait(stream.name if stream else recorder_of.current, self.name)

            def synchronize(self) -> None:
                recorder_of.wait(HOST, self.name)

        self.Stream, self.Event = Stream, Event

    def is_available(self) -> bool:
        return True

    def current_stream(self, device: Any = None) -> Any:
        return self.Stream(name=self.recorder.current)

    def stream(self, stream: Any) -> Any:
        return self.recorder.on(stream.name)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Streams and events made inside are the recorder's."""
    recorder = Recorder()
    with (
        mock.patch.object(torch, "get_device_module", return_value=Streams(recorder)),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: recorder.hold(tensor, stream)),
        recorder,
    ):
        yield recorder


def recorded_host() -> HostMemory:
    """Host memory of a device with streams. Only inside :func:`recording`."""
    host = HostMemory(torch.device("cuda:0"))
    host.device = DEVICE
    return host


def run(trace: TraceCtx, recorder: Recorder) -> None:
    """Runs the lines of a trace, each with what it frees. At the end results are read, and parameters are written by
    an optimizer where they are."""
    values: dict[str, Any] = {}
    for proxy in trace.args:
        device = DEVICE if proxy.device.device_str() != "cpu" else "cpu"
        values[proxy.name] = torch.empty(proxy.shape, dtype=to_torch_dtype(proxy.dtype), device=device)
        recorder.bind(proxy.name, values[proxy.name])
    inputs = list(values.values())
    for recorder.line, bsym in enumerate(trace.bound_symbols):
        if is_unpack(bsym):
            continue
        if is_deletion(bsym):
            for proxy in bsym.flat_proxy_args:
                del values[proxy.name]
        elif is_return(bsym):
            _leave(recorder, [values[name] for name in names(bsym.args)], inputs)
        else:
            _bind(bsym, _call(bsym, values), values, recorder)
        recorder.poll()


def _call(bsym: Any, values: dict[str, Any]) -> Any:
    function: Callable[..., Any] = function_of(bsym)
    return function(*tree_map(lambda a: values[a.name] if isinstance(a, Proxy) else a, tuple(bsym.args)))


def makes_future(bsym: Any) -> bool:
    """True for a line that issues a collective, of a bucket or of a sequence, or a copy to the host."""
    return isinstance(bsym.output, FutureTensorProxy)


def _bind(bsym: Any, result: Any, values: dict[str, Any], recorder: Recorder) -> None:
    if makes_future(bsym) or isinstance(bsym.output, AnyProxy):
        values[bsym.output.name] = result
        return
    for proxy, value in zip(bsym.flat_proxy_outs, _tensors(result), strict=True):
        values[proxy.name] = value
        recorder.bind(proxy.name, value)


def _leave(recorder: Recorder, results: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    for stream, is_mine in ((COMPUTE, lambda t: t.device == DEVICE), (HOST, lambda t: t.device != DEVICE)):
        recorder.work(stream, filter(is_mine, results), filter(is_mine, inputs))
