"""Recognisers tell what a line of a trace is. They change nothing.

Which module's forward asked for a line is told by a tag, which autodiff and lowering hand on.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

from passes.analysis.symbols import TABLE, differentiated, identity, is_foreign, properties
from passes.comm.properties import Property
from passes.comm.sequence import SEQUENCE_WAITS, Part, issue_to_heads, issue_to_positions
from passes.comm.symbols import GATHERS, OFFLOADS, REDUCTIONS, keep_shards, synchronize, wait_copies
from passes.compat.lines import differentiating_executor, fake_argument, has_grad_rule
from passes.kernels.aten import draws, operator_of
from passes.kernels.registration import executor as kernels
from passes.kernels.torch_call import Line
from passes.plan import Bucket

import torch
from thunder.core import prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_iter, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag
from thunder.core.transforms import augmented_forward_impls, is_constant_for_vjp
from thunder.executors import sdpaex
from thunder.executors.pythonex import clear_mutable_collection
from thunder.torch import scaled_dot_product_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class InModule(NamedTuple):
    """A tag of a line: the qualified name of the module whose forward asked for it; empty for the traced model itself.
    In a block's function it is that of the block's first call."""

    name: str


def module_of(bsym: BoundSymbol) -> str | None:
    """The module whose forward asked for a line; None if the line has no tag."""
    return next((tag.name for tag in bsym.tags if isinstance(tag, InModule)), None)


ISSUES = frozenset((*GATHERS, *REDUCTIONS))
WAITS = frozenset((*GATHERS.values(), *REDUCTIONS.values()))


def is_issue(bsym: BoundSymbol) -> bool:
    return bsym.sym.id in ISSUES


def is_wait(bsym: BoundSymbol) -> bool:
    return bsym.sym.id in WAITS


def is_collective(bsym: BoundSymbol) -> bool:
    return is_issue(bsym) or is_wait(bsym)


def is_sequence_issue(bsym: BoundSymbol) -> bool:
    """True for a line that issues a collective of a sequence."""
    return bsym.sym.id in SEQUENCE_WAITS


def is_sequence_wait(bsym: BoundSymbol) -> bool:
    return bsym.sym.id in SEQUENCE_WAITS.values()


def is_exchange(bsym: BoundSymbol) -> bool:
    """True for a line that issues an exchange of heads and positions."""
    return bsym.sym.id in (issue_to_heads.id, issue_to_positions.id)


def part_at(bsym: BoundSymbol) -> Part:
    """The part of a sequence in a line of its collectives."""
    part: Part = bsym.args[1]
    return part


def is_gather(bsym: BoundSymbol) -> bool:
    """True for both halves of a gather."""
    return bsym.sym.id in GATHERS or bsym.sym.id in GATHERS.values()


def is_offload(bsym: BoundSymbol) -> bool:
    """True for both halves of a copy of gradients to the host."""
    return bsym.sym.id in OFFLOADS or bsym.sym.id in OFFLOADS.values()


def ends_copies(bsym: BoundSymbol) -> bool:
    """True for a line at which the program waits for copies from host memory."""
    return bsym.sym.id == wait_copies.id


def issues_future(bsym: BoundSymbol) -> bool:
    """True for a line that issues a collective or a copy to the host: its output is a future."""
    return is_issue(bsym) or bsym.sym.id in OFFLOADS


def waits_for_future(bsym: BoundSymbol) -> bool:
    """True for a line that waits for a future."""
    return is_wait(bsym) or bsym.sym.id in OFFLOADS.values()


def is_return(bsym: BoundSymbol) -> bool:
    return bsym.sym.id == prims.PrimIDs.RETURN


def is_unpack(bsym: BoundSymbol) -> bool:
    """True for a line that only names the function's arguments."""
    return bsym.sym.id in (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE)


def is_deletion(bsym: BoundSymbol) -> bool:
    """True for ``del`` and for the clearing of the list that held the saved tensors. Both are made anew whenever lines
    have moved."""
    return bsym.sym.id == prims.PrimIDs.DEL or bsym.sym.id == clear_mutable_collection.id


def is_backward(trace: TraceCtx) -> bool:
    return TraceTag.BACKWARD in trace.tags


def is_repeatable(bsym: BoundSymbol) -> bool:
    """True if computing it again gives the same values and changes nothing."""
    return not changes_values(bsym) and not is_random(bsym)


def changes_values(bsym: BoundSymbol) -> bool:
    """True if a line updates one of its arguments in place, or tensors that outlive the step."""
    changes = Property.IN_PLACE | Property.STATEFUL
    return bool(properties(bsym.sym) & changes) or any(map(changes_values, bsym.subsymbols))


# Parts of the names of operators that draw. A user's operator is seldom tagged, so that only its name tells.
RANDOM_NAMES = (
    "bernoulli", "dropout", "fractional_max_pool", "gumbel", "multi_head_attention", "multinomial", "normal_", "philox",
    "rand", "rrelu", "scaled_dot_product", "sdpa", "uniform",
)  # fmt: skip


# Attention draws only for its dropout: the place of that argument.
DROPOUT_AT = {scaled_dot_product_attention.id: 4, sdpaex.sdpea_gradfwd.id: 4, sdpaex.sdpfa_gradfwd.id: 3}


def is_random(bsym: BoundSymbol) -> bool:
    """True if a line may draw random numbers."""
    sym = bsym.sym
    if (operator_called := operator_of(sym)) is not None:
        return draws(operator_called, bsym.args, bsym.kwargs)
    if isinstance(sym.id, Line):  # backward inherits the tags of its forward line, and draws nothing
        return Property.RANDOM in properties(sym)
    if (place := DROPOUT_AT.get(identity(sym))) is not None and _dropout_of_attention(bsym, place) == 0:
        return False
    if prims.OpTags.AUTO_REGISTERED in (sym.tags or ()) and not is_foreign(sym):
        return Property.RANDOM in properties(sym) and _draws_when_called(bsym)
    known = properties(sym) | TABLE.get(differentiated(sym), Property.NONE)
    named = is_foreign(sym) and any(random in sym.name for random in RANDOM_NAMES)
    tagged = prims.OpTags.RANDOM_OP in bsym.tags
    return Property.RANDOM in known or named or tagged or any(map(is_random, bsym.subsymbols))


class _WatchDraws(TorchDispatchMode):
    """Notes whether an operator that draws random numbers runs: PyTorch tags its operators."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn = self.drawn or draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _draws_when_called(bsym: BoundSymbol) -> bool:
    """True if PyTorch's function draws when it is called as in this line: a dropout does not in evaluation mode."""
    function = operator.attrgetter(bsym.sym.id.removeprefix("torch."))(torch)
    with FakeTensorMode(), _WatchDraws() as watch:
        args, kwargs = tree_map(fake_argument, (bsym.args, bsym.kwargs))
        function(*args, **kwargs)
    return watch.drawn


def _dropout_of_attention(bsym: BoundSymbol, place: int) -> Any:
    positional = bsym.args[place] if len(bsym.args) > place else 0.0
    return bsym.kwargs.get("dropout_p", positional)


def is_decomposed_by_autodiff(bsym: BoundSymbol) -> bool:
    """True if Thunder has no grad rule for the symbol as a whole, so that it differentiates its parts."""
    return not (
        is_constant_for_vjp(bsym)
        or bsym.sym.is_prim
        or has_grad_rule(bsym)
        or bsym.sym.id in augmented_forward_impls
        or bsym.sym.id == "torch.utils.checkpoint.checkpoint"
    )


def may_be_taken_apart(bsym: BoundSymbol) -> bool:
    """True if a pass may put a line's parts in its place before autodiff. Autodiff itself would, or it would use one of
    our kernels for the whole, although only some of its parts are repeatable."""
    if is_decomposed_by_autodiff(bsym):
        return True
    return bool(bsym.subsymbols) and not is_repeatable(bsym) and differentiating_executor(bsym) == kernels


def is_constant(bsym: BoundSymbol) -> bool:
    """True for a line that makes a tensor out of numbers, the same one each time."""
    return Property.CONSTANT in properties(bsym.sym) and not any(
        isinstance(a, TensorProxy) for a in bsym.flat_proxy_args
    )


def constant_inputs(trace: TraceCtx) -> set[str]:
    """Inputs that are the same in forward and backward: buffers, and parameters that are not sharded.

    Inputs that a line updates in place, as batch normalization does, are not among them.
    """
    shards = {
        a.name for b in trace.bound_symbols if b.sym.id == synchronize.id or b.sym.id in GATHERS for a in b.args[0]
    }
    held = {p.name for p in trace.args if isinstance(p, TensorProxy) and ProxyTag.STATIC_MEMORY_LOCATION in p.tags}
    return held - shards - updated_in_place(trace)


def updated_in_place(trace: TraceCtx) -> set[str]:
    """The names of values that a line of the trace changes."""
    return {name for b in trace.bound_symbols for name in updated_by(b)}


def updated_by(bsym: BoundSymbol) -> Iterator[str]:
    """The names of values that a line changes."""
    symbol = identity(bsym.sym)
    if symbol == prims.PrimIDs.UPDATE_ALIASES:
        yield from (a.name for a in bsym.flat_proxy_args)
    elif symbol == prims.PrimIDs.COPY_:
        yield bsym.args[1].name
    for part in bsym.subsymbols:
        yield from updated_by(part)


def bucket_of(bsym: BoundSymbol) -> Bucket:
    """The bucket of a line that issues or waits for a collective."""
    bucket: Bucket = bsym.args[1]
    return bucket


def names(values: Any) -> set[str]:
    """The names of all proxies in a nested structure."""
    if isinstance(values, tuple) and all(isinstance(p, Proxy) for p in values):  # of a line: ten times as fast
        return {p.name for p in values}
    return {p.name for p in tree_iter(values) if isinstance(p, Proxy)}


def nbytes(values: Iterable[Any]) -> int:
    """The bytes of the tensors among some proxies."""
    return sum(p.numel * p.dtype.bytes for p in values if isinstance(p, TensorProxy))


def unsharded_values(trace: TraceCtx) -> dict[str, frozenset[Bucket]]:
    """For each value that holds unsharded parameters, the buckets that it comes from.

    These are the outputs of gathers, and all that is computed deterministically from these and constants (numbers,
    buffers) only: views, casts, slices, transposes, products with a mask. The memory of a parameter lives as long as
    any of these.
    """
    found: dict[str, frozenset[Bucket]] = dict.fromkeys(constant_inputs(trace), frozenset())
    for bsym in trace.bound_symbols:
        _mark_unsharded(bsym, found)
    return {name: buckets for name, buckets in found.items() if buckets}


def applies_parameters(bsym: BoundSymbol, parameters: Container[str]) -> bool:
    """True for a line that applies parameters to a constant, such as zeros in the place of an image: its result is an
    activation. The constant comes first, and the result has the shape of none of the parameters. (That of a weight
    and its mask has.)"""
    tensors = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
    shapes = [tuple(a.shape) for a in tensors if a.name in parameters]
    results = [tuple(o.shape) for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)]
    return bool(shapes) and tensors[0].name not in parameters and not any(shape in shapes for shape in results)


def parameter_aliases(trace: TraceCtx) -> set[str]:
    """The names of gathered parameters and of their views, slices, transposes and casts."""
    found: set[str] = set()

    def mark(bsym: BoundSymbol) -> None:
        if bsym.sym.is_fusion:
            for part in bsym.subsymbols:
                mark(part)
        sources = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        is_alias = properties(bsym.sym).is_alias and sources and all(name in found for name in sources)
        if is_alias or bsym.sym.id in GATHERS.values():
            found.update(o.name for o in bsym.flat_proxy_outs)

    for bsym in trace.bound_symbols:
        mark(bsym)
    return found


def _mark_unsharded(bsym: BoundSymbol, found: dict[str, frozenset[Bucket]]) -> None:
    """Adds the outputs of a line to ``found``. Constants have no bucket."""
    if bsym.sym.id in GATHERS.values():
        buckets = frozenset([bucket_of(bsym)])
    elif is_collective(bsym) or is_return(bsym) or is_deletion(bsym) or bsym.sym.id == keep_shards.id:
        return
    elif bsym.sym.is_fusion:  # only its parts tell which of its outputs come only from parameters
        for part in bsym.subsymbols:
            _mark_unsharded(part, found)
        return
    else:
        sources = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        if not (sources and all(name in found for name in sources) and is_repeatable(bsym)) and not is_constant(bsym):
            return
        if applies_parameters(bsym, {name for name in sources if found[name]}):
            return
        buckets = frozenset[Bucket]().union(*(found[name] for name in sources))
    for o in bsym.flat_proxy_outs:
        found.setdefault(o.name, buckets)
