"""The state of a rank's random number generators."""

from __future__ import annotations

import random
import sys
from typing import Any

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
