"""The strategies and their spellings."""

from __future__ import annotations

from enum import Enum
from typing import Any


class ShardingStrategy(Enum):
    """How parameters, gradients and optimizer state are laid out, in the terms of ZeRO (Rajbhandari et al., 2020).

    ZERO2 (PyTorch's SHARD_GRAD_OP): sharded at rest; gathered once in forward and kept until backward has used them.
    ZERO3 (PyTorch's FULL_SHARD): sharded at rest; freed after use in forward and gathered again in backward.
    """

    ZERO2 = "zero2"
    ZERO3 = "zero3"


_ALIASES = {
    "zero2": ShardingStrategy.ZERO2,
    "shard_grad_op": ShardingStrategy.ZERO2,
    "shard_grad": ShardingStrategy.ZERO2,
    "zero3": ShardingStrategy.ZERO3,
    "full_shard": ShardingStrategy.ZERO3,
}

BUCKETING_STRATEGIES = ("none", "layer", "block")


def parse_sharding_strategy(value: Any) -> ShardingStrategy:
    """Accepts our members, names in any case, and the members of Thunder's and PyTorch's enums of the same meaning.

    Raises ValueError that lists what exists.
    """
    if isinstance(value, ShardingStrategy):
        return value
    name = value.name if isinstance(value, Enum) else value
    found = _ALIASES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(repr(alias) for alias in _ALIASES)
        raise ValueError(f"unknown sharding_strategy {value!r}: choose one of {known}")
    return found


def parse_bucketing_strategy(value: Any) -> str | float:
    """ "none", "layer", "block" in any case (or an enum member of that name), or a positive size in MB."""
    name = value.name if isinstance(value, Enum) else value
    if isinstance(name, str) and name.lower() in BUCKETING_STRATEGIES:
        return name.lower()
    if isinstance(name, (int, float)) and not isinstance(name, bool) and name > 0:
        return float(name)
    known = ", ".join(repr(s) for s in BUCKETING_STRATEGIES)
    raise ValueError(f"unknown bucketing_strategy {value!r}: choose one of {known}, or a size in MB greater than 0")
