"""Plain numbers that change from step to step become inputs of the step, not constants of a compilation for each value.

Note [Stand-ins]. The forward is recorded once more with stand-ins in the place of numbers. What Python computes of a
stand-in and a number is a stand-in. A function of torch that scales by a number is kept with the stand-in, and computes
with the number. Any other use reads the stand-in: it gives the number, which stays a constant. The second record counts
only if it makes the very calls of the first one, so that a stand-in has led the forward nowhere else. Each step computes
the numbers anew, in Python. They travel as 0-dim tensors, and torch's function gets a number again: its result is
eager's.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from passes.compat.versions import functional_transform
from shardtrace.record.calls import Call, Record, Whole
from shardtrace.record.effects import Change
from shardtrace.record.recorder import FakeMode
from shardtrace.record.recording import Described, Recording
from shardtrace.record.replay import Replay
from shardtrace.record.results import LEAVES, parts
from shardtrace.record.state import Holder, is_plain, same
from shardtrace.record.symbols import name_of
from shardtrace.record.watcher import CodeWatcher

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionMeta
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

DTYPES = {int: torch.int64, float: torch.float64}  # that hold a number as it is
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
    """Where a number stands: ``owner[key]``, or ``owner.key`` of a class, a cell or an object with slots. The owner of
    an argument is a dict by positions and names."""

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


class StandIn:
    """In the place of a number while a forward is recorded: that of a ``place``, or what a ``function`` makes of
    ``operands``, numbers and other stand-ins."""

    def __init__(self, place: Place | None, function: Callable[..., Any] | None = None, operands: Any = ()) -> None:
        self.place, self.function, self.operands = place, function, operands
        self.origins: tuple[StandIn, ...] = (self,) if place else tuple(o for a in operands for o in _origins(a))
        self.read, self.taken = False, place.get() if place else None
        self.type: Any = None
        self.type = type(self.value)

    @property
    def value(self) -> Any:
        """The number of the step."""
        return self.taken if self.function is None else self.function(*map(plain, self.operands))

    def now(self) -> Any:
        """The number that the place has now, or of those."""
        if self.function is None:
            return self.place.get()  # type: ignore[union-attr]
        return self.function(*(a.now() if type(a) is StandIn else a for a in self.operands))

    def number(self) -> Any:
        for origin in self.origins:
            origin.read = True
        return self.value

    @property
    def is_read(self) -> bool:
        return any(origin.read for origin in self.origins)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.number(), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance asks
        return self.type or StandIn

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls torch's function with numbers. The recorder has kept the call with the stand-ins."""
        args, kwargs = pytree.tree_map(plain if functional_transform() is None else _read, (args, kwargs or {}))
        return function(*args, **kwargs)


def plain(value: Any) -> Any:
    """The number of a stand-in, also in a slice; any other value as it is."""
    if type(value) is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return value.value if type(value) is StandIn else value


def _read(value: Any) -> Any:
    return value.number() if type(value) is StandIn else value


def _origins(value: Any) -> tuple[StandIn, ...]:
    return value.origins if type(value) is StandIn else ()


def _computing(function: Callable[..., Any], *, reflected: bool) -> Callable[..., Any]:
    def compute(self: StandIn, other: Any) -> Any:
        a, b = (other, self) if reflected else (self, other)
        if type(other) in (int, float, StandIn) and type(function(plain(a), plain(b))) in DTYPES:
            return StandIn(None, function, (a, b))
        return NotImplemented if isinstance(other, torch.Tensor) else function(_read(a), _read(b))

    return compute


def _reading(name: str) -> Callable[..., Any]:
    def read(self: StandIn, *args: Any) -> Any:
        return getattr(self.number(), name)(*map(_read, args))

    return read


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(StandIn, f"__{_name}__", _computing(getattr(operator, _name), reflected=False))
    setattr(StandIn, f"__r{_name}__", _computing(getattr(operator, _name), reflected=True))
StandIn.__neg__ = lambda self: StandIn(None, operator.neg, (self,))  # type: ignore[attr-defined]
for _name in {*vars(int), *vars(float), "__reduce_ex__"} - {*vars(StandIn), "__new__", "__getattribute__"}:
    if _name.startswith("__"):
        setattr(StandIn, _name, _reading(_name))


# ---- a record with stand-ins ----


@dataclass(frozen=True)
class OfNumbers:
    """A function that is given 0-dim tensors in the place of numbers, by their positions among all arguments. The
    ``examples`` stand for fake ones."""

    function: Callable[..., Any]
    positions: tuple[int, ...]
    examples: tuple[Any, ...] = field(compare=False)

    @property
    def __name__(self) -> str:
        return f"{name_of(self.function).strip('_')}_of_numbers"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        for i, example in zip(self.positions, self.examples, strict=True):
            flat[i] = example if isinstance(flat[i], FakeTensor) or flat[i].is_meta else flat[i].item()
        args, kwargs = pytree.tree_unflatten(flat, spec)
        return self.function(*args, **kwargs)


class Number:
    """The function of the line that makes a tensor of a number."""

    __name__ = "number"

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def __call__(self) -> torch.Tensor:
        return torch.tensor(self._stand_in.value, dtype=DTYPES[self._stand_in.type], device="cpu")


class PlainNumbers:
    """The numbers that a step takes as inputs.

    Args:
        places: where they stand.
        computing: whether lines may take them. Otherwise forward may only set them.
        shared: whether the step has more than the forward. A number that the forward uses and sets is then a constant.
    """

    def __init__(self, places: Iterable[Place] = (), *, computing: bool = True, shared: bool = False) -> None:
        self._origins = {p: StandIn(p) for p in places}
        self._computing, self._shared = computing, shared
        self.inputs: dict[int, tuple[StandIn, torch.Tensor]] = {}

    def stand_in(self, key: Any, value: Any) -> Any:
        """The stand-in for an argument, by its position or name; ``value`` if there is none."""
        found = (o for p, o in self._origins.items() if p.argument and p.key == key)
        return next(found, value)

    @property
    def places(self) -> list[Place]:
        """Those of the numbers that are no constants."""
        return [place for place, origin in self._origins.items() if not origin.read]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the stand-ins where the numbers are."""
        for place, origin in self._origins.items():
            origin.taken = place.get()
            place.put(origin)
        try:
            yield
        finally:
            for place, origin in self._origins.items():
                place.put(origin.taken)

    def taken_out(self, done: Record, changes: Sequence[Change], fakes: FakeMode) -> list[Change]:
        """Puts tensors in the place of the stand-ins in the calls of a record, and returns the changes."""
        self._mark_read(done, changes)
        self.inputs = {}
        with fakes:
            done.calls = list(map(self._with_tensors, done.calls))
        return list(map(_counted, changes))

    def _mark_read(self, done: Record, changes: Sequence[Change]) -> None:
        used: set[int] = set()
        for call in done.calls:
            takes = self._computing and _takes_numbers(call.function)
            for found in _stand_ins((call.args, call.kwargs), set()):
                if not takes or not _fits(found.value):
                    found.number()
                used.update(map(id, found.origins))
        for change in changes:
            if self._shared and id(change.old) in used:
                _read(change.old)
        for held in (done.result, *(change.new for change in changes if type(change.new) is not StandIn)):
            for found in _stand_ins(held, set()):
                found.number()

    def _with_tensors(self, call: Call) -> Call:
        flat, spec = pytree.tree_flatten((call.args, call.kwargs))
        numbers = {i: v.value for i, v in enumerate(flat) if type(v) is StandIn and not v.is_read}
        flat = [self._tensor(v) if type(v) is StandIn and not v.is_read else plain(v) for v in flat]
        args, kwargs = pytree.tree_unflatten(flat, spec)
        function = OfNumbers(call.function, tuple(numbers), tuple(numbers.values())) if numbers else call.function
        return replace(call, function=function, args=args, kwargs=kwargs)

    def _tensor(self, stand_in: StandIn) -> torch.Tensor:
        if id(stand_in) not in self.inputs:
            self.inputs[id(stand_in)] = stand_in, torch.empty((), dtype=DTYPES[stand_in.type], device="cpu")
        return self.inputs[id(stand_in)][1]

    def write(self, replay: Replay) -> list[Callable[[], None]]:
        """Adds the lines of the numbers to the running trace, ahead of all that backward may repeat. Returns the guard
        that takes the numbers of a step, if there are any."""
        used = [stand_in for stand_in, _ in self.inputs.values()]
        for stand_in, fake in self.inputs.values():
            replay.values.know(fake, replay.line(Number(stand_in), (), {}, [fake])[0])
        self.inputs = {}
        origins = [(place, origin) for place, origin in self._origins.items() if not origin.read]

        def take() -> None:
            for place, origin in origins:
                origin.taken = place.get()
            for stand_in in (*(origin for _, origin in origins), *used):
                if type(stand_in.value) is not stand_in.type or not _fits(stand_in.value):
                    raise RuntimeError("a number is of another type")  # Thunder compiles another step

        return [take] if origins else []


def _takes_numbers(function: Callable[..., Any]) -> bool:
    if isinstance(function, Whole):  # an autograd function runs in each step, and gets the number
        return isinstance(function.owner, FunctionMeta)
    return bool(resolve_name(function)) and name_of(function).strip("_") in SCALING


def _fits(number: Any) -> bool:
    return type(number) is float or -(2**63) <= number < 2**63


def _stand_ins(value: Any, seen: set[int]) -> Iterator[StandIn]:
    """The stand-ins in a structure of any objects."""
    if type(value) is StandIn:
        yield value
    elif not isinstance(value, (*LEAVES, torch.Tensor)) and id(value) not in seen:
        seen.add(id(value))
        for _, _, v in parts(value):
            yield from _stand_ins(v, seen)


def _counted(change: Change) -> Change:
    """A change with the number of each step. Its kind is "count" if the forward only computes with the old number."""
    old, new = change.old, change.new
    new = plain(new) if type(new) is StandIn and new.is_read else new
    counts = type(old) is StandIn and not old.read and type(new) is StandIn
    return replace(change, kind="count" if counts else change.kind, old=plain(old), new=new)


@dataclass(frozen=True, eq=False)
class RecordingOfNumbers(Recording):
    """A recording with stand-ins for ``numbers``."""

    numbers: PlainNumbers

    def __call__(self, watcher: CodeWatcher) -> tuple[Record, list[Change]]:
        done, changes = self.raw(watcher)
        return done, self.numbers.taken_out(done, changes, self.fakes)

    def raw(self, watcher: CodeWatcher) -> tuple[Record, list[Change]]:
        with self.numbers.in_place():
            return super().__call__(watcher)

    def repeats(self, first: Described, done: Record) -> bool:
        """Whether the record with stand-ins makes the calls of the first one."""
        calls = [
            replace(c, args=pytree.tree_map(plain, c.args), kwargs=pytree.tree_map(plain, c.kwargs)) for c in done.calls
        ]
        return not first.difference(Described.of(Record(calls, result=pytree.tree_map(plain, done.result))))


Recorded = tuple[Recording, Record, list[Change], PlainNumbers]


def record_numbers(first: Recorded, watcher: CodeWatcher, places: Sequence[Place], **how: bool) -> Recorded:
    """Records once more, with inputs for the numbers at ``places`` and for those that forward sets.

    ``first``: what is returned if the forward takes no stand-ins. ``how``: see :class:`PlainNumbers`.
    """
    recording, done, changes, _ = first
    known = {(id(p.owner), p.key) for p in places}
    numbers = [c for c in changes if type(c.old) in DTYPES and type(c.new) in DTYPES]
    counts = [Place(c.owner, c.key, c.label) for c in numbers if (id(c.owner), c.key) not in known]
    described = Described.of(done) if places or counts else None
    for chosen in filter(None, ([*places, *counts], counts if places else [])):
        inputs = PlainNumbers(chosen, **how)
        args = tuple(inputs.stand_in(i, v) for i, v in enumerate(recording.args))
        kwargs = {k: inputs.stand_in(k, v) for k, v in recording.kwargs.items()}
        again = RecordingOfNumbers(**{**vars(recording), "args": args, "kwargs": kwargs, "numbers": inputs})
        with suppress(Exception):  # of code that takes no stand-in
            found, new = again.raw(watcher)
            if again.repeats(described, found):
                return again, found, inputs.taken_out(found, new, again.fakes), inputs
    return first


# ---- which numbers change ----


class Varying:
    """What the plain values of one call of a model were, each time that it was recorded. ``say`` is told of a place with
    many values, each of which is compiled."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: dict[str, Any] = {}
        self._seen: dict[str, list[str]] = {}  # the different values of each place, up to VARIANTS
        self._inputs: set[str] = set()
        self._constants: set[str] = set()  # numbers that forward reads

    def changed(self, places: Iterable[Place]) -> list[Place]:
        """The numbers that are to become inputs: they are not what they were. ``places``: of all plain values."""

        def varies(place: Place, value: Any) -> bool:
            before = self._last.get(place.label)
            return place.label in self._inputs or (type(before) is type(value) and not same(before, value))

        return [p for p in places if type(v := p.get()) in DTYPES and p.label not in self._constants and varies(p, v)]

    def keep(self, places: Iterable[Place], tried: Iterable[Place], numbers: PlainNumbers) -> None:
        """Remembers the values of a recording, and which of the numbers that were tried became inputs."""
        inputs, labels = {p.label for p in numbers.places}, {p.label for p in tried}
        self._inputs |= labels & inputs
        self._constants |= labels - inputs
        self._last = {p.label: p.get() for p in places}
        for name in self._last.keys() - inputs:
            seen, value = self._seen.setdefault(name, []), repr(self._last[name])
            if value not in seen and len(seen) < VARIANTS:
                seen.append(value)
                if len(seen) == VARIANTS:
                    self._say(
                        f"{name} has had {VARIANTS} values ({seen[-2]} -> {value}), and a step was compiled for each: "
                        "pass it as a tensor, or make it a buffer (register_buffer) and write into it"
                    )


def places_of(holders: Iterable[Holder], function: Callable[..., Any], given: Mapping[Any, Any]) -> list[Place]:
    """The places of plain values that can be set. ``given``: the arguments of ``function``, by positions and names."""
    found = [
        Place(h.owner, key, h.name(key))
        for h in holders
        if not isinstance(h.owner, (tuple, set, ContextVar))
        for key, value in h.entries.items()
        if is_plain(value) and not (isinstance(h.owner, type) and key not in vars(h.owner))
    ]
    names: list[Any] = []
    with suppress(TypeError, ValueError):
        names = list(inspect.signature(function).parameters)
    for key, value in given.items():
        if is_plain(value):
            name = names[key] if isinstance(key, int) and key < len(names) else key
            found.append(Place(given, key, f"argument {name!r}", argument=True))
    return found


# ---- what forward sets ----


def only_written(changes: Iterable[Change], used: Collection[int]) -> list[Change]:
    """The changes whose old values the forward has not read. A :class:`Snapshot` excludes their entries.

    These are counts, and tensors in the place of tensors that no call used. ``used``: the ids of the tensors from
    outside that calls used. A first change from None to a tensor is left out: the forward may have asked for None.
    """
    return [change for change in changes if change.kind == "count" or _replaces(change, used)]


def _replaces(change: Change, used: Collection[int]) -> bool:
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
