"""What the tracing of a call found out, for the passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from passes.plan.plan import Plan, ShardedParameter
from passes.plan.step import Gradients, Step


@dataclass
class Enlisted:
    """What one tracing found: which trace inputs are sharded parameters, and the step that is being compiled.

    A proxy is known by its ``history`` (Thunder's record of where the value came from), which survives renaming.
    """

    by_history: dict[int, tuple[Any, ShardedParameter]] = field(default_factory=dict)
    steps: dict[Plan, Step] = field(default_factory=dict)

    def add(self, history: Any, parameter: ShardedParameter) -> None:
        self.by_history[id(history)] = (history, parameter)  # holding it keeps the id from being reused

    def get(self, proxy: Any) -> ShardedParameter | None:
        found = self.by_history.get(id(getattr(proxy, "history", None)))
        return found[1] if found else None

    def step_of(self, plan: Plan) -> Step:
        return self.steps.setdefault(plan, Step(Gradients.REDUCED))

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(dict.fromkeys(parameter.plan for _, parameter in self.by_history.values()))
