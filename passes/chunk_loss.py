"""Pass: a loss is computed in chunks of rows, and the logits are never there as a whole.

    t7 = linear(t6, t_head)                              t10 = view(t6, (4096, 768))
    t8 = to(t7, torch.float32)                    ->     loss, saved = torch_chunked_loss_forward(t10, t_head, t9)
    loss = cross_entropy(view(t8, (4096, 50304)), t9)    g10, g_head = torch_chunked_loss_backward(saved, g)

The logits of a language model are its largest values: rows x vocabulary, in two precisions, with their gradient. The
new line computes the loss and its gradients chunk by chunk in forward, and hands the gradients on in backward. No
product is computed twice, and backward needs no weight: ZeRO-3 gathers the head's once.

What lies between the product and the loss may be casts, functions of each number (a soft cap, a scale) and views that
keep the last dim. The views are taken of the rows instead. If anything else reads a logit, such as the model's result,
the lines stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from passes.analysis.calls import stops_gradients
from passes.analysis.dims import TorchLine, loss_arguments, of_each_dim, torch_line
from passes.analysis.recognise import names
from passes.kernels.parts import GIVEN, ChunkedLoss, Step
from passes.kernels.torch_call import call_of
from passes.plan.dims.reductions import RESHAPES
from passes.plan.dims.views import is_full
from passes.writer import Writer, writing

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

Chunks = int | Literal["auto"] | None
CHUNKS = 8  # of "auto": at the peak are an eighth of the logits, and the weight's gradient is added to eight times
LEAST_BYTES = 64 << 20  # of logits in float32 that "auto" makes chunks of
LARGEST_CHUNK = 1 << 30  # bytes of logits in float32
LEAST_ROWS = 128  # of a chunk, so that products stay efficient


@dataclass(frozen=True)
class Loss:
    """The operands of a loss. Its product's rows are seen by ``views``, and its logits go through ``steps``."""

    rows: TensorProxy
    weight: TensorProxy
    bias: TensorProxy | None
    lines: tuple[BoundSymbol, ...]  # which nothing else reads
    views: tuple[Callable[[TensorProxy], TensorProxy], ...] = ()
    steps: tuple[Step, ...] = ()


def chunk_loss(computation: TraceCtx, *, chunks: Chunks) -> TraceCtx:
    """Computes losses in chunks of rows, so that logits are never there as a whole.

    Takes: a computation before autodiff, on whole parameters.
    Gives: one line for a product with the weight of the head, what lies between, and the loss.
    No-op when: something else reads the logits, they are small, or ``CompilePolicy(chunk_loss=None)``.
    """
    if chunks is None:
        return computation
    lines = computation.bound_symbols
    calls = [(i, call) for i, line in enumerate(lines) if (call := _loss(line)) is not None]
    if not calls:
        return computation
    made = {o.name: line for line in lines for o in line.flat_proxy_outs}
    readers = Counter(name for line in lines for name in names((line.args, line.kwargs)))
    found = {i: (call, loss) for i, call in calls if (loss := _find(call.args[0], made, readers)) is not None}
    wanted = {i: (call, loss, n) for i, (call, loss) in found.items() if (n := _count(chunks, call)) > 1}
    return _written(computation, wanted) if wanted else computation


def _loss(line: BoundSymbol) -> TorchLine | None:
    """A line as a call of cross entropy of rows (n, classes) and labels (n,); None for another one."""
    call = torch_line(line)
    if call is None or call.name != "nn.functional.cross_entropy":
        return None
    logits, labels, classes, average, _, reduce, reduction, smoothing = loss_arguments(*call.args, **call.kwargs)
    plain = average is None and reduce is None and reduction in ("mean", "sum") and isinstance(smoothing, float | int)
    rows = isinstance(labels, TensorProxy) and logits.ndim == 2 and labels.ndim == 1 and logits.numel
    if not plain or not rows or not dtypes.is_exact_dtype(labels.dtype):
        return None
    return None if isinstance(classes, TensorProxy) and classes.requires_grad else call


def _count(chunks: Chunks, call: TorchLine) -> int:
    rows, classes = call.args[0].shape
    if isinstance(chunks, int):
        return min(chunks, rows)
    bytes = 4 * rows * classes
    return 1 if bytes < LEAST_BYTES else min(max(CHUNKS, -(-bytes // LARGEST_CHUNK)), max(rows // LEAST_ROWS, 1))


def _find(logits: TensorProxy, made: Mapping[str, BoundSymbol], readers: Mapping[str, int]) -> Loss | None:
    """Finds the operands of logits. None if no product makes them, or if another line reads them, too."""
    line = made.get(logits.name)
    if line is None or readers[logits.name] > 1 or not _is_plain(line) or (call := torch_line(line)) is None:
        return None
    if (product := _product(call, made)) is not None:
        return Loss(*product, lines=(line,))
    if (terms := _sum(call)) is not None:
        before = _find(terms[0], made, readers)
        fits = before is not None and before.bias is None and not before.steps
        return replace(before, bias=terms[1], lines=(*before.lines, line)) if before is not None and fits else None
    before = _find(call.operands[0], made, readers) if len(call.operands) == 1 else None
    if before is None:
        return None
    if (view := _view(call)) is not None:
        return replace(before, views=(*before.views, view), lines=(*before.lines, line))
    if (step := _step(call)) is not None:
        return replace(before, steps=(*before.steps, step), lines=(*before.lines, line))
    return None


def _is_plain(line: BoundSymbol) -> bool:
    """Whether a line runs as it stands: without autocast, which would cast in each chunk again, and without writes."""
    call = call_of(line.sym)
    return call is None or not (call.casts or call.written or call.random)


def _product(call: TorchLine, made: Mapping[str, BoundSymbol]) -> tuple[Any, Any, Any] | None:
    """The rows, the weight (classes, width) and the bias of a product."""
    if call.name == "nn.functional.linear":
        rows, weight, *rest = (*call.args, *call.kwargs.values())
        return (rows, weight, rest[0] if rest else None) if weight.ndim == 2 else None
    if call.name == "matmul" and len(call.operands) == 2:
        rows, turned = call.operands
        line = made.get(turned.name)
        turning = torch_line(line) if line is not None else None
        if turning is not None and turning.name in ("t", "mT", "T", "transpose", "permute") and turned.ndim == 2:
            (weight,) = turning.operands
            return (rows, weight, None) if tuple(weight.shape) == tuple(turned.shape)[::-1] else None
    return None


def _sum(call: TorchLine) -> tuple[TensorProxy, TensorProxy] | None:
    """The logits and the bias (classes,), perhaps with dims of one, of a sum."""
    if call.name != "add" or len(call.operands) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    logits, bias = sorted(call.operands, key=lambda t: -t.numel)
    fits = bias.numel == bias.shape[-1] == logits.shape[-1] if bias.ndim else False
    return (logits, bias) if fits and logits.dtype == bias.dtype and call.results[0].shape == logits.shape else None


CASTS = ("to", "float", "double", "half", "bfloat16", "type")
COPIES = ("contiguous", "clone")
OF_EACH_NUMBER = {
    "mul": torch.mul, "div": torch.div, "true_divide": torch.div, "add": torch.add, "sub": torch.sub,
    "neg": torch.neg, "tanh": torch.tanh, "clamp": torch.clamp,
}  # fmt: skip


def _step(call: TorchLine) -> Step | None:
    """A function of each logit, or a cast of it."""
    (given,), (result,) = call.operands, call.results
    if call.name in CASTS:
        return Step(torch.Tensor.to, (GIVEN, dtypes.to_torch_dtype(result.dtype)))
    function = OF_EACH_NUMBER.get(call.name)
    args = tuple(GIVEN if x is given else x for x in call.args)
    if function is None or any(isinstance(x, Proxy) for x in (*args, *call.kwargs.values())):
        return None
    return Step(function, args, tuple(call.kwargs.items()))


def _view(call: TorchLine) -> Callable[[TensorProxy], TensorProxy] | None:
    """A view that keeps the last dim, as one of the rows in which it has another size."""
    (given,), (result,) = call.operands, call.results
    if call.name in COPIES:
        return lambda rows: rows
    if result.shape[-1:] != given.shape[-1:]:
        return None
    if call.name in RESHAPES:
        shape = tuple(result.shape[:-1])
        return lambda rows: ltorch.reshape(rows, (*shape, rows.shape[-1]))
    index = of_each_dim(call.args[1], given.ndim) if call.name == "getitem" else None
    if index is None or not isinstance(index[-1], slice) or not is_full(index[-1], given.shape[-1]):
        return None
    return lambda rows: ltorch.getitem(rows, (*index[:-1], slice(None)))


def _written(computation: TraceCtx, losses: Mapping[int, tuple[TorchLine, Loss, int]]) -> TraceCtx:
    to = Writer(computation)
    dropped = {id(line) for _, loss, _ in losses.values() for line in loss.lines}
    with writing():
        for i, line in enumerate(computation.bound_symbols):
            if i in losses:
                _write(to, line, *losses[i])
            elif id(line) not in dropped:
                to.trace.bound_symbols.append(line)
    return to.finished()


def _write(to: Writer, line: BoundSymbol, call: TorchLine, loss: Loss, chunks: int) -> None:
    _, labels, classes, _, ignored, _, reduction, smoothing = loss_arguments(*call.args, **call.kwargs)

    def rows() -> TensorProxy:
        found = loss.rows
        for view in loss.views:
            found = view(found)
        return found

    (given,), bias = to.emit(line, rows), loss.bias
    if bias is not None and bias.ndim > 1:
        (bias,) = to.emit(line, lambda: ltorch.reshape(loss.bias, (loss.weight.shape[0],)))
    operands = (given, loss.weight, labels, bias, classes)
    recorded = (loss.rows, loss.weight, labels, loss.bias, classes)
    flows = not any(map(stops_gradients, (line, *loss.lines)))
    grads = [flows and to.has_gradient(t) for t in recorded if isinstance(t, TensorProxy)]
    function = ChunkedLoss(chunks, loss.steps, ignored, float(smoothing), reduction == "mean")
    (found,) = to.torch(line, function, operands, {}, grads, name="torch_chunked_loss")
    to.name(found, call.results[0])
