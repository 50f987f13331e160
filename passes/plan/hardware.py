"""Devices and links by name, from their data sheets.

A data sheet has peaks. What programs reach is a part of them, and the constants below say which. They are modelled;
``shardtrace calibrate`` measures the machine that it runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from passes.plan.cost import CPU, CUDA, GLOO, NCCL, CostModel, Device, Link

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


def _ethernet(gbits: float, latency: float) -> Link:
    return Link(bandwidth=COLLECTIVES * gbits / 8 * 1e9, latency=latency, hop=3e-6)


# By the bytes/s that one rank sends. A machine whose ranks share a network card has a part of it for each.
LINKS: Mapping[str, Link] = {
    "nvlink3": Link(COLLECTIVES * 300e9, 20e-6, 0.5e-6),  # A100: 600 GB/s in both directions
    "nvlink4": Link(COLLECTIVES * 450e9, 20e-6, 0.5e-6),  # H100, H200: 900 GB/s in both directions
    "nvlink5": Link(COLLECTIVES * 900e9, 20e-6, 0.5e-6),  # B200: 1.8 TB/s in both directions
    "xgmi": Link(COLLECTIVES * 448e9, 20e-6, 0.5e-6),  # MI300X: 7 links of 64 GB/s in each direction
    "pcie4": Link(COLLECTIVES * 25e9, 25e-6, 1e-6),  # x16: 32 GB/s less its protocol
    "pcie5": Link(COLLECTIVES * 50e9, 25e-6, 1e-6),
    "400gbit": _ethernet(400, 30e-6),
    "200gbit": _ethernet(200, 30e-6),
    "100gbit": _ethernet(100, 30e-6),
    "25gbit": _ethernet(25, 50e-6),
    "10gbit": _ethernet(10, 100e-6),
    "1gbit": GLOO,
}
# The link inside a machine and the number of ranks there, where the name of the device tells.
INSIDE = {
    "a100-40": ("nvlink3", 8), "a100-80": ("nvlink3", 8), "h100-sxm": ("nvlink4", 8), "h200": ("nvlink4", 8),
    "b200": ("nvlink5", 8), "mi300x": ("xgmi", 8), "h100-pcie": ("pcie5", 8), "l40s": ("pcie4", 8), "cpu": ("1gbit", 1),
}  # fmt: skip
BETWEEN = {"cpu": "1gbit"}  # else 400 Gbit/s for each rank, as in NVIDIA's DGX

T = TypeVar("T")


def hardware(name: str) -> Hardware:
    """A device by name. Raises ValueError that lists the names."""
    key = str(name).lower()
    return _find(HARDWARE, ALIASES.get(key, key), "device", name)


def link(name: str) -> Link:
    """A link by name. Raises ValueError that lists the names."""
    return _find(LINKS, str(name).lower().replace(" ", "").replace("/s", ""), "link", name)


def _find(table: Mapping[str, T], key: str, what: str, given: str) -> T:
    if key not in table:
        raise ValueError(f"there is no {what} {given!r}: choose one of {', '.join(table)}")
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
    return names.get(found, "a measured link")
