"""The table: a rule for each function of torch, by its canonical name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from passes.plan.dims import products, reductions, views
from passes.plan.dims.reductions import RESHAPES
from passes.plan.dims.relation import Operand, Relation, Rule, Shape, Unknown
from passes.plan.dims.views import is_full, of_each_dim

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch.utils import _pytree as pytree

# ---- sizes among arguments ----


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


def _slices(args: tuple[Any, ...], kwargs: dict[str, Any], change: Change, *, taken: bool = False) -> Arguments:
    """An index. A slice that takes all of a dim, such as ``[-8:]`` of 8, takes all of a shorter one. What is ``taken``
    may be some blocks of a dim: then they are those of shorter ones."""
    items, dim, to = of_each_dim(args[1], len(change.operand)), 0, 0  # of the operand, and of the result
    taken = taken and all(item is None or type(item) in (int, slice) for item in items)
    for i, item in enumerate(items):
        if isinstance(item, slice):
            start, stop, step = item.indices(change.operand[dim])
            if is_full(item, change.operand[dim]):
                items[i] = slice(None)
            elif taken and step == 1 and change.whole[to] != change.result[to]:
                items[i] = slice(*(n * change.result[to] // change.whole[to] for n in (start, stop)))
        dim += item is not None
        to += type(item) is not int
    return (args[0], tuple(items), *args[2:]), kwargs


def _cut(args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> Arguments:
    """torch.split. Pieces of a dim that is split itself are split alike."""
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(change.operand)
    whole, local = change.whole[dim], change.result[dim]
    if whole == local:
        return args, kwargs

    def of_part(sizes: Any) -> Any:
        return sizes * local // whole if type(sizes) is int else [size * local // whole for size in sizes]

    for name in ("split_size_or_sections", "split_size"):
        if name in kwargs:
            return args, {**kwargs, name: of_part(kwargs[name])}
    return (args[0], of_part(args[1]), *args[2:]), kwargs


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
    "getitem": partial(_slices, taken=True),
    "setitem": _slices,
    "narrow": _range,
    "split": _cut,
    "unflatten": _unflattened,
}


def resized(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], change: Change
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a function gives a result of another shape."""
    if name not in RESIZE:
        return tuple(args), dict(kwargs)
    return RESIZE[name](tuple(args), dict(kwargs), change)


# ---- the table ----


TABLE: Mapping[str, Rule] = {
    **products.POINTWISE,
    **views.RULES,
    **views.PICKING,
    **reductions.RULES,
    **products.RULES,
    **reductions.SPATIAL,
    **reductions.LOSSES,
}

# torch.overrides calls torch.mm so; transformers has a function of its own for dtypes in which torch has none
ALIASES = {"spmm": "mm", "transformers.grouped_mm_fallback": products.GROUPED}
REFLECTED_AND = "rand"  # torch.rand has the name of Tensor.__rand__ without its underscores
PLAIN = ("tanh", "sigmoid")  # functions of torch.nn.functional that are torch's


def canonical(name: str) -> str:
    """The name in the table of a function that ``torch.overrides.resolve_name`` calls ``name``.

    A function and the method of that name share one, a dunder has the name between its underscores, and a function that
    writes into its argument has that of the one that does not. Functions that torch.nn.functional has as well are
    called as there, except ``embedding``, whose arguments have another order.
    """
    name = name.removeprefix("torch.").removeprefix("functional.").removeprefix("Tensor.").removesuffix(".__get__")
    room, dot, last = name.rpartition(".")
    if last.startswith("__") and last.endswith("__"):
        last = last.strip("_")
        last = "and" if last == REFLECTED_AND else last
    if last.endswith("_") and room + dot + last not in TABLE:
        last = last[:-1]
    name = last if room == "nn.functional" and last in PLAIN else room + dot + last
    name = ALIASES.get(name, name)
    functional = f"nn.functional.{name}"
    return functional if name not in TABLE and functional in TABLE else name


def known(name: str) -> bool:
    return name in TABLE or name in RESHAPES


VIEWS = RESHAPES | {  # and rows, of the first operand
    *("transpose", "permute", "t", "T", "mT", "squeeze", "unsqueeze", "select", "narrow", "getitem", "index_select"),
}
LINEAR_IN_ONE = frozenset({"mul", "matmul", "mm", "bmm", products.GROUPED})
LINEAR_IN_FIRST = VIEWS | {"sum", "neg", "to", "float", "bfloat16", "half", "double", "type_as"}
LINEAR_IN_ALL = frozenset({"add", "sub"})


def is_linear(name: str, operands: int, given: Collection[int]) -> bool:
    """Whether a function of so many ``operands`` is linear in those whose numbers are ``given``, together, while the
    others are fixed: applied to parts of sums, it gives parts of the sum of its results. Casts are, except for
    rounding."""
    if name in LINEAR_IN_ALL:
        return len(given) == operands == 2
    return (name in LINEAR_IN_ONE and len(given) == 1) or (name in LINEAR_IN_FIRST and set(given) == {0})


def is_tensor(value: Any) -> bool:
    return isinstance(value, TensorProxy | torch.Tensor)


def leaves(values: Any) -> list[Any]:
    found: list[Any] = pytree.tree_leaves(values, is_leaf=is_tensor)
    return found


def tensors(values: Any) -> tuple[Any, ...]:
    """The tensors or proxies of tensors among arguments or results, in the order of ``tree_flatten``."""
    return tuple(t for t in leaves(values) if is_tensor(t))


def relation(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Shape]) -> Relation | None:
    """How the dims of the results, which have these shapes, relate to those of the tensors among the arguments.

    None: the function is not in the table, or nothing is known with these arguments. The table does not have functions
    that reshape: see ``passes.plan.dims.reductions``.
    """
    rule = TABLE.get(name)
    if rule is None or kwargs.get("out") is not None or not results:
        return None
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    operands: list[Operand] = []

    def operand(value: Any) -> Any:
        if not is_tensor(value):
            return value
        operands.append(Operand(tuple(value.shape), _is_mask(value)))
        return operands[-1]

    args, kwargs = pytree.tree_map(operand, (tuple(args), kwargs), is_leaf=is_tensor)
    try:
        _check(rule, results, args, kwargs)
        return rule(results, *args, **kwargs).relation(operands, results)
    except Unknown:
        return None


def _is_mask(value: Any) -> bool:
    dtype = value.dtype if isinstance(value, torch.Tensor) else dtypes.to_torch_dtype(value.dtype)
    return dtype in (torch.bool, torch.uint8)


@cache
def _signature(rule: Rule) -> inspect.Signature:
    return inspect.signature(rule)


def _check(rule: Rule, results: Sequence[Shape], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises Unknown if the rule does not take these arguments, or wants a tensor for one that is none."""
    signature = _signature(rule)
    try:
        bound = signature.bind(results, *args, **kwargs)
    except TypeError:
        raise Unknown from None
    for name, value in bound.arguments.items():
        wanted = signature.parameters[name].annotation
        if wanted == "Operand" and not isinstance(value, Operand):
            raise Unknown
        if wanted == "Operand | None" and not (value is None or isinstance(value, Operand)):
            raise Unknown
