"""Measures this machine for the cost model of the schedule (:mod:`passes.plan.cost`) and caches the result.

    shardtrace calibrate                                         # the device
    torchrun --nproc_per_node=2 -m shardtrace calibrate          # the device, and the link between the ranks

Run it like the training, with the same hosts, ranks and threads (OMP_NUM_THREADS). It takes about ten seconds. The
result is one readable JSON file for each device, backend and world size, in ``$SHARDTRACE_CACHE``,
``$XDG_CACHE_HOME/shardtrace`` or ``~/.cache/shardtrace``. Machines without a calibration use defaults.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import passes  # noqa: F401  first, because it makes Thunder importable
from passes.comm.quantized import INT8, chunk_of
from passes.comm.symbols import ALL_GATHER, REDUCE_SCATTER, CollectiveOp
from passes.compat.jit import function_of
from passes.plan import (
    Bucket,
    BucketPlan,
    CostModel,
    Device,
    HostMemory,
    Link,
    Member,
    PlainRuntime,
    ShardedParameter,
    default_cost_model,
)
from passes.plan.cost import FREE, Hardware, cluster, links_of
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import backend_for, is_alone, keep_freed_memory, resolve_device, resolve_group, transport

import torch
import torch.distributed as dist
import torch.nn.functional as F
from thunder.core import dtypes

# ---- measurement ----


Start = Callable[[], Any]  # issues a collective
Finish = Callable[[Any], Any]  # waits for it
Report = Callable[[str], None]  # is called with the name of each finished measurement


@dataclass(frozen=True)
class Effort:
    """The amount of measuring. Results are medians.

    ``matmul``: rows and columns of the matrices; ``elements``: size of the fp32 tensors that are added; ``messages``:
    bytes of the unsharded buckets; ``repeats``: runs of each collective; ``seconds``: time for each measurement of the
    device; ``queries``: of attention, and their ``width``.
    """

    matmul: int
    elements: int
    messages: tuple[int, ...]
    repeats: int = 9
    seconds: float = 0.5
    queries: int = 256
    width: int = 64


# Too large for the processor's caches, small enough for seconds in total; on a GPU, large enough to fill it.
EFFORTS = {
    "cpu": Effort(768, 2**22, (2**16, 2**20, 2**23)),
    "cuda": Effort(8192, 2**27, (2**20, 2**24, 2**27), queries=8192, width=128),
}
LINES = 16  # of a forward: tensors that come before one is used again
MOST = 2**30  # bytes of these
DEVICE = '"cpu", "cuda" or "cuda:1"; default: CUDA if there is one, else the CPU'
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
    meter = _Meter(device, effort or EFFORTS.get(device.type, EFFORTS["cuda"]), progress or (lambda name: None))
    keep_freed_memory()  # as a training that fsdp has sharded
    model = replace(default_cost_model(device.type, backend_for(group, {device.type})), device=meter.measure_device())
    if group is not None and not is_alone(group):
        model = of_first_rank(group, device, replace(model, link=meter.measure_link(group)))
    if save and (group is None or (dist.get_backend(group) != "fake" and dist.get_rank(group) == 0)):
        try:
            write_cost_model(model, device, group)
        except OSError as error:
            warnings.warn(f"the calibration could not be saved: {error}", stacklevel=2)
    return model


class _Meter:
    """Measures a device, and links to other ranks, with an effort. ``report``: as ``progress`` of :func:`calibrate`."""

    def __init__(self, device: torch.device, effort: Effort, report: Report) -> None:
        self.device, self.effort, self.report = device, effort, report

    def measure_device(self) -> Device:
        overhead, bandwidth = self._overhead(), self._bandwidth()

        def rate(work: float, nbytes: float, seconds: float) -> float:
            """Work per second of arithmetic alone, without its traffic."""
            return work / max(seconds - overhead - nbytes / bandwidth, seconds / 2)

        full, half = rate(*self._product(torch.float32)), rate(*self._product(torch.bfloat16))
        # as it is usually computed there
        on_cpu = self.device.type == "cpu"
        attention = rate(*self._attention(torch.float32 if on_cpu else torch.bfloat16))
        special, host = rate(*self._special()), self._host_bandwidth()
        allocation, rounding = self._allocation(overhead, bandwidth), self._rounding(overhead, bandwidth)
        of_products = attention / (full if on_cpu else half)
        return Device(full, half, bandwidth, overhead, host, of_products, special, allocation, rounding)

    def seconds(self, name: str, run: Callable[[], Any]) -> float:
        """The median time of ``run`` over as many runs as fit into the effort's seconds (at least one), after a
        warm-up."""
        seconds: list[float] = []
        self.timed(run)
        while not seconds or sum(seconds) < self.effort.seconds:
            seconds.append(self.timed(run))
        self.report(name)
        return statistics.median(seconds)

    def timed(self, run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - start

    # ---- the device ----

    def _overhead(self) -> float:
        """The mean over four functions that models often call, on tensors so small that their work takes no time."""
        x, weight = torch.zeros(2, 8, device=self.device), torch.zeros(8, 8, device=self.device)

        def lines() -> None:
            y = x
            for _ in range(LINES):
                y = F.layer_norm(torch.add(F.gelu(F.linear(y, weight)), x), (8,))

        return self.seconds("overhead", lines) / (4 * LINES)

    def _bandwidth(self) -> float:
        a, b, out = torch.ones(3, self.effort.elements, device=self.device)
        return 3 * a.nbytes / self.seconds("memory", lambda: torch.add(a, b, out=out))

    def _allocation(self, overhead: float, bandwidth: float) -> float:
        """Measured in a small step: forward keeps its tensors, backward reads and frees them in reverse order."""
        a = torch.ones(self.effort.elements // 4, device=self.device)

        def step() -> None:
            kept = [a]
            for _ in range(LINES):
                kept.append(torch.add(a, kept[-1]))
            while len(kept) > 1:
                kept[-1] = torch.add(a, kept.pop())

        lines = 2 * LINES
        seconds = self.seconds("new memory", step) - lines * (overhead + 3 * a.nbytes / bandwidth)
        return min(lines * a.nbytes / max(seconds, 1e-12), FREE)

    def _product(self, dtype: torch.dtype) -> tuple[float, float, float]:
        """FLOPs, bytes and seconds of a product of matrices."""
        size = self.effort.matmul
        seconds = self.seconds(f"matrix product in {dtype}".replace("torch.", ""), self._products(size, dtype))
        return 2 * size**3, 3 * dtype.itemsize * size**2, seconds

    def _attention(self, dtype: torch.dtype) -> tuple[float, float, float]:
        """FLOPs, bytes and seconds of forward and backward with a causal mask, all scores counted."""
        shape = (1, 8, self.effort.queries, self.effort.width)
        q, k, v, grad = (torch.randn(shape, device=self.device, dtype=dtype, requires_grad=True) for _ in range(4))

        def both() -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)

        # two products in forward, and five in backward, which computes the scores again; 12 tensors in and out
        return 7 * 2 * q.numel() * self.effort.queries, 12 * q.nbytes, self.seconds("attention", both)

    def _special(self) -> tuple[float, float, float]:
        """Elements, bytes and seconds of a function with a tanh."""
        a = torch.randn(self.effort.elements // 4, device=self.device)
        return a.numel(), 2 * a.nbytes, self.seconds("tanh", lambda: F.gelu(a, approximate="tanh"))

    def _host_bandwidth(self) -> float:
        on_host = HostMemory(self.device).keep(torch.ones(self.effort.elements // 8))
        there = torch.empty_like(on_host, device=self.device)
        return on_host.nbytes / self.seconds("host memory", lambda: there.copy_(on_host, non_blocking=True))

    def _rounding(self, overhead: float, bandwidth: float) -> float:
        """Bytes/s of functions that write and read messages in int8, over the bytes/s of memory. As in a step,
        parameters were used a while ago, and results are kept for a while."""
        numel, chunk = self.effort.elements // 4, chunk_of(on_cpu=self.device.type == "cpu")
        values = torch.randn(max(2, min(LINES, MOST // (4 * numel))), numel, device=self.device)
        several, results = itertools.cycle(values.split(1)), deque[torch.Tensor](maxlen=len(values))

        def both() -> None:
            message = INT8.messages(values.new_empty(1, INT8.nbytes(numel), dtype=torch.uint8))
            INT8.pack(next(several), message, chunk=chunk)
            results.append(torch.empty_like(values[:1]))
            INT8.unpack(message, results[-1], chunk=chunk)

        work = INT8.pack_work(numel, 4, chunk=chunk) + INT8.unpack_work(numel, 4, chunk=chunk)
        seconds = self.seconds("rounding", both)
        return work.bytes / max(seconds - work.number * overhead, seconds / 2) / bandwidth

    def _products(self, size: int, dtype: torch.dtype) -> Callable[[], Any]:
        """Products of square matrices. As in a step, operands were used a while ago, and results are kept for a
        while."""
        n = max(2, min(LINES, MOST // (size * size * dtype.itemsize)))
        matrices = [torch.randn(size, size, device=self.device).to(dtype) for _ in range(n)]
        pairs = itertools.cycle(itertools.pairwise([*matrices, matrices[0]]))
        results = deque[torch.Tensor](maxlen=n)
        return lambda: results.append(torch.mm(*next(pairs)))

    # ---- links ----

    def measure_link(self, group: dist.ProcessGroup) -> Link:
        """Measures gathers and reductions of buckets with the functions that the lines of a trace call: alone, and
        beside products, which take longer then."""
        samples, taken = list[tuple[float, float]](), list[float]()
        for size in self.effort.messages:
            bucket = _bucket(group, self.device, size)
            shape = bucket.members[0].parameter.shard_shape
            shard, grad = (torch.ones(shape[0] * n, device=self.device) for n in (1, group.size()))
            sent = bucket.bytes * (group.size() - 1) / group.size()
            for op, values in ((ALL_GATHER, shard), (REDUCE_SCATTER, grad)):
                start, finish = _collective(op, values, bucket)
                run = functools.partial(_in_turn, start, finish)
                times = [self.timed(run) for _ in range(self.effort.repeats + 1)]  # the same number on all ranks
                samples.append((sent, statistics.median(times[1:])))
                taken.append(self._taken(start, finish, group))
                self.report(f"{op.issue.name} of {bucket.bytes} bytes")
        return fit_link(samples, taken)

    def _taken(self, start: Start, finish: Finish, group: dist.ProcessGroup) -> float:
        """Seconds that a collective takes from products that are computed while it is in flight."""
        product, repeats = self._products(self.effort.matmul // 2, torch.float32), self.effort.repeats

        def compute(n: int) -> None:
            for _ in range(n):
                product()

        def together(n: int) -> None:
            for _ in range(IN_A_ROW):
                _in_turn(start, finish, lambda: compute(n))

        times = [self.timed(lambda: _in_turn(start, finish)), self.timed(lambda: compute(LINES)) / LINES]
        slowest = torch.tensor(times, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
        alone, one = slowest.tolist()
        n = math.ceil(2 * alone / one)  # longer than the collective
        wanted = math.ceil(2 * self.effort.seconds / (IN_A_ROW * 4 * alone))
        without, beside = list[float](), list[float]()
        for _ in range(min(3 * repeats, max(repeats // 2, wanted))):
            dist.barrier(group)
            without.append(self.timed(lambda: compute(IN_A_ROW * n)))
            dist.barrier(group)
            beside.append(self.timed(lambda: together(n)))
        return max(statistics.median(beside) - statistics.median(without), 0.0) / IN_A_ROW


def _bucket(group: dist.ProcessGroup, device: torch.device, size: int) -> Bucket:
    """One fp32 parameter of about ``size`` bytes, sharded over ``group``."""
    ranks = group.size()
    plan = BucketPlan(
        "calibration", ranks, group.rank(), runtime=PlainRuntime(group), **transport(group, {device.type})._asdict()
    )
    parameter = ShardedParameter(plan, "message", (max(1, size // 4 // ranks) * ranks,), "calibration")
    return Bucket("calibration", "calibration", plan, (Member(parameter, True),), dtypes.float32)


def _in_turn(start: Start, finish: Finish, between: Callable[[], Any] = lambda: None) -> None:
    future = start()
    between()
    finish(future)


def _collective(op: CollectiveOp, values: torch.Tensor, bucket: Bucket) -> tuple[Start, Finish]:
    """The functions of the two lines of a collective. A bound symbol holds the function that it calls."""
    start, finish = (function_of(symbol.bind(None, bucket, output=None)) for symbol in (op.issue, op.wait))
    return lambda: start((values,), bucket), lambda future: finish(future, bucket)


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


def run(device: torch.device | str | None = None) -> int:
    """Calibrates, prints a table and writes the cache. Returns the exit status."""
    device = resolve_device(device, None)
    launched = dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    own_group = launched and not dist.is_initialized()
    group = resolve_group(None, device) if launched or dist.is_initialized() else None
    is_first = group is None or dist.get_rank(group) == 0
    model = calibrate(group, device, save=False, progress=_report if is_first else None)
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


def _report(name: str) -> None:
    print(f"measured {name}", file=sys.stderr)


# ---- the cache of calibrations, and the choice of one for all ranks ----


VERSION = 2  # of the file format, and of the meaning of its rates


def of_first_rank(group: dist.ProcessGroup, device: torch.device, model: CostModel | None) -> CostModel:
    """The cost model of the first rank of ``group``. Other ranks may pass None. Call it on all ranks."""
    box = [None if model is None else asdict(model)]
    on = device if backend_for(group, {device.type}) == "nccl" else None  # nccl sends only tensors on a GPU
    with communicating("the cost model of the first rank", group):
        dist.broadcast_object_list(box, group=group, group_src=0, device=on)
    assert box[0] is not None
    return CostModel.from_dict(box[0])


def cache_folder() -> Path:
    """``$SHARDTRACE_CACHE``, else ``$XDG_CACHE_HOME/shardtrace``, else ``~/.cache/shardtrace``."""
    if own := os.environ.get("SHARDTRACE_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardtrace"
    except RuntimeError:  # a user without a home folder, as in some containers
        return Path(tempfile.gettempdir()) / "shardtrace"


@dataclass(frozen=True)
class Key:
    """The conditions of a calibration. Without a link, ``backend`` is "none" and ``world_size`` is 1."""

    device: str
    backend: str
    world_size: int

    @property
    def path(self) -> Path:
        name = f"{self.device}-{self.backend}-{self.world_size}"
        return cache_folder() / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-').lower()}.json"


def cost_model_key(device: torch.device, group: dist.ProcessGroup | None) -> Key:
    """The key of ``device`` in ``group``."""
    return Key(_device_name(device), backend_for(group, {device.type}), 1 if group is None else group.size())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    info = Path("/proc/cpuinfo")  # on Linux
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"  # torchrun gives each rank one by default


def write_cost_model(model: CostModel, device: torch.device, group: dist.ProcessGroup | None) -> Path:
    """Writes to the cache atomically and returns the file. Raises OSError if the cache is not writable."""
    key = cost_model_key(device, group)
    data = {"version": VERSION, "key": asdict(key), "torch": torch.__version__, "model": asdict(model)}
    key.path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=key.path.parent, prefix=key.path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(data, indent=2) + "\n")
        os.replace(temporary, key.path)
    except BaseException:
        os.unlink(temporary)
        raise
    return key.path


def load_cost_model(device: torch.device, group: dist.ProcessGroup) -> CostModel:
    """The cached calibration of this machine, or the best substitute. Call it on all ranks of ``group`` at once.

    All ranks get the model that the group's first rank finds. It looks for a calibration of this device, backend and
    world size; then for one of the nearest world size; then for one of the device without a link, to which it adds the
    default link. If there is none, it takes the defaults. A fake group always gets the defaults, so that its traces are
    the same on every machine. A file that cannot be used is ignored with a warning that names it.
    """
    if dist.get_backend(group) == "fake":
        return default_cost_model(device.type, "fake")
    model = _find(cost_model_key(device, group)) if dist.get_rank(group) == 0 else None
    if dist.get_rank(group) == 0 and model is None:
        model = default_cost_model(device.type, backend_for(group, {device.type}))
        if without_link := _find(cost_model_key(device, None)):
            model = replace(model, device=without_link.device)
    return model if is_alone(group) and model is not None else of_first_rank(group, device, model)


def find_cost_model(device: torch.device, backend: str, world_size: int) -> CostModel | None:
    """This machine's calibration for the nearest world size. None if there is none."""
    return _find(Key(_device_name(device), backend, world_size))


def _find(key: Key) -> CostModel | None:
    if exact := _read(key.path, key):
        return exact[1]
    stem = key.path.stem.rpartition("-")[0]
    paths = (path for path in sorted(key.path.parent.glob(f"{stem}-*.json")) if path != key.path)
    others = [found for path in paths if (found := _read(path, key))]
    return min(others, key=lambda found: abs(found[0].world_size - key.world_size))[1] if others else None


def _read(path: Path, wanted: Key) -> tuple[Key, CostModel] | None:
    """The contents of a file if its key is ``wanted``, except for the world size."""
    try:
        data = json.loads(path.read_text())
        if data["version"] != VERSION:
            raise ValueError(f"it is of version {data['version']!r}, not {VERSION}")
        key, model = Key(**data["key"]), CostModel.from_dict(data["model"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"ignoring the calibration in {path} ({why}): calibrate again, or remove it", stacklevel=2)
        return None
    return (key, model) if key == replace(wanted, world_size=key.world_size) else None


class Rates(NamedTuple):
    """A cost model, and in words where it comes from and what its links are."""

    cost: CostModel
    source: str
    links: str


def rates_of(device: Hardware, links: Mapping[str, Any], world_size: int) -> Rates:
    """The rates of a device by name and of links by name, as in :func:`passes.plan.cost.cluster`. For "cpu", this
    machine's calibration, if there is one; a link that is named replaces the measured one."""
    modelled, names = cluster(device, **links), str(links_of(device, **links))
    measured = find_cost_model(torch.device("cpu"), "gloo", world_size) if device.name == "cpu" else None
    if measured is None:
        return Rates(modelled, "modelled", names)
    if any(name is not None for name in links.values()):
        return Rates(replace(modelled, device=measured.device), "partly calibrated", names)
    return Rates(measured, "calibrated", "a measured link")


# ---- as text ----


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
