"""From whole parameters to this rank's shards: their owners, the home of each, and the move."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import ref

from passes.compat.jit import set_traced_device
from passes.plan import Placement, Wire
from shardtrace.model.choose import SEED_HINT, Chosen, Target, keeps_dtype, sample
from shardtrace.model.shards import (
    Entry,
    Home,
    Place,
    as_parameter,
    broadcast,
    has_meta,
    materialized,
    set_data,
    shard,
    unshard,
)
from shardtrace.options.options import Options
from shardtrace.options.policies import InitPolicy
from shardtrace.ranks.consensus import compare
from shardtrace.record.arguments import claim, is_absent, never_runs

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy


class Owned(NamedTuple):
    """A parameter that needs an owner, and the module that holds it."""

    name: str
    module: str
    bytes: int


def assign_owners(parameters: Iterable[Owned], ranks: int, evenness: float) -> dict[str, int]:
    """The owner rank of each parameter, by its name.

    Parameters that are kept together go, the largest first, to the rank that has the fewest bytes. No rank then has
    more than 4/3 of the optimum (Graham, 1969, "Bounds on multiprocessing timing anomalies").

    Args:
        evenness: 1 assigns each tensor by itself, 0 keeps the tensors of a module together. In between, a module is
            kept together if it has at most ``1 - evenness`` of a rank's even share of all bytes.
    """
    parameters = list(parameters)
    share = sum(p.bytes for p in parameters) / ranks
    modules: dict[str, list[Owned]] = {}
    for p in parameters:
        modules.setdefault(p.module, []).append(p)
    parts: list[list[Owned]] = []
    for members in modules.values():
        together = evenness == 0 or sum(p.bytes for p in members) <= (1 - evenness) * share
        parts += [members] if together else [[p] for p in members]
    load = [0] * ranks
    owners: dict[str, int] = {}
    for part in sorted(parts, key=lambda part: -sum(p.bytes for p in part)):  # stable: the same on every rank
        rank = load.index(min(load))
        load[rank] += sum(p.bytes for p in part)
        owners.update((p.name, rank) for p in part)
    return owners


def shard_parameters(
    model: nn.Module,
    chosen: Chosen,
    gathers: Mapping[str, Wire | None],
    target: Target,
    options: Options,
    *,
    given: Collection[int] = (),
) -> tuple[Entry, ...]:
    """Gives each parameter its shard, in place, and returns their entries: none if the model stays as it is. Tensors
    whose id is ``given`` get memory for the caller to fill.

    Raises RankMismatchError on every rank if the initial values of parameters differ.
    """
    group, init = target.groups.everyone, options.init
    homes = find_homes(chosen, target, evenness=init.evenness)
    cast = {p.name: None if any(keeps_dtype(o.module) for o in p.owners) else options.precision for p in chosen.places}
    dtypes = {p.name: p.parameter.dtype for p in chosen.places}
    stand_ins = {p.name: stand_in(p.parameter, target.device, cast[p.name]) for p in chosen.places}
    initialized = distribute(model, chosen.places, homes, group=group, device=target.device, init=init, given=given)
    if initialized:
        what = "the initial values of parameters"
        compare(group, what, initialized, timeout=options.checks.timeout, hint=SEED_HINT)
    unchanged = options.precision is None and options.comm.gradient_divide_factor in (None, 1)
    if group.size() == 1 and target.host is None and unchanged:
        return ()
    found = [p for p in chosen.places if stand_ins[p.name].numel()]
    rows = {p.name: p.parameter.detach() for p in found}
    shapes = {p.name: tuple(stand_ins[p.name].shape) for p in found}
    shards = {p.name: as_parameter(p.name, p.parameter, rows[p.name], shapes[p.name], homes[p.name]) for p in found}
    for p in found:
        for owner in p.owners:
            owner.module._parameters[owner.attribute] = shards[p.name]
    return tuple(
        Entry(
            name=p.name,
            full_shape=shapes[p.name],
            layer=p.layer,
            block=p.block,
            shard=shards[p.name],
            rows=rows[p.name],
            shard_shape=tuple(rows[p.name].shape),
            rest_device=rows[p.name].device,
            dtype=dtypes[p.name],
            strategy=chosen.strategies[p.name],
            home=homes[p.name],
            stand_in=stand_ins[p.name],
            owners=tuple(p.owners),
            precision=cast[p.name],
            gather=gathers[p.name],
            before=(ref(p.parameter),) if homes[p.name].mesh is not None else (),
        )
        for p in found
    )


def find_homes(chosen: Chosen, target: Target, *, evenness: float) -> dict[str, Home]:
    """The home of each parameter, by its name. With one rank to shard over it is that of DDP, or a single shard if
    it lives in host memory."""
    found, strategies, groups, host = chosen.places, chosen.strategies, target.groups, target.host
    owned = [
        Owned(p.name, p.layer, p.parameter.numel() * p.parameter.element_size())
        for p in found
        if strategies[p.name].placement is Placement.OWNER
    ]
    owners = assign_owners(owned, groups.everyone.size(), evenness)
    homes: dict[str, Home] = {}
    flat = groups.mesh if groups.mesh.ndim == 1 else DeviceMesh.from_group(groups.everyone, groups.mesh.device_type)
    for p in found:
        strategy = strategies[p.name]
        group = groups.inner if strategy.is_hybrid else groups.everyone
        placement, alone = strategy.placement, group.size() == 1
        if placement is Placement.REPLICATE or not p.parameter.numel():
            homes[p.name] = Home(placement, group)
        elif (alone and host is None) or (placement is Placement.SHARD and p.parameter.dim() == 0):
            homes[p.name] = Home(Placement.REPLICATE, groups.everyone)
        elif alone:
            homes[p.name] = Home(Placement.SHARD, group, host=host)
        else:
            mesh = {Placement.SHARD: groups.mesh if strategy.is_hybrid else flat}.get(placement)
            homes[p.name] = Home(placement, group, owners.get(p.name, 0), host, mesh)
    # torch's functions of several tensors take either DTensors or plain ones
    mesh = next((home.mesh for home in homes.values() if home.mesh is not None), None)
    plain = {name for name, home in homes.items() if home.placement is Placement.REPLICATE}
    return {name: replace(home, mesh=mesh) if name in plain else home for name, home in homes.items()}


def stand_in(parameter: nn.Parameter, device: torch.device, precision: MixedPrecisionPolicy | None) -> nn.Parameter:
    """A meta tensor of the full shape, in the dtype of its use. Thunder traces it as a tensor on ``device``."""
    used = precision.param_dtype if precision is not None and parameter.is_floating_point() else None
    meta = torch.empty_like(parameter, device="meta", dtype=used or parameter.dtype)
    result = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    set_traced_device(result, device)
    return result


def distribute(
    model: nn.Module,
    found: Sequence[Place],
    homes: Mapping[str, Home],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    init: InitPolicy,
    given: Collection[int] = (),
) -> list[str]:
    """Gives each parameter its shard and each buffer its device, in place. Works on one module and one parameter at a
    time: a whole parameter is freed as soon as its shard is made. Nothing has memory on a device that is absent, or if
    the model :func:`never_runs`. Tensors whose id is ``given`` get memory for the caller to fill. Returns what must be
    equal on all ranks: the values that each has initialized by itself."""
    absent = is_absent(device) or init.param_init_fn is never_runs
    source = None if absent else init.broadcast_from
    move = Move(found, homes, group, torch.device("meta") if absent else device, source)
    initialized: list[str] = []
    # before tied parameters get memory
    meta_modules = set() if absent else {m for m in model.modules() if has_meta(m, given)}
    for parameter in model.parameters():
        if id(parameter) in given and (id(parameter) in move.names or parameter.is_meta):
            move.make_room(parameter)
    for module in model.modules():
        if module in meta_modules:
            for parameter, values in materialized(module, move.device, init.param_init_fn, move.whole_again):
                if id(parameter) in given:
                    continue
                if id(parameter) in move.names:
                    if init.broadcast_from is None:
                        initialized.append(move.names[id(parameter)] + sample(values))
                    move.keep_shard(parameter, values)
                elif parameter.is_meta:  # ignored, so not sharded
                    set_data(parameter, values, "that is ignored")
        for own in module._parameters.values():
            if own is not None and id(own) in move.names and id(own) not in move.sharded:
                move.keep_shard(own, own.detach())
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = claim(buffer, device) if absent else move.buffer(buffer)
    return initialized


class Move:
    """The move of parameters to their homes on a device. ``source`` is the rank whose values count, if not each's."""

    def __init__(
        self,
        found: Sequence[Place],
        homes: Mapping[str, Home],
        group: dist.ProcessGroup,
        device: torch.device,
        source: int | None,
    ) -> None:
        self.names = {id(p.parameter): p.name for p in found}
        self.sharded: set[int] = set()  # the ids of parameters
        self.device = device
        self._homes, self._group, self._source = homes, group, source
        self._full_shapes = {id(p.parameter): tuple(p.parameter.shape) for p in found}

    def keep_shard(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        name = self.names[id(parameter)]
        home = self._homes[name]
        kept = shard(self._moved(values), home)
        set_data(parameter, kept if home.host is None or kept.is_meta else kept.cpu(), name)
        self.sharded.add(id(parameter))

    def make_room(self, parameter: nn.Parameter) -> None:
        name = self.names.get(id(parameter), "that is ignored")
        meta, rest = torch.empty_like(parameter, device="meta"), self.device
        if name in self._homes:
            meta = shard(meta, self._homes[name])
            rest = rest if self._homes[name].host is None else torch.device("cpu")
        set_data(parameter, torch.empty_like(meta, device=rest), name)
        self.sharded.add(id(parameter))

    def whole_again(self, parameter: nn.Parameter) -> torch.Tensor:
        if id(parameter) not in self.sharded:
            return parameter.detach().to(self.device)
        return unshard(parameter, self._full_shapes[id(parameter)], self._homes[self.names[id(parameter)]])

    def buffer(self, t: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(t, device=self.device) if t.is_meta else self._moved(t)

    def _moved(self, t: torch.Tensor) -> torch.Tensor:
        return broadcast(t.to(self.device), self._source, self._group)
