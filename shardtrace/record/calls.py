"""The record of a forward: the calls of torch that it made, tensors in any structure, and calls of blocks of one kind.

Two calls of blocks are of one kind if they make the same calls of torch, with the same arguments (tensors by number,
everything else by value or identity), under the same modes, for results with the same metadata. All that their Python
read has done its work by then, so that nothing else can matter. See Note [Safe] of :mod:`shardtrace.record.replay`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MappingView, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

from passes.kernels import aten
from passes.kernels.aten import Meta
from passes.kernels.torch_call import Autocast
from shardtrace.record.effects import Change
from shardtrace.record.snapshot import entries_of, slot_names
from shardtrace.record.symbols import of_memory
from shardtrace.record.watcher import CodeWatcher

import torch
from thunder.core.interpreter import PseudoInst
from thunder.core.proxies import Proxy, TensorProxy
from torch import nn
from torch.utils import _pytree as pytree

# ---- structures ----


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)
CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module, torch.Generator)
LEAVES = (*PLAIN, *CODE, Proxy)  # hold no tensors
Path = tuple[tuple[PseudoInst, Any], ...]  # of items and attributes


@dataclass(frozen=True)
class Numbered:
    """The place of a tensor in a structure: its number among the tensors."""

    number: int


TENSORS = (torch.Tensor, TensorProxy, Numbered)


def parts(value: Any) -> Iterator[tuple[PseudoInst, Any, Any]]:
    """The items of a builtin container and the attributes that an object itself has, also in slots: the kind, the key
    and the part."""
    if isinstance(value, (dict, list, tuple, deque)):
        yield from ((PseudoInst.BINARY_SUBSCR, k, v) for k, v in entries_of(value))
    yield from ((PseudoInst.LOAD_ATTR, name, v) for name, v in getattr(value, "__dict__", {}).items())
    for name in slot_names(value):
        if hasattr(value, name):
            yield PseudoInst.LOAD_ATTR, name, getattr(value, name)


def map_tensors(
    value: Any, change: Callable[[Any, Path], Any], copies: dict[int, tuple[Any, Any]] | None = None, path: Path = ()
) -> Any:
    """A copy of ``value`` with ``change(tensor, path)`` in the place of each tensor: in builtin containers, named
    tuples, dataclasses, dicts with attributes and other objects. What holds no tensor is not copied. ``copies`` gets
    each copied object and its copy, by the object's id."""
    copies = {} if copies is None else copies
    if isinstance(value, TENSORS):
        return change(value, path)
    if id(value) in copies:
        return copies[id(value)][1]
    if not tensors_in(value):
        return value
    changed = [(kind, k, map_tensors(v, change, copies, (*path, (kind, k)))) for kind, k, v in _entered(value, copies)]
    if isinstance(value, tuple):
        entries = [v for kind, _, v in changed if kind is PseudoInst.BINARY_SUBSCR]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    _, made = copies[id(value)]
    set_item = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
    for kind, key, v in changed:
        if kind is PseudoInst.LOAD_ATTR:
            object.__setattr__(made, key, v)
        elif isinstance(value, (list, deque)):
            (list if isinstance(value, list) else deque).append(made, v)
        else:
            set_item(made, key, v)  # a subclass may do more
    return made


def _entered(value: Any, copies: dict[int, tuple[Any, Any]]) -> Iterator[tuple[PseudoInst, Any, Any]]:
    """The parts of an object, of which there is a copy from here on: it may refer to itself."""
    cls: Any = type(value)
    if not isinstance(value, tuple):
        made = cls.__new__(cls) if isinstance(value, (list, dict)) else copy.copy(value)
        if isinstance(value, defaultdict):
            made.default_factory = value.default_factory
        if isinstance(value, deque):
            made.clear()
        copies[id(value)] = value, made
    return parts(value)


def tensors_in(value: Any) -> list[Any]:
    """The tensors in a structure, in the order in which :func:`map_tensors` changes them."""
    return list(_walk(value, set()))


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, TENSORS):
        yield value
    elif not isinstance(value, LEAVES) and id(value) not in seen:
        if not isinstance(value, tuple):
            seen.add(id(value))
        for _, _, v in parts(value):
            yield from _walk(v, seen)


def check_result(value: Any) -> None:
    """Raises RuntimeError for a result that computes what it holds when it is read, or holds tensors in no order."""
    unordered = isinstance(value, (set, frozenset)) and any(isinstance(v, torch.Tensor) for v in value)
    if unordered or isinstance(value, (Iterator, MappingView)):
        raise RuntimeError(f"forward returns a {type(value).__name__}: return a list, a tuple or a dict")
    if isinstance(value, (dict, list, tuple, deque)):
        for _, part in entries_of(value):
            check_result(part)


def is_plain(value: Any) -> bool:
    """True for a structure that Thunder can return: tensors in tuples, lists and dicts, but not in subclasses."""
    if type(value) in (tuple, list, dict):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (torch.Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device))


class Rebuild:
    """Makes what a model returns of the tensors of a step. ``tensors`` are those that it returned."""

    def __init__(self, value: Any, tensors: Sequence[torch.Tensor]) -> None:
        numbers = iter(range(len(tensors)))
        self._template = map_tensors(value, lambda t, path: Numbered(next(numbers)))
        self.requires_grad = [t.requires_grad for t in tensors]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        pairs = zip(tensors, self.requires_grad, strict=True)
        given = [t if d or not t.requires_grad else t.detach() for t, d in pairs]
        return map_tensors(self._template, lambda numbered, path: given[numbered.number])


class NotReturnedError(RuntimeError, AttributeError):
    """A read of a tensor that ``CompilePolicy(returns="loss")`` leaves out of the model's result."""


class NotReturned:
    """Stands for a tensor that the step does not return."""

    def __init__(self, name: str) -> None:
        self.left_out = name

    def __repr__(self) -> str:
        return f"<{self.left_out}: not returned>"

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotReturnedError(
            f'{self.left_out} of the result is not computed as a whole with CompilePolicy(returns="loss"): leave that '
            "out if the script reads it"
        )

    def __getattr__(self, name: str) -> Any:
        return self.refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs or {}))
        return next(x for x in given if isinstance(x, cls)).refuse()

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = __array__ = __matmul__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __lt__ = __gt__ = refuse


def only_losses(result: Any) -> Any:
    """A result without the tensors that are no single numbers, if one of them is a loss."""
    tensors = tensors_in(result)
    if not any(t.ndim == 0 and t.is_floating_point() for t in tensors):
        return result

    def kept(t: torch.Tensor, path: Path) -> Any:
        names = [key for _, key in path if isinstance(key, str)]
        return t if t.ndim == 0 else NotReturned(names[-1] if names else "a tensor")

    return map_tensors(result, kept)


# ---- calls ----


class Refused(NotImplementedError):
    """What no step could do, nor PyTorch in its place."""


DEVICES = ("cpu", "cuda")  # types of devices that autocast has a state for


class Place(NamedTuple):
    """Where a call stands: the file, the line, the function, and the qualified name of the module that runs."""

    file: str
    line: int
    function: str
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f" of {self.module}" if self.module else "")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of torch.

    ``results`` are the tensors in what it returned, ``written`` those that it wrote into. ``grad``: whether gradients
    were on. ``checkpoint``: the number of the call of ``torch.utils.checkpoint`` around it.
    ``names``: the variables that got the results.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]
    grad: bool
    autocast: tuple[Autocast, ...]
    random: bool
    place: Place
    checkpoint: int | None
    names: tuple[str, ...] = ()

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return tensors_of((self.args, self.kwargs))


@dataclass(frozen=True)
class Whole:
    """A function that computes its gradient itself, equal to another one of the same owner."""

    owner: Any
    function: Callable[..., Any] = field(compare=False)

    @property
    def __name__(self) -> str:
        return str(getattr(self.owner, "__name__", None) or getattr(self.owner, "name", "scripted"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(eq=False)
class Span:
    """The call of a module: ``calls[begin:end]`` were made inside."""

    name: str
    module: nn.Module
    begin: int
    end: int


@dataclass(eq=False)
class Record:
    """What a forward did. ``spans`` are the calls of the modules that were watched, in the order of their ends. ``ran``
    is what modules that PyTorch runs have changed in the user's objects, and do in each step; ``left`` are tensors with
    a gradient among that, and ``watchers`` saw the code of these modules."""

    calls: list[Call] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    result: Any = None
    ran: list[Change] = field(default_factory=list)
    left: list[Change] = field(default_factory=list)
    watchers: list[CodeWatcher] = field(default_factory=list)


WITHOUT_TENSORS = (int, float, str, NoneType, torch.dtype, torch.device)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (tuple, list):  # faster than torch's, and most values are
        return [t for part in value if not isinstance(part, WITHOUT_TENSORS) for t in tensors_of(part)]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def storage(t: torch.Tensor) -> int:
    """A key that tensors share if they share memory."""
    if t.layout != torch.strided:
        raise NotImplementedError("forward makes a sparse tensor: keep its indices and values in dense ones")
    return aten.storage(t)


# ---- calls of blocks that are of one kind ----


Made = tuple[int, int]  # a result of a call: the number of the call, that of the result


class Mark(NamedTuple):
    """The call of a module whose activations are recomputed: ``calls[begin:end]``; ``cheap``: only the cheap ones."""

    begin: int
    end: int
    cheap: bool


class Apart(Exception):
    """Why a block's calls stand in the trace by themselves."""


@dataclass(eq=False)
class Outline:
    """A call of a block, as a function of tensors.

    ``inputs`` are the tensors that it reads and does not make, in the order of their first use; ``exports`` tells which
    of its results are read outside of it.
    """

    span: Span
    key: Hashable
    inputs: tuple[torch.Tensor, ...]
    exports: frozenset[Made]


@dataclass(eq=False)
class Kind:
    """Equal calls. ``exports``: the results that any of them needs."""

    members: list[Outline] = field(default_factory=list)

    @property
    def exports(self) -> tuple[Made, ...]:
        return tuple(sorted(frozenset[Made]().union(*(m.exports for m in self.members))))


Refuse = Callable[[Outline], str]


class Uses:
    """Which calls, by their numbers, read a tensor last and write into a storage last. What is ``returned`` is read
    after all calls."""

    def __init__(self, record: Record, returned: Iterable[torch.Tensor]) -> None:
        self.read: dict[int, int] = {}
        self.written: dict[int, int] = {}
        for i, call in enumerate(record.calls):
            self.read.update((id(t), i) for t in call.tensors())
            self.written.update((storage(t), i) for t in call.written)
        self.read.update((id(t), len(record.calls)) for t in returned)


def outline(record: Record, span: Span, uses: Uses, marks: Sequence[Mark]) -> Outline:
    """The call of a block. Raises Apart if it cannot be a function of its inputs."""
    calls = record.calls[span.begin : span.end]
    if len(calls) < 2:
        raise Apart  # a line of its own would be no less
    numbers = Numbers()
    key: Hashable = tuple(numbers.call(i, call) for i, call in enumerate(calls))
    inside = (m for m in marks if span.begin <= m.begin and m.end <= span.end)
    key = key, tuple((m.begin - span.begin, m.end - span.begin, m.cheap) for m in inside)
    outside = {storage(t) for t in numbers.inputs}
    if any(storage(t) in outside for call in calls for t in call.written):
        raise Apart("it writes into tensors of others")
    if any(of_memory(call.function) and storage(call.tensors()[0]) in outside for call in calls):
        raise Apart("it picks elements of tensors of others by where they lie")
    exports: dict[Made, torch.Tensor] = {}
    for i, call in enumerate(calls):
        for j, t in enumerate(call.results):
            if uses.read.get(id(t), -1) >= span.end and numbers.first(t) == (i, j):
                exports[i, j] = t
    if not exports:
        raise Apart("nothing that it makes is read")
    for t in exports.values():
        if storage(t) in outside:
            raise Apart("it returns a view of an input")
        if uses.written.get(storage(t), -1) >= span.end:
            raise Apart("what it returns is written into")
    return Outline(span, key, tuple(numbers.inputs), frozenset(exports))


def find_kinds(
    record: Record, spans: Collection[Span], uses: Uses, marks: Sequence[Mark], refuse: Refuse, why: dict[str, str]
) -> dict[Span, Kind]:
    """The kinds that have several members. ``why`` gets the reasons of the others, by the names of the blocks.

    ``refuse`` tells why a call cannot be a function; an empty text if it can.
    """
    kinds: dict[Hashable, Kind] = {}
    for span in spans:
        try:
            found = outline(record, span, uses, marks)
            if reason := refuse(found):
                raise Apart(reason)
        except Apart as error:
            if str(error):
                why[span.name] = str(error)
            continue
        kinds.setdefault((type(span.module), found.key), Kind()).members.append(found)
    for kind in kinds.values():
        if len(kind.members) == 1:
            why[kind.members[0].span.name] = "no other block makes the same calls"
    return {m.span: kind for kind in kinds.values() if len(kind.members) > 1 for m in kind.members}


class Numbers:
    """Makes the keys of a row of calls, in which tensors are numbers."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self._known: dict[int, Hashable] = {}
        self._storages: dict[int, int] = {}
        self._checkpoints: dict[int, int] = {}

    def first(self, t: torch.Tensor) -> Hashable:
        """The call and the result that made a tensor, or the number of an input."""
        return self._known[id(t)]

    def call(self, i: int, call: Call) -> tuple[Hashable, ...]:
        given = self.value((call.args, dict(call.kwargs)))
        written = tuple(self._known[id(t)] for t in call.written)
        for j, t in enumerate(call.results):
            self._known.setdefault(id(t), (i, j))
        results = tuple((self._known[id(t)], Meta.of(t)) for t in call.results)
        checkpoint = call.checkpoint
        if checkpoint is not None:
            checkpoint = self._checkpoints.setdefault(checkpoint, len(self._checkpoints))
        function = call.function if isinstance(call.function, Hashable) else id(call.function)
        return function, given, written, results, call.grad, call.autocast, call.random, checkpoint

    def value(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, slice):
            return slice, self.value(value.start), self.value(value.stop), self.value(value.step)
        if isinstance(value, (*PLAIN, type, Enum, torch.layout, torch.memory_format)):
            return type(value), repr(value) if isinstance(value, float | complex) else value
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self.value, value))
        if isinstance(value, dict):
            return type(value), tuple((k, self.value(v)) for k, v in value.items())
        leaves, spec = pytree.tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return self.other(value)
        return str(spec), tuple(map(self.value, leaves))

    def other(self, value: Any) -> Hashable:
        """The key of an object that is no plain value."""
        return type(value), id(value)

    def _tensor(self, t: torch.Tensor) -> Hashable:
        if id(t) not in self._known:
            memory = self._storages.setdefault(storage(t), len(self._storages))
            self._known[id(t)] = len(self.inputs)
            self.inputs.append(t)
            return len(self.inputs) - 1, memory, t.storage_offset(), Meta.of(t)
        return self._known[id(t)]


def is_whole(record: Record, span: Span, marks: Sequence[Mark]) -> bool:
    """False for a part of what is recomputed as a whole."""
    if any(m.begin <= span.begin and span.end <= m.end and (m.begin, m.end) != (span.begin, span.end) for m in marks):
        return False
    around = {call.checkpoint for call in (*record.calls[: span.begin][-1:], *record.calls[span.end :][:1])} - {None}
    return around.isdisjoint(call.checkpoint for call in record.calls[span.begin : span.end])


def outermost(spans: Sequence[Span]) -> list[Span]:
    """The spans that lie in no other."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        if not found or span.begin >= found[-1].end:
            found.append(span)
    return found
