"""The cost model: how long collectives and compute take, from a handful of measured rates.

``shardtrace.calibrate`` measures the rates of a machine; the constants below are the defaults.
:mod:`passes.analysis.seconds` applies them to the lines of a trace.

The roofline model (Williams, Waterman and Patterson, 2009): a line takes as long as its arithmetic or its memory
traffic, whichever is longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Link:
    """The link between ranks. ``bandwidth``: bytes/s that a rank sends while it receives as many; ``latency``: extra
    seconds for each collective."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        _check_rates(self)


@dataclass(frozen=True)
class Device:
    """The device that computes. ``flops`` and ``half_flops``: FLOP/s of matrix products in fp32 and in bf16 or fp16;
    ``bandwidth``: bytes/s of memory, read and written; ``overhead``: extra seconds for each line of a trace;
    ``host_bandwidth``: bytes/s of copies between its memory and the host's, in either direction."""

    flops: float
    half_flops: float
    bandwidth: float
    overhead: float
    host_bandwidth: float = 20e9  # the part of PCIe 4.0 x16's 32 GB/s that a copy reaches

    def __post_init__(self) -> None:
        _check_rates(self)


@dataclass(frozen=True)
class CostModel:
    """Rates, and the seconds that follow from them. :meth:`from_dict` is the inverse of ``dataclasses.asdict``."""

    link: Link
    device: Device

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """Raises KeyError, TypeError or ValueError if an entry is missing, unknown or not a rate."""
        return cls(Link(**data["link"]), Device(**data["device"]))

    def collective_seconds(self, nbytes: int, ranks: int) -> float:
        """Seconds from issue to arrival of a collective that moves ``nbytes`` for the whole group, on an idle link.

        Each of the N ranks sends ``nbytes * (N - 1) / N`` and receives as many, by a ring or directly. No algorithm
        sends less (Chan, Heimlich, Purkayastha and van de Geijn, 2007, "Collective communication").
        """
        return self.link.latency + nbytes * (ranks - 1) / ranks / self.link.bandwidth

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds for a copy between host and device memory, in either direction."""
        return nbytes / self.device.host_bandwidth

    def compute_seconds(self, flops: int, half_flops: int, nbytes: int) -> float:
        """Seconds for one line of compute: FLOPs in fp32, FLOPs in bf16 or fp16, and bytes read and written."""
        arithmetic = flops / self.device.flops + half_flops / self.device.half_flops
        return self.device.overhead + max(arithmetic, nbytes / self.device.bandwidth)


def _check_rates(rates: Link | Device) -> None:
    for name, value in vars(rates).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} of {type(rates).__name__} must be a number, not {value!r}")
        is_time = name in ("latency", "overhead")  # may be too short to measure; a rate of 0 would divide by zero
        if not math.isfinite(value) or value < 0 or (value == 0 and not is_time):
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
