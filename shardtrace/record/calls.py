"""The record of a forward: the calls of torch that it made, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

from passes.kernels import aten
from passes.kernels.torch_call import Autocast
from shardtrace.record.effects import Change
from shardtrace.record.watcher import CodeWatcher

import torch
from torch import nn
from torch.utils import _pytree as pytree

DEVICES = ("cpu", "cuda")  # types of devices that autocast has a state for


class Place(NamedTuple):
    """Where a call stands: the file, the line, the function, and the qualified name of the module that runs."""

    file: str
    line: int
    function: str
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f" of {self.module}" if self.module else "")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of torch.

    ``results`` are the tensors in what it returned, ``written`` those that it wrote into. ``grad``: whether gradients
    were on. ``checkpoint``: the number of the call of ``torch.utils.checkpoint`` around it.
    ``names``: the variables that got the results.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]
    grad: bool
    autocast: tuple[Autocast, ...]
    random: bool
    place: Place
    checkpoint: int | None
    names: tuple[str, ...] = ()

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return tensors_of((self.args, self.kwargs))


@dataclass(frozen=True)
class Whole:
    """A function that computes its gradient itself, equal to another one of the same owner."""

    owner: Any
    function: Callable[..., Any] = field(compare=False)

    @property
    def __name__(self) -> str:
        return str(getattr(self.owner, "__name__", None) or getattr(self.owner, "name", "scripted"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(eq=False)
class Span:
    """The call of a module: ``calls[begin:end]`` were made inside."""

    name: str
    module: nn.Module
    begin: int
    end: int


@dataclass(eq=False)
class Record:
    """What a forward did. ``spans`` are the calls of the modules that were watched, in the order of their ends. ``ran``
    is what modules that PyTorch runs have changed in the user's objects, and do in each step; ``left`` are tensors with
    a gradient among that, and ``watchers`` saw the code of these modules."""

    calls: list[Call] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    result: Any = None
    ran: list[Change] = field(default_factory=list)
    left: list[Change] = field(default_factory=list)
    watchers: list[CodeWatcher] = field(default_factory=list)


PLAIN = (int, float, str, NoneType, torch.dtype, torch.device)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (tuple, list):  # faster than torch's, and most values are
        return [t for part in value if not isinstance(part, PLAIN) for t in tensors_of(part)]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def storage(t: torch.Tensor) -> int:
    """A key that tensors share if they share memory."""
    if t.layout != torch.strided:
        raise NotImplementedError("forward makes a sparse tensor: keep its indices and values in dense ones")
    return aten.storage(t)
