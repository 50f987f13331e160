"""Functions that keep the elements in row-major order: where a split dim goes when a shape changes."""

from __future__ import annotations

from math import prod

from passes.plan.dims.relation import Shape
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
