"""The cost model: how long collectives and compute take, from a handful of measured rates.

``shardtrace.calibrate`` measures the rates of a machine; the constants below are the defaults.
:mod:`passes.analysis.seconds` applies them to the lines of a trace.

A line takes as long as its arithmetic and its memory traffic, one after the other. That is the roofline model
(Williams, Waterman and Patterson, 2009) without overlap. Small and narrow matrix products have more traffic for their
arithmetic, and so reach less of the device's FLOP/s, as measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
