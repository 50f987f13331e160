"""Runs the programs of :mod:`passes.kernels.aten` without a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from passes.kernels.aten import Operation, Program, Value, binding_of

import torch
from torch.utils import _pytree as pytree

Tensors = Sequence[torch.Tensor]


def run(program: Program, tensors: Tensors, gradients: Tensors) -> tuple[Tensors, list[torch.Tensor | None]]:
    """The results and the gradients, from what backward may read."""
    values = dict(enumerate(tensors))
    _interpret(program.forward, values)
    outs = [values[n] for n in program.results]
    if program.whole:
        values = {n: values[n] for n in (*range(len(tensors)), *program.results)}
    values |= zip(program.gradients, gradients, strict=True)
    _interpret(program.backward, values)
    return outs, [None if n is None else values[n] for n in program.found]


def _interpret(operations: Sequence[Operation], values: dict[int, torch.Tensor]) -> None:
    def given(x: Any) -> Any:
        return values[x.number] if isinstance(x, Value) else x

    for operator, args, kwargs, results in operations:
        args, kwargs = pytree.tree_map(given, (args, kwargs))
        made = pytree.tree_leaves(binding_of(operator)(*args, **kwargs))
        pairs = zip(pytree.tree_leaves(results), made, strict=True)
        values |= {place.number: value for place, value in pairs if isinstance(place, Value)}
