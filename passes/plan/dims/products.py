"""Functions of single positions, and products of matrices."""

from __future__ import annotations

import string
from collections.abc import Sequence
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

# ---- pointwise ----


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


POINTWISE: dict[str, Rule] = {
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


# ---- products ----


# labels beside the numbers of a result's dims
ROW, COLUMN, INNER, OTHER = 100, 101, 102, 103


def product(rows: dict[Operand, Labels], result: Labels, *, added: bool = False) -> Draft:
    """A sum over the labels that only operands have. If something is ``added`` to it, these are mixed."""
    gone = {label for row in rows.values() for label in row if label is not None} - set(result)
    twice = {label for row in (*rows.values(), result) for label in row if row.count(label) > 1 and label is not None}
    combine = {label: "sum" for label in gone - twice if not added}
    return Draft(rows, [result], combine, frozenset(twice | (gone if added else set())))


def _batch(input: Operand, batch: int, matrix: int = 2) -> Labels:
    """Labels of the dims before the last, aligned from the right among ``batch`` dims."""
    own = input.dims - matrix
    if own < 0:
        raise Unknown
    return tuple(range(batch - own, batch))


def matmul(results: Shapes, input: Operand, other: Operand) -> Draft:
    if not isinstance(input, Operand) or not isinstance(other, Operand) or not input.dims or not other.dims:
        raise Unknown
    batch = max(input.dims, other.dims, 2) - 2
    left: Labels = (INNER,) if input.dims == 1 else (*_batch(input, batch), ROW, INNER)
    right: Labels = (INNER,) if other.dims == 1 else (*_batch(other, batch), INNER, COLUMN)
    rows = (ROW,) if input.dims > 1 else ()
    columns = (COLUMN,) if other.dims > 1 else ()
    return product({input: left, other: right}, (*counted(batch), *rows, *columns))


def grouped_product(
    results: Shapes, input: Operand, weight: Operand, offs: Operand, bias: None = None, out_dtype: None = None
) -> Draft:
    """Rows of groups, each with its own matrix: (rows, k) x (groups, k, n)."""
    if (input.dims, weight.dims) != (2, 3) or bias is not None or out_dtype is not None:
        raise Unknown
    rows: dict[Operand, Labels] = {input: (ROW, INNER), weight: (OTHER, INNER, COLUMN), offs: (OTHER,)}
    return Draft(rows, [(ROW, COLUMN)], {INNER: "sum"}, frozenset({ROW, OTHER}))


def reflected_matmul(results: Shapes, input: Operand, other: Operand) -> Draft:
    return matmul(results, other, input)


def linear(results: Shapes, input: Operand, weight: Operand, bias: Operand | None = None) -> Draft:
    batch = counted(input.dims - 1)
    out = (COLUMN,) * (weight.dims - 1)
    rows: dict[Operand, Labels] = {input: (*batch, INNER), weight: (*out, INNER)}
    if bias is not None:
        rows[bias] = out
    return product(rows, (*batch, *out), added=bias is not None)


def bilinear(results: Shapes, input1: Operand, input2: Operand, weight: Operand, bias: Operand | None = None) -> Draft:
    batch = counted(input1.dims - 1)
    rows: dict[Operand, Labels] = {
        input1: (*batch, ROW),
        input2: (*batch, INNER),
        weight: (COLUMN, ROW, INNER),
    }
    if bias is not None:
        rows[bias] = (COLUMN,)
    return product(rows, (*batch, COLUMN), added=bias is not None)


def outer(results: Shapes, input: Operand, vec2: Operand) -> Draft:
    return product({input: (ROW,), vec2: (COLUMN,)}, (ROW, COLUMN))


def inner(results: Shapes, input: Operand, other: Operand) -> Draft:
    if not input.dims or not other.dims:
        raise Unknown
    left = counted(input.dims - 1)
    right = tuple(range(ROW + 4, ROW + 3 + other.dims))
    return product({input: (*left, INNER), other: (*right, INNER)}, (*left, *right))


def added_product(left: str, right: str, result: str) -> Any:
    """torch.addmm and its like, by the letters of their dims. Names of the factors are in alphabetic order."""

    def rule(results: Shapes, input: Operand, *args: Any, **named: Any) -> Draft:
        given = (*args, *(named[name] for name in sorted(named)))
        factors = [x for x in given if isinstance(x, Operand)]
        if len(factors) != 2:
            raise Unknown
        first, second = factors

        def labels(letters: str) -> Labels:
            return tuple(ord(c) for c in letters)

        if len(left) != first.dims or len(right) != second.dims or input.dims > len(result):
            raise Unknown
        rows = {first: labels(left), second: labels(right)}
        rows[input] = labels(result)[len(result) - input.dims :]
        return product(rows, labels(result), added=True)

    return rule


def tensordot(results: Shapes, a: Operand, b: Operand, dims: Any = 2) -> Draft:
    if isinstance(dims, Operand):
        raise Unknown
    if isinstance(dims, Sequence):
        left, right = (list(axes(d, t.dims)) if d else [] for d, t in zip(dims, (a, b), strict=True))
    else:
        left, right = list(range(a.dims - number(dims), a.dims)), list(range(dims))
    if len(left) != len(right) or len(left) != len(set(left)) or len(right) != len(set(right)):
        raise Unknown
    rows_a, rows_b = list(counted(a.dims)), [ROW + d for d in counted(b.dims)]
    for i, j in zip(left, right, strict=True):
        rows_b[j] = rows_a[i]
    result = [label for i, label in enumerate(rows_a) if i not in left]
    result += [label for j, label in enumerate(rows_b) if j not in right]
    return product({a: tuple(rows_a), b: tuple(rows_b)}, tuple(result))


def einsum(results: Shapes, equation: Any, *operands: Any) -> Draft:
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], Sequence) else operands
    if not isinstance(equation, str) or not all(isinstance(t, Operand) for t in tensors):
        raise Unknown
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted({c for c in left if c in string.ascii_letters and left.count(c) == 1}, key=_order)
        right = ("..." if "..." in left else "") + "".join(letters)
    if len(terms) != len(tensors):
        raise Unknown
    wide = max((t.dims - len(term.replace("...", "")) for t, term in zip(tensors, terms, strict=True)), default=0)
    rows = {t: _term(term, t.dims, wide) for t, term in zip(tensors, terms, strict=True)}
    return product(rows, _term(right, len(results[0]), wide))


def _order(letter: str) -> tuple[bool, str]:
    """torch sorts capitals first."""
    return letter.islower(), letter


def _term(term: str, dims: int, wide: int) -> Labels:
    """The labels of an operand of an equation; the ellipsis stands for the last of ``wide`` dims."""
    before, dots, after = term.partition("...")
    if not set(before + after) <= set(string.ascii_letters):
        raise Unknown
    rest = dims - len(before + after)
    if rest < 0 or (rest and not dots):
        raise Unknown
    return (*map(ord, before), *range(wide - rest, wide), *map(ord, after))  # letters come after 64


def convolution(spatial: int, *, transposed: bool = False) -> Any:
    """Spatial dims are mixed. Dims of weights: (out, in / groups, ...), (in, out / groups, ...) if it is transposed."""

    def rule(
        results: Shapes, input: Operand, weight: Operand, bias: Operand | None = None, *args: Any, **named: Any
    ) -> Draft:
        groups = args[3] if len(args) > 3 else named.get("groups", 1)
        batch = (ROW,) if input.dims == spatial + 2 else ()
        space, kernel = counted(spatial), tuple(range(200, 200 + spatial))
        grouped = number(groups) != 1
        channels: Labels = (None, None) if grouped else (INNER, COLUMN) if transposed else (COLUMN, INNER)
        source = None if grouped else INNER
        rows: dict[Operand, Labels] = {input: (*batch, source, *space), weight: (*channels, *kernel)}
        if bias is not None:
            rows[bias] = (None if grouped else COLUMN,)
        found = product(rows, (*batch, None if grouped else COLUMN, *space), added=bias is not None)
        mixed = found.mixed | set(space) | set(kernel)
        combine = {label: how for label, how in found.combine.items() if label == INNER}
        return found._replace(combine=combine, mixed=mixed)

    return rule


def attention(
    results: Shapes,
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None = None,
    *args: Any,
    **named: Any,
) -> Draft:
    """Dims of batch and heads are kept."""
    batch = max(query.dims, key.dims, value.dims) - 2
    rows: dict[Operand, Labels] = {
        query: (*_batch(query, batch), ROW, INNER),
        key: (*_batch(key, batch), COLUMN, INNER),
        value: (*_batch(value, batch), COLUMN, OTHER),
    }
    if attn_mask is not None:
        if attn_mask.dims > batch + 2:
            raise Unknown
        rows[attn_mask] = (*counted(batch), ROW, COLUMN)[batch + 2 - attn_mask.dims :]
    mixed = frozenset({ROW, COLUMN, INNER, OTHER})
    return Draft(rows, [(*counted(batch), ROW, OTHER)], mixed=mixed)


def cdist(results: Shapes, x1: Operand, x2: Operand, *args: Any, **options: Any) -> Draft:
    batch = max(x1.dims, x2.dims) - 2
    rows: dict[Operand, Labels] = {
        x1: (*_batch(x1, batch), ROW, INNER),
        x2: (*_batch(x2, batch), COLUMN, INNER),
    }
    return Draft(rows, [(*counted(batch), ROW, COLUMN)], mixed=frozenset({INNER}))


F = "nn.functional."
GROUPED = F + "grouped_mm"

RULES: dict[str, Rule] = {
    **dict.fromkeys(("matmul", "linalg.matmul", "mm", "bmm", "mv", "dot", "vdot"), matmul),
    **dict.fromkeys(("outer", "ger"), outer),
    **{f"{F}conv{n}d": convolution(n) for n in (1, 2, 3)},
    **{f"{F}conv_transpose{n}d": convolution(n, transposed=True) for n in (1, 2, 3)},
    "rmatmul": reflected_matmul,
    "imatmul": matmul,
    "inner": inner,
    "addmm": added_product("ij", "jk", "ik"),
    "addmv": added_product("ij", "j", "i"),
    "addr": added_product("i", "j", "ij"),
    "addbmm": added_product("bij", "bjk", "ik"),
    "baddbmm": added_product("bij", "bjk", "bik"),
    "tensordot": tensordot,
    "einsum": einsum,
    F + "linear": linear,
    GROUPED: grouped_product,
    F + "bilinear": bilinear,
    F + "scaled_dot_product_attention": attention,
    "cdist": cdist,
}
