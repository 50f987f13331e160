"""Functions along some dims: reductions, scans, sorting, normalization, losses, and those that mix the last dims.

Functions of images, signals and matrices, and transforms of Fourier, mix the last dims. Those that change the shape
keep the elements in row-major order, which tells where a split dim goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from passes.plan.dims.products import pointwise
from passes.plan.dims.relation import (
    Draft,
    Labels,
    Operand,
    Rule,
    Shape,
    Shapes,
    Unknown,
    aligned,
    axes,
    axis,
    broadcast,
    counted,
)
from passes.plan.dims.views import mixed_last
from passes.plan.plan import Split


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


# ---- losses ----


# the parameters of each; in all of these, every result before a reduction is of one position of the operands
PARAMETERS = {
    "mse_loss": "input target size_average reduce reduction weight",
    "l1_loss": "input target size_average reduce reduction weight",
    "smooth_l1_loss": "input target size_average reduce reduction beta",
    "huber_loss": "input target reduction delta weight",
    "binary_cross_entropy": "input target weight size_average reduce reduction",
    "binary_cross_entropy_with_logits": "input target weight size_average reduce reduction pos_weight",
    "kl_div": "input target size_average reduce reduction log_target",
    "poisson_nll_loss": "input target log_input full size_average eps reduce reduction",
    "soft_margin_loss": "input target size_average reduce reduction",
    "gaussian_nll_loss": "input target var full eps reduction",
    "hinge_embedding_loss": "input target margin size_average reduce reduction",
    "margin_ranking_loss": "input1 input2 target margin size_average reduce reduction",
}
OF_ROWS = {
    "multilabel_soft_margin_loss": "input target weight size_average reduce reduction",
    "triplet_margin_loss": "anchor positive negative margin p eps swap size_average reduce reduction",
}
OF_CLASSES = {
    "nll_loss": "input target weight size_average ignore_index reduce reduction",
    "cross_entropy": "input target weight size_average ignore_index reduce reduction label_smoothing",
}
WEIGHTED = ("mse_loss", "l1_loss", "huber_loss")  # their mean is weighted


def _bound(parameters: str, args: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    names = parameters.split()
    if len(args) > len(names) or not set(named) <= set(names[len(args) :]):
        raise Unknown
    found = dict(zip(names, args, strict=False)) | named
    if found.get("size_average") is not None or found.get("reduce") is not None:
        raise Unknown
    return found


def total(rows: dict[Operand, Labels], terms: Labels, reduction: Any, mixed: frozenset[int] = frozenset()) -> Draft:
    """A loss with a term for each position of ``terms``; they are kept, summed or averaged."""
    if reduction == "none":
        return Draft(rows, [terms], mixed=mixed)
    if reduction not in ("sum", "mean"):
        raise Unknown
    return Draft(rows, [()], {label: reduction for label in terms if label is not None}, mixed)


def of_positions(name: str, parameters: str) -> Any:
    def rule(results: Shapes, *args: Any, **named: Any) -> Draft:
        given = _bound(parameters, args, named)
        tensors = {key: x for key, x in given.items() if isinstance(x, Operand)}
        reduction = given.get("reduction", "mean")
        if reduction == "mean" and name in WEIGHTED and "weight" in tensors:
            raise Unknown
        if name == "gaussian_nll_loss" and "var" in tensors and tensors["var"].dims != tensors["input"].dims:
            raise Unknown
        shape = broadcast(x.shape for x in tensors.values())
        rows: dict[Operand, Labels] = {x: aligned(x.shape, len(shape)) for x in tensors.values()}
        return total(rows, counted(len(shape)), reduction)

    return rule


def of_rows(parameters: str) -> Any:
    """A term for each row, whose elements are mixed."""

    def rule(results: Shapes, *args: Any, **named: Any) -> Draft:
        given = _bound(parameters, args, named)
        tensors = [x for key, x in given.items() if isinstance(x, Operand) and key != "weight"]
        dims = tensors[0].dims
        weight = given.get("weight")
        if (
            dims < 1
            or (isinstance(weight, Operand) and weight.dims > 1)
            or any(x.shape != tensors[0].shape for x in tensors)
        ):
            raise Unknown
        rows: dict[Operand, Labels] = {x: counted(dims) for x in tensors}
        return total(rows, counted(dims - 1), given.get("reduction", "mean"), frozenset({dims - 1}))

    return rule


def of_classes(parameters: str) -> Any:
    """Scores (N, C, ...), with labels (N, ...) or probabilities (N, C, ...). Positions may be ignored or weighted, so
    that a mean is not one of means."""

    def rule(results: Shapes, *args: Any, **named: Any) -> Draft:
        given = _bound(parameters, args, named)
        scores, target = given["input"], given["target"]
        reduction = given.get("reduction", "mean")
        if reduction == "mean" or not scores.dims:
            raise Unknown
        every = counted(scores.dims)
        classes = min(1, scores.dims - 1)
        terms = tuple(d for d in every if d != classes)
        rows: dict[Operand, Labels] = {scores: every, target: every if target.dims == scores.dims else terms}
        return total(rows, terms, reduction, frozenset({classes}))

    return rule


def cosine_embedding_loss(
    results: Shapes,
    input1: Operand,
    input2: Operand,
    target: Operand,
    margin: Any = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Draft:
    if size_average is not None or reduce is not None or input1.dims != 2 or input2.dims != 2 or target.dims != 1:
        raise Unknown
    rows: dict[Operand, Labels] = {input1: (0, 1), input2: (0, 1), target: (0,)}
    return total(rows, (0,), reduction, frozenset({1}))


LOSSES: dict[str, Rule] = {
    **{F + name: of_positions(name, parameters) for name, parameters in PARAMETERS.items()},
    **{F + name: of_rows(parameters) for name, parameters in OF_ROWS.items()},
    **{F + name: of_classes(parameters) for name, parameters in OF_CLASSES.items()},
    F + "cosine_embedding_loss": cosine_embedding_loss,
}


# ---- images, signals and matrices ----


# their first result is their first operand in another shape
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as"})
# and that shape is the second operand's
LIKE_OTHER = frozenset({"view_as", "reshape_as"})


def moved(split: Split, old: Shape, new: Shape) -> Split | None:
    """The split of a value of shape ``old`` when it is reshaped to ``new``, both whole; None if there is none.

    It is found by strides: the sequence has the same distance from the right before and after. If the new shape cuts
    the sequence itself, the parts have no shape.
    """
    if prod(old) != prod(new) or split.length < 2 or split.sections or split.size != old[split.dim] or not prod(old):
        return None
    stride = split.inner * prod(old[split.dim + 1 :])
    for dim, size in enumerate(new):
        step = prod(new[dim + 1 :])
        if stride % step == 0 and size % (stride // step * split.length) == 0:
            inner = stride // step
            return Split(dim, size // (inner * split.length), split.length, inner)
    return None


def interpolated(results: Shapes, input: Operand, *args: Any, **options: Any) -> Draft:
    every = counted(input.dims)
    return Draft({input: every}, [every], mixed=frozenset(every[2:]))


def grid_sample(results: Shapes, input: Operand, grid: Operand, *args: Any, **options: Any) -> Draft:
    """Each position of the grid (N, ..., 2 or 3) looks up a value of each channel in the input (N, C, ...)."""
    space = tuple(range(2, grid.dims))
    rows = {input: (0, 1, *(None,) * (input.dims - 2)), grid: (0, *space, None)}
    return Draft(rows, [(0, 1, *space)])


def shuffled(results: Shapes, input: Operand, groups: Any) -> Draft:
    every = counted(input.dims)
    return Draft({input: every}, [every], mixed=frozenset({1}))


def transformed(*dims: int) -> Any:
    """A transform of Fourier over several dims; all if ``dims`` are none."""

    def rule(results: Shapes, input: Operand, s: Any = None, dim: Any = dims or None, norm: Any = None) -> Draft:
        every = counted(input.dims)
        return Draft({input: every}, [every], mixed=frozenset(axes(dim, input.dims)))

    return rule


POOLS = "avg_pool max_pool lp_pool adaptive_avg_pool adaptive_max_pool"
WITH_INDICES = "max_pool adaptive_max_pool"
ONE = "fft ifft rfft irfft hfft ihfft"
TWO = "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2"
MANY = "fftn ifftn rfftn irfftn hfftn ihfftn"
MATRICES = """
    inverse det logdet slogdet cholesky matrix_exp matrix_power
    linalg.inv linalg.det linalg.slogdet linalg.cholesky linalg.matrix_exp linalg.matrix_power linalg.pinv
    linalg.svdvals linalg.eigvalsh linalg.eigh linalg.qr linalg.svd
"""

SPATIAL: dict[str, Rule] = {
    **{f"{F}{name}{n}d": mixed_last(n) for name in POOLS.split() for n in (1, 2, 3)},
    **{f"{F}{name}{n}d_with_indices": mixed_last(n) for name in WITH_INDICES.split() for n in (1, 2, 3)},
    **{f"fft.{name}": along(-1, 1) for name in ONE.split()},
    **{f"fft.{name}": transformed(-2, -1) for name in TWO.split()},
    **{f"fft.{name}": transformed() for name in MANY.split()},
    **dict.fromkeys(MATRICES.split(), mixed_last(2)),
    F + "interpolate": interpolated,
    F + "upsample": interpolated,
    F + "grid_sample": grid_sample,
    F + "channel_shuffle": shuffled,
    F + "native_channel_shuffle": shuffled,
}
