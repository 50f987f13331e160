"""Recognisers: what the lines of a trace are. They change nothing."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from passes.comm.symbols import GATHERS, OFFLOADS, OVERFLOWS, REDUCTIONS, synchronize
from passes.plan import Bucket

import torch
from thunder.core import prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_iter, tree_map
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, TraceTag
from thunder.core.transforms import _get_gradfn_and_executor, augmented_forward_impls, is_constant_for_vjp
from thunder.executors.pythonex import clear_mutable_collection
from thunder.torch import _get_fake_arg, scaled_dot_product_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


def is_issue(bsym: BoundSymbol) -> bool:
    return bsym.sym.id in GATHERS or bsym.sym.id in REDUCTIONS or bsym.sym.id in OVERFLOWS


def is_wait(bsym: BoundSymbol) -> bool:
    waits = (*GATHERS.values(), *REDUCTIONS.values(), *OVERFLOWS.values())
    return bsym.sym.id in waits


def is_collective(bsym: BoundSymbol) -> bool:
    return is_issue(bsym) or is_wait(bsym)


def is_gather(bsym: BoundSymbol) -> bool:
    """True for both halves of a gather."""
    return bsym.sym.id in GATHERS or bsym.sym.id in GATHERS.values()


def is_overflow(bsym: BoundSymbol) -> bool:
    """True for both halves of the collective that shares an overflow."""
    return bsym.sym.id in OVERFLOWS or bsym.sym.id in OVERFLOWS.values()


def is_offload(bsym: BoundSymbol) -> bool:
    """True for both halves of a copy of gradients to the host."""
    return bsym.sym.id in OFFLOADS or bsym.sym.id in OFFLOADS.values()


def begins(bsym: BoundSymbol) -> bool:
    """True for a line whose output is a future: it issues a collective, or a copy to the host."""
    return is_issue(bsym) or bsym.sym.id in OFFLOADS


def ends(bsym: BoundSymbol) -> bool:
    """True for a line that waits for a future."""
    return is_wait(bsym) or bsym.sym.id in OFFLOADS.values()


def is_return(bsym: BoundSymbol) -> bool:
    return bsym.sym.id == prims.PrimIDs.RETURN


def is_unpack(bsym: BoundSymbol) -> bool:
    """A line that only gives names to what the function was called with."""
    return bsym.sym.id in (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE)


def is_deletion(bsym: BoundSymbol) -> bool:
    """``del``, or the clearing of the list that held the saved tensors: made anew whenever lines have moved."""
    return bsym.sym.id == prims.PrimIDs.DEL or bsym.sym.id == clear_mutable_collection.id


def is_backward(trace: TraceCtx) -> bool:
    return TraceTag.BACKWARD in trace.tags


# Thunder tags only some of its random symbols RANDOM_OP, and none of those of its executors.
RANDOM_NAMES = (
    "rand",
    "uniform",
    "multinomial",
    "bernoulli",
    "dropout",
    "philox",
    "normal_",
    "rrelu",
    "gumbel",
    "fractional_max_pool",
    "multi_head_attention",
    "scaled_dot_product",
    "sdpa",
)
CONSTANT_NAMES = frozenset({"arange", "iota", "full", "zeros", "ones", "tensor_from_sequence"})


def is_repeatable(bsym: BoundSymbol) -> bool:
    """True if computing it again gives the same values and changes nothing."""
    return not has_tags(bsym, {prims.OpTags.IN_PLACE}) and not is_random(bsym)


def is_random(bsym: BoundSymbol) -> bool:
    """True if it may draw random numbers. Custom operators are taken not to."""
    if bsym.sym.id == scaled_dot_product_attention.id and _dropout_of_attention(bsym) == 0:
        return False
    if prims.OpTags.AUTO_REGISTERED in (bsym.sym.tags or ()):
        return _draws(bsym.sym.name) and _draws_when_called(bsym)
    return has_tags(bsym, {prims.OpTags.RANDOM_OP}) or _draws(bsym.sym.name) or any(map(is_random, bsym.subsymbols))


@functools.cache
def _draws(name: str) -> bool:
    """True if PyTorch says so of its operator of that name, or the name does."""
    overloads = getattr(torch.ops.aten, name, None)
    tags = {tag for o in overloads.overloads() for tag in getattr(overloads, o).tags} if overloads else set()
    return torch.Tag.nondeterministic_seeded in tags or any(random in name for random in RANDOM_NAMES)


class _WatchDraws(TorchDispatchMode):
    """Notes whether an operator runs that draws random numbers."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn = self.drawn or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _draws_when_called(bsym: BoundSymbol) -> bool:
    """True if PyTorch's function draws when called as in this line: a dropout does not when the model is evaluated."""
    function = operator.attrgetter(bsym.sym.id.removeprefix("torch."))(torch)
    with FakeTensorMode(), _WatchDraws() as watch:
        args, kwargs = tree_map(_get_fake_arg, (bsym.args, bsym.kwargs))
        function(*args, **kwargs)
    return watch.drawn


def _dropout_of_attention(bsym: BoundSymbol) -> Any:
    positional = bsym.args[4] if len(bsym.args) > 4 else 0.0
    return bsym.kwargs.get("dropout_p", positional)


def is_decomposed_by_autodiff(bsym: BoundSymbol) -> bool:
    """True where Thunder has no grad rule for the symbol as a whole and differentiates its parts."""
    return not (
        is_constant_for_vjp(bsym)
        or bsym.sym.is_prim
        or _get_gradfn_and_executor(bsym)[0] is not None
        or bsym.sym.id in augmented_forward_impls
        or bsym.sym.id == "torch.utils.checkpoint.checkpoint"
    )


def is_constant(bsym: BoundSymbol) -> bool:
    """True for a line that makes a tensor out of numbers."""
    return bsym.sym.name in CONSTANT_NAMES and not any(isinstance(a, TensorProxy) for a in bsym.flat_proxy_args)


def constant_inputs(trace: TraceCtx) -> set[str]:
    """Inputs that are buffers, or parameters that are not sharded: the same in forward and backward.

    Left out are those that a line updates in place, as batch normalisation does.
    """
    shards = {
        a.name for b in trace.bound_symbols if b.sym.id == synchronize.id or b.sym.id in GATHERS for a in b.args[0]
    }
    held = {p.name for p in trace.args if isinstance(p, TensorProxy) and ProxyTag.STATIC_MEMORY_LOCATION in p.tags}
    return held - shards - updated_in_place(trace)


def updated_in_place(trace: TraceCtx) -> set[str]:
    """Values that some line of the trace changes."""
    return {name for b in trace.bound_symbols for name in _updated(b)}


def _updated(bsym: BoundSymbol) -> Iterator[str]:
    if bsym.sym.name == "update_aliases":
        yield from (a.name for a in bsym.flat_proxy_args)
    elif bsym.sym.name == "copy_":
        yield bsym.flat_proxy_args[-1].name
    for part in bsym.subsymbols:
        yield from _updated(part)


def bucket_of(bsym: BoundSymbol) -> Bucket:
    """The bucket of a collective's line."""
    bucket: Bucket = bsym.args[1]
    return bucket


def names(values: Any) -> set[str]:
    """The names of all proxies in a nested structure."""
    return {p.name for p in tree_iter(values) if isinstance(p, Proxy)}


def nbytes(values: Iterable[Any]) -> int:
    """Bytes of the tensors among some proxies."""
    return sum(p.numel * p.dtype.bytes for p in values if isinstance(p, TensorProxy))


def unsharded_values(trace: TraceCtx) -> dict[str, frozenset[Bucket]]:
    """For each value that holds unsharded parameters, the buckets that it comes from.

    These are the outputs of gathers, and whatever is computed deterministically from nothing but them and constants
    (numbers, buffers): views, casts, slices, transposes, products with a mask. Memory of a parameter lives as long as
    any of them.
    """
    found: dict[str, frozenset[Bucket]] = dict.fromkeys(constant_inputs(trace), frozenset())
    for bsym in trace.bound_symbols:
        _mark_unsharded(bsym, found)
    return {name: buckets for name, buckets in found.items() if buckets}


# Symbols whose result is their first argument in another shape, layout or dtype.
SHAPES = {"reshape", "view", "squeeze", "unsqueeze", "expand", "broadcast_in_dim", "flatten"}
TRANSPOSES = {"permute", "transpose", "t"}
SLICES = {"getitem", "slice_prim", "narrow", "select", "split", "chunk", "unbind"}
CASTS = {"to", "type", "convert_element_type", "float", "bfloat16", "half", "contiguous", "shallow_copy"}
ALIASES = SHAPES | TRANSPOSES | SLICES | CASTS


def parameter_aliases(trace: TraceCtx) -> set[str]:
    """Gathered parameters, and their views, slices, transposes and casts."""
    found: set[str] = set()

    def mark(bsym: BoundSymbol) -> None:
        if bsym.sym.is_fusion:
            for part in bsym.subsymbols:
                mark(part)
        sources = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        is_alias = bsym.sym.name in ALIASES and sources and all(name in found for name in sources)
        if is_alias or bsym.sym.id in GATHERS.values():
            found.update(o.name for o in bsym.flat_proxy_outs)

    for bsym in trace.bound_symbols:
        mark(bsym)
    return found


def _mark_unsharded(bsym: BoundSymbol, found: dict[str, frozenset[Bucket]]) -> None:
    """Constants are marked with no bucket."""
    if bsym.sym.id in GATHERS.values():
        buckets = frozenset([bucket_of(bsym)])
    elif is_collective(bsym) or is_return(bsym) or is_deletion(bsym):
        return
    elif bsym.sym.is_fusion:  # only its parts tell which of its outputs come from parameters alone
        for part in bsym.subsymbols:
            _mark_unsharded(part, found)
        return
    else:
        sources = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        if not (sources and all(name in found for name in sources) and is_repeatable(bsym)) and not is_constant(bsym):
            return
        buckets = frozenset[Bucket]().union(*(found[name] for name in sources))
    for o in bsym.flat_proxy_outs:
        found.setdefault(o.name, buckets)
