"""A model with one batch, and the loss of what it returns."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

BATCH = 4  # rows of the whole batch
NOISE = 0.05  # standard deviation of what is added to each parameter


@dataclass
class Case:
    """A model in train mode and the arguments of its call. Tensors of ``BATCH`` rows are divided among the ranks."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None

    def call(self, model: Callable[..., Any], rank: int = 0, world_size: int = 1) -> torch.Tensor:
        """The loss of ``model`` for the rows of one rank."""
        rows = BATCH // world_size

        def share(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            own = value[rows * rank : rows * (rank + 1)] if value.dim() and value.shape[0] == BATCH else value
            return own.clone()

        args, kwargs = tree_map(share, (self.args, dict(self.kwargs)))
        return (self.loss or loss_of)(model(*args, **kwargs))


def in_float64(case: Case) -> Case:
    """The case in double precision."""

    def widen(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value

    args, kwargs = tree_map(widen, (case.args, dict(case.kwargs)))
    return Case(case.model.double(), args, kwargs, case.loss)


def seed(number: int) -> None:
    """Seeds every generator that a model may draw from."""
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def loss_of(output: Any) -> torch.Tensor:
    """The loss that the model returns, or a mean over all of its results.

    The mean of the losses of two half batches is the loss of the whole batch.
    """
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss.mean()
    leaves = tree_leaves(output)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):  # dataclasses that pytree does not know
        leaves = [value for leaf in leaves for value in (vars(leaf).values() if hasattr(leaf, "__dict__") else [leaf])]
    tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if not tensors:
        raise ValueError("no result requires a gradient")
    total = torch.zeros(())
    for number, value in enumerate(tensors):
        value = torch.view_as_real(value) if value.is_complex() else value
        generator = torch.Generator().manual_seed(number)
        weights = torch.randn(value.shape[1:], generator=generator).to(value.dtype)  # the same for every row
        total = total + (value * weights).mean().float() + value.square().mean().float()
    return total


def prepared(case: Case) -> Case:
    """The case without dropout, and with noise in its parameters.

    Zeros, ones and tiny weights of an initialization hide wrong gradients.
    """
    for module in case.model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in name.lower():
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    with torch.no_grad():
        for parameter in case.model.parameters():
            if parameter.is_floating_point() and parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * NOISE)
    case.model.train()
    return case
