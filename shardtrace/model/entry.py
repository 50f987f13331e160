"""A sharded parameter, and what becomes of it if the script replaces or converts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import ReferenceType, ref

from passes.compat.jit import set_traced_device, traced_device
from passes.plan import Placement, Shape, Wire
from shardtrace.model.home import Home, shard, unshard
from shardtrace.model.materialize import replace_data
from shardtrace.model.places import Owner
from shardtrace.model.shards import as_parameter, distributed, forward, local_rows, own_rows
from shardtrace.options.strategy import ShardingStrategy

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

PlanKey = tuple[ShardingStrategy, Placement, MixedPrecisionPolicy | None, Wire | None]


def was_replaced(name: str, by: str) -> RuntimeError:
    return RuntimeError(
        f"parameter {name!r} was replaced after fsdp() {by}: change its values in place. What puts other tensors there "
        "(functional_call, prune, parametrizations) works inside shardtrace.full_params, or before fsdp()"
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Entry:
    """One sharded parameter, and the ``rows`` of it that this rank holds, padding included, which compiled steps read.
    ``local`` are those of the DTensor, without the padding; None if it is a plain tensor. ``before`` are earlier
    parameters that stand for it.

    ``owners`` are all pairs (module, attribute) that hold it: more than one if it is tied. ``stand_in`` is a meta
    tensor of the full shape, in the dtype of its use, which Thunder traces in place of the parameter. ``rest_device``
    is the device of the rows: that of their use, the host's, or meta if the model never runs.
    """

    name: str
    full_shape: Shape
    layer: str
    block: str | None
    shard: nn.Parameter
    rows: torch.Tensor
    shard_shape: Shape
    rest_device: torch.device
    dtype: torch.dtype
    strategy: ShardingStrategy
    home: Home
    stand_in: nn.Parameter
    owners: tuple[Owner, ...]
    precision: MixedPrecisionPolicy | None
    gather: Wire | None = None
    local: torch.Tensor | None = None
    before: tuple[ReferenceType[nn.Parameter], ...] = ()

    @property
    def plan_key(self) -> PlanKey:
        """Equal for parameters that have one plan."""
        return self.strategy, self.home.placement, self.precision, self.gather

    @property
    def device(self) -> torch.device:
        """The device on which the parameter is used."""
        return traced_device(self.stand_in)

    def adopted(self) -> Entry:
        """The entry of what the modules hold now; this one if nothing has changed.

        A parameter may have been converted to another dtype, or replaced by one that is sharded alike, or by one with
        whole values, of which each rank takes its part. Raises RuntimeError if it is elsewhere or of another shape.
        """
        held = [module._parameters.get(attribute) for _, module, attribute in self.owners]
        new = held[0]
        if not isinstance(new, nn.Parameter) or any(p is not new for p in held):
            by = "in one of its places only" if any(p is not new for p in held) else f"by a {type(new).__name__}"
            raise was_replaced(self.name, by)
        if new is self.shard and (new.dtype, new.device) == (self.dtype, self.rest_device) and not self.has_moved:
            return self
        if new is self.shard and (new.dtype, new.device) == (self.dtype, self.rest_device) and self.local is not None:
            self.local.copy_(new._local_tensor)  # type: ignore[attr-defined]
            new._local_tensor = self.local  # type: ignore[attr-defined]
            return self
        whole = self.home.mesh is not None or (new is not self.shard and tuple(new.shape) == self.full_shape)
        expected = self.full_shape if whole else self.shard_shape
        for what, now, then in (("device", new.device, self.rest_device), ("shape", tuple(new.shape), expected)):
            if now != then:
                raise RuntimeError(
                    f"the {what} of parameter {self.name!r} was {then} when fsdp() sharded it and is {now} now: "
                    "move or resize the model before fsdp()"
                )
        rows = shard(new, self.home) if whole and not isinstance(new, DTensor) else self.rows_like(new)
        before = self.before
        if not isinstance(new, DTensor):
            before = () if self.home.mesh is None else (ref(new),)
            new = as_parameter(self.name, new, rows, self.full_shape, self.home)
            self._put(new)
        used = self.precision.param_dtype if self.precision is not None and new.is_floating_point() else None
        stand_in = nn.Parameter(torch.empty_like(self.stand_in, dtype=used or new.dtype), new.requires_grad)
        set_traced_device(stand_in, self.device)
        return replace(self, shard=new, rows=rows, local=None, dtype=new.dtype, stand_in=stand_in, before=before)

    @property
    def has_moved(self) -> bool:
        """Whether the parameter has left the memory of ``rows``, as by ``model.to(dtype)``."""
        return self.local is not None and self.shard._local_tensor is not self.local  # type: ignore[attr-defined]

    def on(self, rows: torch.Tensor) -> Entry:
        """The entry with the parameter on other memory, which has the same values."""
        if not isinstance(self.shard, DTensor):
            replace_data(self.shard, rows)
            return replace(self, rows=rows)
        self.shard._local_tensor = own_rows(rows, self.full_shape, self.home)
        return replace(self, rows=rows, local=self.shard._local_tensor)

    def rows_like(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's rows, with padding, of a tensor that is laid out like the parameter."""
        return local_rows(t, self.full_shape, self.home)

    def like(self, rows: torch.Tensor) -> torch.Tensor:
        """A DTensor on ``rows``, which are padded, that is laid out like the parameter."""
        local = own_rows(rows, self.full_shape, self.home)
        # without DTensor.__init__, which does nothing slowly
        return DTensor.__new__(DTensor, local, self.shard._spec, requires_grad=False)  # type: ignore[attr-defined]

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, laid out like the parameter."""
        return distributed(shard(whole, self.home), self.full_shape, self.home)

    def whole(self, t: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that is laid out like the parameter, on the device that computes. A collective."""
        return unshard(self.rows_like(t), self.full_shape, self.home)

    def unshard(self) -> Callable[[], torch.Tensor]:
        """Makes the parameter whole: puts another one into the modules, unless it is a plain tensor. A collective.
        Returns a function that undoes it, and returns the whole values of then."""
        whole, shard = self.whole(self.shard), self.shard
        if self.home.mesh is None:
            rows, grad, shard.grad = shard.data, shard.grad, None
            owned = vars(shard).pop("owned", None)
            replace_data(shard, whole)

            def restore() -> torch.Tensor:
                values, shard.grad = shard.data, None
                replace_data(shard, rows)
                shard.grad = grad
                vars(shard).update({"owned": owned} if owned else {})
                return values

            return restore

        new = nn.Parameter(whole, shard.requires_grad)
        new.__dict__.update(shard.__dict__)
        self._put(new)
        self._stands_for(new)

        def reshard() -> torch.Tensor:
            values = new.detach()
            shard.requires_grad_(new.requires_grad)
            forward(new, shard)
            self._put(shard)
            self._stands_for(shard)
            return values

        return reshard

    @property
    def earlier(self) -> list[nn.Parameter]:
        """Those of ``before`` that are still there."""
        return [old for reference in self.before if (old := reference()) is not None]

    def _stands_for(self, parameter: nn.Parameter) -> None:
        """Lets the parameters of before stand for this one."""
        for old in self.earlier:
            old.__dict__["now"] = parameter

    def _put(self, parameter: nn.Parameter) -> None:
        for _, module, attribute in self.owners:
            module._parameters[attribute] = parameter
