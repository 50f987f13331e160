"""A sharded model held against the same model in eager PyTorch: everything that a few steps of training show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardtrace

import thunder
import torch
from torch import nn
from torch.utils import _pytree as pytree

Inputs = Callable[[int], tuple[Any, ...]]  # of a step
RATE = 0.01


def check(build: Callable[[], nn.Module], inputs: Inputs, *, steps: int = 2, **options: Any) -> Any:
    """Asserts that results, gradients, buffers and arguments are those of eager PyTorch in each step, in one process.
    Returns the jitted model. ``options`` are those of fsdp."""
    torch.manual_seed(0)
    eager = build()
    torch.manual_seed(0)
    sharded = build()
    cmodel = thunder.jit(shardtrace.fsdp(sharded, **options))
    for step in range(steps):
        torch.manual_seed(step)
        args = inputs(step)
        expected = take_step(eager, eager, args, step)
        found = take_step(sharded, cmodel, args, step, expected["differentiable"])
        for name in ("structure", "differentiable", "frozen"):
            assert found.pop(name) == expected.pop(name)
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=1e-5, msg=lambda text, step=step: f"step {step}: {text}"
        )
    return cmodel


def take_step(
    model: nn.Module, call: Callable[..., Any], given: tuple[Any, ...], step: int, into: list[int] | None = None
) -> dict[str, Any]:
    """One step of SGD with inputs like those given, and what can be seen of it. ``into``: the numbers of the results
    through which gradients flow, by default those that require them. (In a compiled step all of them do.)"""
    args = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), given)
    torch.manual_seed(100 + step)
    out = call(*args)
    leaves, spec = pytree.tree_flatten(out.to_tuple() if hasattr(out, "to_tuple") else out)
    results = [t for t in leaves if isinstance(t, torch.Tensor)]
    into = [i for i, t in enumerate(results) if t.requires_grad] if into is None else into
    loss = sum((t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in map(results.__getitem__, into))
    if isinstance(loss, torch.Tensor):
        loss.backward()
    inputs = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    seen = {
        "results": [t.detach() for t in results],
        "structure": (spec, [v for v in leaves if not isinstance(v, torch.Tensor)]),
        "differentiable": into,
        "gradients": {name: _gradient(p) for name, p in model.named_parameters() if p.requires_grad},
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad and p.grad is None],
        "gradients of inputs": [t.grad for t in inputs if t.grad is not None],
        "inputs": [t.detach() for t in inputs],
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
    }
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= RATE * p.grad
                p.grad = None
    return seen


def _gradient(p: torch.Tensor) -> torch.Tensor:
    """The gradient; zeros if there is none: a compiled step always has one."""
    return torch.zeros_like(p) if p.grad is None else p.grad


class Model(nn.Module):
    """Calls ``function`` with itself and the input. Has a linear layer and a buffer."""

    def __init__(self, function: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(width))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def rows(step: int) -> tuple[torch.Tensor]:
    """Three rows, which want a gradient."""
    return (torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).requires_grad_(),)
