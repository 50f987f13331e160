"""Where parameters are: in the model, at rest, and before they have memory.

Models without memory for their parameters, and meta-device models: one module at a time gets memory and values, then
keeps only its shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from passes.compat.versions import all_gather_single
from passes.plan import HostMemory, Placement, Shape, shard_shape
from shardtrace.ranks.failure import communicating

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

# ---- in the model ----


class Owner(NamedTuple):
    """A module that holds a parameter as ``attribute``, and the module's qualified name."""

    name: str
    module: nn.Module
    attribute: str


class Place(NamedTuple):
    """A parameter, its (first) qualified name, and the names of the module that owns it and of the block around that.

    ``owners`` are all that hold it: more than one if it is tied.
    """

    name: str
    parameter: nn.Parameter
    layer: str
    block: str | None
    owners: list[Owner]


def places(model: nn.Module, exclude: set[int], blocks: list[str]) -> list[Place]:
    """Each distinct parameter of ``model`` in the order of ``named_parameters``, without those whose id is excluded.

    Its block is the innermost of ``blocks`` (qualified names) that holds it.
    """
    inner_first = sorted(blocks, key=len, reverse=True)
    found: dict[int, Place] = {}
    for layer, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in exclude:
                continue
            if id(parameter) not in found:
                block = next((b for b in inner_first if layer == b or layer.startswith(b + ".")), None)
                name = f"{layer}.{attribute}" if layer else attribute
                found[id(parameter)] = Place(name, parameter, layer, block, [])
            found[id(parameter)].owners.append(Owner(layer, module, attribute))
    return list(found.values())


def sparse_embedding(model: nn.Module) -> str | None:
    """The name of a trainable embedding that was built with ``sparse=True``, if there is one."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            return f"{name or 'the model itself'} ({type(module).__name__}(sparse=True))"
    return None


# ---- at rest ----


@dataclass(frozen=True, eq=False)
class Home:
    """The place of a parameter between uses: its placement over the ranks of a group, the group rank that owns it (only
    with OWNER), and whether it is in host memory. ``mesh``: of the DTensor that it is; None: it is a plain tensor."""

    placement: Placement
    group: dist.ProcessGroup
    owner: int = 0
    host: HostMemory | None = None
    mesh: DeviceMesh | None = None

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """Of the DTensor. The last dimension of the mesh is split, others replicate."""
        last = Shard(0) if self.placement is Placement.SHARD else Replicate()
        return (*[Replicate()] * (self.mesh.ndim - 1), last) if self.mesh is not None else ()

    @property
    def is_spread(self) -> bool:
        """True if the ranks hold different parts of the parameter."""
        return self.placement is not Placement.REPLICATE and self.group.size() > 1


def shard(full: torch.Tensor, home: Home) -> torch.Tensor:
    """The part of ``full`` that this rank keeps, in its own memory on the same device.

    SHARD: its padded shard, ``(rows, *rest) -> (ceil(rows / world_size), *rest)``. OWNER: the whole tensor,
    contiguous, on its owner, ``(0, *rest)`` elsewhere. REPLICATE: the whole tensor.
    A tensor that needs no other memory is returned as it is.
    """
    source, group = full.detach(), home.group
    if source.numel() == 0 or home.placement is Placement.REPLICATE:
        return source
    if home.placement is Placement.OWNER:
        return source.contiguous() if group.rank() == home.owner else source.new_empty(0, *source.shape[1:])
    shape = shard_shape(tuple(source.shape), group.size())
    mine = source[group.rank() * shape[0] :][: shape[0]]  # empty or short where padding begins
    result = torch.zeros(shape, dtype=source.dtype, device=source.device)
    result[: mine.shape[0]].copy_(mine)
    return result


def unshard(shard: torch.Tensor, full_shape: Shape, home: Home) -> torch.Tensor:
    """The inverse of :func:`shard`: a new tensor on the device that computes.

    Runs a collective of ``home.group``, unless the placement is REPLICATE.
    """
    group = home.group
    shard = shard.detach()
    if home.host is not None:
        shard = torch.empty_like(shard, device=home.host.device).copy_(shard)
    if home.placement is Placement.REPLICATE or math.prod(full_shape) == 0:
        return shard.clone()
    if group.size() == 1:  # it was in host memory, and is now on the device
        return shard.view(full_shape)
    if home.placement is Placement.OWNER:
        mine = shard if home.host is not None else shard.clone()
        full = mine if group.rank() == home.owner else shard.new_empty(full_shape)
        with communicating("the shards of a parameter", group):
            dist.broadcast(full, group=group, group_src=home.owner)
        return full
    mine = shard.contiguous()
    padded = mine.new_empty(group.size() * mine.shape[0], *mine.shape[1:])
    with communicating("the shards of a parameter", group):
        all_gather_single(padded, mine, group=group)
    full = padded[: full_shape[0]]
    return full if full.shape == padded.shape else full.clone()  # a view would keep, and save, the padding


# ---- without memory ----


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules that are built inside have their parameters on the meta device, without memory or values. Buffers are
    real, because many are not in a state dict, such as the frequencies of rotary embeddings. ::

        with shardtrace.init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        shardtrace.fsdp(model, init_policy=shardtrace.InitPolicy(weights=folder))

    A layer's parameter has memory only until the layer registers it. ``torch.device("meta")`` puts buffers on the meta
    device as well. Accelerate has a function of this name.
    """
    empty: WeakIdKeyDictionary = WeakIdKeyDictionary()  # one parameter in two places stays one

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return None  # unchanged
        if parameter not in empty:
            meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            meta.__dict__.update(parameter.__dict__)
            empty[parameter] = meta
        return empty[parameter]

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


InitFn = Callable[[nn.Module], None]


def has_meta(module: nn.Module, given: Collection[int] = ()) -> bool:
    """True if the module itself, not a child, owns a meta parameter or buffer, other than those whose id is ``given``:
    these get values from elsewhere."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(t is not None and t.is_meta and id(t) not in given for t in own)


def uninitializable(model: nn.Module, param_init_fn: InitFn | None, given: Collection[int] = ()) -> str | None:
    """The name of the first module on the meta device that cannot be initialized, if there is one."""
    if param_init_fn is not None:
        return None
    for name, module in model.named_modules():
        if has_meta(module, given) and not callable(getattr(module, "reset_parameters", None)):
            return f"{name or 'the model itself'} ({type(module).__name__})"
    return None


def materialized(
    module: nn.Module,
    device: torch.device,
    param_init_fn: InitFn | None,
    whole: Callable[[nn.Parameter], torch.Tensor],
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Give a module's own meta parameters and buffers memory and values. Yield each Parameter object and its values.

    ``whole`` returns the full values of a parameter that another module has initialized and sharded before (tied
    weights). As without sharding, the last module that initializes a tied parameter wins.
    """
    originals = {name: p for name, p in module._parameters.items() if p is not None}
    for name, p in originals.items():
        values = torch.empty_like(p, device=device) if p.is_meta else whole(p)
        module._parameters[name] = nn.Parameter(values, requires_grad=p.requires_grad)
    for name, b in module._buffers.items():
        if b is not None and b.is_meta:
            module._buffers[name] = torch.empty_like(b, device=device)
    try:
        with torch.no_grad():
            if param_init_fn is not None:
                param_init_fn(module)
            else:
                module.reset_parameters()  # type: ignore[operator]
        initialized = {name: module.get_parameter(name).detach() for name in originals}
    finally:
        module._parameters.update(originals)
    for name, p in originals.items():
        yield p, initialized.pop(name)


def set_data(parameter: nn.Parameter, values: torch.Tensor, name: str) -> None:
    """Give a Parameter other values, shape or device. It stays the same object, so that optimizers keep it."""
    if parameter.is_meta == values.is_meta:
        replace_data(parameter, values)
        return
    try:
        torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
    except RuntimeError as error:
        raise RuntimeError(
            f"parameter {name!r} cannot leave or enter the meta device in place, because something holds a weak "
            "reference or an autograd graph of it: call fsdp() right after building the model"
        ) from error


def replace_data(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set ``parameter.data = values``, for values of another shape.

    An autograd graph that is still alive keeps the parameter's gradient accumulator, which expects gradients of the old
    shape. Autograd drops it when the dtype changes, but not when the shape does. Therefore the dtype changes briefly.
    """
    if values.is_floating_point() or values.is_complex():  # others have no gradient
        other = torch.float16 if values.dtype != torch.float16 else torch.float32
        parameter.data = torch.empty(0, dtype=other, device=values.device)
    parameter.data = values


def broadcast(tensor: torch.Tensor, source: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """Copy the values of global rank ``source`` into ``tensor``, unless it is None. Returns ``tensor``."""
    if source is not None and group.size() > 1 and tensor.numel():
        values = tensor.contiguous()
        with communicating(f"the values of rank {source}", group):
            dist.broadcast(values.view(-1).view(torch.uint8), src=source, group=group)  # as bytes: backends lack dtypes
        if values is not tensor:
            tensor.copy_(values)
    return tensor
