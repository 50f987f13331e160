"""The memory that parameters leave when they are sharded. Whatever else lies in it keeps the values of then."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

REMEDY = "read the parameter itself in forward, or keep a clone() where the values before training are meant"


class Memory:
    """The memory of several parameters: parts of storages, in bytes, and names. Weak references keep the addresses of
    storages from being used again."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._parts: dict[int, list[tuple[StorageWeakRef, range, str]]] = {}
        for name, t in named:
            self.add(name, t)

    def add(self, name: str, t: torch.Tensor) -> None:
        if part := _part(t):
            storage = StorageWeakRef(t.untyped_storage())
            self._parts.setdefault(storage.cdata, []).append((storage, part, name))

    def owner(self, t: torch.Tensor) -> str:
        """The name of a parameter on whose memory a tensor lies; empty if there is none."""
        part = _part(t) if self._parts else range(0)
        parts = self._parts.get(StorageWeakRef(t.untyped_storage()).cdata, ()) if part else ()
        return next((name for _, other, name in parts if max(part[0], other[0]) <= min(part[-1], other[-1])), "")


def _part(t: torch.Tensor) -> range:
    """The bytes of its storage that a tensor spans; empty if it has no storage of its own."""
    if is_lazy(t) or is_traceable_wrapper_subclass(t) or t.layout != torch.strided or not t.numel():
        return range(0)
    start = int(t.storage_offset())
    span = 1 + sum((size - 1) * int(stride) for size, stride in zip(t.shape, t.stride(), strict=True))
    return range(start * t.element_size(), (start + span) * t.element_size())
