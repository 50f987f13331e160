"""Find the Python state that a forward may read or write: modules, their classes, configs, small containers."""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Collection, Container, Iterator
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from shardtrace.record.marks import is_library

import torch
from torch import nn

PLAIN = frozenset(
    (
        *(bool, int, float, complex, str, bytes, range, type(None), type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    )
)
BUILTIN = (list, tuple, dict, set)
LARGEST = 64  # entries of a container that is looked into
DEPTH = 4  # containers and objects, one in another, below a module or a global variable
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MODULE_STATE = frozenset(nn.Module().__dict__) - {"training"}  # what nn.Module keeps for itself
Entry = tuple[Any, Any]  # a container and a key, or None for its whole contents


class Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()  # in place of the value of an entry that is not there


class Holder(NamedTuple):
    """One container, or one object's attributes, and the entries that count.

    ``owner``: the ``__dict__`` of a module or an object, a list, a set, a class, a cell. ``kind`` of its entries:
    "attribute", "submodule", "parameter", "buffer", "hook", "item", "cell". ``counted``: whether its number of entries
    counts too.
    """

    owner: Any
    label: str
    entries: dict[Any, Any]
    kind: str = "attribute"
    counted: bool = True

    def name(self, key: Any) -> str:
        if self.kind not in ("item", "hook"):
            return self.label if self.kind == "cell" else f"{self.label}.{key}"
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


class State:
    """The holders that were reached.

    Args:
        names: the attributes of objects and classes that count, None for all. Those of modules, dataclasses and
            namespaces always count.
        excluded: entries that do not count.
    """

    def __init__(self, names: Container[str] | None = None, excluded: Collection[Entry] = ()) -> None:
        self.holders: list[Holder] = []
        self._names = names
        self._excluded = {(id(owner), key) for owner, key in excluded}
        self._incomplete = {owner for owner, _ in self._excluded}
        self._seen: dict[int, object] = {}  # keeps what it names alive

    def add_value(self, value: Any, label: str, depth: int = DEPTH) -> None:
        """Adds what a module, a container, an object or a class holds."""
        value = value() if type(value) is weakref.ref else value
        if type(value) in PLAIN or isinstance(value, (torch.Tensor, enum.Enum)) or depth < 0:
            return
        if id(value) in self._seen or type(value) in weakref.ProxyTypes:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._add_module(value, label)
        elif isinstance(value, type):
            self._add_class(value, label)
        elif isinstance(value, MethodType):
            self.add_value(value.__self__, label, depth - 1)
        elif not isinstance(value, FunctionType):
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
            if type(value) not in PLAIN:
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
        entries: dict[str, Any] = {}
        for base in bases:
            names = [name for name in vars(base) if self._counts(name) and (id(base), name) not in self._excluded]
            entries |= {name: vars(base)[name] for name in names}
        kept = {k: v for k, v in entries.items() if _is_class_state(v)}
        self.add(Holder(cls, label, kept, counted=False))
        for base in bases:
            self.add_value(base, base.__qualname__)

    def _add_container(self, value: Any, label: str, depth: int) -> None:
        if isinstance(value, (dict, list, tuple, set, deque)):
            small = len(value) <= LARGEST
            self.add(Holder(value, label, dict(entries_of(value)) if small else {}, "item"), depth)

    def _add_object(self, value: Any, label: str, depth: int) -> None:
        if not is_user_class(type(value)) or (isinstance(value, ModuleType) and is_library(value.__name__)):
            return
        everything = dataclasses.is_dataclass(value) or isinstance(value, (SimpleNamespace, UserDict, UserList))
        own = getattr(value, "__dict__", None)
        if type(own) is dict:
            entries = {k: v for k, v in own.items() if everything or self._counts(k)}
            self.add(Holder(own, label, entries, counted=not isinstance(value, ModuleType)), depth)
        names = [name for name in slot_names(value) if self._counts(name)]
        if names:
            present = {name: getattr(value, name) for name in names if hasattr(value, name)}
            self.add(Holder(value, label, present, counted=False), depth)
        self.add_value(type(value), type(value).__qualname__, depth)

    def _counts(self, name: str) -> bool:
        return not (name.startswith("__") and name.endswith("__")) and (self._names is None or name in self._names)


def entries_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a container by key. The members of a set are their own keys."""
    if isinstance(container, dict):
        return iter(dict.items(container))
    return zip(container, container) if isinstance(container, set) else enumerate(container)  # noqa: B905


def _is_class_state(value: object) -> bool:
    """Whether reading the attribute from the class gives the value itself, as it does not for a property."""
    return is_plain(value) or isinstance(value, (FunctionType, torch.Tensor)) or not hasattr(type(value), "__get__")


def slot_names(value: object) -> Iterator[str]:
    """The attributes for which an object has slots."""
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from (name for name in names if name not in ("__dict__", "__weakref__"))
