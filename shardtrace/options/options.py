"""The arguments of ``fsdp``, checked and in their canonical form."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from passes.plan import Wire
from shardtrace.options.blocks import Checkpointed, Eager, Repeated, Wrap, is_wrap
from shardtrace.options.counts import parse_count
from shardtrace.options.precision import parse_precision
from shardtrace.options.spellings import canonical
from shardtrace.options.strategy import Rules, parse_bucketing_strategy, parse_rules
from shardtrace.options.wires import WireRules, parse_gather_dtype, parse_reduce_wire

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked arguments of ``fsdp`` that do not depend on a model or on ranks.

    Must be equal on all ranks, which compare its ``repr``. Choices of modules and of parameters are not in the
    ``repr``, because functions print their addresses. Ranks compare what was chosen instead.
    """

    rules: Rules = field(repr=False)
    bucketing: str | float
    wrap: Wrap | None = field(repr=False)  # chooses the modules that are buckets, in place of "block"
    precision: MixedPrecisionPolicy | None
    evenness: float
    prefetch: int | None
    max_inflight_bytes: int | None
    timeout: float
    accumulation_dtype: torch.dtype | None
    gradient_divide_factor: float | None
    check_steps: bool | None
    check_recording: bool | int
    offload: CPUOffloadPolicy | None
    checkpointing: Checkpointed = field(repr=False)
    kernels: bool
    sum_reductions: bool
    repeated_blocks: Repeated = field(repr=False)
    eager: Eager = field(repr=False)
    gathers: WireRules = field(repr=False)
    reduction: Wire | None = field(repr=False)
    error_feedback: bool


def parse_options(
    *,
    sharding_strategy: Any,
    bucketing_strategy: Any,
    mp_policy: Any,
    evenness: Any,
    prefetch: Any,
    max_inflight_bytes: Any,
    timeout: float,
    accumulation_dtype: torch.dtype | None,
    gradient_divide_factor: Any,
    check_steps: bool | None,
    check_recording: Any,
    offload_policy: Any,
    activation_checkpointing: Checkpointed,
    kernels: bool,
    sum_reductions: bool,
    repeated_blocks: Any,
    eager: Any,
    gather_dtype: Any,
    reduce_wire: Any,
    error_feedback: Any,
    spelling: Mapping[str, Any],
) -> Options:
    """Checks the arguments of :func:`shardtrace.fsdp` with these names.

    Raises ValueError or TypeError that names the wrong argument and the values that it accepts.
    """
    sharding_strategy, bucketing_strategy, mp_policy = canonical(
        sharding_strategy, bucketing_strategy, mp_policy, dict(spelling)
    )
    precision = parse_precision(mp_policy)
    wrap = bucketing_strategy if is_wrap(bucketing_strategy) else None
    return Options(
        rules=parse_rules(sharding_strategy),
        bucketing="block" if wrap is not None else parse_bucketing_strategy(bucketing_strategy),
        wrap=wrap,
        precision=precision,
        evenness=_parse_evenness(evenness),
        prefetch=None if prefetch is None else parse_count("prefetch", prefetch, "a number of buckets, 0 or more"),
        max_inflight_bytes=None
        if max_inflight_bytes is None
        else parse_count("max_inflight_bytes", max_inflight_bytes, "a number of bytes, or None"),
        timeout=_parse_timeout(timeout),
        accumulation_dtype=_of("accumulation_dtype", accumulation_dtype, torch.dtype | None, "a torch.dtype, or None"),
        gradient_divide_factor=_parse_factor(gradient_divide_factor),
        check_steps=_check_steps_of_environment()
        if check_steps is None
        else _of("check_steps", check_steps, bool, "True, False, or None"),
        check_recording=_parse_check_recording(check_recording),
        offload=_parse_offload(offload_policy),
        checkpointing=activation_checkpointing,
        kernels=_of("kernels", kernels, bool, "True or False"),
        sum_reductions=_of("sum_reductions", sum_reductions, bool, "True or False"),
        repeated_blocks=repeated_blocks,
        eager=eager,
        gathers=parse_gather_dtype(gather_dtype),
        reduction=parse_reduce_wire(reduce_wire, error_feedback, precision),
        error_feedback=error_feedback,
    )


def _of(name: str, value: T, kind: Any, expected: str) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, not {value!r}")
    return value


def _parse_timeout(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"timeout must be a number of seconds, not {value!r}")
    return float(value)


def _parse_factor(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"gradient_divide_factor must be a positive number, or None for the ranks, not {value!r}")
    return float(value)


def _parse_evenness(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"evenness must be a number from 0 to 1, not {value!r}")
    return float(value)


def _parse_offload(policy: Any) -> CPUOffloadPolicy | None:
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise TypeError(
            "offload_policy must be torch.distributed.fsdp.CPUOffloadPolicy(), or None, "
            f"not {policy if isinstance(policy, bool) else type(policy).__name__}"
        )
    return policy if isinstance(policy, CPUOffloadPolicy) else None


def _parse_check_recording(value: Any) -> bool | int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"check_recording must be True, False or a number of steps, not {value!r}")
    return value


def _check_steps_of_environment() -> bool | None:
    return True if os.environ.get("SHARDTRACE_CHECK_STEPS") == "1" else None
