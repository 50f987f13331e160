"""Activations in the memory of the host, as symbols of a trace and as the functions that they run.

    future = store(values, away)        starts to copy what a block saves for backward to the host
    stored = wait_store(future, away)   the copies; the device may use the memory again
    future = load(stored, away)         starts to copy it back, into new memory
    values = wait_load(future, away)    as they were

``values`` are tensors, and lists of what blocks save. Memory travels as a whole, and once if several tensors share it:
they share it again, and lie in it as before. What does not travel (inputs, results, parameters) stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from passes.comm.symbols import CollectiveOp, symbol
from passes.plan.runtime import HostMemory

import torch
from thunder.core import dtypes
from thunder.core.codeutils import ContextObject
from thunder.core.devices import cpu, to_device
from thunder.core.proxies import AnyProxy, FutureTensorProxy, TensorProxy

Moves = Sequence[bool | Sequence[bool]]  # for each value whether it travels; for a list, which of its tensors


class Away(ContextObject):
    """What of a block travels to the host.

    Args:
        label: the block's name.
        host: the memory.
        moves: what of the values travels.
        nbytes: how much.
        like: the values, as proxies.
    """

    def __init__(self, label: str, host: HostMemory, moves: Moves, nbytes: int, like: Sequence[Any] = ()) -> None:
        name = "".join(c if c.isalnum() else "_" for c in label)
        super().__init__(f"away_{name}", self)
        self.label, self.host, self.moves, self.nbytes, self.like = label, host, tuple(moves), nbytes, tuple(like)


# ---- the functions ----


class Lies(NamedTuple):
    """How a tensor lay in the memory with this number."""

    memory: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]


class Rows:
    """Memory as flat tensors of bytes, which are not on the device that computes."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self.rows = rows


class Stored(NamedTuple):
    """Values in host memory: how those lay that have travelled, and the others as they are."""

    rows: Rows
    values: Sequence[Any]


class Moving(NamedTuple):
    """A copy under way: ``mark`` is its end, ``rows`` the memory of the device."""

    mark: Any
    rows: Sequence[torch.Tensor]
    stored: Stored


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def _each(values: Any, moves: Any, do: Callable[[Any], Any]) -> Any:
    if isinstance(moves, bool):
        return do(values) if moves else values
    return [_each(v, m, do) for v, m in zip(values, moves, strict=True)]


def issue_store(values: Sequence[Any], away: Away) -> Moving:
    numbers: dict[int, int] = {}
    memory: list[torch.Tensor] = []

    def leave(t: torch.Tensor) -> Lies:
        storage = t.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(memory))
        if number == len(memory):
            memory.append(_bytes(storage, t.device))
        return Lies(number, t.dtype, int(t.storage_offset()), t.shape, t.stride())

    left = _each(values, away.moves, leave)
    with away.host.back():
        rows = [away.host.copy(row) for row in memory]
        return Moving(away.host.mark(), memory, Stored(Rows(rows), left))


def finish_store(future: Moving, away: Away) -> Stored:
    future.mark.wait()
    return future.stored


def issue_load(stored: Stored, away: Away) -> Moving:
    """The memory is allocated on the compute stream, which can reuse it once it has waited."""
    host, there = away.host, stored.rows.rows
    rows = [torch.empty(row.shape, dtype=row.dtype, device=host.device) for row in there]
    with host.ahead():
        for row, place in zip(there, rows, strict=True):
            host.load(row, place)
        return Moving(host.mark(), rows, stored)


def finish_load(future: Moving, away: Away) -> Sequence[Any]:
    future.mark.wait()

    def lay(old: Lies) -> torch.Tensor:
        row = future.rows[old.memory]
        t = torch.empty(0, dtype=old.dtype, device=row.device)
        return t.set_(row.untyped_storage(), old.offset, old.shape, old.strides)

    found: Sequence[Any] = _each(future.stored.values, away.moves, lay)
    return found


# ---- symbols ----


def _store_meta(values: Sequence[Any], away: Away) -> FutureTensorProxy:
    return FutureTensorProxy(shape=(away.nbytes,), device=cpu, dtype=dtypes.uint8)


def _load_meta(stored: AnyProxy, away: Away) -> FutureTensorProxy:
    return FutureTensorProxy(shape=(away.nbytes,), device=to_device(away.host.device), dtype=dtypes.uint8)


def _loaded_meta(future: FutureTensorProxy, away: Away) -> tuple[Any, ...]:
    return tuple(
        TensorProxy(like=v, requires_grad=False) if isinstance(v, TensorProxy) else AnyProxy(None, prefix="saved")
        for v in away.like
    )


STORE = CollectiveOp(
    symbol("store", _store_meta, issue_store),
    symbol("wait_store", lambda future, away: AnyProxy(None, prefix="stored"), finish_store),
    "activations", "part", "part",
)  # fmt: skip
LOAD = CollectiveOp(
    symbol("load", _load_meta, issue_load),
    symbol("wait_load", _loaded_meta, finish_load),
    "activations",
    "part",
    "part",
)
ACTIVATIONS = STORE, LOAD
