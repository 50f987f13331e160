"""Sharded parameters as a script sees them: DTensors of the whole shape, which know their mesh and placement.

Their local tensors are views, without the padding, of the rows that the compiled steps read. torch's own functions are
therefore right for them: norms, optimizers that mix elements, clipping, state dicts, ``full_tensor()``. What only one
rank owns stays a plain tensor, for which DTensor has no placement.

Note [Forwarding]: a Parameter cannot become a DTensor in place, because their objects are laid out differently. The
modules get a new one, as with FSDP2. Whatever else holds the old one, such as an optimizer that was built before, goes
on with it: each call of torch that is given the old one gets the new one instead.
"""

from __future__ import annotations

import copy
import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardtrace.model.home import Home
from shardtrace.model.materialize import replace_data

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import register_sharding

if TYPE_CHECKING:
    from shardtrace.model.entry import Entry
    from shardtrace.model.state import ShardedState

SHARD_ATTRIBUTE = "_shardtrace_link"  # of a parameter: its Link
TOGETHER = ("foreach_addcdiv", "foreach_addcmul", "foreach_copy", "foreach_maximum", "foreach_minimum", "foreach_zero",
            "fused_sgd", "fused_adagrad")  # fmt: skip


class Link:
    """A parameter's reference to its model and entry. Pickled as None, so that a saved parameter is an ordinary one."""

    def __init__(self, state: ShardedState, entry: Entry) -> None:
        self.state, self.entry = state, entry

    def __reduce__(self) -> Any:
        return type(None), ()


def link_of(value: Any) -> Link | None:
    """The link of a sharded parameter. None for anything else."""
    return getattr(value, SHARD_ATTRIBUTE, None) if isinstance(value, torch.Tensor) else None


def distributed(rows: torch.Tensor, full_shape: tuple[int, ...], home: Home) -> torch.Tensor:
    """A DTensor of ``full_shape`` on the memory of ``rows``, which are padded; ``rows`` itself if the home has no mesh.
    Its dtype is that of ``rows``."""
    if home.mesh is None:
        return rows
    meta = TensorMeta(torch.Size(full_shape), torch.empty(full_shape, device="meta").stride(), rows.dtype)
    spec = DTensorSpec(home.mesh, home.placements, tensor_meta=meta)
    return DTensor(own_rows(rows, full_shape, home), spec, requires_grad=False)


def like(parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A DTensor on ``rows``, which are padded, that is laid out like a sharded parameter."""
    link = link_of(parameter)
    assert link is not None
    local = own_rows(rows, link.entry.full_shape, link.entry.home)
    return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[attr-defined]


def own_rows(rows: torch.Tensor, full_shape: tuple[int, ...], home: Home) -> torch.Tensor:
    """This rank's rows without the padding: the same memory as a storage of its own. torch cannot pickle or copy the
    DTensor of a view that begins further on."""
    if home.is_spread and (mine := full_shape[0] - home.group.rank() * rows.shape[0]) < rows.shape[0]:
        rows = rows[: max(0, mine)]
    if rows.storage_offset() == 0 or rows.is_meta:
        return rows.detach()
    first, size = rows.storage_offset() * rows.element_size(), rows.numel() * rows.element_size()
    return rows.new_empty(0).set_(rows.untyped_storage()[first : first + size], 0, rows.shape, rows.stride())


def local_rows(t: torch.Tensor, full_shape: tuple[int, ...], home: Home) -> torch.Tensor:
    """This rank's part of a parameter, or of a tensor that is laid out like it, with padding: the inverse of
    :func:`distributed`, in the same memory where no padding is needed."""
    if not isinstance(t, DTensor):
        return t.detach()
    if t.placements != home.placements:
        t = t.redistribute(home.mesh, home.placements)
    local: torch.Tensor = t.detach().to_local()
    if not home.is_spread:
        return local
    missing = -(-full_shape[0] // home.group.size()) - local.shape[0]
    return torch.cat([local, local.new_zeros(missing, *local.shape[1:])]) if missing else local


def as_parameter(old: nn.Parameter, rows: torch.Tensor, full_shape: tuple[int, ...], home: Home) -> nn.Parameter:
    """The parameter on ``rows``: ``old`` itself with other data, or a DTensor with its attributes and hooks, to which
    ``old`` forwards from here on."""
    if home.mesh is None:
        replace_data(old, rows)
        return old
    new = nn.Parameter(distributed(rows, full_shape, home), requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    forward(old, new)
    return new


@functools.cache  # once for each process
def keep_data() -> None:
    """Makes ``p.data = values`` give a sharded parameter these values, which may be whole. torch changes the shape and
    dtype of a DTensor then, and leaves its values as they are. Other DTensors are not changed."""
    data = torch.Tensor.data

    def give(self: DTensor, values: torch.Tensor) -> None:
        if (link := link_of(self)) is None:
            return data.__set__(self, values)  # type: ignore[attr-defined]
        entry = link.entry
        if tuple(values.shape) != entry.full_shape:
            raise RuntimeError(
                f"the data of parameter {entry.name!r} has shape {tuple(values.shape)}, the parameter has "
                f"{entry.full_shape}: give it a DTensor like the parameter, or whole values"
            )
        with torch.no_grad():
            alike = isinstance(values, DTensor) and values.device_mesh == entry.home.mesh
            new = values.redistribute(placements=entry.home.placements) if alike else entry.part(_whole(values))
        if new.dtype == self.dtype:
            self._local_tensor.copy_(new._local_tensor)  # in the memory that compiled steps read
        else:
            data.__set__(self, new)  # type: ignore[attr-defined]
            self._local_tensor, self._spec = new._local_tensor, new._spec

    DTensor.data = property(data.__get__, give)  # type: ignore[assignment,attr-defined]


@functools.cache  # once for each process
def complete_operators() -> None:
    """Registers operators for DTensors that torch 2.13 has left out: foreach and fused functions, all of them element by
    element, which optimizers of other libraries call, and what anomaly mode asks of each gradient. Other releases raise for what
    they leave out."""
    whole = [([Replicate()], [Replicate()])]
    register_sharding(torch.ops.aten._is_any_true.default)(lambda _: whole)
    pointwise = import_module("torch.distributed.tensor._ops._pointwise_ops")
    register = getattr(pointwise, "_register_single_dim_pointwise", None)
    if register is None:
        return
    known = DTensor._op_dispatcher.sharding_propagator
    for name in (n + end for n in TOGETHER for end in ("", "_")):
        packet = getattr(torch.ops.aten, f"_{name}")
        for op in (getattr(packet, overload) for overload in packet.overloads() if not overload.endswith("out")):
            if op not in known.op_single_dim_strategy_funcs and op not in known.op_strategy_funcs:
                register(op)


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


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

    def __repr__(self) -> str:
        return repr(current(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        new = nn.Parameter(torch.empty(0))
        new.__class__ = Forwarding
        new.__dict__["now"] = copy.deepcopy(current(self), memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return current(self).__reduce_ex__(protocol)
