"""Decide which changes of a forward leave its record valid: those of entries that it only writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from shardtrace.record.effects import Change
from shardtrace.record.state import same

import torch
from torch.utils import _pytree as pytree


class StandIn:
    """A number, and what was added to it since the forward began. Any other use marks the first one, the ``origin``, as
    read, and gives what the number itself gives."""

    def __init__(self, value: float, added: tuple[float, ...] = (), origin: StandIn | None = None) -> None:
        self.value, self.added, self.origin, self.read = value, added, self if origin is None else origin, False

    def __add__(self, other: Any) -> Any:
        if type(other) in (int, float):
            return StandIn(self.value + other, (*self.added, other), self.origin)
        return self.number() + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other if type(other) in (int, float) else self.number() - other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.number(), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance asks
        return type(self.value)

    def number(self) -> Any:
        self.origin.read = True
        return self.value


def _reading(name: str) -> Callable[..., Any]:
    def read(self: StandIn, *args: Any) -> Any:
        return getattr(self.number(), name)(*(a.number() if type(a) is StandIn else a for a in args))

    return read


for _name in {*vars(int), *vars(float)} - {*vars(StandIn), "__new__", "__getattribute__"}:
    if _name.startswith("__"):
        setattr(StandIn, _name, _reading(_name))


def counted(changes: Sequence[Change], record: Callable[[], Sequence[Change]]) -> list[Change]:
    """Returns the changes, where numbers that the forward only adds to are of the kind "count".

    ``record`` records the forward once more and returns what it changed. Meanwhile stand-ins take the place of the
    numbers. A number that is read for anything but an addition stays what it is.
    """
    numbers = [c for c in changes if type(c.old) in (int, float) and type(c.new) in (int, float)]
    for change in numbers:
        change.put(StandIn(change.old))
    try:
        found = {_key(change): change.new for change in record()} if numbers else {}
    except Exception:  # code that takes no stand-in has read the number
        found = {}
    finally:
        for change in numbers:
            change.put(change.old)
    added = {key: new.added for key, new in found.items() if type(new) is StandIn and not new.origin.read}
    return [replace(c, kind="count", new=added[_key(c)]) if _key(c) in added else c for c in changes]


def only_written(changes: Iterable[Change], used: Collection[int]) -> list[Change]:
    """The changes whose old values the forward has not read. A :class:`Snapshot` excludes their entries.

    These are counts, and tensors in the place of tensors that no call used. ``used``: the ids of the tensors from
    outside that calls used. A first change from None to a tensor is left out: the forward may have asked for None.
    """
    return [change for change in changes if change.kind == "count" or replaces_tensors(change, used)]


def replaces_tensors(change: Change, used: Collection[int]) -> bool:
    """Whether tensors take the place of tensors that no call used."""
    old, new = pytree.tree_leaves(change.old), pytree.tree_leaves(change.new)
    tensors = [t for t in old if isinstance(t, torch.Tensor)]
    if any(id(t) in used for t in tensors):
        return False
    if change.kind == "append":
        return bool(old)
    if not tensors or pytree.tree_structure(change.old) != pytree.tree_structure(change.new):
        return False
    pairs = zip(old, new, strict=True)
    return all((isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or same(a, b) for a, b in pairs)


def check_recurrent(changes: Iterable[Change], used: Collection[int]) -> None:
    """Raises RuntimeError if the forward uses a tensor that it set itself in the step before, other than a buffer."""
    for change in changes:
        if change.kind != "buffer" and any(id(t) in used for t in pytree.tree_leaves(change.old)):
            raise RuntimeError(
                f"forward reads {change.label}, a tensor that the step before has left there, and replaces it: make it "
                "a buffer (register_buffer), pass it as an argument, or leave the module to PyTorch with "
                "fsdp(compile_policy=CompilePolicy(eager=[...]))"
            )


def _key(change: Change) -> tuple[int, Any]:
    return id(change.owner), change.key
