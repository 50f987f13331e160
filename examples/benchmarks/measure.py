"""Timing in interleaved rounds, and the communication of a step without its compute."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from passes.analysis.recognise import is_issue, is_wait

import thunder
import torch
import torch.distributed as dist
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.trace import TraceCtx
from torch import nn

Step = Callable[[], Any]

PIECE = 1 << 20  # bytes of one message


@dataclass
class Timed:
    """For each round: the seconds of a step, those of a processor that it took, and the bytes this rank sent in it (if
    known)."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    wire_bytes: list[float] = field(default_factory=list)


def interleaved(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    steps_per_round: int,
    barrier: Step,
    device: torch.device,
    interface: str | None = None,
    advance: Callable[[str], Any] = lambda name: None,
) -> dict[str, Timed]:
    """Runs all steps in each round, so that a slow spell of the machine slows all of them.

    The order rotates and reverses from round to round. The first step of each turn is not timed, because it finds the
    caches full of another contender's data. ``advance`` is called with the name of each turn. A step with a ``turn``
    context runs inside it.
    """
    timed = {name: Timed() for name in steps}
    for r in range(rounds):
        names = list(steps)
        names = names[r % len(names) :] + names[: r % len(names)]
        for name in reversed(names) if r % 2 else names:
            advance(name)
            step = steps[name]
            with getattr(step, "turn", nullcontext)():
                step()
                barrier()
                synchronize(device)
                sent, worked, start = bytes_sent(interface), time.process_time(), time.perf_counter()
                for _ in range(steps_per_round):
                    step()
                synchronize(device)
            timed[name].seconds.append((time.perf_counter() - start) / steps_per_round)
            timed[name].processor.append((time.process_time() - worked) / steps_per_round)
            if interface is not None:
                timed[name].wire_bytes.append((bytes_sent(interface) - sent) / steps_per_round)
    return timed


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bytes_sent(interface: str | None) -> int:
    """The interface's own counter, headers included; 0 without an interface."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text()) if interface else 0


def slowest(timed: dict[str, Timed], group: dist.ProcessGroup) -> dict[str, Timed]:
    """The slowest rank of each round, because a step has ended only when it has ended on all ranks. Others likewise."""
    everyone: list[dict[str, Timed]] = [{}] * group.size()
    dist.all_gather_object(everyone, timed, group=group)
    return {
        name: Timed(
            *(
                [max(values) for values in zip(*(getattr(one[name], part.name) for one in everyone), strict=True)]
                for part in fields(Timed)
            )
        )
        for name in timed
    }


# ---- communication without compute ----


def raw_exchange(sizes: list[int], group: dist.ProcessGroup) -> Step:
    """Moves the bytes that a rank sends and receives in collectives of ``sizes`` bytes, in both directions at once and
    without compute: ``size * (N - 1) / N`` to the next rank and from the previous one.

    Data is sent in pieces: gloo finishes sending a large message before it reads another, which halves the rate.
    """
    rank, world_size = group.rank(), group.size()
    total = sum(size * (world_size - 1) // world_size for size in sizes)
    pieces = [min(PIECE, total - start) for start in range(0, total, PIECE)]
    out, into = (torch.zeros(PIECE, dtype=torch.uint8) for _ in range(2))

    def exchange() -> None:
        works = []
        for piece in pieces:
            works.append(dist.irecv(into[:piece], group=group, group_src=(rank - 1) % world_size))
            works.append(dist.isend(out[:piece], group=group, group_dst=(rank + 1) % world_size))
        for work in works:
            assert work is not None
            work.wait()

    return exchange


def own_lines(cmodel: nn.Module, device: torch.device) -> Step:
    """Runs only the lines of the compiled traces that issue a collective or wait for one, in order."""
    lines = [(trace, line) for trace in compiled_traces(cmodel) for line in trace.bound_symbols]
    lines = [(trace, line) for trace, line in lines if is_issue(line) or is_wait(line)]
    inputs: dict[str, torch.Tensor] = {}

    def run() -> None:
        values: dict[tuple[int, str], Any] = {}
        for trace, line in lines:

            def value(arg: Any, trace: TraceCtx = trace) -> Any:
                if not isinstance(arg, Proxy):
                    return arg
                if (id(trace), arg.name) in values:
                    return values.pop((id(trace), arg.name))  # popped, so that nothing keeps gathered buffers
                assert isinstance(arg, TensorProxy), arg
                return inputs.setdefault(
                    arg.name, torch.zeros(tuple(arg.shape), dtype=to_torch_dtype(arg.dtype), device=device)
                )

            function = next(iter(line._call_ctx.values()))
            result = function(*tree_map(value, line.args))
            if is_issue(line):
                values[id(trace), line.output.name] = result

    return run


def compiled_traces(cmodel: nn.Module) -> list[TraceCtx]:
    """The forward and the backward that the last call ran."""
    forward = next(t for t in reversed(thunder.last_traces(cmodel)) if t.bound_symbols)
    return [forward, *thunder.last_backward_traces(cmodel)[-1:]]


# ---- compile time ----


def seconds_in_passes(cmodel: nn.Module) -> float:
    """Seconds spent in our passes and verify, read from the provenance of each trace."""
    traces = [*thunder.last_traces(cmodel), *thunder.last_backward_traces(cmodel)]
    names = [str(trace.get_provenance()) for trace in traces]
    return (
        sum(float(ms) for name in names for ms in re.findall(r"shardtrace: .*\(took ([\d.]+) milliseconds", name)) / 1e3
    )


def timed_steps(step: Step, n: int, device: torch.device) -> list[float]:
    seconds = []
    for _ in range(n):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile, by linear interpolation."""
    ordered = torch.tensor(values, dtype=torch.float64)
    low, high = torch.quantile(ordered, torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
    return low, median(values), high
