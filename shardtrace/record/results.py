"""Tensors in any structure: what a model is given or returns, with other tensors in their place."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MappingView, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from shardtrace.record.state import entries_of, slot_names

import torch
from thunder.core.interpreter import PseudoInst
from thunder.core.proxies import Proxy, TensorProxy
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)
CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module, torch.Generator)
LEAVES = (*PLAIN, *CODE, Proxy)  # hold no tensors
Path = tuple[tuple[PseudoInst, Any], ...]  # of items and attributes


@dataclass(frozen=True)
class Numbered:
    """The place of a tensor in a structure: its number among the tensors."""

    number: int


TENSORS = (torch.Tensor, TensorProxy, Numbered)


def parts(value: Any) -> Iterator[tuple[PseudoInst, Any, Any]]:
    """The items of a builtin container and the attributes that an object itself has, also in slots: the kind, the key
    and the part."""
    if isinstance(value, (dict, list, tuple, deque)):
        yield from ((PseudoInst.BINARY_SUBSCR, k, v) for k, v in entries_of(value))
    yield from ((PseudoInst.LOAD_ATTR, name, v) for name, v in getattr(value, "__dict__", {}).items())
    for name in slot_names(value):
        if hasattr(value, name):
            yield PseudoInst.LOAD_ATTR, name, getattr(value, name)


def map_tensors(
    value: Any, change: Callable[[Any, Path], Any], copies: dict[int, tuple[Any, Any]] | None = None, path: Path = ()
) -> Any:
    """A copy of ``value`` with ``change(tensor, path)`` in the place of each tensor: in builtin containers, named
    tuples, dataclasses, dicts with attributes and other objects. What holds no tensor is not copied. ``copies`` gets
    each copied object and its copy, by the object's id."""
    copies = {} if copies is None else copies
    if isinstance(value, TENSORS):
        return change(value, path)
    if id(value) in copies:
        return copies[id(value)][1]
    if not tensors_in(value):
        return value
    changed = [(kind, k, map_tensors(v, change, copies, (*path, (kind, k)))) for kind, k, v in _entered(value, copies)]
    if isinstance(value, tuple):
        entries = [v for kind, _, v in changed if kind is PseudoInst.BINARY_SUBSCR]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    _, made = copies[id(value)]
    set_item = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
    for kind, key, v in changed:
        if kind is PseudoInst.LOAD_ATTR:
            object.__setattr__(made, key, v)
        elif isinstance(value, (list, deque)):
            (list if isinstance(value, list) else deque).append(made, v)
        else:
            set_item(made, key, v)  # a subclass may do more
    return made


def _entered(value: Any, copies: dict[int, tuple[Any, Any]]) -> Iterator[tuple[PseudoInst, Any, Any]]:
    """The parts of an object, of which there is a copy from here on: it may refer to itself."""
    cls: Any = type(value)
    if not isinstance(value, tuple):
        made = cls.__new__(cls) if isinstance(value, (list, dict)) else copy.copy(value)
        if isinstance(value, defaultdict):
            made.default_factory = value.default_factory
        if isinstance(value, deque):
            made.clear()
        copies[id(value)] = value, made
    return parts(value)


def tensors_in(value: Any) -> list[Any]:
    """The tensors in a structure, in the order in which :func:`map_tensors` changes them."""
    return list(_walk(value, set()))


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, TENSORS):
        yield value
    elif not isinstance(value, LEAVES) and id(value) not in seen:
        if not isinstance(value, tuple):
            seen.add(id(value))
        for _, _, v in parts(value):
            yield from _walk(v, seen)


def check_result(value: Any) -> None:
    """Raises RuntimeError for a result that computes what it holds when it is read, or holds tensors in no order."""
    unordered = isinstance(value, (set, frozenset)) and any(isinstance(v, torch.Tensor) for v in value)
    if unordered or isinstance(value, (Iterator, MappingView)):
        raise RuntimeError(f"forward returns a {type(value).__name__}: return a list, a tuple or a dict")
    if isinstance(value, (dict, list, tuple, deque)):
        for _, part in entries_of(value):
            check_result(part)


def is_plain(value: Any) -> bool:
    """True for a structure that Thunder can return: tensors in tuples, lists and dicts, but not in subclasses."""
    if type(value) in (tuple, list, dict):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (torch.Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device))


class Rebuild:
    """Makes what a model returns of the tensors of a step. ``tensors`` are those that it returned."""

    def __init__(self, value: Any, tensors: Sequence[torch.Tensor]) -> None:
        numbers = iter(range(len(tensors)))
        self._template = map_tensors(value, lambda t, path: Numbered(next(numbers)))
        self.requires_grad = [t.requires_grad for t in tensors]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        pairs = zip(tensors, self.requires_grad, strict=True)
        given = [t if d or not t.requires_grad else t.detach() for t, d in pairs]
        return map_tensors(self._template, lambda numbered, path: given[numbered.number])
