"""Programs of torch's operators on tensors that are laid out otherwise than when they were made.

    python tests/operators/layouts.py [group_norm ...]

A program is made of contiguous tensors. A later step may bring others, and gradients arrive as a loss lays them out:
transposed, with gaps, expanded. Each is held against torch's autograd on the same tensors. Takes a minute.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import shardtrace  # noqa: F401  before thunder: makes it importable on the newest torch
from passes.kernels.aten import Meta, Program, draws, find_program

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

sys.path.append(str(Path(__file__).parents[1]))

from programs import Tensors, run

MOST = 12  # samples of an operator


class Call(NamedTuple):
    """A call of an operator: as a function of its tensors, and these, contiguous."""

    function: Callable[[Tensors], list[torch.Tensor]]
    tensors: Tensors


def calls(operator: Any) -> Iterator[Call]:
    for sample in list(operator.sample_inputs("cpu", torch.float32, requires_grad=True))[:MOST]:
        flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

        def function(tensors: Tensors, flat=flat, spec=spec, places=places) -> list[torch.Tensor]:
            values = list(flat)
            for i, t in zip(places, tensors, strict=True):
                values[i] = t
            first, args, kwargs = pytree.tree_unflatten(values, spec)
            found = pytree.tree_leaves(operator(first, *args, **kwargs))
            return [t for t in found if isinstance(t, torch.Tensor)]

        if all(flat[i].layout == torch.strided for i in places):
            yield Call(function, [_leaf(flat[i].contiguous(), flat[i]) for i in places])


def _leaf(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.detach().clone(memory_format=torch.preserve_format).requires_grad_(like.requires_grad)


def layouts(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of a tensor, laid out in several ways. The values of the last one are others."""
    found = {"contiguous": t}
    if t.dim() > 1:
        found |= {"transposed": t.transpose(0, -1).contiguous().transpose(0, -1), "mT": t.mT.contiguous().mT}
    if t.dim():
        found["gaps"] = torch.stack([t, t], -1)[..., 0]
    return found | {"expanded": torch.ones((), dtype=t.dtype).expand(t.shape)}


def difference(call: Call, program: Program, tensors: Tensors, returned: Sequence[int], layout: str) -> str:
    """What is wrong with gradients of a layout; empty if nothing is."""
    results = call.function(tensors)
    grads = [layouts(torch.randn_like(results[i]).contiguous()) for i in returned]
    given = [found.get(layout, found["contiguous"]) for found in grads]
    wanted = [t for t in tensors if t.requires_grad]
    expected = torch.autograd.grad([results[i] for i in returned], wanted, given, allow_unused=True)
    try:
        with torch.no_grad():
            outs, found = run(program, [t.detach() for t in tensors], given)
    except RuntimeError as error:
        return f"raises {error}".splitlines()[0]
    for mine, torchs in zip([*outs, *found], [*(r.detach() for r in results), *expected], strict=True):
        if (mine is None) != (torchs is None):
            return "None"
        if mine is not None and not torch.allclose(mine, torchs, rtol=1e-4, atol=1e-4, equal_nan=True):
            return f"off by {(mine - torchs).abs().max():.1e}"
    return ""


def check(operator: Any) -> tuple[int, list[str]]:
    """The comparisons that were made for an operator, and what is wrong."""
    made, wrong = 0, []
    for number, call in enumerate(calls(operator)):
        results = call.function(call.tensors)
        returned = [i for i, r in enumerate(results) if r.requires_grad and r.is_floating_point()]
        program = find_program(
            lambda ts, call=call: (call.function(ts), None), list(map(Meta.of, call.tensors)), returned
        )
        if program is None or not returned or any(draws(*o[:3]) for o in program.forward):
            continue
        for layout in layouts(torch.zeros(1, 1)):
            cases = {"gradient": call.tensors}
            if layout not in ("contiguous", "expanded"):
                cases["input"] = [_leaf(layouts(t.detach()).get(layout, t), t) for t in call.tensors]
            for what, tensors in cases.items():
                given = layout if what == "gradient" else "contiguous"
                if text := difference(call, program, tensors, returned, given):
                    wrong.append(f"{operator.name} {number}, {what} {layout}: {text}")
                made += 1
    return made, wrong


def main(names: Sequence[str]) -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    total, wrong, unfit = 0, [], []
    for operator in op_db:
        chosen = not names or any(name in operator.name for name in names)
        if not chosen or torch.float32 not in operator.dtypes or not operator.supports_autograd:
            continue
        try:
            made, found = check(operator)
        except Exception as error:  # torch's own: samples that it cannot differentiate, layouts that it refuses
            unfit.append(f"{operator.name}: {type(error).__name__}")
            continue
        total, wrong = total + made, wrong + found
    print("\n".join(wrong))
    print(f"{total} comparisons, {len(wrong)} wrong; {len(unfit)} operators that torch cannot run so")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
