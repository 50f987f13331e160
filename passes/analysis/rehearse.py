"""Remembers what lines of a trace do with memory, for further lines that do the same with inputs that lie alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from passes.analysis.dry_run import Result, Values, storage_key
from passes.plan.host_memory import DONE

import torch


class _Layout(NamedTuple):
    """How a tensor lies in the memory with this number."""

    storage: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Outcome(NamedTuple):
    """A :class:`Result` with layouts in place of tensors, in order of the outputs. The first storages are those of the
    inputs; ``made`` are the bytes of the others."""

    outputs: Sequence[Any]
    made: Sequence[int]
    temporary: int


class _Unknown(Exception):
    """A value that cannot be made again."""


class _Storages:
    """Storages of meta tensors, numbered in the order in which they are met."""

    def __init__(self) -> None:
        self.all: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def layout(self, value: torch.Tensor) -> _Layout:
        storage = value.untyped_storage()
        number = self._numbers.setdefault(storage_key(storage), len(self.all))
        if number == len(self.all):
            self.all.append(storage)
        return _Layout(number, int(value.storage_offset()), value.shape, value.stride(), value.dtype)

    def tensor(self, layout: _Layout) -> torch.Tensor:
        empty = torch.empty(0, dtype=layout.dtype, device="meta")
        source: Any = self.all[layout.storage]
        return empty.set_(source, layout.offset, layout.shape, layout.strides)

    def layouts(self, value: Any) -> Any:
        """A tensor, or what a collective returned as its future, with layouts in place of tensors.

        Raises:
            _Unknown: if it holds anything else, which the future of a user's wire may.
        """
        if isinstance(value, torch.Tensor):
            return self.layout(value)
        if value is None or value is DONE or (isinstance(value, list) and _is_done(value)):
            return value
        if isinstance(value, tuple | list):
            return _like(value, map(self.layouts, value))
        raise _Unknown

    def tensors(self, layouts: Any) -> Any:
        """The reverse of :meth:`layouts`."""
        if isinstance(layouts, _Layout):
            return self.tensor(layouts)
        if not isinstance(layouts, tuple | list) or _is_done(layouts):
            return layouts
        return _like(layouts, map(self.tensors, layouts))


def _like(value: Any, parts: Any) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _frozen(layouts: Any) -> Hashable:
    if isinstance(layouts, list) and _is_done(layouts):
        return len(layouts)
    if isinstance(layouts, tuple | list) and not isinstance(layouts, _Layout):
        return tuple(map(_frozen, layouts))
    known: Hashable = layouts
    return known


def _is_done(values: tuple[Any, ...] | list[Any]) -> bool:
    """True for the messages of a collective, of which there may be thousands."""
    return values.count(DONE) == len(values)


def rehearse(
    facts: dict[Any, Any],
    what: Hashable,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    run: Callable[[], Result],
) -> Result:
    """Returns the result of ``run``, or one like it if ``facts`` have it of a run before.

    Args:
        facts: what runs before have found out; grows.
        what: is done with the inputs. It determines the result together with how the inputs lie in memory.
        inputs: the values that are read, by name.
        outputs: the names of the values that are made.
    """
    known = _Storages()
    try:
        layouts = tuple(map(known.layouts, inputs.values()))
        key = what, _frozen(layouts), tuple(s.nbytes() for s in known.all)
        if key not in facts:
            facts[key] = _outcome(inputs, outputs, run())
    except _Unknown:
        return run()
    outcome: _Outcome = facts[key]
    known.all += [torch.UntypedStorage(nbytes, device="meta") for nbytes in outcome.made]
    made: Values = dict(zip(outputs, map(known.tensors, outcome.outputs), strict=True))
    return Result(made, outcome.temporary)


def _outcome(inputs: Mapping[str, Any], outputs: Sequence[str], result: Result) -> _Outcome:
    known = _Storages()
    for value in inputs.values():
        known.layouts(value)
    given = len(known.all)
    made = [known.layouts(result.outputs[name]) for name in outputs]
    return _Outcome(made, [s.nbytes() for s in known.all[given:]], result.temporary)
