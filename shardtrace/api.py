"""``fsdp``: shards a model in place."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from passes.compat.jit import jitted_module, jitted_transforms, unjitted
from passes.plan import CostModel, Placement, Wire
from shardtrace.checkpoint.hooks import add_hooks
from shardtrace.checkpoint.state import model_state
from shardtrace.checkpoint.weights import Source, Stored, check_weights, read_weights, stored_tensors, weights_lines
from shardtrace.costs import load_cost_model
from shardtrace.model.casts import keeps_dtype
from shardtrace.model.distribute import distribute, find_homes, host_memory, stand_in
from shardtrace.model.freed_memory import keep_freed_memory
from shardtrace.model.home import Home
from shardtrace.model.materialize import InitFn
from shardtrace.model.places import Place, places
from shardtrace.model.refusal import SEED_HINT, compare_models, refuse
from shardtrace.model.state import Entry, ShardedState, states_in
from shardtrace.model.tracing import attach
from shardtrace.options.blocks import (
    Checkpointed,
    Eager,
    Repeated,
    Wrap,
    blocks_of_a_kind,
    checkpointed_blocks,
    chosen_blocks,
    eager_modules,
)
from shardtrace.options.blocks import (
    repeated_blocks as find_blocks,
)
from shardtrace.options.options import Options, parse_options
from shardtrace.options.planned import PlanError, TrainingPlan
from shardtrace.options.strategy import ShardingStrategy, assign
from shardtrace.options.wires import Travelling, assign_gathers, refuse_reductions
from shardtrace.ranks.consensus import announce, compare
from shardtrace.ranks.failure import tell_others_of_failure, watch, watches
from shardtrace.ranks.mesh import Groups, Mesh, backend_for, choose_device, resolve_groups
from shardtrace.ranks.rendezvous import leave_in_peace
from shardtrace.record.absent import is_absent
from shardtrace.training.accumulation import no_sync
from shardtrace.training.clipping import share_norms
from shardtrace.training.optimizers import refuse_wrong_optimizers
from shardtrace.training.scaling import share_overflows
from shardtrace.training.wrappers import refuse_wrappers

import thunder
import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module)


def fsdp(
    model: M,
    *,
    plan: TrainingPlan | str | Path | None = None,
    sharding_strategy: ShardingStrategy | str | Mapping[str, Any] | Any = "zero3",
    bucketing_strategy: str | float | Wrap = "auto",
    mesh: Mesh | None = None,
    mp_policy: MixedPrecisionPolicy | str | None = None,
    device: torch.device | str | None = None,
    broadcast_from: int | None = None,
    param_init_fn: InitFn | None = None,
    weights: Source | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    evenness: float = 1.0,
    prefetch: int | None = None,
    max_inflight_bytes: int | None = None,
    activation_checkpointing: Checkpointed = None,
    offload_policy: OffloadPolicy | None = None,
    kernels: bool = True,
    sum_reductions: bool = False,
    gather_dtype: str | Wire | Mapping[str, str | Wire | None] | None = None,
    reduce_wire: str | None = None,
    error_feedback: bool = False,
    repeated_blocks: Repeated = "once",
    eager: Eager = "auto",
    cost_model: CostModel | None = None,
    accumulation_dtype: torch.dtype | None = torch.float32,
    gradient_divide_factor: float | None = None,
    check_steps: bool | None = None,
    check_recording: bool | int = True,
    timeout: float = 300.0,
    **spelling: Any,
) -> M:
    """Shards the parameters of ``model`` over the N ranks of ``mesh``, in place, and returns the model.

    By default each rank then holds ``ceil(rows / N)`` rows of dim 0 of each parameter, padded with zeros. The
    ``nn.Parameter`` objects and the names in ``state_dict()`` stay the same, so that an optimizer may be built before
    or after. ``thunder.jit(model)`` runs the model with full parameters, which lines of the trace gather and free. The
    gradient of a shard is the mean over ranks (``gradient_divide_factor``).

    Tied weights stay one parameter and are gathered once. Frozen parameters are sharded; no gradient is reduced for
    them. A 0-dim parameter becomes a shard of shape ``(1,)`` whose value is on rank 0. Parameters without elements stay
    as they are, and so does every parameter in a world of one. Buffers stay whole on every rank. Submodules that are
    sharded already keep their own sharding.

    Args:
        model: a module, or the result of ``thunder.jit(module)``. For the latter, a new jitted module is returned.
        plan: the result of :func:`shardtrace.plan`, or the file that its ``to_json`` wrote. It has the options that it
            decides, and makes the mesh of a hybrid strategy; the others may be passed beside it.
        sharding_strategy: a :class:`ShardingStrategy` or its name. "zero3" / "full_shard" frees gathered parameters
            after forward and gathers them again for backward; "zero2" / "shard_grad_op" keeps them until backward;
            "ddp" / "no_shard" replicates all parameters. The others are "hybrid_zero3", "hybrid_zero2",
            "zero3_secondary", "zero1" and "owner". A mapping of name patterns to strategies, such as ``{"embed.*":
            "ddp", "*": "zero3"}``, mixes them: the first pattern that matches a parameter's name counts. A predicate on
            (name, parameter), which sees whole parameters, may stand in place of a pattern.
        bucketing_strategy: the parameters that one collective carries: "none" (one parameter), "layer" (a module's own
            parameters), "block" (a repeated block), "model" (all), a size in MB of unsharded parameters, the class of a
            block (or several classes), or one of torch's auto_wrap policies (each module that it would wrap). "auto" is
            "block", with up to 4 buckets for each block where a calibrated ``cost_model`` says that the link is slow.
        mesh: a 1-D DeviceMesh or a ProcessGroup; for a hybrid strategy and "zero3_secondary", a 2-D DeviceMesh
            (replicate, shard), whose last dimension is a node. Default: the default group, made from torchrun's
            environment if there is none (nccl for CUDA, else gloo).
        mp_policy: PyTorch's MixedPrecisionPolicy, or "bf16", "fp16" or "fp32" for a policy with that ``param_dtype``.
            Shards keep their dtype and are cast before they are gathered. Gradients are averaged in ``reduce_dtype``
            (default: ``param_dtype``) and arrive in the shard's dtype. Buffers keep their dtype.
        device: the device of shards and buffers; with ``offload_policy``, the device that computes. Default, as in
            FSDP2: the mesh's device type, else this rank's GPU (that of LOCAL_RANK) if there is one, else the CPU. A
            model stays where it is if the process group was made without nccl.
        broadcast_from: the global rank whose parameters and buffers all ranks take over. Default: the group's first
            rank if a strategy replicates parameters; otherwise each rank keeps its own values.
        param_init_fn: for meta-device models: called with each module that owns meta parameters or buffers, once these
            have memory. Default: the module's ``reset_parameters``. At most one module is whole at a time.
        weights: values for all parameters and persistent buffers, of which each rank reads only its rows: a folder of
            safetensors files, one file, or a state dict (:func:`shardtrace.load_safetensors`). The model may be on the
            meta device (:func:`shardtrace.init_empty_weights`) and is then never whole.
        ignored_params: parameters that are not sharded and whose gradients are not reduced. They may lie outside
            ``model`` if one jitted function trains both. It is an error if a step uses any other trainable parameter
            that is not sharded.
        evenness: for "owner": 1 gives each tensor to the rank with the fewest bytes, 0 keeps the tensors of a module
            together.
        prefetch: how many buckets may be gathered ahead of use. At most ``prefetch + 1`` buckets are unsharded at once,
            unless the model uses several at once. Default: 1; 2 if there are blocks in blocks; 3 if parameters are kept
            until backward has used them, because gathering ahead then takes no more memory in the end, or if "auto"
            splits blocks.
        max_inflight_bytes: bytes of unsharded buckets whose gather or reduction may be in flight at once. A single
            bucket may be larger. Default: ``prefetch + 1`` times the largest bucket.
        activation_checkpointing: blocks that save only their inputs and are recomputed in backward: their class (or
            several), a predicate on ``(module)`` or ``(name, module)``, n for every n-th repeated block, or "full" or
            True for every block. "cheap" recomputes in every block only what is cheap, no products and no attention;
            which values are saved instead is found by a minimum cut. A mapping of names or patterns of blocks to
            "full", "cheap" or "none" mixes them. A ZeRO-3 bucket is still gathered only once in backward, before its
            block is recomputed. Random numbers are not drawn again: a dropout saves its mask, one byte per element.
        offload_policy: PyTorch's CPUOffloadPolicy keeps shards, their gradients and thus the optimizer state in host
            memory. Shards are copied to the device when they are gathered, gradients to the host when they are reduced.
            The memory is page-locked (``pin_memory``; torch allocates powers of two), so that copies overlap with
            compute. Replicated parameters stay on the device. A world of one also gathers: with "zero3" at most
            ``prefetch + 1`` buckets are on the device. With a GradScaler, call ``scaler.scale(torch.zeros(()))`` once
            before training. It then keeps the scale in host memory; otherwise torch reads a copy that has not arrived.
            On the CPU the policy changes nothing.
        kernels: whether ``thunder.jit`` runs torch's own forward and backward kernels (:data:`shardtrace.kernels`) if
            it was given no executors and none of its default ones fuses, as without nvFuser. Steps then take the time
            and the memory of eager PyTorch.
        sum_reductions: add gradients up and divide this rank's shard of the sum in the kernel that casts it, instead
            of averaging in the collective, with which nccl uses neither its zero-copy nor its PAT kernels. fp16
            divides by about the root of the number of ranks before, and by the rest after. The same as FSDP2's
            ``set_force_sum_reduction_for_comms``. Changes nothing on gloo.
        gather_dtype: round parameters for their way from shards to use: "int8" (blocks of 256 elements with a scale
            each) or "fp8" (torch.float8_e4m3fn, likewise), a :class:`passes.Wire`, or a mapping of name patterns to
            these and None, of which the first that matches counts. All ranks compute with the same rounded values;
            shards, gradients and the optimizer stay exact. Parameters with fewer than 1024 elements on a rank, and
            those that are not fp32, bf16 or fp16, travel as they are.
        reduce_wire: round gradients for their way to the shards: "int8" or "int4" (blocks of 128 elements). Each rank's
            gradient is rounded once, sent to the owner of the shard, and added up there in fp32. Replicas ("ddp",
            hybrid strategies) then gather the sum, rounded to int8.
        error_feedback: with ``reduce_wire``, add what a step's rounding has lost to the gradients of the next step.
            Takes 2 bytes for each element of a gradient that a rank sends. Checkpoints do not have them.
        repeated_blocks: "once" compiles blocks that make the same calls of torch once, and calls the function for each
            of them. "inline" compiles every block. A class (or several) names the blocks if they are not those of
            "block" buckets.
        eager: the modules that PyTorch runs and differentiates, each as one line of the trace: names (or patterns) and
            classes. "auto" chooses the smallest ones whose forward depends on the values of tensors (``.item()``,
            ``nonzero``, a branch); the provenance of the trace names them. None: such a forward is an error.
        cost_model: the durations of collectives and compute, which decide where collectives are issued and waited for.
            Must be equal on all ranks. Default: the measurements of ``python -m shardtrace.calibrate`` on the machine
            of the group's first rank, else those of a slow link and a fast device.
        accumulation_dtype: the dtype in which :func:`shardtrace.no_sync` adds up gradients of lower precision. None:
            their own dtype.
        gradient_divide_factor: the number by which the sum of the ranks' gradients is divided. Default: the number of
            ranks, for their mean. 1 leaves the sum, for a loss that is divided by the tokens of all ranks.
        check_steps: check that all ranks are about to send the same collectives: before every step (True), only when a
            step is compiled (False), or only before a step other than the one that followed the same predecessor last
            time (default), such as an evaluation after training, or a forward after a skipped backward.
            SHARDTRACE_CHECK_STEPS=1 in the environment makes True the default.
        check_recording: record the forward again before steps 2, 4, 8, 16, ... (True), before each step whose number is
            a multiple of this one, or never (False). If it calls torch otherwise than when the step was compiled, it
            reads what no guard sees, and an error names the first call that differs.
        timeout: seconds to wait for other ranks when models and compiled traces are compared, and in each collective
            if ``fsdp`` makes the process group.
        spelling: names that other libraries use: ``shard_strat`` (sharding_strategy), ``reshard_after_forward`` (True
            for "zero3", False for "zero2"), ``mp`` (mp_policy), ``auto_wrap_policy``, ``TransformerBlock``
            (bucketing_strategy), ``auto_wrap`` (False: one bucket), ``bucket_cap_mb`` (a size).

    Raises:
        ValueError, RuntimeError: the error names the parameter or module at fault. Nothing has been sharded.
        CheckpointError: ``weights`` do not fit. Nothing has been sharded.
        PlanError: ``plan`` cannot be read, or is for another model or number of ranks. Nothing has been sharded.
        RankMismatchError: on every rank, if the model, its values or the weights differ between ranks, or do not fit on
            another one.

    On a CPU, glibc's malloc then keeps the memory that a step frees, in the whole process, unless the environment has
    settings of its own (``MALLOC_...``, ``GLIBC_TUNABLES``, ``LD_PRELOAD``).

    Source: ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054). The layout is that of PyTorch FSDP2.
    """
    if plan is not None:
        arguments = {name: value for name, value in locals().items() if name not in ("model", "plan", "spelling")}
        return fsdp(model, **_with_plan(model, plan, arguments | spelling))
    module = unjitted(model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"fsdp takes an nn.Module, not {type(module).__name__}")
    with _announced(module, mesh):
        options = parse_options(
            sharding_strategy=sharding_strategy,
            bucketing_strategy=bucketing_strategy,
            mp_policy=mp_policy,
            evenness=evenness,
            prefetch=prefetch,
            max_inflight_bytes=max_inflight_bytes,
            timeout=timeout,
            accumulation_dtype=accumulation_dtype,
            gradient_divide_factor=gradient_divide_factor,
            check_steps=check_steps,
            check_recording=check_recording,
            offload_policy=offload_policy,
            activation_checkpointing=activation_checkpointing,
            kernels=kernels,
            sum_reductions=sum_reductions,
            repeated_blocks=repeated_blocks,
            eager=eager,
            gather_dtype=gather_dtype,
            reduce_wire=reduce_wire,
            error_feedback=error_feedback,
            spelling=spelling,
        )
        ignored = tuple(ignored_params)
        found = _parameters_to_shard(module, options, ignored)
        checkpointed = checkpointed_blocks(module, options.checkpointing)
        run_by_torch = eager_modules(module, options.eager)
        repeated = blocks_of_a_kind(module, options.repeated_blocks, _blocks(module, options))
        strategies = assign(options.rules, {p.name: p.parameter for p in found})
        current = found[0].parameter.device if found else None
        target = choose_device(device, mesh, current, on_host=options.offload is not None)
        host = host_memory(options.offload, target)
        two_dimensions = any(s.needs_mesh for _, s in options.rules)
        groups = resolve_groups(mesh, target, hybrid=two_dimensions, timeout=options.timeout)
        group = groups.everyone
        tell_others_of_failure(group)
        _refuse_absent_device(target, group)
        _refuse_useless_offload(options, strategies.values())
        _refuse_useless_secondary(groups, strategies.values())
        if broadcast_from is None and any(s.replicates for s in strategies.values()):
            broadcast_from = dist.get_process_group_ranks(group)[0]

        stored = _stored(weights, module)
        given = {id(t) for t in module.state_dict(keep_vars=True).values()} if stored else set()
        refuse(module, found, broadcast_from=broadcast_from, param_init_fn=param_init_fn, group=group, given=given)
        gathers = _gathers(found, strategies, options, groups, target)
    others: dict[str, object] = {
        "broadcast_from": broadcast_from,
        "cost_model": cost_model,
        "checkpointed": [f"{name}: {what}" for name, (_, what) in checkpointed.items()],
    }
    others["reduce_wire"] = options.reduction.name if options.reduction is not None else "None"
    kept = {id(p.parameter) for p in found if broadcast_from is None and id(p.parameter) not in given}
    compare_models(module, found, strategies, gathers, options, others, weights_lines(stored), kept=kept, group=group)
    cost = cost_model or load_cost_model(target, group)
    homes = find_homes(found, strategies, groups, evenness=options.evenness, host=host)
    whole = [
        replace(_entry(p, strategies[p.name], homes[p.name], target, options), gather=gathers[p.name]) for p in found
    ]
    initialized = distribute(
        module,
        found,
        homes,
        group=group,
        device=target,
        broadcast_from=broadcast_from,
        param_init_fn=param_init_fn,
        given=given,
    )
    if initialized:
        compare(group, "the initial values of parameters", initialized, timeout=options.timeout, hint=SEED_HINT)
    entries = [
        replace(e, shard_shape=tuple(e.shard.shape), rest_device=e.shard.device) for e in whole if e.stand_in.numel()
    ]
    if group.size() == 1 and options.precision is None and host is None and options.gradient_divide_factor in (None, 1):
        entries = []  # nothing to do: the model is unchanged
    if current is not None and current.type not in (target.type, "meta") and host is None and group.rank() == 0:
        print(f"shardtrace: {type(module).__name__} was on {current}, its shards are on {target}", file=sys.stderr)
    if watches(group, target):
        watch(groups)
    leave_in_peace()
    refuse_wrong_optimizers()
    refuse_wrappers()
    share_overflows()
    state = ShardedState(module, groups, options, tuple(entries), cost, ignored=ignored, known=share_norms())
    state.claim_shards()
    if entries and target.type == "cpu":
        keep_freed_memory()
    inputs = _inputs_of_blocks(module, options, entries)
    add_hooks(module)
    attach(module, state, checkpointed.values(), repeated, run_by_torch, inputs, no_sync=no_sync)
    if stored:
        read_weights(stored, model_state(module))
    return _jit_again(model) if isinstance(model, ThunderModule) else model


def ddp(model: M, **options: Any) -> M:
    """``fsdp(model, sharding_strategy="ddp", ...)``: whole parameters on every rank, gradients averaged in buckets."""
    if "sharding_strategy" in options:
        raise TypeError("ddp() takes no sharding_strategy: call fsdp() to choose one")
    return fsdp(model, sharding_strategy="ddp", **options)


def _with_plan(model: nn.Module, plan: TrainingPlan | str | Path, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``fsdp`` that were ``given``, with the options of a plan. Call it on all ranks."""
    device = choose_device(given["device"], given["mesh"], next((p.device for p in model.parameters()), None))
    group = resolve_groups(given["mesh"], device, hybrid=_is_2d(given["mesh"]), timeout=given["timeout"]).everyone
    with _announced(model, given["mesh"]):
        found = plan if isinstance(plan, TrainingPlan) else TrainingPlan.from_json(plan)
        found.check(unjitted(model), group.size())
        defaults = inspect.signature(fsdp).parameters
        twice = [n for n in found.options if n in given and given[n] is not defaults[n].default]
        if twice:
            raise PlanError(f"the plan decides {', '.join(twice)}: leave it to the plan, or pass plan.options yourself")
    compare(group, "the plan", [found.hash], timeout=given["timeout"])
    mesh = given["mesh"]
    if mesh is None and found.mesh_shape is not None:
        mesh = init_device_mesh(device.type, found.mesh_shape, mesh_dim_names=("replicate", "shard"))
    return given | found.options | {"mesh": mesh}


def _is_2d(mesh: Mesh | None) -> bool:
    return isinstance(mesh, DeviceMesh) and mesh.ndim == 2


@contextmanager
def _announced(model: nn.Module, mesh: Mesh | None) -> Iterator[None]:
    """An error of this rank is raised by the other ranks of a process group, too, once they compare the model."""
    try:
        yield
    except Exception as error:
        if dist.is_initialized():
            with suppress(ValueError, TypeError):  # of a mesh that is wrong itself
                group = resolve_groups(mesh, torch.device("cpu"), hybrid=_is_2d(mesh)).everyone
                announce(group, f"the parameters of {type(model).__name__}", str(error))
        raise


def _stored(weights: Source | None, module: nn.Module) -> dict[str, Stored]:
    """The tensors that ``weights`` hold for a model that is not sharded yet. Raises CheckpointError if they do not
    fit."""
    if weights is None:
        return {}
    stored = stored_tensors(weights, module)
    check_weights(stored, model_state(module), strict=True)
    return stored


def _parameters_to_shard(module: nn.Module, options: Options, ignored: Iterable[nn.Parameter]) -> list[Place]:
    """All parameters that are neither ignored nor sharded by an earlier call for a submodule."""
    exclude = {id(entry.shard) for state in states_in(module) for entry in state.entries} | set(map(id, ignored))
    return places(module, exclude, _blocks(module, options))


def _blocks(module: nn.Module, options: Options) -> list[str]:
    return find_blocks(module) if options.wrap is None else chosen_blocks(module, options.wrap)


def _inputs_of_blocks(module: nn.Module, options: Options, entries: Sequence[Entry]) -> dict[nn.Module, torch.dtype]:
    """The dtype to which each block casts its inputs, as in FSDP2: that of its parameters."""
    policy = options.precision
    if policy is None or policy.param_dtype is None or not policy.cast_forward_inputs:
        return {}
    cast = {e.layer for e in entries if e.precision is not None}
    chosen = [b for b in _blocks(module, options) if any(f"{layer}.".startswith(f"{b}.") for layer in cast)]
    return {module.get_submodule(block): policy.param_dtype for block in chosen}


def _refuse_absent_device(device: torch.device, group: dist.ProcessGroup) -> None:
    if is_absent(device) and dist.get_backend(group) != "fake":
        raise ValueError(
            f'torch sees no {device.type} device on this machine: pass device="cpu", or compile for fake ranks, as in '
            'shardtrace.inspect(model, x, world_size=8, device="cuda")'
        )


def _refuse_useless_offload(options: Options, strategies: Collection[ShardingStrategy]) -> None:
    if options.offload and strategies and all(s.placement is Placement.REPLICATE for s in strategies):
        raise ValueError(
            'offload_policy keeps nothing in host memory with sharding_strategy="ddp", which replicates parameters on '
            'the device: choose one that shards, such as "zero3"'
        )


def _refuse_useless_secondary(groups: Groups, strategies: Collection[ShardingStrategy]) -> None:
    if ShardingStrategy.ZERO3_SECONDARY not in strategies or groups.outer is None:
        return
    if groups.inner.size() == 1 or groups.outer.size() == 1:
        same = "zero2" if groups.inner.size() == 1 else "zero3"
        shape = (groups.outer.size(), groups.inner.size())
        raise ValueError(
            f'sharding_strategy="zero3_secondary" on a mesh of shape {shape} is "{same}": choose that, or a mesh with '
            "more than one node and more than one rank in each"
        )


def _gathers(
    found: Sequence[Place],
    strategies: Mapping[str, ShardingStrategy],
    options: Options,
    groups: Groups,
    device: torch.device,
) -> dict[str, Wire | None]:
    """The wire on which each parameter is gathered, by name. Raises ValueError if a wire changes nothing."""
    ranks = groups.everyone.size()
    travelling = {
        p.name: Travelling(
            p.parameter, strategies[p.name], groups.inner.size() if strategies[p.name].is_hybrid else ranks, ranks
        )
        for p in found
    }
    refuse_reductions(options.reduction, travelling, error_feedback=options.error_feedback)
    if options.reduction is not None and device.type != "cpu" and backend_for(groups.inner, {device.type}) == "gloo":
        raise ValueError(f"gloo cannot send parts of gradients from {device.type}: use nccl with reduce_wire")
    return assign_gathers(options.gathers, travelling)


def _entry(place: Place, strategy: ShardingStrategy, home: Home, device: torch.device, options: Options) -> Entry:
    """The entry of a parameter that has not been sharded yet."""
    precision = None if any(keeps_dtype(owner.module) for owner in place.owners) else options.precision
    return Entry(
        name=place.name,
        full_shape=tuple(place.parameter.shape),
        layer=place.layer,
        block=place.block,
        shard=place.parameter,
        shard_shape=(),
        rest_device=device,
        dtype=place.parameter.dtype,
        strategy=strategy,
        home=home,
        stand_in=stand_in(place.parameter, device, precision),
        owners=tuple(place.owners),
        precision=precision,
    )


def _jit_again(jitted: ThunderModule) -> ThunderModule:
    """A new jitted module with the same options. The old one has compiled traces of whole parameters."""
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
