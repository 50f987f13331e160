"""Sizes among the arguments of functions, and what stands for them when results have other shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from passes.plan.dims.relation import Shape

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Resize = Callable[[tuple[Any, ...], dict[str, Any], Shape, Shape], Arguments]


def _shape_after(place: int, *names: str) -> Resize:
    """The shape of the result is argument ``place``, or all arguments from there on, or has one of these ``names``.
    One further argument may follow (``new_full``)."""

    def resize(args: tuple[Any, ...], kwargs: dict[str, Any], operand: Shape, result: Shape) -> Arguments:
        for name in names:
            if name in kwargs:
                return args, {**kwargs, name: result}
        if len(args) <= place:
            return args, kwargs
        listed = isinstance(args[place], Sequence)
        return (*args[:place], result, *(args[place + 1 :] if listed else ())), kwargs

    return resize


def _counts(args: tuple[Any, ...], kwargs: dict[str, Any], operand: Shape, result: Shape) -> Arguments:
    """Tensor.repeat, torch.tile."""
    padded = (1,) * (len(result) - len(operand)) + operand
    counts = tuple(r // o if o else 1 for r, o in zip(result, padded, strict=True))
    for name in ("repeats", "dims"):
        if name in kwargs:
            return args, {**kwargs, name: counts}
    return (args[0], counts), kwargs


def _length(args: tuple[Any, ...], kwargs: dict[str, Any], operand: Shape, result: Shape) -> Arguments:
    """torch.narrow."""
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    if len(args) > 3:
        return (*args[:3], result[dim]), kwargs
    return args, {**kwargs, "length": result[dim]}


def _unflattened(args: tuple[Any, ...], kwargs: dict[str, Any], operand: Shape, result: Shape) -> Arguments:
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    first = dim % len(operand)
    sizes = result[first : first + len(result) - len(operand) + 1]
    if len(args) > 2:
        return (*args[:2], sizes), kwargs
    return args, {**kwargs, "sizes": sizes}


RESIZE: Mapping[str, Resize] = {
    **dict.fromkeys(("view", "reshape"), _shape_after(1, "shape", "size")),
    **dict.fromkeys(("expand", "broadcast_to"), _shape_after(1, "size", "shape")),
    **dict.fromkeys(("zeros", "ones", "empty", "full"), _shape_after(0, "size", "shape")),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), _shape_after(1, "size")),
    **dict.fromkeys(("repeat", "tile"), _counts),
    "prims.broadcast_in_dim": _shape_after(1, "shape"),
    "narrow": _length,
    "unflatten": _unflattened,
}


def resized(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], operand: Shape, result: Shape
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a function gives a result of this shape. ``operand`` is the shape of its first tensor,
    whose dims of size 1 are whole."""
    if name not in RESIZE:
        return tuple(args), dict(kwargs)
    return RESIZE[name](tuple(args), dict(kwargs), operand, result)
