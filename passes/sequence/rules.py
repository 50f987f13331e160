"""Lines that mix positions and still compute on parts: attention, losses, slices of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from passes.analysis.dims import TorchLine
from passes.comm.sequence import exchange_heads, exchange_positions, sum_sequence
from passes.kernels.sequence_attention import CausalAttention
from passes.plan.dims import indexing
from passes.plan.sequence import Split
from passes.sequence.splitter import Splitter

import torch
from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

Rule = Callable[[Splitter, BoundSymbol, TorchLine], bool]


def attention_arguments(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    **options: Any,
) -> tuple[Any, ...]:
    return query, key, value, attn_mask, dropout_p, is_causal, options


def attention(to: Splitter, line: BoundSymbol, call: TorchLine) -> bool:
    """Queries stay split. Keys and values are gathered; a mask has a row for each query."""
    query, key, value, mask, dropout, causal, options = attention_arguments(*call.args, **call.kwargs)
    split = next((s for s in to.splits(query) if s == Split.along(query.ndim - 2, s.length)), None)
    if split is None or (causal and key.shape[-2] != split.length):
        return False
    if _exchanges(to, query, key, value, mask):
        return _attention_of_heads(to, line, call, split)
    # the gathers come first: they are under way while other lines compute
    k, v, q = to.whole(key), to.whole(value), to.part(query, split)
    if causal:
        function = CausalAttention(to.plan, split.length)
        (found,) = to.writer.torch(
            line, function, (q, k, v), {"dropout_p": dropout, **options}, to.writer.grads(line, call)
        )
    else:
        if isinstance(mask, TensorProxy):
            by_query = mask.ndim > 1 and mask.shape[-2] != 1
            mask = to.part(mask, Split.along(mask.ndim - 2, split.length)) if by_query else to.whole(mask)
        (found,) = to.writer.as_call(line, call, (q, k, v, mask, dropout), {"is_causal": False, **options})
    to.know_part(call.results[0], split, found)
    return True


def _exchanges(to: Splitter, query: TensorProxy, key: TensorProxy, value: TensorProxy, mask: Any) -> bool:
    """Whether ranks exchange heads for positions instead of gathering keys and values: if that is asked for, or if less
    is sent. Forward exchanges queries, keys, values and results; backward their gradients, and results once more. Keys
    and values are gathered in forward and in backward, and their gradients are scattered."""
    ranks = to.plan.ranks
    divides = all(t.ndim == 4 and t.shape[1] % ranks == 0 for t in (query, key, value))
    whole = all(t.shape[2] == query.shape[2] and bool(to.splits(t)) for t in (key, value))
    if to.plan.attention == "gather" or mask is not None or not divides or not whole:
        return False
    exchanged = (5 * query.numel + 2 * (key.numel + value.numel)) // ranks
    gathered = 3 * sum(to.gather_cost(t) // t.dtype.bytes for t in (key, value))
    return to.plan.attention == "ulysses" or exchanged < gathered


def _attention_of_heads(to: Splitter, line: BoundSymbol, call: TorchLine, split: Split) -> bool:
    """The attention of all positions, of this rank's share of the heads (Jacobs et al., 2023, "DeepSpeed Ulysses")."""
    query, key, value, _, dropout, causal, options = attention_arguments(*call.args, **call.kwargs)
    part = to.at(split)
    given = [to.part(t, split) for t in (key, value, query)]
    k, v, q = (to.writer.emit(line, partial(exchange_heads, x, part))[0] for x in given)
    (heads,) = to.writer.as_call(line, call, (q, k, v, None, dropout), {"is_causal": causal, **options})
    (found,) = to.writer.emit(line, lambda: exchange_positions(heads, part))
    to.regather(to.writer.trace.bound_symbols[-1])  # attention saves its result for all positions
    to.know_part(call.results[0], split, found)
    return True


def loss_arguments(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Any, ...]:
    return input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing


def cross_entropy(to: Splitter, line: BoundSymbol, call: TorchLine) -> bool:
    """The sum of the losses of all ranks' rows, over the number of rows that count."""
    input, target, weight, average, ignored, reduce, reduction, smoothing = loss_arguments(*call.args, **call.kwargs)
    split = next((s for s in to.splits(input) if s.dim == 0 and input.ndim == 2), None)
    plain = weight is None and average is None and reduce is None and reduction in ("mean", "sum")
    if split is None or not plain or target.ndim != 1 or dtypes.is_inexact_dtype(target.dtype):
        return False
    x, t = to.part(input, split), to.part(target, split, None if to.is_even(split) else ignored)
    options = {"ignore_index": ignored, "reduction": "sum", "label_smoothing": smoothing}
    (local,) = to.writer.as_call(line, call, (x, t), options)

    def total() -> Any:
        loss = sum_sequence(local, to.everywhere)
        if reduction == "sum":
            return loss
        rows = sum_sequence(ltorch.sum(ltorch.to(ltorch.ne(t, ignored), torch.float32)), to.everywhere)
        return ltorch.to(ltorch.true_divide(loss, rows), loss.dtype)

    (found,) = to.writer.emit(line, total)
    to.know_whole(call.results[0], found)
    return True


def leading_slice(to: Splitter, line: BoundSymbol, call: TorchLine) -> bool:
    """A slice that only leaves out the last positions keeps each part as it is: logits for labels that are shifted."""
    x, index = call.args[0], call.args[1]
    split = next((s for s in to.splits(x) if s == Split.along(s.dim, s.length)), None)
    each = of_each_dim(index, x.ndim)
    if split is None or each is None or not isinstance(each[split.dim], slice):
        return False
    start, stop, step = each[split.dim].indices(split.length)
    same = 0 < stop < split.length and to.plan.chunk(stop) == to.plan.chunk(split.length)
    if start != 0 or step != 1 or not same:
        return False
    rest = tuple(slice(None) if d == split.dim else i for d, i in enumerate(each))
    dim = split.dim - sum(isinstance(i, int) for i in each[: split.dim])
    part = to.part(x, split)
    (found,) = to.writer.emit(line, lambda: ltorch.getitem(part, rest))
    to.know_part(call.results[0], Split.along(dim, stop), found)
    return True


def of_each_dim(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """An index with a slice or a number for each dim; None if it is another one."""
    each = indexing.of_each_dim(index, ndim)
    return tuple(each) if all(type(i) in (slice, int) for i in each) else None


RULES: dict[str, Rule] = {
    "nn.functional.scaled_dot_product_attention": attention,
    "nn.functional.cross_entropy": cross_entropy,
    "getitem": leading_slice,
}
