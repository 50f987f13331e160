"""Guard a record by the plain Python state that it was made with, compared before each step."""

from __future__ import annotations

import dataclasses
import enum
import operator
import re
import sys
import weakref
from array import array
from collections import Counter, UserDict, UserList, deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from itertools import chain
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from shardtrace.record.watcher import CodeWatcher, Outside, is_library

import torch
from torch import nn
from torch.nn.utils import parametrize

# ---- state ----


PLAIN = frozenset(
    (
        *(bool, int, float, complex, str, bytes, range, type(None), type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    )
)
BUILTIN = (list, tuple, dict, set)
CONTAINERS = (*BUILTIN, deque)
FUNCTIONS = (FunctionType, MethodType, BuiltinMethodType, partial)
LARGEST = 1024  # entries of a container that is looked into whether or not the code names it
LARGEST_NAMED = 1 << 20  # the same for one whose name is in the code
DEPTH = 4  # containers and objects, one in another, below a module or a global variable
SAMPLED = 1 << 16  # bytes of an array from which on only some of its elements are compared
SAMPLES = 1024  # such elements
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MODULE_STATE = frozenset(nn.Module().__dict__) - {"training"}  # what nn.Module keeps for itself
Entry = tuple[Any, Any]  # a container and a key, or None for its whole contents


class Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()  # in place of the value of an entry that is not there


class Holder(NamedTuple):
    """One container, or one object's attributes, and the entries that count.

    ``owner``: the ``__dict__`` of a module, a function or an object, a list, a set, a class, a cell, an array. ``kind``
    of its entries: "attribute", "submodule", "parameter", "buffer", "hook", "item", "cell", "array". ``counted``:
    whether its number of entries counts too.
    """

    owner: Any
    label: str
    entries: dict[Any, Any]
    kind: str = "attribute"
    counted: bool = True

    def name(self, key: Any) -> str:
        if self.kind not in ("item", "hook"):
            return self.label if self.kind in ("cell", "array") else f"{self.label}.{key}"
        return f"{self.label}[{key!r}]" if is_plain(key) else f"{self.label}[a {type(key).__name__}]"


def is_plain(value: object) -> bool:
    return type(value) in PLAIN or isinstance(value, (enum.Enum, type))


def same(a: object, b: object) -> bool:
    """Whether two values are one object, or plain, of one type and equal: 1 is not 1.0, and nan is nan."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (float, complex):
        return repr(a) == repr(b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) in PLAIN and a == b


def is_user_class(cls: type) -> bool:
    return cls.__module__ != "builtins" and not is_library(cls.__module__)


def is_array(value: object) -> bool:
    """Whether a value is an array of numbers, of numpy or of Python, which a script may change in place."""
    return isinstance(value, (bytearray, array)) or _is_of_numpy(value, "ndarray")


def _is_of_numpy(value: object, name: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, name))


def contents_of(value: Any, *, sampled: bool = True) -> tuple[Any, ...]:
    """What an array holds: its bytes, with their type and shape. ``sampled``: only evenly spaced elements of a large
    one of numpy, and its identity."""
    if not _is_of_numpy(value, "ndarray"):
        return type(value), bytes(value)
    found = sys.modules["numpy"].asarray(value)  # a subclass may hold more
    if found.nbytes > SAMPLED and sampled:
        flat = found.reshape(-1) if found.flags.c_contiguous else found.flat
        return found.dtype.str, found.shape, flat[:: -(-found.size // SAMPLES)].tobytes(), id(value)
    return found.dtype.str, found.shape, found.tobytes()


class State:
    """The holders that were reached.

    Args:
        names: the attributes of objects, classes, functions and modules of Python that count, None for all. Those of
            modules, dataclasses and namespaces always count.
        excluded: entries that do not count.
        replaced: likewise, but no other entries may be added or removed.
        closures: functions of this code have free variables that count. Without ``names`` those of all functions do.
    """

    def __init__(
        self,
        names: Container[str] | None = None,
        excluded: Collection[Entry] = (),
        replaced: Collection[Entry] = (),
        closures: Container[CodeType] = (),
    ) -> None:
        self.holders: list[Holder] = []
        self._names = names
        self._closures = closures
        self._excluded = {(id(owner), key) for owner, key in excluded}
        self._incomplete = {owner for owner, _ in self._excluded}
        self._excluded |= {(id(owner), key) for owner, key in replaced}
        self.seen: dict[int, tuple[str, object]] = {}  # what was reached, by id, and where; keeps it alive

    def add_value(self, value: Any, label: str, depth: int = DEPTH) -> None:
        """Adds what a module, a container, an object or a class holds."""
        value = value() if type(value) is weakref.ref else value
        if type(value) in PLAIN or isinstance(value, (torch.Tensor, enum.Enum)) or depth < 0:
            return
        if id(value) in self.seen or type(value) in weakref.ProxyTypes:
            return
        self.seen[id(value)] = label, value
        if isinstance(value, nn.Module):
            self._add_module(value, label)
        elif isinstance(value, type):
            self._add_class(value, label)
        elif isinstance(value, ModuleType):
            self._add_python_module(value, label, depth)
        elif isinstance(value, FUNCTIONS):
            self._add_function(value, label, depth)
        elif is_array(value):
            self.add(Holder(value, label, {"contents": contents_of(value)}, "array", counted=False), depth)
        else:
            self._add_container(value, label, depth)
            self._add_object(value, label, depth)

    def add(self, holder: Holder, depth: int = DEPTH) -> None:
        """Adds one holder and what its entries hold."""
        if (id(holder.owner), None) in self._excluded:
            return
        entries = {k: v for k, v in holder.entries.items() if (id(holder.owner), k) not in self._excluded}
        counted = holder.counted and id(holder.owner) not in self._incomplete
        self.holders.append(holder._replace(entries=entries, counted=counted))
        for key, value in entries.items():
            if type(value) not in PLAIN and holder.kind != "array":
                self.add_value(value, holder.name(key), depth - 1)

    def _add_module(self, module: nn.Module, label: str) -> None:
        own = module.__dict__
        entries = {k: v for k, v in own.items() if k not in MODULE_STATE and not k.startswith("_shardtrace")}
        self.add(Holder(own, label, entries))
        self.add(Holder(module._modules, label, dict(module._modules), "submodule"))
        for name, kind in (("_parameters", "parameter"), ("_buffers", "buffer")):  # tensors are guarded elsewhere
            absent = {k: None for k, v in own[name].items() if v is None}
            self.add(Holder(own[name], label, absent, kind))
        for name in HOOKS:
            self.add(Holder(own[name], f"{label}.{name}", dict(own[name]), "hook"))
        self.add_value(type(module), type(module).__qualname__)

    def _add_class(self, cls: type, label: str) -> None:
        """Adds what the user's classes define, as instances read it: the first of the method resolution order."""
        bases = [base for base in reversed(cls.__mro__) if is_user_class(base)]
        for base in bases:  # first, so that their functions are looked into as deep as those of a class that wraps them
            self.add_value(base, base.__qualname__)
        entries: dict[str, Any] = {}
        for base in bases:
            names = [name for name in vars(base) if self._counts(name) and (id(base), name) not in self._excluded]
            entries |= {name: vars(base)[name] for name in names}
        kept = {k: v for k, v in entries.items() if _is_class_state(v)}
        self.add(Holder(cls, label, kept, counted=False))

    def _add_python_module(self, module: ModuleType, label: str, depth: int) -> None:
        """Adds the variables of a module of the user's. Without ``names`` also what its own functions and classes hold,
        but not these themselves."""
        name = module.__name__.partition(".")[0]
        if not is_library(name) and name not in sys.stdlib_module_names:
            every = ((k, v) for k, v in vars(module).items() if self._counts(k))
            entries = {k: v for k, v in every if self._names is not None or not is_code(v)}
            self.add(Holder(vars(module), label, entries, counted=False), depth)
            for key, value in vars(module).items() if self._names is None else ():
                if isinstance(value, (FunctionType, type)) and value.__module__ == module.__name__:
                    self.add_value(value, f"{label}.{key}", depth)

    def _add_function(self, value: Any, label: str, depth: int) -> None:
        """Adds the attributes and defaults of a function, its free variables if they count, and what a method and a
        partial are bound to."""
        if isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self.add_value(part, label, depth)
        elif not isinstance(value, FunctionType):
            self.add_value(getattr(value, "__func__", None), label, depth)
            self.add_value(value.__self__, label, depth - 1)
        else:
            own = {k: v for k, v in value.__dict__.items() if self._counts(k)}
            defaults = {k: v for k in ("__defaults__", "__kwdefaults__") if (v := getattr(value, k))}
            for owner, entries in ((value.__dict__, own), (value, defaults)):
                if entries:
                    self.add(Holder(owner, label, entries, counted=False), depth)
            variables = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            for name, cell in variables if self._names is None or value.__code__ in self._closures else ():
                label = f"variable {name} of {value.__qualname__}"
                self.add(Holder(cell, label, cell_contents(cell), "cell", counted=False), depth - 1)

    def _add_container(self, value: Any, label: str, depth: int) -> None:
        base = next((b for b in CONTAINERS if isinstance(value, b)), None)
        if base is not None:  # a subclass may refuse len()
            named = self._names is None or is_named(label, self._names)
            looks = base.__len__(value) <= (LARGEST_NAMED if named else LARGEST)
            counted = base is not tuple and type(value).__len__ is base.__len__
            self.add(Holder(value, label, dict(entries_of(value)) if looks else {}, "item", counted), depth)

    def _add_object(self, value: Any, label: str, depth: int) -> None:
        if not is_user_class(type(value)):
            return
        everything = dataclasses.is_dataclass(value) or isinstance(value, (SimpleNamespace, UserDict, UserList))
        own = getattr(value, "__dict__", None)
        if type(own) is dict:
            entries = {k: v for k, v in own.items() if everything or self._counts(k)}
            self.add(Holder(own, label, entries), depth)
        names = [name for name in slot_names(value) if self._counts(name)]
        if names:
            present = {name: getattr(value, name) for name in names if hasattr(value, name)}
            self.add(Holder(value, label, present, counted=False), depth)
        self.add_value(type(value), type(value).__qualname__, depth)

    def _counts(self, name: str) -> bool:
        return not (name.startswith("__") and name.endswith("__")) and (self._names is None or name in self._names)


def entries_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a container by key. The members of a set are their own keys."""
    base: Any = next(b for b in CONTAINERS if isinstance(container, b))
    if base is dict:
        return iter(dict.items(container))
    members = base.__iter__(container)  # that of a subclass may be another
    return ((m, m) for m in members) if base is set else enumerate(members)


def is_named(label: str, names: Container[str]) -> bool:
    """Whether code with these names may read the entry of a label, or the container that has it."""
    found = re.search(r"(\w+)(?:\[[^.]*\])*$", label)
    return found is None or found[1] in names


def cell_contents(cell: CellType) -> dict[str, Any]:
    try:
        return {"cell_contents": cell.cell_contents}
    except ValueError:  # empty
        return {}


def is_code(value: object) -> bool:
    return isinstance(value, (FunctionType, type, ModuleType))


def _is_class_state(value: object) -> bool:
    """Whether reading the attribute from the class gives the value itself, as it does not for a property."""
    return is_plain(value) or isinstance(value, (FunctionType, torch.Tensor)) or not hasattr(type(value), "__get__")


def slot_names(value: object) -> Iterator[str]:
    """The attributes for which an object has slots."""
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from (name for name in names if name not in ("__dict__", "__weakref__"))


# ---- the guard ----


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
        closures = set(watcher.stateful().values()) if watcher is not None else set()
        new_state = partial(State, names, list(excluded), list(replaced), closures)
        self.take = partial(_take, root, label, outside, list(objects), new_state)
        self._prepare(self.take())

    def _prepare(self, holders: list[Holder]) -> None:
        self._values = _values(holders)
        dicts = [h for h in holders if type(h.owner) is dict]
        self._lists = [(h.owner, tuple(h.entries.values())) for h in holders if _is_whole_list(h)]
        rows = list(chain.from_iterable(map(_rows, dicts)))
        self._pairs = [row for row in rows if len(row) == 3]
        self._rows = [row for row in rows if len(row) > 3]
        self._others = [
            (read, h.owner, key, value)
            for h in holders
            if not (type(h.owner) is dict or h.kind == "array" or _is_whole_list(h))
            and (read := _reader(h.owner)) is not None
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
        for owner, found in self._lists:
            if len(owner) != len(found) or not all(map(operator.is_, owner, found)):
                return False
        return all(contents_of(array) == contents for array, contents in self._arrays)


def _is_whole_list(holder: Holder) -> bool:
    """Whether all entries of a list or a deque count, which are compared at C speed."""
    return type(holder.owner) in (list, deque) and len(holder.owner) == len(holder.entries)


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
    reached = {id(holder.owner) for holder in state.holders}
    for owner, name, keys in outside:
        if isinstance(owner, CellType):
            if id(owner) not in reached:
                state.add(Holder(owner, name, cell_contents(owner), "cell", counted=False))
        else:
            found = {k: owner[k] for k in keys if k in owner}
            state.add(Holder(owner, name, found, counted=False))
            for variable in (v for v in found.values() if isinstance(v, ContextVar)):
                entries = {"value": _context(variable)}
                state.add(Holder(variable, f"the context variable {variable.name}", entries, counted=False))
    return state.holders
