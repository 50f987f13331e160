"""Calls of blocks that are of one kind: their records are equal.

Two calls are equal if they make the same calls of torch, with the same arguments (tensors by number, everything else by
value or identity), under the same modes, for results with the same metadata. All that their Python read has done its
work by then, so that nothing else can matter. See Note [Safe] of :mod:`shardtrace.record.blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from passes.kernels.aten import Meta
from shardtrace.record.calls import PLAIN, Call, Record, Span, storage

import torch
from torch.utils import _pytree as pytree

Made = tuple[int, int]  # a result of a call: the number of the call, that of the result


class Mark(NamedTuple):
    """The call of a module whose activations are recomputed: ``calls[begin:end]``; ``cheap``: only the cheap ones."""

    begin: int
    end: int
    cheap: bool


class Apart(Exception):
    """Why a block's calls stand in the trace by themselves."""


@dataclass(eq=False)
class Outline:
    """A call of a block, as a function of tensors.

    ``inputs`` are the tensors that it reads and does not make, in the order of their first use; ``exports`` tells which
    of its results are read outside of it.
    """

    span: Span
    key: Hashable
    inputs: tuple[torch.Tensor, ...]
    exports: frozenset[Made]


@dataclass(eq=False)
class Kind:
    """Equal calls. ``exports``: the results that any of them needs."""

    members: list[Outline] = field(default_factory=list)

    @property
    def exports(self) -> tuple[Made, ...]:
        return tuple(sorted(frozenset[Made]().union(*(m.exports for m in self.members))))


Refuse = Callable[[Outline], str]


class Uses:
    """Which calls, by their numbers, read a tensor last and write into a storage last. What is ``returned`` is read
    after all calls."""

    def __init__(self, record: Record, returned: Iterable[torch.Tensor]) -> None:
        self.read: dict[int, int] = {}
        self.written: dict[int, int] = {}
        for i, call in enumerate(record.calls):
            self.read.update((id(t), i) for t in call.tensors())
            self.written.update((storage(t), i) for t in call.written)
        self.read.update((id(t), len(record.calls)) for t in returned)


def outline(record: Record, span: Span, uses: Uses, marks: Sequence[Mark]) -> Outline:
    """The call of a block. Raises Apart if it cannot be a function of its inputs."""
    calls = record.calls[span.begin : span.end]
    if len(calls) < 2:
        raise Apart  # a line of its own would be no less
    numbers = Numbers()
    key: Hashable = tuple(numbers.call(i, call) for i, call in enumerate(calls))
    inside = (m for m in marks if span.begin <= m.begin and m.end <= span.end)
    key = key, tuple((m.begin - span.begin, m.end - span.begin, m.cheap) for m in inside)
    outside = {storage(t) for t in numbers.inputs}
    if any(storage(t) in outside for call in calls for t in call.written):
        raise Apart("it writes into tensors of others")
    exports: dict[Made, torch.Tensor] = {}
    for i, call in enumerate(calls):
        for j, t in enumerate(call.results):
            if uses.read.get(id(t), -1) >= span.end and numbers.first(t) == (i, j):
                exports[i, j] = t
    if not exports:
        raise Apart("nothing that it makes is read")
    for t in exports.values():
        if storage(t) in outside:
            raise Apart("it returns a view of an input")
        if uses.written.get(storage(t), -1) >= span.end:
            raise Apart("what it returns is written into")
    return Outline(span, key, tuple(numbers.inputs), frozenset(exports))


def find_kinds(
    record: Record, spans: Collection[Span], uses: Uses, marks: Sequence[Mark], refuse: Refuse, why: dict[str, str]
) -> dict[Span, Kind]:
    """The kinds that have several members. ``why`` gets the reasons of the others, by the names of the blocks.

    ``refuse`` tells why a call cannot be a function; an empty text if it can.
    """
    kinds: dict[Hashable, Kind] = {}
    for span in spans:
        try:
            found = outline(record, span, uses, marks)
            if reason := refuse(found):
                raise Apart(reason)
        except Apart as error:
            if str(error):
                why[span.name] = str(error)
            continue
        kinds.setdefault((type(span.module), found.key), Kind()).members.append(found)
    for kind in kinds.values():
        if len(kind.members) == 1:
            why[kind.members[0].span.name] = "no other block makes the same calls"
    return {m.span: kind for kind in kinds.values() if len(kind.members) > 1 for m in kind.members}


class Numbers:
    """Makes the keys of a row of calls, in which tensors are numbers."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self._known: dict[int, Hashable] = {}
        self._storages: dict[int, int] = {}
        self._checkpoints: dict[int, int] = {}

    def first(self, t: torch.Tensor) -> Hashable:
        """The call and the result that made a tensor, or the number of an input."""
        return self._known[id(t)]

    def call(self, i: int, call: Call) -> tuple[Hashable, ...]:
        given = self.value((call.args, dict(call.kwargs)))
        written = tuple(self._known[id(t)] for t in call.written)
        for j, t in enumerate(call.results):
            self._known.setdefault(id(t), (i, j))
        results = tuple((self._known[id(t)], Meta.of(t)) for t in call.results)
        checkpoint = call.checkpoint
        if checkpoint is not None:
            checkpoint = self._checkpoints.setdefault(checkpoint, len(self._checkpoints))
        function = call.function if isinstance(call.function, Hashable) else id(call.function)
        return function, given, written, results, call.grad, call.autocast, call.random, checkpoint

    def value(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, slice):
            return slice, self.value(value.start), self.value(value.stop), self.value(value.step)
        if isinstance(value, (*PLAIN, type, Enum, torch.layout, torch.memory_format)):
            return type(value), repr(value) if isinstance(value, float | complex) else value
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self.value, value))
        if isinstance(value, dict):
            return type(value), tuple((k, self.value(v)) for k, v in value.items())
        leaves, spec = pytree.tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return self.other(value)
        return str(spec), tuple(map(self.value, leaves))

    def other(self, value: Any) -> Hashable:
        """The key of an object that is no plain value."""
        return type(value), id(value)

    def _tensor(self, t: torch.Tensor) -> Hashable:
        if id(t) not in self._known:
            memory = self._storages.setdefault(storage(t), len(self._storages))
            self._known[id(t)] = len(self.inputs)
            self.inputs.append(t)
            return len(self.inputs) - 1, memory, t.storage_offset(), Meta.of(t)
        return self._known[id(t)]


def is_whole(record: Record, span: Span, marks: Sequence[Mark]) -> bool:
    """False for a part of what is recomputed as a whole."""
    if any(m.begin <= span.begin and span.end <= m.end and (m.begin, m.end) != (span.begin, span.end) for m in marks):
        return False
    around = {call.checkpoint for call in (*record.calls[: span.begin][-1:], *record.calls[span.end :][:1])} - {None}
    return around.isdisjoint(call.checkpoint for call in record.calls[span.begin : span.end])


def outermost(spans: Sequence[Span]) -> list[Span]:
    """The spans that lie in no other."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        if not found or span.begin >= found[-1].end:
            found.append(span)
    return found
