"""Torch's kernels of linear layers, convolutions, dropout, normalizations, softmax and losses.

Dropout saves its mask, one byte for each element. The mask is a line of its own, so that a checkpointed block saves
nothing else.

softmax, log_softmax and cross_entropy of rows of scores, which is a line of log_softmax and one of nll_loss, as in
eager PyTorch. They save their results only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from passes.comm.symbols import Property
from passes.compat.jit import shape_of
from passes.kernels.registration import (
    FLOATING,
    HALF,
    Differentiated,
    Flops,
    Gradients,
    Shapes,
    implements,
    is_floating,
    kernel,
    like,
    present,
)

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.devices import DeviceType, to_device
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

# ---- linear and convolutions ----


def _rows(a: torch.Tensor) -> torch.Tensor:
    return a.reshape(-1, a.shape[-1])


def product(left: int) -> Flops:
    """Of a matrix product whose left factor is tensor number ``left``: (..., m, k) x (..., k, n) -> (..., m, n).

    Adding a bias or another tensor is not counted.
    """
    return lambda tensors, outs: 2 * math.prod(outs[0]) * tensors[left][-1]


linear_forward = kernel(
    "linear", lambda a, weight, bias: like(a, (*a.shape[:-1], weight.shape[0])), F.linear, flops=product(0)
)
# (..., out) x (out, in) -> (..., in)
linear_backward_input = kernel(
    "linear_backward_input",
    lambda grad, weight: like(grad, (*grad.shape[:-1], weight.shape[1])),
    torch.matmul,
    flops=product(0),
)
# (rows, out)^T x (rows, in) -> (out, in)
linear_backward_weight = kernel(
    "linear_backward_weight",
    lambda grad, a: like(a, (grad.shape[-1], a.shape[-1])),
    lambda grad, a: _rows(grad).t() @ _rows(a),
    flops=lambda tensors, outs: 2 * math.prod(tensors[0]) * tensors[1][-1],
)
# (rows, out) -> (out). A sum over several dimensions would depend on the strides of the gradient.
linear_backward_bias = kernel(
    "linear_backward_bias", lambda grad: like(grad, grad.shape[-1:]), lambda grad: _rows(grad).sum(0)
)


@implements(prims.linear, supported=lambda a, weight, bias: is_floating(a, weight, bias) and a.ndim > 0)
def linear(a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None) -> Differentiated:
    def gradients(grad: TensorProxy) -> Gradients:
        yield a, linear_backward_input(grad, weight)
        yield weight, linear_backward_weight(grad, a)
        if bias is not None:
            yield bias, linear_backward_bias(grad) if grad.ndim > 1 else grad

    return linear_forward(a, weight, bias), gradients


aten = torch.ops.aten


def convolution_flops(tensors: Shapes, outs: Shapes) -> int:
    """(n, c, ...) * (o, c / groups, kernel...) -> (n, o, ...)"""
    return 2 * math.prod(outs[0]) * math.prod(tensors[1][1:])


def _backward_flops(tensors: Shapes, outs: Shapes) -> int:
    """The output's gradient, the input and the weight. A bias's gradient, which is no product, has one dimension."""
    grad, _, weight = tensors
    return sum(2 * math.prod(grad) * math.prod(weight[1:]) for o in outs if len(o) > 1)


convolution_forward = kernel("convolution", prims.convolution_meta, torch.convolution, flops=convolution_flops)
convolution_backward = kernel(
    "convolution_backward",
    lambda grad, a, weight, options, wanted: (like(a), like(weight), like(weight, weight.shape[:1])),
    lambda grad, a, weight, options, wanted: aten.convolution_backward(
        grad, a, weight, weight.shape[:1], *options, wanted
    ),
    masked=True,
    flops=_backward_flops,
)


@implements(prims.convolution, supported=lambda a, weight, bias, **options: is_floating(a, weight, bias), fusible=False)
def convolution(
    a: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Differentiated:
    rank = a.ndim - 2
    each = (_each(stride, rank), _each(padding, rank), _each(dilation, rank))
    options = (*each, bool(transposed), _each(output_padding, rank), groups)
    out = convolution_forward(a, weight, bias, *options)

    def gradients(grad: TensorProxy) -> Gradients:
        return zip((a, weight, bias), convolution_backward(grad, a, weight, options, (True, True, True)), strict=True)

    return out, gradients


def _each(value: Any, rank: int) -> tuple[int, ...]:
    """A number, or a sequence of one, for each spatial dimension."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * rank if len(values) == 1 else values


# ---- chunks and dropout ----


def _chunk_meta(a: TensorProxy, chunks: int, dim: int) -> tuple[TensorProxy, ...]:
    return tuple(like(a, part.shape) for part in torch.empty(shape_of(a), device="meta").chunk(chunks, dim))


chunk_forward = kernel("chunk", _chunk_meta, torch.chunk, tags=(Property.VIEW,))


@implements(ltorch.chunk, supported=lambda a, **others: is_floating(a))
def chunk(a: TensorProxy, chunks: int, dim: int = 0) -> Differentiated:
    return chunk_forward(a, chunks, dim), lambda *grads: [(a, ltorch.cat(grads, dim))]


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


# ---- normalizations ----


Mask = tuple[bool, ...]


def _same(*results: TensorProxy | None) -> tuple[TensorProxy | None, ...]:
    """Gradients have the shapes of what they are gradients of."""
    return tuple(like(r) if r is not None else None for r in results)


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


def _kept(a: TensorProxy, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of statistics over the last dimensions, which have this ``shape``."""
    return (*a.shape[: a.ndim - len(shape)], *(1 for _ in shape))


# ---- rms_norm ----


def _rms_norm_backward(
    grad: torch.Tensor, a: torch.Tensor, shape: Any, rstd: torch.Tensor, weight: torch.Tensor | None, wanted: Mask
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """With ``n = a * rstd``, ``r = rstd`` and ``g = grad * weight``: da = r (g - n mean(g n)), dw = sum(grad n)."""
    if a.device.type == "cuda":
        found: tuple[torch.Tensor | None, torch.Tensor | None] = aten._fused_rms_norm_backward(
            grad, a, shape, rstd, weight, wanted
        )
        return found
    dims = tuple(range(a.ndim - len(shape), a.ndim))
    grad = grad.to(rstd.dtype)
    normalized = a * rstd
    of_weight = None
    if wanted[1] and weight is not None:
        product = grad * normalized
        of_weight = product.sum(tuple(range(a.ndim - len(shape)))).to(weight.dtype) if len(shape) < a.ndim else product
        del product
    if not wanted[0]:
        return None, of_weight
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
    lambda grad, a, shape, rstd, weight, wanted: _same(a, weight),
    _rms_norm_backward,
    masked=True,
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
        return zip((a, weight), rms_norm_backward(grad, a, shape, rstd, weight, present(a, weight)), strict=True)

    return out, gradients


# ---- batch_norm ----

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
    lambda grad, a, weight, bias, mean, var, saved_mean, saved_rstd, training, eps, wanted: _same(a, weight, bias),
    lambda grad, a, weight, bias, mean, var, saved_mean, saved_rstd, training, eps, wanted: (
        aten.native_batch_norm_backward(grad, a, weight, mean, var, saved_mean, saved_rstd, training, eps, wanted)
    ),
    masked=True,
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
        found = batch_norm_backward(
            grad, a, weight, bias, *running, mean, rstd, training, eps, present(a, weight, bias)
        )
        return zip((a, weight, bias), found, strict=True)

    return out, gradients


# ---- losses ----


def _differentiated(name: str, forward: Any, backward: Any) -> tuple[Symbol, Symbol]:
    return (
        kernel(name, lambda a, dim: like(a), lambda a, dim: forward(a, dim, False)),
        kernel(
            f"{name}_backward",
            lambda grad, out, dim: like(out),
            lambda grad, out, dim: backward(grad, out, dim, out.dtype),
        ),
    )


softmax_forward, softmax_backward = _differentiated("softmax", aten._softmax, aten._softmax_backward_data)
log_softmax_forward, log_softmax_backward = _differentiated(
    "log_softmax", aten._log_softmax, aten._log_softmax_backward_data
)


def _softmax_supported(a: TensorProxy, dim: int, dtype: Any) -> bool:
    return is_floating(a) and (dtype is None or dtypes.to_dtype(dtype) in FLOATING)


def _in_dtype(forward: Symbol, backward: Symbol, a: TensorProxy, dim: int, dtype: Any) -> Differentiated:
    """Converts the input first, as eager does."""
    converted = clang.maybe_convert_to_dtype(a, dtypes.to_dtype(dtype) if dtype is not None else a.dtype)
    out = forward(converted, dim)
    return out, lambda grad: [(a, clang.maybe_convert_to_dtype(backward(grad, out, dim), a.dtype))]


@implements(ltorch._softmax, supported=_softmax_supported)
def softmax(a: TensorProxy, dim: int, *, dtype: Any = None) -> Differentiated:
    return _in_dtype(softmax_forward, softmax_backward, a, dim, dtype)


@implements(ltorch.log_softmax, supported=_softmax_supported)
def log_softmax(a: TensorProxy, dim: int, *, dtype: Any = None) -> Differentiated:
    return _in_dtype(log_softmax_forward, log_softmax_backward, a, dim, dtype)


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
