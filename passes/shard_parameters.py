"""Pass over the prologue and the computation: parameters enter the trace as shards.

The model was traced with its full shapes. This pass gives the proxies of sharded parameters their shard's shape, device
and dtype among the inputs of the computation. In the prologue, which fetches and checks DTensors of the whole shape, a
line takes this rank's rows of them. The body of the computation is unchanged. :mod:`passes.insert_synchronize` gives it
the full parameters back.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from passes.comm.symbols import symbol
from passes.plan import Runtime, Step, TracedParameters

import torch
from thunder.core import prims
from thunder.core.codeutils import ContextObject
from thunder.core.devices import cpu
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy, Variable
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

UNPACKS = (prims.unpack_parameter, prims.unpack_trivial)  # in a prologue, in a computation


def shard_parameters(trace: TraceCtx, *, parameters: TracedParameters) -> TraceCtx:
    """Gives parameters the shape, device and dtype of this rank's shard.

    Takes: a prologue or a computation as it was traced, with whole parameters.
    Gives: its lines on shards.
    No-op when: no parameter of the trace is sharded.
    """
    full = [b.output for b in trace.bound_symbols if b.sym in UNPACKS and parameters.get(b.output) is not None]
    if not full:
        return trace
    new = from_trace(trace)
    shards = {p.name: _as_shard(p, new, parameters) for p in full}
    if trace.args is not None:
        new.args = tuple(shards.get(p.name, p) for p in trace.args)
        new.bound_symbols = [_with_shards(b, shards, parameters) for b in trace.bound_symbols]
        return new
    fetched = {p.name: _as_fetched(p, shards[p.name], new, parameters) for p in full}
    *lines, last = (_with_shards(b, fetched, parameters) for b in trace.bound_symbols)
    new.bound_symbols = [*lines, *_take_rows(fetched, shards, parameters), _with_shards(last, shards, parameters)]
    return new


def _as_fetched(proxy: TensorProxy, shard: TensorProxy, trace: TraceCtx, parameters: TracedParameters) -> TensorProxy:
    """The proxy of what a module holds: the shard itself, or a DTensor of the whole shape."""
    parameter = parameters.get(proxy)
    assert parameter is not None
    if not parameter.is_distributed:
        return shard
    with tracectx(trace):
        return shard.replace(name=f"{proxy.name}_dtensor", shape=parameter.full_shape)


def _take_rows(
    fetched: dict[str, TensorProxy], shards: dict[str, TensorProxy], parameters: TracedParameters
) -> list[BoundSymbol]:
    """A line for each model that takes the rows of its DTensors."""
    names = [name for name, p in fetched.items() if p is not shards[name]]
    lines: list[BoundSymbol] = []
    for runtime, group in groupby(names, lambda name: _runtime(shards[name], parameters)):
        mine = list(group)
        model = ContextObject(f"model_{len(lines)}", _Model(runtime, parameters.step_of(runtime), mine))
        lines.append(rows_of.bind(model, *(fetched[n] for n in mine), output=tuple(shards[n] for n in mine)))
    return lines


def _runtime(shard: TensorProxy, parameters: TracedParameters) -> Runtime:
    parameter = parameters.get(shard)
    assert parameter is not None
    return parameter.plan.runtime


class _Model(NamedTuple):
    """The model of a line that takes rows, its step, and the names of the rows."""

    runtime: Runtime
    step: Step
    names: list[str]


class _Rows(torch.autograd.Function):
    """This rank's rows of DTensors. Their gradients are laid out like the DTensors."""

    @staticmethod
    def forward(ctx: Any, model: _Model, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        runtime, step, names = model
        ctx.like, ctx.parameters = runtime.like, parameters
        again = [p for p, name in zip(parameters, names, strict=True) if name in step.rereads]
        ctx.versions = [(p, p._version) for p in again]
        rows = tuple(runtime.rows_of(p).data for p in parameters)
        ctx.mark_non_differentiable(*(r for r, p in zip(rows, parameters, strict=True) if not p.requires_grad))
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # torch does not see it, because the rows have versions of their own
        if any(p._version != version for p, version in ctx.versions):
            raise RuntimeError(
                "one of the parameters needed for gradient computation has been modified by an inplace operation "
                "since forward: step the optimizer after the last backward of what was computed before"
            )
        return None, *(None if g is None else ctx.like(p, g) for p, g in zip(ctx.parameters, grads, strict=True))


def _run_rows_of(model: ContextObject, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
        found: tuple[torch.Tensor, ...] = _Rows.apply(model.obj, *parameters)
        return found
    return tuple(map(model.obj.runtime.rows_of, parameters))


rows_of = symbol("rows_of", lambda model, *parameters: None, _run_rows_of)


def _as_shard(proxy: TensorProxy, trace: TraceCtx, parameters: TracedParameters) -> TensorProxy:
    """Returns the proxy with its shard's shape: a new one that takes over the name in ``trace``."""
    parameter = parameters.get(proxy)
    assert parameter is not None
    trace.names.discard(proxy.name)
    device = proxy.device if parameter.plan.host is None else cpu
    with tracectx(trace):
        return proxy.replace(shape=parameter.shard_shape, dtype=parameter.dtype or proxy.dtype, device=device)


def _with_shards(bsym: BoundSymbol, shards: dict[str, TensorProxy], parameters: TracedParameters) -> BoundSymbol:
    """The line on shards, if it unpacks a parameter or checks its metadata: these are then a shard's."""
    if bsym.sym is prims.check_tensor_shape_and_metadata and (p := shards.get(bsym.args[0].name)) is not None:
        parameter = parameters.get(p)
        assert parameter is not None
        device = parameter.rest_device or p.device.device_str()
        return bsym.from_bsym(args=(p, tuple(p.shape), device, to_torch_dtype(p.dtype), bsym.args[4]))
    if bsym.sym is prims.unpack_parameter and (p := shards.get(bsym.output.name)) is not None:
        return bsym.from_bsym(output=p)
    if bsym.sym is prims.unpack_trivial and isinstance(bsym.output, TensorProxy) and bsym.output.name in shards:
        return bsym.from_bsym(args=(shards[bsym.output.name],), output=shards[bsym.output.name])
    if bsym.sym is prims.python_return:
        return bsym.from_bsym_swap_proxies({Variable(p): p for p in shards.values()})
    return bsym
