"""Tools to read compiled traces and to test your own passes in a single process.

with fake_ranks(2):
    cmodel = compile_fake(build, x)
print(text(stage(cmodel, "schedule")))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from shardtrace.api import fsdp
from shardtrace.inspector.fake import fake_ranks

import thunder
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform
from torch import nn

__all__ = ["compile_fake", "fake_ranks", "stage", "text"]


def compile_fake(
    build: Callable[[], nn.Module],
    *inputs: Any,
    backward: bool = True,
    transforms: Sequence[Transform] = (),
    **options: Any,
) -> Any:
    """Shards the model that ``build`` returns over the current process group, jits it and calls it once.

    ``options`` go to :func:`shardtrace.fsdp`, ``transforms`` to ``thunder.jit``. With ``backward`` the sum of the
    result is differentiated. Inside :func:`fake_ranks` the numbers are meaningless; only the traces count.
    """
    cmodel = thunder.jit(fsdp(build(), **options), transforms=list(transforms))
    result = cmodel(*inputs)
    if backward:
        result.sum().backward()
    return cmodel


def stage(cmodel: Any, name: str, traces: Callable[[Any], list[TraceCtx]] = thunder.last_traces) -> TraceCtx:
    """The trace that pass ``name`` made: the forward one, or with ``thunder.last_backward_traces`` the backward one.

    Raises:
        ValueError: if the pass changed no trace.
    """
    ours = {}
    for trace in traces(cmodel):
        if found := re.search(r"shardtrace: (\w+) ", str(trace.get_provenance())):
            ours[found[1]] = trace
    if name not in ours:
        raise ValueError(f"no pass {name!r} has changed this trace, only {', '.join(ours) or 'none of shardtrace'}")
    return ours[name]


def text(trace: TraceCtx, *, dels: bool = True) -> str:
    """The lines of a trace without comments, with values numbered in order of appearance."""
    lines = []
    for bsym in trace.bound_symbols:
        if bsym.sym.name == "python_del" and not dels:
            continue
        lines += [line for line in str(bsym).splitlines() if not line.lstrip().startswith("#")]
    lines = [re.sub(r"  # .*", "", line) for line in lines]
    numbers: dict[str, str] = {}

    def renumber(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"{match[1]}{len(numbers)}")

    return "\n".join(re.sub(r"\b((?:bw_)?f?t)\d+\b", renumber, line) for line in lines if line)
