"""Functions along some dims: reductions, scans, sorting, normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from passes.plan.dims.pointwise import pointwise
from passes.plan.dims.relation import Draft, Operand, Rule, Shapes, Unknown, aligned, axes, axis, counted


def reduced(results: Shapes, input: Operand, dims: Sequence[int], how: str | None = None) -> Draft:
    """Every result lacks the ``dims``, or has size 1 there. ``how`` results of parts are combined; None: mixed."""
    without = tuple(d for d in counted(input.dims) if d not in dims)
    kept = tuple(None if d in dims else d for d in counted(input.dims))
    rows: list[Sequence[int | None]] = []
    for shape in results:
        if len(shape) == len(without):
            rows.append(without)
        elif len(shape) == input.dims and all(shape[d] == 1 for d in dims):
            rows.append(kept)
        else:
            raise Unknown
    combine = dict.fromkeys(dims, how) if how else {}
    return Draft({input: counted(input.dims)}, rows, combine, frozenset() if how else frozenset(dims))


def reduction(how: str | None = None) -> Any:
    """A function of a tensor and dims; without dims it reduces all."""

    def rule(results: Shapes, input: Operand, dim: Any = None, *args: Any, axis: Any = None, **options: Any) -> Draft:
        given = axis if dim is None else dim
        if isinstance(given, bool):  # the argument of a variance
            given = None
        return reduced(results, input, axes(given, input.dims), how)

    return rule


def of_order(results: Shapes, input: Operand, p: Any = None, dim: Any = None, *args: Any, **options: Any) -> Draft:
    """torch.norm, torch.linalg.norm."""
    return reduced(results, input, axes(dim, input.dims))


def matrix_norm(
    results: Shapes, input: Operand, ord: Any = "fro", dim: Any = (-2, -1), *args: Any, **options: Any
) -> Draft:
    return reduced(results, input, axes(dim, input.dims))


def kth(results: Shapes, input: Operand, k: Any, dim: Any = -1, keepdim: Any = False) -> Draft:
    return reduced(results, input, axes(dim, input.dims))


def of_last(results: Shapes, input: Operand, dim: Any = -1, keepdim: Any = False) -> Draft:
    """torch.mode."""
    return reduced(results, input, axes(dim, input.dims))


def extreme(how: str) -> Any:
    """torch.max and min: of two tensors, of one with its positions, or of all."""

    def rule(results: Shapes, input: Operand, *args: Any, **named: Any) -> Draft:
        if any(isinstance(a, Operand) for a in (*args, *named.values())):
            return pointwise(results, input, *args, **named)
        if not args and not named:
            return reduced(results, input, counted(input.dims), how)
        return reduced(results, input, axes(args[0] if args else named.get("dim"), input.dims))

    return rule


def along(default: int | None = None, place: int = 0) -> Any:
    """A function along one dim, which all results have. ``place`` of the dim among the arguments after the first."""

    def rule(results: Shapes, input: Operand, *args: Any, dim: Any = default, **options: Any) -> Draft:
        given = args[place] if len(args) > place else dim
        if any(isinstance(a, Operand) for a in (*args, *options.values())):
            raise Unknown
        every = counted(input.dims)
        mixed = frozenset(every) if given is None else frozenset(axes(given, input.dims))
        return Draft({input: every}, [every] * len(results), mixed=mixed)

    return rule


def sort(results: Shapes, input: Operand, *args: Any, dim: Any = -1, descending: Any = False, **named: Any) -> Draft:
    """Has an overload whose second argument is a bool."""
    given = [a for a in args if type(a) is int]
    return along(-1)(results, input, given[0] if given else dim)


def every_dim(*dims: int) -> Any:
    """torch.fliplr, flipud, msort: along certain dims."""

    def rule(results: Shapes, input: Operand) -> Draft:
        return along()(results, input, dims)

    return rule


def flip(results: Shapes, input: Operand, *args: Any, dims: Any = None) -> Draft:
    given = dims if not args else args[0] if len(args) == 1 else args
    return along()(results, input, given)


def rolled(results: Shapes, input: Operand, shifts: Any, dims: Any = None) -> Draft:
    return along()(results, input, dims if dims is None or isinstance(dims, int) or dims else None)


def renorm(results: Shapes, input: Operand, p: Any, dim: Any, maxnorm: Any) -> Draft:
    """Normalizes each slice: all dims but one are mixed."""
    every, at = counted(input.dims), axis(dim, input.dims)
    return Draft({input: every}, [every], mixed=frozenset(every) - {at})


def softmax(results: Shapes, input: Operand, dim: Any = None, *args: Any, **options: Any) -> Draft:
    if dim is None:
        raise Unknown
    return along()(results, input, dim)


def glu(results: Shapes, input: Operand, dim: Any = -1) -> Draft:
    return along()(results, input, dim)


def of_two(default: int, how: str | None = None) -> Any:
    """A function of two tensors, broadcast and then reduced along one dim."""

    def rule(results: Shapes, x1: Operand, x2: Operand, dim: Any = default, *args: Any, **options: Any) -> Draft:
        dims = max(x1.dims, x2.dims)
        at = axis(dim, dims)
        row = tuple(d for d in counted(dims) if d != at)
        found = Draft(
            {x1: aligned(x1.shape, dims), x2: aligned(x2.shape, dims)},
            [row],
            {at: how} if how else {},
            frozenset() if how else frozenset({at}),
        )
        return found

    return rule


def pairwise_distance(results: Shapes, x1: Operand, x2: Operand, *args: Any, **options: Any) -> Draft:
    dims = max(x1.dims, x2.dims)
    row = counted(dims - 1) if len(results[0]) < dims else (*counted(dims - 1), None)
    rows = {x1: aligned(x1.shape, dims), x2: aligned(x2.shape, dims)}
    return Draft(rows, [row], mixed=frozenset({dims - 1}))


def cross(results: Shapes, input: Operand, other: Operand, dim: Any = None) -> Draft:
    """Without ``dim``, torch takes the first dim of size 3."""
    mixed = frozenset({axis(dim, max(input.dims, other.dims))})
    return pointwise(results, input, other)._replace(mixed=mixed)


def linalg_cross(results: Shapes, input: Operand, other: Operand, *, dim: Any = -1) -> Draft:
    return cross(results, input, other, dim)


# ---- normalization ----


def layer_norm(results: Shapes, input: Operand, normalized_shape: Any, *args: Any, **named: Any) -> Draft:
    """Weight and bias have the dims that are normalized."""
    count = len(normalized_shape)
    every = counted(input.dims)
    weights = [x for x in (*args, *named.values()) if isinstance(x, Operand)]
    rows = dict.fromkeys(weights, every[input.dims - count :])
    return Draft({input: every, **rows}, [every], mixed=frozenset(every[input.dims - count :]))


def group_norm(results: Shapes, input: Operand, num_groups: Any, *args: Any, **named: Any) -> Draft:
    every = counted(input.dims)
    weights = [x for x in (*args, *named.values()) if isinstance(x, Operand)]
    return Draft({input: every, **dict.fromkeys(weights, (1,))}, [every], mixed=frozenset(every[1:]))


def batch_norm(results: Shapes, input: Operand, *args: Any, training: Any = False, **named: Any) -> Draft:
    """Channels are dim 1. In evaluation it is pointwise."""
    every = counted(input.dims)
    given = args[4] if len(args) > 4 else training
    weights = [x for x in (*args, *named.values()) if isinstance(x, Operand)]
    if input.dims < 2 or not isinstance(given, bool):
        raise Unknown
    mixed = frozenset(every) - {1} if given else frozenset[int]()
    return Draft({input: every, **dict.fromkeys(weights, (1,))}, [every], mixed=mixed)


def instance_norm(results: Shapes, input: Operand, *args: Any, use_input_stats: Any = True, **named: Any) -> Draft:
    given = args[4] if len(args) > 4 else use_input_stats
    if not isinstance(given, bool):
        raise Unknown
    found = batch_norm(results, input, *args[:4], training=given, **named)
    return found._replace(mixed=found.mixed - {0})


def local_response_norm(results: Shapes, input: Operand, size: Any, *args: Any, **options: Any) -> Draft:
    return along()(results, input, 1)


REDUCTIONS = {
    "sum": "sum", "nansum": "sum", "mean": "mean", "amax": "max", "amin": "min", "prod": "prod", "any": "any",
    "all": "all", "count_nonzero": "sum",
}  # fmt: skip
MIXED = """
    var std var_mean std_mean nanmean logsumexp special.logsumexp argmax argmin median nanmedian aminmax
"""
SCANS = """
    cumsum cumprod logcumsumexp cummax cummin fft.fftshift fft.ifftshift
"""
F = "nn.functional."

RULES: dict[str, Rule] = {
    **{name: reduction(how) for name, how in REDUCTIONS.items()},
    **dict.fromkeys(MIXED.split(), reduction()),
    **dict.fromkeys(SCANS.split(), along()),
    **dict.fromkeys(("special.softmax", "special.log_softmax"), softmax),
    **dict.fromkeys((F + "softmax", F + "log_softmax", F + "softmin"), softmax),
    **dict.fromkeys((F + "layer_norm", F + "rms_norm"), layer_norm),
    **dict.fromkeys(("norm", "linalg.norm", "linalg.vector_norm"), of_order),
    **dict.fromkeys(("sort", "argsort"), sort),
    "linalg.matrix_norm": matrix_norm,
    "kthvalue": kth,
    "mode": of_last,
    "max": extreme("max"),
    "min": extreme("min"),
    "topk": along(-1, 1),
    "msort": every_dim(0),
    "fliplr": every_dim(1),
    "flipud": every_dim(0),
    "flip": flip,
    "roll": rolled,
    "renorm": renorm,
    "diff": along(-1, 1),
    F + "gumbel_softmax": along(-1, 3),
    F + "normalize": along(1, 1),
    F + "glu": glu,
    F + "cosine_similarity": of_two(1),
    F + "pairwise_distance": pairwise_distance,
    "linalg.vecdot": of_two(-1, "sum"),
    "cross": cross,
    "linalg.cross": linalg_cross,
    F + "group_norm": group_norm,
    F + "batch_norm": batch_norm,
    F + "instance_norm": instance_norm,
    F + "local_response_norm": local_response_norm,
}
