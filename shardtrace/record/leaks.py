"""Find fake tensors that a recording left in the user's objects."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import _lru_cache_wrapper
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any
from weakref import ref

from shardtrace.record.marks import is_library
from shardtrace.record.state import is_plain

import torch
from torch import nn

DEPTH = 4  # holders, one in another, that an error names


def check_leaks(fakes: Iterable[ref[torch.Tensor]]) -> None:
    """Raises RuntimeError if a Python object still holds one of the fakes."""
    fakes = [fake for fake in fakes if fake() is not None]
    if not fakes:
        return
    gc.collect()
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
