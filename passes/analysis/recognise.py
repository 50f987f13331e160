"""The table of symbols, and recognisers, which tell what a line of a trace is. They change nothing.

The table says what each symbol of Thunder, torch and shardtrace does, by its id:

    Property.VIEW in properties(bsym.sym)

Thunder's own tags (``OpTags``) do not tell views from copies and miss most random symbols. A symbol without any of the
properties is not in the table. Symbols of shardtrace declare theirs where they are made.

Note [Identity]. Lowering replaces Thunder's symbols by operators of executors. An operator stands for the symbol that
it was registered to be like, or for the torch function that it calls. Its name tells nothing: a user's operator may be
called ``reshape`` and copy.

Which module's forward asked for a line is told by a tag, which autodiff and lowering hand on.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from passes.comm.sequence import PRODUCTS, VALUES, Part
from passes.comm.symbols import (
    ACTIVATIONS,
    BUCKETS,
    Away,
    CollectiveOp,
    Property,
    keep_shards,
    synchronize,
    wait_copies,
)
from passes.compat.jit import differentiating_executor, fake_argument, grad_rule_of
from passes.kernels.aten import draws, operator_of
from passes.kernels.executors import executor as kernels
from passes.kernels.torch_call import Line
from passes.plan import Bucket

import torch
from thunder.core import prims
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_iter, tree_map
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceTag
from thunder.core.transforms import augmented_forward_impls, backward_impls, is_constant_for_vjp
from thunder.executors import pythonex, sdpaex, torchex
from thunder.executors.pythonex import clear_mutable_collection
from thunder.torch import scaled_dot_product_attention
from thunder.torch.default_torch_ops import torch_auto_registered_ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# ---- the table of symbols ----


# Executors whose operators the table covers: each is like a symbol, calls a torch function, or is listed below. Calls
# of torch tell what they do by their tags.
EXECUTORS = frozenset({"aten", "python", "sdpa", "shardtrace", "torch", "torch_calls", "torch_kernels"})

# Tags that Thunder sets on some of the symbols that have the property.
TAGS: Mapping[Hashable, Property] = {OpTags.IN_PLACE: Property.IN_PLACE, OpTags.RANDOM_OP: Property.RANDOM}

# Modules whose functions Thunder takes from torch as they are.
MODULES = frozenset(module.__name__ for module in torch_auto_registered_ops)


def properties(sym: Symbol) -> Property:
    """The properties of a symbol; none if neither the table nor its tags tell any."""
    tagged = (tag if isinstance(tag, Property) else TAGS.get(tag, Property.NONE) for tag in sym.tags or ())
    return functools.reduce(operator.or_, tagged, TABLE.get(identity(sym), Property.NONE))


def identity(sym: Symbol) -> Hashable:
    """The id of the symbol of Thunder or torch that ``sym`` stands for, as Note [Identity] says, or its own."""
    sym = _original(sym)
    if sym.executor is torchex.ex and sym.module is not None and sym.module.__name__ in MODULES:
        return f"{sym.module.__name__}.{sym.name}"  # as Thunder builds the ids of functions that it takes from torch
    return sym.id


@functools.cache
def differentiated_as(sym: Symbol) -> Hashable:
    """The id of the torch function that an operator calls again to compute its gradients; None for other symbols."""
    named = ((id, gradient) for id, gradient in backward_impls.items() if getattr(gradient, "name", "") == sym.name)
    return next((id for id, gradient in named if gradient == sym), None)


def is_foreign(sym: Symbol) -> bool:
    """True for a user's function or operator, or one of an executor that the table does not cover.

    Nothing is known about these except for their tags and names.
    """
    sym = _original(sym)
    if sym.executor is not None:
        return sym.executor.name not in EXECUTORS
    if not isinstance(sym.id, str) or "." not in sym.id:
        return False
    return not sym.id.startswith(("torch.", "Tensor.")) or _is_custom(sym.id)


def _is_custom(id: str) -> bool:
    return id.startswith("torch.ops.") and not id.startswith("torch.ops.aten.")


def _original(sym: Symbol) -> Symbol:
    """The symbol that an operator is like, or ``sym``."""
    while isinstance(sym.meta, Symbol):
        sym = sym.meta
    return sym


def _torch(names: str, *, prefix: str = "torch.") -> tuple[str, ...]:
    return tuple(prefix + name for name in names.split())


def _method(names: str) -> tuple[str, ...]:
    """Methods that Thunder takes from ``torch.Tensor`` as they are."""
    return _torch(names, prefix="Tensor.")


def _functional(names: str) -> tuple[str, ...]:
    return _torch(names, prefix="torch.nn.functional.")


IDS: Mapping[Property, Iterable[Hashable]] = {
    Property.FREE: (
        PrimIDs.COMMENT, PrimIDs.DEL, PrimIDs.RETURN, PrimIDs.SHAPE, PrimIDs.SINK, PrimIDs.UNPACK_SEQUENCE,
        PrimIDs.UNPACK_TRIVIAL, pythonex.clear_mutable_collection.id, torchex.shape.id,
    ),
    # torch.nn.functional.unfold is Thunder's id of Tensor.unfold, and also of the function of that name, which copies.
    Property.VIEW: (
        PrimIDs.BROADCAST_IN_DIM, PrimIDs.IMAG, PrimIDs.REAL, PrimIDs.RESHAPE, PrimIDs.SHALLOW_COPY, PrimIDs.SLICE,
        PrimIDs.SQUEEZE, PrimIDs.TRANSPOSE, PrimIDs.UNFOLD, PrimIDs.UPDATE_ALIASES, PrimIDs.VIEW,
        torchex.slice_prim_impl.id, torchex.torch_prims_reshape_impl.id,
        *_torch("Tensor.expand Tensor.expand_as Tensor.view Tensor.view_as"),
        *_torch("adjoint atleast_1d atleast_2d atleast_3d chunk conj detach diagonal dsplit flatten hsplit imag"),
        *_torch("linalg.diagonal moveaxis movedim narrow permute positive ravel real reshape resolve_conj resolve_neg"),
        *_torch("select slice_inverse split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose"),
        *_torch("unbind unflatten unsqueeze view_as_complex view_as_real vsplit"),
        *_method("as_strided ccol_indices col_indices crow_indices indices reshape_as row_indices values"),
        *_method("align_to refine_names rename"),  # until torch 2.12
        *_functional("unfold"),
    ),
    Property.INDEX: _torch("Tensor.__getitem__"),
    Property.CAST: (
        PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.DEVICE_PUT,
        *_torch("Tensor.to Tensor.type Tensor.type_as cuda long"),
        *_method("bfloat16 bool byte cdouble cfloat chalf char cpu double half int short"),
    ),
    Property.COPY: (
        PrimIDs.STRIDE_ORDER, torchex.stride_order_prim_impl.id,
        *_torch("Tensor.contiguous"), *_method("coalesce pin_memory"),
    ),
    Property.LOOK_UP: (
        PrimIDs.EMBEDDING, PrimIDs.GATHER, PrimIDs.TAKE, PrimIDs.TAKE_ALONG_AXIS,
        *_torch("embedding gather index_select take take_along_dim"), *_functional("embedding"),
    ),
    Property.CONSTANT: (
        PrimIDs.FULL, PrimIDs.IOTA, PrimIDs.TENSOR_FROM_SEQUENCE, *_torch("arange full ones tensor zeros"),
    ),
    # Symbols made of these need no entry. Philox numbers are a function of a seed and an offset: they are not drawn.
    Property.RANDOM: (
        PrimIDs.GET_AND_UPDATE_RNG_STATE, PrimIDs.MULTINOMIAL, PrimIDs.RANDINT, PrimIDs.RANDN, PrimIDs.UNIFORM,
        torchex.get_and_update_rng_state_impl.id, torchex.uniform.id,
        *_torch("_native_multi_head_attention alpha_dropout bernoulli binomial dropout feature_alpha_dropout"),
        *_torch("feature_dropout gru lobpcg lstm multinomial native_dropout poisson rand rand_like randint"),
        *_torch("randint_like randn randn_like rnn_relu rnn_tanh rrelu rrelu_ uniform uniform_like"),
        "exponential", "exponential_",
        *_functional("alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout gumbel_softmax"),
        *_functional("fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d"),
        *_functional("fractional_max_pool3d_with_indices multi_head_attention_forward scaled_dot_product_attention"),
        sdpaex.sdpea_gradfwd.id, sdpaex.sdpfa_gradfwd.id,
    ),
    Property.IN_PLACE: (PrimIDs.COPY_, *_torch("Tensor.copy_ relu_ rrelu_ Tensor.copysign_")),
}  # fmt: skip


def _by_id() -> Mapping[Hashable, Property]:
    table: dict[Hashable, Property] = {}
    for found, ids in IDS.items():
        for id in ids:
            table[id] = table.get(id, Property.NONE) | found
    return table


TABLE = _by_id()


# ---- recognisers ----


class InModule(NamedTuple):
    """A tag of a line: the qualified name of the module whose forward asked for it; empty for the traced model itself.
    In a block's function it is that of the block's first call."""

    name: str


def module_of(bsym: BoundSymbol) -> str | None:
    """The module whose forward asked for a line; None if the line has no tag."""
    return next((tag.name for tag in bsym.tags if isinstance(tag, InModule)), None)


OPS = *BUCKETS, *VALUES, *ACTIVATIONS
ISSUED: Mapping[Hashable, CollectiveOp] = {op.issue.id: op for op in OPS}
AWAITED: Mapping[Hashable, CollectiveOp] = {op.wait.id: op for op in OPS}


def _ids(*carries: str) -> tuple[frozenset[Hashable], frozenset[Hashable]]:
    """The ids of the symbols that issue collectives of these kinds of cargo, and of those that wait for them."""
    tables = (frozenset(id for id, op in table.items() if op.carries in carries) for table in (ISSUED, AWAITED))
    issues, waits = tables
    return issues, waits


ISSUES, WAITS = _ids("parameters", "gradients")
FUTURES, FUTURE_WAITS = _ids("parameters", "gradients", "copy")
GATHERS, GATHER_WAITS = _ids("parameters")
REDUCTIONS, REDUCTION_WAITS = _ids("gradients")
OFFLOADS, OFFLOAD_WAITS = _ids("copy")
SEQUENCES, SEQUENCE_WAITS = _ids("value")
TRIPS, TRIP_WAITS = _ids("activations")


def is_issue(bsym: BoundSymbol) -> bool:
    return bsym.sym.id in ISSUES


def is_wait(bsym: BoundSymbol) -> bool:
    return bsym.sym.id in WAITS


def is_collective(bsym: BoundSymbol) -> bool:
    return is_issue(bsym) or is_wait(bsym)


def is_sequence_issue(bsym: BoundSymbol) -> bool:
    """True for a line that issues a collective of a sequence."""
    return bsym.sym.id in SEQUENCES


def is_sequence_wait(bsym: BoundSymbol) -> bool:
    return bsym.sym.id in SEQUENCE_WAITS


def part_at(bsym: BoundSymbol) -> Part:
    """The part of a sequence in a line of its collectives."""
    part: Part = bsym.args[1]
    return part


def is_products(bsym: BoundSymbol) -> bool:
    """True for a line that computes products while their rows travel. Its subsymbols are what it stands for."""
    return bsym.sym.id in PRODUCTS


def is_trip(bsym: BoundSymbol) -> bool:
    """True for a line that issues a copy of activations to the host, or back."""
    return bsym.sym.id in TRIPS


def away_at(bsym: BoundSymbol) -> Away:
    """What travels in a line that copies activations."""
    away: Away = bsym.args[1]
    return away


def is_gather(bsym: BoundSymbol) -> bool:
    """True for both halves of a gather."""
    return bsym.sym.id in GATHERS or bsym.sym.id in GATHER_WAITS


def is_offload(bsym: BoundSymbol) -> bool:
    """True for both halves of a copy of gradients to the host."""
    return bsym.sym.id in OFFLOADS or bsym.sym.id in OFFLOAD_WAITS


def ends_copies(bsym: BoundSymbol) -> bool:
    """True for a line at which the program waits for copies from host memory."""
    return bsym.sym.id == wait_copies.id


def issues_future(bsym: BoundSymbol) -> bool:
    """True for a line that issues a collective or a copy to the host: its output is a future."""
    return bsym.sym.id in FUTURES


def waits_for_future(bsym: BoundSymbol) -> bool:
    """True for a line that waits for a future."""
    return bsym.sym.id in FUTURE_WAITS


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
    known = properties(sym) | TABLE.get(differentiated_as(sym), Property.NONE)
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
        or grad_rule_of(bsym) is not None
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


def readers_of(lines: Sequence[BoundSymbol]) -> dict[str, list[BoundSymbol]]:
    """The lines that read each value, the last one first, without those that compute what nothing reads."""
    found: dict[str, list[BoundSymbol]] = {}
    for line in reversed(lines):
        outs = names(line.flat_proxy_outs)
        if not outs or not outs.isdisjoint(found) or is_return(line) or changes_values(line):
            for name in names(line.flat_proxy_args):
                found.setdefault(name, []).append(line)
    return found


def nbytes(values: Iterable[Any]) -> int:
    """The bytes of the tensors among some proxies."""
    return sum(math.prod(p.shape) * p.dtype.bytes for p in values if isinstance(p, TensorProxy))


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
        if is_alias or bsym.sym.id in GATHER_WAITS:
            found.update(o.name for o in bsym.flat_proxy_outs)

    for bsym in trace.bound_symbols:
        mark(bsym)
    return found


def _mark_unsharded(bsym: BoundSymbol, found: dict[str, frozenset[Bucket]]) -> None:
    """Adds the outputs of a line to ``found``. Constants have no bucket."""
    if bsym.sym.id in GATHER_WAITS:
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
