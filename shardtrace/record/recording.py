"""The recordings of a forward: with stand-ins for numbers, and made again in later steps.

Guards compare what a snapshot can reach. What a forward reads in another way (an object that a call returns, a file,
the time) shows in what it does: the same calls of torch with the same arguments. Later steps make the recording again:
state that no guard sees must not have changed.

Plain numbers that change from step to step are inputs of the step, not constants of a compilation for each value.

Note [Stand-ins]. The forward is recorded once more with stand-ins in the place of numbers. What Python computes of a
stand-in and a number is a stand-in. A function of torch that scales by a number is kept with the stand-in, and computes
with the number. Any other use reads the stand-in: it gives the number, which is a constant from then on. The second
record counts only if it makes the calls of the first one, so that no stand-in has led the forward another way. Each
step computes the numbers in Python. They travel as 0-dim tensors, and torch's function gets a number: its result is
eager's.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType
from typing import Any
from weakref import ref

from passes.compat.versions import functional_transform
from passes.kernels.aten import Meta
from shardtrace.record.calls import LEAVES, Call, Numbered, Numbers, Record, Refused, Whole, parts, tensors_in
from shardtrace.record.calls import Place as PlaceInSource
from shardtrace.record.eager import EagerModule
from shardtrace.record.effects import FIXED, Change, Effects, check_leaks
from shardtrace.record.memory import Memory
from shardtrace.record.reads import Reads
from shardtrace.record.recorder import CannotRecord, FakeMode, Modes, Recorder, record
from shardtrace.record.replay import Replay
from shardtrace.record.snapshot import Holder, State, is_plain, same
from shardtrace.record.symbols import name_of
from shardtrace.record.watcher import CodeWatcher, RandomStates, iterators

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionMeta
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree


@dataclass(frozen=True, eq=False)
class Recording:
    """What a recording needs: the forward, its arguments and the module's tensors as fakes, and the choice of modules.
    See :func:`shardtrace.record.recorder.record`."""

    module: nn.Module
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    fakes: FakeMode
    tensors: Mapping[str, torch.Tensor]
    memory: Memory
    names: Mapping[int, str]
    watched: Collection[nn.Module]
    eager: Set[nn.Module]
    compiling: bool
    reads: Reads

    def __call__(self, watcher: CodeWatcher) -> tuple[Record, list[Change]]:
        """Records the forward. Returns also what it has set, which is put back."""
        self.reads.begin()
        with ExitStack() as stack:
            stack.enter_context(_reparametrize_module(self.module, dict(self.tensors), stack_weights=True))
            effects = stack.enter_context(Effects(self.module, type(self.module).__name__))
            reached = State()
            reached.add_value((self.args, dict(self.kwargs)), "arguments")
            known = [*effects.state.seen.values(), *reached.seen.values()]
            held = iterators(known)
            random = stack.enter_context(RandomStates(known))
            stack.enter_context(watcher)
            recorder = Recorder(
                self.names, watcher, self.memory, watched=self.watched, eager=self.eager, effects=effects,
                random=random, reads=self.reads,
            )  # fmt: skip
            given = (self.module, *self.args)
            done = record(
                self.function, given, self.kwargs, mode=self.fakes, recorder=recorder, compiling=self.compiling
            )
            advanced = [name for name, position in iterators(known).items() if position != held[name]]
            if advanced:
                raise CannotRecord(()) from Refused(
                    f"forward advances {advanced[0]}, an iterator, which no step would do again: count in an "
                    "attribute, or call next outside of forward and pass what it gives as an argument"
                )
        changes, effects.found = [*effects.found, *done.left], []  # the recorder may live on, but no fake with it
        return done, changes


def check_no_fakes(done: Record) -> None:
    """Raises RuntimeError if a fake of a record, which gets emptied, lives on in the user's objects."""
    made: list[ref[torch.Tensor]] = [
        ref(t)
        for call in done.calls
        for t in call.results
        if isinstance(t, FakeTensor) and all(t is not given for given in call.written)  # another call made it
    ]
    done.calls.clear()  # what reads values has the same list
    done.spans, done.result, done.ran, done.left = [], None, [], []
    check_leaks(made)


class Comparison:
    """A guard, the last one of a step: makes the recording again in steps 2, 4, 8, 16, ... or in each n-th one.

    Args:
        recording: the one of which the step was made, and ``done`` what it found.
        every: n, or None.
        around: a context in which the forward can be recorded.
        report: is told of a difference, once. The step is never used again.

    Records that leave modules to PyTorch are not compared: it would try these modules again.
    """

    def __init__(
        self,
        recording: Recording,
        done: Record,
        *,
        every: int | None,
        around: Callable[[], AbstractContextManager[Any]],
        report: Callable[[str], None],
    ) -> None:
        self._recording, self._first, self._modes = recording, Described.of(done), Modes.now()
        self._every, self._around, self._report = every, around, report
        self._steps, self._difference = 0, ""

    def __call__(self) -> None:
        if not self._difference:
            self._steps += 1
            due = self._steps % self._every == 0 if self._every else _is_due(self._steps)
            self._difference = self._compare() if due else ""
            if not self._difference:
                return
            self._report(self._difference)  # an error of the tracing that follows
        raise RuntimeError("the forward is another one")

    def _compare(self) -> str:
        try:
            with self._around(), self._modes.on():
                done = self._recording(CodeWatcher())[0]
            now = Described.of(done)
            check_no_fakes(done)
        except CannotRecord as error:
            return f"it raises {type(error.__cause__).__name__}: {error.__cause__}"
        except RuntimeError as error:
            return str(error)
        return self._first.difference(now)


def _is_due(steps: int) -> bool:
    return steps > 1 and steps & (steps - 1) == 0


def is_comparable(done: Record) -> bool:
    return not any(isinstance(call.function, EagerModule) for call in done.calls)


@dataclass(frozen=True)
class Described:
    """A record without its tensors. ``calls`` and ``places`` are of each call, and last of the result."""

    calls: tuple[Hashable, ...]
    places: tuple[PlaceInSource | None, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, done: Record) -> Described:
        numbers = _ByType()
        calls: list[Hashable] = [numbers.call(i, call) for i, call in enumerate(done.calls)]
        calls.append(("result", numbers.value(done.result), numbers.value(tensors_in(done.result))))
        names = [name_of(call.function) for call in done.calls]
        return cls(tuple(calls), (*(c.place for c in done.calls), None), (*names, "return"))

    def difference(self, now: Described) -> str:
        """Names the first call that is another one; empty if there is none."""
        for i, (old, new) in enumerate(zip(self.calls, now.calls, strict=False)):  # the result tells shorter ones apart
            if old == new:
                continue
            before, after = self.names[i], now.names[i]
            what = f"{before} is now {after}" if before != after else f"{after}: {_first_unequal(old, new)}"
            return f"{what}, at {now.places[i] or self.places[i] or 'its end'}"
        return ""


class _ByType(Numbers):
    """Two objects of one type, each of its own recording, are not known to differ."""

    def call(self, i: int, call: Call) -> tuple[Hashable, ...]:
        return name_of(call.function), *super().call(i, call)[1:]

    def other(self, value: Any) -> Hashable:
        return (type(value),)


def _first_unequal(old: Any, new: Any) -> str:
    """Describes the first difference of two keys."""
    if isinstance(old, Meta) and isinstance(new, Meta):
        return f"a tensor {old.dtype}{list(old.shape)} is now {new.dtype}{list(new.shape)}"
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        pair = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
        if isinstance(old[0], type) and len(old) == 2 and not isinstance(old[1], tuple):
            return f"{old[1]} is now {new[1]}"
        return _first_unequal(*pair)
    return "another tensor" if isinstance(old, tuple) or isinstance(new, tuple) else f"{old} is now {new}"


# ---- numbers ----


DTYPES = {int: torch.int64, float: torch.float64}  # that hold a number as it is
SHOWN = (int, float, FunctionType)  # also of classes of their own: numpy's numbers
VARIANTS = 5  # values of one place that are compiled without a word
# functions that only compute with a number, without the underscores around their names
SCALING = frozenset(
    """add radd iadd sub rsub isub subtract mul rmul imul multiply div rdiv truediv rtruediv itruediv idiv true_divide
    divide pow rpow ipow float_power floordiv rfloordiv floor_divide mod rmod fmod remainder lerp addcmul addcdiv addmm
    addmv addbmm baddbmm addr clamp clamp_min clamp_max clip where masked_fill fill gt ge lt le eq ne leaky_relu
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, eq=False)
class Place:
    """Where a plain value stands: in a dict, a list, a cell or a class. For an argument, ``key`` is its position or
    name, and ``owner`` a dict of arguments."""

    owner: Any
    key: Any
    label: str
    argument: bool = False

    def get(self) -> Any:
        return self.owner[self.key] if isinstance(self.owner, (dict, list)) else getattr(self.owner, self.key)

    def put(self, value: Any) -> None:
        if isinstance(self.owner, list):
            list.__setitem__(self.owner, self.key, value)
        else:
            Change(self.owner, self.key, "", self.label, None, None).put(value)


class Number:
    """A number of each step: the one at a place, or what a function makes of others. ``read``: it is a constant of the
    recording."""

    def __init__(self, place: Any, function: Callable[..., Any] | None = None, operands: Any = ()) -> None:
        self.place, self._function, self._operands = place, function, operands
        self.origins: set[Number] = {self} if place else {o for a in operands if is_number(a) for o in a.origins}
        self.read, self.taken = False, place.get() if place else None
        self.type = type(self.value)

    @property
    def value(self) -> Any:
        """The number, by those that were taken from their places."""
        if self._function is None:
            return self.taken
        return self._function(*(a.value if is_number(a) else a for a in self._operands))

    def now(self) -> Any:
        """The number, by what stands at the places now."""
        for origin in self.origins:
            origin.taken = origin.place.get()
        return self.value

    def mark_read(self) -> Any:
        for origin in self.origins:
            origin.read = True
        return self.value

    @property
    def is_constant(self) -> bool:
        return any(origin.read for origin in self.origins)

    def number(self) -> torch.Tensor:
        """The function of the line that makes a tensor of it."""
        return torch.tensor(self.value, dtype=DTYPES[self.type], device="cpu")


def is_number(value: Any) -> bool:
    return type(value) is Number


class StandIn:
    """In the place of a number while a forward is recorded. If it lives longer, it is the number of the last step."""

    def __init__(self, number: Number) -> None:
        self._shardtrace_number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(read(self), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance asks
        return self._shardtrace_number.type

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls torch's function with numbers. The recorder has kept the call with stand-ins, except in a transform."""
        args, kwargs = pytree.tree_map(plain if functional_transform() is None else read, (args, kwargs or {}))
        return function(*args, **kwargs)


def number_in(value: Any) -> Any:
    """The number of a stand-in; another value as it is."""
    return value._shardtrace_number if type(value) is StandIn else value


def plain(value: Any) -> Any:
    """The value of a stand-in, also in a slice; another value as it is."""
    if type(value) is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return number_in(value).value if type(value) is StandIn else value


def read(value: Any) -> Any:
    """The same, of a stand-in that becomes a constant."""
    return number_in(value).mark_read() if type(value) is StandIn else value


def _computing(function: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    def compute(self: StandIn, *others: Any) -> Any:
        operands = (*others, self) if reflected else (self, *others)
        if any(isinstance(a, torch.Tensor) for a in others):
            return NotImplemented
        known = all(type(a) in (int, float, StandIn) for a in others)
        if known and type(function(*map(plain, operands))) in DTYPES:
            return StandIn(Number(None, function, [number_in(a) for a in operands]))
        return function(*map(read, operands))

    return compute


def _reading(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(read(self), name)(*map(read, args))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg"):
    setattr(StandIn, f"__{_name}__", _computing(getattr(operator, _name)))
    setattr(StandIn, f"__r{_name}__", _computing(getattr(operator, _name), reflected=True))
for _name in {*vars(int), *vars(float), "__reduce_ex__"} - {*vars(StandIn), "__new__", "__getattribute__"}:
    if _name.startswith("__"):
        setattr(StandIn, _name, _reading(_name))


# ---- a record with stand-ins ----


@dataclass(frozen=True)
class OfNumbers:
    """A function that is given 0-dim tensors in the place of numbers, by their positions among all arguments. The
    ``examples`` stand for fake ones."""

    of_tensors: Callable[..., Any]
    positions: tuple[int, ...]
    examples: tuple[Any, ...] = field(compare=False)

    @property
    def __name__(self) -> str:
        return f"{name_of(self.of_tensors).strip('_')}_of_numbers"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        for i, example in zip(self.positions, self.examples, strict=True):
            flat[i] = example if isinstance(flat[i], FakeTensor) or flat[i].is_meta else flat[i].item()
        args, kwargs = pytree.tree_unflatten(flat, spec)
        return self.of_tensors(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class RecordingOfNumbers(Recording):
    """A recording with stand-ins for the ``numbers`` at places.

    Args:
        computing: whether lines may take numbers. Otherwise forward may only set them.
        shared: whether the step has more than the forward. A number that the forward uses and sets is then a constant.
    """

    numbers: Sequence[Number] = ()
    computing: bool = True
    shared: bool = False
    inputs: dict[Number, torch.Tensor] = field(default_factory=dict)  # that lines take, with a fake tensor for each

    def __call__(self, watcher: CodeWatcher) -> tuple[Record, list[Change]]:
        done, changes = self.raw(watcher)
        return done, self.take_out(done, changes)

    def raw(self, watcher: CodeWatcher) -> tuple[Record, list[Change]]:
        """The record with stand-ins, and the changes."""
        try:
            for number in self.numbers:
                number.taken = number.place.get()
                number.place.put(StandIn(number))
            return super().__call__(watcher)
        finally:
            for number in self.numbers:
                number.place.put(number.taken)

    @property
    def places(self) -> list[Place]:
        """Those of the numbers that are no constants."""
        return [number.place for number in self.numbers if not number.read]

    def take_out(self, done: Record, changes: Sequence[Change]) -> list[Change]:
        """Puts fake tensors in the place of stand-ins in the calls of a record, and numbers in its result and changes,
        which it returns. Raises TypeError if an object that forward makes holds a stand-in."""
        self._mark_read(done, changes)
        self.inputs.clear()
        with self.fakes:
            done.calls = list(map(self._with_tensors, done.calls))
        done.result = pytree.tree_map(plain, done.result)
        changes = list(map(_counted, changes))
        for _ in _stand_ins((done.result, *(change.new for change in changes)), set()):
            raise TypeError("an object holds a stand-in")
        return changes

    def _mark_read(self, done: Record, changes: Sequence[Change]) -> None:
        used: set[Number] = set()
        for n, call in enumerate(done.calls):
            takes = self.computing and n not in self.reads.needs and _takes_numbers(call.function)
            for found in _stand_ins((call.args, call.kwargs), set()):
                used |= number_in(found).origins
                if not takes or not _fits(plain(found)):
                    read(found)
        for change in changes if self.shared else ():
            if is_number(old := number_in(change.old)) and old in used:
                read(change.old)
        held = (done.result, *(change.new for change in changes if type(change.new) is not StandIn))
        for found in _stand_ins(held, set()):
            read(found)

    def _with_tensors(self, call: Call) -> Call:
        flat, spec = pytree.tree_flatten((call.args, call.kwargs))
        numbers = {i: v for i, v in enumerate(map(number_in, flat)) if is_number(v) and not v.is_constant}
        for number in numbers.values():
            if number not in self.inputs:
                self.inputs[number] = torch.empty((), dtype=DTYPES[number.type], device="cpu")
        flat = [self.inputs[numbers[i]] if i in numbers else plain(v) for i, v in enumerate(flat)]
        args, kwargs = pytree.tree_unflatten(flat, spec)
        examples = tuple(number.value for number in numbers.values())
        function = OfNumbers(call.function, tuple(numbers), examples) if numbers else call.function
        return replace(call, function=function, args=args, kwargs=kwargs)

    def write(self, replay: Replay) -> list[Callable[[], None]]:
        """Adds the lines of the numbers to the running trace, ahead of all that backward may repeat. Returns the guard
        that takes the numbers of a step, if there are any."""
        for number, fake in self.inputs.items():
            replay.values.know(fake, replay.line(number.number, (), {}, [fake])[0])
        origins = [number for number in self.numbers if not number.read]
        inputs = list(self.inputs)
        self.inputs.clear()

        def take() -> None:
            if not all(type(n.now()) is n.type for n in origins) or not all(
                type(value := n.now()) is n.type and _fits(value) for n in inputs
            ):
                raise RuntimeError("a number is of another type")  # Thunder compiles another step

        return [take] if origins else []


def _takes_numbers(function: Callable[..., Any]) -> bool:
    if isinstance(function, Whole):  # an autograd function runs in each step, and gets the number
        return isinstance(function.owner, FunctionMeta)
    return bool(resolve_name(function)) and name_of(function).strip("_") in SCALING


def _fits(number: Any) -> bool:
    return type(number) is float or -(2**63) <= number < 2**63


def _stand_ins(value: Any, seen: set[int]) -> Iterator[StandIn]:
    """The stand-ins in a structure of any objects. A number of ours leads to its owner, as large as a script, and to no
    stand-in."""
    if type(value) is StandIn:
        yield value
    elif not isinstance(value, (*LEAVES, torch.Tensor, Number)) and id(value) not in seen:
        seen.add(id(value))
        for _, _, v in parts(value):
            yield from _stand_ins(v, seen)


def _counted(change: Change) -> Change:
    """A change with the number of each step. Its kind is "count" if the forward only computes with the old number."""
    old, new = number_in(change.old), number_in(change.new)
    counts = is_number(old) and not old.read and is_number(new)
    if not is_number(new) or new.is_constant:
        new = pytree.tree_map(plain, change.new)
    return replace(change, kind="count" if counts else change.kind, old=plain(change.old), new=new)


def record_numbers(
    recording: Recording, done: Record, changes: list[Change], watcher: CodeWatcher, places: Sequence[Place], **how: Any
) -> tuple[RecordingOfNumbers, Record, list[Change]]:
    """The recording, its record and the changes, with inputs for the numbers at ``places`` and for those that forward
    sets. These are what is given if it is another record with stand-ins. ``how``: see :class:`RecordingOfNumbers`."""

    def with_numbers(numbers: Sequence[Number]) -> RecordingOfNumbers:
        given = {n.place.key: StandIn(n) for n in numbers if n.place.argument}
        args = tuple(given.get(i, v) for i, v in enumerate(recording.args))
        kwargs = {k: given.get(k, v) for k, v in recording.kwargs.items()}
        return RecordingOfNumbers(**{**vars(recording), "args": args, "kwargs": kwargs}, numbers=numbers, **how)

    known = {(id(p.owner), p.key) for p in places}
    numbers = [c for c in changes if type(c.old) in DTYPES and type(c.new) in DTYPES]
    counts = [Place(c.owner, c.key, c.label) for c in numbers if (id(c.owner), c.key) not in known]
    attempts = [chosen for chosen in ([*places, *counts], counts if places else []) if chosen]
    first = Described.of(done if attempts else Record())
    for chosen in attempts:
        again = with_numbers(list(map(Number, chosen)))
        with suppress(Exception):  # of code that takes no stand-in
            found, new = again.raw(watcher)
            if not first.difference(Described.of(_plain(found))):
                return again, found, again.take_out(found, new)
    return with_numbers(()), done, changes


def _plain(done: Record) -> Record:
    found = [(c, pytree.tree_map(plain, (c.args, c.kwargs))) for c in done.calls]
    calls = [replace(call, args=args, kwargs=kwargs) for call, (args, kwargs) in found]
    return Record(calls, result=pytree.tree_map(plain, done.result))


# ---- which numbers change ----


class Varying:
    """What the plain values of one call of a model were when it was recorded last. ``say`` is told of a place with many
    values, each of which is compiled."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: dict[str, Any] = {}
        self._seen: dict[str, set[str]] = {}  # the values of each place, up to VARIANTS
        self._inputs: dict[str, int] = {}  # numbers, by their labels, and the ids of their owners
        self._constants: set[str] = set()  # numbers that forward reads

    def changed(self, places: Iterable[Place]) -> list[Place]:
        """The numbers that are to become inputs: they are not what they were. ``places``: of all plain values."""

        def varies(place: Place, value: Any) -> bool:
            if place.label in self._inputs:
                return place.argument or self._inputs[place.label] == id(place.owner)  # else the owner is compiled
            before = self._last.get(place.label)
            return type(before) is type(value) and not same(before, value)

        return [p for p in places if type(v := p.get()) in DTYPES and p.label not in self._constants and varies(p, v)]

    def keep(self, places: Iterable[Place], tried: Iterable[Place], done: RecordingOfNumbers) -> None:
        """Remembers the values of a recording, and which of the numbers that were tried became inputs."""
        inputs = {p.label: id(p.owner) for p in done.places}
        self._constants |= {p.label for p in tried} - inputs.keys()
        self._inputs |= {p.label: id(p.owner) for p in tried if p.label in inputs}
        before, self._last = self._last, {p.label: p.get() for p in places}
        for name, value in self._last.items():
            old = before.get(name, value)
            if name in inputs or same(old, value):
                continue
            seen = self._seen.setdefault(name, {repr(old)})
            if repr(value) not in seen and len(seen) < VARIANTS:
                seen.add(repr(value))
                if len(seen) == VARIANTS:
                    self._say(
                        f"{name} has had {VARIANTS} values ({old!r} -> {value!r}), and a step was compiled for each: "
                        "pass it as a tensor, or make it a buffer (register_buffer), and write into that"
                    )


def places_of(holders: Iterable[Holder], function: Callable[..., Any], given: Mapping[Any, Any]) -> list[Place]:
    """The places of plain values. ``given``: the arguments of ``function`` by positions and names."""
    found = [
        Place(h.owner, key, h.name(key))
        for h in holders
        if isinstance(h.owner, (dict, list, type, CellType))
        for key, value in h.entries.items()
        if isinstance(value, SHOWN) or is_plain(value)
        if not isinstance(h.owner, type) or key in vars(h.owner)  # not of a base
    ]
    names: list[str] = []
    with suppress(TypeError, ValueError):
        names = list(inspect.signature(function).parameters)
    values = {key: value for key, value in given.items() if isinstance(value, SHOWN) or is_plain(value)}
    labels: dict[Any, Any] = dict(enumerate(names))
    return found + [Place(values, key, f"argument {labels.get(key, key)!r}", argument=True) for key in values]


# ---- what forward sets ----


def only_written(changes: Iterable[Change], used: Collection[int]) -> list[Change]:
    """The changes whose old values the forward has not read. A :class:`Snapshot` excludes their entries.

    These are counts, and tensors in the place of tensors that no call used. ``used``: the ids of the tensors from
    outside that calls used. A first change from None to a tensor is left out: the forward may have asked for None.
    """
    return [change for change in changes if change.kind == "count" or replaces_tensors(change, used)]


def replaces_tensors(change: Change, used: Collection[int]) -> bool:
    """Whether tensors take the place of tensors that no call used."""
    old, new = pytree.tree_leaves(change.old), pytree.tree_leaves(change.new)
    tensors = [t for t in old if isinstance(t, torch.Tensor)]
    if any(id(t) in used for t in tensors):
        return False
    if change.kind == "append":
        return bool(old)
    if not tensors or pytree.tree_structure(change.old) != pytree.tree_structure(change.new):
        return False
    pairs = zip(old, new, strict=True)
    return all((isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or same(a, b) for a, b in pairs)


def check_recurrent(changes: Iterable[Change], used: Collection[int]) -> None:
    """Raises RuntimeError if the forward uses a tensor that it set itself in the step before, other than a buffer."""
    for change in changes:
        if change.kind != "buffer" and any(id(t) in used for t in pytree.tree_leaves(change.old)):
            raise RuntimeError(
                f"forward reads {change.label}, a tensor that the step before has left there, and replaces it: make it "
                "a buffer (register_buffer), pass it as an argument, or leave the module to PyTorch with "
                "fsdp(compile_policy=CompilePolicy(eager=[...]))"
            )


# ---- what a forward has set is set again ----


DEPTH = 4  # objects, one in another, that are searched for fake tensors


def numbered(changes: Iterable[Change]) -> tuple[list[Change], list[torch.Tensor]]:
    """Returns changes without fake tensors, and the fake tensors, which become outputs of the step.

    Raises:
        RuntimeError: if a change cannot be made after each step.
    """
    found: dict[int, tuple[Numbered, torch.Tensor]] = {}

    def number(change: Change, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return found.setdefault(id(value), (Numbered(len(found)), value))[0]
        if holds_fake(value):
            raise RuntimeError(
                f"forward sets {change.label} to a {type(value).__name__} that holds tensors, which cannot be made "
                "anew after each step: set a tensor, or a list, tuple or dict of tensors, or return it"
            )
        return value

    done = []
    for change in changes:
        if change.kind in FIXED:
            raise RuntimeError(
                f"forward sets the {change.kind} {change.label}: make it in __init__, before the model is sharded, and "
                "let what forward updates be a buffer"
            )
        leaves, spec = pytree.tree_flatten(change.new)
        values = [number(change, leaf) for leaf in leaves]
        new = pytree.tree_unflatten(values, spec) if any(isinstance(v, Numbered) for v in values) else change.new
        done.append(replace(change, old=change.old if is_plain(change.old) else None, new=new))
    return done, [tensor for _, tensor in found.values()]


def written_outside(memory: Memory, storages: Collection[int]) -> list[Change]:
    """The writes into tensors that no module holds by name, as changes. ``storages``: what was written into.

    Raises:
        RuntimeError: if one gets a gradient.
    """
    found = memory.outside_of(storages)
    for t, fake in found:
        if fake.requires_grad:
            raise RuntimeError(
                f"forward writes values with a gradient into a tensor of shape {tuple(t.shape)} that no module holds "
                "by name: write them detached"
            )
    return [Change(t, None, "memory", "a tensor", None, fake) for t, fake in found]


def holds_fake(value: Any, depth: int = DEPTH) -> bool:
    if isinstance(value, FakeTensor) or is_plain(value) or is_number(value) or depth == 0:
        return isinstance(value, FakeTensor)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(holds_fake(v, depth - 1) for v in value)
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return any(holds_fake(v, depth - 1) for v in inside.values())


def apply(changes: Iterable[Change], tensors: Sequence[torch.Tensor]) -> None:
    """Makes changes that :func:`numbered` returned, with the tensors of a step in the place of numbers."""

    def filled(value: Any) -> Any:
        leaves, spec = pytree.tree_flatten(value)
        if not any(isinstance(leaf, Numbered) for leaf in leaves):
            return value
        return pytree.tree_unflatten([tensors[v.number] if isinstance(v, Numbered) else v for v in leaves], spec)

    changes = [replace(c, new=c.new.now()) if is_number(c.new) else c for c in changes]  # before any is put
    for change in changes:
        value = filled(change.new)
        if change.kind == "append":
            list.extend(change.owner, value)
        elif (held := _memory(change)) is not None and _may_hold(held, value):
            with torch.no_grad():
                held.copy_(value)
        else:
            change.put(value)


@contextmanager
def made(changes: Iterable[Change]) -> Iterator[None]:
    """Around what runs as if changes were made, with placeholders for tensors. Buffers and memory stay as they are."""
    with ExitStack() as stack:
        for change in changes:
            if change.kind in ("buffer", "memory", "left"):
                continue
            stack.callback(change.put, copy.copy(change.owner) if change.key is None else change.get())
            if change.kind == "append":
                list.extend(change.owner, change.new)
            else:
                change.put(change.new.now() if is_number(change.new) else change.new)
        yield


def described(changes: Iterable[Change]) -> list[Hashable]:
    """What changes do, without tensors."""

    def plain(value: Any) -> tuple[Any, ...]:
        return tuple(repr(v) if is_plain(v) else type(v) for v in pytree.tree_leaves(value))

    return [(id(c.owner), c.key, c.kind, plain(c.new)) for c in changes]


def _memory(change: Change) -> Any:
    """The tensor whose memory gets the new value; None if another object does."""
    if change.kind == "memory":
        return change.owner
    return change.owner.get(change.key) if change.kind == "buffer" else None


def _may_hold(old: object, new: object) -> bool:
    """Whether a buffer can take a new value in its own memory."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
