"""Sizes among the arguments of functions, and what stands for them when results have other shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from passes.plan.dims.indexing import is_full, of_each_dim
from passes.plan.dims.relation import Shape

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Change(NamedTuple):
    """The shapes of the first operand and of the result, whole, and of the result as it shall be."""

    operand: Shape
    whole: Shape
    result: Shape


Resize = Callable[[tuple[Any, ...], dict[str, Any], Change], Arguments]


def _shape_after(place: int, *names: str) -> Resize:
    """The shape of the result is argument ``place``, or all arguments from there on, or has one of these ``names``.
    One further argument may follow (``new_full``)."""

    def resize(args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> Arguments:
        for name in names:
            if name in kwargs:
                return args, {**kwargs, name: change.result}
        if len(args) <= place:
            return args, kwargs
        listed = isinstance(args[place], Sequence)
        return (*args[:place], change.result, *(args[place + 1 :] if listed else ())), kwargs

    return resize


def _counts(args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> Arguments:
    """Tensor.repeat, torch.tile. Only repeated dims of size 1 can have another size."""
    operand = (1,) * (len(change.whole) - len(change.operand)) + change.operand
    counts = tuple(
        size if old == 1 else whole // old if old else 1
        for size, old, whole in zip(change.result, operand, change.whole, strict=True)
    )
    for name in ("repeats", "dims"):
        if name in kwargs:
            return args, {**kwargs, name: counts}
    return (args[0], counts), kwargs


def _range(args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> Arguments:
    """torch.narrow. All of a dim begins at 0, also of a shorter one."""
    given = {**dict(zip(("dim", "start", "length"), args[1:], strict=False)), **kwargs}
    if given["length"] == change.operand[given["dim"]]:
        given |= {"start": 0, "length": change.result[given["dim"]]}
    return args[:1], given


def _slices(args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> Arguments:
    """An index. A slice that takes all of a dim, such as ``[-8:]`` of 8, takes all of a shorter one."""
    items, dim = of_each_dim(args[1], len(change.operand)), 0
    for i, item in enumerate(items):
        if isinstance(item, slice) and is_full(item, change.operand[dim]):
            items[i] = slice(None)
        dim += item is not None
    return (args[0], tuple(items), *args[2:]), kwargs


def _unflattened(args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> Arguments:
    first = (args[1] if len(args) > 1 else kwargs["dim"]) % len(change.operand)
    sizes = change.result[first : first + len(change.result) - len(change.operand) + 1]
    return ((*args[:2], sizes), kwargs) if len(args) > 2 else (args, {**kwargs, "sizes": sizes})


RESIZE: Mapping[str, Resize] = {
    **dict.fromkeys(("view", "reshape"), _shape_after(1, "shape", "size")),
    **dict.fromkeys(("expand", "broadcast_to"), _shape_after(1, "size", "shape")),
    **dict.fromkeys(("zeros", "ones", "empty", "full"), _shape_after(0, "size", "shape")),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), _shape_after(1, "size")),
    **dict.fromkeys(("repeat", "tile"), _counts),
    "prims.broadcast_in_dim": _shape_after(1, "shape"),
    **dict.fromkeys(("getitem", "setitem"), _slices),
    "narrow": _range,
    "unflatten": _unflattened,
}


def resized(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], change: Change
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a function gives a result of another shape."""
    if name not in RESIZE:
        return tuple(args), dict(kwargs)
    return RESIZE[name](tuple(args), dict(kwargs), change)
