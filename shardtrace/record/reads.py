"""Values of inputs that a forward reads: taken from the tensors of this call, and read again before each later step.

A forward that branches on ``mask.any()``, or takes the rows of a mask, depends on values. If these follow from
arguments and buffers, then the calls that compute them, a slice of the record, run on real tensors: while the forward
is recorded, and in a guard of the compiled step. The step is valid as long as plain values, and the shapes of tensors
whose sizes depend on values, are the same.

What a script has set on an argument is read, too: its attributes and its class. Each compiled step is for the values of
those attributes that its forward asked for.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any, NamedTuple

from passes.kernels.aten import Meta
from passes.kernels.torch_call import Autocast, laid_out
from shardtrace.record.calls import DEVICES, Call, Place, Refused, Whole, storage, tensors_in, tensors_of
from shardtrace.record.eager import PLAIN, Eager, EagerModule, Facts, made_like, on_real_tensors, try_function
from shardtrace.record.snapshot import MISSING
from shardtrace.record.watcher import is_library

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

OWN = "_shardtrace_given"  # of a fake: what it stands for
VARIANTS = 8  # compiled steps that differ in what one line reads, for arguments of the same shapes


class CannotRead(Exception):
    """Why a value does not follow from arguments and buffers."""


class Source(NamedTuple):
    """An argument or a buffer, and the stride of its fake. ``tensor`` is that of this call. That of a later one is what
    ``proxy`` stands for, or what ``buffer`` returns."""

    tensor: torch.Tensor
    stride: tuple[int, ...]
    proxy: Any = None
    buffer: Callable[[], torch.Tensor] | None = None


class Id(NamedTuple):
    """Stands for a fake among the arguments of a call."""

    fake: int


class Step(NamedTuple):
    """A call without its fakes, which are known by their ids. Metadata stand for tensors whose values do not matter."""

    function: Callable[..., Any]
    flat: Sequence[Any]
    spec: pytree.TreeSpec
    results: Sequence[int] = ()
    written: Sequence[int] = ()
    autocast: Sequence[Autocast] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], args: Any, kwargs: Any, *others: Any) -> Step:
        flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        return cls(function, [Id(id(v)) if isinstance(v, FakeTensor) else v for v in flat], spec, *others)

    @classmethod
    def of_call(cls, call: Call) -> Step:
        results, written = tuple(map(id, call.results)), tuple(map(id, call.written))
        return cls.of(call.function, call.args, call.kwargs, results, written, call.autocast)

    def __call__(self, known: dict[int, torch.Tensor]) -> Any:
        flat = [known[v.fake] if isinstance(v, Id) else _zeros(v) if isinstance(v, Meta) else v for v in self.flat]
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        with ExitStack() as stack:
            off = (torch.autocast(d, enabled=False) for d in DEVICES if torch.is_autocast_enabled(d))
            for context in (*off, *(state() for state in self.autocast)):
                stack.enter_context(context)
            result = self.function(*args, **kwargs)
        if self.results:
            passed_on = set(map(id, flat)) - {id(known[i]) for i in self.written}
            made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and id(t) not in passed_on]
            known.update(zip(self.results, made, strict=True))
        return result


def _zeros(meta: Meta) -> torch.Tensor:
    return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape)


class Read(NamedTuple):
    """What ``function`` has given after ``at`` calls, of which it needs those of some numbers. Metadata stand for
    tensors of the result."""

    function: Eager
    step: Step
    at: int
    needs: set[int]
    result: Any
    place: Place


class Reads:
    """What a forward reads. Where it is recorded again, it is given what it has read first.

    Args:
        source: gives the source of a fake, or None.
        variants: the values that were read, also in other compilations, by the line that reads and the arguments. None:
            nothing may be read.
    """

    def __init__(
        self, source: Callable[[torch.Tensor], Source | None], variants: dict[Hashable, set[Hashable]] | None
    ) -> None:
        self._source, self._variants = source, variants
        self._found: list[Read] = []
        self._sources: dict[int, Source] = {}
        self._calls: Sequence[Call] = ()
        self._next, self._is_done = 0, False

    def begin(self) -> None:
        """A recording begins."""
        self._next, self._is_done = 0, self._is_done or bool(self._found)

    def read(
        self, calls: Sequence[Call], function: Callable[..., Any], args: Any, kwargs: Any, place: Place, sizes: bool
    ) -> tuple[Eager, Any]:
        """A function that reads as ``function`` does, and what it gives after ``calls``. ``sizes``: whether torch says
        that sizes depend on values. Raises CannotRead."""
        if self._variants is None:
            raise CannotRead("ranks have read other values")
        if not self._is_done:
            self._calls = calls  # a recording that is made again has other fakes
            try:
                with on_real_tensors():
                    self._found.append(self._read(calls, function, args, kwargs, place, sizes))
            except Exception as error:  # whatever torch raises
                raise CannotRead(str(error)) from error
        read = self._found[self._next] if self._next < len(self._found) else None
        if read is None or (read.at, read.function.function) != (len(calls), function):
            raise CannotRead("it was not read when the forward was recorded first")
        self._next += 1
        again = lambda v: made_like(v) if isinstance(v, Meta) else copy.copy(v)  # noqa: E731
        return read.function, pytree.tree_map(again, read.result, is_leaf=lambda v: isinstance(v, Meta))

    def value(self, calls: Sequence[Call], fake: torch.Tensor) -> torch.Tensor | None:
        """What a fake holds after ``calls``, if it follows from arguments and buffers."""
        with suppress(Exception), on_real_tensors():  # whatever the calls raise
            return self._compute(calls, fake)[0]
        return None

    @property
    def needs(self) -> set[int]:
        """The numbers of the calls by which values are read."""
        return set[int]().union(*(read.needs for read in self._found))

    def guard(self) -> Guard | None:
        """What reads again before later steps; None if nothing was read. The tensors of this call are let go."""
        found, sources, calls = self._found, self._sources, self._calls
        self._calls = ()
        self._source, self._sources, self._variants, self._is_done = lambda fake: None, {}, {}, True
        if not found:
            return None
        steps = [(n, 1, Step.of_call(calls[n])) for n in self.needs]
        steps += [(read.at, 0, read.step) for read in found]
        steps.sort(key=lambda entry: entry[:2])
        used = {v.fake for *_, step in steps for v in step.flat if isinstance(v, Id)}
        return Guard({i: s for i, s in sources.items() if i in used}, [step for *_, step in steps])

    def _read(self, calls: Sequence[Call], function: Any, args: Any, kwargs: Any, place: Place, sizes: bool) -> Read:
        fakes = {id(t): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, FakeTensor)}
        known, needs, floats = {}, set[int](), False
        for i, t in fakes.items():
            with suppress(Exception):  # whatever the calls raise
                known[i], numbers, of_floats = self._compute(calls, t)
                needs, floats = needs | numbers, floats or of_floats
        eager = Eager(function, str(getattr(function, "__name__", "call")))
        step, given = Step.of(eager, args, kwargs), {i: t.clone() for i, t in known.items()}
        result = step(given) if len(known) == len(fakes) else None
        leaves = pytree.tree_leaves(result)
        writes = any(t._version for t in given.values())
        if result is None or any(isinstance(v, torch.Tensor) for v in leaves):
            trial = try_function(eager, args, kwargs, known)
            writes = bool(trial.written or trial.random) or not (sizes or _needs_values(eager, args, kwargs))
            result = pytree.tree_map_only(torch.Tensor, Meta.of, trial.result)
        elif (floats and any(map(_is_float, leaves))) or not all(isinstance(v, (*PLAIN, np.ndarray)) for v in leaves):
            raise CannotRead("it is another value in each step")
        if writes or not known or function is torch.Tensor.data_ptr:
            raise CannotRead("it does more than to read, or reads no input")
        eager.expected = Facts.of(result)
        metas = {i: Meta.of(t) for i, t in fakes.items() if i not in known}
        step = step._replace(flat=[metas.get(v.fake, v) if isinstance(v, Id) else v for v in step.flat])
        self._count(place, eager.expected)
        return Read(eager, step, len(calls), needs, result, place)

    def _count(self, place: Place, value: Facts) -> None:
        """Raises CannotRead for the value of one compiled step too many."""
        number = sum(read.place == place for read in self._found)
        shapes = tuple((s.tensor.shape, s.tensor.dtype) for s in self._sources.values() if s.proxy is not None)
        assert self._variants is not None
        seen = self._variants.setdefault((place, number, shapes), set())
        if len(seen | {hash(repr(value))}) > VARIANTS:
            raise CannotRead(f"it has had {VARIANTS} values for arguments of the same shapes")
        seen.add(hash(repr(value)))

    def _compute(self, calls: Sequence[Call], fake: torch.Tensor) -> tuple[torch.Tensor, set[int], bool]:
        """The value of a fake after ``calls``, the numbers of the calls that compute it, and whether it follows from an
        argument that holds no integers."""
        numbers, leaves = _slice(calls, fake)
        written = {storage(t) for n in numbers for t in calls[n].written}
        known, floats = {}, False
        for i, t in leaves.items():
            source = self._source(t)
            if source is None or type(source.tensor) not in (torch.Tensor, nn.Parameter) or source.tensor.is_meta:
                raise CannotRead("it does not follow from arguments and buffers")
            if source.buffer is not None and storage(t) in written:
                raise CannotRead("it follows from a buffer that forward writes into, such as a count of steps")
            self._sources[i] = source
            known[i] = laid_out(source.tensor, source.stride).clone()
            floats = floats or (source.proxy is not None and (t.is_floating_point() or t.is_complex()))
        with torch.no_grad():
            for n in sorted(numbers):
                Step.of_call(calls[n])(known)
        return known[id(fake)], numbers, floats


class Guard:
    """Reads from the arguments and buffers of a later call. Raises RuntimeError for other values than before, or
    whatever torch raises. ``proxies`` stand for the arguments that it is called with."""

    def __init__(self, sources: Mapping[int, Source], steps: Sequence[Step]) -> None:
        self._steps, self._writes = steps, any(step.written for step in steps)
        ordered = sorted(sources.items(), key=lambda entry: entry[1].proxy is None)  # arguments first
        self._inputs = [(i, s.tensor.shape, s.stride, s.buffer) for i, s in ordered]
        self.proxies = tuple(s.proxy for _, s in ordered if s.proxy is not None)

    def __call__(self, *arguments: torch.Tensor) -> None:
        buffers = (buffer() for *_, buffer in self._inputs if buffer is not None)
        known: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for (i, shape, stride, _), t in zip(self._inputs, chain(arguments, buffers), strict=True):
                if t.shape != shape:
                    raise RuntimeError("a buffer has another shape")
                known[i] = laid_out(t, stride).clone() if self._writes else laid_out(t, stride)
            for step in self._steps:
                step(known)


def _slice(calls: Sequence[Call], fake: torch.Tensor) -> tuple[set[int], dict[int, torch.Tensor]]:
    """The numbers of the calls that compute what a fake holds after ``calls``, and the fakes that no call has made."""
    fakes, memory, numbers, made = {id(fake): fake}, {storage(fake)}, set[int](), set[int]()
    for n in range(len(calls) - 1, -1, -1):
        call = calls[n]
        if memory.isdisjoint(map(storage, call.written)) and not any(id(t) in fakes for t in call.results):
            continue
        if call.random or isinstance(call.function, (EagerModule, Whole)):
            raise CannotRead("it depends on random numbers, or on what a module or a function computes")
        if not all(isinstance(t, FakeTensor) for t in call.written):
            raise CannotRead("forward writes into a tensor from outside of the module")
        numbers.add(n)
        made |= set(map(id, call.results)) - set(map(id, call.written))
        given = [t for t in call.tensors() if isinstance(t, FakeTensor)]
        fakes.update((id(t), t) for t in given)
        memory.update(map(storage, given))
    return numbers, {i: t for i, t in fakes.items() if i not in made}


def _needs_values(function: Eager, args: Any, kwargs: Any) -> bool:
    """Whether a function gives tensors of other metadata for zeros, ones or random numbers."""
    other = Eager(function.function, function.__name__)
    with suppress(Exception):  # whatever it raises for these
        try_function(other, args, kwargs)
    return other.expected != function.expected


def _is_float(value: Any) -> bool:
    return isinstance(value, float | complex) or getattr(getattr(value, "dtype", None), "kind", "") in ("f", "c")


# ---- attributes of arguments ----


class Attributes:
    """What forward reads of the attributes that a script has set on a tensor.

    ``cls`` is the class of the tensor. ``values`` are those that were read, MISSING for one that it does not have, and
    ``keys`` the ``key`` that each had then. ``tensor``: that of this call; None for a result, and in later steps.
    """

    def __init__(
        self, cls: type, tensor: torch.Tensor | None = None, key: Callable[[Any], Hashable] = lambda value: None
    ) -> None:
        self.cls, self.tensor, self._key = cls, tensor, key
        self.values: dict[str, Any] = {}
        self.keys: dict[str, Hashable] = {}

    def has_changed(self) -> bool:
        """Whether forward has changed a value that it has read."""
        return any(self._key(value) != self.keys[name] for name, value in self.values.items())

    def read(self, name: str) -> Any:
        """The value of an attribute that fakes lack."""
        if _is_asked_by_user(3) and hasattr(self.cls, name):
            raise Refused(
                f"forward reads {name!r} of a {self.cls.__name__}, of which a step computes with the plain tensor: "
                "read it outside of forward, and pass it as an argument"
            )
        if name not in self.values:
            value = vars(self.tensor).get(name, MISSING) if self.tensor is not None else MISSING
            if tensors_in(value):
                raise Refused(
                    f"forward reads {name!r} of an argument, an attribute that holds tensors: pass them as arguments"
                )
            self.values[name], self.keys[name] = value, self._key(value)
        if self.values[name] is MISSING:
            raise AttributeError(f"{self.cls.__name__!r} object has no attribute {name!r}")
        return self.values[name]


class Seen(FakeTensor):
    """A fake that forward has. To the user's code it seems to be of the class of what it stands for."""

    @classmethod
    def mark(cls, fake: torch.Tensor) -> None:
        fake.__class__ = cls

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.seen_as if _is_asked_by_user() else type(self)

    @property
    def seen_as(self) -> type:
        return nn.Parameter if getattr(self, "_is_param", False) else torch.Tensor


class Given(Seen):
    """The fake of an argument, or of a result computed from one of a user's class."""

    @classmethod
    def describe(cls, fake: torch.Tensor, attributes: Attributes) -> None:
        cls.mark(fake)
        vars(fake)[OWN] = attributes
        vars(fake)["_is_param"] = issubclass(attributes.cls, nn.Parameter)  # for isinstance

    @property
    def seen_as(self) -> type:
        found: type = vars(self)[OWN].cls
        return found

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        if _is_asked_by_user():
            raise Refused("forward reads all attributes of an argument (vars, __dict__): read them by name")
        return super().__dict__

    def __getattr__(self, name: str) -> Any:
        return vars(self)[OWN].read(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_asked_by_user() and vars(self)[OWN].tensor is not None and not hasattr(type(self), name):
            raise Refused(f"forward sets {name!r} of an argument, which no step would set again: return it")
        super().__setattr__(name, value)


def _is_asked_by_user(depth: int = 2) -> bool:
    return not is_library(str(sys._getframe(depth).f_globals.get("__name__", "")))


def pass_class_on(function: Callable[..., Any], given: Iterable[torch.Tensor], result: Any) -> None:
    """Lets the results of a call be of the class of what it was given, as torch does for subclasses."""
    classes = {vars(t)[OWN].cls for t in given if type(t) is Given}
    own = classes - {torch.Tensor, nn.Parameter}
    passes_on = own or (classes and function is torch.Tensor.detach)  # nn.Parameter wants the very type
    for t in tensors_of(result):
        if type(t) is not FakeTensor:
            continue
        if passes_on and not isinstance(t, nn.Parameter):
            Given.describe(t, Attributes(max(own, key=lambda cls: len(cls.__mro__), default=torch.Tensor)))
        else:
            Seen.mark(t)
