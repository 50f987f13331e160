"""Gradients that ``no_sync`` has added up and no step has reduced yet. They are whole, and each rank has its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from passes.comm.kept_gradients import KeptGradients
from passes.plan import ShardedParameter
from shardtrace.checkpoint.state import ModelState

import torch


def sums_of(model: ModelState) -> dict[str, torch.Tensor]:
    """This rank's sums by the names of their parameters; usually none."""
    return {
        name: sums.by_parameter[parameter]
        for name, sums, parameter in _parameters(model)
        if parameter in sums.by_parameter
    }


def set_sums(model: ModelState, values: Mapping[str, torch.Tensor]) -> None:
    """Replace the model's sums by saved ones. What rounded reductions of the steps before have lost is forgotten."""
    for state in model.states:
        state.runtime.kept.clear()
        state.runtime.errors.clear()
    for name, sums, parameter in _parameters(model):
        if name in values:
            sums.by_parameter[parameter] = values[name].to(model.device)
            sums.used, sums.reducing = True, False


def _parameters(model: ModelState) -> Iterator[tuple[str, KeptGradients, ShardedParameter]]:
    names = {id(slot.local): name for name, slot in model.slots.items()}
    for state in model.states:
        for entry in state.entries:
            yield names[id(entry.shard)], state.runtime.kept, state.by_stand_in[id(entry.stand_in)]
