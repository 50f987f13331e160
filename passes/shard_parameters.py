"""Pass over the prologue and the computation: parameters enter the trace as shards.

The model was traced with its full shapes. This pass gives the proxies of sharded parameters their shard's shape, device
and dtype: where the prologue fetches and checks them, and among the inputs of the computation. The body of the
computation is unchanged. :mod:`passes.insert_synchronize` gives it the full parameters back.
"""

from __future__ import annotations

from passes.plan import TracedParameters

from thunder.core import prims
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
    new.args = trace.args and tuple(shards.get(p.name, p) for p in trace.args)  # a prologue has none
    new.bound_symbols = [_with_shards(b, shards, parameters) for b in trace.bound_symbols]
    return new


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
