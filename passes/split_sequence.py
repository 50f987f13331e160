"""Pass: each rank computes on its part of the sequence (context parallelism). The model stays as it is.

The recorded computation is that of the whole sequence. From the arguments, which are cut, this pass follows the lines:

    h = embedding(tokens, w)            tokens are cut, and so is h: nothing is sent
    p = arange(16)                      the same on all ranks; where h needs it, its part is computed
    y = attention(q, k, v)              mixes positions: k and v are gathered
    loss = cross_entropy(h, labels)     a sum over positions: the sums of all ranks are added up

Where the model is given parts, the recorded computation begins with their gathers, of which nothing is left but what
lines need.

A value may be there as a whole, or in one or several splits. Lines of whole values are written only when a line needs
them, and for a part of a result, if the table of dims (:mod:`passes.analysis.dims`) tells how to compute it. A line
without a rule is computed on whole operands, as without this pass. See Note [Gradients] in
:mod:`passes.comm.sequence`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from passes.analysis.dims import TorchLine, attention_arguments, loss_arguments, of_each_dim
from passes.analysis.recognise import (
    is_return,
    is_unpack,
    part_at,
)
from passes.comm.sequence import (
    Part,
    cut,
    exchange_heads,
    exchange_positions,
    from_own_input,
    gather_parts,
    sum_parts,
)
from passes.kernels.attention import CausalAttention
from passes.plan import Axis, TracedParameters
from passes.plan.plan import Split
from passes.search import Search
from passes.sequence import Blocks, Context, Rules, Splitter, Value, add_input, add_return
from passes.writer import writing

import torch
from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


def split_sequence(computation: TraceCtx, *, context: Context | None, parameters: TracedParameters) -> TraceCtx:
    """Lets each rank compute on its part of the sequence.

    Takes: a computation as it was recorded, on whole sequences.
    Gives: the lines on parts, with collectives where positions mix.
    No-op when: ranks have whole sequences.

    Raises:
        RuntimeError: if random numbers would have to be the same on all ranks, if no argument has a sequence, or if a
            part of an output would have positions beyond the end of the sequence.
    """
    if context is None or context.plan.ranks == 1:
        return computation
    experts = _experts(computation, context, parameters)
    to = Splitter(computation, context.plan, Rules(RULES, Blocks().call), context.remarks, chosen=experts)
    with writing():
        gathers = given_parts(computation)
        for line in filter(is_unpack, computation.bound_symbols):
            if isinstance(line.output, TensorProxy) and line.output.name in gathers:
                _add_part(to, line, gathers[line.output.name], context)
            elif value := add_input(to, line, context, sharded=parameters.get(line.output) is not None):
                _cut_input(to, value, line, context)
        _check_arguments(to, context)
        to.follow_lines()
        for line in filter(is_return, computation.bound_symbols):
            add_return(to, line, context)
    return to.writer.finished()


class NoExpertsError(RuntimeError):
    """Ranks are to share experts, and none can be computed in parts."""


def _experts(computation: TraceCtx, context: Context, parameters: TracedParameters) -> dict[str, Split]:
    """How the parameters of grouped products are cut. Routing mixes tokens, so that every rank has all of them."""
    names = {p.name: parameter.name for p in computation.args if (parameter := parameters.get(p)) is not None}
    chunks = context.plan.pieces * context.plan.ranks
    found = Search(computation, dict.fromkeys(names), chunks, names, grouped=True).run()
    if context.experts and not found:
        raise NoExpertsError(
            f"expert_parallel: no experts can be computed in {chunks} parts. They are found by grouped products "
            "(torch.nn.functional.grouped_mm, as in transformers 5), whose middle dimension must divide; experts in a "
            "loop stay whole: leave expert_parallel out"
        )
    return found


def given_parts(computation: TraceCtx) -> dict[str, BoundSymbol]:
    """The arguments of a recorded computation that are parts: by the name of each, the line that gathers it."""
    gathers = (b for b in computation.bound_symbols if b.sym.id == gather_parts.id)
    return {b.args[0].name: b for b in gathers if part_at(b).plan.axis is Axis.CONTEXT}


def _add_part(to: Splitter, line: BoundSymbol, gather: BoundSymbol, context: Context) -> None:
    """Adds an argument that is this rank's part of what a line gathers."""
    to.writer.trace.bound_symbols.append(line)
    p: TensorProxy = line.output
    to.writer.taken.add(p.name)
    part: Part = gather.args[1]
    own = p
    if context.experts and p.requires_grad:
        context.differentiated.add(p.name)
        (own,) = to.writer.emit(line, lambda: from_own_input(p, part))
    to.values[gather.output.name] = Value(gather.output, gather, parts={part.split: own}, is_split=True)


def _cut_input(to: Splitter, value: Value, line: BoundSymbol, context: Context) -> None:
    """Cuts an input if it is an argument with a sequence."""
    p, dim, whole = value.proxy, context.dim, value.whole
    if not _is_argument(p, context) or p.ndim <= dim or p.shape[dim] < context.plan.pieces * context.plan.ranks:
        return
    split = Split.along(dim, p.shape[dim])
    (value.parts[split],) = to.writer.emit(line, lambda: cut(whole, to.at(split)))
    value.is_split = True


def _is_argument(p: TensorProxy, context: Context) -> bool:
    return not any(p.history is h for h in context.kept)


def _check_arguments(to: Splitter, context: Context) -> None:
    """Raises RuntimeError if no argument has the dimension of the sequence. Notes that all sequences are too short."""
    arguments = [v for v in to.values.values() if v.proxy.ndim and _is_argument(v.proxy, context)]
    dim, ranks = context.dim, context.plan.ranks
    if not arguments or any(v.is_split for v in arguments):
        return
    shapes = ", ".join(str(tuple(v.proxy.shape)) for v in arguments)
    if all(v.proxy.ndim <= dim for v in arguments):
        raise RuntimeError(
            f"no tensor argument has a dimension {dim} that could be split over the {ranks} ranks of a sequence; their "
            f"shapes are {shapes}: pass the dimension of the sequence as "
            "context_parallel=ContextParallel(mesh_dim, sequence_dim=...)"
        )
    context.remarks[f"arguments of shapes {shapes} are too short to be split over {ranks} ranks"] = None


# ---- lines that mix positions ----


Rule = Callable[[Splitter, BoundSymbol, TorchLine], bool]


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
        loss = sum_parts(local, to.everywhere)
        if reduction == "sum":
            return loss
        rows = sum_parts(ltorch.sum(ltorch.to(ltorch.ne(t, ignored), torch.float32)), to.everywhere)
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


RULES: dict[str, Rule] = {
    "nn.functional.scaled_dot_product_attention": attention,
    "nn.functional.cross_entropy": cross_entropy,
    "getitem": leading_slice,
}
