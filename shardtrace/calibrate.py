"""Measures this machine for the cost model of the schedule (:mod:`passes.plan.cost`) and caches the result.

    python -m shardtrace.calibrate                               # the device
    torchrun --nproc_per_node=2 -m shardtrace.calibrate          # the device, and the link between the ranks

Run it like the training, with the same hosts, ranks and threads (OMP_NUM_THREADS). It takes about ten seconds. The
result is one readable JSON file for each device, backend and world size, in ``$SHARDTRACE_CACHE``,
``$XDG_CACHE_HOME/shardtrace`` or ``~/.cache/shardtrace``. Machines without a calibration use defaults.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import passes  # noqa: F401  first, because it makes Thunder importable
from passes.comm.quantize import INT8
from passes.comm.quantized import chunk_of
from passes.comm.symbols import all_gather, reduce_scatter, wait_all_gather, wait_reduce_scatter
from passes.compat.lines import function_of
from passes.plan import (
    Bucket,
    CostModel,
    Device,
    HostMemory,
    Link,
    Member,
    PlainRuntime,
    Plan,
    ShardedParameter,
    default_cost_model,
)
from passes.plan.cost import FREE
from shardtrace.costs import Key, cost_model_key, of_first_rank, write_cost_model
from shardtrace.model.freed_memory import keep_freed_memory
from shardtrace.ranks.mesh import backend_for, is_alone, resolve_device, resolve_group, transport

import torch
import torch.distributed as dist
import torch.nn.functional as F
from thunder.core import dtypes

Collective = Callable[..., None]  # issues a collective, calls its argument and waits
Report = Callable[[str], None]  # is called with the name of each finished measurement


@dataclass(frozen=True)
class Effort:
    """The amount of measuring. Results are medians.

    ``matmul``: rows and columns of the matrices; ``elements``: size of the fp32 tensors that are added; ``messages``:
    bytes of the unsharded buckets; ``repeats``: runs of each collective; ``seconds``: time for each measurement of the
    device; ``queries``: of attention.
    """

    matmul: int
    elements: int
    messages: tuple[int, ...]
    repeats: int = 9
    seconds: float = 0.5
    queries: int = 256


# Too large for the processor's caches, small enough for seconds in total; on a GPU, large enough to fill it.
EFFORTS = {
    "cpu": Effort(768, 2**22, (2**16, 2**20, 2**23)),
    "cuda": Effort(8192, 2**27, (2**20, 2**24, 2**27), queries=4096),
}
LINES = 16  # of a forward: tensors that come before one is used again
MOST = 2**30  # bytes of these
IN_A_ROW = 8  # collectives, each beside products


# ---- measuring ----


def calibrate(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    *,
    effort: Effort | None = None,
    save: bool = True,
    progress: Report | None = None,
) -> CostModel:
    """Measures ``device`` and the link between the ranks of ``group``. Call it on all ranks at once.

    All ranks measure at the same time, because they also compute at the same time. All return the measurements of the
    group's first rank, because all must schedule alike.

    Args:
        group: the ranks whose link is measured. None, a group of one rank and a fake group get the default link.
        device: default: this rank's CUDA device if there is one, else the CPU.
        effort: sizes of the measurements; default: a few seconds in total.
        save: the group's first rank writes the result to the cache, where :func:`load_cost_model` finds it. A
            cache that is not writable gives a warning.
        progress: is called with the name of each finished measurement.
    """
    device = resolve_device(device, None)
    effort = effort or EFFORTS.get(device.type, EFFORTS["cuda"])
    report = progress or (lambda name: None)
    keep_freed_memory()  # as a training that fsdp has sharded
    backend = backend_for(group, {device.type})
    measured = _measure_device(device, effort, report)
    model = replace(default_cost_model(device.type, backend), device=measured)
    if group is not None and not is_alone(group):
        model = of_first_rank(group, device, replace(model, link=_measure_link(group, device, effort, report)))
    if save and (group is None or (dist.get_backend(group) != "fake" and dist.get_rank(group) == 0)):
        try:
            write_cost_model(model, device, group)
        except OSError as error:
            warnings.warn(f"the calibration could not be saved: {error}", stacklevel=2)
    return model


def _measure_device(device: torch.device, effort: Effort, report: Report) -> Device:
    def measured(name: str, run: Callable[[], Any]) -> float:
        seconds = _median_seconds(run, device, effort.seconds)
        report(name)
        return seconds

    def overhead() -> float:
        """The mean over four functions that models often call, on tensors so small that their work takes no time."""
        x, weight = torch.zeros(2, 8, device=device), torch.zeros(8, 8, device=device)

        def lines() -> None:
            y = x
            for _ in range(LINES):
                y = F.layer_norm(torch.add(F.gelu(F.linear(y, weight)), x), (8,))

        return measured("overhead", lines) / (4 * LINES)

    def memory() -> float:
        a, b, out = torch.ones(3, effort.elements, device=device)
        return 3 * a.nbytes / measured("memory", lambda: torch.add(a, b, out=out))

    rest, bandwidth = overhead(), memory()

    def allocation() -> float:
        """Measured in a small step: forward keeps its tensors, backward reads and frees them in reverse order."""
        a = torch.ones(effort.elements // 4, device=device)

        def step() -> None:
            kept = [a]
            for _ in range(LINES):
                kept.append(torch.add(a, kept[-1]))
            while len(kept) > 1:
                kept[-1] = torch.add(a, kept.pop())

        lines = 2 * LINES
        seconds = measured("new memory", step) - lines * (rest + 3 * a.nbytes / bandwidth)
        return min(lines * a.nbytes / max(seconds, 1e-12), FREE)

    def rate(work: float, nbytes: float, seconds: float) -> float:
        """Work per second of arithmetic alone, without its traffic."""
        return work / max(seconds - rest - nbytes / bandwidth, seconds / 2)

    def product(dtype: torch.dtype) -> float:
        run = _products(effort.matmul, dtype, device)
        seconds = measured(f"matrix product in {dtype}".replace("torch.", ""), run)
        return rate(2 * effort.matmul**3, 3 * dtype.itemsize * effort.matmul**2, seconds)

    def attention(dtype: torch.dtype) -> float:
        """FLOP/s of forward and backward with a causal mask, all scores counted."""
        shape = (1, 8, effort.queries, 64)
        q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(4))

        def both() -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)

        # two products in forward, and five in backward, which computes the scores again; 12 tensors in and out
        return rate(7 * 2 * q.numel() * effort.queries, 12 * q.nbytes, measured("attention", both))

    def special() -> float:
        a = torch.randn(effort.elements // 4, device=device)
        return rate(a.numel(), 2 * a.nbytes, measured("tanh", lambda: F.gelu(a, approximate="tanh")))

    def host() -> float:
        on_host = HostMemory(device).keep(torch.ones(effort.elements // 8))
        there = torch.empty_like(on_host, device=device)
        return on_host.nbytes / measured("host memory", lambda: there.copy_(on_host, non_blocking=True))

    def rounding() -> float:
        """Bytes/s of functions that write and read messages in int8, over the bytes/s of memory. As in a step,
        parameters were used a while ago, and results are kept for a while."""
        numel, chunk = effort.elements // 4, chunk_of(on_cpu=device.type == "cpu")
        values = torch.randn(max(2, min(LINES, MOST // (4 * numel))), numel, device=device)
        several, results = itertools.cycle(values), deque[torch.Tensor](maxlen=len(values))

        def both() -> None:
            message = values.new_empty(INT8.nbytes(numel), dtype=torch.uint8)
            INT8.pack(next(several), message, chunk=chunk)
            results.append(torch.empty_like(values[0]))
            INT8.unpack(message, results[-1], chunk=chunk)

        work = INT8.pack_work(numel, 4, chunk=chunk) + INT8.unpack_work(numel, 4, chunk=chunk)
        seconds = measured("rounding", both)
        return work.bytes / max(seconds - work.number * rest, seconds / 2) / bandwidth

    full, half = product(torch.float32), product(torch.bfloat16)
    # as it is usually computed there
    of_products = attention(torch.float32) / full if device.type == "cpu" else attention(torch.bfloat16) / half
    return Device(full, half, bandwidth, rest, host(), of_products, special(), allocation(), rounding())


def _products(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    """Products of square matrices. As in a step, operands were used a while ago, and results are kept for a while."""
    n = max(2, min(LINES, MOST // (size * size * dtype.itemsize)))
    matrices = [torch.randn(size, size, device=device).to(dtype) for _ in range(n)]
    pairs = itertools.cycle(itertools.pairwise([*matrices, matrices[0]]))
    results = deque[torch.Tensor](maxlen=n)

    def run() -> None:
        results.append(torch.mm(*next(pairs)))

    return run


def _median_seconds(run: Callable[[], Any], device: torch.device, budget: float) -> float:
    """The median time of ``run`` over as many runs as fit into ``budget`` seconds (at least one), after a warm-up."""
    seconds: list[float] = []
    _timed(run, device)
    while not seconds or sum(seconds) < budget:
        seconds.append(_timed(run, device))
    return statistics.median(seconds)


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def _measure_link(group: dist.ProcessGroup, device: torch.device, effort: Effort, report: Report) -> Link:
    """Measures gathers and reductions of buckets with the functions that the lines of a trace call: alone, and beside
    products, which take longer then."""
    samples, taken = list[tuple[float, float]](), list[float]()
    for size in effort.messages:
        bucket = _bucket(group, device, size)
        shape = bucket.members[0].parameter.shard_shape
        shard, grad = torch.ones(shape, device=device), torch.ones(shape[0] * group.size(), device=device)
        sent = bucket.bytes * (group.size() - 1) / group.size()
        for issue, wait, values in ((all_gather, wait_all_gather, shard), (reduce_scatter, wait_reduce_scatter, grad)):
            run = _collective(issue, wait, values, bucket)
            times = [_timed(run, device) for _ in range(effort.repeats + 1)]  # the same number on all ranks
            samples.append((sent, statistics.median(times[1:])))
            taken.append(_taken(run, device, group, effort))
            report(f"{issue.name} of {bucket.bytes} bytes")
    return fit_link(samples, taken)


def _taken(collective: Collective, device: torch.device, group: dist.ProcessGroup, effort: Effort) -> float:
    """Seconds that a collective takes from products that are computed while it is in flight. Call it on all ranks."""
    product = _products(effort.matmul // 2, torch.float32, device)

    def compute(n: int) -> None:
        for _ in range(n):
            product()

    def together(n: int) -> None:
        for _ in range(IN_A_ROW):
            collective(lambda: compute(n))

    times = [_timed(collective, device), _timed(lambda: compute(LINES), device) / LINES]
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    alone, one = slowest.tolist()
    n = math.ceil(2 * alone / one)  # longer than the collective
    repeats = min(3 * effort.repeats, max(effort.repeats // 2, math.ceil(2 * effort.seconds / (IN_A_ROW * 4 * alone))))
    without, beside = list[float](), list[float]()
    for _ in range(repeats):
        dist.barrier(group)
        without.append(_timed(lambda: compute(IN_A_ROW * n), device))
        dist.barrier(group)
        beside.append(_timed(lambda: together(n), device))
    return max(statistics.median(beside) - statistics.median(without), 0.0) / IN_A_ROW


def _bucket(group: dist.ProcessGroup, device: torch.device, size: int) -> Bucket:
    """One fp32 parameter of about ``size`` bytes, sharded over ``group``."""
    ranks = group.size()
    plan = Plan(
        "calibration", ranks, group.rank(), runtime=PlainRuntime(group), **transport(group, {device.type})._asdict()
    )
    parameter = ShardedParameter(plan, "message", (max(1, size // 4 // ranks) * ranks,), "calibration")
    return Bucket("calibration", "calibration", plan, (Member(parameter, True),), dtypes.float32)


def _collective(issue: Any, wait: Any, values: torch.Tensor, bucket: Bucket) -> Collective:
    """Runs two lines of a trace, issue and wait, with something between them. A bound symbol holds its function."""
    start, finish = (function_of(symbol.bind(None, bucket, output=None)) for symbol in (issue, wait))

    def run(between: Callable[[], Any] = lambda: None) -> None:
        future = start((values,), bucket)
        between()
        finish(future, bucket)

    return run


def fit_link(samples: Sequence[tuple[float, float]], taken: Sequence[float] = ()) -> Link:
    """Fits a link to samples of (bytes sent, seconds), and to the seconds of compute that each has ``taken``.

    The first fit minimises the squares of the relative errors, so that small messages, which determine the latency,
    count as much as large ones; the second those of the errors, because their noise does not grow with the message. If
    noise makes one of two numbers negative, all time is attributed to the other.
    """
    sent, seconds = (list(values) for values in zip(*samples, strict=True))
    latency, per_byte = _fit(sent, seconds, scale=seconds)
    if per_byte == 0:
        latency, per_byte = 0.0, statistics.fmean(t / size for size, t in samples)
    busy, busy_per_byte = _fit(sent, taken, scale=[1.0] * len(taken)) if taken else (0.0, 0.0)
    return Link(bandwidth=1 / per_byte, latency=latency, busy=busy, busy_per_byte=busy_per_byte)


def _fit(sent: Sequence[float], seconds: Sequence[float], scale: Sequence[float]) -> tuple[float, float]:
    """Seconds for each message and for each byte, with the least squares of errors in units of ``scale``."""
    weights = 1 / torch.tensor(scale, dtype=torch.float64)[:, None]
    rows = weights * torch.tensor([(1.0, size) for size in sent], dtype=torch.float64)
    values = weights * torch.tensor(seconds, dtype=torch.float64)[:, None]
    once, per_byte = torch.linalg.lstsq(rows, values).solution.flatten().tolist()
    if once < 0:
        return 0.0, torch.linalg.lstsq(rows[:, 1:], values).solution.item()
    if per_byte < 0:
        return torch.linalg.lstsq(rows[:, :1], values).solution.item(), 0.0
    return once, per_byte


# ---- the command ----


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrates, prints a table and writes the cache. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m shardtrace.calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help='"cpu", "cuda" or "cuda:1"; default: CUDA if there is one, else the CPU')
    device = resolve_device(parser.parse_args(arguments).device, None)
    launched = dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    own_group = launched and not dist.is_initialized()
    group = resolve_group(None, device) if launched or dist.is_initialized() else None
    is_first = group is None or dist.get_rank(group) == 0
    effort = EFFORTS.get(device.type, EFFORTS["cuda"])
    steps = 9 + (0 if group is None or is_alone(group) else 2 * len(effort.messages))
    model = calibrate(group, device, effort=effort, save=False, progress=_bar(steps) if is_first else None)
    status = 0
    if is_first:
        key = cost_model_key(device, group)
        print(table(model, default_cost_model(device.type, key.backend), key))
        try:
            print(f"saved to {write_cost_model(model, device, group)}")
        except OSError as error:
            print(f"could not be saved: {error}; set SHARDTRACE_CACHE to a writable folder", file=sys.stderr)
            status = 1
    if own_group:
        dist.destroy_process_group()
    return status


def _bar(steps: int) -> Report:
    try:
        from tqdm import tqdm
    except ImportError:  # an extra
        return lambda name: print(f"measured {name}", file=sys.stderr)
    bar = tqdm(total=steps, desc="calibrate", leave=False)

    def report(name: str) -> None:
        bar.set_postfix_str(name, refresh=False)
        bar.update()
        if bar.n == steps:
            bar.close()

    return report


def table(model: CostModel, default: CostModel, key: Key) -> str:
    """The cost model as text, beside the defaults."""
    rows = [(f"device: {key.device}", "measured", "default")]
    rows += _rows(DEVICE_UNITS, model.device, default.device)
    if key.backend != "none":
        rows.append((f"link: {key.backend}, {key.world_size} ranks", "", ""))
        rows += _rows(LINK_UNITS, model.link, default.link)
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"{name:{width}} {value:>16} {usual:>16}".rstrip() for name, value, usual in rows)


# in the order of the fields
DEVICE_UNITS = (
    ("fp32 products", 1e-9, "GFLOP/s"),
    ("bf16 products", 1e-9, "GFLOP/s"),
    ("memory", 1e-9, "GB/s"),
    ("overhead of a line", 1e6, "us"),
    ("from host memory", 1e-9, "GB/s"),
    ("attention", 100.0, "% of products"),
    ("exp, tanh, ...", 1e-9, "G elements/s"),
    ("new memory", 1e-9, "GB/s"),
    ("rounding", 100.0, "% of memory"),
)
LINK_UNITS = (
    ("bandwidth", 1e-9, "GB/s"),
    ("latency", 1e6, "us"),
    ("hop to a further rank", 1e6, "us"),
    ("compute for a collective", 1e6, "us"),
    ("compute for its bytes", 1e9, "s/GB"),
)


def _rows(
    units: Sequence[tuple[str, float, str]], measured: Link | Device, default: Link | Device
) -> list[tuple[str, str, str]]:
    def text(value: float, scale: float, unit: str) -> str:
        return f"{value * scale:,.4g} {unit}" if value < FREE else "takes no time"

    pairs = zip(units, astuple(measured), astuple(default), strict=True)
    return [(f"  {name}", text(a, scale, unit), text(b, scale, unit)) for (name, scale, unit), a, b in pairs]


if __name__ == "__main__":
    sys.exit(main())
