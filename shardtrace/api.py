"""``fsdp``: shards a model in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from passes.compat import jitted_module, jitted_transforms, set_traced_device
from passes.plan import CostModel, HostMemory, Placement
from shardtrace.costs import load_cost_model
from shardtrace.model.casts import keeps_dtype
from shardtrace.model.home import Home, shard, unshard
from shardtrace.model.materialize import InitFn, broadcast, has_meta, materialized, set_data, uninitializable
from shardtrace.model.owners import Owned, assign_owners
from shardtrace.model.places import Place, places, sparse_embedding
from shardtrace.model.state import PART_ATTRIBUTE, Entry, Options, ShardedState, state_of, states_in
from shardtrace.model.tracing import attach
from shardtrace.options.blocks import Checkpointed, Wrap, checkpointed_blocks, chosen_blocks, is_wrap, repeated_blocks
from shardtrace.options.precision import parse_precision
from shardtrace.options.spellings import canonical
from shardtrace.options.strategy import ShardingStrategy, assign, parse_bucketing_strategy, parse_rules
from shardtrace.ranks.consensus import RankMismatchError, compare
from shardtrace.ranks.failure import tell_others_of_failure
from shardtrace.ranks.mesh import Groups, Mesh, resolve_device, resolve_groups
from shardtrace.ranks.rendezvous import leave_in_peace
from shardtrace.training.optimizers import refuse_wrong_optimizers

import thunder
import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

M = TypeVar("M", bound=nn.Module)


def fsdp(
    model: M,
    *,
    sharding_strategy: ShardingStrategy | str | Mapping[str, Any] | Any = "zero3",
    bucketing_strategy: str | float | Wrap = "block",
    mesh: Mesh | None = None,
    mp_policy: MixedPrecisionPolicy | str | None = None,
    device: torch.device | str | None = None,
    broadcast_from: int | None = None,
    param_init_fn: InitFn | None = None,
    evenness: float = 1.0,
    prefetch: int | None = None,
    max_inflight_bytes: int | None = None,
    activation_checkpointing: Checkpointed = None,
    offload_policy: OffloadPolicy | None = None,
    cost_model: CostModel | None = None,
    accumulation_dtype: torch.dtype | None = torch.float32,
    check_steps: bool | None = None,
    timeout: float = 300.0,
    **spelling: Any,
) -> M:
    """Shards the parameters of ``model`` over the ranks of ``mesh``, in place, and returns it.

    Afterwards, unless the strategy is another, each rank holds ``ceil(rows / N)`` rows of dim 0 of each parameter,
    padded with zeros, as the same ``nn.Parameter`` objects as before: an optimizer may be built before or after, and
    names in ``state_dict()`` stay. ``thunder.jit(model)`` then runs the model with its full parameters, gathered and
    freed by lines of the trace. The gradient that reaches a shard is the mean over ranks.

    Tied weights stay one parameter and are gathered once. Frozen parameters are sharded and not reduced. A 0-dim
    parameter becomes a shard of shape ``(1,)`` whose value is on rank 0; a parameter without elements, and every
    parameter in a world of one, is left as it is. Buffers are left whole on every rank. Modules inside that are
    sharded already keep their own sharding.

    Args:
        model: a module, or what ``thunder.jit`` made of one; for the latter a new jitted module is returned.
        sharding_strategy: :class:`ShardingStrategy` or its name: "zero3" / "full_shard" frees gathered parameters
            after forward and gathers them again for backward, "zero2" / "shard_grad_op" keeps them, "ddp" /
            "no_shard" replicates all, "hybrid_zero3", "hybrid_zero2", "zero1", "owner"; or a mapping of patterns of
            parameter names to strategies, ``{"embed.*": "ddp", "*": "zero3"}``, of which the first that matches counts.
        bucketing_strategy: what one collective carries: "none" (one parameter), "layer" (a module's own parameters),
            "block" (a repeated block), "model", a size in MB of unsharded parameters, the class of a block (or several
            classes), or one of torch's auto_wrap policies, of which each module that it would wrap is a bucket.
        mesh: a 1-D DeviceMesh or a ProcessGroup, for a hybrid strategy a 2-D DeviceMesh (replicate, shard); default:
            the default group, made from torchrun's environment if there is none (nccl for CUDA, else gloo).
        mp_policy: PyTorch's MixedPrecisionPolicy, or "bf16", "fp16" or "fp32", which stand for one with that
            ``param_dtype``. Shards keep their dtype; they are cast before they are gathered, gradients are averaged
            in ``reduce_dtype`` (default: ``param_dtype``) and arrive in the shard's. Buffers keep theirs.
        device: where shards and buffers go; default: where the model is, for a meta-device model CUDA or the CPU.
            With ``offload_policy`` where the model computes; default: the mesh's type of device, else CUDA or the CPU.
        broadcast_from: the global rank whose parameters and buffers all ranks take over; default: each its own, where
            a strategy replicates parameters the group's first rank.
        param_init_fn: for meta-device models, called with each module that owns meta parameters or buffers once they
            have memory; default: the module's ``reset_parameters``. At most one module is whole at a time.
        evenness: of "owner": 1 gives each tensor to the rank that has least, 0 keeps those of a module together.
        prefetch: buckets whose gather is issued ahead of use. At most ``prefetch + 1`` buckets are unsharded at once,
            unless the model uses more than one at once. Default: 1; where parameters are kept until backward has used
            them, so that those gathered ahead take no more memory in the end, 3.
        max_inflight_bytes: bytes of unsharded buckets whose gather or reduction is under way at once (one bucket alone
            may be larger); default: as many as ``prefetch + 1`` of the largest bucket.
        activation_checkpointing: blocks of which only the inputs are saved for backward, which computes them again:
            their class (or several), a predicate on ``(module)`` or ``(name, module)``, or n for every n-th repeated
            block (True: each). A ZeRO-3 bucket is still gathered once in backward, before its block is computed. Random
            numbers are not drawn again: of a dropout the mask is saved, one byte for each element.
        offload_policy: PyTorch's CPUOffloadPolicy keeps shards, their gradients and so the optimizer's state in host
            memory, which is page-locked (``pin_memory``; torch takes powers of two) to be copied beside compute: shards
            when they are gathered, gradients when they are reduced. What a strategy replicates stays on the device. A
            world of one gathers, too: with "zero3" no more than ``prefetch + 1`` buckets are on the device. With a
            GradScaler, call ``scaler.scale(torch.zeros(()))`` once before training: it keeps the scale in host memory,
            where torch otherwise reads a copy that has not arrived. On the CPU the policy changes nothing.
        cost_model: how long collectives and compute take, which decides where collectives are issued and waited for;
            equal on all ranks. Default: what ``python -m shardtrace.calibrate`` measured on the machine of the
            group's first rank, else those of a slow link and a fast device.
        accumulation_dtype: in which :func:`shardtrace.no_sync` adds up gradients of lower precision; None: their own.
        check_steps: True: before each step, compare with the other ranks whether all are about to run the same
            collectives. Default: before a step that is not what followed the step before it the last time, such as
            evaluation after training, or a forward after a backward that was skipped; or True, if the environment has
            SHARDTRACE_CHECK_STEPS=1. False: when a step is compiled, alone.
        timeout: seconds to wait for other ranks when models and compiled traces are compared.
        spelling: what callers of other libraries write: ``shard_strat`` (sharding_strategy), ``mp`` (mp_policy),
            ``auto_wrap_policy``, ``TransformerBlock`` (bucketing_strategy), ``auto_wrap`` (False: one bucket).

    Raises:
        ValueError, RuntimeError: what is wrong and with which parameter or module; then nothing has been sharded.
        RankMismatchError: on every rank, if the model differs between ranks.

    Source: ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054); the layout is that of PyTorch FSDP2.
    """
    jitted = model if isinstance(model, ThunderModule) else None
    model = jitted_module(jitted) if jitted is not None else model
    if not isinstance(model, nn.Module):
        raise TypeError(f"fsdp takes an nn.Module, not {type(model).__name__}")
    sharding_strategy, bucketing_strategy, mp_policy = canonical(
        sharding_strategy, bucketing_strategy, mp_policy, spelling
    )
    wrap = bucketing_strategy if is_wrap(bucketing_strategy) else None
    options = Options(
        parse_rules(sharding_strategy),
        "block" if wrap is not None else parse_bucketing_strategy(bucketing_strategy),
        parse_precision(mp_policy),
        _parse_evenness(evenness),
        _parse_count("prefetch", prefetch, "a number of buckets, 0 or more"),
        _parse_count("max_inflight_bytes", max_inflight_bytes, "a number of bytes, or None"),
        timeout,
        accumulation_dtype,
        _check_steps_of_environment() if check_steps is None else check_steps,
        _parse_offload(offload_policy),
    )
    exclude = {id(entry.shard) for state in states_in(model) for entry in state.entries}
    blocks = repeated_blocks(model) if wrap is None else chosen_blocks(model, wrap)
    checkpointed = checkpointed_blocks(model, activation_checkpointing)
    found = places(model, exclude, blocks)
    strategies = assign(options.rules, [p.name for p in found])
    current = found[0].parameter.device if found else None
    if device is None and options.offload is not None:  # where the model is may be where it is to stay
        device, current = mesh.device_type if isinstance(mesh, DeviceMesh) else None, None
    target = resolve_device(device, current)
    host = host_memory(options.offload, target)
    groups = resolve_groups(mesh, target, hybrid=any(s.is_hybrid for _, s in options.rules))
    if options.offload and strategies and all(s.placement is Placement.REPLICATE for s in strategies.values()):
        raise ValueError(
            'offload_policy keeps nothing in host memory with sharding_strategy="ddp", which replicates parameters on '
            'the device: choose one that shards, such as "zero3"'
        )
    if broadcast_from is None and any(s.replicates for s in strategies.values()):
        broadcast_from = dist.get_process_group_ranks(groups.everyone)[0]

    _agree(model, found, options, broadcast_from, param_init_fn, cost_model, list(checkpointed), groups.everyone)
    cost = cost_model or load_cost_model(target, groups.everyone)
    homes = _homes(found, strategies, groups, options.evenness, host)
    dtypes = [p.parameter.dtype for p in found]
    policies = [None if any(keeps_dtype(m) for m, _ in p.owners) else options.precision for p in found]
    stand_ins = [_stand_in(p.parameter, target, policy) for p, policy in zip(found, policies, strict=True)]
    _shard_parameters(model, found, homes, groups.everyone, target, broadcast_from, param_init_fn)
    entries = tuple(
        Entry(
            p.name,
            tuple(s.shape),
            p.layer,
            p.block,
            p.parameter,
            tuple(p.parameter.shape),
            dtype,
            strategies[p.name],
            homes[p.name],
            s,
            tuple(p.owners),
            policy,
        )
        for p, s, dtype, policy in zip(found, stand_ins, dtypes, policies, strict=True)
        if s.numel() and (groups.everyone.size() > 1 or options.precision is not None or host is not None)
    )
    tell_others_of_failure(groups.everyone)
    leave_in_peace()
    refuse_wrong_optimizers()
    state = ShardedState(type(model).__name__, groups, options, entries, cost)
    state.claim_shards()
    attach(model, state, checkpointed.values())
    return _jit_again(jitted) if jitted is not None else model


def _parse_count(name: str, value: Any, expected: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be {expected}, not {value!r}")
    return value


def _check_steps_of_environment() -> bool | None:
    return True if os.environ.get("SHARDTRACE_CHECK_STEPS") == "1" else None


def ddp(model: M, **options: Any) -> M:
    """``fsdp(model, sharding_strategy="ddp", ...)``: whole parameters on every rank, gradients averaged in buckets."""
    if "sharding_strategy" in options:
        raise TypeError("ddp() takes no sharding_strategy: call fsdp() to choose one")
    return fsdp(model, sharding_strategy="ddp", **options)


def _homes(
    found: list[Place],
    strategies: dict[str, ShardingStrategy],
    groups: Groups,
    evenness: float,
    host: HostMemory | None,
) -> dict[str, Home]:
    """Where each parameter is at rest. Where there is one rank to shard over, that is DDP; with ``host`` one shard."""
    owned = [
        Owned(p.name, p.layer, p.parameter.numel() * p.parameter.element_size())
        for p in found
        if strategies[p.name].placement is Placement.OWNER
    ]
    owners = assign_owners(owned, groups.everyone.size(), evenness)
    homes = {}
    for p in found:
        strategy = strategies[p.name]
        group = groups.inner if strategy.is_hybrid else groups.everyone
        placement, alone = strategy.placement, group.size() == 1
        if placement is Placement.REPLICATE or not p.parameter.numel():
            homes[p.name] = Home(placement, group)
        elif alone and host is None:
            homes[p.name] = Home(Placement.REPLICATE, groups.everyone)
        else:
            homes[p.name] = Home(Placement.SHARD if alone else placement, group, owners.get(p.name, 0), host)
    return homes


def host_memory(policy: CPUOffloadPolicy | None, device: torch.device) -> HostMemory | None:
    """Where parameters are at rest that are computed with on ``device``; None: there."""
    return None if policy is None or device.type == "cpu" else HostMemory(device, pinned=policy.pin_memory)


def _parse_offload(policy: Any) -> CPUOffloadPolicy | None:
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise TypeError(
            "offload_policy must be torch.distributed.fsdp.CPUOffloadPolicy(), or None, "
            f"not {policy if isinstance(policy, bool) else type(policy).__name__}"
        )
    return policy if isinstance(policy, CPUOffloadPolicy) else None


def _parse_evenness(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"evenness must be a number from 0 to 1, not {value!r}")
    return float(value)


def _agree(
    model: nn.Module,
    found: list[Place],
    options: Options,
    broadcast_from: int | None,
    param_init_fn: InitFn | None,
    cost_model: CostModel | None,
    checkpointed: list[str],
    group: dist.ProcessGroup,
) -> None:
    """Raises on every rank if the model cannot be sharded on one, or is not the same on all."""
    error = _refusal(model, found, broadcast_from, param_init_fn, group)
    lines = (
        []
        if error
        else [
            f"parameter {p.name} of shape {tuple(p.parameter.shape)}, {p.parameter.dtype}, "
            f"{'trainable' if p.parameter.requires_grad else 'frozen'}, held in {len(p.owners)} place(s)"
            for p in found
        ]
    )
    lines.append(f"options {options} broadcast_from={broadcast_from} cost_model={cost_model} {checkpointed=}")
    what = f"the parameters of {type(model).__name__}"
    try:
        compare(group, what, lines, timeout=options.timeout, error=str(error or ""))
    except RankMismatchError as mismatch:
        raise error or mismatch from None


def _refusal(
    model: nn.Module,
    found: list[Place],
    broadcast_from: int | None,
    param_init_fn: InitFn | None,
    group: dist.ProcessGroup,
) -> Exception | None:
    """Why this rank cannot shard the model, if so."""
    name = type(model).__name__
    if state_of(model) is not None:
        return ValueError(f"{name} is sharded already: call fsdp() once for each model")
    inner = states_in(model)
    for part, module in model.named_modules():
        outer = module.__dict__.get(PART_ATTRIBUTE)
        if outer is not None and outer not in inner:
            return ValueError(f"{part or name} is part of a sharded {outer.model_name}: shard the inner modules first")
    if isinstance(model, torch.jit.ScriptModule):
        return ValueError(
            f"{name} is a TorchScript module, which Thunder cannot trace: shard the module it was made of"
        )
    if "forward" in model.__dict__:
        return ValueError(f"{name} has a forward set on the instance, which fsdp() cannot trace: set it on the class")
    ranks = dist.get_process_group_ranks(group)
    if broadcast_from is not None and broadcast_from not in ranks:
        return ValueError(f"broadcast_from={broadcast_from} is not one of the group's ranks {ranks}")
    for p in found:
        if is_lazy(p.parameter):
            return ValueError(f"parameter {p.name!r} has no shape yet: run the lazy module once before fsdp()")
        if isinstance(p.parameter, DTensor):
            return ValueError(f"parameter {p.name!r} is a DTensor: fsdp() takes plain tensors")
        if p.parameter.grad is not None:
            return ValueError(f"parameter {p.name!r} has a gradient: call zero_grad() before fsdp()")
    if module := uninitializable(model, param_init_fn):
        return ValueError(f"module {module} is on the meta device and has no reset_parameters: pass param_init_fn")
    if len(ranks) > 1 and (sparse := sparse_embedding(model)) is not None:
        return ValueError(
            f"module {sparse} has sparse gradients, which are not reduced over ranks: build it with sparse=False"
        )
    return None


def _stand_in(parameter: nn.Parameter, device: torch.device, precision: MixedPrecisionPolicy | None) -> nn.Parameter:
    """A meta tensor of the full shape and of the dtype of its use.

    Its proxy is on ``device``.
    """
    used = precision.param_dtype if precision is not None and parameter.is_floating_point() else None
    meta = torch.empty_like(parameter, device="meta", dtype=used or parameter.dtype)
    stand_in = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    set_traced_device(stand_in, device)
    return stand_in


def _shard_parameters(
    model: nn.Module,
    found: list[Place],
    homes: dict[str, Home],
    group: dist.ProcessGroup,
    device: torch.device,
    broadcast_from: int | None,
    param_init_fn: InitFn | None,
) -> None:
    """Module by module, parameter by parameter: the whole is freed as soon as its shard is made."""
    full_shapes = {id(p.parameter): tuple(p.parameter.shape) for p in found}
    names = {id(p.parameter): p.name for p in found}
    sharded: set[int] = set()

    def keep_shard(parameter: nn.Parameter, values: torch.Tensor) -> None:
        whole, name = broadcast(values.to(device), broadcast_from, group), names[id(parameter)]
        home = homes[name]
        kept = shard(whole, home)
        set_data(parameter, kept if home.host is None else kept.cpu(), name)
        sharded.add(id(parameter))

    def whole_again(parameter: nn.Parameter) -> torch.Tensor:
        if id(parameter) in sharded:
            return unshard(parameter, full_shapes[id(parameter)], homes[names[id(parameter)]])
        return parameter.detach().to(device)

    meta_modules = {m for m in model.modules() if has_meta(m)}  # before the first of a tied parameter has memory
    for module in model.modules():
        if module in meta_modules:
            for parameter, values in materialized(module, device, param_init_fn, whole_again):
                keep_shard(parameter, values)
        for own in module._parameters.values():
            if own is not None and id(own) in names and id(own) not in sharded:
                keep_shard(own, own.detach())
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = broadcast(buffer.to(device), broadcast_from, group)


def _jit_again(jitted: ThunderModule) -> ThunderModule:
    """A new jitted module with the same options: what the old one has compiled is of whole parameters."""
    data = thunder.compile_data(jitted)
    return thunder.jit(
        jitted_module(jitted),
        langctx=data.langctx,
        executors=data.executors_list,
        sharp_edges=data.sharp_edges,
        cache=data.cache_option,
        disable_torch_autograd=data.disable_torch_autograd_support,
        transforms=jitted_transforms(jitted),
        debug_options=data.debug_options,
        **data.compile_options,
    )
