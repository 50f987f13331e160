"""Passes that split a computation over ranks that share parameters or a sequence. The model stays as it is.

``split_parameters``: each rank computes with its part of the parameters (tensor parallelism).

    t1 = linear(x, w1, b1)      w1 and b1 are cut along rows, and so is t1: nothing is sent
    t2 = gelu(t1)               computed on parts, as the table of dims says
    t3 = linear(t2, w2)         w2 is cut along columns: each rank has a part of a sum, which ranks add up
    t4 = t3 + b2                after the sum, once

Each rank gets the sum of its rows only, of the batch or of the sequence, if they divide. What follows is computed on
rows, which are gathered where a line needs all of them, such as the next product (Korthikanti et al., 2022). The pass
writes all lines with rows, and all with whole sums, and keeps what sends less.

Which parameters are cut is found from products such as the last one: from ``t2``, cut along its last dim, the lines are
followed backward to the parameters of the products that make this factor. The region between them is cut if no other
line reads its values (:class:`Search`). Heads of attention are found in this way, through transposes and reshapes: each
rank has some of them. A value that other lines read as well, or that comes from a line without a rule, is computed
whole and cut there. If no product upstream computes only a part of its columns, nothing is cut.

The head of a language model is found from its loss, of which ranks compute three numbers for each row of their classes
(:mod:`passes.kernels.parts`). Tables of embeddings are cut by rows where that sends no more.

Ranks draw different random numbers. For a value that all of them hold, each draws a part, and the parts are gathered.

A dim of ``outer * ranks * inner`` elements is split along the middle: rows of queries, keys and values in one matrix
are ``Split(0, 3, ranks, inner)``. The gradient of a value that all ranks hold is the sum of theirs, and so is that of a
parameter: see Note [Gradients] in :mod:`passes.comm.sequence`.

``split_sequence``: each rank computes on its part of the sequence (context parallelism).

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

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from passes.analysis.calls import block_of
from passes.analysis.dims import (
    Placed,
    TorchLine,
    attention_arguments,
    follow,
    in_sections,
    is_plain_embedding,
    lead,
    loss_arguments,
    of_each_dim,
    product_of,
    slice_along,
    torch_line,
    without_bias,
)
from passes.analysis.recognise import is_return, is_unpack, part_at, readers_of
from passes.analysis.recognise import names as names_of
from passes.comm.sequence import (
    Part,
    cut,
    exchange_heads,
    exchange_positions,
    from_own_input,
    gather_output,
    gather_parts,
    scatter_parts,
    sum_parts,
)
from passes.kernels.parts import NUMBERS, CausalAttention, LossOfParts, PartOfEmbedding, PartOfLoss
from passes.kernels.torch_call import call_of
from passes.plan import Axis, TracedParameters
from passes.plan.dims import VIEWS
from passes.plan.dims.products import GROUPED
from passes.plan.plan import Split
from passes.sequence import Blocks, Context, Rules, Splitter, Value, add_input, add_return
from passes.writer import writing

import torch
from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

How = Literal["colwise", "rowwise", "whole"]
EMBEDDING, LOSS = "nn.functional.embedding", "nn.functional.cross_entropy"
LINEAR = "nn.functional.linear"


@dataclass
class Tensors(Context):
    """The ranks that compute with parts of parameters. ``hows`` says of some parameters, by name, how they are cut; the
    pass chooses for the others."""

    hows: Mapping[str, How] = field(default_factory=dict)


def split_parameters(
    computation: TraceCtx, *, tensors: Tensors | None, context: Context | None, parameters: TracedParameters
) -> TraceCtx:
    """Lets each rank compute with its part of the parameters.

    Takes: a computation as it was recorded, with whole parameters.
    Gives: the lines on parts, with the sums over ranks that their results need.
    No-op when: no ranks share the parameters of a product.

    Raises:
        RuntimeError: if random numbers would have to be the same on all ranks and cannot be drawn in parts, or if a
            parameter is to be cut that is not the matrix of a product, or does not divide by the ranks.
    """
    if tensors is None or tensors.plan.ranks == 1:
        return computation
    names = {p.name: parameter.name for p in computation.args if (parameter := parameters.get(p)) is not None}
    hows = {proxy: tensors.hows.get(name) for proxy, name in names.items()}
    search = Search(computation, hows, tensors.plan.ranks, names)
    chosen = search.run()
    tables = search.find_tables(context.plan.ranks if context is not None else 1)
    tensors.remarks |= dict.fromkeys(_remarks(search))
    found: list[TraceCtx] = []
    for rows in (True, False) if chosen else (False,):
        rules = Rules(
            {**RULES_OF_PARAMETERS, EMBEDDING: partial(_embedding, tables=tables)}, Blocks().call, eager=True, rows=rows
        )
        to = Splitter(computation, tensors.plan, rules, tensors.remarks, chosen=chosen)
        with writing():
            for line in filter(is_unpack, computation.bound_symbols):
                add_input(to, line, tensors, sharded=parameters.get(line.output) is not None)
            to.follow_lines()
            for line in filter(is_return, computation.bound_symbols):
                add_return(to, line, tensors)
        found.append(to.writer.finished())
    return min(found, key=lambda trace: bytes_sent(trace.bound_symbols))


def bytes_sent(lines: Iterable[BoundSymbol]) -> int:
    """The bytes of values that lines send, also those of blocks. A sum sends twice as many as a gather or a scatter."""
    sent = 0
    for line in lines:
        if (block := block_of(line)) is not None:
            sent += bytes_sent(block.trace.bound_symbols)
        elif line.sym.id in SENT:
            whole = line.args[0] if line.sym.id == scatter_parts.id else line.output
            sent += SENT[line.sym.id] * whole.numel * whole.dtype.bytes
    return sent


SENT = {sum_parts.id: 2, scatter_parts.id: 1, gather_parts.id: 1, gather_output.id: 1}


def _remarks(search: Search) -> Iterator[str]:
    """Remarks on values that ranks compute whole, and would share if they had another shape or place."""
    if not search.found:
        yield f"no parameter is split over the {search.ranks} ranks of tensor_parallel"
    whole = (search.names[p] for p in search.matrices if p not in search.found)
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in whole)
    if search.found and kinds:
        yield f"each rank computes the whole products with {', '.join(kinds)}"


# ---- parts of parameters: products with a bias ----


def _biased(to: Splitter, line: BoundSymbol, call: TorchLine) -> bool:
    """A product of which each rank has a part of the sum. The bias is added to the sum of all ranks."""
    product = product_of(call)
    if product is None or product.bias is None:
        return False
    last, dim = product.x.ndim - 1, product.inner
    of_x = [s for s in to.splits(product.x) if s.dim == last]
    of_weight = [s._replace(dim=last) for s in to.splits(product.weight) if s.dim == dim]
    split = next(iter([*of_x, *of_weight]), None)
    if split is None:
        return False
    x, weight = to.part(product.x, split), to.part(product.weight, split._replace(dim=dim))
    bias = to.whole(product.bias)
    plain, made = without_bias(call, product), call_of(line.sym)
    if call.name == "addmm" and made is not None:
        (found,) = to.writer.torch(line, torch.matmul, (x, weight), {}, to.writer.grads(line, plain), like=made)
    elif call.name == "addmm":
        (found,) = to.writer.emit(line, lambda: ltorch.matmul(x, weight))
    else:
        (found,) = to.writer.as_call(line, plain, (x, weight, None), {})
    to.add_up(line, call.results[0], found, bias)
    return True


# ---- parts of parameters: a vocabulary ----


def _embedding(to: Splitter, line: BoundSymbol, call: TorchLine, *, tables: Collection[str]) -> bool:
    """Each rank has the rows of its tokens, and zeros for others, which ranks add up. ``tables``: those of which this
    sends less. Others, cut for a product with the same weight, are gathered as a whole."""
    table = table_of(call)
    split = next((s for s in to.splits(table) if s.dim == 0), None) if table is not None else None
    if table is None or split is None:
        return False
    if table.name not in tables:
        to.as_whole(line)
        return True
    args = (to.whole(call.args[0]), to.part(table, split), *call.args[2:])
    grads, made = to.writer.grads(line, call), call_of(line.sym)
    (found,) = to.writer.torch(line, PartOfEmbedding(to.plan), args, call.kwargs, grads, like=made)
    to.add_up(line, call.results[0], found)
    return True


def _loss_of_classes(to: Splitter, line: BoundSymbol, call: TorchLine) -> bool:
    """Ranks compute three numbers of each row of their classes, and the loss from the numbers of all ranks."""
    if not takes_classes(call) or not (splits := [s for s in to.splits(call.args[0]) if s.dim == 1]):
        return False
    logits, labels = call.args[:2]
    grads, made = to.writer.grads(line, call), call_of(line.sym)
    x, t, numbers = to.part(logits, splits[0]), to.whole(labels), Split(1, 1, to.plan.ranks, NUMBERS)
    ignored = loss_arguments(*call.args, **call.kwargs)[4]
    (part,) = to.writer.torch(line, PartOfLoss(to.plan, ignored), (x, t), {}, grads, like=made)
    (found,) = to.writer.emit(line, lambda: gather_parts(part, to.at(numbers)))
    function, args = LossOfParts(dtypes.to_torch_dtype(call.results[0].dtype)), (found, t, *call.args[2:])
    (result,) = to.writer.torch(line, function, args, call.kwargs, grads, like=made)
    to.know_whole(call.results[0], result)
    return True


RULES_OF_PARAMETERS = {
    LINEAR: _biased,
    "addmm": _biased,
    LOSS: _loss_of_classes,
}


# ---- parts of a sequence ----


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
    to = Splitter(computation, context.plan, Rules(RULES_OF_SEQUENCES, Blocks().call), context.remarks, chosen=experts)
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


# ---- parts of a sequence: lines that mix positions ----


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


def loss_of_rows(to: Splitter, line: BoundSymbol, call: TorchLine) -> bool:
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


RULES_OF_SEQUENCES: dict[str, Rule] = {
    "nn.functional.scaled_dot_product_attention": attention,
    "nn.functional.cross_entropy": loss_of_rows,
    "getitem": leading_slice,
}


# ---- which parameters are computed in parts ----


def table_of(call: TorchLine | None) -> TensorProxy | None:
    """The table from which a line takes rows, if it is a plain embedding."""
    if call is None or call.name != EMBEDDING or len(call.operands) != 2 or len(call.args) < 2:
        return None
    table: TensorProxy = call.args[1]
    return table if table.ndim == 2 and is_plain_embedding(*call.args, **call.kwargs) else None


def takes_classes(call: TorchLine) -> bool:
    """Whether a line is a loss of logits (rows, classes) and labels (rows,) that ranks can compute of their classes."""
    if call.name != LOSS or len(call.operands) != 2 or len(call.args) < 2:
        return False
    logits, labels, *others, smoothing = loss_arguments(*call.args, **call.kwargs)
    plain = others[0] is others[1] is others[3] is None and smoothing == 0
    return plain and logits.ndim == 2 and labels.ndim == 1 and dtypes.is_exact_dtype(labels.dtype)


class _Region(NamedTuple):
    """The values upstream of a product that are computed in parts, the lines that compute them, and the parameters that
    they need. ``columns``: how many products compute a part of their columns."""

    values: dict[str, Split]
    lines: set[int]
    parameters: dict[str, Split]
    columns: int


class _Factors(NamedTuple):
    """A product without its bias: the ``parameter`` of one factor, the number of the other one, ``x``, and the dims of
    both that are summed."""

    call: TorchLine
    parameter: str
    x: int
    inner_of_x: int
    inner: int

    @property
    def weight(self) -> TensorProxy:
        return self.call.operands[1 - self.x]


class Search:
    """Finds which inputs of a trace, and of the blocks that it calls, are cut.

    Args:
        trace: as it was recorded.
        hows: for each input that is a parameter, what the user says of it; None: nothing.
        ranks: over which they are cut.
        names: the qualified names of the parameters, for messages.
        grouped: whether only products of groups of rows, such as those of experts, are looked at.
    """

    def __init__(
        self,
        trace: TraceCtx,
        hows: Mapping[str, How | None],
        ranks: int,
        names: Mapping[str, str],
        *,
        grouped: bool = False,
    ) -> None:
        vectors = {p.name for p in trace.args if isinstance(p, TensorProxy) and p.ndim < 2}  # are cut as their matrices
        self.hows = {p: None if p in vectors and how != "whole" else how for p, how in hows.items()}
        self.ranks, self.names, self.grouped = ranks, names, grouped
        self.lines = [b for b in trace.bound_symbols if not is_unpack(b)]
        self.calls = {id(b): torch_line(b) for b in self.lines if not is_return(b) and block_of(b) is None}
        self.makers = {o.name: b for b in reversed(self.lines) if id(b) in self.calls for o in b.flat_proxy_outs}
        self.factors = {key: self._factors(call) for key, call in self.calls.items()}
        self.readers = readers_of(self.lines)
        self.returned = names_of([b.args for b in self.lines if is_return(b)])
        self.found: dict[str, Split] = {}
        self.matrices: dict[str, None] = {}  # the inputs with which products are computed
        self._blocks: dict[Hashable, Search] = {}

    def run(self) -> dict[str, Split]:
        """The split of each input that is cut, by its name."""
        for line in self.lines:
            if block_of(line) is not None:
                self._inside(line)
            call = self.calls.get(id(line))
            if (factors := self.factors.get(id(line))) is not None:
                self._product(line, factors)
            elif call is not None and not self.grouped and takes_classes(call):
                self._share(line, call.args[0], self._equal(call.args[0], 1), self.returned)
        for proxy, how in self.hows.items():
            if how in ("colwise", "rowwise") and proxy in self.readers and proxy not in self.found:
                raise RuntimeError(
                    f"tensor_parallel: parameter {self.names[proxy]!r} is to be {how}, and is not the matrix of a "
                    'product such as nn.Linear: leave it out of the mapping, or choose "whole"'
                )
        return self.found

    def _inside(self, line: BoundSymbol) -> None:
        """A call of a block, which is the same for all calls with the same choices."""
        block = block_of(line)
        assert block is not None
        pairs = [(p.name, a.name) for p, a in zip(block.inputs, line.args, strict=True) if a.name in self.hows]
        hows = {inside: self.hows[outside] for inside, outside in pairs}
        key = id(block), tuple(hows.items())
        if key not in self._blocks:
            named = {inside: self.names[outside] for inside, outside in pairs}
            self._blocks[key] = Search(block.trace, hows, self.ranks, named, grouped=self.grouped)
            self._blocks[key].run()
        search = self._blocks[key]
        outside = dict(pairs)
        self.matrices |= {outside[inside]: None for inside in search.matrices}
        self.found |= {outside[inside]: split for inside, split in search.found.items()}

    def _factors(self, call: TorchLine | None) -> _Factors | None:
        """The factors of a product, if one of them comes from a parameter: the right one, or else the left one."""
        product = product_of(call)
        if call is None or product is None or (self.grouped and call.name != GROUPED):
            return None
        plain = call if product.bias is None else without_bias(call, product)
        left, right = plain.operands[:2]
        if (of := self._origin(right)) is not None:
            return _Factors(plain, of[0], 0, left.ndim - 1, product.inner)
        if plain.name == LINEAR or (of := self._origin(left)) is None:
            return None
        return _Factors(plain, of[0], 1, right.ndim - 2, left.ndim - 1)

    def _origin(self, value: TensorProxy, split: Split | None = None) -> tuple[str, Split | None] | None:
        """The parameter that a value is a view of, or has rows of, and its split if this is the value's; None: none."""
        while value.name not in self.hows:
            line = self.makers.get(value.name)
            call = self.calls[id(line)] if line is not None else None
            if call is None or call.name not in VIEWS:
                return None
            if split is not None:
                placed = lead(call, 0, split)
                split = placed.operands[0] if placed is not None else None
                if split is None:
                    return None
            value = call.operands[0]
        return value.name, split

    def _product(self, line: BoundSymbol, factors: _Factors) -> None:
        how = self.hows[factors.parameter]
        self.matrices[factors.parameter] = None
        x = factors.call.operands[factors.x]
        if how in ("colwise", "rowwise"):
            self._asked_for(factors, how)
            return
        split = self._equal(x, factors.inner_of_x) if how is None and factors.parameter not in self.found else None
        placed = follow(factors.call, factors.x, split) if split is not None else None
        if split is None or placed is None or placed.combine != "sum":
            return
        own = self._origin(factors.weight, placed.operands[1 - factors.x])
        if own is not None and own[1] is not None and self._share(line, x, split):
            self.found[own[0]] = own[1]

    def _share(self, line: BoundSymbol, x: TensorProxy, split: Split | None, outside: Set[str] = frozenset()) -> bool:
        """Cuts the parameters of products that compute parts of ``x``, which ``line`` reads. False if there are none.
        Values ``outside`` stay whole."""
        region = self._closed_region(line, x, split, outside) if split is not None else None
        if region is None or not region.columns:
            return False
        self.found |= region.parameters
        return True

    def _equal(self, x: TensorProxy, dim: int) -> Split | None:
        """Parts of a dim of equal size; None if it does not divide."""
        inner, rest = divmod(x.shape[dim], self.ranks)
        return Split(dim, 1, self.ranks, inner) if inner and not rest else None

    def find_tables(self, sequences: int) -> set[str]:
        """Cuts tables of embeddings by rows, and returns their names, where that sends less: the rows of tokens are
        added up in forward, and their gradients in backward; a whole table is gathered, and its gradient reduced.
        Tokens are split over so many ranks of ``sequences``."""
        tokens, tables = Counter[str](), dict[str, TensorProxy]()
        for call in self.calls.values():
            if call is not None and (table := table_of(call)) is not None:
                tokens[table.name] += call.args[0].numel
                tables[table.name] = table
        few = {name for name, table in tables.items() if 2 * tokens[name] < table.shape[0] * sequences}
        for name, table in tables.items():
            split, chosen = self._equal(table, 0), self.hows.get(name, "whole") is None
            others = any(table_of(self.calls.get(id(line))) is None for line in self._readers(name))
            if name in few and split is not None and chosen and not others:
                self.found.setdefault(name, split)
        return few

    def _readers(self, name: str) -> list[BoundSymbol]:
        """The lines that read a value, except for the last one: what is returned is gathered."""
        return [b for b in self.readers.get(name, ()) if not is_return(b)]

    def _asked_for(self, factors: _Factors, how: How) -> None:
        weight, inner = factors.weight, factors.inner
        dim = inner if how == "rowwise" else 2 * weight.ndim - 3 - inner
        if (size := weight.shape[dim]) % self.ranks:
            raise RuntimeError(
                f"tensor_parallel: parameter {self.names[factors.parameter]!r} is to be {how}, and its dim {dim} of "
                f'{size} does not divide by {self.ranks} ranks: choose "whole" for it, or fewer ranks'
            )
        own = self._origin(weight, Split(dim, 1, self.ranks, size // self.ranks))
        if own is not None and own[1] is not None:
            self.found[own[0]] = own[1]

    def _closed_region(self, line: BoundSymbol, x: TensorProxy, split: Split, outside: Set[str]) -> _Region | None:
        """The region upstream of a value whose values only lines of the region and ``line`` read."""
        while (region := self._region(x, split, outside)) is not None:
            own = region.lines | {id(line)}
            read = {name for name in region.values if any(id(b) not in own for b in self._readers(name))}
            if not read:
                break
            outside = outside | read
        return region

    def _region(self, x: TensorProxy, split: Split, outside: Set[str]) -> _Region | None:
        """None: a parameter would have to be cut in two ways, or is to be cut otherwise."""
        region, columns, todo = _Region({}, set(), {}, 0), 0, [(x, split)]
        while todo:
            value, s = todo.pop()
            if value.name in self.hows:
                known = region.parameters.get(value.name, self.found.get(value.name, s))
                if self.hows[value.name] is not None or known != s:
                    return None
                region.parameters[value.name] = s
                continue
            if value.name in region.values and region.values[value.name] != s:
                return None
            line = self.makers.get(value.name)
            if value.name in region.values or line is None:
                continue
            if any(o.name in outside for o in line.flat_proxy_outs):
                continue
            call = self.calls[id(line)]
            number = next((i for i, r in enumerate(call.results) if r.name == value.name), None) if call else None
            placed = None
            if call is not None and number is not None:
                placed = self._one_of_several(call, s) or lead(call, number, s)
            if call is None or placed is None or placed.combine is not None:
                continue
            region.values[value.name] = s
            region.lines.add(id(line))
            pairs: list[tuple[Any, Split | None]] = [*zip(call.results, placed.results, strict=True)]
            pairs += zip(call.operands, placed.operands, strict=True)
            todo += [(v, of) for v, of in pairs if of is not None and v.name != value.name]
            factors = self.factors[id(line)]
            columns += factors is not None and any(v is factors.weight and of is not None for v, of in pairs)
        return region._replace(columns=columns)

    def _one_of_several(self, call: TorchLine, split: Split) -> Placed | None:
        """A slice of a dim that slices of several sizes make up, such as queries in front of keys and values."""
        if call.name != "getitem":
            return None
        readers = [self.calls.get(id(b)) for b in self._readers(call.operands[0].name)]
        found = {slice_along(c, split.dim) if c is not None else None for c in readers}
        slices = sorted(ends for ends in found if ends is not None)
        if len(slices) != len(found):
            return None
        ends = [0, *(stop for _, stop in slices)]
        if [start for start, _ in slices] != ends[:-1] or ends[-1] != call.operands[0].shape[split.dim]:
            return None
        sizes = [stop - start for start, stop in slices]
        whole = in_sections(split.dim, sizes, split.length) if len(set(sizes)) > 1 else None
        placed = follow(call, 0, whole) if whole is not None else None
        return placed if placed is not None and placed.results == (split,) else None
