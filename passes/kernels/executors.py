"""Executors of Thunder: of torch's own kernels, and of regions that torch.compile compiles.

A model that has :data:`executor` among its own is recorded with lines that call torch's functions, differentiated by
:mod:`passes.kernels.aten`: see ``shardtrace/record/symbols.py``. For the few functions that need a kernel of ours, each
is one line of forward and one line of backward, which save what eager saves.

    @implements(ltorch.softmax, supported=lambda a, **others: is_floating(a))
    def softmax(a, dim):
        out = softmax_forward(a, dim)
        return out, lambda grad: [(a, softmax_backward(grad, out, dim))]

A function returns its result (or several) and a function from its gradient to pairs of an argument and its gradient.

Dropout saves its mask, one byte for each element. The mask is a line of its own, so that a checkpointed block saves
nothing else. Batch norm writes into its running statistics. Softmax is a part of attention with dropout. Torch has a
fused kernel of RMS norm on a GPU only, which a plan that is made on a CPU must know. Cross entropy is that of losses
which a jitted function computes outside of a model: the gradients of Thunder's own symbols mix dtypes.

Regions of a trace that torch.compile compiles have the lines of torch in them.

    [t12, t19] = TorchCompile0(x, w)
      # t11 = torch_gelu_0(x)
      # t12 = aten_mm(t11, w)

Thunder's executor ``torchcompile`` takes Thunder's symbols. In a sharded model :class:`Regions` stands in its place,
which takes lines of torch's functions and of ATen as well, so that a model is recorded as it is without an executor
that fuses, and the forward of a block is one region, its backward another.

Note [Small regions]
~~~~~~~~~~~~~~~~~~~~
To compile a region takes one to three seconds the first time, however little it computes. A GPT has half a dozen small
ones around its blocks: the positions, the embedding, the last norm, the gradients of these. A region whose fusion saves
less than two thousandths of the trace's compute, which repays its compilation only after a quarter of an hour, stays
lines. Equal regions, such as those of equal blocks, are compiled once, and count together.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from passes.comm.symbols import Property
from passes.compat.jit import compile_data_and_stats, shape_of, symbol_that_calls
from passes.kernels.aten import ATTENTION, LAID_OUT, RESHAPES, draws, operator_of, properties_of
from passes.kernels.torch_call import Line

import thunder.torch as ltorch
import torch
from thunder import clang
from thunder.core import dtypes
from thunder.core.devices import DeviceType, to_device
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy, unvariableify, variableify
from thunder.core.rematerialization import rematerialize
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.transform_common import dce
from thunder.core.transforms import get_grad, put_grad
from thunder.core.utils import producers_and_consumers
from thunder.executors.data_dependent_partition import fuse_bound_symbols
from thunder.executors.passes import update_fusion_call_ctx
from thunder.executors.torch_compile import (
    TorchCompileExecutor,
    make_compiled,
    torch_compile_ex,
    torch_compile_xentropy_ex,
)
from thunder.executors.utils import Region
from thunder.extend import Executor, FusionExecutor, OperatorExecutor, register_executor
from torch._ops import OpOverload

Gradients = Iterable[tuple[TensorProxy | None, TensorProxy | None]]
# A result or a tuple of results, and the function from their gradients to those of the arguments.
Differentiated = tuple[Any, Callable[..., Gradients]]
Implementation = Callable[..., Differentiated]
F = TypeVar("F", bound=Implementation)

HALF = frozenset({dtypes.float16, dtypes.bfloat16})
FLOATING = HALF | {dtypes.float32, dtypes.float64}


class KernelExecutor(OperatorExecutor):
    """Runs the functions that it implements.

    Beside an executor that fuses (torchcompile, nvFuser) it leaves it the functions that are better fused with their
    neighbours: those of :func:`implements` that are ``fusible``.
    """

    def __init__(self, name: str, *, version: str) -> None:
        super().__init__(name, version=version)
        self.fusible: set[Hashable] = set()  # ids of symbols

    def can_execute(self, bsym: BoundSymbol) -> bool:
        return not (bsym.sym.id in self.fusible and is_beside_fusions()) and super().can_execute(bsym)


def is_beside_fusions() -> bool:
    """True if an executor of the running compilation compiles regions of a trace."""
    data, _ = compile_data_and_stats()
    return data is not None and any(map(fuses, data.executors_list))


def is_beside_symbols() -> bool:
    """True if an executor of the running compilation compiles regions of Thunder's symbols alone."""
    data, _ = compile_data_and_stats()
    return data is not None and any(map(fuses_symbols, data.executors_list))


def has_kernels() -> bool:
    """True if an executor of the running compilation has these kernels."""
    data, _ = compile_data_and_stats()
    return data is not None and executor in data.executors_list


executor = KernelExecutor("torch_kernels", version="0.1")
register_executor(executor)


def kernel(name: str, meta: Callable[..., Any], fn: Callable[..., Any], *, tags: Sequence[Any] = ()) -> Symbol:
    """A symbol whose lines call ``fn``. ``meta`` gives its results as proxies."""
    symbol = symbol_that_calls(name, meta, fn, id=kernel_id(name), is_prim=True, executor=executor, tags=list(tags))
    executor.opmap[name] = symbol
    return symbol


def kernel_id(name: str) -> str:
    """The id of the symbol of a kernel. Symbols of Thunder may have the same name."""
    return f"kernels.{name}"


def implements(*functions: Any, supported: Callable[..., bool], fusible: bool = True) -> Callable[[F], F]:
    """Makes the decorated function, which has the parameters of ``functions`` (symbols of thunder.torch or their ids),
    the executor's implementation of them wherever ``supported``, which gets all parameters by name.

    ``fusible``: whether an executor that fuses does better.
    """

    def decorate(implementation: F) -> F:
        parameters = inspect.signature(implementation)

        def check(*args: Any, **kwargs: Any) -> bool:
            bound = parameters.bind(*args, **kwargs)
            bound.apply_defaults()
            return supported(**bound.arguments)

        def run(*args: Any, **kwargs: Any) -> Any:
            return implementation(*args, **kwargs)[0]

        def differentiate(*args: Any, **kwargs: Any) -> Any:
            out, gradients = implementation(*args, **kwargs)
            for tensor, gradient in gradients(*map(get_grad, out if isinstance(out, tuple) else (out,))):
                if isinstance(tensor, TensorProxy) and gradient is not None:
                    put_grad(tensor, gradient)
            return out

        for function in functions:
            executor.register_implementation(
                function, checker=check, execution_transform=run, grad_transform=differentiate
            )
            if fusible:
                executor.fusible.add(function.id if isinstance(function, Symbol) else function)
        return implementation

    return decorate


def lines_of_kernels(bsym: BoundSymbol, trace: TraceCtx) -> list[BoundSymbol]:
    """The lines of kernels for a line that the executor implements. New values get names of ``trace``."""
    run = executor.get_execution_transform(bsym)
    assert run is not None
    with tracectx(trace):
        trace.push_scope([])
        out = run(*bsym.args, **bsym.kwargs)
        lines = trace.pop_scope()
    swap = {variableify(out): bsym.output}
    return [line.from_bsym_swap_proxies(swap) for line in lines]


def like(a: TensorProxy, shape: Sequence[Any] | None = None, dtype: dtypes.dtype | None = None) -> TensorProxy:
    """A new proxy with the shape and dtype of ``a``, or with those given."""
    return TensorProxy(like=a, shape=tuple(a.shape if shape is None else shape), dtype=dtype or a.dtype)


def is_floating(*tensors: TensorProxy | None) -> bool:
    """True if all tensors have one floating dtype, one device and at least one element. None counts as absent."""
    present = [t for t in tensors if t is not None]
    return (
        all(isinstance(t, TensorProxy) and t.dtype in FLOATING for t in present)
        and len({(t.dtype, t.device) for t in present}) <= 1
        and not any(is_empty(t) for t in present)
    )


def is_empty(a: TensorProxy) -> bool:
    return any(isinstance(d, int) and d == 0 for d in shape_of(a))


aten = torch.ops.aten


# ---- dropout ----

dropout_mask = kernel(
    "dropout_mask",
    lambda shape, p, device: TensorProxy(
        shape=shape, dtype=dtypes.bool8, device=to_device(device), requires_grad=False
    ),
    lambda shape, p, device: torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - p),
    tags=(Property.RANDOM, OpTags.RANDOM_OP),
)
# a * mask * scale; its gradient is the same function of the result's gradient
dropout_forward = kernel(
    "dropout", lambda a, mask, scale: like(a), lambda a, mask, scale: torch.mul(a, mask).mul_(scale)
)


@implements(dropout_forward, supported=lambda a, mask, scale: True)
def masked(a: TensorProxy, mask: TensorProxy, scale: float) -> Differentiated:
    return dropout_forward(a, mask, scale), lambda grad: [(a, dropout_forward(grad, mask, scale))]


def _dropout_supported(a: TensorProxy, p: float, training: bool, inplace: bool) -> bool:
    return is_floating(a) and training and not inplace and isinstance(p, float) and 0 < p < 1


@implements(ltorch.dropout, supported=_dropout_supported)
def dropout(a: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False) -> Differentiated:
    return masked(a, dropout_mask(tuple(a.shape), p, a.device.device_str()), _scale(a, p))


def _scale(a: TensorProxy, p: float) -> float:
    """The factor of the elements that are kept. On a CPU, torch rounds it to the dtype."""
    if a.device.devicetype is not DeviceType.CPU:
        return 1 / (1 - p)
    return torch.ones((), dtype=dtypes.to_torch_dtype(a.dtype)).div_(1 - p).item()


# ---- rms_norm ----


def _same(*results: TensorProxy | None) -> tuple[TensorProxy | None, ...]:
    """Gradients have the shapes of what they are gradients of."""
    return tuple(like(r) if r is not None else None for r in results)


def _kept(a: TensorProxy, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of statistics over the last dimensions, which have this ``shape``."""
    return (*a.shape[: a.ndim - len(shape)], *(1 for _ in shape))


def _rms_norm_backward(
    grad: torch.Tensor, a: torch.Tensor, shape: Any, rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """With ``n = a * rstd``, ``r = rstd`` and ``g = grad * weight``: da = r (g - n mean(g n)), dw = sum(grad n)."""
    if a.device.type == "cuda":
        found: tuple[torch.Tensor | None, torch.Tensor | None] = aten._fused_rms_norm_backward(
            grad, a, shape, rstd, weight, (True, weight is not None)
        )
        return found
    dims = tuple(range(a.ndim - len(shape), a.ndim))
    grad = grad.to(rstd.dtype)
    normalized = a * rstd
    of_weight = None
    if weight is not None:
        product = grad * normalized
        of_weight = product.sum(tuple(range(a.ndim - len(shape)))).to(weight.dtype) if len(shape) < a.ndim else product
        del product
    scaled = grad * weight if weight is not None else grad.clone()
    mean = (scaled * normalized).mean(dims, keepdim=True)
    return scaled.addcmul_(normalized, mean, value=-1).mul_(rstd).to(a.dtype), of_weight


rms_norm_forward = kernel(
    "rms_norm",
    lambda a, shape, weight, eps: (
        like(a), like(a, _kept(a, shape), dtypes.float32 if a.dtype in HALF else a.dtype),
    ),
    lambda a, shape, weight, eps: aten._fused_rms_norm(a, shape, weight, eps),
)  # fmt: skip
rms_norm_backward = kernel(
    "rms_norm_backward",
    lambda grad, a, shape, rstd, weight: _same(a, weight),
    _rms_norm_backward,
)


@implements(
    ltorch.rms_norm,
    supported=lambda a, weight, **others: hasattr(aten, "_fused_rms_norm") and is_floating(a, weight),
)
def rms_norm(
    a: TensorProxy, normalized_shape: Sequence[int], weight: TensorProxy | None = None, eps: float | None = None
) -> Differentiated:
    shape = tuple(normalized_shape)
    out, rstd = rms_norm_forward(a, shape, weight, eps)

    def gradients(grad: TensorProxy) -> Gradients:
        return zip((a, weight), rms_norm_backward(grad, a, shape, rstd, weight), strict=True)

    return out, gradients


# ---- batch norm ----


def _accepts(a: TensorProxy, weight: TensorProxy | None, bias: TensorProxy | None, **others: Any) -> bool:
    """One dtype for all; on CPUs also 16-bit inputs with parameters in fp32."""
    parameters = [p for p in (weight, bias) if p is not None]
    if not is_floating(a, *parameters):
        mixed = bool(parameters) and all(p.dtype is dtypes.float32 for p in parameters)
        return mixed and a.dtype in HALF and is_floating(a) and is_floating(*parameters) and a.device.type == "cpu"
    return True


def _with_statistics(a: TensorProxy, shape: Sequence[int], *parameters: TensorProxy | None) -> Any:
    """The result, means and deviations. Statistics are in fp32 at least on CUDA; on CPUs in the parameters' dtype."""
    given = next((p.dtype for p in parameters if p is not None), a.dtype)
    dtype = dtypes.float32 if a.dtype in HALF and a.device.type != "cpu" else given
    return like(a), like(a, shape, dtype), like(a, shape, dtype)


batch_norm_forward = kernel(
    "batch_norm",
    lambda a, weight, bias, mean, var, training, momentum, eps: _with_statistics(
        a, (a.shape[1],) if training else (0,), weight, bias, mean, var
    ),
    aten.native_batch_norm,
    tags=(Property.IN_PLACE, OpTags.IN_PLACE, OpTags.DONT_DCE),  # updates the running statistics
)
batch_norm_backward = kernel(
    "batch_norm_backward",
    lambda grad, a, weight, bias, mean, var, saved_mean, saved_rstd, training, eps: _same(a, weight, bias),
    lambda grad, a, weight, bias, mean, var, saved_mean, saved_rstd, training, eps: aten.native_batch_norm_backward(
        grad, a, weight, mean, var, saved_mean, saved_rstd, training, eps, (True, weight is not None, bias is not None)
    ),
)


@implements(
    ltorch.batch_norm,
    supported=lambda a, weight, bias, running_mean, **others: (
        _accepts(a, weight, bias) and is_floating(weight, running_mean)
    ),
    fusible=False,
)
def batch_norm(
    a: TensorProxy,
    running_mean: TensorProxy | None = None,
    running_var: TensorProxy | None = None,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Differentiated:
    out, mean, rstd = batch_norm_forward(a, weight, bias, running_mean, running_var, training, momentum, eps)

    def gradients(grad: TensorProxy) -> Gradients:
        running = (None, None) if training else (running_mean, running_var)
        found = batch_norm_backward(grad, a, weight, bias, *running, mean, rstd, training, eps)
        return zip((a, weight, bias), found, strict=True)

    return out, gradients


# ---- softmax ----


softmax_forward = kernel("softmax", lambda a, dim: like(a), lambda a, dim: aten._softmax(a, dim, False))
softmax_backward = kernel(
    "softmax_backward",
    lambda grad, out, dim: like(out),
    lambda grad, out, dim: aten._softmax_backward_data(grad, out, dim, out.dtype),
)


def _softmax_supported(a: TensorProxy, dim: int, dtype: Any) -> bool:
    return is_floating(a) and (dtype is None or dtypes.to_dtype(dtype) in FLOATING)


@implements(ltorch._softmax, supported=_softmax_supported)
def softmax(a: TensorProxy, dim: int, *, dtype: Any = None) -> Differentiated:
    """Converts the input first, as eager does."""
    converted = clang.maybe_convert_to_dtype(a, dtypes.to_dtype(dtype) if dtype is not None else a.dtype)
    out = softmax_forward(converted, dim)
    return out, lambda grad: [(a, clang.maybe_convert_to_dtype(softmax_backward(grad, out, dim), a.dtype))]


# ---- cross entropy ----


log_softmax_forward = kernel("log_softmax", lambda a, dim: like(a), lambda a, dim: aten._log_softmax(a, dim, False))
log_softmax_backward = kernel(
    "log_softmax_backward",
    lambda grad, out, dim: like(out),
    lambda grad, out, dim: aten._log_softmax_backward_data(grad, out, dim, out.dtype),
)
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # as aten numbers them

# scores are (classes,) or (n, classes); ``options`` are the weights of the classes, the reduction and the ignored label
nll_loss_forward = kernel(
    "nll_loss",
    lambda scores, target, weight, reduction, ignore: (
        like(scores, target.shape if reduction == REDUCTIONS["none"] else ()), like(scores, ()),
    ),
    aten.nll_loss_forward,
)  # fmt: skip
nll_loss_backward = kernel(
    "nll_loss_backward", lambda grad, scores, target, *options: like(scores), aten.nll_loss_backward
)


def _loss_supported(
    a: TensorProxy, target: TensorProxy, weight: TensorProxy | None, reduction: str, **others: Any
) -> bool:
    plain = not others["label_smoothing"] and others["size_average"] is None and others["reduce"] is None
    labels = target.dtype in (dtypes.int64, dtypes.uint8) and target.ndim < a.ndim <= 2
    return plain and labels and reduction in REDUCTIONS and is_floating(a, weight)


@implements(ltorch.cross_entropy, supported=_loss_supported, fusible=False)
def cross_entropy(
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Differentiated:
    dim, options = a.ndim - 1, (weight, REDUCTIONS[reduction], ignore_index)
    scores = log_softmax_forward(a, dim)
    loss, total = nll_loss_forward(scores, target, *options)

    def gradients(grad: TensorProxy) -> Gradients:
        of_scores = nll_loss_backward(grad, scores, target, *options, total)
        return [(a, log_softmax_backward(of_scores, scores, dim))]

    return loss, gradients


# ---- regions ----


OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # a graph would end at such an operator

NORMS = {"aten::native_layer_norm", "aten::_fused_rms_norm", "aten::native_group_norm"}

SMALL = 2e-3  # of the seconds of a trace's lines


class Regions(TorchCompileExecutor):
    """Makes a region of neighbouring lines that torch.compile surely compiles as a whole.

    ``seconds`` estimates those of a line or a fusion. Without it, no region is too small.
    """

    def __init__(self, seconds: Callable[[BoundSymbol], float] | None = None):
        super().__init__(torch_compile_ex.name)
        self.implmap.update(torch_compile_ex.implmap)
        self._seconds = seconds

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        operations = _operations(bsym)
        if operations is None:  # Thunder would drop a symbol without parts, such as zeros(), from a region
            return super().can_fuse(bsym) and bool(bsym.sym.is_prim or bsym.subsymbols)
        return not any(_ends_graph(*operation) for operation in operations)

    def fuse(self, region: Region, number: int) -> BoundSymbol:
        fusion = self._fusion(region, number)
        lines = list(map(_calling_operator, fusion.subsymbols))
        compiled = make_compiled(lines, list(fusion.args), list(fusion.output))
        return fusion.from_bsym(_call_ctx={fusion.sym.name: compiled})

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """As Thunder's, but a small region stays lines, and a region of a single line of torch is that line."""
        producers, consumers = producers_and_consumers(trace)
        groups = fuse_bound_symbols(trace, lambda *nodes: all(self.can_fuse(n.group_bsyms[0]) for n in nodes))
        regions = [Region(producers, consumers, g) if self.can_fuse(g[0]) else None for g in groups]
        small = self._small(trace, [r for r in regions if r is not None])
        numbers = count()
        new = from_trace(trace)
        for group, region in zip(groups, regions, strict=True):
            keep = region is None or region in small
            new.bound_symbols += group if keep else [self._fusion(region, next(numbers))]
        new = update_fusion_call_ctx(dce(rematerialize(new)))  # calls fuse
        new.bound_symbols = list(map(_alone, new.bound_symbols))
        new.set_provenance(TraceProvenance("Regions for torch.compile"))
        return new

    def _fusion(self, region: Region, number: int = 0) -> BoundSymbol:
        inputs, outputs = ([unvariableify(v) for v in variables] for variables in (region.inputs, region.outputs))
        sym = Symbol(f"TorchCompile{number}", meta=None, is_fusion=True, executor=self)
        return BoundSymbol(sym, inputs, {}, outputs, list(map(_tagged, region.bound_symbols)))

    def _small(self, trace: TraceCtx, regions: Sequence[Region]) -> set[Region]:
        """The regions that are not worth the time it takes to compile them. See Note [Small regions]."""
        if self._seconds is None:
            return set()
        saved: dict[Hashable, float] = defaultdict(float)
        for region in regions:
            saved[_kind(region)] += sum(map(self._seconds, region.bound_symbols)) - self._seconds(self._fusion(region))
        least = SMALL * sum(map(self._seconds, trace.bound_symbols))
        return {region for region in regions if saved[_kind(region)] < least}


def _kind(region: Region) -> Hashable:
    """Equal for the regions of equal blocks."""
    return tuple((b.sym.name, *(getattr(p, "shape", None) for p in b.flat_proxy_outs)) for b in region.bound_symbols)


def _alone(bsym: BoundSymbol) -> BoundSymbol:
    line = bsym.subsymbols[0] if bsym.sym.is_fusion and len(bsym.subsymbols) == 1 else bsym
    return bsym if _operations(line) is None else line


def _operations(line: BoundSymbol) -> Sequence[tuple[OpOverload, Any, Any]] | None:
    """The operators of ATen that a line of torch runs, with their arguments; None for other lines."""
    if isinstance(line.sym.id, Line):
        call, kind = line.sym.id
        return None if kind or call.operations is None else [operation[:3] for operation in call.operations]
    operator = operator_of(line.sym)
    return None if operator is None else [(operator, line.args, line.kwargs)]


def _ends_graph(operator: OpOverload, args: Any, kwargs: Any) -> bool:
    """True for an operator that does not fit into one whole graph, or draws numbers that inductor would draw anew."""
    return bool(OF_VALUES & set(operator.tags)) or draws(operator, args, kwargs)


def _tagged(line: BoundSymbol) -> BoundSymbol:
    """The line with a tag that keeps Thunder from computing it again in the region of backward, if it costs more than
    the passes over memory that this saves."""
    costly = any(not _is_cheap(operator) for operator, *_ in _operations(line) or ())
    if not costly or OpTags.REDUCTION_OP in line.sym.tags:
        return line
    return line.from_bsym(sym=replace(line.sym, tags=[*line.sym.tags, OpTags.REDUCTION_OP]))


def _is_cheap(operator: OpOverload) -> bool:
    """True for an operator that computes each element by itself. Backward of a norm reads the norm's input anyway."""
    moves = Property.VIEW | Property.CAST | Property.COPY | Property.CONSTANT
    if torch.Tag.pointwise in operator.tags or properties_of(operator) & moves:
        return True
    return operator._schema.name in NORMS


def _calling_operator(line: BoundSymbol) -> BoundSymbol:
    """A line of ATen as one that calls the operator itself: torch.compile does not know all functions of Python."""
    operator, sym = operator_of(line.sym), line.sym
    name = "" if operator is None else operator._schema.name.partition("::")[2]
    if not name or name in LAID_OUT or name in RESHAPES or name.startswith(ATTENTION):
        return line
    own = symbol_that_calls(sym.name, sym.meta, operator, id=sym.id, is_prim=True, executor=sym.executor, tags=sym.tags)
    return line.from_bsym(sym=own)


def with_regions(
    executors: Sequence[Executor], seconds: Callable[[BoundSymbol], float] | None = None
) -> tuple[Executor, ...]:
    """The executors, with :class:`Regions` in the place of Thunder's own."""
    return tuple(Regions(seconds) if executor is torch_compile_ex else executor for executor in executors)


def fuses(executor: Executor) -> bool:
    """True for an executor that compiles regions of a trace. Thunder's executor for cross entropy does nothing else."""
    return isinstance(executor, FusionExecutor) and executor != torch_compile_xentropy_ex


def fuses_symbols(executor: Executor) -> bool:
    """True for such an executor if it takes only Thunder's symbols."""
    return fuses(executor) and not isinstance(executor, Regions)
