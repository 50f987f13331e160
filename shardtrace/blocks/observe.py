"""Watches what tracing a block reads and changes, apart from tensors. Changes nothing itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from passes.compat import known_values, observing, side_effects
from shardtrace.blocks.provenance import step_of

import torch
from thunder.core.interpreter import ProvenanceRecord, is_opaque
from thunder.core.proxies import TensorProxy
from torch import nn

# Methods of builtin containers and iterators that change them. Those of other classes are made of these.
MUTATORS = frozenset(
    """__delattr__ __delitem__ __iadd__ __iand__ __imul__ __ior__ __isub__ __ixor__ __next__ __setattr__ __setitem__
    add append appendleft clear difference_update discard extend extendleft insert intersection_update move_to_end pop
    popitem popleft remove reverse rotate send setdefault sort symmetric_difference_update update write""".split()  # noqa: SIM905
)
# Two calls of their functions give different results.
FICKLE_MODULES = frozenset({"_random", "numpy.random", "random", "secrets", "time", "uuid"})
# The ways in which a value is reached that was there before. (Values that are made have others, such as BUILD_LIST.)
REACHED = ("BINARY_SUBSCR", "INPUT_ARGS", "INPUT_FN", "INPUT_KWARGS", "LOAD_ATTR", "LOOKASIDE")

# Builtin functions that read nothing of a module but its class and identity, or whose reads are seen.
HARMLESS = frozenset(
    """__call__ __contains__ __eq__ __get__ __getitem__ __hash__ __init__ __iter__ __len__ __ne__ __new__ callable
    getattr hasattr id isinstance iter len next setattr super type vars""".split()  # noqa: SIM905
)
# Context managers that keep the mode that they found. It is the same for all blocks of a kind.
MODES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.autocast)


class Read(NamedTuple):
    """An attribute that was read: how its object was reached, the object (None: only its ``__dict__`` was seen), and
    the name."""

    record: ProvenanceRecord
    owner: Any
    name: str


class Seen:
    """A list, dict or set that was there before and was used, with what it held then."""

    def __init__(self, container: Any) -> None:
        self.container, self.held = container, _contents(container)

    def is_unchanged(self) -> bool:
        now = _contents(self.container)
        return len(now) == len(self.held) and all(map(operator.is_, now, self.held))


def _contents(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


class Observer:
    """``reads``: the attributes that were read, by object and name; ``seen``: the containers that were used, by their
    ids. ``obstacle``: the first thing that was done which a second instance would have to do again; empty if there was
    none."""

    def __init__(self) -> None:
        self.reads: dict[tuple[int, str], Read] = {}
        self.seen: dict[int, Seen] = {}
        self.obstacle = ""
        self._before = known_values()
        self._side_effects = side_effects()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with observing(self._call, self._assignment):
            yield
        if side_effects() != self._side_effects:
            self._refuse("sets an attribute or a buffer")

    def _refuse(self, why: str) -> None:
        self.obstacle = self.obstacle or why

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Sees each call before it is made. Arguments are wrapped values."""
        name = getattr(function, "__name__", "")
        if function is getattr or (name == "__getattribute__" and len(args) > 1):
            owner, attribute = args[0], args[1].value
            self.reads.setdefault((id(owner.value), attribute), Read(owner.provenance, owner.value, attribute))
            return
        if args and isinstance(args[0].value, (dict, list, set)) and not self._is_new(args[0]):
            wrapped = args[0]  # Thunder reads a copy of a container that it has made an input
            container = wrapped.value if wrapped.original_value is wrapped.nothing else wrapped.original_value
            if id(container) not in self.seen:
                self.seen[id(container)] = Seen(container)
        if name in MUTATORS and args and is_opaque(function) and not self._is_new(args[0]):
            self._refuse(f"changes a {type(args[0].value).__name__} that was there before ({name})")
        elif name == "__getitem__" and args and isinstance(args[0].value, dict) and isinstance(args[1].value, str):
            self._read_of_dict(args[0], args[1].value)
        elif is_opaque(function) and _module_of(function) in FICKLE_MODULES:
            self._refuse(f"calls {_module_of(function)}.{name}")
        elif is_opaque(function) and name not in HARMLESS and any(isinstance(a.value, nn.Module) for a in args):
            self._refuse(f"passes a module to {name}, which may read anything of it")

    def _read_of_dict(self, wrapped: Any, name: str) -> None:
        """An attribute that is read through the ``__dict__`` of its object counts as read, unless nn.Module does so to
        find its parameters."""
        record = wrapped.provenance
        if step_of(record) == "LOAD_ATTR" and record.inputs[1].value == "__dict__":
            self.reads.setdefault((id(wrapped.value), name), Read(record.inputs[0], None, name))

    def _assignment(self, name: str) -> None:
        self._refuse(f"assigns to {name}, a variable outside of it")

    def _is_new(self, wrapped: Any) -> bool:
        """True for an object that was made since the observation began."""
        if isinstance(wrapped.value, (TensorProxy, *MODES)):  # a line changes a tensor, and is written again
            return True
        record = wrapped.provenance
        while step_of(record) in ("LIST_APPEND", "LIST_EXTEND"):
            record = record.inputs[0]
        return id(wrapped.value) not in self._before and step_of(record) not in REACHED


def _module_of(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__objclass__", None) or type(getattr(function, "__self__", None))  # of a method
    return str(getattr(function, "__module__", None) or owner.__module__)
