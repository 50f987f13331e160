"""The table of symbols: what each symbol of Thunder, torch and shardtrace does, by its id.

    Property.VIEW in properties(bsym.sym)

Thunder's own tags (``OpTags``) do not tell views from copies and miss most random symbols. A symbol without any of the
properties is not in the table. Symbols of shardtrace declare theirs where they are made.

Note [Identity]. Lowering replaces Thunder's symbols by operators of executors. An operator stands for the symbol that
it was registered to be like, or for the torch function that it calls. Its name tells nothing: a user's operator may be
called ``reshape`` and copy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterable, Mapping

from passes.comm.properties import Property

from thunder.core.prims import OpTags, PrimIDs
from thunder.core.symbol import Symbol
from thunder.core.transforms import backward_impls
from thunder.executors import pythonex, sdpaex, torchex
from thunder.torch.default_torch_ops import torch_auto_registered_ops

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
def differentiated(sym: Symbol) -> Hashable:
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
