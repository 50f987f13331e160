"""Precision plugins of Fabric, and what they mean for sharding."""

from __future__ import annotations

from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

# A mixed precision also gathers parameters and reduces gradients in the lower one, as Fabric's FSDPStrategy does.
_POLICIES = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


def check_precision(precision: Precision | None) -> Precision | None:
    """The plugin itself. Raises TypeError for one that replaces layers or chooses their kernels."""
    if precision is None or type(precision) is Precision:
        return precision
    if isinstance(precision, (DoublePrecision, HalfPrecision, MixedPrecision)):
        return precision
    raise TypeError(
        f"ShardtraceStrategy does not work with {type(precision).__name__}: use precision='32-true', '64-true', "
        "'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"
    )


def policy_of(precision: Precision) -> str | None:
    """The ``mp_policy`` that a plugin asks for."""
    return _POLICIES.get(precision.precision)
