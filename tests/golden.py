"""Golden traces: the lines of one stage as short text. To accept new texts: ``EXPECTTEST_ACCEPT=1 pytest``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import shardtrace  # isort: split

import thunder
from torch import nn


def compile_fake(build: Callable[[], nn.Module], *inputs: Any, backward: bool = True, **options: Any) -> Any:
    """Shards and jits a model in the process group that is there, and calls it once."""
    cmodel = thunder.jit(shardtrace.fsdp(build(), **options))
    result = cmodel(*inputs)
    if backward:
        result.sum().backward()
    return cmodel


def stage(cmodel: Any, name: str, traces: Callable[[Any], list[Any]] = thunder.last_traces) -> Any:
    """The trace that our pass ``name`` made."""
    (found,) = {id(t): t for t in traces(cmodel) if f"shardtrace: {name} " in str(t.get_provenance())}.values()
    return found


def text(trace: Any, *, dels: bool = True) -> str:
    """The lines of a trace without comments; values are numbered in the order in which they appear."""
    lines = []
    for bsym in trace.bound_symbols:
        if bsym.sym.name == "python_del" and not dels:
            continue
        lines += [line for line in str(bsym).splitlines() if not line.lstrip().startswith("#")]
    lines = [re.sub(r"  # .*", "", line) for line in lines]
    numbers: dict[str, str] = {}

    def renumber(match: re.Match) -> str:
        return numbers.setdefault(match[0], f"{match[1]}{len(numbers)}")

    return "\n".join(re.sub(r"\b((?:bw_)?f?t)\d+\b", renumber, line) for line in lines if line)
