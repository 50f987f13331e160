"""Conversion between shards and whole parameters: full state dicts and ``full_params``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from passes.plan import Shape
from shardtrace.model.entry import Entry
from shardtrace.model.materialize import broadcast
from shardtrace.model.state import ShardedState, sharded_states
from shardtrace.ranks.consensus import RankMismatchError, compare
from shardtrace.ranks.failure import communicating
from shardtrace.training.buffers import warn_of_differing_buffers

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys


def sharded_entries(model: nn.Module) -> tuple[nn.Module, list[ShardedState], dict[int, Entry]]:
    """The module itself (not jitted), the sharded states in it, and each shard's entry by the shard's id."""
    module, states = sharded_states(model)
    if any(state.unsharded for state in states):
        raise RuntimeError("inside full_params the parameters are whole: use model.state_dict() there")
    for state in states:
        state.adopt()
    return module, states, {id(e.shard): e for state in states for e in state.entries}


def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Any]:
    """The state dict of the unsharded model: equal, key by key, to the single-process ``state_dict()``.

    A collective: every rank of the model's group must call it. Parameters are gathered one at a time, and stay on the
    device of their shards. (With ``offload_policy`` that is host memory: one whole model for each rank that keeps it.)

    Args:
        model: a sharded module, a module that contains sharded modules, or either one after ``thunder.jit``.
        rank0_only: only the first rank of the group keeps the values; the others return an empty dict.
        cpu: move each value to host memory as it is gathered, so that the device never holds more than one.
    """
    module, states, entries = sharded_entries(model)
    warn_of_differing_buffers(module, states[0].group)
    keep = not rank0_only or states[0].group.rank() == 0
    whole: dict[int, torch.Tensor] = {}  # tied weights stay one tensor
    result: OrderedDict[str, Any] = OrderedDict()
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            if id(value) not in whole:
                entry = entries.get(id(value))
                full = entry.whole(value) if entry else value.detach()
                whole[id(value)] = (full.cpu() if cpu else full.to(value.device)) if keep else torch.empty(0)
            value = whole[id(value)]
        if keep:
            result[key] = value
    return result


def full_gradients(model: nn.Module, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, torch.Tensor]:
    """The whole gradients, by the names of their parameters: of the parameters' full shapes, averaged over ranks as
    those of the shards are. FSDP2's ``p.grad.full_tensor()`` for all parameters that have a gradient.

    A collective: every rank of the model's group must call it. Gradients are gathered one at a time.

    Args:
        model: a sharded module, a module that contains sharded modules, or either one after ``thunder.jit``.
        rank0_only, cpu: as for :func:`full_state_dict`.
    """
    module, states, entries = sharded_entries(model)
    group, parameters = states[0].group, dict(module.named_parameters())
    device = next((entry.device for entry in entries.values()), None)
    have = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.uint8, device=device)
    with communicating("which parameters have gradients", group):
        dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
    keep = not rank0_only or group.rank() == 0
    result: dict[str, torch.Tensor] = {}
    for (name, p), has in zip(parameters.items(), have.tolist(), strict=True):
        if not has:
            continue
        mine, entry = torch.zeros_like(p) if p.grad is None else p.grad.detach(), entries.get(id(p))
        full = entry.whole(mine) if entry else mine.clone()
        if keep:
            result[name] = full.cpu() if cpu else full.to(p.device)
    return result


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True, broadcast_from: int | None = None
) -> _IncompatibleKeys:
    """Load an unsharded state dict. Each rank copies its rows into its shards; buffers are copied whole.

    Args:
        state_dict: whole values by the original names, as ``full_state_dict`` or a single process saved them.
        strict: raise if keys are missing or unexpected.
        broadcast_from: the global rank that has the state dict; others may pass an empty one. Default: all ranks have
            it.

    Returns:
        The missing and the unexpected keys, like ``nn.Module.load_state_dict``.

    Raises:
        RuntimeError: on every rank, naming the keys and shapes that do not fit; nothing has been loaded then.
    """
    module, states, entries = sharded_entries(model)
    group, options = states[0].group, states[0].options
    expected = module.state_dict(keep_vars=True)
    targets = {k: v for k, v in expected.items() if isinstance(v, torch.Tensor)}
    shapes = {k: entries[id(v)].full_shape if id(v) in entries else tuple(v.shape) for k, v in targets.items()}
    has_values = broadcast_from is None or dist.get_rank() == broadcast_from

    keys, error = _IncompatibleKeys([], []), ""
    if has_values:
        keys, problems = _compared(expected, shapes, state_dict, strict=strict)
        error = f"cannot load the state dict into {type(module).__name__}: {'; '.join(problems)}" if problems else ""
    try:
        compare(group, "a state dict to load", [], timeout=options.checks.timeout, error=error)
    except RankMismatchError as mismatch:
        raise RuntimeError(error or str(mismatch)) from None

    extra = {k: state_dict[k] for k in expected if k not in targets and k in state_dict}
    if broadcast_from is not None:
        said: list[Any] = [keys, extra]
        with communicating("the keys of a state dict", group):
            dist.broadcast_object_list(said, src=broadcast_from, group=group)
        keys, extra = said
    for key, value in extra.items():
        module.get_submodule(key.rpartition(".")[0]).set_extra_state(value)
    with torch.no_grad():
        for key, target in targets.items():
            if key in keys.missing_keys:
                continue
            entry = entries.get(id(target))
            if broadcast_from is None:
                values = state_dict[key]
            else:
                device = entry.device if entry else target.device
                values = torch.empty(shapes[key], dtype=target.dtype, device=device)
                if has_values:
                    values.copy_(state_dict[key])
                broadcast(values, broadcast_from, group)
            target.copy_(entry.part(values) if entry else values)
    return keys


def _compared(
    expected: Mapping[str, Any], shapes: Mapping[str, Shape], found: Mapping[str, Any], *, strict: bool
) -> tuple[_IncompatibleKeys, list[str]]:
    """The missing and the unexpected keys, and everything in ``found`` that cannot be loaded."""
    keys = _IncompatibleKeys([k for k in expected if k not in found], [k for k in found if k not in expected])
    problems = []
    for key in (k for k in shapes if k in found):
        shape = getattr(found[key], "shape", None)
        if shape is None:
            problems.append(f"{key} is a {type(found[key]).__name__}, not a tensor")
        elif tuple(shape) != shapes[key]:
            problems.append(f"{key} has shape {tuple(shape)}, the model's is {shapes[key]}")
    if strict:
        problems += [f"missing key {k}" for k in keys.missing_keys]
        problems += [f"unexpected key {k}" for k in keys.unexpected_keys]
    return keys, problems


@contextmanager
def full_params(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Make the model's parameters whole on every rank inside the context, and shards again when it is left.

    A collective when entered; the device that computes then holds the whole model. The model itself may be called
    inside, without Thunder, but not the jitted one. PyTorch's name for this is ``summon_full_params``.

    Gradients of shards are set aside inside; gradients that are computed inside are dropped at the end.

    Args:
        writeback: keep changes made inside, of which each rank takes its own rows. They are not kept if an exception
            leaves the context.
    """
    _, states, entries = sharded_entries(model)
    kept = [entry.shard for entry in entries.values() if entry.home.mesh is not None]  # not in the modules inside
    versions = [p._version for p in kept]
    whole: list[tuple[Entry, Callable[[], torch.Tensor]]] = []
    done = False
    try:
        for entry in entries.values():
            whole.append((entry, entry.unshard()))
        for state in states:
            state.unsharded = True
        yield
        done = True
    finally:
        for state in states:
            state.unsharded = False
        values = [(entry, reshard()) for entry, reshard in whole]
    if done and writeback:
        if versions != [p._version for p in kept]:
            raise RuntimeError(
                "a parameter that the script has kept from outside of full_params was written inside: take it from the "
                "model again inside, where it is whole. Nothing was written back"
            )
        _write_back(values)


def _write_back(whole: list[tuple[Entry, torch.Tensor]]) -> None:
    for entry, values in whole:
        if tuple(values.shape) != entry.full_shape:
            raise RuntimeError(
                f"parameter {entry.name!r} was given shape {tuple(values.shape)} inside full_params, its shape is "
                f"{entry.full_shape}: nothing after it was written back"
            )
        entry.shard.data.copy_(entry.part(values))
