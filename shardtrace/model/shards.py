"""Sharded parameters as a script sees them: DTensors of the whole shape, and what becomes of them if it replaces them.

They know their mesh and placement. Their local tensors are views, without the padding, of the rows that the compiled
steps read. torch's own functions are therefore right for them: norms, optimizers that mix elements, clipping, state
dicts, ``full_tensor()``. DTensor has no placement for what one rank owns: see :class:`OwnedParameter`.

Note [Forwarding]: a Parameter cannot become a DTensor in place, because their objects are laid out differently. The
modules get a new one, as with FSDP2. Whatever else holds the old one, such as an optimizer that was built before, goes
on with it: each call of torch that is given the old one gets the new one instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType, ref

from passes.compat.jit import set_traced_device, traced_device
from passes.kernels.torch_call import extent
from passes.plan import Placement, Shape, Wire
from shardtrace.model.places import Home, Owner, replace_data, shard, unshard
from shardtrace.options.strategy import ShardingStrategy
from shardtrace.record.memory import Extent

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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
