"""The arguments of ``fsdp``, checked and in their canonical form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from passes.plan import Wire
from shardtrace.options.blocks import Checkpointed, Wrap, is_wrap
from shardtrace.options.policies import Checks, CommPolicy, CompilePolicy, ContextParallel, InitPolicy, parse_context
from shardtrace.options.spellings import canonical, ranks_after_forward
from shardtrace.options.strategy import Rules, parse_bucketing_strategy, parse_rules
from shardtrace.options.values import parse_precision
from shardtrace.options.wires import WireRules, parse_gather_dtype, parse_reduce_wire

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

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
    nodes_of: int | None = None  # the ranks of a node, if the mesh of second shards is to be made of them

    def __repr__(self) -> str:
        """What must be equal on all ranks, which compare it."""
        shown: dict[str, Any] = {"bucketing": self.bucketing, "precision": self.precision, "offload": self.offload}
        shown |= {"context_parallel": self.context} if self.context is not None else {}
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
        nodes_of=ranks_after_forward(spelling.get("reshard_after_forward")),
    )


def _parse_offload(policy: Any) -> CPUOffloadPolicy | None:
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise TypeError(
            "offload_policy must be torch.distributed.fsdp.CPUOffloadPolicy(), or None, "
            f"not {policy if isinstance(policy, bool) else type(policy).__name__}"
        )
    return policy if isinstance(policy, CPUOffloadPolicy) else None
