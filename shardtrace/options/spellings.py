"""Names that other libraries use for the arguments of ``fsdp``, for their users."""

from __future__ import annotations

from typing import Any

_OURS = {
    "shard_strat": "sharding_strategy",
    "reshard_after_forward": "sharding_strategy",
    "mp": "mp_policy",
    "auto_wrap_policy": "bucketing_strategy",
    "TransformerBlock": "bucketing_strategy",
    "auto_wrap": "bucketing_strategy",
    "bucket_size_in_mb": "bucketing_strategy",
    "bucket_cap_mb": "bucketing_strategy",
}
_RESHARD = {True: "zero3", False: "zero2"}
_DEFAULTS = {"sharding_strategy": "zero3", "bucketing_strategy": "auto", "mp_policy": None}


def _resharded(value: Any) -> str:
    """The strategy for FSDP2's ``reshard_after_forward``."""
    if not isinstance(value, bool):
        raise ValueError(
            f"reshard_after_forward={value!r}: pass True (zero3) or False (zero2). Parameters are not kept over "
            'fewer ranks after forward; sharding_strategy="hybrid_zero3" shards over fewer ranks all the time'
        )
    return _RESHARD[value]


def canonical(
    sharding_strategy: Any, bucketing_strategy: Any, mp_policy: Any, spelling: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """The three arguments, each from its own name or from another library's.

    Raises:
        TypeError: for an unknown name.
        ValueError: if two spellings of one argument are given.
    """
    values = {
        "sharding_strategy": sharding_strategy,
        "bucketing_strategy": bucketing_strategy,
        "mp_policy": mp_policy,
    }
    said = {name: name for name, value in values.items() if value is not _DEFAULTS[name] and value != _DEFAULTS[name]}
    if unknown := sorted(spelling.keys() - _OURS.keys()):
        raise TypeError(f"fsdp() got an unexpected keyword argument {unknown[0]!r}")
    spelling = {name: value for name, value in spelling.items() if value is not None}
    if spelling.get("auto_wrap") is True:  # it means the default, or the class or policy beside it
        del spelling["auto_wrap"]
    for name, value in spelling.items():
        ours = _OURS[name]
        if ours in said:
            raise ValueError(f"{said[ours]} and {name} both say what {ours} is to be: pass one of them")
        said[ours] = name
        if name == "reshard_after_forward":
            value = _resharded(value)
        values[ours] = "model" if name == "auto_wrap" else value
    return values["sharding_strategy"], values["bucketing_strategy"], values["mp_policy"]
