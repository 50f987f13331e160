"""Values of inputs that a forward reads: taken from the tensors of this call, and read again before each later step.

A forward that branches on ``mask.any()``, or takes the rows of a mask, depends on values. If these follow from
arguments and buffers, then the calls that compute them, a slice of the record, run on real tensors: while the forward
is recorded, and in a guard of the compiled step. The step is valid as long as plain values, and the shapes of rows that
were taken, are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any, NamedTuple

from passes.kernels.torch_call import Autocast, Meta, laid_out
from shardtrace.record.calls import DEVICES, Call, Place, Whole, storage
from shardtrace.record.eager import Eager, EagerModule, Facts, is_plain, made_like, try_function

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree

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
    """The place of a fake among the arguments of a call."""

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

    def __call__(self, known: dict[int, torch.Tensor]) -> Any:
        flat = [_given(v, known) for v in self.flat]
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        with ExitStack() as stack:
            off = (torch.autocast(d, enabled=False) for d in DEVICES if torch.is_autocast_enabled(d))
            for context in (*off, *(state() for state in self.autocast)):
                stack.enter_context(context)
            result = self.function(*args, **kwargs)
        passed_on = set(map(id, flat)) - {id(known[i]) for i in self.written}
        made = (t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and id(t) not in passed_on)
        known.update(zip(self.results, made, strict=bool(self.results)))
        return result


def _given(value: Any, known: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, Meta):
        return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
    return known[value.fake] if isinstance(value, Id) else value


class Read(NamedTuple):
    """What ``step`` has given after ``at`` calls, with metadata in the place of tensors. It needs the calls of the
    numbers ``needs``."""

    step: Step
    at: int
    needs: frozenset[int]
    result: Any
    place: Place


class Reads:
    """What a forward reads. Where it is recorded again, it is given what it has read first.

    Args:
        source: gives the source of a fake, or None.
        variants: the values that were read, also by other compilations, by the line that reads and the arguments.
    """

    def __init__(
        self, source: Callable[[torch.Tensor], Source | None], variants: dict[Hashable, set[Hashable]]
    ) -> None:
        self._source: Callable[[torch.Tensor], Source | None] = source
        self._variants = variants
        self._found: list[Read] = []
        self._sources: dict[int, Source] = {}
        self._next, self._is_done = 0, False

    def begin(self) -> None:
        """Another recording begins."""
        self._next, self._is_done = 0, self._is_done or bool(self._found)

    def read(
        self, calls: Sequence[Call], function: Callable[..., Any], args: Any, kwargs: Any, place: Place, sizes: bool
    ) -> tuple[Eager, Any]:
        """A function that reads as ``function`` did, and what it gives. ``sizes``: whether torch says that the sizes of
        its result depend on values. Raises CannotRead, or what torch raises."""
        if not self._is_done:
            with unset_fake_temporarily():
                self._found.append(self._read(calls, function, args, kwargs, place, sizes))
        read = self._found[self._next] if self._next < len(self._found) else None
        if read is None or (read.at, read.step.function.function) != (len(calls), function):
            raise CannotRead("it has not been read when the forward was recorded first")
        self._next += 1
        result = pytree.tree_map(
            lambda v: made_like(v) if isinstance(v, Meta) else copy.copy(v), read.result,
            is_leaf=lambda v: isinstance(v, Meta),
        )  # fmt: skip
        return read.step.function, result

    def value(self, calls: Sequence[Call], fake: torch.Tensor) -> torch.Tensor | None:
        """What a fake holds after ``calls``, if it follows from arguments and buffers."""
        if self._is_done:
            return None
        try:
            with unset_fake_temporarily():
                return self._compute(calls, fake)[0]
        except Exception:  # whatever the calls raise
            return None

    def guard(self, calls: Sequence[Call]) -> Guard | None:
        """What reads again before later steps; None if nothing was read. The tensors of this call are let go."""
        found, sources = self._found, self._sources
        self._source, self._sources, self._variants, self._is_done = lambda fake: None, {}, {}, True
        if not found:
            return None
        needed = frozenset[int]().union(*(read.needs for read in found))
        steps = [(n, 1, _step(calls[n])) for n in needed] + [(read.at, 0, read.step) for read in found]
        steps.sort(key=lambda entry: entry[:2])
        used = {v.fake for *_, step in steps for v in step.flat if isinstance(v, Id)}
        return Guard({i: s for i, s in sources.items() if i in used}, [step for *_, step in steps])

    def _read(self, calls: Sequence[Call], function: Any, args: Any, kwargs: Any, place: Place, sizes: bool) -> Read:
        fakes = {id(t): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, FakeTensor)}
        known, needs, floats, why = {}, set(), False, "it is given no tensor"
        for i, t in fakes.items():
            try:
                known[i], numbers, of_floats = self._compute(calls, t)
                needs, floats = needs | numbers, floats or of_floats
            except Exception as error:  # whatever the calls raise
                why = str(error)
        if not known:
            raise CannotRead(why)
        eager = Eager(function, str(getattr(function, "__name__", "call")))
        step = Step.of(eager, args, kwargs)
        given = {i: t.clone() for i, t in known.items()}
        result = step(given) if len(known) == len(fakes) else None
        if any(t._version for t in given.values() if not t.is_inference()):
            raise CannotRead("it writes into its arguments")
        leaves = pytree.tree_leaves(result)
        if result is None or any(isinstance(v, torch.Tensor) for v in leaves):
            trial = try_function(eager, args, kwargs, known)
            if trial.random or trial.written or (not sizes and _is_fixed(eager, args, kwargs)):
                raise CannotRead("it draws random numbers, writes into its arguments, or depends on no value")
            result = pytree.tree_map_only(torch.Tensor, Meta.of, trial.result)
        elif not all(map(is_plain, leaves)) or (floats and any(map(_is_float, leaves))):
            raise CannotRead("it is not plain, or another one in each step")
        eager.expected = eager.expected or Facts.of(result)
        metas = {i: Meta.of(t)._replace(grad=False) for i, t in fakes.items() if i not in known}
        step = step._replace(flat=[metas.get(v.fake, v) if isinstance(v, Id) else v for v in step.flat])
        self._count(place, eager.expected)
        return Read(step, len(calls), frozenset(needs), result, place)

    def _count(self, place: Place, value: Facts) -> None:
        """Raises CannotRead for the value of one compiled step too many."""
        number = sum(read.place == place for read in self._found)
        shapes = tuple((i.tensor.shape, i.tensor.dtype) for i in self._sources.values() if i.proxy is not None)
        seen = self._variants.setdefault((place, number, shapes), set())
        if len(seen | {repr(value)}) > VARIANTS:
            raise CannotRead(f"it has had {VARIANTS} values for arguments of the same shapes")
        seen.add(repr(value))

    def _compute(self, calls: Sequence[Call], fake: torch.Tensor) -> tuple[torch.Tensor, set[int], bool]:
        """The value of a fake after ``calls``, the numbers of the calls that compute it, and whether it follows from an
        argument that holds no integers."""
        numbers, leaves = _slice(calls, fake)
        known, floats, written = {}, False, {storage(t) for n in numbers for t in calls[n].written}
        for i, t in leaves.items():
            source = self._source(t)
            if source is None or type(source.tensor) not in (torch.Tensor, nn.Parameter) or source.tensor.is_meta:
                raise CannotRead("it does not follow from arguments and buffers")
            if source.buffer is not None and storage(t) in written:
                raise CannotRead("it follows from a buffer that forward writes into, as in a count of steps")
            self._sources[i] = source
            known[i] = laid_out(source.tensor, source.stride).clone()
            floats = floats or (source.proxy is not None and not _is_integral(t))
        with torch.no_grad():
            for n in sorted(numbers):
                _step(calls[n])(known)
        return known[id(fake)], numbers, floats


class Guard:
    """Reads from the arguments and buffers of a later call. Raises RuntimeError for other values than before, or
    whatever torch raises.

    ``proxies`` stand for the arguments that it is called with.
    """

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
    fakes, memory, numbers = {id(fake): fake}, {storage(fake)}, set()
    for n in range(len(calls) - 1, -1, -1):
        call = calls[n]
        if memory.isdisjoint(map(storage, call.written)) and not any(id(t) in fakes for t in call.results):
            continue
        if call.random or isinstance(call.function, (EagerModule, Whole)):
            raise CannotRead("it depends on random numbers, or on what a module or a function computes")
        if not all(isinstance(t, FakeTensor) for t in call.written):
            raise CannotRead("forward writes into a tensor from outside of the module")
        numbers.add(n)
        given = [t for t in call.tensors() if isinstance(t, FakeTensor)]
        fakes.update((id(t), t) for t in given)
        memory.update(map(storage, given))
    made = {id(t) for n in numbers for t in calls[n].results if all(t is not w for w in calls[n].written)}
    return numbers, {i: t for i, t in fakes.items() if i not in made}


def _step(call: Call) -> Step:
    results, written = tuple(map(id, call.results)), tuple(map(id, call.written))
    return Step.of(call.function, call.args, call.kwargs, results, written, call.autocast)


def _is_fixed(function: Eager, args: Any, kwargs: Any) -> bool:
    """Whether a function gives tensors of the same metadata for any values, as far as is known."""
    other = Eager(function.function, function.__name__)
    with suppress(Exception):
        try_function(other, args, kwargs)
    return other.expected == function.expected


def _is_integral(t: torch.Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex()


def _is_float(value: Any) -> bool:
    return isinstance(value, float | complex) or getattr(getattr(value, "dtype", None), "kind", "") in ("f", "c")
