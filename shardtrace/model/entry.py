"""A sharded parameter, and what becomes of it if the script replaces or converts it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from passes.compat.jit import set_traced_device, traced_device
from passes.plan import Shape, Wire
from shardtrace.model.home import Home, shard
from shardtrace.model.materialize import replace_data
from shardtrace.model.places import Owner
from shardtrace.options.strategy import ShardingStrategy

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

PlanKey = tuple[ShardingStrategy, MixedPrecisionPolicy | None, Wire | None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Entry:
    """One sharded parameter: the same ``nn.Parameter`` object as before sharding, now holding this rank's shard.

    ``owners`` are all pairs (module, attribute) that hold it: more than one if it is tied. ``stand_in`` is a meta
    tensor of the full shape, in the dtype of its use, which Thunder traces in place of the parameter. ``rest_device``
    is the device of the shard: that of its use, the host's, or meta if the model never runs.
    """

    name: str
    full_shape: Shape
    layer: str
    block: str | None
    shard: nn.Parameter
    shard_shape: Shape
    rest_device: torch.device
    dtype: torch.dtype
    strategy: ShardingStrategy
    home: Home
    stand_in: nn.Parameter
    owners: tuple[Owner, ...]
    precision: MixedPrecisionPolicy | None
    gather: Wire | None = None

    @property
    def plan_key(self) -> PlanKey:
        """Equal for parameters that have one plan."""
        return self.strategy, self.precision, self.gather

    @property
    def device(self) -> torch.device:
        """The device on which the parameter is used."""
        return traced_device(self.stand_in)

    def adopted(self) -> Entry:
        """The entry of what the modules hold now; this one if nothing has changed.

        A parameter may have been converted to another dtype, or replaced by one with the values of this rank's shard,
        or with whole values, of which each rank takes its part. Raises RuntimeError if it is elsewhere or of another
        shape.
        """
        held = [module._parameters.get(attribute) for _, module, attribute in self.owners]
        new = held[0]
        if not isinstance(new, nn.Parameter) or isinstance(new, DTensor) or any(p is not new for p in held):
            by = "in one of its places only" if any(p is not new for p in held) else f"by a {type(new).__name__}"
            raise RuntimeError(
                f"parameter {self.name!r} was replaced after fsdp() {by}: change its values in place. What puts other "
                "tensors there (functional_call, prune, parametrizations) works inside shardtrace.full_params, or "
                "before fsdp()"
            )
        if tuple(new.shape) == self.full_shape != self.shard_shape and new is not self.shard:
            replace_data(new, shard(new, self.home))
        for what, now, then in (
            ("device", new.device, self.rest_device),
            ("shape of the shard", tuple(new.shape), self.shard_shape),
        ):
            if now != then:
                raise RuntimeError(
                    f"the {what} of parameter {self.name!r} was {then} when fsdp() sharded it and is {now} now: "
                    "move or resize the model before fsdp()"
                )
        if new is self.shard and new.dtype == self.dtype:
            return self
        used = self.precision.param_dtype if self.precision is not None and new.is_floating_point() else None
        stand_in = nn.Parameter(torch.empty_like(self.stand_in, dtype=used or new.dtype), new.requires_grad)
        set_traced_device(stand_in, self.device)
        return replace(self, shard=new, dtype=new.dtype, stand_in=stand_in)
