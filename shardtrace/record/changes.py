"""Make the changes of a recorded forward again after each step, with the step's tensors."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from shardtrace.record.effects import FIXED, Change
from shardtrace.record.memory import Memory
from shardtrace.record.numbers import is_number
from shardtrace.record.results import Numbered
from shardtrace.record.state import is_plain

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

DEPTH = 4  # objects, one in another, that are searched for fake tensors


def numbered(changes: Iterable[Change]) -> tuple[list[Change], list[torch.Tensor]]:
    """Returns changes without fake tensors, and the fake tensors, which become outputs of the step.

    Raises:
        RuntimeError: if a change cannot be made after each step.
    """
    found: dict[int, tuple[Numbered, torch.Tensor]] = {}

    def number(change: Change, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return found.setdefault(id(value), (Numbered(len(found)), value))[0]
        if holds_fake(value):
            raise RuntimeError(
                f"forward sets {change.label} to a {type(value).__name__} that holds tensors, which cannot be made "
                "anew after each step: set a tensor, or a list, tuple or dict of tensors, or return it"
            )
        return value

    done = []
    for change in changes:
        if change.kind in FIXED:
            raise RuntimeError(
                f"forward sets the {change.kind} {change.label}: make it in __init__, before the model is sharded, and "
                "let what forward updates be a buffer"
            )
        leaves, spec = pytree.tree_flatten(change.new)
        values = [number(change, leaf) for leaf in leaves]
        new = pytree.tree_unflatten(values, spec) if any(isinstance(v, Numbered) for v in values) else change.new
        done.append(replace(change, old=change.old if is_plain(change.old) else None, new=new))
    return done, [tensor for _, tensor in found.values()]


def written_outside(memory: Memory, storages: Collection[int]) -> list[Change]:
    """The writes into tensors that no module holds by name, as changes. ``storages``: what was written into.

    Raises:
        RuntimeError: if one gets a gradient.
    """
    found = memory.outside_of(storages)
    for t, fake in found:
        if fake.requires_grad:
            raise RuntimeError(
                f"forward writes values with a gradient into a tensor of shape {tuple(t.shape)} that no module holds "
                "by name: write them detached"
            )
    return [Change(t, None, "memory", "a tensor", None, fake) for t, fake in found]


def holds_fake(value: Any, depth: int = DEPTH) -> bool:
    if isinstance(value, FakeTensor) or is_plain(value) or is_number(value) or depth == 0:
        return isinstance(value, FakeTensor)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(holds_fake(v, depth - 1) for v in value)
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return any(holds_fake(v, depth - 1) for v in inside.values())


def apply(changes: Iterable[Change], tensors: Sequence[torch.Tensor]) -> None:
    """Makes changes that :func:`numbered` returned, with the tensors of a step in the place of numbers."""

    def filled(value: Any) -> Any:
        leaves, spec = pytree.tree_flatten(value)
        if not any(isinstance(leaf, Numbered) for leaf in leaves):
            return value
        return pytree.tree_unflatten([tensors[v.number] if isinstance(v, Numbered) else v for v in leaves], spec)

    changes = [replace(c, new=c.new.now()) if is_number(c.new) else c for c in changes]  # before any is put
    for change in changes:
        value = filled(change.new)
        if change.kind == "append":
            list.extend(change.owner, value)
        elif (held := _memory(change)) is not None and _fits(held, value):
            with torch.no_grad():
                held.copy_(value)
        else:
            change.put(value)


@contextmanager
def made(changes: Iterable[Change]) -> Iterator[None]:
    """Around what runs as if changes were made, with placeholders for tensors. Buffers and memory stay as they are."""
    with ExitStack() as stack:
        for change in changes:
            if change.kind in ("buffer", "memory", "left"):
                continue
            stack.callback(change.put, copy.copy(change.owner) if change.key is None else change.get())
            if change.kind == "append":
                list.extend(change.owner, change.new)
            else:
                change.put(change.new.now() if is_number(change.new) else change.new)
        yield


def described(changes: Iterable[Change]) -> list[Hashable]:
    """What changes do, without tensors."""

    def plain(value: Any) -> tuple[Any, ...]:
        return tuple(repr(v) if is_plain(v) else type(v) for v in pytree.tree_leaves(value))

    return [(id(c.owner), c.key, c.kind, plain(c.new)) for c in changes]


def _memory(change: Change) -> Any:
    """The tensor whose memory gets the new value; None if another object does."""
    if change.kind == "memory":
        return change.owner
    return change.owner.get(change.key) if change.kind == "buffer" else None


def _fits(old: object, new: object) -> bool:
    """Whether a buffer can take a new value in its own memory."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
