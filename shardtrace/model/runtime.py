"""What a sharded model does while its compiled steps run: implements :class:`passes.plan.Runtime`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from passes.comm.kept_gradients import KeptGradients
from passes.plan import Axis, Gradients, Progress, Step
from shardtrace.ranks.consensus import announce, compare
from shardtrace.ranks.failure import raise_if_rank_failed
from shardtrace.ranks.mesh import Groups, is_alone

import torch
from thunder.distributed import get_skip_data_parallel_grad_sync

# Thunder goes through named_parameters() in the order of a set of strings, which Python hashes anew in each process.
ORDER_HINT = "if its forward iterates over named_parameters(), set PYTHONHASHSEED to the same number on all ranks"

Arrival = tuple[str, str]  # the collectives of a step, and the place from which a rank comes to it


class ModelRuntime:
    """One model on this rank: its groups, its unreduced gradients, and the comparison of its steps with other ranks'.

    Args:
        model_name: for messages.
        groups: its process groups.
        check_unchanged: raises RuntimeError, as cheaply as possible, if a parameter is not the one that was sharded.
        check_steps: compare every step (True), those that are not the usual next one (None), or none (False).
        timeout: seconds to wait for the other ranks.
    """

    def __init__(
        self,
        model_name: str,
        groups: Groups,
        check_unchanged: Callable[[], None],
        *,
        check_steps: bool | None,
        timeout: float,
    ) -> None:
        self.groups = groups
        self.kept = KeptGradients()
        self.keeps_gradients = False  # inside no_sync
        self.generation = 0  # how often the model's modules have changed
        self.progress = Progress() if check_steps is not False and not is_alone(groups.everyone) else None
        self._what = f"the collectives of {model_name}"
        self._check_unchanged = check_unchanged
        self._check_steps, self._timeout = check_steps, timeout
        self._agreed: set[tuple[str, ...]] = set()
        self._last: Arrival | None = None  # the step that was run last
        self._usual: dict[Arrival | None, Arrival] = {}  # what followed each step the last time

    def group(self, axis: Axis) -> Any:
        by_axis = {
            Axis.ALL: self.groups.everyone,
            Axis.SHARD: self.groups.inner,
            Axis.REPLICATE: self.groups.outer,
        }
        return by_axis[axis]

    def gradients(self) -> Gradients | None:
        """What a step that begins now is to do with gradients; None if it computes none."""
        if not torch.is_grad_enabled():
            return None
        if self.keeps_gradients or get_skip_data_parallel_grad_sync():  # which Thunder's own no_sync sets
            return Gradients.KEPT
        return Gradients.ADDED if self.kept.used else Gradients.REDUCED

    def step(self) -> Step:
        """The step that is wanted now, to be compiled."""
        return Step(self.gradients(), generation=self.generation)

    def check_step(self, step: Step) -> None:
        """As cheap as can be: if it fails, tracing says what is wrong, or another step is compiled."""
        if step.gradients is not self.gradients():
            raise RuntimeError("compiled for another use of gradients")
        if step.generation != self.generation:
            raise RuntimeError("compiled for other modules")
        if self.kept.left_behind():
            raise RuntimeError("gradients were left behind")
        self._check_unchanged()

    def compare_trace(self, collectives: list[str]) -> None:
        """What was agreed on before is not compared again: a rank that alone sees a new shape, such as an uneven last
        batch, does not wait for the others."""
        known = tuple(collectives)
        if known not in self._agreed:
            self._compare(collectives)
            self._agreed.add(known)

    def compare_step(self, step: Step) -> None:
        """With ``check_steps`` each step is compared. By default a step is compared if it differs from the one that
        followed the same predecessor the last time, or begins elsewhere, such as after a forward instead of a backward.
        A rank that changes its course by itself thus sends nothing, and gives up if the others do not come in time. A
        step that sends nothing is not compared.
        """
        if self.progress is None or not step.collectives:
            return
        last, now = self._last, (step.sends, str(self.progress))
        unusual = last is not None and (self.progress.under_way or self._usual.get(last) != now)
        if self._check_steps or unusual:
            place, (first, *rest) = f"a step begins {now[1]}", step.collectives
            self._compare([f"{first}, where {place}", *rest], likely=True, here=place)
            self.progress.drain()
        self._last = self._usual[last] = now
        self.progress.begin(step, "forward")

    def _compare(self, lines: list[str], **options: Any) -> None:
        compare(self.groups.everyone, self._what, lines, timeout=self._timeout, hint=ORDER_HINT, **options)

    def announce(self, error: str) -> None:
        announce(self.groups.everyone, self._what, error)

    def raise_if_rank_failed(self, error: Exception, bucket: str) -> None:
        raise_if_rank_failed(error, bucket)
