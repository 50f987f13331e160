"""Optimizers of sharded models whose state is saved and loaded whole."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shardtrace.checkpoint.optimizer import full_optimizer_state_dict, own_optimizer_state_dict
from shardtrace.model.state import link_of

from torch import nn
from torch.optim import Optimizer


def model_of(optimizer: Optimizer) -> nn.Module | None:
    """The sharded model whose parameters an optimizer updates; None if none of them is sharded."""
    links = (link_of(p) for group in optimizer.param_groups for p in group["params"])
    return next((link.state.model for link in links if link is not None), None)


@contextmanager
def saved_whole(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Lets ``state_dict`` of the optimizers give the state of a single process on the first rank, and ``{}`` on others.

    A collective when entered, which gathers the state to the first rank's host memory.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if (model := model_of(optimizer)) is not None:
                whole = full_optimizer_state_dict(model, optimizer, rank0_only=True, cpu=True)
                hook = functools.partial(_given, whole)
                stack.callback(_torchs(optimizer).register_state_dict_post_hook(hook).remove)
        yield


@contextmanager
def loaded_whole(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Lets ``load_state_dict`` of the optimizers take the state of a single process. Every rank must call it."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            if (model := model_of(optimizer)) is not None:
                hook = functools.partial(_own, model)
                stack.callback(_torchs(optimizer).register_load_state_dict_pre_hook(hook).remove)
        yield


def _given(whole: dict[str, Any], _: Optimizer, __: dict[str, Any]) -> dict[str, Any]:
    return whole


def _own(model: nn.Module, optimizer: Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
    return own_optimizer_state_dict(model, optimizer, whole)


def _torchs(optimizer: Any) -> Optimizer:
    """The optimizer inside a wrapper of accelerate, which hands on its calls."""
    while isinstance(inner := optimizer.__dict__.get("optimizer"), Optimizer):
        optimizer = inner
    return optimizer
