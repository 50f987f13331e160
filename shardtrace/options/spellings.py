"""Names that other libraries use for the arguments of ``fsdp``, and fields that are no arguments of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardtrace.options.policies import HOMES, POLICIES

DEFAULTS = {"sharding_strategy": "zero3", "bucketing_strategy": "auto", "mp_policy": None}


def _same(value: Any) -> Any:
    return value


def _resharded(value: Any) -> str:
    """The strategy for FSDP2's ``reshard_after_forward``."""
    if ranks_after_forward(value) is not None:
        return "zero3_secondary"
    if not isinstance(value, bool):
        raise ValueError(
            f"reshard_after_forward={value!r}: pass True (zero3), False (zero2), or the number of ranks over which "
            "parameters are sharded between forward and backward"
        )
    return "zero3" if value else "zero2"


def _wrapped(value: Any) -> str | None:
    """One bucket, unless ``auto_wrap`` is True: it means the default, or the class or policy beside it."""
    return None if value is True else "model"


SPELLINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # our argument, and our value for theirs
    "shard_strat": ("sharding_strategy", _same),
    "reshard_after_forward": ("sharding_strategy", _resharded),
    "mp": ("mp_policy", _same),
    "auto_wrap_policy": ("bucketing_strategy", _same),
    "TransformerBlock": ("bucketing_strategy", _same),
    "auto_wrap": ("bucketing_strategy", _wrapped),
    "bucket_size_in_mb": ("bucketing_strategy", _same),
    "bucket_cap_mb": ("bucketing_strategy", _same),
}
REFUSED = {  # of FSDP2
    "shard_placement_fn": "parameters are sharded along dim 0, or are whole on one rank: pass sharding_strategy "
    '{"pattern": "owner", "*": "zero3"} for those that must stay whole',
    "fully_shard": "pass one model: fsdp() finds its blocks",
    "dp_mesh_dims": "pass the mesh of the ranks that share the model, as in mesh=mesh['data']",
}
FIELDS = {name: name for name in HOMES} | {"check_steps": "steps", "check_recording": "recording"}


def ranks_after_forward(value: Any) -> int | None:
    """The number of ranks in FSDP2's ``reshard_after_forward=N``; None if the ``value`` is no such number."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else None


def canonical(arguments: Mapping[str, Any], spelling: Mapping[str, Any]) -> dict[str, Any]:
    """The ``arguments`` of ``fsdp``, some of which have another name in ``spelling``.

    Raises:
        TypeError: for an unknown name, for the field of a policy, or for a policy of another class.
        ValueError: if two spellings of one argument are given.
    """
    found = dict(arguments)
    for name, policy in POLICIES.items():
        if not isinstance(found[name], policy):
            raise TypeError(f"{name} must be a shardtrace.{policy.__name__}, not {type(found[name]).__name__}")
    if "compile" in spelling:
        spelling = dict(spelling)
        found["compile_policy"] = replace(found["compile_policy"], jit=spelling.pop("compile"))
    said = {name: name for name, default in DEFAULTS.items() if found[name] != default}
    for name, value in spelling.items():
        if name in FIELDS:
            raise TypeError(_where(name, value))
        if name in REFUSED:
            raise TypeError(f"fsdp() has no {name}: {REFUSED[name]}")
        if name not in SPELLINGS:
            raise TypeError(f"fsdp() got an unexpected keyword argument {name!r}")
        ours, convert = SPELLINGS[name]
        if value is None or (value := convert(value)) is None:
            continue
        if ours in said:
            raise ValueError(f"{said[ours]} and {name} both say what {ours} is to be: pass one of them")
        said[ours], found[ours] = name, value
    return found


def _where(name: str, value: Any) -> str:
    argument, shown = HOMES[FIELDS[name]], repr(value) if isinstance(value, str | float | int | None) else "..."
    policy = POLICIES[argument].__name__
    return f"{name} is a field of {policy}: pass {argument}={policy}({FIELDS[name]}={shown})"
