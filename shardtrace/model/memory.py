"""The memory that parameters leave when they are sharded. Whatever else lies in it keeps the values of then."""

from __future__ import annotations

from collections.abc import Iterable

from shardtrace.record.memory import Extent

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

REMEDY = "read the parameter itself in forward, or keep a clone() where the values before training are meant"


class ParameterMemory:
    """The memory of several parameters, by their names. Weak references keep the addresses of storages from being used
    again."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._extents: dict[int, list[tuple[StorageWeakRef, Extent, str]]] = {}
        for name, t in named:
            self.add(name, t)

    def add(self, name: str, t: torch.Tensor) -> None:
        if _has_memory(t):
            storage = StorageWeakRef(t.untyped_storage())
            self._extents.setdefault(storage.cdata, []).append((storage, Extent.of(t), name))

    def owner(self, t: torch.Tensor) -> str:
        """The name of a parameter on whose memory a tensor lies; empty if there is none."""
        if not self._extents or not _has_memory(t):
            return ""
        mine, others = Extent.of(t), self._extents.get(StorageWeakRef(t.untyped_storage()).cdata, ())
        return next((name for _, other, name in others if mine.begin < other.end and other.begin < mine.end), "")


def _has_memory(t: torch.Tensor) -> bool:
    return not is_lazy(t) and not is_traceable_wrapper_subclass(t) and t.layout == torch.strided and t.numel() > 0
