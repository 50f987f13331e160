"""Functions that are computed in parts: in chunks of rows, of a part of the vocabulary, of a part of a sequence.

Cross entropy of a product is computed in chunks of rows, so that the logits are never there as a whole. Each rank may
have a part of the vocabulary of a loss or an embedding, and a part of the sequence of a causal attention, which is
computed by torch's fused kernels of CPUs.

Note [Scale]. The gradients are those of the sum of the rows' losses: those of logits are between -1 and 1. In backward
they are divided by the number of rows and multiplied by the incoming gradient, which a GradScaler may have made large.
So float16 does not underflow. A batch without a label has the loss NaN and gradients of zero, as in torch.

Functions of parts of a vocabulary fail, as torch's do, for tokens and labels that are in nobody's part.

    rows = PartOfEmbedding(...)(tokens, table)      zeros for tokens of other ranks; ranks add these rows up
    numbers = PartOfLoss(...)(logits, labels)       three of each row, which ranks gather
    loss = LossOfParts(...)(all_numbers, labels)    cross entropy; no rank has the logits of all classes

Sources: the gradient in forward is that of Hsu et al., 2024, "Liger Kernel"; the parts are those of Megatron-LM
(Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from passes.compat.versions import keeps_graph
from passes.plan.plan import ContextPlan

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

# ---- cross entropy in chunks of rows ----


class _Given:
    """The place of the logits among the arguments of a step."""

    def __repr__(self) -> str:
        return "logits"


GIVEN = _Given()


class Step(NamedTuple):
    """A function between the product and the loss."""

    function: Any  # of torch
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        args = (logits if x is GIVEN else x for x in self.args)
        result: torch.Tensor = self.function(*args, **dict(self.kwargs))
        return result


@dataclass(frozen=True)
class ChunkedLoss:
    """Cross entropy of ``steps(rows @ weight.T + bias)``, a function of rows (n, width), weight (classes, width) and
    labels (n,), with bias (classes,) and class weights (classes,) or None. It returns a number."""

    chunks: int
    steps: tuple[Step, ...] = ()
    ignored: int = -100
    smoothing: float = 0.0
    mean: bool = True

    __name__ = "chunked_loss"
    always_differentiates = True  # each input that wants a gradient has one

    def __call__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None = None,
        classes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found: torch.Tensor = _Chunked.apply(self, rows, weight, labels, bias, classes)
        return found

    def count(self, weight: torch.Tensor, labels: torch.Tensor, classes: torch.Tensor | None) -> torch.Tensor:
        """The divisor of the sum of the rows' losses: for a mean, the number or the weight of the rows that count."""
        dtype = _wide(weight)
        if not self.mean:
            return labels.new_ones((), dtype=dtype)
        counts = labels != self.ignored
        if classes is None:
            return counts.sum(dtype=dtype)
        return classes[labels.where(counts, 0)].where(counts, 0).sum(dtype=dtype)

    def of_rows(self, logits: torch.Tensor, labels: torch.Tensor, classes: torch.Tensor | None) -> torch.Tensor:
        """The loss of each row, from the product."""
        for step in self.steps:
            logits = step(logits)
        return F.cross_entropy(
            logits, labels, classes, ignore_index=self.ignored, reduction="none", label_smoothing=self.smoothing
        )

    def at_once(
        self, rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same, of all rows."""
        losses = self.of_rows(F.linear(rows, weight, bias), labels, None)
        return (losses.sum() / self.count(weight, labels, None)).to(losses.dtype)

    def slices(self, rows: int) -> Iterator[slice]:
        size = -(-rows // self.chunks)
        return (slice(first, first + size) for first in range(0, rows, size))


class _Chunked(torch.autograd.Function):
    """The loss of all chunks. Forward computes the gradients that are wanted, too: see Note [Scale]."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: ChunkedLoss,
        rows: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        classes: torch.Tensor | None,
    ) -> torch.Tensor:
        _, of_rows, of_weight, _, of_bias, _ = ctx.needs_input_grad
        count = loss.count(weight, labels, classes)
        gradients = [
            torch.empty_like(rows) if of_rows else None,
            torch.zeros_like(weight, dtype=_wide(weight)) if of_weight else None,
            torch.zeros_like(bias, dtype=_wide(bias)) if of_bias and bias is not None else None,
        ]
        total = torch.zeros((), dtype=count.dtype, device=rows.device)
        for part in loss.slices(len(rows)):
            given = rows[part]
            logits = F.linear(given, weight, bias)
            losses, gradient = _differentiated(loss, logits, labels[part], classes, wanted=any(ctx.needs_input_grad))
            del logits
            total += losses.sum(dtype=count.dtype)
            _add(gradients, part, gradient, given, weight)
            del gradient
        ctx.dtypes = [None if t is None else t.dtype for t in (rows, weight, bias)]
        ctx.save_for_backward(count, *gradients)
        return (total / count).to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        count, *found = ctx.saved_tensors
        factor = torch.where(count == 0, 0, gradient / count)
        scale = torch.Tensor.mul if keeps_graph() else torch.Tensor.mul_
        of_rows, of_weight, of_bias = (
            None if t is None else scale(t, factor).to(dtype) for t, dtype in zip(found, ctx.dtypes, strict=True)
        )
        return None, of_rows, of_weight, None, of_bias, None


def _differentiated(
    loss: ChunkedLoss, logits: torch.Tensor, labels: torch.Tensor, classes: torch.Tensor | None, *, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The losses of some rows, and the gradient of their logits, of which each row's loss has one, if it is wanted."""
    if not wanted:
        return loss.of_rows(logits, labels, classes), None
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)  # not as the line around this one
    with torch.enable_grad(), keep:
        logits.requires_grad_()
        found = loss.of_rows(logits, labels, classes)
        (gradient,) = torch.autograd.grad(found.sum(), logits)
    return found.detach(), gradient


def _add(
    gradients: Sequence[torch.Tensor | None],
    part: slice,
    gradient: torch.Tensor | None,
    rows: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """Adds what the gradient of the logits of some rows gives those of rows, weight and bias."""
    if gradient is None:
        return
    of_rows, of_weight, of_bias = gradients
    if of_rows is not None:
        torch.mm(gradient, weight, out=of_rows[part])
    if of_weight is not None and of_weight.dtype == gradient.dtype:
        of_weight.addmm_(gradient.T, rows)
    elif of_weight is not None:
        of_weight += gradient.T @ rows
    if of_bias is not None:
        of_bias += gradient.sum(0)


def _wide(t: torch.Tensor) -> torch.dtype:
    """Sums of chunks are rounded once, as those of a whole product."""
    return torch.float32 if t.dtype in (torch.float16, torch.bfloat16) else t.dtype


# ---- parts of a vocabulary ----


NUMBERS = 3  # of a row: the largest logit, the sum of exponentials, and the logit of the label


def _places(
    ids: torch.Tensor, size: int, plan: ContextPlan, ignored: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids are in this rank's part of ``size`` entries, and where: 0 for those of other ranks and ``ignored``
    ones, and -1, which torch refuses, for those in nobody's part."""
    places = ids - plan.rank * size
    own = (places >= 0) & (places < size)
    known = (ids >= 0) & (ids < size * plan.ranks)
    known = known if ignored is None else known | (ids == ignored)
    return own, places.where(own, 0).where(known, -1)


@dataclass(frozen=True)
class PartOfEmbedding:
    """``torch.nn.functional.embedding`` with this rank's rows of the table."""

    plan: ContextPlan

    __name__ = "embedding"
    of_tensors = staticmethod(F.embedding)

    def __call__(
        self, tokens: torch.Tensor, table: torch.Tensor, padding_idx: int | None = None, *args: Any, **options: Any
    ) -> torch.Tensor:
        first, rows = self.plan.rank * len(table), len(table)
        own, places = _places(tokens, rows, self.plan)
        padding = padding_idx - first if padding_idx is not None and first <= padding_idx < first + rows else None
        found = F.embedding(places, table, padding)
        return found.masked_fill(~own.unsqueeze(-1), 0)


@dataclass(frozen=True)
class PartOfLoss:
    """The :data:`NUMBERS` of each row of logits (rows, this rank's classes), for labels (rows,), of which one value is
    ``ignored``."""

    plan: ContextPlan
    ignored: int

    __name__ = "loss"

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        own, places = _places(labels, logits.shape[-1], self.plan, self.ignored)
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        most = logits.detach().amax(-1, keepdim=True)
        most = most.where(most.isfinite(), 0)  # all of its classes may be masked
        total = (logits - most).exp().sum(-1, keepdim=True)
        of_label = logits.gather(-1, places.unsqueeze(-1))
        return torch.cat([most, total, of_label.where(own.unsqueeze(-1), 0)], -1)


@dataclass(frozen=True)
class LossOfParts:
    """``torch.nn.functional.cross_entropy`` of the numbers (rows, ranks * NUMBERS) of all ranks."""

    dtype: torch.dtype

    __name__ = "cross_entropy"
    of_tensors = staticmethod(F.cross_entropy)

    def __call__(
        self,
        numbers: torch.Tensor,
        labels: torch.Tensor,
        weight: None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        most, total, of_label = numbers.unflatten(-1, (-1, NUMBERS)).unbind(-1)
        largest = most.amax(-1, keepdim=True)
        losses = (total * (most - largest).exp()).sum(-1).log() + largest.squeeze(-1) - of_label.sum(-1)
        counts = labels != ignore_index
        losses = losses.where(counts, 0)
        if reduction == "mean":
            losses = losses.sum() / counts.sum()
        elif reduction == "sum":
            losses = losses.sum()
        return losses.to(self.dtype)


# ---- causal attention of a part of a sequence ----


aten = torch.ops.aten


class Chunk(NamedTuple):
    """Consecutive queries, by their place among those of the rank, and their positions ``start`` to ``end``: fewer
    where the sequence has ended."""

    first: int
    stop: int
    start: int
    end: int


@dataclass(frozen=True)
class CausalAttention:
    """A function of queries (..., positions of this rank, width) and whole keys and values (..., length, width).

    Each chunk of queries sees all keys before it, and itself with a causal mask. Nobody reads the results for queries
    beyond the end of the sequence.
    """

    plan: ContextPlan
    length: int

    __name__ = "causal_attention"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        dropout_p: float = 0.0,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        if _has_kernel(query, key, value) and not dropout_p:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            found: torch.Tensor = _InPieces.apply(query, key, value, tuple(self._chunks()), scale)
            return found
        outs = []
        for chunk in self._chunks():
            q = query[..., chunk.first : chunk.stop, :]
            k, v = (t[..., : chunk.end, :] for t in (key, value))
            outs.append(F.scaled_dot_product_attention(q, k, v, _mask(q, chunk), dropout_p, scale=scale))
        return torch.cat(outs, -2)

    def _chunks(self) -> Iterator[Chunk]:
        size = self.plan.chunk(self.length)
        for i, number in enumerate(self.plan.chunks_of(self.plan.rank)):
            start, end = (min(n * size, self.length) for n in (number, number + 1))
            yield Chunk(i * size, (i + 1) * size, start, end)


def _has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's fused kernel of the CPU takes them. Meta tensors stand for those of a device."""
    alike = query.ndim == 4 and query.shape[:2] == key.shape[:2] and query.shape[-1] == key.shape[-1] == value.shape[-1]
    takes = query.is_meta or query.dtype in (torch.float32, torch.float64, torch.bfloat16)
    return alike and query.device.type in ("cpu", "meta") and takes


def _mask(query: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """The mask of a chunk and all keys up to its end."""
    size, whole = chunk.stop - chunk.first, chunk.end - chunk.start == chunk.stop - chunk.first
    if query.is_cuda and whole and type(query) is torch.Tensor:
        return causal_lower_right(size, chunk.end)  # no mask in memory, if there is a fused kernel
    positions = torch.arange(chunk.start, chunk.start + size, device=query.device)
    return positions[:, None] >= torch.arange(chunk.end, device=query.device)


class _InPieces(torch.autograd.Function):
    """The attention of each chunk in two calls of torch's kernel: to the keys before it, and to its own keys with a
    causal mask. No mask is in memory. The results are joined by their sums of exponentials. The backward of each call
    takes the joined result and sums.

    Source: FlashAttention (Dao et al., 2022, section 3.1) and Ring Attention (Liu et al., 2023).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunks: tuple[Chunk, ...],
        scale: float,
    ) -> torch.Tensor:
        outs, sums = [], []
        for chunk in chunks:
            q = query[..., chunk.first : chunk.stop, :]
            found = []
            for begin, end, causal in _pieces(chunk):
                k, v = (t[..., begin:end, :] for t in (key, value))
                found.append(aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale))
            out, total = found[0] if len(found) == 1 else _joined(*found)
            outs.append(out)
            sums.append(total)
        # in the order of memory (rows, positions, heads, width), as torch's kernel makes it: models transpose it
        result = torch.cat([out.transpose(1, 2) for out in outs], 1).transpose(1, 2)
        sums_of_all = torch.cat(sums, -1)
        ctx.save_for_backward(query, key, value, result, sums_of_all)
        ctx.chunks, ctx.scale = chunks, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, result, sums = ctx.saved_tensors
        grads = tuple(torch.zeros_like(t) for t in (query, key, value))
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        for chunk in ctx.chunks:
            of_chunk = slice(chunk.first, chunk.stop)
            g, q, out = (t[..., of_chunk, :] for t in (grad, query, result))
            for begin, end, causal in _pieces(chunk):
                of_keys = slice(begin, end)
                found = backward(
                    g, q, key[..., of_keys, :], value[..., of_keys, :], out, sums[..., of_chunk], 0.0, causal,
                    scale=ctx.scale,
                )  # fmt: skip
                for whole, part, place in zip(grads, found, (of_chunk, of_keys, of_keys), strict=True):
                    whole[..., place, :] += part
        return (*grads, None, None)


def _joined(one: Any, other: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys of both, and the logarithm of its sum of exponentials."""
    (out, total), (out_of_other, total_of_other) = one, other
    joined = torch.logaddexp(total, total_of_other)
    first, second = ((t - joined).exp().unsqueeze(-1) for t in (total, total_of_other))
    return (out * first + out_of_other * second).to(out.dtype), joined


def _pieces(chunk: Chunk) -> Iterator[tuple[int, int, bool]]:
    """The keys that a chunk sees: those before it, then its own, of which each query sees those up to itself."""
    if chunk.start:
        yield 0, chunk.start, False
    if chunk.end > chunk.start:
        yield chunk.start, chunk.end, True
