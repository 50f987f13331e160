"""From a whole model to this rank's shards, and back to a copy.

Options or a plan choose what becomes of its modules and parameters. Models that cannot be sharded are refused. Each
parameter is moved to its home, some of them to an owner.
"""

from __future__ import annotations

import copy
import operator
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

from passes.compat.jit import set_traced_device
from passes.plan import HostMemory, Placement, Wire
from shardtrace.model.shards import (
    Entry,
    Home,
    ParameterMemory,
    Place,
    as_parameter,
    broadcast,
    has_meta,
    materialized,
    places,
    set_data,
    shard,
    sparse_embedding,
    uninitializable,
    unshard,
)
from shardtrace.model.state import REMEDY, link_of, state_around, state_of, states_in
from shardtrace.options.options import Options, canonical
from shardtrace.options.policies import InitPolicy, Travelling, assign_gathers, parallel_dims, refuse_reductions
from shardtrace.options.strategy import (
    ShardingStrategy,
    assign,
    blocks_of_a_kind,
    checkpointed_blocks,
    chosen_blocks,
    eager_modules,
    repeated_blocks,
)
from shardtrace.planner.training_plan import TrainingPlan, mesh_dim_names
from shardtrace.ranks.consensus import announced, compare
from shardtrace.ranks.failure import tell_others_of_failure
from shardtrace.ranks.mesh import (
    Groups,
    Mesh,
    backend_for,
    choose_device,
    is_2d,
    mesh_of_nodes,
    resolve_groups,
    use_device,
)
from shardtrace.record.arguments import claim, is_absent, never_runs
from shardtrace.record.effects import tensors_held
from shardtrace.record.watcher import ATTRIBUTE, CHECKPOINTED, EAGER, PART_ATTRIBUTE, REPEATED

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# ---- casts ----


INPUTS = "_shardtrace_inputs"  # of a block: the dtype to which its floating-point inputs are cast


def keeps_dtype(module: nn.Module) -> bool:
    """True if the parameters of a module are used in their own dtype, whatever the policy.

    This holds for batch and instance norms with running statistics. The statistics are buffers, which keep their dtype,
    and ``torch.nn.functional.batch_norm`` requires the same dtype for the parameters. The input may have a lower
    precision. (PyTorch's first FSDP also kept batch norms in full precision.)
    """
    if not isinstance(module, _NormBase) or module.running_mean is None or module.weight is None:
        return False
    return module.running_mean.dtype == module.weight.dtype


def with_casts(forward: Callable[..., Any], precision: MixedPrecisionPolicy | None) -> Callable[..., Any]:
    """``forward`` with floating-point inputs and outputs cast as ``precision`` says; itself if none are cast.

    Thunder traces these casts.
    """
    if precision is None:
        return forward
    given = precision.param_dtype if precision.cast_forward_inputs else None
    returned = precision.output_dtype
    if given is None and returned is None:
        return forward

    def cast_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return cast(forward(module, *cast(args, given), **cast(kwargs, given)), returned)

    return cast_forward


def inputs_of_blocks(
    model: nn.Module, blocks: Iterable[str], cast_layers: Collection[str], policy: MixedPrecisionPolicy | None
) -> dict[nn.Module, torch.dtype]:
    """The dtype to which each block casts its inputs, as in FSDP2: that of its parameters. ``cast_layers``: the names
    of the modules whose own parameters are cast."""
    if policy is None or policy.param_dtype is None or not policy.cast_forward_inputs:
        return {}
    chosen = (b for b in blocks if any(f"{layer}.".startswith(f"{b}.") for layer in cast_layers))
    return {model.get_submodule(block): policy.param_dtype for block in chosen}


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors in nested tuples, lists and dicts to ``dtype``. Keep everything else, and the
    containers in which nothing is cast: the caller may look into them afterwards."""
    if dtype is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        items = {key: cast(entry, dtype) for key, entry in value.items()}
        if all(items[key] is entry for key, entry in value.items()):
            return value
        return items if type(value) is dict else type(value)(**items)  # such as a ModelOutput
    if isinstance(value, (list, tuple)):
        entries = [cast(entry, dtype) for entry in value]
        if all(map(operator.is_, entries, value)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value


# ---- refusals ----


ELEMENTS = 256  # of a tensor that are looked at


def sample(values: torch.Tensor) -> str:
    """A checksum of elements of a tensor, evenly spaced, as text. Empty if it has no values.

    Weights that were drawn from another seed, or read from another file, differ in most elements.
    """
    if values.is_meta or not values.numel():
        return ""
    flat = values.detach().reshape(-1) if values.is_contiguous() else values.detach().flatten()
    some = flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]
    return f", values {zlib.crc32(some.cpu().contiguous().view(torch.uint8).numpy().data):08x}"


SEED_HINT = (
    "if only values differ: build the model after the same torch.manual_seed on all ranks, or pass "
    "init_policy=InitPolicy(broadcast_from=0); pass the same weights on all ranks"
)
ONCE = "tie by one Parameter object, and call fsdp() once, on the module around both"


def compare_models(
    model: nn.Module,
    chosen: Chosen,
    gathers: Mapping[str, Wire | None],
    options: Options,
    *,
    weights: Sequence[str],
    given: Collection[int],
    group: dist.ProcessGroup,
) -> None:
    """Raises on every rank if parameters, options, what they have chosen, or ``weights`` differ between ranks.
    ``given``: the ids of the parameters whose values are read."""
    keeps = options.init.broadcast_from is None
    lines = [
        f"parameter {p.name} of shape {tuple(p.parameter.shape)}, {p.parameter.dtype}, "
        f"{'trainable' if p.parameter.requires_grad else 'frozen'}, held in {len(p.owners)} place(s), "
        f"strategy {chosen.strategies[p.name].value}{_travelling(gathers.get(p.name))}"
        f"{sample(p.parameter) if keeps and id(p.parameter) not in given else ''}"
        for p in chosen.places
    ]
    lines += [f"weights {line}" for line in weights]
    checkpointed = [f"{name}: {what}" for name, (_, what) in chosen.checkpointed.items()]
    lines.append(f"options {options} checkpointed={checkpointed}")
    compare(group, f"the parameters of {type(model).__name__}", lines, timeout=options.checks.timeout, hint=SEED_HINT)


def _travelling(wire: Wire | None) -> str:
    return "" if wire is None else f", gathered as {wire.name or 'a custom wire'}"


def refuse(
    model: nn.Module,
    found: Sequence[Place],
    init: InitPolicy,
    *,
    group: dist.ProcessGroup,
    given: Collection[int] = (),
) -> None:
    """Raises ValueError if this rank cannot shard the model. ``given``: the ids of tensors whose values are read from
    files."""
    problems = chain(
        _problems_of_module(model),
        _tied_to_shards(model),
        _problems_of_parameters(found),
        _clashes(model),
    )
    if problem := next(problems, ""):
        raise ValueError(problem)
    ranks = dist.get_process_group_ranks(group)
    if init.broadcast_from is not None and init.broadcast_from not in ranks:
        raise ValueError(f"broadcast_from={init.broadcast_from} is not one of the group's ranks {ranks}")
    if module := uninitializable(model, init.param_init_fn, given):
        what = "has a buffer on the meta device that is not in the weights" if given else "is on the meta device"
        hint = " or build the model in shardtrace.init_empty_weights(), which keeps buffers" if given else ""
        raise ValueError(f"module {module} {what} and has no reset_parameters: pass param_init_fn{hint}")
    if len(ranks) > 1 and (sparse := sparse_embedding(model)) is not None:
        raise ValueError(
            f"module {sparse} has sparse gradients, which are not reduced over ranks: build it with sparse=False"
        )


def _problems_of_module(model: nn.Module) -> Iterator[str]:
    name = type(model).__name__
    if state_of(model) is not None:
        yield f"{name} is sharded already: call fsdp() once for each model"
    inner = states_in(model)
    for part, module in model.named_modules():
        outer = state_around(module)
        if outer is not None and outer not in inner:
            yield f"{part or name} is part of a sharded {outer.model_name}: shard the inner modules first"
        if part and isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            yield f"{part} is a TorchScript module, whose parameters cannot be sharded: use the module it was made of"
    if isinstance(model, torch.jit.ScriptModule):
        yield f"{name} is a TorchScript module, which Thunder cannot trace: shard the module it was made of"
    if "forward" in model.__dict__:
        yield f"{name} has a forward set on the instance, which fsdp() cannot trace: set it on the class"


def _tied_to_shards(model: nn.Module) -> Iterator[str]:
    """Places that hold a parameter of another module that is sharded, and would use this rank's rows of it."""
    for part, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            link = link_of(parameter)
            if link is not None and all(owner.module is not module for owner in link.entry.owners):
                name = f"{part}.{attribute}".lstrip(".")
                other = f"{link.entry.name!r} of {link.state.model_name}"
                yield f"parameter {name!r} is tied to {other}, which is sharded already: {ONCE}"


def _problems_of_parameters(found: Iterable[Place]) -> Iterator[str]:
    for p in found:
        if is_lazy(p.parameter):
            yield f"parameter {p.name!r} has no shape yet: run the lazy module once before fsdp()"
        elif is_traceable_wrapper_subclass(p.parameter):  # such as DTensor
            yield f"parameter {p.name!r} is a {type(p.parameter).__name__}: fsdp() takes plain tensors"
        elif p.parameter.layout != torch.strided:
            yield f"parameter {p.name!r} is a sparse tensor: fsdp() takes dense ones"
        elif p.parameter.grad is not None:
            yield f"parameter {p.name!r} has a gradient: call zero_grad() before fsdp()"


def _clashes(model: nn.Module) -> Iterator[str]:
    """Different names that Thunder would mix up: it calls parameter ``a.b`` ``t_a_b``, and uses one tensor per name."""
    seen: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, _ in named:
        other = seen.setdefault(name.replace(".", "_"), name)
        if other != name:
            yield (
                f"{name!r} and {other!r} are one name to Thunder, which writes dots as underscores and would use one "
                "tensor for both: rename a module or an attribute"
            )


def refuse_shared(model: nn.Module, found: Iterable[Place], left: Sequence[ParameterMemory]) -> None:
    """Raises ValueError for a tensor on the memory of a parameter that sharding would untie from it. ``left``: the
    memory that the parameters are to leave, and that which those of each model have left that is sharded already."""
    seen = ParameterMemory()
    for name, p in ((p.name, p.parameter) for p in found):
        if other := seen.owner(p):
            raise ValueError(
                f"parameters {other!r} and {name!r} are two Parameters on the same memory, which fsdp() would give "
                "memory of their own: tie them by using one Parameter object for both"
            )
        if other := next(filter(None, (memory.owner(p) for memory in left[1:])), ""):
            raise ValueError(f"parameter {name!r} is on the memory that {other} had before it was sharded: {ONCE}")
        seen.add(name, p)
    parameters = set(map(id, model.parameters()))
    for name, t in (*model.named_buffers(), *tensors_held(model)):
        if id(t) not in parameters and (other := next(filter(None, (m.owner(t) for m in left)), "")):
            raise ValueError(
                f"{name!r} is no parameter and lies in the memory of {other}, which fsdp() replaces: {REMEDY}"
            )


# ---- choices ----


def with_plan(
    module: nn.Module, plan: TrainingPlan | str | Path, arguments: Mapping[str, Any], spelling: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of ``fsdp`` with the options of a plan. Call it on all ranks."""
    mesh = arguments["mesh"]
    with announced(module, mesh):
        given = canonical(arguments, spelling)
        device = choose_device(given["init_policy"].device, mesh, next((p.device for p in module.parameters()), None))
        timeout = given["checks"].timeout
        group = resolve_groups(mesh, device, hybrid=is_2d(mesh), timeout=timeout).everyone
        found = plan if isinstance(plan, TrainingPlan) else TrainingPlan.from_json(plan)
        found.check(module, group.size())
        merged = found.merged(given)
    compare(group, "the plan", [found.hash], timeout=timeout)
    if mesh is None and found.mesh_shape is not None:
        mesh = init_device_mesh(device.type, found.mesh_shape, mesh_dim_names=mesh_dim_names(merged))
    return merged | {"mesh": mesh}


class Chosen(NamedTuple):
    """The parameters to shard, by name the strategy and all ``names`` of each, and the modules that are treated in
    another way: ``blocks`` are buckets, ``checkpointed`` ones are recomputed (what of them), ``by_torch`` are run by
    PyTorch, ``repeated`` ones are compiled once."""

    places: list[Place]
    strategies: Mapping[str, ShardingStrategy]
    names: Mapping[str, list[str]]
    blocks: list[str]
    checkpointed: Mapping[str, tuple[nn.Module, str]]
    by_torch: list[nn.Module]
    repeated: Mapping[str, nn.Module]
    device: torch.device | None  # of the whole model


class Target(NamedTuple):
    """The device that computes, the groups of ranks, and the host memory for shards, if they do not stay on it."""

    device: torch.device
    groups: Groups
    host: HostMemory | None


def choose(module: nn.Module, options: Options, ignored: Collection[nn.Parameter]) -> Chosen:
    """Finds all parameters that are neither ignored nor sharded by an earlier call for a submodule, and what the
    options choose for them. Raises ValueError for a choice that chooses nothing, TypeError for one of another kind."""
    if wrong := [p for p in ignored if not isinstance(p, torch.Tensor)]:
        raise TypeError(f"ignored_params must be parameters, not {wrong[0]!r}: pass those of model.named_parameters()")
    blocks = repeated_blocks(module) if options.wrap is None else chosen_blocks(module, options.wrap)
    exclude = {id(entry.shard) for state in states_in(module) for entry in state.entries} | set(map(id, ignored))
    found = places(module, exclude, blocks)
    by_id: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(p), []).append(name)
    names = {place.name: by_id[id(place.parameter)] for place in found}
    return Chosen(
        places=found,
        checkpointed=checkpointed_blocks(module, options.checkpointing),
        by_torch=eager_modules(module, options.compile.eager),
        repeated=blocks_of_a_kind(module, options.compile.repeated_blocks, blocks),
        strategies=assign(options.rules, {p.name: p.parameter for p in found}, names),
        names=names,
        blocks=blocks,
        device=found[0].parameter.device if found else None,
    )


def find_target(chosen: Chosen, options: Options, mesh: Mesh | None) -> Target:
    """Chooses the device and the groups. Raises ValueError if the options have nothing to do there."""
    device = choose_device(options.init.device, mesh, chosen.device, on_host=options.offload is not None)
    if options.nodes_of is not None:
        mesh = mesh_of_nodes(options.nodes_of, mesh, device, timeout=options.checks.timeout)
    hybrid = any(strategy.needs_mesh for _, strategy in options.rules)
    groups = resolve_groups(
        mesh,
        device,
        hybrid=hybrid,
        dims=parallel_dims({"context_parallel": options.context, "tensor_parallel": options.tensor}),
        timeout=options.checks.timeout,
    )
    tell_others_of_failure(groups.everyone)
    if is_absent(device) and dist.get_backend(groups.everyone) != "fake":
        raise ValueError(
            f'torch sees no {device.type} device on this machine: pass init_policy=InitPolicy(device="cpu"), or '
            "compile for fake ranks, as in "
            'shardtrace.inspect(model, x, world_size=8, init_policy=InitPolicy(device="cuda"))'
        )
    if dist.get_backend(groups.everyone) != "fake":
        use_device(device)
    strategies = chosen.strategies.values()
    if options.offload and strategies and all(s.placement is Placement.REPLICATE for s in strategies):
        raise ValueError(
            'offload_policy keeps nothing in host memory with sharding_strategy="ddp", which replicates parameters on '
            'the device: choose one that shards, such as "zero3"'
        )
    if ShardingStrategy.ZERO3_SECONDARY in strategies and groups.outer is not None:
        _refuse_useless_secondary(groups.inner.size(), groups.outer.size())
    return Target(device, groups, host_memory(options.offload, device))


def host_memory(policy: CPUOffloadPolicy | None, device: torch.device) -> HostMemory | None:
    """The host memory for parameters that are used on ``device``. None if they stay on the device."""
    return None if policy is None or device.type == "cpu" else HostMemory(device, pinned=policy.pin_memory)


def _refuse_useless_secondary(inside: int, nodes: int) -> None:
    if inside == 1 or nodes == 1:
        same = "zero2" if inside == 1 else "zero3"
        raise ValueError(
            f'sharding_strategy="zero3_secondary" on a mesh of shape {(nodes, inside)} is "{same}": choose that, or a '
            "mesh with more than one node and more than one rank in each"
        )


def choose_gathers(chosen: Chosen, options: Options, target: Target) -> dict[str, Wire | None]:
    """The wire on which each parameter is gathered, by name. Raises ValueError if a wire changes nothing."""
    inner, ranks = target.groups.inner, target.groups.everyone.size()
    travelling = {
        p.name: Travelling(p.parameter, strategy, inner.size() if strategy.is_hybrid else ranks, ranks)
        for p in chosen.places
        for strategy in [chosen.strategies[p.name]]
    }
    refuse_reductions(options.reduction, travelling, error_feedback=options.comm.error_feedback)
    device = target.device.type
    if options.reduction is not None and device != "cpu" and backend_for(inner, {device}) == "gloo":
        raise ValueError(f"gloo cannot send parts of gradients from {device}: use nccl with reduce_wire")
    return assign_gathers(options.gathers, travelling, chosen.names)


# ---- the move to shards ----


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


# ---- copies ----


MARKS = {ATTRIBUTE, EAGER, INPUTS, PART_ATTRIBUTE, REPEATED, CHECKPOINTED}


def hollow_copy(model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """A copy with parameters on the meta device. Tied parameters stay tied, buffers are copied. ``memo`` has what else
    stands for an object, by its id, as in :func:`copy.deepcopy`."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, {**empty, **(memo or {})})


def whole_copy(model: nn.Module, *, values: bool = False) -> nn.Module:
    """A copy of a model as it was before ``fsdp``, with whole parameters on the meta device; or with the ``values`` of
    the only rank. Buffers are copied, tied parameters stay tied. The model is not changed."""
    states = states_in(model)
    memo: dict[int, Any] = {id(state): None for state in states}  # the copy has none
    for entry in (e for state in states for e in state.entries):
        full = torch.empty(entry.full_shape, dtype=entry.dtype, device="meta")
        if values:
            full = entry.shard.detach().view(entry.full_shape).clone()
        memo[id(entry.shard)] = nn.Parameter(full, requires_grad=entry.shard.requires_grad)
    whole = copy.deepcopy(model, memo) if values else hollow_copy(model, memo)
    make_plain(whole)
    return whole


def make_plain(model: nn.Module) -> None:
    """Gives modules their own classes again, and takes the marks from them."""
    for module in model.modules():
        if module.__dict__.keys() & {ATTRIBUTE, PART_ATTRIBUTE}:
            module.__class__ = type(module).__base__  # type: ignore[assignment]
        for mark in MARKS & module.__dict__.keys():
            del module.__dict__[mark]
