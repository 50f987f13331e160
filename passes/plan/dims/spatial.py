"""Functions of images, signals and matrices, and transforms of Fourier, mix the last dims. Those that change the shape
keep the elements in row-major order, which tells where a split dim goes."""

from __future__ import annotations

from math import prod
from typing import Any

from passes.plan.dims.reductions import along
from passes.plan.dims.relation import Draft, Operand, Rule, Shape, Shapes, axes, counted
from passes.plan.dims.views import mixed_last
from passes.plan.sequence import Split

# their first result is their first operand in another shape
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as"})
# and that shape is the second operand's
LIKE_OTHER = frozenset({"view_as", "reshape_as"})


def moved(split: Split, old: Shape, new: Shape) -> Split | None:
    """The split of a value of shape ``old`` when it is reshaped to ``new``, both whole; None if there is none.

    It is found by strides: the sequence has the same distance from the right before and after. If the new shape cuts
    the sequence itself, the parts have no shape.
    """
    if prod(old) != prod(new) or split.length < 2 or split.size != old[split.dim] or not prod(old):
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


F = "nn.functional."
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

RULES: dict[str, Rule] = {
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
