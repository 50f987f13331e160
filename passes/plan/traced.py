"""Facts that the tracing of a call collects for the passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from passes.plan.plan import ShardedParameter
from passes.plan.runtime import Runtime
from passes.plan.step import Gradients, Step


@dataclass
class TracedParameters:
    """The sharded parameters among a trace's inputs, and the step that is being compiled for each model.

    A proxy is identified by its ``history`` (Thunder's record of where the value came from), which survives renaming.
    """

    by_history: dict[int, tuple[Any, ShardedParameter]] = field(default_factory=dict)
    steps: dict[Runtime, Step] = field(default_factory=dict)

    def add(self, history: Any, parameter: ShardedParameter) -> None:
        self.by_history[id(history)] = (history, parameter)  # holding it keeps the id from being reused

    def get(self, proxy: Any) -> ShardedParameter | None:
        found = self.by_history.get(id(getattr(proxy, "history", None)))
        return found[1] if found else None

    def step_of(self, runtime: Runtime) -> Step:
        return self.steps.setdefault(runtime, Step(Gradients.REDUCED))

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        """The runtimes of the models whose parameters were found."""
        return tuple(dict.fromkeys(parameter.plan.runtime for _, parameter in self.by_history.values()))
