"""The runtime of a sharded model, which its compiled steps call: implements :class:`passes.plan.Runtime`.

The memory of shards: contiguous for a bucket, so that a gather needs no packing; and what parameters leave when they
are sharded, in which whatever else lies there keeps the values of then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from passes.comm.kept_gradients import KeptGradients
from passes.plan import Axis, Gradients, Keep, Member, Placement, Progress, ShardedParameter, Step
from passes.plan.bucketing import Use, group_uses
from shardtrace.model.entry import Entry
from shardtrace.options.policies import Checks
from shardtrace.ranks.consensus import announce, compare
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import Groups, is_alone
from shardtrace.record.memory import Extent

import torch
from thunder.core import dtypes
from thunder.distributed import get_skip_data_parallel_grad_sync
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


def lay_out_flat(
    rows: Mapping[ShardedParameter, torch.Tensor], trainable: Iterable[ShardedParameter]
) -> dict[ShardedParameter, torch.Tensor]:
    """The rows of each bucket as views of one buffer. Rows that may stay where they are are left out.

    The buckets are those of a model that uses its parameters in the order in which it holds them. The gather packs the
    rows if a trace has other buckets, or if a parameter has been given other memory since.
    """
    rows = {parameter: t for parameter, t in rows.items() if not t.is_meta}
    owned = [p for p in rows if p.plan.placement is Placement.OWNER and p.plan.host is not None]
    laid = {p: p.plan.host.keep(rows[p]) for p in owned if p.plan.host is not None}
    held = {p: t for p, t in rows.items() if p.plan.placement is Placement.SHARD}
    trainable = set(trainable)
    uses = [Use(Member(p, p in trainable), dtypes.to_dtype(t.dtype), str(t.device)) for p, t in held.items()]
    for group in group_uses(uses):
        members = [u.parameter for u in group.uses]
        host = group.uses[0].parameter.plan.host
        if len(members) == 1 and host is None:
            continue
        flat = torch.cat([held[m].reshape(-1) for m in members])
        flat = flat if host is None else host.keep(flat)
        for m, piece in zip(members, flat.split([held[m].numel() for m in members]), strict=True):
            laid[m] = piece.view(held[m].shape).data  # with a version of its own
    return laid


# Thunder iterates over named_parameters() in the order of a set of strings, whose hashes differ between processes.
ORDER_HINT = "if its forward iterates over named_parameters(), set PYTHONHASHSEED to the same number on all ranks"

Arrival = tuple[str, str]  # the collectives of a step, and the place of the rank before it


class ModelRuntime:
    """One model on this rank: its groups, its unreduced gradients, and the comparison of its steps with other ranks.

    Args:
        model_name: for messages.
        groups: its process groups.
        check_unchanged: raises RuntimeError if a parameter is not the one that was sharded. It runs before every step
            and must be cheap.
        entry_of: finds the entry of a sharded parameter.
        checks: whether to compare every step, or only unusual ones (None: see :meth:`compare_step`).
    """

    def __init__(
        self,
        model_name: str,
        groups: Groups,
        check_unchanged: Callable[[], None],
        entry_of: Callable[[torch.Tensor], Entry],
        checks: Checks,
    ) -> None:
        self.groups = groups
        self._by_axis = {
            Axis.ALL: groups.everyone, Axis.SHARD: groups.inner, Axis.REPLICATE: groups.outer,
            Axis.CONTEXT: groups.context,
        }  # fmt: skip
        self.kept = KeptGradients()
        self.errors: dict[tuple[Axis, int], torch.Tensor] = {}  # what rounded reductions have lost
        self.keep: Keep | None = None  # inside no_sync
        self.generation = 0  # incremented when the model's modules have changed
        self.progress = None if is_alone(groups.everyone) else Progress()
        self.compares = checks.steps is not False and self.progress is not None
        self._what = f"the collectives of {model_name}"
        self._check_unchanged, self._entry_of = check_unchanged, entry_of
        self._checks = checks
        self._agreed: set[tuple[str, ...]] = set()
        self._switches = False  # gradients were treated otherwise than a forward had foreseen
        self._last: Arrival | None = None  # the step that ran last
        self._usual: dict[Arrival | None, Arrival] = {}  # the step that followed each one the last time

    def group(self, axis: Axis) -> Any:
        return self._by_axis[axis]

    def rows_of(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._entry_of(parameter).rows

    def like(self, parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._entry_of(parameter).like(rows)

    def gradients(self) -> Gradients | None:
        """How a step that begins now treats gradients. None if it computes none."""
        return self._treatment(self._keep()) if torch.is_grad_enabled() else None

    def _treatment(self, keep: Keep | None) -> Gradients:
        if keep is not None:
            return Gradients.KEPT
        return Gradients.ADDED if self.kept.used else Gradients.REDUCED

    def step(self) -> Step:
        """The step to compile now."""
        adds = frozenset(self.kept.used)
        return Step(self.gradients(), generation=self.generation, keep=self._keep(), adds=adds)

    def _keep(self) -> Keep | None:
        if self.keep is None and get_skip_data_parallel_grad_sync():  # set by Thunder's own no_sync
            return Keep(by_forward=True)
        return self.keep

    def begin_backward(self, step: Step) -> Step:
        """``step``, or another one if the reduction of gradients was switched on or off since its forward. A parameter
        that is kept from here on is added by the next backward that reduces."""
        keep = step.keep if self.keep is None and step.keep is not None and step.keep.by_forward else self.keep
        now = replace(step, gradients=self._treatment(keep), keep=keep, adds=frozenset(self.kept.used))
        now.collectives = [line for line in step.collectives if line.startswith("forward: ")]
        if keep is not None:
            self.kept.used.add(keep.level)
        return step if step.treats_as(now) else now

    def check_step(self, step: Step) -> None:
        """Raises RuntimeError unless the compiled step fits the model now. Its messages are short, because Thunder then
        traces again: tracing reports the fault, or another step is compiled."""
        if not step.treats_as(self.step()):
            raise RuntimeError("compiled for another use of gradients")
        if step.generation != self.generation:
            raise RuntimeError("compiled for other modules")
        if self.kept.left_behind():
            raise RuntimeError("gradients were left behind")
        self._check_unchanged()
        if self.progress is not None and not self.compares:
            self.progress.drain()  # otherwise once the ranks have been compared

    def compare_trace(self, collectives: list[str]) -> None:
        """Compares ``collectives`` unless the ranks have agreed on them before. Thus a rank does not wait for the
        others if only that rank sees a new shape, such as an uneven last batch."""
        known = tuple(collectives)
        if known not in self._agreed:
            self._compare(collectives)
            self._agreed.add(known)

    def compare_step(self, step: Step, *, changed: bool | None = None) -> None:
        """Compares each step if ``Checks.steps`` is True. By default compares a step only if it differs from the one
        that followed the same predecessor the last time, or if it begins elsewhere, such as after a forward instead of
        a backward. If only one rank changes its course, it thus sends nothing, and raises if the others do not come in
        time. A step that neither sends nor keeps anything is not compared.

        ``changed`` is a bool before a backward. Backwards are compared likewise, from the first changed one on.
        """
        self._switches |= bool(changed)
        compares = bool(step.collectives) or step.gradients is Gradients.KEPT
        if changed is not None:
            compares = self.compares and (self._switches or self._checks.steps is True)
        if self.progress is None or not compares:
            return
        phase = "forward" if changed is None else "backward"
        place = f"a {'step' if changed is None else phase} begins {self.progress}"
        last, now = self._last, (step.sends, place)
        unusual = last is not None and (self.progress.under_way or self._usual.get(last) != now)
        if self._checks.steps or unusual:
            first, *rest = step.collectives or ["nothing"]
            self._compare([f"{first}, where {place}", *rest], likely=True, here=place)
            self.progress.drain()
        self._last = self._usual[last] = now
        self.progress.begin(step, phase)

    def _compare(self, lines: list[str], **options: Any) -> None:
        compare(self.groups.everyone, self._what, lines, timeout=self._checks.timeout, hint=ORDER_HINT, **options)

    def announce(self, error: str) -> None:
        announce(self.groups.everyone, self._what, error)

    def communicating(self, bucket: str) -> communicating:
        timeout = self._checks.timeout
        limit = None if timeout == Checks.timeout else timeout  # by default that of the process group
        return communicating(f"a collective of {bucket or 'the model'}", self.groups.everyone, limit=limit)
