"""What memory holds while recorded calls are written as lines: values take the place of writes.

A tensor is known by its fake. Fakes that share memory are views of the storage's first tensor, the base. A write gives
the base a new value. A view that is read after a write is taken again from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shardtrace.record.calls import storage
from shardtrace.record.memory import same_place

import torch

# (base's proxy, base, view) -> the view's proxy; (base's proxy, base, view, new value) -> the base's proxy
Take = Callable[[Any, torch.Tensor, torch.Tensor], Any]
Put = Callable[[Any, torch.Tensor, torch.Tensor, Any], Any]
# (base's proxy, base, new proxy) -> the base's proxy
Keep = Callable[[Any, torch.Tensor, Any], Any]


class Values:
    """The proxies of fakes. ``take`` and ``put`` write the lines that read and replace a part of a base, ``keep`` that
    which gives a base other values and the gradient that it has."""

    def __init__(self, take: Take, put: Put, keep: Keep) -> None:
        self._take, self._put, self._keep = take, put, keep
        self._proxies: dict[int, Any] = {}
        self._alive: list[torch.Tensor] = []  # keeps ids from being used again
        self._bases: dict[int, tuple[torch.Tensor, Any]] = {}  # of a storage
        self._writes: dict[int, int] = {}  # into a storage, so far
        self._valid: dict[int, int] = {}  # of a tensor: how many writes its proxy knows

    def __contains__(self, t: torch.Tensor) -> bool:
        return id(t) in self._proxies

    def know(self, t: torch.Tensor, proxy: Any) -> None:
        """``proxy`` is what ``t`` holds now."""
        s = storage(t)
        self._proxies[id(t)] = proxy
        self._alive.append(t)
        self._bases.setdefault(s, (t, proxy))
        self._valid[id(t)] = self._writes.setdefault(s, 0)

    def know_part(self, t: torch.Tensor) -> None:
        """``t`` is a part of a base that is known: it is taken when it is read."""
        self._proxies[id(t)] = None
        self._alive.append(t)
        self._valid[id(t)] = -1

    def read(self, t: torch.Tensor) -> Any:
        """The proxy of what ``t`` holds now."""
        s = storage(t)
        if self._valid[id(t)] != self._writes[s]:
            base, now = self._bases[s]
            whole = same_place(base, t) and (t.requires_grad or not base.requires_grad)  # else it is detached
            self.know(t, now if whole else self._take(now, base, t))
        return self._proxies[id(t)]

    def write(self, t: torch.Tensor, proxy: Any, *, tracked: bool = True) -> None:
        """``t`` holds ``proxy`` from here on, and all tensors that share its memory follow. ``tracked``: whether
        autograd sees the write. Gradients ignore another one."""
        s = storage(t)
        base, now = self._bases[s]
        new = proxy if same_place(base, t) else self._put(now, base, t, proxy)
        keeps = not tracked and base.requires_grad
        self._bases[s] = base, self._keep(now, base, new) if keeps else new
        self._writes[s] += 1
        if not keeps:
            self.know(t, proxy)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forgets tensors, and what their memory holds."""
        for t in tensors:
            self._proxies.pop(id(t), None)
            self._bases.pop(storage(t), None)
            self._writes.pop(storage(t), None)

    def clear(self) -> None:
        """Forgets all tensors, so that they die with the record."""
        for known in (self._proxies, self._alive, self._bases, self._writes, self._valid):
            known.clear()

    def is_written(self, t: torch.Tensor) -> bool:
        return bool(self._writes.get(storage(t)))
