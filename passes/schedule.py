"""Pass 4: where each collective is issued, where it is waited for, and when gathered parameters die.

Works on the lowered forward and backward in turn. Compute lines keep their order; only collectives move, so that the
result of a step is the same bit for bit.
"""

from __future__ import annotations

from collections import deque

from passes.recognise import (
    bucket_of,
    is_backward,
    is_collective,
    is_deletion,
    is_gather,
    is_issue,
    is_return,
    is_unpack,
    is_wait,
)

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import del_last_used


def schedule(trace: TraceCtx) -> TraceCtx:
    """Returns the trace with its collectives placed by fixed rules:

    - a gather is issued ``prefetch`` buckets ahead of use, in order of first use, and waited for right before it;
    - gathered parameters are deleted after their last use;
    - a reduce_scatter is issued as soon as its gradients exist; all are waited for at the end.
    """
    if not any(is_collective(b) for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    new.bound_symbols = _Schedule(trace).lines()
    return del_last_used(new, clear_mutable_collections=is_backward(trace))


class _Schedule:
    """The state of one scheduling: lines are emitted in order, each with what it needs before it."""

    def __init__(self, trace: TraceCtx) -> None:
        lines = [b for b in trace.bound_symbols if not is_deletion(b)]
        self.compute = [b for b in lines if not is_collective(b)]
        self.issue_of = {b.output.name: b for b in lines if is_issue(b)}  # by the name of the future
        self.wait_of = {o.name: b for b in lines if is_wait(b) for o in b.flat_proxy_outs}
        self.gathers = deque(self._gathers_by_first_use())
        self.reduces = _Pending([b for b in lines if is_issue(b) and not is_gather(b)])
        self.prefetch = max((bucket_of(b).plan.prefetch for b in self.gathers), default=0)
        self.outstanding = 0  # gathers that are issued and not waited for
        self.available: set[str] = set()
        self.result: list[BoundSymbol] = []

    def lines(self) -> list[BoundSymbol]:
        for bsym in self.compute:
            if is_return(bsym):
                for wait in self.wait_of.values():
                    self._wait(wait)
            for a in bsym.flat_proxy_args:
                if a.name in self.wait_of:
                    self._wait(self.wait_of[a.name])
            if not is_unpack(bsym):  # the first gathers go ahead of compute, after the signature's lines
                self._issue_gathers(self.prefetch)
            self._emit(bsym)
        return self.result

    def _gathers_by_first_use(self) -> list[BoundSymbol]:
        """The issuing lines of gathers in the order in which compute needs them: the order on every rank."""
        order: dict[str, BoundSymbol] = {}
        for bsym in self.compute:
            for a in bsym.flat_proxy_args:
                wait = self.wait_of.get(a.name)
                if wait is not None and is_gather(wait):
                    future = wait.args[0].name
                    order.setdefault(future, self.issue_of[future])
        return list(order.values())

    def _wait(self, wait: BoundSymbol) -> None:
        if wait.flat_proxy_outs[0].name in self.available:
            return
        if is_gather(wait):
            while wait.args[0].name not in self.available:
                self._issue(self.gathers.popleft())
            self._issue_gathers(self.prefetch + 1)  # the one waited for leaves its place to the next
            self.outstanding -= 1
        self._emit(wait)

    def _issue_gathers(self, limit: int) -> None:
        while self.gathers and self.outstanding < limit:
            if not all(a.name in self.available for a in self.gathers[0].flat_proxy_args):
                return
            self._issue(self.gathers.popleft())

    def _issue(self, gather: BoundSymbol) -> None:
        self.outstanding += 1
        self._emit(gather)

    def _emit(self, bsym: BoundSymbol) -> None:
        self.result.append(bsym)
        for o in bsym.flat_proxy_outs:
            self.available.add(o.name)
            for reduce in self.reduces.ready(o.name):
                self._emit(reduce)


class _Pending:
    """Collectives that wait for their inputs to be computed."""

    def __init__(self, lines: list[BoundSymbol]) -> None:
        self.missing = {id(b): {a.name for a in b.flat_proxy_args} for b in lines}
        self.users: dict[str, list[BoundSymbol]] = {}
        for b in lines:
            for name in self.missing[id(b)]:
                self.users.setdefault(name, []).append(b)

    def ready(self, name: str) -> list[BoundSymbol]:
        """Those for which ``name`` was the last input to come."""
        users = self.users.pop(name, [])
        for b in users:
            self.missing[id(b)].discard(name)
        return [b for b in users if not self.missing[id(b)]]
