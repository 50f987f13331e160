"""Sharded parameters as a script sees them: DTensors of the whole shape, which know their mesh and placement.

Their local tensors are views, without the padding, of the rows that the compiled steps read. torch's own functions are
therefore right for them: norms, optimizers that mix elements, clipping, state dicts, ``full_tensor()``. DTensor has no
placement for what one rank owns: see :class:`OwnedParameter`.

Note [Forwarding]: a Parameter cannot become a DTensor in place, because their objects are laid out differently. The
modules get a new one, as with FSDP2. Whatever else holds the old one, such as an optimizer that was built before, goes
on with it: each call of torch that is given the old one gets the new one instead.
"""

from __future__ import annotations

import copy
import functools
from importlib import import_module
from typing import Any

from passes.kernels.torch_call import extent
from passes.plan import Placement
from shardtrace.model.home import Home
from shardtrace.model.materialize import replace_data

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import register_sharding

TOGETHER = ("foreach_addcdiv", "foreach_addcmul", "foreach_copy", "foreach_maximum", "foreach_minimum", "foreach_zero",
            "fused_sgd", "fused_adagrad")  # fmt: skip


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


@functools.cache  # once for each process
def complete_operators() -> None:
    """Registers operators for DTensors that torch has left out: foreach and fused functions, all of them element by
    element, which optimizers call, and what anomaly mode asks of each gradient."""
    whole = [([Replicate()], [Replicate()])]
    register_sharding(torch.ops.aten._is_any_true.default)(lambda _: whole)
    pointwise = import_module("torch.distributed.tensor._ops._pointwise_ops")
    known = DTensor._op_dispatcher.sharding_propagator
    register = getattr(pointwise, "_register_single_dim_pointwise", None)
    if register is None:  # before torch 2.13
        several = pointwise.RuntimeSchemaInfo(needs_pytree=True)

        def register(op: Any) -> None:
            pointwise.register_op_strategy(op, schema_info=several)(pointwise.list_pointwise_strategy)

    for name in (n + end for n in TOGETHER for end in ("", "_")):
        packet = getattr(torch.ops.aten, f"_{name}")
        for op in (getattr(packet, overload) for overload in packet.overloads() if not overload.endswith("out")):
            if op not in getattr(known, "op_single_dim_strategy_funcs", ()) and op not in known.op_strategy_funcs:
                register(op)


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
