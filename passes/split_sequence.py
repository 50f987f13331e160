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

``overlap_sequence``: collectives of sequences are issued as early as their operands exist, and waited for as late as
they are used.

    ft3 = all_gather_sequence(k, dim2_of_16)        right after k
    ...                                             compute that needs no keys
    keys = wait_all_gather_sequence(ft3, ...)       right before the attention

Compute lines keep their order, and so do collectives: it is a function of the trace, which is equal on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from passes.analysis.recognise import (
    is_backward,
    is_deletion,
    is_return,
    is_sequence_issue,
    is_sequence_wait,
    is_unpack,
    names,
)
from passes.comm.sequence import Part, cut, from_input, gather_output, gather_sequence, to_output
from passes.plan import TracedParameters
from passes.plan.plan import ContextPlan, Split
from passes.sequence import RULES, Blocks, Rules, Splitter, Value, writing

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import del_last_used


@dataclass
class Context:
    """The ranks that hold the parts of a sequence, and the dimension of the arguments that is the sequence.

    ``kept`` are the histories of inputs that are no arguments: parameters and buffers. ``returns_parts``: whether the
    model returns this rank's parts. The pass adds to ``differentiated`` the names of arguments with a gradient, and to
    ``remarks`` what is computed on whole sequences.
    """

    plan: ContextPlan
    dim: int = 1
    kept: list[Any] = field(default_factory=list)
    differentiated: set[str] = field(default_factory=set)
    returns_parts: bool = False
    remarks: dict[str, None] = field(default_factory=dict)


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
    to = Splitter(computation, context.plan, Rules(RULES, Blocks().call), context.remarks)
    with writing():
        gathers = given_parts(computation)
        for line in filter(is_unpack, computation.bound_symbols):
            if isinstance(line.output, TensorProxy) and line.output.name in gathers:
                _add_part(to, line, gathers[line.output.name])
            else:
                _add_input(to, line, context, sharded=parameters.get(line.output) is not None)
        _check_arguments(to, context)
        to.follow_lines()
        for line in filter(is_return, computation.bound_symbols):
            _add_return(to, line, context)
    return to.writer.finished()


def given_parts(computation: TraceCtx) -> dict[str, BoundSymbol]:
    """The arguments of a recorded computation that are parts: by the name of each, the line that gathers it."""
    return {b.args[0].name: b for b in computation.bound_symbols if b.sym.id == gather_sequence.id}


def _add_part(to: Splitter, line: BoundSymbol, gather: BoundSymbol) -> None:
    """Adds an argument that is this rank's part of what a line gathers."""
    to.writer.trace.bound_symbols.append(line)
    to.writer.taken.add(line.output.name)
    part: Part = gather.args[1]
    to.values[gather.output.name] = Value(gather.output, gather, parts={part.split: line.output}, is_split=True)


def _add_input(to: Splitter, line: BoundSymbol, context: Context, *, sharded: bool) -> None:
    """Adds an input, and cuts it if it is an argument with a sequence. ``sharded``: it is a parameter whose gradient is
    reduced, which adds up what ranks contribute."""
    to.writer.trace.bound_symbols.append(line)
    p = line.output
    if not isinstance(p, TensorProxy):
        return
    value = to.values[p.name] = Value(p, whole=p)
    to.writer.taken.add(p.name)
    if p.requires_grad and not sharded and p.numel:
        context.differentiated.add(p.name)
        (value.whole,) = to.writer.emit(line, lambda: from_input(p, to.everywhere))
    dim, whole = context.dim, value.whole
    if not _is_argument(p, context) or p.ndim <= dim or p.shape[dim] < 2 * context.plan.ranks:
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


def _add_return(to: Splitter, line: BoundSymbol, context: Context) -> None:
    results = line.args[0]

    def returned(x: Any) -> Any:
        return _output(to, to.values[x.name], line, context) if _is_known(to, x) else x

    args = ({**results, "output": tree_map(returned, results["output"])},)
    to.writer.trace.bound_symbols.append(line.from_bsym(args=args))


def _is_known(to: Splitter, x: Any) -> bool:
    return isinstance(x, TensorProxy) and x.name in to.values


def _output(to: Splitter, value: Value, line: BoundSymbol, context: Context) -> TensorProxy:
    """What the model returns for a value: the whole, or this rank's part."""
    if value.line is None:  # an input
        return value.proxy
    if value.is_split and (value.whole is None or context.returns_parts):
        split = to.splits(value.proxy)[0]
        x = to.part(value.proxy, split)
        if context.returns_parts:
            if not to.is_even(split):
                raise RuntimeError(
                    f'returns="part" needs sequences that divide into {2 * to.plan.ranks} chunks, and this one has '
                    f'{split.length} positions: pad the batch, or choose returns="whole"'
                )
            return x
        return to.writer.emit(line, lambda: gather_output(x, to.at(split)))[0]
    whole = to.whole(value.proxy)
    if not dtypes.is_inexact_dtype(whole.dtype):
        return whole
    return to.writer.emit(line, lambda: to_output(whole, to.everywhere))[0]


def overlap_sequence(trace: TraceCtx) -> TraceCtx:
    """Lets collectives of sequences run beside compute.

    Takes: a lowered forward or backward, or that of a block.
    Gives: each collective of a sequence issued right after the line that makes its operand, and waited for right before
    the first line that reads its result.
    No-op when: the trace has none.
    """
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    if not any(map(is_sequence_issue, lines)):
        return trace
    issues: dict[str, list[BoundSymbol]] = {}  # by operand
    for b in filter(is_sequence_issue, lines):
        issues.setdefault(b.args[0].name, []).append(b)
    waits = {b.output.name: b for b in lines if is_sequence_wait(b)}  # by result
    new = from_trace(trace)
    new.bound_symbols = _placed(lines, issues, waits)
    return del_last_used(new, clear_mutable_collections=is_backward(trace))


def _placed(
    lines: list[BoundSymbol], issues: dict[str, list[BoundSymbol]], waits: dict[str, BoundSymbol]
) -> list[BoundSymbol]:
    placed: list[BoundSymbol] = []
    ready: list[BoundSymbol] = []  # whose operands exist, before the first line of compute

    def add(bsym: BoundSymbol) -> None:
        placed.append(bsym)
        for o in bsym.flat_proxy_outs:
            for issue in issues.pop(o.name, ()):
                if is_unpack(bsym):
                    ready.append(issue)
                else:
                    add(issue)

    for bsym in lines:
        if is_sequence_issue(bsym) or is_sequence_wait(bsym):
            continue
        if not is_unpack(bsym):
            while ready:
                add(ready.pop(0))
        read = names(bsym.args) if is_return(bsym) else names(bsym.flat_proxy_args)
        for name in [name for name in waits if name in read]:
            add(waits.pop(name))
        add(bsym)
    return placed
