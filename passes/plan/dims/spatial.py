"""Functions of images and signals, transforms of Fourier, and of matrices: the last dims are mixed."""

from __future__ import annotations

from typing import Any

from passes.plan.dims.reductions import along
from passes.plan.dims.relation import Draft, Operand, Rule, Shapes, axes, counted
from passes.plan.dims.views import mixed_last


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
