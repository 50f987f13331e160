"""A sharded model as it was before: for the planner, which shards it in other ways."""

from __future__ import annotations

import copy
from typing import Any

from shardtrace.blocks.structure import CHECKPOINTED
from shardtrace.model.state import ATTRIBUTE, PART_ATTRIBUTE, states_in
from shardtrace.model.tracing import REPEATED

import torch
from torch import nn

MARKS = {ATTRIBUTE, PART_ATTRIBUTE, REPEATED, *CHECKPOINTED.values()}


def whole_copy(model: nn.Module) -> nn.Module:
    """A copy of a model as it was before ``fsdp``, with whole parameters on the meta device. Buffers are copied, tied
    parameters stay tied. The model is not changed."""
    states = states_in(model)
    memo: dict[int, Any] = {id(state): None for state in states}  # the copy has none
    memo |= {id(p): _empty(p, tuple(p.shape)) for p in model.parameters()}
    memo |= {id(e.shard): _empty(e.shard, e.full_shape) for state in states for e in state.entries}
    whole = copy.deepcopy(model, memo)
    for module in whole.modules():
        if module.__dict__.keys() & {ATTRIBUTE, PART_ATTRIBUTE}:
            module.__class__ = type(module).__base__  # type: ignore[assignment]
        for mark in MARKS & module.__dict__.keys():
            del module.__dict__[mark]
    return whole


def _empty(p: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
