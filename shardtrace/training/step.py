"""What a script calls around a step: batches of ranks, gradients between backward and the step, optimizers of shards.

Note [Aborted reductions]: nccl reduces while the program goes on, so a reduction may end without a result after the
line that waits for it. Each step of an optimizer that holds shards raises, before it changes them and before it
returns, if a collective has been aborted by then. It does not wait for the device. A reduction that is aborted later
leaves parameters without meaning, and the next communication raises: a run continues from its last checkpoint.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakSet

from passes.comm.sequence import Part, local_part
from passes.compat.jit import unjitted
from passes.compat.versions import all_gather_single
from passes.plan import Axis, Keep, Level, Placement
from passes.plan.plan import Split
from shardtrace.model.shards import Entry, current
from shardtrace.model.state import (
    Link,
    ShardedState,
    link_of,
    own_state,
    sharded_states,
    state_around,
    state_of,
    states_in,
)
from shardtrace.model.tracing import plan_of
from shardtrace.options.policies import ExpertParallel
from shardtrace.ranks.failure import communicating, failed, reason_to_stop
from shardtrace.ranks.mesh import is_alone
from shardtrace.record.calls import Path, map_tensors

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# ---- batches ----


T = TypeVar("T")


def shard_sequence(model: nn.Module, batch: T) -> T:
    """This rank's part of a batch, for a model whose sequences are split (``context_parallel``).

    Each tensor (batch, sequence, ...) becomes (batch, sequence / N, ...): of 2 N chunks of the sequence, rank r of N
    has the chunks r and 2 N - 1 - r, so that causal attention has the same work on all ranks. Tensors without the
    dimension of the sequence, or of size 1 there, stay whole. ::

        context = ContextParallel("context", arguments="part", returns="part")
        model = shardtrace.fsdp(model, mesh=mesh, context_parallel=context)
        x, y = shardtrace.shard_sequence(model, (x, y))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / tokens_of_whole_batch

    Args:
        model: sharded, before or after ``thunder.jit``.
        batch: a tensor, or any structure of tensors, whole.

    Returns:
        A copy of the structure with parts. The batch itself if the model takes whole sequences, or if each rank has
        its own batch (``expert_parallel``).

    Raises:
        ValueError: if the model is not sharded, or a sequence does not divide into 2 N chunks.
    """
    _, (state, *_) = sharded_states(model)
    plan, options = plan_of(state), state.options.context
    if plan is None or options is None or plan.ranks == 1 or isinstance(options, ExpertParallel):
        return batch
    dim = options.sequence_dim

    def cut(t: torch.Tensor, path: Path) -> torch.Tensor:
        if t.dim() <= dim or t.shape[dim] == 1:
            return t
        if t.shape[dim] % (2 * plan.ranks):
            name = "".join(f"[{key!r}]" for _, key in path)
            raise ValueError(
                f"batch{name} has {t.shape[dim]} positions in dimension {dim}, which do not divide into "
                f"{2 * plan.ranks} chunks for {plan.ranks} ranks: pad it to a multiple of {2 * plan.ranks}, or give "
                'the model whole batches with ContextParallel(arguments="whole")'
            )
        return local_part(t, Part(plan, Split.along(dim, t.shape[dim])))

    found: T = map_tensors(batch, cut)
    return found


Batch = TypeVar("Batch")


def join(model: nn.Module, batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Iterate over this rank's batches until all ranks have used theirs, all in step. ::

        for (x, y), weight in shardtrace.join(model, loader):
            (cmodel(x, y) * weight).backward()
            optimizer.step()
            optimizer.zero_grad()

    Every step of a sharded model is a collective, so that a rank that has no batch left must go on with the others. It
    gets its last batch again, with weight 0. A rank that has a batch gets the weight N / (ranks that have one): the
    gradient is then the mean over these ranks. Buffers, such as those of batch norm, see the repeated batches.

    A collective of one number before each step. Leave the loop in the same step on all ranks. PyTorch's ``Join`` does
    the same for DDP, where a rank need not run the model to take part.

    Args:
        model: the sharded model, before or after ``thunder.jit``.
        batches: this rank's batches; may be endless on some ranks only if the loop is left.

    Yields:
        A batch, and the factor of its loss.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: on every rank, if a rank has no batch at all while another one has.
    """
    _, states = sharded_states(model)
    iterator = iter(batches)
    last: list[Batch] = []
    while True:
        has, now = True, last
        try:
            now = [next(iterator)]
        except StopIteration:
            has = False
        having, empty = _count(states[0], has, first=not now)
        if not having:
            return
        if empty:
            raise RuntimeError(
                f"{empty} rank(s) have no batch at all, and so none that they could repeat in step with the others: "
                "give each rank at least one"
            )
        last = now
        yield now[0], states[0].group.size() / having if has else 0.0


def _count(state: ShardedState, has: bool, *, first: bool) -> tuple[int, int]:
    """The number of ranks that have a batch, and of those that never had one."""
    if is_alone(state.group):
        return int(has), int(first and not has)
    device = state.entries[0].device if state.entries else torch.device("cpu")
    counts = torch.tensor([int(has), int(first and not has)], device=device)
    with communicating("the number of ranks that have a batch", state.group):
        dist.all_reduce(counts, group=state.group)
    having, empty = counts.tolist()
    return having, empty


# ---- gradients ----


@contextmanager
def no_sync(model: nn.Module, *, reduce_each: bool | Literal["shard"] = False) -> Iterator[None]:
    """Add up gradients on each rank without reducing them. The first backward outside the context reduces the sums.

    A backward inside keeps its gradients, wherever its forward ran, as with FSDP2. All forwards may come before the
    first backward. ``model.no_sync()`` is the same. ::

        for i, (x, y) in enumerate(batches):
            with shardtrace.no_sync(model) if (i + 1) % 4 else nullcontext():
                (cmodel(x, y) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    Thunder compiles one step for inside and one for the step that reduces. A backward on the other side than its
    forward is compiled by itself. Every rank keeps the unsharded sums of all parameters from the first step inside
    until they are reduced: 4 bytes per element (fp32, even if gradients have a lower precision, unless
    ``CommPolicy.accumulation_dtype`` is None). No gradients are sent inside. ``zero_grad`` of an optimizer or a module
    drops the sums of its parameters, and so does an exception that leaves the context. Setting ``.grad`` to None by
    hand does not. ``optimizer.step()`` raises if its parameters have sums that are not reduced.

    Args:
        model: a sharded module, a module that contains sharded modules, or either one after ``thunder.jit``; or a
            submodule of a sharded one, whose gradients are then kept and those of others reduced.
        reduce_each: True: reduce in each step nevertheless, and add up this rank's shards in ``.grad``. This takes no
            memory beyond the shards' gradients, and one reduction per step. The context then changes nothing.
            "shard": with a hybrid strategy, reduce_scatter in each step, add up shards, and all_reduce them over the
            replicas only in the step outside. Other strategies reduce in each step.

    Raises:
        ValueError: if the model is not sharded.
        RuntimeError: at the next forward, if the step that reduces did not use a parameter that was used inside.
    """
    if reduce_each is True:
        yield
        return
    keep = keep_of(model, Level.REPLICAS if reduce_each == "shard" else Level.WHOLE)
    before = {state: state.runtime.keep for state in keep}
    for state, now in keep.items():
        state.runtime.keep = now
    try:
        yield
    except BaseException:
        for state in keep:
            state.runtime.kept.clear()
        raise
    finally:
        for state, kept in before.items():
            state.runtime.keep = kept


def keep_of(model: nn.Module, level: Level) -> dict[ShardedState, Keep]:
    """What the states of a model are to keep; those of its parameters, if it is a part of a sharded one."""
    module = unjitted(model)
    keep = {state: Keep(level) for state in states_in(module)}
    outer = state_around(module) if state_of(module) is None else None
    if outer is not None:
        if outer.runtime.keep is None:
            keep[outer] = Keep(level, outer.numbers_in(module))
    elif not keep:
        raise ValueError(f"{type(module).__name__} is not sharded: call shardtrace.fsdp(model) first")
    return keep


def set_sync(module: nn.Module, sync: bool, level: Level = Level.WHOLE, *, recurse: bool = True) -> None:
    """Until it is called again, backwards of a sharded model, or of a part of one, reduce gradients, or are as inside
    :func:`no_sync`. Without ``recurse`` this holds for parameters that are in no block inside ``module``.

    Raises NotImplementedError if another part is to keep gradients on another level.
    """
    state = own_state(module)
    _set_sync(state, state.numbers_in(module, recurse=recurse), sync, level)
    for inner in states_in(module) if recurse else ():
        if inner is not state:
            _set_sync(inner, frozenset(range(len(inner.entries))), sync, level)


def _set_sync(state: ShardedState, mine: frozenset[int], sync: bool, level: Level) -> None:
    everything, before = frozenset(range(len(state.entries))), state.runtime.keep
    if before is None:
        before = Keep(level, frozenset())
    kept = everything if before.parameters is None else before.parameters
    if before.level is Level.WHOLE and level is Level.REPLICAS:
        mine -= kept  # are not reduced over shards either, whatever this switch says
    if not mine:
        return
    if not sync and before.level is not level and kept - mine:
        raise NotImplementedError(
            "set_requires_gradient_sync and set_requires_all_reduce are switched off for different parts of "
            f"{state.model_name}: switch off one of them"
        )
    level, kept = (before.level, kept - mine) if sync else (level, kept | mine)
    state.runtime.keep = Keep(level, None if kept == everything else kept) if kept else None


def syncs(module: nn.Module) -> bool:
    """Whether steps of a sharded model reduce gradients in full."""
    return own_state(module).runtime.keep is None


TORCHS_NORM, TORCHS_CLIP = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_


def clip_grad_norm_(
    model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that the norm of all of them, taken as one vector, is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` for sharded models, which may be given the model itself. Each
    element counts once, whichever ranks hold it. Unsharded parameters are taken to be equal on all ranks, and count
    once. A collective: every rank must call it.

    Args:
        model_or_params: a sharded model, before or after ``thunder.jit``, or parameters of such models.
        max_norm: the largest norm that is left unchanged.
        norm_type: p of the p-norm, greater than 0; ``float("inf")`` is the largest absolute value.
        error_if_nonfinite: raise if the norm is inf or NaN, and leave gradients unchanged.
        foreach: as in torch: one kernel for many gradients.

    Returns:
        The norm before clipping, a 0-dim tensor, equal on all ranks.

    Raises:
        ValueError: if ``norm_type`` is not positive.
        RuntimeError: with ``error_if_nonfinite``, on every rank.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be more than 0, not {norm_type}")
    params = _parameters(model_or_params)
    grads = ((p, p.grad) for p in params if p.grad is not None)
    counted = [grad for p, grad in grads if grad.numel() or link_of(p) is not None]  # which other ranks may have
    norm = torch.nn.utils.get_total_norm(counted, norm_type, foreach=foreach)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the {norm_type:g}-norm of all gradients is {norm.item()}: nothing was clipped; "
            "error_if_nonfinite=False would scale gradients by it"
        )
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm


def _parameters(model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(model_or_params, nn.Module):
        return list(sharded_states(model_or_params)[0].parameters())
    return [model_or_params] if isinstance(model_or_params, torch.Tensor) else list(model_or_params)


@functools.cache  # once for each process
def share_norms() -> WeakSet[ShardedState]:
    """Make ``torch.nn.utils.clip_grad_norm_`` and the functions that it consists of right for all gradients of sharded
    models, whoever imported it: beside DTensors there may be plain tensors, shards in host memory that the ranks cannot
    send, and parameters that only one rank owns. Norms are plain tensors, and computed on the rows of each rank.

    Returns the set of the models whose gradients are known.
    """
    states: WeakSet[ShardedState] = WeakSet()

    @functools.wraps(TORCHS_NORM)
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        owned = {i: spread for state in states if state.owns for i, spread in _owned(state)}
        spreads: dict[Spread, list[torch.Tensor]] = {}
        for grad in grads:
            spread = _spread(grad) if isinstance(grad, DTensor) else owned.get(id(grad), ALONE)
            spreads.setdefault(spread, []).append(grad)
        if spreads.keys() <= {ALONE}:
            return TORCHS_NORM(grads, norm_type, error_if_nonfinite, foreach)
        norms = [_norm(mine, spread, float(norm_type), foreach) for spread, mine in spreads.items()]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), float(norm_type))
        return TORCHS_NORM([total], norm_type, error_if_nonfinite)  # raises on every rank

    @functools.wraps(TORCHS_CLIP)
    def clip_grads_with_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        mine = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for kind in (True, False):  # foreach functions take one of them
            TORCHS_CLIP([p for p in mine if isinstance(p.grad, DTensor) is kind], *args, **kwargs)

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = get_total_norm
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = clip_grads_with_norm_
    return states


class Spread(NamedTuple):
    """The groups whose ranks hold different parts of a tensor, and the device whose tensors they can send."""

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device | None


ALONE = Spread((), None)  # of tensors that are taken to be equal on all ranks


def _spread(grad: DTensor) -> Spread:
    dims = (dim for dim, placement in enumerate(grad.placements) if placement.is_shard())
    return Spread(tuple(grad.device_mesh.get_group(dim) for dim in dims), torch.device(grad.device_mesh.device_type))


def _owned(state: ShardedState) -> Iterator[tuple[int, Spread]]:
    """The ids of the gradients of parameters that only one rank owns."""
    for e in state.entries:
        if e.home.placement is Placement.OWNER and e.shard.grad is not None:
            yield id(e.shard.grad), Spread((state.group,), e.device)


def _norm(grads: list[torch.Tensor], spread: Spread, norm_type: float, foreach: bool | None) -> torch.Tensor:
    """The norm over all ranks of gradients that are spread alike."""
    mine = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norm = TORCHS_NORM([grad for grad in mine if grad.numel()], norm_type, False, foreach)
    for group in spread.groups:
        norm = norm if is_alone(group) else _norm_over_ranks(norm.to(spread.device), norm_type, group)
    return norm


def _norm_over_ranks(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The norm of all ranks' norms. They are gathered, because some backends lose NaN in a reduction."""
    norms = norm.new_empty(group.size())
    with communicating("the norms of the gradients of all ranks", group):
        all_gather_single(norms, norm.reshape(1), group=group)
    return torch.linalg.vector_norm(norms, norm_type)


Found = dict[torch.device, torch.Tensor]


@functools.cache  # once for each process
def share_overflows() -> None:
    """Make every GradScaler, built before or after, find what any rank of a sharded model finds.

    A rank has only the gradients of its shards. By itself it would skip the step and lower its scale, while others do
    not. (torch asks the other ranks only if the first gradient is a shard, and not for shards in host memory.) The
    method that looks for an inf or NaN has no hook, and is replaced. It is given the rows of this rank. The collective,
    of one number, is sent when a scaler unscales the gradients of an optimizer: every rank must do so.
    """
    look = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(look)
    def everywhere(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Found:
        groups = [{"params": [_rows(p) for p in group["params"]]} for group in optimizer.param_groups]
        mine: Any = SimpleNamespace(param_groups=groups)
        return _anywhere(look(self, mine, *args, **kwargs), optimizer)

    torch.amp.GradScaler._unscale_grads_ = everywhere  # type: ignore[method-assign]


def _rows(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a parameter that is a DTensor, and of its gradient."""
    if not isinstance(parameter.grad, DTensor):
        return parameter
    rows = parameter.detach().to_local()  # type: ignore[attr-defined]
    rows.grad = parameter.grad.to_local()
    return rows


def _anywhere(found: Found, optimizer: torch.optim.Optimizer) -> Found:
    """What any rank has found, on each device of this rank's gradients, and on one if it has none."""
    links = [link_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    models = {link.state: link.entry.device for link in links if link is not None}
    # to the device that computes: its tensors can be sent
    groups = {state.group: device for state, device in models.items() if not is_alone(state.group)}
    for group, device in groups.items():
        anywhere = torch.zeros((), device=device)
        for value in found.values():
            anywhere = torch.maximum(anywhere, value.to(device))
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
        found = {where: anywhere.to(where) for where in found or (device,)}
    return found


# ---- optimizers ----


def split_parameters(
    model: nn.Module, predicate: Callable[[str, nn.Parameter], bool]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters for which ``predicate(name, parameter)`` is true, and all others, each in the order of the model.

    The predicate sees each parameter with its full shape, without values, also if the model is sharded: a rank holds a
    0-dim parameter with shape (1,), and an owned one with no rows on the other ranks. ::

        is_matrix = lambda name, p: p.ndim == 2 and "embed" not in name
        shardtrace.fsdp(model, sharding_strategy={is_matrix: "owner", "*": "zero3"})
        matrices, others = shardtrace.split_parameters(model, is_matrix)
        optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]

    Args:
        model: sharded or not, before or after ``thunder.jit``.
    """
    module = unjitted(model)
    chosen: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        (chosen if predicate(name, _whole(parameter)) else others).append(parameter)
    return chosen, others


def _whole(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the full shape, on the meta device."""
    link = link_of(parameter)
    shape = parameter.shape if link is None else link.entry.full_shape
    return nn.Parameter(parameter.detach().new_empty(shape, device="meta"), requires_grad=parameter.requires_grad)


# Optimizers that are wrong on parameters of which each is whole on one rank and empty elsewhere. Adafactor divides by a
# tensor's number of elements. LBFGS takes inner products of all parameters together. They are known by name because
# other libraries have an Adafactor of their own.
WRONG_WITH_OWNERS = ("Adafactor", "LBFGS")


@functools.cache  # once for each process
def refuse_wrong_steps() -> None:
    """Make ``step`` of every optimizer, built before or after, raise if it would be wrong on the parameters that it
    holds: Note [Aborted reductions], and optimizers that mix tensors of which one rank owns each.

    The hooks are torch's global ones. Nothing is stored on an optimizer, so that it copies and pickles as before.
    """
    register_optimizer_step_pre_hook(_check_results)
    register_optimizer_step_post_hook(_check_results)
    register_optimizer_step_pre_hook(_check_optimizer)
    register_optimizer_step_pre_hook(_check_sums)
    for cls in (torch.optim.Optimizer, nn.Module):  # torch has no hook there
        cls.zero_grad = _dropping(cls.zero_grad)  # type: ignore[method-assign]


def _dropping(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """``zero_grad`` of optimizers or modules that also drops what no_sync has added up for their parameters."""

    @functools.wraps(zero_grad)
    def dropping(self: Any, *args: Any, **kwargs: Any) -> None:
        zero_grad(self, *args, **kwargs)
        for link, place in _sums(self):
            del link.state.runtime.kept.by_place[place]

    return dropping


def _sums(holder: torch.optim.Optimizer | nn.Module) -> list[tuple[Link, tuple[Axis, int]]]:
    """The parameters of ``holder`` whose gradients were added up and not reduced, and where their sums are."""
    groups = [holder.parameters()] if isinstance(holder, nn.Module) else [g["params"] for g in holder.param_groups]
    links = {id(link): link for group in groups for p in group if (link := link_of(p)) is not None}
    found = [(link, kept) for link in links.values() if (kept := link.state.runtime.kept).by_place]
    index = {id(link): link.state.by_stand_in[id(link.entry.stand_in)].index for link, _ in found}
    return [(link, place) for link, kept in found for place in kept.of(index[id(link)])]


def _check_sums(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raises RuntimeError if gradients were added up and not reduced; after the closure, if there is one."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return _refuse_sums(optimizer)

    def checked() -> Any:
        loss = closure()
        _refuse_sums(optimizer)
        return loss

    return (args, kwargs | {"closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)


def _refuse_sums(optimizer: torch.optim.Optimizer) -> None:
    for link, _ in _sums(optimizer):
        raise RuntimeError(
            f"the gradient of parameter {link.entry.name!r} of {link.state.model_name} was added up inside no_sync, or "
            "without gradient sync, and is not reduced: call the last backward before optimizer.step() outside, with "
            "the switch on, or drop the sums with zero_grad()"
        )


def _check_results(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    reason = reason_to_stop()
    if reason and any(link_of(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise failed(reason, "a step of an optimizer")


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    name = _known_name(type(optimizer))  # type: ignore[arg-type]
    take_over(optimizer)
    for group in optimizer.param_groups:
        _part_kinds(group)
        for parameter in group["params"] if name is not None else ():
            link = link_of(parameter)
            if link is not None and link.entry.home.placement is Placement.OWNER and parameter.requires_grad:
                raise RuntimeError(
                    f"{type(optimizer).__name__} computes with all tensors together and would be wrong on parameter "
                    f"{link.entry.name!r} of {link.state.model_name}, which only one rank owns: call fsdp() with "
                    'another sharding_strategy than "owner" for all parameters of this optimizer'
                )


def _part_kinds(group: dict[str, Any]) -> None:
    """Keeps a group from updating DTensors and plain tensors together, for which torch would raise: they are updated
    one by one unless the group chooses; then parameters without elements lose their gradient."""
    plain = [p for p in group["params"] if not isinstance(p, DTensor)]
    if not plain or len(plain) == len(group["params"]):
        return
    if group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = None if all(p.device.type == "cpu" for p in plain) else False  # the default of a CPU
    elif group.get("foreach") or group.get("fused"):
        for p in plain:
            p.grad = p.grad if p.numel() else None


def take_over(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer that was built before ``fsdp`` the parameters of now, and their part of its state."""
    for group in optimizer.param_groups:
        _take_over(optimizer, group["params"])


def _take_over(optimizer: torch.optim.Optimizer, parameters: list[Any]) -> None:
    for i, old in enumerate(parameters):
        if (new := current(old)) is not old:
            parameters[i] = new
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
    links = [link for p in parameters if (link := link_of(p)) is not None and not link.state.unsharded]
    # of others, the number of steps would be taken for state that is laid out like the parameter
    several = next((link.entry for link in links if math.prod(link.entry.full_shape) > 1), None)
    keys = _whole_state(optimizer.state.get(several.shard, {}), several) if several is not None else []
    for entry in (link.entry for link in links if keys):
        state = optimizer.state.get(entry.shard, {})
        if entry.home.mesh is not None or tuple(entry.shard.shape) != entry.full_shape:
            state |= {key: entry.part(state[key]) for key in _whole_state(state, entry) if key in keys}


def _whole_state(state: dict[str, Any], entry: Entry) -> list[str]:
    """The keys of an optimizer's state of a parameter that have its whole shape, and are plain tensors."""
    plain = ((k, v) for k, v in state.items() if isinstance(v, torch.Tensor) and not isinstance(v, DTensor))
    return [k for k, v in plain if tuple(v.shape) == entry.full_shape]


@functools.cache
def _known_name(cls: Any) -> str | None:
    """The name by which a class of optimizers, or the nearest of its bases, is in the list; None if it is not."""
    return next((base.__name__ for base in cls.__mro__ if base.__name__ in WRONG_WITH_OWNERS), None)
