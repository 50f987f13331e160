"""The strategies and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any

from passes.plan import Placement

from torch import nn


class ShardingStrategy(Enum):
    """The layout of parameters, gradients and optimizer state, in the terms of ZeRO (Rajbhandari et al., 2020).

    DDP (PyTorch's NO_SHARD): whole on every rank; gradients are all-reduced.
    ZERO1, ZERO2 (PyTorch's SHARD_GRAD_OP): sharded at rest; gathered once in forward and kept until backward has used
    them. Both compile to the same traces: :func:`shardtrace.no_sync` decides whether accumulated gradients are whole or
    sharded.
    ZERO3 (PyTorch's FULL_SHARD): sharded at rest; freed after use in forward and gathered again in backward.
    HYBRID_ZERO2, HYBRID_ZERO3 (PyTorch's HYBRID_SHARD): the same over the inner dimension of a mesh. The outer
    dimension replicates the shards and all-reduces their gradients.
    ZERO3_SECONDARY: ZeRO-3 over all ranks of a mesh, except that backward gathers over its inner dimension only, from a
    second shard that forward keeps there (hpZ of ZeRO++, Wang et al., 2023).
    OWNER: each tensor is whole on one rank, which broadcasts it in forward and again in backward, and receives its
    gradient.
    """

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    HYBRID_ZERO2 = "hybrid_zero2"
    HYBRID_ZERO3 = "hybrid_zero3"
    ZERO3_SECONDARY = "zero3_secondary"
    OWNER = "owner"

    @property
    def needs_mesh(self) -> bool:
        """True if it needs a mesh of two dimensions."""
        return self.is_hybrid or self is ShardingStrategy.ZERO3_SECONDARY

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_ZERO2, ShardingStrategy.HYBRID_ZERO3)

    @property
    def replicates(self) -> bool:
        """True if several ranks hold the same values at rest."""
        return self.is_hybrid or self is ShardingStrategy.DDP

    @property
    def regathers(self) -> bool:
        """True if parameters are freed after forward and gathered again in backward."""
        kept = (ShardingStrategy.DDP, ShardingStrategy.ZERO1, ShardingStrategy.ZERO2, ShardingStrategy.HYBRID_ZERO2)
        return self not in kept

    @property
    def placement(self) -> Placement:
        special = {ShardingStrategy.DDP: Placement.REPLICATE, ShardingStrategy.OWNER: Placement.OWNER}
        return special.get(self, Placement.SHARD)


Pattern = str | Callable[[str, nn.Parameter], bool]  # of parameters: by name, or a predicate on name and parameter
Names = Mapping[str, Sequence[str]]  # all names of tied parameters, by the first
Rules = tuple[tuple[Pattern, ShardingStrategy], ...]  # the first that matches counts

_ALIASES = {
    **{strategy.value: strategy for strategy in ShardingStrategy},
    "no_shard": ShardingStrategy.DDP,
    "shard_grad_op": ShardingStrategy.ZERO2,
    "shard_grad": ShardingStrategy.ZERO2,
    "full_shard": ShardingStrategy.ZERO3,
    "hybrid_shard": ShardingStrategy.HYBRID_ZERO3,
    "hybrid_shard_zero2": ShardingStrategy.HYBRID_ZERO2,
}

BUCKETING_STRATEGIES = ("auto", "none", "layer", "block", "model")


def parse_sharding_strategy(value: Any) -> ShardingStrategy:
    """Accepts members, their names in any case, and the equivalent members of Thunder's and PyTorch's enums.

    Raises ValueError that lists the names.
    """
    if isinstance(value, ShardingStrategy):
        return value
    name = value.name if isinstance(value, Enum) else value
    found = _ALIASES.get(name.lower().strip("_")) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(repr(alias) for alias in _ALIASES)
        raise ValueError(f"unknown sharding_strategy {value!r}: choose one of {known}")
    return found


def parse_rules(value: Any) -> Rules:
    """Accepts one strategy for all parameters, or a mapping of name patterns or predicates to strategies."""
    if not isinstance(value, Mapping):
        return (("*", parse_sharding_strategy(value)),)
    if not value or not all(isinstance(pattern, str) or callable(pattern) for pattern in value):
        raise ValueError(
            f"sharding_strategy={value!r}: a mapping is of patterns such as 'embed.*', or predicates on "
            "(name, parameter), to strategies"
        )
    return tuple((pattern, parse_sharding_strategy(strategy)) for pattern, strategy in value.items())


def assign(
    rules: Rules, parameters: Mapping[str, nn.Parameter], names: Names = MappingProxyType({})
) -> dict[str, ShardingStrategy]:
    """The strategy of the first pattern that matches any of a parameter's names, by its first name, or of the first
    predicate on that one. The parameters are whole. ``names`` are those of parameters that have several.

    Raises ValueError that names the patterns that match nothing, a parameter that no pattern matches, or one whose
    names match patterns of different strategies.
    """
    found: dict[str, ShardingStrategy] = {}
    unused = [pattern for pattern, _ in rules]
    for name, parameter in parameters.items():
        every = names.get(name, (name,))
        matches = partial(_matches, parameter=parameter, first=name)
        matching = [(p, strategy) for p, strategy in rules if any(matches(p, n) for n in every)]
        refuse_conflict("sharding_strategy", every, rules, matches)
        if not matching:
            raise ValueError(f"no pattern of sharding_strategy matches parameter {name!r}: add '*' as the last one")
        unused = [pattern for pattern in unused if all(pattern != matched for matched, _ in matching)]
        found[name] = matching[0][1]
    if unused and (found or unused != ["*"]):
        patterns = ", ".join(repr(p) if isinstance(p, str) else f"the predicate {_name(p)}" for p in unused)
        raise ValueError(f"no parameter matches {patterns} of sharding_strategy; there are: {_some(found)}")
    return found


def refuse_conflict(
    option: str, names: Sequence[str], rules: Iterable[tuple[Any, Any]], matches: Callable[[Any, str], bool]
) -> None:
    """Raises ValueError if two names of a tied parameter match patterns, other than "*", of different values."""
    rules = [rule for rule in rules if rule[0] != "*"]
    firsts = {name: next((rule for rule in rules if matches(rule[0], name)), None) for name in names}
    found = [(name, rule) for name, rule in firsts.items() if rule is not None]
    for name, (pattern, value) in found[1:]:
        first, (other, chosen) = found[0]
        if value != chosen:
            raise ValueError(
                f"{option}: {first!r} and {name!r} are one tied parameter, and the patterns {other!r} and {pattern!r} "
                f"choose differently for it: list both names first, with one choice"
            )


def _matches(pattern: Pattern, name: str, parameter: nn.Parameter, first: str) -> bool:
    """Predicates see the ``first`` name of a parameter only, as in ``split_parameters``."""
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    return name == first and bool(pattern(name, parameter))


def _name(predicate: Callable[..., Any]) -> str:
    return getattr(predicate, "__qualname__", type(predicate).__name__)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def parse_bucketing_strategy(value: Any) -> str | float:
    """One of ``BUCKETING_STRATEGIES`` in any case (or an enum member of that name), or a positive size in MB."""
    name = value.name if isinstance(value, Enum) else value
    if isinstance(name, str) and name.lower() in BUCKETING_STRATEGIES:
        return name.lower()
    if isinstance(name, (int, float)) and not isinstance(name, bool) and name > 0:
        return float(name)
    known = ", ".join(repr(s) for s in BUCKETING_STRATEGIES)
    raise ValueError(
        f"unknown bucketing_strategy {value!r}: choose one of {known}, a size in MB greater than 0, "
        "the class of a block (or several), or one of torch's auto_wrap policies"
    )
