"""Host time of a step beyond plain ``thunder.jit``, if computing and sending take no time."""

from __future__ import annotations

from functools import partial
from statistics import median

import thunder
import torch

from contenders import Contender, World, use_shardtrace, use_single
from job import Sizes
from measure import interleaved
from training import Training, make_batches, make_model

NAME = "host overhead"
WARM_UP = 33  # steps: those after 2, 4, 8, 16 and 32 record the forward again, to compare, and the next one after 64


def host_overhead(world: World, *, rounds: int, steps_per_round: int) -> dict[str, float]:
    """Seconds of a step in a model of 100 tiny parameters.

    ``world`` has a group whose collectives do nothing. Keys: "plain", and each strategy with the seconds it adds.
    """
    sizes = Sizes(layers=8, width=8, heads=2, batch=1, seq=8)
    assert len(list(make_model(sizes, world.device).parameters())) == 100
    batches = make_batches(sizes, 0, world.device)
    plain = Contender("plain", partial(use_single, how=thunder.jit))
    ours = [Contender(strategy, partial(use_shardtrace, strategy=strategy)) for strategy in ("zero2", "zero3")]
    steps = {c.name: Training(c, world, sizes, batches) for c in (plain, *ours)}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    timed = interleaved(
        steps, rounds=rounds, steps_per_round=steps_per_round, barrier=lambda: None, device=world.device
    )
    seconds = {name: torch.tensor(t.seconds) for name, t in timed.items()}
    added = {c.name: median((seconds[c.name] - seconds["plain"]).tolist()) for c in ours}
    return {"plain": median(seconds["plain"].tolist()), **added}
