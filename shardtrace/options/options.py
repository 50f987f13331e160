"""The arguments of ``fsdp``, checked and in their canonical form."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from passes.plan import Wire
from shardtrace.options.policies import (
    HOMES,
    POLICIES,
    Checks,
    CommPolicy,
    CompilePolicy,
    ContextParallel,
    InitPolicy,
    MemoryBudget,
    TensorParallel,
    WireRules,
    parse_context,
    parse_gather_dtype,
    parse_memory,
    parse_precision,
    parse_reduce_wire,
    parse_tensor,
)
from shardtrace.options.strategy import Checkpointed, Rules, Wrap, is_wrap, parse_bucketing_strategy, parse_rules

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

# ---- names of other libraries ----


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
            near = get_close_matches(name, [*arguments, *SPELLINGS, "plan"], 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"fsdp() got an unexpected keyword argument {name!r}{meant}")
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


# ---- options ----


# What only this rank has, and choices of modules and parameters: functions among them print their addresses. Ranks
# compare what was chosen instead.
NOT_COMPARED = ("device", "weights", "param_init_fn", "gather_dtype", "reduce_wire", "repeated_blocks", "eager", "jit")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked arguments of ``fsdp`` that do not depend on a model or on ranks."""

    rules: Rules
    bucketing: str | float
    wrap: Wrap | None  # chooses the modules that are buckets, in place of "block"
    precision: MixedPrecisionPolicy | None
    offload: CPUOffloadPolicy | None
    checkpointing: Checkpointed
    gathers: WireRules
    reduction: Wire | None
    init: InitPolicy
    comm: CommPolicy
    compile: CompilePolicy
    checks: Checks
    context: ContextParallel | None = None
    tensor: TensorParallel | None = None
    memory: MemoryBudget | None = None
    nodes_of: int | None = None  # the ranks of a node, if the mesh of second shards is to be made of them

    def __repr__(self) -> str:
        """What must be equal on all ranks, which compare it."""
        shown: dict[str, Any] = {"bucketing": self.bucketing, "precision": self.precision, "offload": self.offload}
        shown |= {"context_parallel": self.context} if self.context is not None else {}
        shown |= {"tensor_parallel": self.tensor} if self.tensor is not None else {}
        shown |= {"memory": self.memory.bytes} if self.memory is not None else {}
        for policy in (self.init, self.comm, self.compile, self.checks):
            shown |= {name: value for name, value in vars(policy).items() if name not in NOT_COMPARED}
        shown["reduce_wire"] = self.reduction.name if self.reduction is not None else None
        return f"Options({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def parse_options(arguments: Mapping[str, Any], spelling: Mapping[str, Any]) -> Options:
    """Checks the arguments of :func:`shardtrace.fsdp`, of which some have the ``spelling`` of other libraries.

    Raises ValueError or TypeError that names the wrong argument and the values that it accepts.
    """
    given = canonical(arguments, spelling)
    comm, checks = given["comm_policy"], given["checks"]
    if checks.steps is None and os.environ.get("SHARDTRACE_CHECK_STEPS") == "1":
        checks = replace(checks, steps=True)
    if checks.prove is None and os.environ.get("SHARDTRACE_PROVE") == "1":
        checks = replace(checks, prove=True)
    precision, bucketing = parse_precision(given["mp_policy"]), given["bucketing_strategy"]
    wrap = bucketing if is_wrap(bucketing) else None
    return Options(
        rules=parse_rules(given["sharding_strategy"]),
        bucketing="block" if wrap is not None else parse_bucketing_strategy(bucketing),
        wrap=wrap,
        precision=precision,
        offload=_parse_offload(given["offload_policy"]),
        checkpointing=given["activation_checkpointing"],
        gathers=parse_gather_dtype(comm.gather_dtype),
        reduction=parse_reduce_wire(comm.reduce_wire, comm.error_feedback, precision),
        init=given["init_policy"],
        comm=comm,
        compile=given["compile_policy"],
        checks=checks,
        context=parse_context(given["context_parallel"]),
        tensor=parse_tensor(given["tensor_parallel"]),
        memory=parse_memory(given.get("memory")),
        nodes_of=ranks_after_forward(spelling.get("reshard_after_forward")),
    )


def _parse_offload(policy: Any) -> CPUOffloadPolicy | None:
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise TypeError(
            "offload_policy must be torch.distributed.fsdp.CPUOffloadPolicy(), or None, "
            f"not {policy if isinstance(policy, bool) else type(policy).__name__}"
        )
    return policy if isinstance(policy, CPUOffloadPolicy) else None
