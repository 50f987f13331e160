"""See what a forward sets on the user's objects while it is recorded, and put it back."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType, TracebackType
from typing import Any

from shardtrace.record.marks import is_library
from shardtrace.record.state import (
    MISSING,
    MODULE_STATE,
    Entry,
    Holder,
    State,
    cell_contents,
    contents_of,
    is_array,
    is_code,
    is_user_class,
    same,
    slot_names,
)
from shardtrace.record.watcher import INSTALLED, STDLIB

import torch
from torch import nn

OF_RNNS = ("_flat_weights", "_flat_weight_refs")  # what nn.LSTM and its like keep of their parameters
FIXED = ("submodule", "parameter")  # kinds that no step can change
LARGEST_COPY = 10_000  # entries of a container that is copied


@dataclass(frozen=True, eq=False)
class Change:
    """One entry that the forward has set, of ``owner[key]`` or, if the owner is a class or has slots, ``owner.key``.

    ``kind``: that of a :class:`Holder`, or "contents" (of a list, a set, a deque or an array: ``old`` and ``new`` are
    copies of all of it), "append" (``new``: what a list gained at its end), "memory" (of a tensor, the owner: ``new``
    is what it holds), "count" (``new``: the number computed from ``old``).
    """

    owner: Any
    key: Any
    kind: str
    label: str
    old: Any
    new: Any

    @property
    def entry(self) -> Entry:
        """What excludes the change from a :class:`Snapshot`."""
        return self.owner, self.key

    def get(self) -> Any:
        """The value of the entry now; of a list or deque as many of the last values as are ``new``."""
        if self.key is None:
            return list(self.owner)[len(self.owner) - len(self.new) :]
        own = isinstance(self.owner, dict)
        return dict.get(self.owner, self.key, MISSING) if own else getattr(self.owner, self.key, MISSING)

    def put(self, value: Any) -> None:
        """Sets the entry, or all of a list, set, deque or array. ``MISSING`` deletes it."""
        owner = self.owner
        if self.key is None and is_array(owner):
            owner[... if getattr(owner, "ndim", 1) == 0 else slice(None)] = value
        elif self.key is not None and isinstance(owner, (list, deque)):
            owner[self.key] = value
        elif self.key is None and isinstance(owner, list):
            list.__setitem__(owner, slice(None), value)
        elif self.key is None and isinstance(owner, (set, deque)):
            owner.clear()
            owner.update(value) if isinstance(owner, set) else owner.extend(value)
        elif isinstance(owner, dict):
            base: Any = OrderedDict if isinstance(owner, OrderedDict) else dict  # which keeps its order beside
            base.pop(owner, self.key, None) if value is MISSING else base.__setitem__(owner, self.key, value)
        elif value is not MISSING:
            type.__setattr__(owner, self.key, value) if isinstance(owner, type) else setattr(owner, self.key, value)
        elif hasattr(owner, self.key):
            delattr(owner, self.key)


@dataclass
class Effects:
    """Context around a recording. ``found``: what the forward changed.

    Seen are the modules of ``root``, their classes, the objects and containers that they hold (``state``), and the
    globals of the files that define their classes. At the end everything is put back, also what was :meth:`accepted
    <accept>`.
    """

    root: nn.Module
    label: str = "model"
    found: list[Change] = field(default_factory=list)
    state: State = field(default_factory=State)
    _before: dict[int, tuple[Holder, Any]] = field(default_factory=dict)
    _accepted: dict[int, Any] = field(default_factory=dict)  # by owner: what counts as unchanged, if not ``_before``

    def __enter__(self) -> Effects:
        self.state = reachable(self.root, self.label)
        self._before = {id(h.owner): (h, _copy(h.owner)) for h in self.state.holders if _is_seen(h.owner)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.found, self._accepted = self.changes(), {}
        for change in self.changes():
            change.put(change.old)
        self.state, self._before = State(), {}

    def seen(self) -> Set[int]:
        """The ids of the objects in which changes are seen."""
        return self._before.keys()

    def changes(self, owners: Iterable[int] | None = None) -> list[Change]:
        """What has changed since the beginning, or since it was accepted. ``owners``: in these of the objects only."""
        chosen = self._before.keys() if owners is None else self._before.keys() & set(owners)
        pairs = ((self._before[i][0], self._accepted.get(i, self._before[i][1])) for i in self._before if i in chosen)
        return [change for holder, before in pairs for change in _changes(holder, before)]

    def accept(self, changes: Iterable[Change]) -> None:
        """Takes the present values of entries for unchanged."""
        for owner, key in (change.entry for change in changes if id(change.owner) in self._before):
            now, known = _copy(owner), self._accepted.get(id(owner), self._before[id(owner)][1])
            self._accepted[id(owner)] = now if key is None else {**known, key: now.get(key, MISSING)}

    def replace(self, copy: Callable[[Any], Any]) -> list[Change]:
        """Puts ``copy(value)`` in the place of each value. Returns what was replaced, which counts as unchanged."""
        places = [
            (holder.owner, key, holder.kind, holder.name(key), value)
            for holder, _ in self._before.values()
            for key, value in holder.entries.items()
            if not (isinstance(holder.owner, set) or holder.kind == "array" or _is_internal(holder, key))
        ]
        replaced = [Change(*place, new) for place in places if (new := copy(place[-1])) is not place[-1]]
        for change in replaced:
            change.put(change.new)
        self._accepted = {i: _copy(holder.owner) for i, (holder, _) in self._before.items()}
        return replaced


def reachable(root: nn.Module, label: str) -> State:
    """The state of the modules of ``root`` and of the files that define their classes."""
    state = State()
    state.add_value(root, label)
    for module in _files(root):
        state.add_value(module, f"global {module.__name__}")
    return state


def tensors_held(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that modules hold by other ways than as parameters and buffers, and where. Those that a hook sets
    before each call, such as ``spectral_norm``'s, are left out."""
    excluded: list[Entry] = []
    for module in root.modules():
        remade = (getattr(hook, "name", None) for hook in module._forward_pre_hooks.values())
        excluded += ((vars(module), name) for name in (*OF_RNNS, *remade))
    state = State(excluded=excluded)
    state.add_value(root, type(root).__name__)
    for holder in state.holders:
        yield from ((holder.name(key), v) for key, v in holder.entries.items() if isinstance(v, torch.Tensor))


def _files(root: nn.Module) -> list[ModuleType]:
    """The modules of Python that define the classes of the modules and their methods, and those of the script's own
    that they use."""
    classes = {base for module in root.modules() for base in type(module).__mro__ if is_user_class(base)}
    methods = (value for cls in classes for value in vars(cls).values() if isinstance(value, FunctionType))
    defined = {cls.__module__ for cls in classes} | {str(method.__module__) for method in methods}
    names, found = sorted(name for name in defined if not is_library(name)), {}
    while names:
        name = names.pop()
        if name in found or name not in sys.modules:
            continue
        found[name] = sys.modules[name]
        names += sorted(n for n in _used_in(found[name]) - found.keys() if _is_own(n))
    return list(found.values())


def _used_in(module: ModuleType) -> set[str]:
    """The names of the modules of Python whose code a module has among its variables."""
    code = (v for v in vars(module).values() if is_code(v))
    names = (getattr(v, "__name__" if isinstance(v, ModuleType) else "__module__", None) for v in code)
    return {name for name in names if isinstance(name, str)}


def _is_own(name: str) -> bool:
    """Whether a module of Python is a file of the script's, not of an installed package."""
    if is_library(name):
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not file.startswith(STDLIB) and not any(folder in file for folder in INSTALLED)


def _is_seen(owner: Any) -> bool:
    if isinstance(owner, (list, set, deque, dict)):
        return len(owner) <= LARGEST_COPY
    return not isinstance(owner, tuple)


def _copy(owner: Any) -> Any:
    if isinstance(owner, dict):
        return dict(dict.items(owner))
    if isinstance(owner, type):
        return dict(vars(owner))
    if isinstance(owner, (list, deque)):
        return list(owner)
    if isinstance(owner, CellType):
        return cell_contents(owner)
    if is_array(owner):
        return copy.copy(owner)
    return set(owner) if isinstance(owner, set) else {name: getattr(owner, name, MISSING) for name in slot_names(owner)}


def _changes(holder: Holder, before: Any) -> Iterator[Change]:
    owner, now = holder.owner, _copy(holder.owner)
    if isinstance(owner, (list, deque)):
        if len(before) != len(now) or not all(map(same, before, now)):
            grown = isinstance(owner, list) and len(before) < len(now) and all(map(same, before, now))
            new = now[len(before) :] if grown else now
            yield Change(owner, None, "append" if grown else "contents", holder.label, before, new)
    elif is_array(owner):
        if contents_of(before, sampled=False) != contents_of(now, sampled=False):
            yield Change(owner, None, "contents", holder.label, before, now)
    elif isinstance(owner, set):
        if set(map(id, before)) != set(map(id, now)) and before != now:
            yield Change(owner, None, "contents", holder.label, before, now)
    else:
        for key in {**before, **now}:
            old, new = before.get(key, MISSING), now.get(key, MISSING)
            if not same(old, new) and not _is_internal(holder, key):
                yield Change(owner, key, holder.kind, holder.name(key), old, new)


def _is_internal(holder: Holder, name: Any) -> bool:
    """Whether an attribute belongs to Python, to nn.Module or to shardtrace."""
    if holder.kind != "attribute" or not isinstance(name, str):
        return False
    return (
        name in MODULE_STATE
        or name in OF_RNNS
        or name.startswith(("_shardtrace", "_abc_"))
        or name[:2] == name[-2:] == "__"
    )
