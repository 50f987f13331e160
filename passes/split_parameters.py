"""Pass: each rank computes with its part of the parameters (tensor parallelism). The model stays as it is.

    t1 = linear(x, w1, b1)      w1 and b1 are cut along rows, and so is t1: nothing is sent
    t2 = gelu(t1)               computed on parts, as the table of dims says
    t3 = linear(t2, w2)         w2 is cut along columns: each rank has a part of a sum, which ranks add up
    t4 = t3 + b2                after the sum, once

Each rank gets the sum of its rows only, of the batch or of the sequence, if they divide. What follows is computed on
rows, which are gathered where a line needs all of them, such as the next product (Korthikanti et al., 2022). The pass
writes all lines with rows, and all with whole sums, and keeps what sends less.

Which parameters are cut is found from products such as the last one: from ``t2``, cut along its last dim, the lines are
followed backward to the parameters. Heads of attention are found in this way, through transposes and reshapes: each
rank has some of them. A value that other lines read as well, or that comes from a line without a rule, is computed
whole and cut there. If no product upstream computes only a part of its columns, nothing is cut.

The head of a language model is found from its loss, of which ranks compute three numbers for each row of their classes
(:mod:`passes.kernels.losses`). Tables of embeddings are cut by rows where that sends no more.

Ranks draw different random numbers. For a value that all of them hold, each draws a part, and the parts are gathered.

A dim of ``outer * ranks * inner`` elements is split along the middle: rows of queries, keys and values in one matrix
are ``Split(0, 3, ranks, inner)``. The gradient of a value that all ranks hold is the sum of theirs, and so is that of a
parameter: see Note [Gradients] in :mod:`passes.comm.sequence`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from passes.analysis.calls import block_of
from passes.analysis.dims import TorchLine, loss_arguments, product_of, without_bias
from passes.analysis.recognise import is_return, is_unpack
from passes.comm.sequence import gather_output, gather_parts, scatter_parts, sum_parts
from passes.kernels.losses import NUMBERS, LossOfParts, PartOfEmbedding, PartOfLoss
from passes.kernels.torch_call import call_of
from passes.plan import TracedParameters
from passes.plan.plan import Split
from passes.search import EMBEDDING, LINEAR, LOSS, How, Search, table_of, takes_classes
from passes.sequence import Blocks, Context, Rules, Splitter, add_input, add_return
from passes.writer import writing

import torch
from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


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
        rules = Rules({**RULES, EMBEDDING: partial(_embedding, tables=tables)}, Blocks().call, eager=True, rows=rows)
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
    """What is computed whole, although it could be shared if it had another shape or place."""
    if not search.found:
        yield f"no parameter is split over the {search.ranks} ranks of tensor_parallel"
    whole = (search.names[p] for p in search.matrices if p not in search.found)
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in whole)
    if search.found and kinds:
        yield f"each rank computes the whole products with {', '.join(kinds)}"


# ---- products with a bias ----


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


# ---- parts of a vocabulary ----


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


def _cross_entropy(to: Splitter, line: BoundSymbol, call: TorchLine) -> bool:
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


RULES = {
    LINEAR: _biased,
    "addmm": _biased,
    LOSS: _cross_entropy,
}
