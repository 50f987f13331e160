"""Functions whose results at a position depend on their operands at that position. Operands are broadcast."""

from __future__ import annotations

from typing import Any

from passes.plan.dims.relation import (
    Draft,
    Labels,
    Operand,
    Rule,
    Shapes,
    Unknown,
    aligned,
    axes,
    axis,
    broadcast,
    counted,
    number,
)

from torch.utils import _pytree as pytree

ARITHMETIC = """
    add radd iadd sub subtract rsub isub mul multiply rmul imul div divide true_divide truediv rtruediv itruediv rdiv
    idiv floor_divide floordiv rfloordiv ifloordiv remainder mod rmod imod fmod pow rpow ipow float_power neg negative
    pos positive invert abs absolute sign sgn signbit copysign ldexp frexp hypot fmax fmin maximum minimum gcd lcm
    lerp addcmul addcdiv nextafter heaviside reciprocal square sqrt rsqrt ceil floor round trunc fix frac clamp clip
    clamp_min clamp_max nan_to_num deg2rad rad2deg xlogy logaddexp logaddexp2
"""
BITS = """
    and iand or ror ior xor rxor ixor lshift rlshift ilshift rshift rrshift irshift bitwise_and bitwise_or
    bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift logical_and logical_or logical_xor logical_not
"""
COMPARISONS = """
    eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose isnan isinf isfinite isposinf isneginf
    isreal
"""
ELEMENTARY = """
    exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh
    atanh arcsinh arccosh arctanh atan2 arctan2 sinc sigmoid logit erf erfc erfinv lgamma digamma polygamma mvlgamma
    igamma igammac i0 angle
    special.airy_ai special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1 special.digamma
    special.entr special.erf special.erfc special.erfcx special.erfinv special.exp2 special.expit special.expm1
    special.gammainc special.gammaincc special.gammaln special.i0 special.i0e special.i1 special.i1e special.log1p
    special.log_ndtr special.logit special.multigammaln special.ndtr special.ndtri special.polygamma special.psi
    special.round special.sinc special.xlog1py special.xlogy special.zeta
    special.modified_bessel_i0 special.modified_bessel_i1 special.modified_bessel_k0 special.modified_bessel_k1
    special.scaled_modified_bessel_k0 special.scaled_modified_bessel_k1 special.spherical_bessel_j0
"""
COPIES = """
    float half bfloat16 double long int short byte char bool cfloat cdouble chalf cpu contiguous
    clone detach conj conj_physical resolve_conj resolve_neg real imag complex polar
    copy masked_fill fill zero zeros_like ones_like full_like empty_like detach_copy
"""
RANDOM = "rand_like randn_like randint_like bernoulli normal"
ACTIVATIONS = """
    relu relu6 elu selu celu gelu silu mish leaky_relu rrelu softplus softsign softshrink hardshrink tanhshrink
    hardtanh hardsigmoid hardswish logsigmoid threshold dropout alpha_dropout
"""


def pointwise(results: Shapes, *args: Any, **kwargs: Any) -> Draft:
    operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Operand)]
    if not operands or set(results) != {broadcast(x.shape for x in operands)}:
        raise Unknown
    dims = len(results[0])
    return Draft({x: aligned(x.shape, dims) for x in operands}, [counted(dims)] * len(results))


def unread(first: int, *operands: Any) -> tuple[dict[Operand, Labels], dict[int, str]]:
    """Rows of labels, from ``first`` on, for operands whose dims make no difference, and how they are combined."""
    rows: dict[Operand, Labels] = {}
    last = first
    for x in operands:
        if isinstance(x, Operand):
            rows[x] = tuple(range(last, last + x.dims))
            last += x.dims
    return rows, dict.fromkeys(range(first, last), "same")


def cast(results: Shapes, input: Operand, *args: Any, **named: Any) -> Draft:
    """Another tensor may give the dtype. If it has the shape of the first, it is split alike."""
    every = counted(input.dims)
    others = [x for x in (*args, *named.values()) if isinstance(x, Operand)]
    rows, combine = unread(input.dims, *(x for x in others if x.shape != input.shape))
    alike = {x: every for x in others if x.shape == input.shape}
    return Draft({input: every, **alike, **rows}, [every], combine)


def where(results: Shapes, condition: Any, input: Any, other: Any) -> Draft:
    return pointwise(results, condition, input, other)


def prelu(results: Shapes, input: Operand, weight: Operand) -> Draft:
    """Dim 1 is that of the channels, if there is one."""
    return Draft(
        {input: counted(input.dims), weight: (1,) * weight.dims if input.dims > 1 else (None,) * weight.dims},
        [counted(input.dims)],
    )


def of_first(results: Shapes, input: Any, *others: Any, **options: Any) -> Draft:
    """Each element of the first operand is looked up in the others."""
    if not isinstance(input, Operand):
        raise Unknown
    return Draft({input: counted(input.dims)}, [counted(input.dims)] * len(results))


def as_first(results: Shapes, input: Operand, other: Operand) -> Draft:
    """The first operand, expanded to the shape of the second."""
    return Draft({input: aligned(input.shape, other.dims), other: counted(other.dims)}, [counted(other.dims)])


def feature_dropout(results: Shapes, input: Operand, *args: Any, **kwargs: Any) -> Draft:
    """Channels are dropped whole. The dims of batch and channels are taken to be the first two, others are mixed."""
    if input.dims < 3:
        raise Unknown
    return Draft({input: counted(input.dims)}, [counted(input.dims)], mixed=frozenset(range(1, input.dims)))


def expanded(results: Shapes, input: Operand, *sizes: Any, **options: Any) -> Draft:
    """A dim that is expanded is the same at all positions."""
    [shape] = results
    return Draft({input: aligned(input.shape, len(shape))}, [counted(len(shape))])


def expanded_in_dim(results: Shapes, input: Operand, shape: Any, dims: Any) -> Draft:
    return Draft({input: axes(dims, len(results[0])) if input.dims else ()}, [counted(len(results[0]))])


def broadcast_tensors(results: Shapes, *tensors: Any) -> Draft:
    return pointwise(results, *tensors)


def filled(results: Shapes, *args: Any, **kwargs: Any) -> Draft:
    """A new tensor that is the same at all positions."""
    [shape] = results
    rows, combine = unread(len(shape), *args)
    return Draft(rows, [counted(len(shape))], combine)


def repeated(results: Shapes, input: Operand, *counts: Any, **named: Any) -> Draft:
    """A dim of size 1 that is repeated is the same at all positions; other repeated dims are mixed."""
    [shape] = results
    labels = aligned(input.shape, len(shape))
    whole = dict(zip(labels, input.shape, strict=True))
    mixed = frozenset(d for d, size in enumerate(shape) if whole.get(d, 1) not in (1, size))
    return Draft({input: labels}, [counted(len(shape))], mixed=mixed)


def interleaved(results: Shapes, input: Operand, repeats: Any, dim: Any = None, **options: Any) -> Draft:
    labels = counted(input.dims)
    return Draft({input: labels}, [labels], mixed=frozenset({axis(number(dim), input.dims)}))


def _all(names: str, prefix: str = "") -> tuple[str, ...]:
    return tuple(prefix + name for name in names.split())


RULES: dict[str, Rule] = {
    **dict.fromkeys(_all(ARITHMETIC + BITS + COMPARISONS + ELEMENTARY + COPIES + RANDOM), pointwise),
    **dict.fromkeys(_all(ACTIVATIONS, "nn.functional."), pointwise),
    **dict.fromkeys(_all("dropout1d dropout2d dropout3d feature_alpha_dropout", "nn.functional."), feature_dropout),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"), filled),
    **dict.fromkeys(("bucketize", "isin"), of_first),
    **dict.fromkeys(("to", "type", "type_as"), cast),
    "where": where,
    "nn.functional.prelu": prelu,
    "expand": expanded,
    "broadcast_to": expanded,
    "expand_as": as_first,
    "prims.broadcast_in_dim": expanded_in_dim,
    "broadcast_tensors": broadcast_tensors,
    "repeat": repeated,
    "tile": repeated,
    "repeat_interleave": interleaved,
}
