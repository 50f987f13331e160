"""Values of arguments, as users pass them: whole numbers, mixed precision, and libraries that only some need."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


def parse_count(name: str, value: Any, expected: str, *, least: int = 0) -> int:
    """``value`` if it is a whole number of at least ``least``. Raises ValueError that says what is ``expected``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be {expected}, not {value!r}")
    return value


def needs(library: str, *, extra: str, what: str) -> None:
    """Raises ImportError that says what to install if ``library`` is missing. Call it before any work."""
    if find_spec(library) is None:
        raise ImportError(
            f"{what} needs {library}, which is not installed: pip install {library}, or shardtrace's extra, "
            f"pip install '.[{extra}]' in its folder",
            name=library,
        )


_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def parse_precision(value: Any) -> MixedPrecisionPolicy | None:
    """Accepts PyTorch's policy, or the name of the dtype in which parameters are gathered and gradients reduced.

    Raises ValueError that lists the names, or that names a policy's dtype that is not floating point.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.lower() in _DTYPES:
        return MixedPrecisionPolicy(param_dtype=_DTYPES[value.lower()])
    if isinstance(value, torch.dtype) and value in _DTYPES.values():
        return MixedPrecisionPolicy(param_dtype=value)
    if not isinstance(value, MixedPrecisionPolicy):
        known = ", ".join(map(repr, _DTYPES))
        raise ValueError(
            f"unknown mp_policy {value!r}: choose one of {known}, or pass a torch.distributed.fsdp.MixedPrecisionPolicy"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(value, name)
        if dtype is not None and dtype not in _DTYPES.values():
            known = ", ".join(sorted({str(d) for d in _DTYPES.values()}))
            raise ValueError(f"{name} of mp_policy is {dtype}: choose one of {known}, or None")
    return value
