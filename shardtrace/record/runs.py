"""What the runs of modules that PyTorch makes mean for the forward around them: what it reads, and what it need not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from passes.compat.jit import add_note
from passes.kernels.aten import storage
from shardtrace.record.calls import Call
from shardtrace.record.eager import EagerModule, is_named
from shardtrace.record.effects import Change
from shardtrace.record.numbers import replaces_tensors
from shardtrace.record.replay import CannotWrite
from shardtrace.record.state import Entry

import torch


def unguarded(changes: Iterable[Change], used: Collection[int], names: Collection[str]) -> list[Entry]:
    """The entries that PyTorch's runs of modules change and that the forward around these does not read: a
    :class:`Snapshot` excludes them.

    Args:
        used: the ids of the tensors from outside that calls used.
        names: those that occur in the code around the modules.

    Raises:
        RuntimeError: if the forward may read a value that depends on the values of tensors.
    """
    found = []
    for change in (c for c in changes if c.kind != "written"):
        is_read = is_named(change, names)
        if is_read and change.kind == "varies":
            raise RuntimeError(
                f"forward may read {change.label}, which a module that PyTorch runs sets by the values of tensors: let "
                "it be a tensor, or have a name that nothing else reads"
            )
        if not is_read or replaces_tensors(change, used):
            found.append(change.entry)
    return found


def _check_memory(calls: Sequence[Call], read: Iterable[torch.Tensor]) -> None:
    """Raises CannotWrite if the forward writes into what a module that PyTorch runs returns, and then reads what may
    share memory with that, or the other way round. ``read``: the tensors that are read after the calls."""
    partners: dict[int, set[int]] = {}  # of a memory; -1 is that of the user's objects
    stale: dict[int, Call] = {}  # a memory, and the call that wrote into another one that may be the same

    def check(memories: Iterable[int]) -> None:
        for call in (stale[m] for m in memories if m in stale):
            error = CannotWrite(
                "it writes into a tensor that may share memory with what a module that PyTorch runs returns, is given "
                "or keeps: write into a clone"
            )
            error.module = call.place.module
            add_note(error, f"at {call.place}")
            raise error

    for call in calls:
        tensors = [*call.tensors(), *call.results]
        check(map(storage, tensors))
        stale |= {other: call for t in call.written for other in partners.get(storage(t), ())}
        check([-1])
        for pair in call.function.shared if isinstance(call.function, EagerModule) else ():
            a, b = (storage(tensors[i]) if i >= 0 else -1 for i in pair)
            partners.setdefault(a, set()).add(b)
            partners.setdefault(b, set()).add(a)
    check(map(storage, read))


def settle_runs(calls: list[Call], read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Drops the results of modules' runs that they leave in places which nothing reads, so that a later run need not
    leave them. Returns tokens: the step has to return them, because Thunder drops a call of which nothing is read.

    Args:
        calls: those of a forward in which there are such runs.
        read: the tensors that are read after the calls.

    Raises:
        CannotWrite: if the forward reads memory that it may have written into unseen.
    """
    live, tokens = set(map(storage, read)), []
    _check_memory(calls, read)
    for i, call in reversed(list(enumerate(calls))):
        run = call.function if isinstance(call.function, EagerModule) else None
        is_live = not live.isdisjoint(map(storage, (*call.results, *call.written)))
        if run is not None:
            of_result, left = run.expected
            count = len(call.results) - len(left) - 1
            *pairs, (_, token) = zip((*left, None), call.results[count:], strict=True)
            places = {number[0] for number, t in pairs if storage(t) in live}
            run.places = {number: run.places[number] for number in places}
            run.expected = of_result, {number: facts for number, facts in left.items() if number[0] in places}
            run.token = not is_live
            kept = [t for number, t in pairs if number[0] in places] + [token] * run.token
            tokens += [token] * run.token
            calls[i] = replace(call, results=(*call.results[:count], *kept))
        if is_live or run is not None:
            live |= set(map(storage, call.tensors()))
    return tokens
