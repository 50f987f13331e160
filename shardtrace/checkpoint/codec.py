"""Nested values as JSON, with their tensors taken out. Decoding cannot run code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from shardtrace.checkpoint.files import CheckpointError

import torch

_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_NAMES: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON. Its tensors are put into ``tensors``, under names that begin with ``name``.

    It may hold None, bool, int, float, str, tensors, and lists, tuples and dicts of them. Raises CheckpointError that
    names the place of anything else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if type(value) is list:
        return [encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    if type(value) in _NAMES:
        pairs = [[encode(k, f"{name}.key", tensors), encode(v, f"{name}.{k}", tensors)] for k, v in value.items()]
        return {_NAMES[type(value)]: pairs}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it holds None, bool, int, float, str, "
        "tensors, and lists, tuples and dicts of them"
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of :func:`encode`. Raises CheckpointError for a value that ``encode`` does not produce."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    tag, inner = next(iter(value.items()), (None, None))
    if len(value) == 1 and tag == "tensor" and isinstance(inner, str) and inner in tensors:
        return tensors[inner]
    if len(value) == 1 and isinstance(inner, list):
        if tag == "tuple":
            return tuple(decode(v, tensors) for v in inner)
        if tag in _MAPPINGS and all(isinstance(pair, list) and len(pair) == 2 for pair in inner):
            try:
                return _MAPPINGS[tag]([(decode(k, tensors), decode(v, tensors)) for k, v in inner])
            except TypeError:  # a key that is a list
                pass
    raise CheckpointError(f"the index holds {str(value)[:100]} where a value should be")


def tensor_names(value: Any) -> list[str]:
    """The tensors that an encoded value refers to."""
    if isinstance(value, list):
        return [name for v in value for name in tensor_names(v)]
    if isinstance(value, dict):
        name = value.get("tensor")
        return [name] if isinstance(name, str) else [n for v in value.values() for n in tensor_names(v)]
    return []
