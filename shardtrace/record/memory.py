"""Which memory a call of torch writes, which tensors share it, and what it holds while lines are written.

What an operator writes is in its schema, whatever mode torch is in. A tensor that forward reads and that no module
holds by name (an attribute, an entry of a list, a global) has a fake, which is a part of another one's memory if the
tensor is.

While recorded calls are written as lines, values take the place of writes. A tensor is known by its fake. Fakes that
share memory are views of the storage's first tensor, the base. A write gives the base a new value. A view that is read
after a write is taken again from it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from passes.kernels.torch_call import extent
from shardtrace.record.calls import Refused, storage, tensors_of

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

STATISTICS = {"running_mean", "running_var"}  # written by norms in training, whose schemas do not say so
TRAINING = {"training", "use_input_stats"}
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
LARGEST_SEARCH = 1 << 22  # elements of a storage in which shared ones are looked for


# ---- what an operator writes ----


@functools.cache
def _writing(operator: Any) -> tuple[tuple[tuple[int, str], ...], tuple[int, str] | None]:
    """The arguments that an operator writes into, by number and name, and the one that tells whether it does."""
    arguments = list(enumerate(operator._schema.arguments))
    marked = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    statistics = [(i, a.name) for i, a in arguments if a.name in STATISTICS]
    training = next(((i, a.name) for i, a in arguments if a.name in TRAINING), None)
    return (tuple(marked), None) if marked or training is None else (tuple(statistics), training)


def written_by(operator: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that the call of an operator writes into."""

    def given(argument: tuple[int, str]) -> Any:
        number, name = argument
        return args[number] if number < len(args) else kwargs.get(name)

    arguments, training = _writing(operator)
    if not arguments or (training is not None and not given(training)):
        return []
    return tensors_of(list(map(given, arguments)))


def arguments_written(written: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The arguments of a function that hold what operators below it have written, in the order of the last writes.

    Raises NotImplementedError if two of them share an element.
    """
    by_id = {id(t): t for t in given if t.layout == torch.strided}
    found: dict[int, torch.Tensor] = {}
    for t in written:
        if id(t) in by_id:
            holder: torch.Tensor | None = t
        elif t.layout != torch.strided:
            continue
        else:
            same = [a for a in by_id.values() if storage(a) == storage(t)]
            holder = next((a for a in same if covers(a, t)), same[0] if same else None)
        if holder is not None:  # else it is memory that the function has made
            found.pop(id(holder), None)
            found[id(holder)] = holder
    several = [t for t in found.values() if sum(storage(t) == storage(o) for o in found.values()) > 1]
    if any(overlap(a, b) for i, a in enumerate(several) for b in several[:i]):
        raise NotImplementedError("it writes into two arguments that share memory: call it for each by itself")
    return tuple(found.values())


# ---- parts of memory ----


class Extent(NamedTuple):
    """The bytes of a storage from the first element of a tensor to its last."""

    begin: int
    end: int

    @classmethod
    def of(cls, t: torch.Tensor) -> Extent:
        begin = int(t.storage_offset())
        return cls(begin * t.itemsize, (begin + (extent(t) if t.numel() else 0)) * t.itemsize)


def covers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the elements of ``b``, of one storage with ``a``, are certain to be among those of ``a``."""
    x, y = Extent.of(a), Extent.of(b)
    dense = a.numel() * a.itemsize == x.end - x.begin
    return x.begin <= y.begin and y.end <= x.end and (dense or same_place(a, b))


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for two tensors of one storage that are the same part of it."""
    return (a.size(), a.stride(), a.storage_offset(), a.dtype) == (b.size(), b.stride(), b.storage_offset(), b.dtype)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share an element."""
    if storage(a) != storage(b):
        return False
    x, y = Extent.of(a), Extent.of(b)
    if x.end <= y.begin or y.end <= x.begin:
        return False
    if a.itemsize != b.itemsize or max(x.end, y.end) // a.itemsize > LARGEST_SEARCH:
        return True
    with unset_fake_temporarily():
        elements = torch.zeros(max(x.end, y.end) // a.itemsize, dtype=torch.bool)
        elements.as_strided(a.size(), a.stride(), a.storage_offset()).fill_(True)
        return bool(elements.as_strided(b.size(), b.stride(), b.storage_offset()).any())


# ---- tensors and their fakes ----


class Memory:
    """The fakes of real tensors, which share memory as these do.

    Args:
        fakes: their mode.
        alias_of: gives the fake of a tensor that stands for another one, such as the shard of a parameter, or None.
    """

    def __init__(self, fakes: FakeTensorMode, alias_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._fakes, self._alias_of = fakes, alias_of
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tensors and fakes, by the ids of the tensors
        self._on: dict[int, list[torch.Tensor]] = {}  # by storage: the tensors that are no parts of others
        self.bases: dict[int, torch.Tensor] = {}  # by the id of a fake: the one that it is a part of
        self.named: set[int] = set()  # the ids of the fakes of tensors that a module holds by name
        self.asked: set[int] = set()  # the ids of fakes of which forward has asked what is no tensor
        self.outside: dict[int, torch.Tensor] = {}  # by the id of a fake: the tensor, if no module holds it by name
        self._stale: dict[int, set[int] | None] = {}  # by storage: the ids of views that are out of date; None: all
        self._twins: dict[int, int] = {}  # by storage: the one that .data has made the same
        # fakes of tensors that overlap, neither in the other
        self._partly: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        """A recording begins: no data is assigned."""
        self._stale, self._twins = {}, {}

    def hold(self, t: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The fake of a tensor: a part of another one, or one that ``make`` makes."""
        if id(t) in self._known:
            return self._known[id(t)][1]
        if t.layout != torch.strided or t.device.type == "meta" or isinstance(t, FakeTensor):
            return make(t)
        others = self._on.setdefault(storage(t), [])
        around = next((other for other in others if other.dtype == t.dtype and covers(other, t)), None)
        if around is not None:
            fake = self._part(t, around)
        else:
            fake = make(t)
            self._partly += [(self._known[id(other)][1], fake) for other in others if overlap(other, t)]
            others.append(t)
        self._known[id(t)] = t, fake
        self.named.add(id(fake))
        return fake

    def _part(self, t: torch.Tensor, around: torch.Tensor) -> torch.Tensor:
        base = self._known[id(around)][1]
        offset = (Extent.of(t).begin - Extent.of(around).begin) // t.itemsize
        with self._fakes, torch.no_grad():
            part = base.as_strided(t.size(), t.stride(), offset)
        self.bases[id(part)] = base
        return part

    def met(self, t: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor that a call of forward was given. Fakes, and what must not be one, are returned."""
        if isinstance(t, FakeTensor):
            return t
        if (alias := self._alias_of(t)) is not None:
            return alias
        if t.layout != torch.strided or type(t) not in PLAIN_TYPES or t.requires_grad:
            return t
        if id(t) not in self._known and not self._on.get(storage(t)):
            self._hold_outside(_whole(t))
        if id(t) not in self._known:
            self._hold_outside(t)
        return self._known[id(t)][1]

    def _hold_outside(self, t: torch.Tensor) -> None:
        fake = self.hold(t, self._like)
        self.outside[id(fake)] = t
        self.named.discard(id(fake))

    def _like(self, t: torch.Tensor) -> torch.Tensor:
        with self._fakes:
            fake = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
        fake._shardtrace_outside = t  # type: ignore[attr-defined]  # for what PyTorch tries
        return fake

    def outside_of(self, storages: Collection[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that no module holds by name, with their fakes, that are all of one of the ``storages``."""
        found = ((t, i, self._known[id(t)][1]) for i, t in self.outside.items())
        return [(t, fake) for t, i, fake in found if i not in self.bases and storage(fake) in storages]

    def assign(self, t: torch.Tensor, value: torch.Tensor, others: Iterable[torch.Tensor]) -> None:
        """``t.data`` is set to ``value``: the tensors with which ``t`` shared memory, of the ``others``, do not follow,
        and from now on a write into one of the two would be one into both."""
        if id(t) in self.bases or any(base is t for base in self.bases.values()):
            raise NotImplementedError("forward sets .data of a tensor that shares memory with another one: use copy_")
        s, o = storage(t), storage(value)
        if o in self._twins and self._twins[o] != s:
            raise Refused("forward sets .data of two tensors to one memory: set one of them to a clone")
        views = {id(x) for x in others if x is not t and storage(x) == s}
        self._stale[s] = views | (self._stale.get(s) or set())
        self._twins.update({s: o, o: s} if s != o else {})

    def use(self, given: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Raises NotImplementedError if a call reads what an assignment of ``data`` has parted from its memory."""
        if not self._stale:
            return
        for t in given:
            stale = self._stale.get(storage(t), set()) if t.layout == torch.strided else set()
            if stale is None or id(t) in stale:
                raise NotImplementedError(
                    "forward sets .data of a tensor, and then uses a view of the tensor or what it has set it to: "
                    "use copy_, which all views see"
                )
        for t in written:
            if (twin := self._twins.pop(storage(t), None)) is not None:
                self._stale[twin] = None

    def check_whole(self, written: Collection[int]) -> None:
        """Raises RuntimeError if forward writes into memory of which two tensors share a part. ``written``: the keys of
        the storages."""
        for pair in self._partly:
            if any(storage(fake) in written for fake in pair):
                shapes = " and ".join(str(tuple(fake.shape)) for fake in pair)
                raise RuntimeError(
                    f"forward writes into memory that two tensors of shapes {shapes} share in part: "
                    "make one of them a clone"
                )


def _whole(t: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor is in; the tensor if that is all of it."""
    of, count = t.untyped_storage(), t.untyped_storage().nbytes() // t.itemsize
    if t.numel() == count:
        return t
    with unset_fake_temporarily():
        return torch.empty(0, dtype=t.dtype, device=t.device).set_(of, 0, (count,), (1,))


# ---- tensors that are held ----


class Held:
    """Guards which names of ``root`` are one buffer or parameter, which tensors share memory, and their metadata: a
    forward may read these without a call of torch. The usual answer comes from the identities of most.

    Args:
        others: tensors that no module holds by name, and that forward uses.
        asked: the ids of buffers and parameters whose shape a script might change in place, unseen by anything else.
    """

    def __init__(
        self, root: nn.Module, others: Iterable[torch.Tensor] = (), asked: Collection[int] = frozenset()
    ) -> None:
        self._places: list[tuple[Mapping[str, torch.Tensor | None], str]] = [
            (module._buffers, key) for module in root.modules() for key in module._buffers
        ]
        parameters = [(module._parameters, key) for module in root.modules() for key in module._parameters]
        count = Counter(id(p) for held, key in parameters if (p := held[key]) is not None and not p.is_meta)
        self._places += [(held, key) for held, key in parameters if id(held[key]) in asked or count[id(held[key])] > 1]
        self._others = list(others)
        now = self._now()
        self._expected = list(map(_described, now, _firsts(now)))
        memory = list(map(_memory_of, now))
        shared = Counter(memory)
        self._watched = [
            i
            for i, t in enumerate(now)
            if t is not None and (i >= len(self._places) or id(t) in asked or shared[memory[i]] > 1)
        ]
        self._remember(now)

    def check(self) -> None:
        """Raises RuntimeError if there is a difference."""
        if self._is_identical():
            return
        now = self._now()
        if list(map(_described, now, _firsts(now))) != self._expected:
            raise RuntimeError("a tensor has other metadata, or shares memory with others than before")
        self._remember(now)

    def _is_identical(self) -> bool:
        try:
            for buffers, key, value in self._rows:
                if buffers[key] is not value:
                    return False
        except KeyError:
            return False
        return all(_described(t, _memory_of(t)) == expected for t, expected in self._seen)

    def _remember(self, now: Sequence[torch.Tensor | None]) -> None:
        self._rows = [(buffers, key, value) for (buffers, key), value in zip(self._places, now, strict=False)]
        self._seen = [(now[i], _described(now[i], _memory_of(now[i]))) for i in self._watched]

    def _now(self) -> list[torch.Tensor | None]:
        return [*(buffers.get(key) for buffers, key in self._places), *self._others]


def _firsts(tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, int]]:
    """For each tensor the numbers of the first one that is the same object, and of the first one in its memory."""
    objects: dict[int, int] = {}
    memory: dict[int, int] = {}
    for i, t in enumerate(tensors):
        objects.setdefault(id(t), i)
        memory.setdefault(_memory_of(t), i)
    return [(objects[id(t)], memory[_memory_of(t)]) for t in tensors]


def _memory_of(t: torch.Tensor | None) -> int:
    return storage(t) if t is not None and t.layout == torch.strided and t.device.type != "meta" else id(t)


def _described(t: torch.Tensor | None, memory: Any) -> Any:
    if t is None:
        return None
    return memory, t.shape, t.stride() if t.layout == torch.strided else None, t.dtype, t.device


# ---- values ----


# (base's proxy, base, view) -> the view's proxy; (base's proxy, base, view, new value) -> the base's proxy
Take = Callable[[Any, torch.Tensor, torch.Tensor], Any]
Put = Callable[[Any, torch.Tensor, torch.Tensor, Any], Any]
# (base's proxy, base, new proxy) -> the base's proxy
Keep = Callable[[Any, torch.Tensor, Any], Any]


class Values:
    """The proxies of fakes. ``take`` and ``put`` write the lines that read and replace a part of a base, ``keep`` that
    which gives a base other values and the gradient that it has."""

    def __init__(self, take: Take, put: Put, keep: Keep) -> None:
        self._take, self._put, self._keep = take, put, keep
        self._proxies: dict[int, Any] = {}
        self._alive: list[torch.Tensor] = []  # keeps ids from being used again
        self._bases: dict[int, tuple[torch.Tensor, Any]] = {}  # of a storage
        self._writes: dict[int, int] = {}  # into a storage, so far
        self._valid: dict[int, int] = {}  # of a tensor: how many writes its proxy knows

    def __contains__(self, t: torch.Tensor) -> bool:
        return id(t) in self._proxies

    def know(self, t: torch.Tensor, proxy: Any) -> None:
        """``proxy`` is what ``t`` holds now."""
        s = storage(t)
        self._proxies[id(t)] = proxy
        self._alive.append(t)
        self._bases.setdefault(s, (t, proxy))
        self._valid[id(t)] = self._writes.setdefault(s, 0)

    def know_part(self, t: torch.Tensor) -> None:
        """``t`` is a part of a base that is known: it is taken when it is read."""
        self._proxies[id(t)] = None
        self._alive.append(t)
        self._valid[id(t)] = -1

    def base(self, t: torch.Tensor) -> torch.Tensor:
        """The first tensor that is known of the storage of ``t``."""
        return self._bases[storage(t)][0]

    def read(self, t: torch.Tensor) -> Any:
        """The proxy of what ``t`` holds now."""
        s = storage(t)
        if self._valid[id(t)] != self._writes[s]:
            base, now = self._bases[s]
            whole = same_place(base, t) and (t.requires_grad or not base.requires_grad)  # else it is detached
            self.know(t, now if whole else self._take(now, base, t))
        return self._proxies[id(t)]

    def write(self, t: torch.Tensor, proxy: Any, *, tracked: bool = True) -> None:
        """``t`` holds ``proxy`` from here on, and all tensors that share its memory follow. ``tracked``: whether
        autograd sees the write. Gradients ignore another one."""
        s = storage(t)
        base, now = self._bases[s]
        new = proxy if same_place(base, t) else self._put(now, base, t, proxy)
        keeps = not tracked and base.requires_grad
        self._bases[s] = base, self._keep(now, base, new) if keeps else new
        self._writes[s] += 1
        if not keeps:
            self.know(t, proxy)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forgets tensors, and what their memory holds."""
        for t in tensors:
            self._proxies.pop(id(t), None)
            self._bases.pop(storage(t), None)
            self._writes.pop(storage(t), None)

    def clear(self) -> None:
        """Forgets all tensors, so that they die with the record."""
        for known in (self._proxies, self._alive, self._bases, self._writes, self._valid):
            known.clear()

    def is_written(self, t: torch.Tensor) -> bool:
        return bool(self._writes.get(storage(t)))
