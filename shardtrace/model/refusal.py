"""Models that cannot be sharded, and ranks whose models differ: an error on every rank, before anything is changed."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from passes.plan import Wire
from shardtrace.model.choose import Chosen
from shardtrace.model.materialize import uninitializable
from shardtrace.model.places import Place, sparse_embedding
from shardtrace.model.runtime import REMEDY, ParameterMemory
from shardtrace.model.state import link_of, part_of, state_of, states_in
from shardtrace.options.options import Options
from shardtrace.options.policies import InitPolicy
from shardtrace.ranks.consensus import compare
from shardtrace.record.effects import tensors_held

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
        outer = part_of(module)
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
