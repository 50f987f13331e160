"""The values of ``gather_dtype`` and ``reduce_wire``, and the parameters that they choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

from passes.comm.packing import ROUNDED, SMALLEST
from passes.comm.quantize import FP8, INT4, INT8
from passes.comm.quantized import gather_wire, reduction_wire
from passes.plan import Placement, Wire, shard_shape
from shardtrace.options.strategy import Names, ShardingStrategy, refuse_conflict
from shardtrace.options.values import parse_precision

import torch
from thunder.core.dtypes import to_dtype
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

GATHERS = {"int8": INT8, "fp8": FP8, "float8_e4m3fn": FP8}
REDUCTIONS = {"int8": INT8, "int4": INT4}

WireRules = tuple[tuple[str, Wire | None], ...]  # patterns of names; the first that matches counts


def parse_gather_dtype(value: Any) -> WireRules:
    """Accepts "int8", "fp8", their torch dtypes, a :class:`passes.Wire`, None, or a mapping of name patterns to these.

    Raises ValueError that lists the names.
    """
    known: dict[str, Wire] = {}
    if not isinstance(value, Mapping):
        wire = _gather(value, known)
        return (("*", wire),) if wire is not None else ()
    if not value or not all(isinstance(pattern, str) for pattern in value):
        raise ValueError(f"gather_dtype={value!r}: a mapping is of patterns such as 'h.*' to dtypes")
    return tuple((pattern, _gather(dtype, known)) for pattern, dtype in value.items())


def _gather(value: Any, known: dict[str, Wire]) -> Wire | None:
    if value is None:
        return None
    if isinstance(value, Wire):
        if value.reduces:
            raise ValueError(f"gather_dtype is a wire that carries gradients: pass reduce_wire={value.name!r}")
        return value
    name = str(value).removeprefix("torch.").lower() if isinstance(value, (str, torch.dtype)) else ""
    if name not in GATHERS:
        raise ValueError(
            f"unknown gather_dtype {value!r}: choose 'int8' or 'fp8', or pass a passes.Wire, or a mapping of name "
            "patterns to these; mp_policy='bf16' gathers in bf16"
        )
    format = GATHERS[name]
    return known.setdefault(format.name, gather_wire(format))


def parse_reduce_wire(value: Any, error_feedback: Any, precision: MixedPrecisionPolicy | None = None) -> Wire | None:
    """Accepts "int8", "int4" or None.

    Raises ValueError that lists the names, or that says why there can be no error feedback.
    """
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback must be True or False, not {error_feedback!r}")
    if value is None:
        if error_feedback:
            raise ValueError("error_feedback=True has no rounding to make up for: pass reduce_wire='int8' or 'int4'")
        return None
    name = str(value).removeprefix("torch.").lower() if isinstance(value, (str, torch.dtype)) else ""
    if name not in REDUCTIONS:
        known = ", ".join(map(repr, REDUCTIONS))
        raise ValueError(f"unknown reduce_wire {value!r}: choose one of {known}; bf16 is a reduce_dtype of mp_policy")
    if error_feedback and precision is not None and torch.float16 in (precision.param_dtype, precision.reduce_dtype):
        raise ValueError(
            "error_feedback=True keeps errors from step to step, and fp16 scales the gradients of each step by another "
            "number: use bf16, or leave error_feedback out"
        )
    return reduction_wire(REDUCTIONS[name], error_feedback=error_feedback)


class Allowed(NamedTuple):
    """The wires that a plan may choose, by the values of ``gather_dtype`` and ``reduce_wire``."""

    gathers: Mapping[str, Wire] = MappingProxyType({})
    reductions: Mapping[str, Wire] = MappingProxyType({})
    error_feedback: bool = False

    @property
    def values(self) -> dict[str, list[str]]:
        """The names, by option."""
        named = {"gather_dtype": list(self.gathers), "reduce_wire": list(self.reductions)}
        return {option: names for option, names in named.items() if names}


NO_WIRES = Allowed()


def parse_allowed(allowed: Any, fixed: Mapping[str, Any]) -> Allowed:
    """The options that a plan may choose: a mapping of "gather_dtype" and "reduce_wire" to names, or to one name.

    Raises ValueError for another option or name, an option that is ``fixed`` as well, or errors that cannot be kept.
    """
    if not isinstance(allowed, Mapping) or not allowed.keys() <= {"gather_dtype", "reduce_wire"}:
        raise ValueError(
            f"allowed={allowed!r}: a plan may choose gather_dtype and reduce_wire, as in "
            '{"gather_dtype": ["int8", "fp8"], "reduce_wire": "int8"}; other options belong to fixed'
        )
    if both := [name for name in allowed if fixed.get(name) is not None]:
        raise ValueError(f"{both[0]} is fixed and allowed: leave it out of one of them")
    names = {name: [v] if isinstance(v, (str, torch.dtype)) else list(v) for name, v in allowed.items()}
    feedback, known = fixed.get("error_feedback", False), dict[str, Wire]()
    precision = parse_precision(fixed.get("mp_policy"))
    gathers = [_gather(value, known) for value in names.get("gather_dtype", ())]
    reductions = [parse_reduce_wire(value, feedback, precision) for value in names.get("reduce_wire", ())]
    if None in gathers or None in reductions:
        raise ValueError(f"allowed={allowed!r}: None need not be there, because exact steps are always tried")
    return Allowed({w.name: w for w in gathers if w}, {w.name: w for w in reductions if w}, feedback)


class Travelling(NamedTuple):
    """A parameter that may travel: its values, its strategy, and the ranks over which it is spread and reduced."""

    parameter: nn.Parameter
    strategy: ShardingStrategy
    shards: int
    ranks: int


def assign_gathers(
    rules: WireRules, parameters: Mapping[str, Travelling], names: Names = MappingProxyType({})
) -> dict[str, Wire | None]:
    """The wire of the first pattern that matches any of a parameter's names, by its first name; None for no wire.
    ``names`` are those of parameters that have several.

    Raises ValueError that names a pattern that matches nothing, or nothing that a wire can gather, or a parameter whose
    names match patterns of different wires.
    """
    chosen: dict[str, list[str]] = {pattern: [] for pattern, _ in rules}
    found: dict[str, Wire | None] = {}
    for name, p in parameters.items():
        every = names.get(name, (name,))
        matching = [(pattern, wire) for pattern, wire in rules if any(fnmatchcase(n, pattern) for n in every)]
        refuse_conflict("gather_dtype", every, rules, lambda pattern, n: fnmatchcase(n, pattern))
        gathered = p.shards > 1 and p.strategy.placement is not Placement.REPLICATE
        found[name] = matching[0][1] if matching and gathered else None
        for pattern, _ in matching:
            chosen[pattern].append(name)
    for pattern, wire in rules:
        if not chosen[pattern]:
            if pattern == "*":
                continue
            raise ValueError(f"no parameter matches {pattern!r} of gather_dtype; there are: {', '.join(parameters)}")
        if wire is not None:
            own = wire.name not in {format.name for format in GATHERS.values()}
            _refuse(
                f"gather_dtype={wire.name or 'Wire'!r}" + ("" if pattern == "*" else f" for {pattern!r}"),
                {name: parameters[name] for name in chosen[pattern]},
                lambda p, own=own: _why_not_gathered(p, own=own),  # type: ignore[misc]
            )
    return found


def refuse_reductions(wire: Wire | None, parameters: Mapping[str, Travelling], *, error_feedback: bool) -> None:
    """Raises ValueError if a wire of gradients has nothing to do, or may keep no errors."""
    if wire is None:
        return
    _refuse(f"reduce_wire={wire.name!r}", parameters, _why_not_reduced)
    for name, p in parameters.items():
        if error_feedback and p.parameter.dtype == torch.float16:
            raise ValueError(
                f"error_feedback=True keeps errors from step to step, and the gradient of parameter {name!r} is fp16, "
                "which is scaled by another number in each step: leave error_feedback out"
            )


def _refuse(what: str, parameters: Mapping[str, Travelling], why_not: Callable[[Travelling], str]) -> None:
    """Raises ValueError if there is a reason ``why_not`` for each of the parameters."""
    reasons = {name: why_not(p) for name, p in parameters.items()}
    if reasons and all(reasons.values()):
        name, reason = next(iter(reasons.items()))
        rest = f", and none of {len(reasons)} parameters can be rounded" if len(reasons) > 1 else ""
        raise ValueError(f"{what} changes nothing: {name!r} {reason}{rest}; leave it out")


def _why_not_gathered(p: Travelling, *, own: bool) -> str:
    if p.strategy.placement is Placement.REPLICATE:
        return f"is whole on every rank ({p.strategy.value}) and not gathered"
    if p.shards == 1:
        return "is on one rank and not gathered"
    return "" if own else _why_not_rounded(p.parameter, p.parameter.numel(), p.shards, p.strategy)


def _why_not_reduced(p: Travelling) -> str:
    if p.ranks == 1:
        return "is on one rank, which reduces nothing"
    if not p.parameter.requires_grad:
        return "is frozen and has no gradient"
    return _why_not_rounded(p.parameter, p.parameter.numel(), p.shards if p.shards > 1 else p.ranks, p.strategy)


def _why_not_rounded(parameter: nn.Parameter, numel: int, ranks: int, strategy: ShardingStrategy) -> str:
    if to_dtype(parameter.dtype) not in ROUNDED:
        return f"is {parameter.dtype} and travels as it is"
    if strategy.placement is Placement.SHARD:
        rows, *rest = shard_shape(tuple(parameter.shape), ranks)
        numel = rows * torch.Size(rest).numel()
    elif strategy.placement is Placement.REPLICATE:
        numel = -(-numel // ranks)
    if numel < SMALLEST:
        return f"has {numel} elements on a rank, fewer than {SMALLEST}, and travels as it is"
    return ""
