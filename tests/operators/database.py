"""Cases of torch's operator database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.testing._internal.common_methods_invocations as database
from cases import Case, Function, Sample, applied

DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
MOST = 200  # samples of an operator that are looked at
COUNTS = {"function": 6, "method": 2, "operator": 2, "in place": 4, "in place on a view": 2, "in place operator": 2}


def _plainly(function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@cache
def operators() -> dict[str, Any]:
    database.wrapper_set_seed = _plainly  # the database sets the seed inside of random functions; the judge does
    return {op.formatted_name: op for op in database.op_db}


def names() -> list[str]:
    return list(operators())


def variants(op: Any) -> dict[str, Function]:
    """The ways in which an operator can be called."""
    found = {"function": op.get_op(), "method": op.get_method(), "operator": op.get_operator()}
    if (in_place := op.get_inplace()) is not None:
        found["in place"] = _in_place(in_place)
        found["in place on a view"] = _on_view(in_place)
    if (in_place := op.get_inplace_operator()) is not None:
        found["in place operator"] = _in_place(in_place)
    for alias in op.aliases:
        found[f"alias {alias.name}"] = alias.op
    return {name: function for name, function in found.items() if function is not None}


def _in_place(function: Function) -> Function:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        y = x.clone()
        function(y, *args, **kwargs)
        return y

    return call


def _on_view(function: Function) -> Function:
    """Writes into the first of two rows. The rest of the memory is a result as well."""

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        rows = torch.stack((x, x))
        first = rows[0]
        function(first, *args, **kwargs)
        return rows * 2, first

    return call


def cases(name: str, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Case]:
    op = operators()[name]
    for dtype in _dtypes(op, dtypes):
        chosen = list(_samples(op, dtype))
        for variant, function in variants(op).items():
            count = COUNTS.get(variant, 1)
            for number, samples in chosen[: count if dtype == torch.float32 else (count + 1) // 2]:
                last = str(dtype).removeprefix("torch.")
                yield applied(f"{name}/{variant}/{last}/{number}", function, samples, owns=number % 2 == 0)


def _dtypes(op: Any, wanted: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Integers and bools only for what takes nothing else."""
    found = [d for d in wanted if d in op.dtypes and (d.is_floating_point or d.is_complex)]
    return found or [d for d in wanted if d in op.dtypes][:1]


def _samples(op: Any, dtype: torch.dtype) -> Iterator[tuple[int, list[Sample]]]:
    """Samples of different structure, each twice with other values."""
    differentiable = (
        op.supports_autograd and dtype in op.backward_dtypes and (dtype.is_floating_point or dtype.is_complex)
    )
    twice = []
    for seed in (0, 1):
        torch.default_generator.manual_seed(seed)
        samples = islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), MOST)
        twice.append([_sample(op, s) for s in samples])
    known = set()
    for number, pair in enumerate(zip(*twice, strict=False)):
        structure = pair[0].structure()
        if structure in known or pair[1].structure() != structure:
            continue
        known.add(structure)
        yield number, list(pair)


def _sample(op: Any, given: Any) -> Sample:
    holds_nothing = op.name.startswith(("empty", "new_empty"))  # memory as it is
    process = torch.zeros_like if holds_nothing else given.output_process_fn_grad
    return Sample((given.input, *given.args), dict(given.kwargs), process)
