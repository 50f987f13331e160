"""The cost model: how long collectives and compute take, from a handful of rates, measured or from data sheets.

A data sheet has peaks. What programs reach is a part of them, and the constants below say which. They are modelled;
``shardtrace calibrate`` measures the machine that it runs on. :mod:`passes.analysis.seconds` applies the rates to the
lines of a trace.

A line takes as long as its arithmetic and its memory traffic, one after the other. That is the roofline model
(Williams, Waterman and Patterson, 2009) without overlap. Small and narrow matrix products have more traffic for their
arithmetic, and so reach less of the device's FLOP/s, as measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

FREE = 1e15  # a rate at which nothing takes time


@dataclass(frozen=True)
class Link:
    """The link between ranks.

    ``bandwidth``: bytes/s that a rank sends while it receives as many; ``latency``: extra seconds for each collective;
    ``hop``: more of them for each rank beyond the second, because a ring passes them one after another; ``busy``
    and ``busy_per_byte``: seconds of compute that each collective, and each byte that a rank sends, takes from its
    device. It is much for a CPU that computes and sends with the same cores.
    """

    bandwidth: float
    latency: float
    hop: float = 0.0
    busy: float = 0.0
    busy_per_byte: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(self)

    def seconds(self, nbytes: float, ranks: int) -> float:
        """Seconds in which each of ``ranks`` ranks sends ``nbytes * (ranks - 1) / ranks`` and receives as many, by a
        ring or directly. No algorithm sends less (Chan, Heimlich, Purkayastha and van de Geijn, 2007, "Collective
        communication")."""
        return self.latency + self.hop * max(ranks - 2, 0) + nbytes * (ranks - 1) / ranks / self.bandwidth


@dataclass(frozen=True)
class Device:
    """The device that computes.

    ``flops`` and ``half_flops``: FLOP/s of matrix products in fp32 and in bf16 or fp16; ``bandwidth``: bytes/s of
    memory, read and written; ``overhead``: extra seconds for each line of a trace; ``host_bandwidth``: bytes/s of
    copies between its memory and the host's, in either direction; ``attention``: the part of the FLOP/s of products
    that attention reaches, all scores counted; ``special``: elements/s of functions such as exp and tanh;
    ``allocation``: bytes/s of new tensors, beyond the traffic of writing them, because a CPU's operating system clears
    pages when they are first used; ``rounding``: the bytes/s that a wire's functions read and write, over those of
    memory. It is more than 1 where they work on what the cache holds.
    """

    flops: float
    half_flops: float
    bandwidth: float
    overhead: float
    host_bandwidth: float = 20e9  # the part of PCIe 4.0 x16's 32 GB/s that a copy reaches
    attention: float = 1.0
    special: float = FREE  # as fast as memory
    allocation: float = FREE  # from memory that a caching allocator has
    rounding: float = 1.0  # on a GPU, whose caches are smaller than the tensors on which it works

    def __post_init__(self) -> None:
        _check_rates(self)


@dataclass(frozen=True)
class CostModel:
    """Rates, and the seconds that follow from them. :meth:`from_dict` is the inverse of ``dataclasses.asdict``.

    ``link`` connects all ranks. With ``node``, it connects machines of ``node_ranks`` consecutive ranks each, and
    ``node`` the ranks of one machine.
    """

    link: Link
    device: Device
    node: Link | None = None
    node_ranks: int = 1

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """Raises KeyError, TypeError or ValueError if an entry is missing, unknown or not a rate."""
        node = data.get("node")
        return cls(
            Link(**data["link"]),
            Device(**data["device"]),
            Link(**node) if node is not None else None,
            data.get("node_ranks", 1),
        )

    def collective_seconds(self, nbytes: int, ranks: int, *, apart: bool = False, exchanged: bool = False) -> float:
        """Seconds from issue to arrival of a collective that moves ``nbytes`` for the whole group, on an idle link.

        The ranks of the group follow each other, or lie ``apart``, each on another machine. A group over several
        machines moves the bytes inside them and between them at once. If each rank has a message of its own for each
        other (``exchanged``), no byte is for all ranks of a machine, and each rank sends its own between them.
        """
        if self.node is None or (apart and ranks > 1):
            return self.link.seconds(nbytes, ranks)
        inside = self.node.seconds(nbytes, min(ranks, self.node_ranks))
        machines = -(-ranks // self.node_ranks)
        if machines == 1:
            return inside
        share = 1 if exchanged else self.node_ranks  # each rank of a machine sends a part
        between = self.link.seconds(nbytes / share, machines)
        latencies = self.node.latency + self.link.latency
        return latencies + max(inside - self.node.latency, between - self.link.latency)

    def busy_seconds(self, nbytes: int, ranks: int, *, apart: bool = False) -> float:
        """Seconds of compute that this collective takes from the device of each rank."""
        link = self.link if self.node is None or (apart and ranks > 1) else self.node
        return link.busy + link.busy_per_byte * nbytes * (ranks - 1) / ranks if ranks > 1 else 0.0

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds for a copy between host and device memory, in either direction."""
        return nbytes / self.device.host_bandwidth

    def kernel_seconds(self, kernels: Kernels) -> float:
        """Seconds for the functions of a wire."""
        device = self.device
        return kernels.number * device.overhead + kernels.bytes / (device.bandwidth * device.rounding)

    def compute_seconds(self, work: Work, nbytes: int, made: int = 0) -> float:
        """Seconds for one line of compute that reads and writes ``nbytes``, of which ``made`` are of new tensors."""
        device = self.device
        arithmetic = work.full / device.flops + work.half / device.half_flops
        attention = work.attention / device.flops + work.half_attention / device.half_flops
        arithmetic += attention / device.attention + work.special / device.special
        return device.overhead + arithmetic + nbytes / device.bandwidth + made / device.allocation


class Work(NamedTuple):
    """The arithmetic of a line: FLOPs of products in fp32 (and fp64, whose rate is unknown) and in 16 bits or less,
    those of fused attention, and the elements for which a function such as exp is computed."""

    full: int = 0
    half: int = 0
    attention: int = 0
    half_attention: int = 0
    special: int = 0

    def __add__(self, other: Any) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def flops(self) -> int:
        return self.full + self.half + self.attention + self.half_attention


class Kernels(NamedTuple):
    """Functions that run on the device one after another: their number, and the bytes of memory that they read and
    write in total."""

    number: float = 0
    bytes: float = 0

    def __add__(self, other: Any) -> Kernels:
        return Kernels(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, times: Any) -> Kernels:
        return Kernels(*(times * a for a in self))


# may be too short to measure; no rate may be 0
TIMES = frozenset({"latency", "hop", "overhead", "busy", "busy_per_byte"})


def _check_rates(rates: Link | Device) -> None:
    for name, value in vars(rates).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} of {type(rates).__name__} must be a number, not {value!r}")
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in TIMES):
            raise ValueError(f"{name} of {type(rates).__name__} must be finite and positive, not {value!r}")


# ---- defaults ----
# Pessimistic about links and optimistic about devices. If the link is in fact faster, gathers are issued too early and
# reductions are waited for too late, which costs some memory. If it is in fact slower, compute is idle.

# 1 Gbit/s, the slowest network that usually connects ranks; a round trip through TCP and gloo's threads.
GLOO = Link(bandwidth=0.125e9, latency=200e-6)
# A tenth of NVLink and a bit less than 100 Gbit/s InfiniBand; a kernel launch and a ring's hops over a few nodes.
NCCL = Link(bandwidth=10e9, latency=30e-6)
DEFAULT_LINKS = (GLOO, NCCL)
# About 16 cores with AVX-512 at 2 GHz (2 units x 16 lanes x 2 FLOPs each), bf16 at twice that, eight channels of DDR4;
# calling torch from Python takes a few microseconds.
CPU = Device(flops=2e12, half_flops=4e12, bandwidth=200e9, overhead=3e-6)
# NVIDIA H100 SXM, from its data sheet: dense TF32 and bf16, HBM3; launching a kernel takes 5 us.
CUDA = Device(flops=494e12, half_flops=989e12, bandwidth=3.35e12, overhead=5e-6)


def default_cost_model(device_type: str, backend: str) -> CostModel:
    """The constants for a ``torch.device``'s type and a process group's backend.

    An accelerator other than CUDA counts as CUDA. A backend other than gloo and nccl (fake, MPI, UCC) counts as the
    device's usual one.
    """
    on_cpu = device_type == "cpu"
    links = {"gloo": GLOO, "nccl": NCCL}
    return CostModel(link=links.get(backend, GLOO if on_cpu else NCCL), device=CPU if on_cpu else CUDA)


# ---- data sheets ----


GB = 1e9

# The parts of a data sheet's peak that memory-bound kernels and collectives reach.
MEMORY, COLLECTIVES = 0.85, 0.8
# The part of its best matrix product, of any shape, that a device reaches in training: 720 of an H100's 790 TFLOP/s
# (SemiAnalysis, 2024, "MI300X vs H100 vs H200 benchmark, part 1: training"). The best products are those of Bekman,
# "Machine Learning Engineering", table of maximum achievable matmul FLOPS; 0.72 where there is no figure.
TRAINING = 0.9
# The part of tensors' bytes that torch's caching allocator reserves in addition, for rounding and gaps, in training of
# large language models (Guo et al., 2024, GMLake, https://arxiv.org/abs/2401.08156: 15 % on average). It is less with
# PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
ALLOCATOR = 0.15
# Attention with a causal mask, all scores counted, to products: it computes half of the scores. Flash attention 2 of
# torch 2.11 takes 1.82 ms forward and 4.87 ms backward for 8192 tokens and 32 heads of 128 on an H100 (measured, as in
# docs/performance.md). The rate of flash attention 3, and of cuDNN's, is that of a published run
# (examples/benchmarks/published.py), for an H100 only.
CAUSAL_ATTENTION: Mapping[str, float] = {"flash2": 0.81, "flash3": 1.43}
# Bytes/s that an optimizer reads and writes in the memory of the host: one core of a server streams as much, and
# torchrun gives each rank one.
HOST_MEMORY = 12e9
LAUNCH = 5e-6  # seconds between two kernels of eager PyTorch, if its host keeps up


@dataclass(frozen=True)
class Hardware:
    """A device with its memory. ``memory``: bytes in total; ``context``: bytes of them that the driver, its libraries
    and their workspaces take; ``communicator``: bytes of the buffers of each process group; ``allocator``: the part of
    tensors' bytes that a caching allocator reserves in addition, for rounding and gaps; ``peak``: FLOP/s in 16 bits of
    the data sheet, which MFU refers to; ``source``: of these figures."""

    name: str
    device: Device
    memory: float
    context: float
    communicator: float
    allocator: float
    peak: float
    source: str


# Name; TFLOP/s without sparsity in 16 bits and in fp32 (PyTorch's default, which does not use TF32); the part of the
# former that its best product reaches; TB/s and GB of its memory; GB/s of its bus; source.
_GPUS = (
    ("a100-40", 312, 19.5, 0.86, 1.555, 40, 32, "NVIDIA A100 data sheet, SXM4"),
    ("a100-80", 312, 19.5, 0.86, 2.039, 80, 32, "NVIDIA A100 data sheet, SXM4"),
    ("h100-sxm", 989, 67, 0.80, 3.35, 80, 64, "NVIDIA H100 data sheet, SXM5"),
    ("h100-pcie", 756, 51, 0.72, 2.0, 80, 64, "NVIDIA H100 data sheet, PCIe"),
    ("h200", 989, 67, 0.80, 4.8, 141, 64, "NVIDIA H200 data sheet, SXM"),
    ("b200", 2250, 75, 0.78, 8.0, 180, 64, "NVIDIA DGX B200 data sheet, a GPU"),
    ("l40s", 362, 91.6, 0.72, 0.864, 48, 32, "NVIDIA L40S data sheet"),
    ("mi300x", 1307, 163.4, 0.60, 5.3, 192, 64, "AMD Instinct MI300X data sheet"),
)


def _gpu(
    name: str, half: float, full: float, best: float, bandwidth: float, memory: float, bus: float, source: str
) -> Hardware:
    device = Device(
        flops=TRAINING * best * full * 1e12,
        half_flops=TRAINING * best * half * 1e12,
        bandwidth=MEMORY * bandwidth * 1e12,
        overhead=LAUNCH,
        host_bandwidth=0.8 * bus * 1e9,
        attention=CAUSAL_ATTENTION["flash2"],
    )
    return Hardware(name, device, memory * GB, 1.0 * GB, 0.4 * GB, ALLOCATOR, half * 1e12, source)


_CPU = Hardware("cpu", CPU, 64 * GB, 0.0, 0.0, 0.0, CPU.half_flops, "shardtrace's default: 16 cores with AVX-512")
HARDWARE: Mapping[str, Hardware] = {row.name: row for row in (*(_gpu(*row) for row in _GPUS), _CPU)}
ALIASES = {"a100": "a100-80", "h100": "h100-sxm", "cuda": "h100-sxm"}


def _network(gbits: float) -> Link:
    latency = 30e-6 if gbits >= 100 else 50e-6 if gbits >= 25 else 100e-6
    return Link(bandwidth=COLLECTIVES * gbits / 8 * 1e9, latency=latency, hop=3e-6)


# By the bytes/s that one rank sends. A machine whose ranks share a network card has a part of it for each.
LINKS: Mapping[str, Link] = {
    "nvlink3": Link(COLLECTIVES * 300e9, 20e-6, 0.5e-6),  # A100: 600 GB/s in both directions
    "nvlink4": Link(COLLECTIVES * 450e9, 20e-6, 0.5e-6),  # H100, H200: 900 GB/s in both directions
    "nvlink5": Link(COLLECTIVES * 900e9, 20e-6, 0.5e-6),  # B200: 1.8 TB/s in both directions
    "xgmi": Link(COLLECTIVES * 448e9, 20e-6, 0.5e-6),  # MI300X: 7 links of 64 GB/s in each direction
    "pcie4": Link(COLLECTIVES * 25e9, 25e-6, 1e-6),  # x16: 32 GB/s less its protocol
    "pcie5": Link(COLLECTIVES * 50e9, 25e-6, 1e-6),
    **{f"{gbits}gbit": _network(gbits) for gbits in (400, 200, 100, 25, 10)},
    "1gbit": GLOO,
}
# The link inside a machine and the number of ranks there, where the name of the device tells.
INSIDE = {
    "a100-40": ("nvlink3", 8), "a100-80": ("nvlink3", 8), "h100-sxm": ("nvlink4", 8), "h200": ("nvlink4", 8),
    "b200": ("nvlink5", 8), "mi300x": ("xgmi", 8), "h100-pcie": ("pcie5", 8), "l40s": ("pcie4", 8), "cpu": ("1gbit", 1),
}  # fmt: skip
BETWEEN = {"cpu": "1gbit"}  # else 400 Gbit/s for each rank, as in NVIDIA's DGX
# The rate of a network: bytes with a capital B, else bits.
RATE = re.compile(r"(?P<number>\d+(\.\d+)?)((?P<bytes>GB(/s|ps))|[Gg][Bb]it(/s|ps)?|[Gg]bps|Gb/s)")

T = TypeVar("T")


def hardware(name: str) -> Hardware:
    """A device by name. Raises ValueError that lists the names."""
    key = str(name).lower()
    return _find(HARDWARE, ALIASES.get(key, key), "device", name)


def link(name: str) -> Link:
    """A link by name, or by a network's rate: 100gbit, 100Gbps, 12.5GB/s. Raises ValueError that lists the names."""
    text = str(name).replace(" ", "")
    if (rate := RATE.fullmatch(text)) is not None:
        gbits = float(rate["number"]) * (8 if rate["bytes"] else 1)
        return LINKS.get(f"{gbits:g}gbit", _network(gbits))
    return _find(LINKS, text.lower(), "link", name, ", or a rate, as in 50gbit or 6.25GB/s")


def _find(table: Mapping[str, T], key: str, what: str, given: str, more: str = "") -> T:
    if key not in table:
        raise ValueError(f"there is no {what} {given!r}: choose one of {', '.join(table)}{more}")
    return table[key]


def cluster(
    device: Hardware, *, inside: str | None, between: str | None, node_ranks: int | None, attention: str | None = None
) -> CostModel:
    """The cost model of machines with ``node_ranks`` of these devices each, connected by ``inside`` in a machine and by
    ``between`` from machine to machine. None: what is usual for the device. ``attention``: the kernels of attention on
    a GPU, "flash2" or "flash3", which stands for cuDNN's as well.

    Raises ValueError for a link or kernels that do not exist, or a number of ranks below 1.
    """
    found = links_of(device, inside=inside, between=between, node_ranks=node_ranks)
    if found.node_ranks < 1:
        raise ValueError(f"a machine has 1 rank or more, not {found.node_ranks}")
    node = link(found.inside) if found.node_ranks > 1 else None
    rates = device.device
    if attention is not None:
        rates = replace(rates, attention=_find(CAUSAL_ATTENTION, attention, "attention", attention))
    return CostModel(link(found.between), rates, node, found.node_ranks)


class Links(NamedTuple):
    """The names of the links inside a machine and between machines, and the ranks of a machine."""

    inside: str
    between: str
    node_ranks: int

    def __str__(self) -> str:
        if self.node_ranks == 1:
            return f"{self.between} between ranks"
        return f"{self.inside} in machines of {self.node_ranks}, {self.between} between"


def links_of(device: Hardware, *, inside: str | None, between: str | None, node_ranks: int | None) -> Links:
    """These links, with what is usual for the device in place of None."""
    usual, usual_ranks = INSIDE[device.name]
    ranks = usual_ranks if node_ranks is None else node_ranks
    return Links(inside or usual, between or BETWEEN.get(device.name, "400gbit"), ranks)


def describe(cost: CostModel) -> str:
    """The device and the links whose rates a cost model has, in words: those of a data sheet, shardtrace's defaults, or
    rates that were measured."""
    sheets = {row.device: f"{row.name}'s data sheet" for row in HARDWARE.values() if row is not _CPU}
    known = {**sheets, CPU: "shardtrace's default CPU", CUDA: "shardtrace's default GPU"}
    device = known.get(cost.device, "a measured device")
    if cost.node is None:
        return f"{device}, {_name_of(cost.link)} between ranks"
    return f"{device}, {_name_of(cost.node)} in machines of {cost.node_ranks}, {_name_of(cost.link)} between"


def _name_of(found: Link) -> str:
    if found == NCCL:
        return "80gbit (the default)"
    names = {rates: f"{name} (the default)" if rates == GLOO else name for name, rates in LINKS.items()}
    gbits = float(f"{found.bandwidth / COLLECTIVES * 8 / 1e9:.4g}")
    return names.get(found, f"{gbits:g}gbit" if found == _network(gbits) else "a measured link")
