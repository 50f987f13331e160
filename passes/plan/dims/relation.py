"""How the dims of a torch function's results relate to those of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

Shape = tuple[int, ...]
Labels = tuple[int | None, ...]
Row = Sequence["int | None"]
Shapes = Sequence[Shape]
Rule = Callable[..., "Draft"]  # of the shapes of the results, and of arguments with an Operand for each tensor


class Relation(NamedTuple):
    """Labels of the dims of tensors; dims with the same label correspond. They are numbers local to the relation.

    None labels a dim of size 1 that is broadcast, and a dim without a counterpart.

    Attributes:
        operands: a label for each dim of each tensor argument, in the order of
            ``torch.utils._pytree.tree_flatten((args, kwargs))``.
        results: a label for each dim of each tensor result, flattened.
        combine: for labels that only operands have, how to combine the results of parts: "sum", "mean", "max", "min",
            "any", "all" or "prod"; "same" if each part gives the whole results.
        mixed: labels along which an element of a result depends on other positions of the operands, or on its own
            position.

    A label that is not mixed says that results at a position depend on operands at that position, and on all of the
    operands without the label. Which positions come before or after makes no difference.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    combine: Mapping[int, str] = MappingProxyType({})
    mixed: frozenset[int] = frozenset()


class Unknown(Exception):
    """Raised by a rule for arguments about which it knows nothing."""


@dataclass(frozen=True, eq=False)
class Operand:
    """Stands for a tensor among the arguments of a rule."""

    shape: Shape
    boolean: bool = False
    dims: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", len(self.shape))


class Draft(NamedTuple):
    """What a rule returns: a ``Relation`` whose operands are named instead of numbered.

    The labels of an operand that is missing are None.
    """

    operands: Mapping[Operand, Row]
    results: Sequence[Row]
    combine: Mapping[int, str] = MappingProxyType({})
    mixed: frozenset[int] = frozenset()

    def relation(self, operands: Sequence[Operand], results: Sequence[Shape]) -> Relation:
        """Checks the labels against the shapes. A label whose dims have different sizes is mixed, except that dims of
        size 1 are broadcast."""
        rows = [tuple(self.operands.get(x, (None,) * x.dims)) for x in operands]
        shapes = [*(x.shape for x in operands), *results]
        every = [*rows, *(tuple(r) for r in self.results)]
        if len(self.results) != len(results) or any(len(r) != len(s) for r, s in zip(every, shapes, strict=True)):
            raise Unknown
        sizes: dict[int, set[int]] = {}
        for row, shape in zip(every, shapes, strict=True):
            for label, size in zip(row, shape, strict=True):
                if label is not None:
                    sizes.setdefault(label, set()).add(size)
        mixed = self.mixed | {label for label, found in sizes.items() if len(found - {1}) > 1}
        single = {label for label, found in sizes.items() if len(found) > 1} - mixed
        every = [
            tuple(None if label in single and size == 1 else label for label, size in zip(row, shape, strict=True))
            for row, shape in zip(every, shapes, strict=True)
        ]
        combine = {label: how for label, how in self.combine.items() if label not in mixed}
        return Relation(tuple(every[: len(rows)]), tuple(every[len(rows) :]), combine, mixed)


def number(value: Any) -> int:
    """An argument that must be a whole number known at compile time."""
    if type(value) is not int:
        raise Unknown
    return value


def axis(dim: Any, dims: int) -> int:
    """The number of a dim, from the left."""
    found = number(dim) + (dims if number(dim) < 0 else 0)
    if not 0 <= found < dims:
        raise Unknown
    return found


def axes(given: Any, dims: int) -> tuple[int, ...]:
    """The numbers of some dims, from the left. None and () stand for all."""
    if given is None or (isinstance(given, Sequence) and not given):
        return tuple(range(dims))
    return tuple(axis(d, dims) for d in (given if isinstance(given, Sequence) else (given,)))


def broadcast(shapes: Iterable[Shape]) -> Shape:
    """The shape to which all can be broadcast."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise Unknown from None


def counted(dims: int) -> tuple[int, ...]:
    """Labels that are the numbers of the dims."""
    return tuple(range(dims))


def aligned(shape: Shape, dims: int) -> tuple[int, ...]:
    """Labels of an operand that is broadcast to a result whose labels are the numbers of its ``dims`` dims."""
    if len(shape) > dims:
        raise Unknown
    return tuple(range(dims - len(shape), dims))


def unequal(*rows: tuple[Row, Shape]) -> frozenset[int]:
    """The labels whose dims differ in size, where size 1 is not broadcast."""
    sizes: dict[int, set[int]] = {}
    for labels, shape in rows:
        for label, size in zip(labels, shape, strict=True):
            if label is not None:
                sizes.setdefault(label, set()).add(size)
    return frozenset(label for label, found in sizes.items() if len(found) > 1)
