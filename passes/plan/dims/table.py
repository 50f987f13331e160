"""The table: a rule for each function of torch, by its canonical name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from passes.plan.dims import indexing, losses, pointwise, products, reductions, spatial, views
from passes.plan.dims.relation import Operand, Relation, Rule, Shape, Unknown
from passes.plan.dims.spatial import RESHAPES

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch.utils import _pytree as pytree

TABLE: Mapping[str, Rule] = {
    **pointwise.RULES,
    **views.RULES,
    **indexing.RULES,
    **reductions.RULES,
    **products.RULES,
    **spatial.RULES,
    **losses.RULES,
}

ALIASES = {"spmm": "mm"}  # torch.overrides calls torch.mm so
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
    that reshape: see ``passes.plan.dims.spatial``.
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
