"""The executors of a jitted function whose user named none."""

from __future__ import annotations

from typing import Any

from passes.kernels import executor as kernels
from passes.kernels.registration import fuses

from thunder.extend import FusionExecutor, TemporaryExecutor, get_always_executors, get_default_executors


def add_kernels(data: Any) -> None:
    """Adds torch's own kernels to the executors of Thunder's ``data`` of a compilation.

    Changes nothing if the user chose the executors, or if a default one fuses (nvFuser). They go ahead of Thunder's
    executor for cross entropy, which would fuse nothing else, and after those with attention for CUDA.
    """
    own = tuple(e for e in data.executors_list if isinstance(e, TemporaryExecutor))
    defaults, always = get_default_executors(), get_always_executors()
    fusing = tuple(e for e in defaults if isinstance(e, FusionExecutor))
    chosen = tuple(data.executors_list) != (*own, *defaults, *always)
    if not chosen and not any(map(fuses, fusing)):
        operators = tuple(e for e in defaults if e not in fusing)
        data.executors_list = (*own, *operators, kernels, *fusing, *always)
