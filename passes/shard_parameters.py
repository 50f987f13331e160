"""Pass 1: parameters enter the trace as shards.

The model was traced with its full shapes. This pass gives the proxies of sharded parameters their shard's shape, device
and dtype, in the prologue (where each call unpacks and checks them) and among the inputs of the computation. The body
of the computation is unchanged, except for marks that tell where a line comes from (:mod:`passes.analysis.origins`).
:mod:`passes.insert_synchronize` gives it the full parameters back.
"""

from __future__ import annotations

import functools

from passes.analysis.origins import marked
from passes.comm.symbols import check_parameters
from passes.plan import Enlisted

from thunder.core import prims
from thunder.core.codeutils import ContextObject
from thunder.core.devices import cpu
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx


def shard_parameters(prologue: TraceCtx, computation: TraceCtx, *, enlisted: Enlisted) -> tuple[TraceCtx, TraceCtx]:
    """Returns both traces with shards as parameters, and each model's guard as a line of the prologue."""
    full = [b.output for b in prologue.bound_symbols if b.sym is prims.unpack_parameter and enlisted.get(b.output)]
    if not full:
        return prologue, computation

    new_prologue = from_trace(prologue)
    swap = {variableify(p): _as_shard(p, new_prologue, enlisted) for p in full}
    new_prologue.bound_symbols = [
        _check_shard(b.from_bsym_swap_proxies(swap), swap, enlisted) for b in prologue.bound_symbols
    ]
    _insert_guards(new_prologue, enlisted)

    new_computation = from_trace(computation)
    # the computation's inputs are separate proxies with the names of the prologue's outputs
    inputs = {
        variableify(p): _as_shard(p, new_computation, enlisted) for p in computation.args if variableify(p) in swap
    }
    new_computation.args = tuple(inputs.get(variableify(p), p) for p in computation.args)
    new_computation.bound_symbols = [
        b.from_bsym_swap_proxies(inputs) if b.sym is prims.unpack_trivial else marked(b)
        for b in computation.bound_symbols
    ]
    return new_prologue, new_computation


def _as_shard(proxy: TensorProxy, trace: TraceCtx, enlisted: Enlisted) -> TensorProxy:
    """Returns the proxy with its shard's shape: a new one that takes over the name in ``trace``."""
    parameter = enlisted.get(proxy)
    assert parameter is not None
    trace.names.discard(proxy.name)
    device = proxy.device if parameter.plan.host is None else cpu
    with tracectx(trace):
        return proxy.replace(shape=parameter.shard_shape, dtype=parameter.dtype or proxy.dtype, device=device)


def _check_shard(bsym: BoundSymbol, shards: dict[Variable, TensorProxy], enlisted: Enlisted) -> BoundSymbol:
    """Makes a check of a parameter's metadata expect the shard's shape, device and dtype."""
    if bsym.sym is not prims.check_tensor_shape_and_metadata or variableify(bsym.args[0]) not in shards:
        return bsym
    proxy, _, _, _, requires_grad = bsym.args
    parameter = enlisted.get(proxy)
    assert parameter is not None
    device = parameter.rest_device or proxy.device.device_str()
    return bsym.from_bsym(args=(proxy, tuple(proxy.shape), device, to_torch_dtype(proxy.dtype), requires_grad))


def _insert_guards(prologue: TraceCtx, enlisted: Enlisted) -> None:
    """Inserts a line for each model, ahead of the other checks, that selects among several compiled steps.

    It reads the call's arguments only because Thunder's PrunePrologueChecks takes a line that reads nothing for an
    error.
    """
    lines = prologue.bound_symbols
    first = next(i for i, b in enumerate(lines) if b.sym is prims.unpack_trivial)
    args = lines[first].output
    lines[first + 1 : first + 1] = [
        check_parameters.bind(
            ContextObject(f"guard_{i}", functools.partial(runtime.check_step, enlisted.step_of(runtime))),
            args,
            output=None,
        )
        for i, runtime in enumerate(enlisted.runtimes)
    ]
