"""What a model returns: any structure of tensors, with other tensors in their place."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module, torch.Generator)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of ``value`` with ``change(tensor)`` in the place of each tensor: in builtin containers, named tuples,
    dataclasses, dicts with attributes and other objects with a ``__dict__``. What holds no tensor is not copied."""
    return _map(value, change, {})


def _map(value: Any, change: Callable[[torch.Tensor], Any], known: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if id(value) in known:
        return known[id(value)]
    if not tensors_in(value):
        return value
    if isinstance(value, tuple):
        entries = [_map(v, change, known) for v in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    cls: Any = type(value)
    made = known[id(value)] = cls.__new__(cls) if isinstance(value, (list, dict)) else copy.copy(value)
    if isinstance(value, list):
        list.extend(made, [_map(v, change, known) for v in value])
    elif isinstance(value, dict):
        set_item = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
        for k, v in dict.items(value):
            set_item(made, k, _map(v, change, known))  # a subclass may do more
    for k, v in getattr(value, "__dict__", {}).items():
        made.__dict__[k] = _map(v, change, known)
    return made


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in the order in which :func:`map_tensors` changes them."""
    return list(_walk(value, set()))


def _walk(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, CODE) and id(value) not in seen:
        if not isinstance(value, tuple):
            seen.add(id(value))
        inside = (
            list(dict.values(value)) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        )
        for v in (*inside, *getattr(value, "__dict__", {}).values()):
            yield from _walk(v, seen)


def is_plain(value: Any) -> bool:
    """True for a structure that Thunder can return: tensors in tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, (torch.Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device))


class Rebuild:
    """Makes what a model returns of the tensors of a step."""

    def __init__(self, value: Any) -> None:
        self.tensors = tensors_in(value)
        numbers = iter(range(len(self.tensors)))
        self._template = map_tensors(value, lambda t: _Number(next(numbers)))
        self.requires_grad = [t.requires_grad for t in self.tensors]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        pairs = zip(tensors, self.requires_grad, strict=True)
        given = [t if d or not t.requires_grad else t.detach() for t, d in pairs]
        return map_tensors(self._template, lambda number: given[number.number])  # type: ignore[attr-defined]

    def release(self) -> None:
        """Lets go of the tensors that the model returned."""
        self.tensors = []


class _Number(torch.Tensor):
    """Stands for a tensor, by its number."""

    number: int

    def __new__(cls, number: int) -> _Number:
        made = torch.empty(0).as_subclass(cls)
        made.number = number
        return made
