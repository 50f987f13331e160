"""The recording of a forward, which later steps make again: state that no guard sees must not have changed.

Guards compare what a snapshot can reach. What a forward reads in another way (an object that a call returns, a file,
the time) shows in what it does: the same calls of torch with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import ref

from passes.kernels.aten import Meta
from shardtrace.record.calls import Call, Numbers, Place, Record, Refused, tensors_in
from shardtrace.record.eager import EagerModule
from shardtrace.record.effects import Change, Effects, check_leaks
from shardtrace.record.memory import Memory
from shardtrace.record.reads import Reads
from shardtrace.record.recorder import CannotRecord, FakeMode, Modes, Recorder, record
from shardtrace.record.snapshot import State
from shardtrace.record.symbols import name_of
from shardtrace.record.watcher import CodeWatcher, RandomStates, iterators

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module


@dataclass(frozen=True, eq=False)
class Recording:
    """What a recording needs: the forward, its arguments and the module's tensors as fakes, and the choice of modules.
    See :func:`shardtrace.record.recorder.record`."""

    module: nn.Module
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    fakes: FakeMode
    tensors: Mapping[str, torch.Tensor]
    memory: Memory
    names: Mapping[int, str]
    watched: Collection[nn.Module]
    eager: Set[nn.Module]
    compiling: bool
    reads: Reads

    def __call__(self, watcher: CodeWatcher) -> tuple[Record, list[Change]]:
        """Records the forward. Returns also what it has set, which is put back."""
        self.reads.begin()
        with ExitStack() as stack:
            stack.enter_context(_reparametrize_module(self.module, dict(self.tensors), stack_weights=True))
            effects = stack.enter_context(Effects(self.module, type(self.module).__name__))
            reached = State()
            reached.add_value((self.args, dict(self.kwargs)), "arguments")
            known = [*effects.state.seen.values(), *reached.seen.values()]
            held = iterators(known)
            random = stack.enter_context(RandomStates(known))
            stack.enter_context(watcher)
            recorder = Recorder(
                self.names, watcher, self.memory, watched=self.watched, eager=self.eager, effects=effects,
                random=random, reads=self.reads,
            )  # fmt: skip
            given = (self.module, *self.args)
            done = record(
                self.function, given, self.kwargs, mode=self.fakes, recorder=recorder, compiling=self.compiling
            )
            advanced = [name for name, position in iterators(known).items() if position != held[name]]
            if advanced:
                raise CannotRecord(()) from Refused(
                    f"forward advances {advanced[0]}, an iterator, which no step would do again: count in an "
                    "attribute, or call next outside of forward and pass what it gives as an argument"
                )
        changes, effects.found = [*effects.found, *done.left], []  # the recorder may live on, but no fake with it
        return done, changes


def check_no_fakes(done: Record) -> None:
    """Raises RuntimeError if a fake of a record, which gets emptied, lives on in the user's objects."""
    made: list[ref[torch.Tensor]] = [
        ref(t)
        for call in done.calls
        for t in call.results
        if isinstance(t, FakeTensor) and all(t is not given for given in call.written)  # another call made it
    ]
    done.calls.clear()  # what reads values has the same list
    done.spans, done.result, done.ran, done.left = [], None, [], []
    check_leaks(made)


class Comparison:
    """A guard, the last one of a step: makes the recording again in steps 2, 4, 8, 16, ... or in each n-th one.

    Args:
        recording: the one of which the step was made, and ``done`` what it found.
        every: n, or None.
        around: a context in which the forward can be recorded.
        report: is told of a difference, once. The step is never used again.

    Records that leave modules to PyTorch are not compared: it would try these modules again.
    """

    def __init__(
        self,
        recording: Recording,
        done: Record,
        *,
        every: int | None,
        around: Callable[[], AbstractContextManager[Any]],
        report: Callable[[str], None],
    ) -> None:
        self._recording, self._first, self._modes = recording, Described.of(done), Modes.now()
        self._every, self._around, self._report = every, around, report
        self._steps, self._difference = 0, ""

    def __call__(self) -> None:
        if not self._difference:
            self._steps += 1
            due = self._steps % self._every == 0 if self._every else _is_due(self._steps)
            self._difference = self._compare() if due else ""
            if not self._difference:
                return
            self._report(self._difference)  # an error of the tracing that follows
        raise RuntimeError("the forward is another one")

    def _compare(self) -> str:
        try:
            with self._around(), self._modes.on():
                done = self._recording(CodeWatcher())[0]
            now = Described.of(done)
            check_no_fakes(done)
        except CannotRecord as error:
            return f"it raises {type(error.__cause__).__name__}: {error.__cause__}"
        except RuntimeError as error:
            return str(error)
        return self._first.difference(now)


def _is_due(steps: int) -> bool:
    return steps > 1 and steps & (steps - 1) == 0


def is_comparable(done: Record) -> bool:
    return not any(isinstance(call.function, EagerModule) for call in done.calls)


@dataclass(frozen=True)
class Described:
    """A record without its tensors. ``calls`` and ``places`` are of each call, and last of the result."""

    calls: tuple[Hashable, ...]
    places: tuple[Place | None, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, done: Record) -> Described:
        numbers = _ByType()
        calls: list[Hashable] = [numbers.call(i, call) for i, call in enumerate(done.calls)]
        calls.append(("result", numbers.value(done.result), numbers.value(tensors_in(done.result))))
        names = [name_of(call.function) for call in done.calls]
        return cls(tuple(calls), (*(c.place for c in done.calls), None), (*names, "return"))

    def difference(self, now: Described) -> str:
        """Names the first call that is another one; empty if there is none."""
        for i, (old, new) in enumerate(zip(self.calls, now.calls, strict=False)):  # the result tells shorter ones apart
            if old == new:
                continue
            before, after = self.names[i], now.names[i]
            what = f"{before} is now {after}" if before != after else f"{after}: {_first_unequal(old, new)}"
            return f"{what}, at {now.places[i] or self.places[i] or 'its end'}"
        return ""


class _ByType(Numbers):
    """Two objects of one type, each of its own recording, are not known to differ."""

    def call(self, i: int, call: Call) -> tuple[Hashable, ...]:
        return name_of(call.function), *super().call(i, call)[1:]

    def other(self, value: Any) -> Hashable:
        return (type(value),)


def _first_unequal(old: Any, new: Any) -> str:
    """Describes the first difference of two keys."""
    if isinstance(old, Meta) and isinstance(new, Meta):
        return f"a tensor {old.dtype}{list(old.shape)} is now {new.dtype}{list(new.shape)}"
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        pair = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
        if isinstance(old[0], type) and len(old) == 2 and not isinstance(old[1], tuple):
            return f"{old[1]} is now {new[1]}"
        return _first_unequal(*pair)
    return "another tensor" if isinstance(old, tuple) or isinstance(new, tuple) else f"{old} is now {new}"
