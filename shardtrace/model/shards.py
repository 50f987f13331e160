"""Where parameters are: in the model, before they have memory, at rest, and as a script sees them.

Models without memory for their parameters, and meta-device models: one module at a time gets memory and values, then
keeps only its shards.

A script sees sharded parameters as DTensors of the whole shape. They know their mesh and placement. Their local tensors
are views, without the padding, of the rows that the compiled steps read. torch's own functions are therefore right for
them: norms, optimizers that mix elements, clipping, state dicts, ``full_tensor()``. DTensor has no placement for what
one rank owns: see :class:`OwnedParameter`.

Note [Forwarding]: a Parameter cannot become a DTensor in place, because their objects are laid out differently. The
modules get a new one, as with FSDP2. Whatever else holds the old one, such as an optimizer that was built before, goes
on with it: each call of torch that is given the old one gets the new one instead.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from passes.compat.jit import set_traced_device, traced_device
from passes.compat.versions import all_gather_single
from passes.kernels.torch_call import extent
from passes.plan import HostMemory, Placement, Shape, Wire, shard_shape
from shardtrace.options.strategy import ShardingStrategy
from shardtrace.ranks.failure import communicating
from shardtrace.record.memory import Extent

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
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


# ---- as a script sees them ----


def distributed(rows: torch.Tensor, full_shape: tuple[int, ...], home: Home) -> torch.Tensor:
    """A DTensor of ``full_shape`` on the memory of ``rows``, which are padded; ``rows`` itself if the home has no mesh.
    Its dtype is that of ``rows``."""
    if home.mesh is None:
        return rows
    meta = TensorMeta(torch.Size(full_shape), torch.empty(full_shape, device="meta").stride(), rows.dtype)
    spec = DTensorSpec(home.mesh, home.placements, tensor_meta=meta)
    return DTensor(own_rows(rows, full_shape, home), spec, requires_grad=False)


def own_rows(rows: torch.Tensor, full_shape: tuple[int, ...], home: Home) -> torch.Tensor:
    """This rank's rows without the padding: the same memory as a storage of its own. torch cannot pickle or copy the
    DTensor of a view that begins further on, and would save all of the memory around another one."""
    if home.is_spread and (mine := full_shape[0] - home.group.rank() * rows.shape[0]) < rows.shape[0]:
        rows = rows[: max(0, mine)]
    storage, first, size = rows.untyped_storage(), rows.storage_offset() * rows.itemsize, extent(rows) * rows.itemsize
    if rows.is_meta or storage.nbytes() == size:
        return rows.detach()
    return rows.new_empty(0).set_(storage[first : first + size], 0, rows.shape, rows.stride())


def local_rows(t: torch.Tensor, full_shape: tuple[int, ...], home: Home) -> torch.Tensor:
    """This rank's part of a parameter, or of a tensor that is laid out like it, with padding: the inverse of
    :func:`distributed`, in the same memory where no padding is needed."""
    if not isinstance(t, DTensor):
        return t.detach()
    alike = t if t.placements == home.placements else t.redistribute(home.mesh, home.placements)
    local: torch.Tensor = alike.detach().to_local()  # type: ignore[attr-defined]
    if not home.is_spread:
        return local
    missing = -(-full_shape[0] // home.group.size()) - local.shape[0]
    return torch.cat([local, local.new_zeros(missing, *local.shape[1:])]) if missing else local


def as_parameter(
    name: str, old: nn.Parameter, rows: torch.Tensor, full_shape: tuple[int, ...], home: Home
) -> nn.Parameter:
    """The parameter on ``rows``: ``old`` itself with other data, or a DTensor with its attributes and hooks, to which
    ``old`` forwards from here on."""
    if home.mesh is None:
        replace_data(old, rows)
        if home.placement is Placement.OWNER and home.group.size() > 1:
            old.__class__ = OwnedParameter
            old.__dict__["owned"] = name, home.owner
        return old
    new = nn.Parameter(distributed(rows, full_shape, home), requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    forward(old, new)
    return new


class OwnedParameter(nn.Parameter):
    """A Parameter that is whole on the rank that owns it, and has no rows on the others. ``owned``: its name and that
    rank; absent while it is whole on each.

    Optimizers change it without gradients, as any other. What autograd would differentiate, such as a penalty in the
    loss, would have another value on each rank: it raises.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and isinstance(found, torch.Tensor) and found.grad_fn is not None:
            given = torch.utils._pytree.tree_leaves((args, kwargs))
            for name, owner in (
                vars(p)["owned"] for p in given if isinstance(p, OwnedParameter) and "owned" in vars(p)
            ):
                called = getattr(function, "__name__", function)
                raise RuntimeError(
                    f"parameter {name!r} is on rank {owner} alone (sharding_strategy='owner'): {called} outside of "
                    "forward has another value on each rank. Compute it inside shardtrace.full_params, or in a method "
                    "that register_forward_method knows, or give the parameter another sharding_strategy"
                )
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        new: nn.Parameter = super().__deepcopy__(memo)
        new.__dict__.update(self.__dict__)
        new.__class__ = OwnedParameter if "owned" in vars(self) else nn.Parameter
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.data, self.requires_grad)
        plain.__dict__.update((key, value) for key, value in self.__dict__.items() if key != "owned")
        return plain.__reduce_ex__(protocol)


def forward(old: nn.Parameter, new: nn.Parameter) -> None:
    """Lets ``old`` stand for ``new``, and frees its memory: Note [Forwarding]."""
    old.grad = None
    replace_data(old, torch.empty(0, dtype=old.dtype, device=old.device))
    old.__class__ = Forwarding
    old.__dict__["now"] = new


def current(parameter: Any) -> Any:
    """The parameter that ``parameter`` stands for, which is usually itself."""
    while type(parameter) is Forwarding:
        parameter = parameter.__dict__["now"]
    return parameter


class Forwarding(nn.Parameter):
    """A Parameter whose place another one has taken."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(current, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["now"], name)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(current(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        new = nn.Parameter(torch.empty(0))
        new.__class__ = Forwarding
        new.__dict__["now"] = copy.deepcopy(current(self), memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return current(self).__reduce_ex__(protocol)


# ---- their memory ----


class ParameterMemory:
    """The memory of several parameters, by their names. Weak references keep the addresses of storages from being used
    again."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._extents: dict[int, list[tuple[StorageWeakRef, Extent, str]]] = {}
        for name, t in named:
            self.add(name, t)

    def add(self, name: str, t: torch.Tensor) -> None:
        if _has_memory(t):
            storage = StorageWeakRef(t.untyped_storage())
            self._extents.setdefault(storage.cdata, []).append((storage, Extent.of(t), name))

    def owner(self, t: torch.Tensor) -> str:
        """The name of a parameter on whose memory a tensor lies; empty if there is none."""
        if not self._extents or not _has_memory(t):
            return ""
        mine, others = Extent.of(t), self._extents.get(StorageWeakRef(t.untyped_storage()).cdata, ())
        return next((name for _, other, name in others if mine.begin < other.end and other.begin < mine.end), "")


def _has_memory(t: torch.Tensor) -> bool:
    return not is_lazy(t) and not is_traceable_wrapper_subclass(t) and t.layout == torch.strided and t.numel() > 0


# ---- parameters that a script replaces ----


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
        """The entry of what the modules hold now; this one if nothing has changed. Its stand-in is another one if the
        dtype is.

        A parameter may have been converted to another dtype, or replaced by one that is sharded alike, or by one with
        whole values, of which each rank takes its part. Raises RuntimeError if it is elsewhere or of another shape.
        """
        for _, module, attribute in self.owners:  # the script may put back one whose place another one has taken
            module._parameters[attribute] = current(module._parameters.get(attribute))
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
            before = () if self.home.mesh is None else (*(r for r in before if r() is not None), ref(new))
            new = as_parameter(self.name, new, rows, self.full_shape, self.home)
            self._put(new)
        stand_in = self.stand_in
        if new.dtype != self.dtype:
            used = self.precision.param_dtype if self.precision is not None and new.is_floating_point() else None
            stand_in = nn.Parameter(torch.empty_like(stand_in, dtype=used or new.dtype), new.requires_grad)
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
        """Those of ``before`` that are still there and stand for it. The script may have exchanged it meanwhile."""
        found = (reference() for reference in self.before)
        return [old for old in found if old is not None and current(old) is self.shard]

    def _stands_for(self, parameter: nn.Parameter) -> None:
        """Lets the parameters of before stand for this one."""
        for old in self.earlier:
            old.__dict__["now"] = parameter

    def _put(self, parameter: nn.Parameter) -> None:
        for _, module, attribute in self.owners:
            module._parameters[attribute] = parameter
