"""Copies of models on the meta device: as they are, or of a sharded one as it was before."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from shardtrace.model.casts import INPUTS
from shardtrace.model.state import states_in
from shardtrace.record.marks import ATTRIBUTE, CHECKPOINTED, EAGER, PART_ATTRIBUTE, REPEATED

import torch
from torch import nn

MARKS = {ATTRIBUTE, EAGER, INPUTS, PART_ATTRIBUTE, REPEATED, *CHECKPOINTED.values()}


def hollow_copy(model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """A copy with parameters on the meta device. Tied parameters stay tied, buffers are copied. ``memo`` has what else
    stands for an object, by its id, as in :func:`copy.deepcopy`."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, {**empty, **(memo or {})})


def whole_copy(model: nn.Module, *, values: bool = False) -> nn.Module:
    """A copy of a model as it was before ``fsdp``, with whole parameters on the meta device; or with the ``values`` of
    the only rank. Buffers are copied, tied parameters stay tied. The model is not changed."""
    states = states_in(model)
    memo: dict[int, Any] = {id(state): None for state in states}  # the copy has none
    for entry in (e for state in states for e in state.entries):
        full = torch.empty(entry.full_shape, dtype=entry.dtype, device="meta")
        if values:
            full = entry.shard.detach().view(entry.full_shape).clone()
        memo[id(entry.shard)] = nn.Parameter(full, requires_grad=entry.shard.requires_grad)
    whole = copy.deepcopy(model, memo) if values else hollow_copy(model, memo)
    make_plain(whole)
    return whole


def make_plain(model: nn.Module) -> None:
    """Gives modules their own classes again, and takes the marks from them."""
    for module in model.modules():
        if module.__dict__.keys() & {ATTRIBUTE, PART_ATTRIBUTE}:
            module.__class__ = type(module).__base__  # type: ignore[assignment]
        for mark in MARKS & module.__dict__.keys():
            del module.__dict__[mark]
