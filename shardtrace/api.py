"""``fsdp``: shards a model in place."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from passes.compat.jit import jitted_module, jitted_transforms, unjitted
from shardtrace.checkpoint.state import add_hooks, model_state
from shardtrace.checkpoint.weights import Source, Stored, check_weights, read_weights, stored_tensors, weights_lines
from shardtrace.model.classes import attach
from shardtrace.model.distribute import (
    choose,
    choose_gathers,
    compare_models,
    find_homes,
    find_target,
    refuse,
    refuse_shared,
    shard_parameters,
    with_plan,
)
from shardtrace.model.operators import complete_operators
from shardtrace.model.shards import ParameterMemory
from shardtrace.model.state import ShardedState, keep_data
from shardtrace.model.tracing import refuse_dtensors
from shardtrace.options.options import parse_options
from shardtrace.options.policies import (
    Checks,
    CommPolicy,
    CompilePolicy,
    ContextParallel,
    InitPolicy,
    MemoryBudget,
    TensorParallel,
    with_experts,
)
from shardtrace.options.strategy import Checkpointed, ShardingStrategy, Wrap, parse_rules
from shardtrace.planner.calibrate import load_cost_model
from shardtrace.planner.training_plan import TrainingPlan
from shardtrace.ranks.consensus import announced
from shardtrace.ranks.mesh import Mesh, keep_freed_memory, leave_in_peace, size_of
from shardtrace.trainers import join_trainers
from shardtrace.training.methods import METHODS, METHODS_OF_PARTS, refuse_wrappers
from shardtrace.training.step import refuse_wrong_steps, share_norms, share_overflows

import thunder
import torch.distributed as dist
from thunder.core.module import ThunderModule
from torch import nn
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
    activation_checkpointing: Checkpointed = None,
    offload_policy: OffloadPolicy | None = None,
    context_parallel: ContextParallel | str | None = None,
    tensor_parallel: TensorParallel | str | None = None,
    expert_parallel: str | None = None,
    memory: MemoryBudget | str | float | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    init_policy: InitPolicy = InitPolicy(),
    comm_policy: CommPolicy = CommPolicy(),
    compile_policy: CompilePolicy = CompilePolicy(),
    checks: Checks = Checks(),
    **spelling: Any,
) -> M:
    """Shards the parameters of ``model`` over the N ranks of ``mesh``, in place, and returns the model.

    By default each rank then holds ``ceil(rows / N)`` rows of dim 0 of each parameter, padded with zeros. The
    ``nn.Parameter`` objects and the names in ``state_dict()`` stay the same, so that an optimizer may be built before
    or after. The model compiles itself when it is called, or is compiled by a ``thunder.jit`` around it. Lines of the
    trace gather full parameters and free them. The gradient of a shard is the mean over ranks.

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
            "ddp", "*": "zero3"}``, mixes them: the first pattern that matches any name of a parameter
            counts. A predicate on (name, parameter), which sees whole parameters, may stand in place of a pattern.
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
        activation_checkpointing: blocks that save only their inputs and are recomputed in backward: their class (or
            several), a predicate on ``(module)`` or ``(name, module)``, n for every n-th repeated block, or "full" or
            True for every block. "cheap" recomputes in every block only what is cheap, no products and no attention;
            which values are saved instead is found by a minimum cut. "host" recomputes nothing and keeps what blocks
            save in host memory until their backward; "full+host" and "cheap+host" do both. A mapping of names or
            patterns of blocks to these or "none" mixes them. Random numbers are not drawn again: a dropout saves its
            mask.
        offload_policy: PyTorch's CPUOffloadPolicy keeps shards, their gradients and thus the optimizer state in host
            memory, which is page-locked (``pin_memory``; torch allocates powers of two). Replicated parameters stay on
            the device. A world of one also gathers. With a GradScaler, call ``scaler.scale(torch.zeros(()))`` once
            before training. It then keeps the scale in host memory; otherwise torch reads a copy that has not arrived.
        context_parallel: the name of the dimension of ``mesh`` whose ranks hold the parts of one sequence, or a
            :class:`ContextParallel`. These ranks get the same batch, and each computes on its part of it. Parameters
            are sharded over all dimensions of the mesh. Outputs and gradients are those of whole sequences.
        tensor_parallel: the name of the dimension of ``mesh`` whose ranks compute with parts of parameters, or a
            :class:`TensorParallel`. These ranks get the same batch, and each computes some heads of attention and some
            columns of the products between. Parameters are sharded over all dimensions of the mesh, and a rank receives
            the parts with which it computes. What a step cannot compute in parts is computed whole.
        expert_parallel: the name of the dimension of ``mesh`` whose ranks compute experts together. Each has a batch of
            its own, of the same shape, and receives a part of every expert, for the tokens of all of them, instead of
            all experts. A loss in forward is that of all these batches; one that the script computes of the results is
            averaged over ranks. Experts are those of grouped products, as in transformers 5. Parameters are sharded
            over all dimensions of the mesh.
        memory: that of a rank, as in "80GB" or a number of bytes, or a :class:`MemoryBudget`. When the first batch of
            a shape is compiled, the fastest step that fits is chosen: what each block recomputes (if
            ``activation_checkpointing`` is None), which parameters of "zero3" and "zero2" stay gathered until
            backward, the prefetch, and whether the loss is computed in chunks. A line on stderr says what. Needs scipy.
        ignored_params: parameters that are not sharded and whose gradients are not reduced. They may lie outside
            ``model`` if one jitted function trains both. It is an error if a step uses any other trainable parameter
            that is not sharded.
        init_policy, comm_policy, compile_policy, checks: the options that few scripts need, as fields of
            :class:`InitPolicy`, :class:`CommPolicy`, :class:`CompilePolicy` and :class:`Checks`.
        spelling: names that other libraries use: ``shard_strat`` (sharding_strategy), ``reshard_after_forward`` (True
            for "zero3", False for "zero2", a number of ranks for "zero3_secondary"), ``mp`` (mp_policy),
            ``auto_wrap_policy``, ``TransformerBlock`` (bucketing_strategy), ``auto_wrap`` (False: one bucket),
            ``bucket_cap_mb`` (a size). ``compile`` is ``CompilePolicy.jit``: arguments of ``thunder.jit``, or False to
            leave compiling to one around the model.

    Raises:
        ValueError, RuntimeError: the error names the parameter or module at fault. Nothing has been sharded.
        CheckpointError: ``weights`` do not fit. Nothing has been sharded.
        PlanError: ``plan`` cannot be read, or is for another model or number of ranks. Nothing has been sharded.
        MemoryBudgetError: when a batch is compiled, if no step fits into ``memory``.
        RankMismatchError: on every rank, if the model, its values or the weights differ between ranks, or do not fit on
            another one.

    On a CPU, glibc's malloc then keeps the memory that a step frees, in the whole process, unless the environment has
    settings of its own (``MALLOC_...``, ``GLIBC_TUNABLES``, ``LD_PRELOAD``).

    Source: ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054). The layout is that of PyTorch FSDP2.
    """
    arguments = {
        "sharding_strategy": sharding_strategy, "bucketing_strategy": bucketing_strategy, "mesh": mesh,
        "mp_policy": mp_policy, "activation_checkpointing": activation_checkpointing, "offload_policy": offload_policy,
        "context_parallel": with_experts(context_parallel, expert_parallel), "tensor_parallel": tensor_parallel,
        "memory": memory, "ignored_params": ignored_params,
        "init_policy": init_policy, "comm_policy": comm_policy, "compile_policy": compile_policy, "checks": checks,
    }  # fmt: skip
    module = unjitted(model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"fsdp takes an nn.Module, not {type(module).__name__}")
    if plan is not None:
        return fsdp(model, **with_plan(module, plan, arguments, spelling))
    with announced(module, mesh):
        options = parse_options(arguments, spelling)
        if options.nodes_of == size_of(mesh):  # one node: as in FSDP2
            options = replace(options, rules=parse_rules("zero3"), nodes_of=None)
        ignored = tuple(ignored_params)
        chosen = choose(module, options, ignored)
        target = find_target(chosen, options, mesh)
        group = target.groups.everyone
        if options.init.broadcast_from is None and any(s.replicates for s in chosen.strategies.values()):
            first = dist.get_process_group_ranks(group)[0]
            options = replace(options, init=replace(options.init, broadcast_from=first))
        stored = _stored(options.init.weights, module)
        given = {id(t) for t in module.state_dict(keep_vars=True).values()} if stored else set()
        refuse(module, chosen.places, options.init, group=group, given=given)
        homes, known = find_homes(chosen, target, evenness=options.init.evenness), share_norms()
        elsewhere = [p for p in chosen.places if homes[p.name].is_spread or target.host is not None]
        left = ParameterMemory((f"{p.name!r} of {type(module).__name__}", p.parameter) for p in elsewhere)
        refuse_shared(module, chosen.places, [left, *(state.left for state in known)])
        gathers = choose_gathers(chosen, options, target)
    compare_models(module, chosen, gathers, options, weights=weights_lines(stored), given=given, group=group)
    cost = options.compile.cost_model or load_cost_model(target.device, group)
    entries = shard_parameters(module, chosen, gathers, target, options, given=given)
    before, after = chosen.device, target.device
    if before is not None and before.type not in (after.type, "meta") and target.host is None and group.rank() == 0:
        print(f"shardtrace: {type(module).__name__} was on {before}, its shards are on {after}", file=sys.stderr)
    _guard_process()
    kept = replace(options, init=InitPolicy())  # the weights may be large
    state = ShardedState(module, target.groups, kept, entries, cost, ignored=ignored, known=known, left=left)
    state.claim_shards()
    if entries and target.device.type == "cpu":
        keep_freed_memory()
    attach(module, state, chosen, METHODS, METHODS_OF_PARTS)
    add_hooks(module)
    if stored:
        read_weights(stored, model_state(module))
    return _jit_again(model) if isinstance(model, ThunderModule) else model


def ddp(model: M, **options: Any) -> M:
    """``fsdp(model, sharding_strategy="ddp", ...)``: whole parameters on every rank, gradients averaged in buckets."""
    if "sharding_strategy" in options:
        raise TypeError("ddp() takes no sharding_strategy: call fsdp() to choose one")
    return fsdp(model, sharding_strategy="ddp", **options)


def _stored(weights: Source | None, module: nn.Module) -> dict[str, Stored]:
    """The tensors that ``weights`` hold for a model that is not sharded yet. Raises CheckpointError if they do not
    fit."""
    if weights is None:
        return {}
    stored = stored_tensors(weights, module)
    check_weights(stored, model_state(module), strict=True)
    return stored


def _guard_process() -> None:
    """Guards the end of the process, and functions of torch that would take a shard for a parameter."""
    leave_in_peace()
    keep_data()
    complete_operators()
    refuse_dtensors()
    refuse_wrong_steps()
    refuse_wrappers()
    share_overflows()
    join_trainers()


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
