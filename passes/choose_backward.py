"""The backward of a compiled step, lowered again if gradients are to be treated otherwise than its forward expected.

A script may switch the reduction of gradients on or off between forward and backward (no_sync), as with FSDP2. The
switch is read when a backward begins. Forward saves the same for each treatment of gradients. Therefore only the passes
from ``accumulate`` on run again, once for each treatment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from passes.compat.jit import compile_data_and_stats
from passes.facts import Compilation, Facts
from passes.plan import Runtime, Step

import torch
from thunder.core.trace import TraceCtx


class Backward(NamedTuple):
    steps: dict[Runtime, Step]
    function: Callable[..., Any]
    stages: list[TraceCtx]


@dataclass(eq=False)
class Backwards:
    """The backwards of one compiled step. The first is the one that Thunder has compiled.

    Args:
        compilation: has the passes.
        facts: of the step. They and ``stages`` (``thunder.last_backward_traces``) are those of the last that ran.
    """

    compilation: Compilation
    facts: Facts
    stages: list[TraceCtx]
    known: list[Backward] = field(default_factory=list)

    def run(self, compiled: Callable[..., Any], saved: list[Any], cotangents: list[Any]) -> Any:
        """Runs the one for the current treatment of gradients, which is ``compiled`` if forward has foreseen it."""
        if not self.known:
            self.known.append(Backward(self.facts.parameters.steps, compiled, list(self.stages)))
        first = self.known[0]
        steps = {runtime: runtime.begin_backward(step) for runtime, step in first.steps.items()}
        chosen = self._lowered(steps)
        for runtime, step in chosen.steps.items():
            runtime.compare_step(step, changed=step is not first.steps[runtime])
        if chosen.stages[-1] is not self.stages[-1]:
            self.stages[:], self.facts.parameters.steps = chosen.stages, chosen.steps
        return (compiled if chosen is first else chosen.function)(saved, cotangents)

    def _lowered(self, steps: dict[Runtime, Step]) -> Backward:
        for one in self.known:
            if all(one.steps[runtime].treats_as(step) for runtime, step in steps.items()):
                return one
        assert self.facts.variables is not None
        self.known.append(self.facts.variables.copy().run(self._lower, steps))
        return self.known[-1]

    @torch.enable_grad()
    def _lower(self, steps: dict[Runtime, Step]) -> Backward:
        for refuse in self.facts.before_lowering:
            refuse()
        data, _ = compile_data_and_stats()
        compiled = self.known[0].stages
        stages = compiled[: compiled.index(self.facts.lowered[0]) + 1]
        parameters = replace(self.facts.parameters, steps=steps)
        facts, self.compilation.facts = self.compilation.facts, replace(self.facts, parameters=parameters)
        enabled, data.is_grad_enabled = data.is_grad_enabled, True
        try:
            for transform in self.compilation.again:
                new = transform.transform_trace_post_optimization(stages[-1], executors_list=data.executors_list)
                if new is not stages[-1]:
                    stages.append(new)
        finally:
            self.compilation.facts, data.is_grad_enabled = facts, enabled
        return Backward(steps, stages[-1].python_callable(), stages)
