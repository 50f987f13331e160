"""What a forward sets on the user's objects while it is recorded: seen, and put back. No fake tensor stays."""

from __future__ import annotations

import copy
import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper
from operator import is_
from types import CellType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any
from weakref import ref

from shardtrace.record.snapshot import (
    MISSING,
    MODULE_STATE,
    Entry,
    Holder,
    State,
    cell_contents,
    contents_of,
    is_array,
    is_code,
    is_plain,
    is_user_class,
    same,
    slot_names,
)
from shardtrace.record.watcher import INSTALLED, STDLIB, TYPE, is_library

import torch
from torch import nn

# ---- effects ----


OF_RNNS = ("_flat_weights", "_flat_weight_refs")  # what nn.LSTM and its like keep of their parameters
FIXED = ("submodule", "parameter")  # kinds that no step can change
LARGEST_COPY = 1 << 20  # entries of a container that is copied


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
        self.found = changes = self.changes()
        if self._accepted:  # these are put back as well
            self._accepted = {}
            changes = self.changes()
        for change in changes:
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
    elif not (len(before) == len(now) and all(map(is_, before, now)) and all(map(is_, before.values(), now.values()))):
        for key in {**before, **now}:
            old, new = before.get(key, MISSING), now.get(key, MISSING)
            if not same(old, new) and new is not TYPE and not _is_internal(holder, key):
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


# ---- fakes that stay ----


DEPTH = 4  # holders, one in another, that an error names


def check_leaks(fakes: Iterable[ref[torch.Tensor]]) -> None:
    """Raises RuntimeError if a Python object still holds one of the fakes."""
    fakes = [fake for fake in fakes if fake() is not None]
    if not fakes:
        return
    for generation in (1, 2):  # most cycles are as young as the record; to look at all objects takes a second
        gc.collect(generation)
        if all(fake() is None for fake in fakes):
            return
    for cache in _caches([fake() for fake in fakes], 2):
        cache.cache_clear()  # functools.lru_cache: the next call computes again
    alive = [t for fake in fakes if (t := fake()) is not None]
    for tensor in alive:
        if holder := _holder(tensor, {id(alive)}, DEPTH):
            raise RuntimeError(
                f"forward leaves a tensor of shape {tuple(tensor.shape)} in {holder}, where no step would set it: "
                "return it, set it as an attribute of a module, or leave the module to PyTorch with "
                "fsdp(compile_policy=CompilePolicy(eager=[...]))"
            )


def _caches(values: list[Any], depth: int) -> Iterator[Any]:
    """The caches of functools that hold a value, by itself or in a container."""
    holders = gc.get_referrers(*(v for v in values if v is not None))
    yield from (holder for holder in holders if isinstance(holder, _lru_cache_wrapper))
    if depth and holders:
        yield from _caches([h for h in holders if isinstance(h, (tuple, list, dict)) and h is not values], depth - 1)


def _holder(value: object, ignored: set[int], depth: int) -> str:
    """Names the user's object that holds the value, through containers. Empty if only torch or a frame does."""
    holders = gc.get_referrers(value)
    ignored = {*ignored, id(holders)}
    for holder in holders:
        if id(holder) not in ignored and (name := _name(holder, value, {*ignored, id(holder)}, depth)):
            return name
    return ""


def _name(holder: Any, value: object, ignored: set[int], depth: int) -> str:
    if isinstance(holder, dict):
        if (name := _namespace(holder, value)) is not None:
            return name
        what = f"item {_key(holder, value)} of a dict"
    elif isinstance(holder, (list, tuple, deque)):
        what = f"item {next(i for i, item in enumerate(holder) if item is value)} of a {type(holder).__name__}"
    elif isinstance(holder, (set, frozenset)):
        what = "a set"
    else:
        return _name_of_object(holder, value)
    outer = _holder(holder, ignored, depth - 1) if depth else "a nested container"
    return f"{what} in {outer}" if outer else ""  # a container counts only if an object of the user holds it


def _name_of_object(holder: Any, value: object) -> str:
    if isinstance(holder, CellType):
        return _variable(holder)
    if isinstance(holder, FrameType) or _is_library(holder):
        return ""
    if type(holder).__name__.startswith("hamt_"):
        return "a context variable"
    return _attribute(holder, getattr(holder, "__dict__", {}), value)


def _namespace(holder: dict[Any, Any], value: object) -> str | None:
    """The attribute or the global variable that an entry of ``holder`` is: empty for a library's, None for an ordinary
    dict."""
    for owner in gc.get_referrers(holder):
        if isinstance(owner, FunctionType):
            continue
        of_class = isinstance(owner, type) and any(found is value for found in vars(owner).values())
        if not of_class and getattr(owner, "__dict__", None) is not holder:
            continue
        if isinstance(owner, ModuleType):
            return (
                "" if is_library(owner.__name__) else f"the global variable {_key(holder, value)} of {owner.__name__}"
            )
        return "" if _is_library(owner) else _attribute(owner, holder, value)
    return None


def _attribute(owner: object, attributes: Mapping[Any, Any], value: object) -> str:
    article = f"the class {owner.__name__}" if isinstance(owner, type) else f"a {type(owner).__name__}"
    names = [name for name, found in attributes.items() if found is value]
    return f"attribute {names[0]!r} of {article}" if names else article


def _variable(cell: CellType) -> str:
    """The variable of a function that a cell is. Empty if no function has it but those that run."""
    closures = [c for c in gc.get_referrers(cell) if isinstance(c, tuple)]
    for function in gc.get_referrers(*closures) if closures else ():
        if isinstance(function, FunctionType) and function.__closure__ is not None and not _is_library(function):
            variables = zip(function.__code__.co_freevars, function.__closure__, strict=True)
            if names := [name for name, found in variables if found is cell]:
                return f"the variable {names[0]!r} of {function.__qualname__}"
    return ""


def _key(holder: Mapping[Any, Any], value: object) -> str:
    key = next((key for key, found in holder.items() if found is value), None)
    return repr(key) if is_plain(key) else f"of a {type(key).__name__}"


def _is_library(owner: Any) -> bool:
    if isinstance(owner, nn.Module):
        return False
    module = owner.__module__ if isinstance(owner, (type, FunctionType)) else type(owner).__module__
    return is_library(str(module))
