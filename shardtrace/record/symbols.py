"""The functions of torch for which a line has Thunder's symbol: values and gradients are known to be torch's.

For any other function, and for arguments that are not known to be safe, the line calls torch's own function.

Note [Rounding]. Thunder's symbols for some functions compute the same in another order, in which other bits are lost,
and take several kernels. An executor that fuses needs the symbols. Without one, the line calls torch's function, which
rounds as eager does, and symbols only move tensors. On CUDA attention is that of Thunder's executor ``sdpa``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from passes.analysis.dims import is_plain_embedding
from passes.compat.jit import symbols_of_torch
from passes.kernels.aten import OF_MEMORY

import torch
from thunder import torch as ltorch
from thunder.core import dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import Proxy, TensorProxy
from torch import nn
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

F = nn.functional
OPERATOR = type(torch.ops.aten.add.Tensor)
SYMBOLS = symbols_of_torch()

OPERATORS: dict[str, Callable[..., Any]] = {
    "__add__": operator.add, "__radd__": lambda a, b: operator.add(b, a),
    "__sub__": operator.sub, "__rsub__": lambda a, b: operator.sub(b, a),
    "__mul__": operator.mul, "__rmul__": lambda a, b: operator.mul(b, a),
    "__truediv__": operator.truediv, "__rtruediv__": lambda a, b: operator.truediv(b, a),
    "__pow__": operator.pow, "__matmul__": operator.matmul, "__neg__": operator.neg,
    "__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor, "__invert__": operator.invert,
    "__eq__": operator.eq, "__ne__": operator.ne, "__lt__": operator.lt, "__le__": operator.le,
    "__gt__": operator.gt, "__ge__": operator.ge, "__getitem__": operator.getitem,
}  # fmt: skip
# write into their first argument: the operator that gives the value
IN_PLACE: dict[str, Callable[..., Any]] = {
    "__iadd__": operator.add, "__isub__": operator.sub, "__imul__": operator.mul, "__itruediv__": operator.truediv,
    "__iand__": operator.and_, "__ior__": operator.or_, "__ixor__": operator.xor,
}  # fmt: skip

# by the last part of torch's name; a function and the method of that name compute the same
MOVED = frozenset(
    """view reshape transpose permute t flatten unflatten squeeze unsqueeze expand expand_as contiguous chunk split
    unbind narrow select movedim swapaxes swapdims view_as reshape_as detach clone T mT
    to float half bfloat16 double long int bool type_as
    zeros ones full arange zeros_like ones_like full_like new_zeros new_ones new_full
    """.split()  # noqa: SIM905
)
TRUSTED = MOVED | frozenset(
    """add sub mul div true_divide neg exp expm1 log log1p log2 sqrt rsqrt reciprocal sin cos tanh sigmoid erf abs pow
    square eq ne lt le gt ge logical_not logical_and logical_or bitwise_and bitwise_or bitwise_xor bitwise_not where
    masked_fill
    relu gelu silu mish elu selu softplus logsigmoid softmax log_softmax leaky_relu
    cat stack sum mean var cumsum argmax any all
    linear matmul mm bmm
    layer_norm rms_norm group_norm batch_norm embedding conv1d conv2d conv3d dropout scaled_dot_product_attention
    cross_entropy
    tril triu
    """.split()  # noqa: SIM905
)
CASTS = {
    "bfloat16": torch.bfloat16, "half": torch.float16, "float": torch.float32, "double": torch.float64,
    "bool": torch.bool, "int": torch.int32, "long": torch.int64,
}  # fmt: skip
WITHOUT_GRADIENT = ("detach", "new_zeros", "new_ones", "new_full")


# return no tensor and change none: a forward may call them without a line
QUERIES = frozenset(
    """size dim ndim shape stride numel nelement ndimension storage_offset element_size itemsize nbytes layout dtype
    device names is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_inference is_leaf is_sparse
    is_sparse_csr is_quantized is_nested is_meta is_cuda is_cpu is_xpu is_mps is_mkldnn is_xla is_ipu is_maia is_mtia
    is_vulkan is_pinned is_shared is_set_to is_same_size is_coalesced is_tensor is_nonzero requires_grad retains_grad
    grad grad_fn grad_dtype output_nr has_names get_device dense_dim sparse_dim type sym_size sym_numel sym_stride
    dim_order result_type promote_types can_cast broadcast_shapes typename get_default_dtype has_torch_function
    untyped_storage storage _typed_storage storage_type data_ptr _cdata _version _base _is_view _backward_hooks
    _is_zerotensor _has_symbolic_sizes_strides item tolist numpy equal allclose is_distributed
    __len__ __hash__ __repr__ __format__ __bool__ __dir__ __contains__ __dlpack_device__ __array__ __int__ __float__
    __index__ __complex__
    _nnz qscheme q_scale q_zero_point __cuda_array_interface__ _post_accumulate_grad_hooks _assert""".split()  # noqa: SIM905
)


class NotTrusted(Exception):
    """Why a line calls torch's function."""


# no executor fuses them
LIBRARY = frozenset({"conv1d", "conv2d", "conv3d", "cross_entropy", "scaled_dot_product_attention"})
# Thunder's symbols compute nothing, or write into statistics
AS_SYMBOLS = MOVED | {"getitem", "zero", "fill", "batch_norm"}


def check_as_eager(
    function: Callable[..., Any], args: Any, kwargs: Any, *, fuses: bool, cuda: bool, repeated: bool
) -> None:
    """Raises NotTrusted if the line of a recorded call is to be torch's own function, as it is wherever nothing fuses.

    Args:
        fuses: whether an executor fuses.
        cuda: whether the step is one of CUDA.
        repeated: in backward, which then repeats the parts that draw nothing.
    """
    name = name_of(function).strip("_")
    if name in AS_SYMBOLS or (name == "dropout" and (repeated or not cuda)):
        return
    if name == "rms_norm" and cuda:
        return
    if name == "scaled_dot_product_attention" and (repeated if _drops(*args, **kwargs) else cuda):
        return
    if not fuses or name in LIBRARY:
        raise NotTrusted("nothing fuses it")


def _drops(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
) -> bool:
    return dropout_p != 0


@functools.cache
def name_of(function: Callable[..., Any]) -> str:
    """The last part of a torch function's name, such as "add" for torch.Tensor.add; its own name for another one."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):  # of a property
        return str(getattr(function.__self__, "__name__", ""))  # type: ignore[attr-defined]
    found = resolve_name(function)
    return found.rpartition(".")[2] if found else name or type(function).__name__


def is_query(function: Callable[..., Any]) -> bool:
    """True for a function that returns no tensor and does nothing."""
    if isinstance(function, OPERATOR):
        return bool(function._schema.returns)
    return getattr(function, "__name__", "") not in ("__set__", "__delete__") and name_of(function) in QUERIES


def of_memory(function: Callable[..., Any]) -> str:
    """The name of a function whose result depends on how its argument lies in memory; empty for others."""
    name = function._schema.name.partition("::")[2] if isinstance(function, OPERATOR) else name_of(function)
    return name if name in OF_MEMORY else ""


def is_of_user(function: Callable[..., Any]) -> bool:
    """True for a function that is none of torch's."""
    if isinstance(function, OPERATOR):
        return function.namespace not in ("aten", "prims")
    return resolve_name(function) is None


@functools.cache
def is_method(function: Callable[..., Any]) -> bool:
    """True for a method or property of torch.Tensor."""
    name = getattr(function, "__name__", "")
    found = getattr(torch.Tensor, name, None)
    return name == "__get__" or found is function or getattr(function, "__objclass__", None) in torch.Tensor.__mro__


GIVES_BOOL = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or"])


def out_of_place(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The function and keywords that return what a function of ``tensors`` writes into its first argument; None if none
    is known, or if it may return another dtype."""
    name = name_of(function)
    if len({t.dtype for t in tensors if t.dtype != torch.bool}) > 1 or "out" in kwargs:
        return None
    if kwargs.get("inplace"):
        return function, {**kwargs, "inplace": False}
    plain = name.replace("__i", "__", 1) if name in IN_PLACE else name[:-1]
    if name not in IN_PLACE and (plain not in TRUSTED or not name.endswith("_")):
        return None
    if plain in GIVES_BOOL and tensors[0].dtype != torch.bool:
        return None
    return next(getattr(home, plain) for home in (torch.Tensor, F) if hasattr(home, plain)), dict(kwargs)


def value_in_place(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a function that writes into its first argument leaves there, by Thunder's symbols.

    Raises NotTrusted, or whatever a symbol raises.
    """
    name = name_of(function)
    if name in IN_PLACE:
        return IN_PLACE[name](*args)
    if kwargs.get("inplace"):
        return value(function, args, {**kwargs, "inplace": False})
    if name in ("zero_", "fill_") and len(args) < 3 and not any(isinstance(a, Proxy) for a in args[1:]):
        return ltorch.full_like(args[0], args[1] if name == "fill_" else 0)
    if name.endswith("_") and not name.endswith("__") and name[:-1] in TRUSTED and "out" not in kwargs:
        return value(getattr(torch.Tensor, name[:-1]), args, kwargs)
    raise NotTrusted("writes into its argument")


def value(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of a function, by Thunder's symbols.

    Raises NotTrusted, or whatever a symbol raises.
    """
    name = name_of(function)
    _check(name, args, kwargs)
    if name in OPERATORS:
        return OPERATORS[name](*args)
    if name in CASTS and len(args) == 1 and not kwargs:
        return ltorch.to(args[0], CASTS[name])
    if function in SYMBOLS:
        symbol = SYMBOLS[function]
        if OpTags.AUTO_REGISTERED in (getattr(symbol, "tags", None) or ()) and name not in WITHOUT_GRADIENT:
            raise NotTrusted("Thunder's symbol calls torch's function")
        return symbol(*args, **kwargs)
    if is_method(function) and isinstance(args[0], TensorProxy):
        found = getattr(args[0], name)
        return found(*args[1:], **kwargs) if getattr(function, "__name__", "") != "__get__" else found
    raise NotTrusted("Thunder has no symbol")


def _check(name: str, args: Any, kwargs: Any) -> None:
    if name not in TRUSTED and name not in OPERATORS:
        raise NotTrusted("not among the functions whose gradients are known to be right")
    tensors = [t for t in pytree.tree_leaves((args, kwargs), is_leaf=_is_proxy) if isinstance(t, TensorProxy)]
    if any(dtypes.is_complex_dtype(t.dtype) for t in tensors):
        raise NotTrusted("complex numbers")
    if kwargs.get("out") is not None:
        raise NotTrusted("writes into its argument")
    if name in UNLESS and UNLESS[name](*args, **kwargs):
        raise NotTrusted("with these arguments")


def _is_proxy(value: Any) -> bool:
    return isinstance(value, Proxy)


def _indexed_by_tensors(a: Any, index: Any) -> bool:
    return any(isinstance(i, TensorProxy) for i in (index if isinstance(index, tuple) else (index,)))


def _has_bool(a: Any, *args: Any, unbiased: Any = None, **kwargs: Any) -> bool:
    """Whether a variance is asked for by ``unbiased``."""
    return unbiased is not None or any(isinstance(v, bool) for v in args[:1])


def _is_no_plain_number(a: Any, exponent: Any) -> bool:
    return type(exponent) not in (int, float) or exponent == 0 or not isinstance(a, TensorProxy)


def _is_special_embedding(*args: Any, **kwargs: Any) -> bool:
    return not is_plain_embedding(*args, **kwargs)


def _is_broadcast_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether no fused kernel computes it: Thunder's decomposition then rounds what torch keeps in float32."""
    q, k, v = (tuple(t.shape) for t in (query, key, value))
    return not (len(q) == len(k) == len(v) == 4 and q[:2] == k[:2] == v[:2] and q[3] == k[3] == v[3])


def _is_special_loss(input: Any, target: Any, *args: Any, label_smoothing: float = 0.0, **kwargs: Any) -> bool:
    """Whether torch's kernel of a loss of labels, one for each row of scores, is not all of it."""
    rows = len(target.shape) < len(input.shape) <= 2
    return len(args) > 5 or bool(label_smoothing) or not rows or dtypes.is_float_dtype(target.dtype)


# conditions under which a function is not trusted, of its arguments
UNLESS: dict[str, Callable[..., bool]] = {
    "dropout": lambda input, p=0.5, training=True, inplace=False: p == 1,  # zeros that no gradient reaches
    "__getitem__": _indexed_by_tensors,
    "__pow__": _is_no_plain_number,
    "cross_entropy": _is_special_loss,
    "pow": _is_no_plain_number,
    "embedding": _is_special_embedding,
    "div": lambda a, b, *, rounding_mode=None: rounding_mode is not None,
    "scaled_dot_product_attention": _is_broadcast_attention,
    "var": _has_bool,
}
