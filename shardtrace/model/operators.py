"""Operators for DTensors that torch leaves out, or computes differently from those of whole tensors.

Sharded parameters and their gradients are DTensors to a script, and it is to find there what it would find in a model
that is not sharded. Each handler stands here until torch has the operator, and docs/changes.md lists them.

Note [Windows]: torch gathers a DTensor to slice a sharded dim, and writes into such a slice would be lost: they would
change the copy. Such a slice is a :class:`Window`, which is taken from its source anew by each operator, and writes
what has changed back into it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.experimental import register_sharding
from torch.utils import _pytree as pytree

_aten = torch.ops.aten
TOGETHER = ("foreach_addcdiv", "foreach_addcmul", "foreach_copy", "foreach_maximum", "foreach_minimum", "foreach_zero",
            "fused_sgd", "fused_adagrad")  # fmt: skip
FILLS = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.rand_like.default,
         _aten.randn_like.default, _aten.randint_like.default, _aten.randint_like.low_dtype, _aten.exponential_.default,
         _aten.cauchy_.default, _aten.geometric_.default, _aten.log_normal_.default)  # fmt: skip
DRAWS = (_aten.bernoulli.default, _aten.bernoulli.p, _aten.bernoulli_.Tensor, _aten.native_dropout.default,
         _aten.multinomial.default, _aten.normal.Tensor_float, _aten.poisson.default)  # fmt: skip
WRITES = (_aten.index_put_.default, _aten.index_fill_.int_Scalar, _aten.index_fill_.int_Tensor,
          _aten.index_copy_.default, _aten.index_add_.default, _aten.scatter_.value, _aten.scatter_.src,
          _aten.scatter_add_.default, _aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor)  # fmt: skip
VIEWS = (_aten.slice.Tensor, _aten.select.int, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int,
         _aten.diagonal.default, _aten.unfold.default, _aten.view.default)  # fmt: skip
REDUCTIONS = tuple(getattr(packet, overload)
                   for packet in (_aten.norm, _aten.linalg_vector_norm, _aten.max, _aten.min, _aten.amax, _aten.amin,
                                  _aten.prod, _aten.any, _aten.all, _aten.logsumexp, _aten.aminmax)
                   for overload in packet.overloads() if "out" not in overload and overload != "other")  # fmt: skip
MEAN, NONE = 1, 0  # what ATen calls the reductions of a loss
LOSSES = (_aten.mse_loss_backward.default, _aten.smooth_l1_loss_backward.default, _aten.huber_loss_backward.default,
          _aten.soft_margin_loss_backward.default, _aten.binary_cross_entropy_backward.default)  # fmt: skip


@functools.cache  # once for each process
def complete_operators() -> None:
    """Registers what torch has left out: foreach and fused functions, all of them element by element, which optimizers
    call, and what anomaly mode asks of each gradient; and the handlers below. On CPUs also those that draw: torch gives
    all ranks the same random numbers for different rows."""
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_aten._local_scalar_dense.default] = number_of
    handlers[_aten.sum.dim_IntList] = sum_of_no_dims
    handlers.update(dict.fromkeys(VIEWS, view))
    handlers.update(dict.fromkeys(WRITES, write_whole))
    handlers.update(dict.fromkeys(REDUCTIONS, reduce_whole))
    handlers.update(dict.fromkeys(LOSSES, mean_loss_backward))
    if not torch.cuda.is_available():
        handlers.update(dict.fromkeys(FILLS, fill_whole))
        handlers.update(dict.fromkeys(DRAWS, compute_whole))
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


def by_torch(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Runs the operator as torch does, without our handler."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    ours = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if ours is not None:
            handlers[op] = ours


def whole_of(t: Any) -> Any:
    """A plain tensor with the values of all ranks, if ``t`` is a DTensor. A collective."""
    if isinstance(t, Window):
        return t.whole()
    return gathered(t)._local_tensor if isinstance(t, DTensor) else t


def gathered(t: DTensor) -> DTensor:
    return t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)


def write(t: DTensor, whole: torch.Tensor) -> None:
    """Gives a DTensor values that each rank has."""
    if isinstance(t, Window):
        t.write(whole)
    else:
        t._local_tensor.copy_(laid_out_like(t, whole)._local_tensor)


def laid_out_like(t: DTensor, whole: torch.Tensor) -> DTensor:
    """A DTensor of values that each rank has."""
    return DTensor.from_local(whole, t.device_mesh, run_check=False).redistribute(placements=t.placements)


# ---- numbers ----


def number_of(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """``item()``, and with it ``float`` and ``if``: of all ranks, where torch takes what this rank has added up."""
    return op(whole_of(args[0]), **kwargs)


def reduce_whole(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """A norm or a maximum is one of all ranks at once. torch keeps those of each rank until they are needed, and then
    adds up, stacks or differentiates them as if they were parts of a sum."""

    def complete(t: Any) -> Any:
        if not isinstance(t, DTensor) or all(p == Partial() or not p.is_partial() for p in t.placements):
            return t
        return t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])

    t, *others = args
    if any(_leaves_some_empty(t, p, size) for p, size in zip(t.placements, t.device_mesh.shape, strict=True)):
        args = (gathered(t), *others)  # no maximum of no rows
    return pytree.tree_map(complete, by_torch(op, args, kwargs))


def _leaves_some_empty(t: DTensor, placement: Any, ranks: int) -> bool:
    """Whether a rank has no rows."""
    rows = t.shape[placement.dim] if placement.is_shard() else ranks
    return -(-rows // ranks) * (ranks - 1) >= rows > 0


def sum_of_no_dims(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """``sum(dim=[])``, of which the gradient of ``amax`` is made, adds up all elements. torch takes it for none."""
    t, dims, *others = args
    return by_torch(op, (t, dims or list(range(t.ndim)), *others), kwargs)


def mean_loss_backward(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """torch divides the gradient of a mean by the number of elements that this rank has."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    if given.get("reduction", MEAN) != MEAN:
        return by_torch(op, args, kwargs)
    grad, shape = given["grad_output"], given["self"].shape
    return by_torch(op, (), given | {"grad_output": (grad / shape.numel()).expand(shape), "reduction": NONE})


# ---- random numbers ----


def fill_whole(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Fills a DTensor with this rank's part of numbers that each rank draws for the whole one: those of one process."""
    t, *others = args
    drawn = op(torch.empty(t.shape, dtype=t.dtype), *others, **kwargs)
    if not op._schema.is_mutable:
        return laid_out_like(t, drawn)
    write(t, drawn)
    return t


def compute_whole(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Computes with whole tensors on each rank, and takes this rank's part of the results."""
    found = op(*pytree.tree_map(whole_of, args), **pytree.tree_map(whole_of, kwargs))
    if not op._schema.is_mutable:
        return pytree.tree_map_only(torch.Tensor, lambda t: laid_out_like(args[0], t), found)
    write(args[0], found)
    return args[0]


def write_whole(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Writes at an index, which may be a plain tensor, the same on each rank."""
    beside = [t for t in pytree.tree_leaves((args[1:], kwargs)) if isinstance(t, torch.Tensor)]
    is_mixed = isinstance(args[0], DTensor) and not all(isinstance(t, DTensor) for t in beside)
    return (compute_whole if is_mixed else by_torch)(op, args, kwargs)


# ---- windows ----


class Window(DTensor):
    """A view of a DTensor whose values torch has gathered for it. See Note [Windows].

    Its methods and all operators use the current values; ``_local_tensor`` has those from when it was taken.
    """

    source: DTensor
    view_of: Callable[[torch.Tensor], torch.Tensor]

    def whole(self) -> torch.Tensor:
        """The current values, in memory of their own."""
        return self.view_of(whole_of(self.source))

    def write(self, values: torch.Tensor) -> None:
        """Gives the source these values where this window is."""
        whole = whole_of(self.source).clone()
        self.view_of(whole).copy_(values)
        write(self.source, whole)

    def full_tensor(self, **options: Any) -> torch.Tensor:
        return self.clone().full_tensor(**options)  # type: ignore[attr-defined]

    def to_local(self, **options: Any) -> torch.Tensor:
        return self.clone().to_local(**options)  # type: ignore[attr-defined]

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        return self.clone().redistribute(*args, **options)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, schema = kwargs or {}, func._schema
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = [given[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        changed = [t for t in pytree.tree_leaves(written) if isinstance(t, DTensor)]
        if any(isinstance(t, Window) for t in changed):
            values = {id(t): whole_of(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, DTensor)}
            now, named = pytree.tree_map_only(DTensor, lambda t: values[id(t)], (args, kwargs))
            func(*now, **named)
            for t in changed:
                write(t, values[id(t)])
            return written[0] if schema.returns else None
        now, named = pytree.tree_map_only(Window, _as_dtensor, (args, kwargs))
        found = func(*now, **named)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        return windows(func, args, kwargs, found) if is_view else found


def _as_dtensor(window: Window) -> DTensor:
    return DTensor.from_local(window.whole(), window.device_mesh, run_check=False)


def view(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """A view, or :func:`windows` if a sharded dim is gathered for it, by torch or because torch refuses to."""
    t, *others = args
    try:
        found = by_torch(op, args, kwargs)
    except RuntimeError:  # the same on each rank: it depends on shapes and placements
        if not any(p.is_shard() for p in t.placements):
            raise
        return windows(op, args, kwargs, by_torch(op, (gathered(t), *others), kwargs))
    first = found if isinstance(found, DTensor) else next(iter(found), t)
    is_copy = any(a.is_shard() and b.is_replicate() for a, b in zip(t.placements, first.placements, strict=True))
    return windows(op, args, kwargs, found) if is_copy else found


def windows(op: OpOverload, args: Any, kwargs: Any, found: Any) -> Any:
    """The views ``found`` of ``args[0]``, as :class:`Window`."""
    source, *others = args

    def take(number: int | None, whole: torch.Tensor) -> torch.Tensor:
        views = op(whole, *others, **kwargs)
        return views if number is None else views[number]

    def window(number: int | None, t: DTensor) -> Window:
        new = Window(t._local_tensor, t._spec, requires_grad=False)
        new.source, new.view_of = source, functools.partial(take, number)
        return new

    return window(None, found) if isinstance(found, DTensor) else [window(i, t) for i, t in enumerate(found)]
