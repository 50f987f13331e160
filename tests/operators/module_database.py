"""Cases of torch's database of modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from cases import DOUBLE, Case, Step, double
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

DTYPES = (torch.float32, torch.bfloat16)
COUNT = 8  # of each module and dtype, in training


@cache
def _modules() -> dict[str, Any]:
    return {info.name: info for info in module_db}


def names() -> list[str]:
    return list(_modules())


def cases(name: str) -> Iterator[Case]:
    info = _modules()[name]
    for dtype in DTYPES:
        if dtype not in info.dtypes:
            continue
        for training in (True, False):
            if not training and not info.train_and_eval_differ:
                continue
            known = set()
            for number, given in enumerate(_inputs(info, dtype, 0, training)):
                if given.forward_input is None:
                    continue
                structure = str(pytree.tree_map(_shape, (given.constructor_input.args, given.constructor_input.kwargs)))
                if structure not in known and len(known) < (COUNT if training else 2):
                    known.add(structure)
                    last = str(dtype).removeprefix("torch.")
                    mode = "training" if training else "evaluation"
                    yield _case(f"{name}/{mode}/{last}/{number}", info, dtype, number, training)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def _inputs(info: Any, dtype: torch.dtype, seed: int, training: bool) -> list[Any]:
    torch.default_generator.manual_seed(seed)
    return info.module_inputs_func(info, "cpu", dtype, True, training)


def _case(name: str, info: Any, dtype: torch.dtype, number: int, training: bool) -> Case:
    def build(precise: bool) -> nn.Module:
        given = _inputs(info, dtype, 0, training)[number].constructor_input
        torch.default_generator.manual_seed(0)
        module = info.module_cls(*given.args, **given.kwargs).to(dtype).train(training)
        if not list(module.parameters()):
            module.register_parameter("spare", nn.Parameter(torch.zeros(1)))
        return module.to(DOUBLE[dtype]) if precise else module

    def steps(precise: bool) -> list[Step]:
        found = []
        for seed in (0, 1):
            given = _inputs(info, dtype, seed, training)[number].forward_input
            args, kwargs = given.args, given.kwargs
            if precise:
                args, kwargs = pytree.tree_map(double, (args, kwargs))
            found.append(Step(tuple(args), kwargs))
        return found

    return Case(name, build, steps)
