"""Parameters for several optimizers."""

from __future__ import annotations

from collections.abc import Callable

from passes.compat.jit import unjitted
from shardtrace.model.state import link_of

from torch import nn


def split_parameters(
    model: nn.Module, predicate: Callable[[str, nn.Parameter], bool]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters for which ``predicate(name, parameter)`` is true, and all others, each in the order of the model.

    The predicate sees each parameter with its full shape, without values, also if the model is sharded: a rank holds a
    0-dim parameter with shape (1,), and an owned one with no rows on the other ranks. ::

        is_matrix = lambda name, p: p.ndim == 2 and "embed" not in name
        shardtrace.fsdp(model, sharding_strategy={is_matrix: "owner", "*": "zero3"})
        matrices, others = shardtrace.split_parameters(model, is_matrix)
        optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]

    Args:
        model: sharded or not, before or after ``thunder.jit``.
    """
    module = unjitted(model)
    chosen: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        (chosen if predicate(name, _whole(parameter)) else others).append(parameter)
    return chosen, others


def _whole(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the full shape, on the meta device."""
    link = link_of(parameter)
    shape = parameter.shape if link is None else link.entry.full_shape
    return nn.Parameter(parameter.detach().new_empty(shape, device="meta"), requires_grad=parameter.requires_grad)
