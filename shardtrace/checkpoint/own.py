"""State that only one rank has: its random number generators, and gradients that ``no_sync`` has added up and no step
has reduced yet, which are whole."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from passes.comm.kept_gradients import Kept, KeptGradients
from passes.plan import Axis, Level, ShardedParameter
from shardtrace.checkpoint.files import CheckpointError
from shardtrace.checkpoint.state import ModelState

import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of Python's generator, torch's (for the CPU and a GPU ``device``), and NumPy's if it is imported."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "cpu": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.tensor(keys.tolist(), dtype=torch.int64), *rest)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`rng_state` returned, except for generators that do not exist here."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy().astype("uint32"), *rest))


def sums_of(model: ModelState) -> dict[str, torch.Tensor]:
    """This rank's sums by the names of their parameters; usually none.

    Raises CheckpointError for sums of shards, which are still to be reduced over replicas.
    """
    found = {}
    for name, sums, parameter in _parameters(model):
        if (Axis.REPLICATE, parameter.index) in sums.by_place:
            raise CheckpointError(
                f"the gradient of parameter {name!r} is not reduced over replicas yet: save after the step that does, "
                "outside of no_sync"
            )
        if (kept := sums.by_place.get((parameter.plan.axis, parameter.index))) is not None:
            found[name] = kept.total
    return found


def set_sums(model: ModelState, values: Mapping[str, torch.Tensor]) -> None:
    """Replace the model's sums by saved ones. What rounded reductions of the steps before have lost is forgotten."""
    for state in model.states:
        state.runtime.kept.clear()
        state.runtime.errors.clear()
    for name, sums, parameter in _parameters(model):
        if name in values:
            sums.used.add(Level.WHOLE)
            sums.by_place[parameter.plan.axis, parameter.index] = Kept(parameter, values[name].to(model.device))


def _parameters(model: ModelState) -> Iterator[tuple[str, KeptGradients, ShardedParameter]]:
    names = {id(slot.local): name for name, slot in model.slots.items()}
    for state in model.states:
        for entry in state.entries:
            yield names[id(entry.shard)], state.runtime.kept, state.by_stand_in[id(entry.stand_in)]
