"""What is to be planned, and how it is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from shardtrace.inspector.fake import compile_sharded, parse_arguments
from shardtrace.options.planned import mesh_dim_names
from shardtrace.options.policies import grouped, parse_context
from shardtrace.options.strategy import ShardingStrategy, parse_rules, parse_sharding_strategy
from shardtrace.options.wires import NO_WIRES, Allowed
from shardtrace.planner.compose import Compiled, compiled
from shardtrace.planner.estimate import Setting

import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.utils._pytree import tree_leaves

STRATEGIES = {  # of each family: what is kept gathered, and what is gathered again
    "zero": ("zero2", "zero3"),
    "hybrid": ("hybrid_zero2", "hybrid_zero3"),
    "secondary": ("zero3_secondary", "zero3_secondary"),  # what backward gathers again is in the node: nothing is kept
    "ddp": ("ddp", "ddp"),
}
OVER_MACHINES = ("hybrid", "secondary")  # which save only communication between machines


class Task(NamedTuple):
    """What is to be planned: a model, a rank's inputs, the ranks, options of ``fsdp`` that are ``fixed``, the wires
    that are ``allowed``, and the number of ranks over which each sequence is split."""

    model: nn.Module
    inputs: Any
    world_size: int
    mesh_shape: tuple[int, int] | None
    setting: Setting
    fixed: Mapping[str, Any]
    jit_options: Mapping[str, Any]
    allowed: Allowed = NO_WIRES
    context: int = 1

    def strategies(self) -> dict[str, Any]:
        """The families to try, with the strategy that each is compiled with."""
        pinned = self.fixed.get("sharding_strategy")
        if pinned is not None:
            for _, rule in parse_rules(pinned):
                self._check_mesh(rule)
            if isinstance(pinned, Mapping):
                return {"given": pinned}
            strategy = parse_sharding_strategy(pinned).value
            return {next((kind for kind, own in STRATEGIES.items() if strategy in own), "given"): strategy}
        found = {"zero": "zero3"}
        if self.context == 1 and min(self.mesh() or (1, 1)) > 1:  # otherwise it is ddp or zero
            found |= {kind: STRATEGIES[kind][1] for kind in OVER_MACHINES}
        return found if self.fixed.get("gather_dtype") is not None else found | {"ddp": "ddp"}  # which gathers nothing

    def _check_mesh(self, strategy: ShardingStrategy) -> None:
        if strategy.needs_mesh and self.context > 1:
            raise ValueError(
                f'sharding_strategy="{strategy.value}" cannot be combined with context={self.context}, which shards '
                'parameters over all ranks: choose "zero3", "zero2" or "ddp"'
            )
        if strategy.needs_mesh and self.mesh() is None:
            raise ValueError(
                f'sharding_strategy="{strategy.value}" needs mesh_shape=(replicas, shards): {self.world_size} ranks do '
                f"not fill several machines of {self.setting.cost.node_ranks}"
            )

    def mesh(self) -> tuple[int, int] | None:
        """(replicas, shards) of a strategy over machines: as given, or one replica for each machine."""
        inside = self.setting.cost.node_ranks
        if self.mesh_shape is not None:
            return self.mesh_shape
        several = 1 < inside < self.world_size and self.world_size % inside == 0
        return (self.world_size // inside, inside) if several else None

    def mesh_of(self, strategy: Any) -> tuple[int, int] | None:
        """The mesh of a strategy: (replicas, shards), or (data, context); None if it needs none."""
        if self.context > 1:
            return self.world_size // self.context, self.context
        return self.mesh() if any(rule.needs_mesh for _, rule in parse_rules(strategy)) else None

    @property
    def positions(self) -> int:
        """The length of the inputs' sequences."""
        context = parse_context(self.fixed.get("context_parallel", "context"))
        dim, leaves = context.sequence_dim if context is not None else 1, tree_leaves(self.inputs)
        return next((t.shape[dim] for t in leaves if isinstance(t, torch.Tensor) and t.dim() > dim), 0)

    @property
    def trained(self) -> int:
        """The bytes of whole parameters that are trained."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    @property
    def at_rest(self) -> float:
        """The bytes of whole parameters, their gradients and their optimizer's state."""
        whole = sum(p.nbytes for p in self.model.parameters())
        return whole + self.trained * (1 + self.setting.optimizer.state / 4)

    def options(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Options of ``fsdp``: those ``chosen``, the fixed ones, and the buckets that all plans have."""
        split = {"context_parallel": self.fixed.get("context_parallel", "context")} if self.context > 1 else {}
        return {"bucketing_strategy": "block", **self.fixed, **split, **chosen}

    def compile(self, **chosen: Any) -> Compiled:
        """A step with options of ``fsdp`` in place of or beside the fixed ones. Call it as a fake rank."""
        return compiled(self.compile_function(chosen))

    def compile_function(self, chosen: Mapping[str, Any]) -> Any:
        """The jitted model, compiled with options of ``fsdp`` in place of or beside the fixed ones."""
        options = self.options(chosen) | {"cost_model": self.setting.cost}
        if (context := parse_context(options.get("context_parallel"))) is not None:
            options["context_parallel"] = replace(context, arguments="whole")  # as the inputs are
        options["device"] = "cpu" if self.setting.hardware.name == "cpu" else "cuda"
        if shape := self.mesh_of(options["sharding_strategy"]):
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=mesh_dim_names(options))
        arguments = parse_arguments(self.inputs)
        return compile_sharded(self.model, arguments, fsdp_options=grouped(options), jit_options=self.jit_options)
