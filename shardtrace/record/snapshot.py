"""Guard a record by the plain Python state that it was made with, compared before each step."""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain
from types import CellType
from typing import Any

from shardtrace.record.calls import storage
from shardtrace.record.state import (
    BUILTIN,
    HOOKS,
    MISSING,
    Entry,
    Holder,
    State,
    cell_contents,
    contents_of,
    is_plain,
    same,
)
from shardtrace.record.watcher import CodeWatcher, Outside

import torch
from torch import nn
from torch.nn.utils import parametrize

WIDTH = 4  # entries of one dict that are compared in one turn of the loop
Read = Callable[[Any, Any], Any]
Name = tuple[str, int]  # of an entry, and how many entries before it have the same


class Snapshot:
    """The state of the modules of ``root``, of their classes and configs, and of the globals and cells that the watched
    code reads.

    Args:
        watcher: what ran in the forward. None: no globals, and all attributes of configs and classes.
        excluded: entries that the forward sets without reading them: a container and a key each. The key None excludes
            all of the container.
        objects: other objects that the forward may read, such as functions among its arguments.
        replaced: entries with values that may change.
        label: the name of the root in messages.
    """

    def __init__(
        self,
        root: nn.Module,
        watcher: CodeWatcher | None,
        *,
        excluded: Collection[Entry] = (),
        objects: Collection[Any] = (),
        replaced: Collection[Entry] = (),
        label: str = "model",
    ) -> None:
        names = watcher.names() if watcher is not None else None
        outside = watcher.outside() if watcher is not None else []
        new_state = partial(State, names, list(excluded), list(replaced))
        self.take = partial(_take, root, label, outside, list(objects), new_state)
        self._prepare(self.take())

    def _prepare(self, holders: list[Holder]) -> None:
        self._values = _values(holders)
        dicts = [h for h in holders if type(h.owner) is dict]
        rows = list(chain.from_iterable(map(_rows, dicts)))
        self._pairs = [row for row in rows if len(row) == 3]
        self._rows = [row for row in rows if len(row) > 3]
        self._others = [
            (read, h.owner, key, value)
            for h in holders
            if type(h.owner) is not dict and h.kind != "array" and (read := _reader(h.owner)) is not None
            for key, value in h.entries.items()
        ]
        self._arrays = [(h.owner, h.entries["contents"]) for h in holders if h.kind == "array"]
        counted = [h.owner for h in holders if h.counted]
        self._empty = [owner for owner in counted if not owner]
        self._filled = [owner for owner in counted if owner]
        self._lengths = list(map(len, self._filled))

    def check(self) -> None:
        """Raises RuntimeError if there is a difference: Thunder then compiles another step."""
        if difference := self.difference():
            raise RuntimeError(f"{difference} has changed")

    def difference(self) -> str:
        """The first place whose value is not as it was, with both values. Empty if there is none.

        The usual answer comes from identities alone. If objects were replaced, their values decide, and the new objects
        are remembered.
        """
        if self._is_identical():
            return ""
        holders = self.take()
        if found := _first_difference(self._values, _values(holders)):
            return found
        self._prepare(holders)
        return ""

    def _is_identical(self) -> bool:
        try:
            for d, key, value in self._pairs:
                if d[key] is not value:
                    return False
            for d, k1, v1, k2, v2, k3, v3, k4, v4 in self._rows:
                if d[k1] is not v1 or d[k2] is not v2 or d[k3] is not v3 or d[k4] is not v4:
                    return False
            for read, owner, key, value in self._others:
                if read(owner, key) is not value:
                    return False
        except (LookupError, AttributeError, ValueError):  # ValueError: an empty cell
            return False
        if any(self._empty) or list(map(len, self._filled)) != self._lengths:
            return False
        return all(contents_of(array) == contents for array, contents in self._arrays)


class Buffers:
    """Guards which names of ``root`` are one buffer, which buffers share memory, and their metadata: a forward may read
    these without a call of torch. The usual answer comes from identities alone."""

    def __init__(self, root: nn.Module) -> None:
        self._places = [(module._buffers, key) for module in root.modules() for key in module._buffers]
        self._remember(now := self._now())
        self._expected = list(map(_described, now, _firsts(now)))

    def check(self) -> None:
        """Raises RuntimeError if there is a difference."""
        if self._is_identical():
            return
        now = self._now()
        if list(map(_described, now, _firsts(now))) != self._expected:
            raise RuntimeError("a buffer has other metadata, or shares memory with others than before")
        self._remember(now)

    def _is_identical(self) -> bool:
        try:
            for buffers, key, value in self._rows:
                if buffers[key] is not value:
                    return False
        except KeyError:
            return False
        return True

    def _remember(self, now: Sequence[torch.Tensor | None]) -> None:
        self._rows = [(buffers, key, value) for (buffers, key), value in zip(self._places, now, strict=True)]

    def _now(self) -> list[torch.Tensor | None]:
        return [buffers.get(key) for buffers, key in self._places]


def _firsts(tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, int]]:
    """For each tensor the numbers of the first one that is the same object, and of the first one in its memory."""
    objects: dict[int, int] = {}
    memory: dict[int, int] = {}
    for i, t in enumerate(tensors):
        objects.setdefault(id(t), i)
        memory.setdefault(_memory(t), i)
    return [(objects[id(t)], memory[_memory(t)]) for t in tensors]


def _memory(t: torch.Tensor | None) -> int:
    return storage(t) if t is not None and t.layout == torch.strided and t.device.type != "meta" else id(t)


def _described(t: torch.Tensor | None, firsts: tuple[int, int]) -> Any:
    if t is None:
        return None
    return firsts, t.shape, t.stride() if t.layout == torch.strided else None, t.dtype, t.device


def _rows(holder: Holder) -> Iterator[tuple[Any, ...]]:
    """Rows of a dict and ``WIDTH`` of its keys and values. The last row repeats its first entry, or has only one."""
    pairs = list(holder.entries.items())
    for start in range(0, len(pairs), WIDTH):
        row = pairs[start : start + WIDTH]
        row += row[:1] * (WIDTH - len(row) if len(row) > 1 else 0)
        yield (holder.owner, *chain.from_iterable(row))


def _reader(owner: object) -> Read | None:
    """Returns a function that reads an entry at C speed. None for a tuple, which never changes."""
    if isinstance(owner, dict):
        return dict.get  # no __missing__, no __getitem__ of a subclass
    if isinstance(owner, list):
        return list.__getitem__
    if isinstance(owner, deque):
        return operator.getitem
    if isinstance(owner, set):
        return _member
    if isinstance(owner, ContextVar):
        return _context
    return None if isinstance(owner, tuple) else getattr


def _context(variable: ContextVar[Any], key: str = "value") -> Any:
    return variable.get(MISSING)


def _member(members: set[Any], member: Any) -> Any:
    return member if member in members else MISSING


def _values(holders: list[Holder]) -> dict[Name, Any]:
    """The values by name and by how often the name occurred before. Builtin containers that were looked into count by
    their type, their length and their entries, arrays by their contents, all other objects by identity."""
    inside = {
        id(h.owner)
        for h in holders
        if h.kind == "array"
        or (type(h.owner) in BUILTIN and (len(h.owner) == len(h.entries) or (h.entries and not h.counted)))
    }  # some entries of those that are not counted are excluded
    values: dict[Name, Any] = {}
    occurred: Counter[str] = Counter()

    def add(name: str, value: Any) -> None:
        values[name, occurred[name]] = type(value) if id(value) in inside else value
        occurred[name] += 1

    for holder in holders:
        for key, value in holder.entries.items():
            add(holder.name(key), value)
    for holder in holders:
        if holder.counted:
            add(f"number of {holder.kind}s of {holder.label}", len(holder.owner))
    return values


def _first_difference(before: Mapping[Name, Any], now: Mapping[Name, Any]) -> str:
    changed = [key for key in {**before, **now} if not same(before.get(key, MISSING), now.get(key, MISSING))]
    if not changed:
        return ""
    key = min(changed, key=lambda key: key[0].startswith("number of "))  # a new entry tells more than a new length
    return f"{key[0]} ({_short(before.get(key, MISSING))} -> {_short(now.get(key, MISSING))})"


def _short(value: object) -> str:
    text = repr(value) if is_plain(value) or value is MISSING else ""
    return text if 0 < len(text) < 60 else f"a {type(value).__name__}"


def _take(
    root: nn.Module, label: str, outside: list[Outside], objects: list[Any], new_state: Callable[[], State]
) -> list[Holder]:
    state = new_state()
    state.add_value(root, label)
    for value in objects:
        state.add_value(value, f"a {type(value).__name__} among the arguments")
    for name in HOOKS:
        hooks = getattr(torch.nn.modules.module, f"_global{name}")
        state.add(Holder(hooks, f"torch's _global{name}", dict(hooks), "hook"))
    cached = {"_cache_enabled": parametrize._cache_enabled}
    state.add(Holder(vars(parametrize), "torch.nn.utils.parametrize", cached, counted=False))
    for owner, name, keys in outside:
        if isinstance(owner, CellType):
            state.add(Holder(owner, name, cell_contents(owner), "cell", counted=False))
        else:
            found = {k: owner[k] for k in keys if k in owner}
            state.add(Holder(owner, name, found, counted=False))
            for variable in (v for v in found.values() if isinstance(v, ContextVar)):
                entries = {"value": _context(variable)}
                state.add(Holder(variable, f"the context variable {variable.name}", entries, counted=False))
    return state.holders
