"""The training loop of the language models."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common import mean_over_ranks, progress

LOG_EVERY = 10  # steps between two looks at the loss, each of which costs one all_reduce


def train(
    loss_of: Callable[[int], Tensor],
    optimizer: Optimizer,
    steps: int,
    *,
    tokens: int,
    schedule: LRScheduler | None = None,
) -> tuple[list[float], float | None]:
    """Runs the steps, on all ranks at once: every call of a sharded model is a collective.

    Args:
        loss_of: calls the model on this rank's share of a step's batch.
        tokens: in a step, over all ranks.

    Returns:
        The loss of each step, averaged over ranks, and tokens in a second of all ranks (None after a single step).
    """
    losses: list[float] = []
    pending: list[Tensor] = []
    rate = None
    with progress(total=steps, desc="train", unit="step") as bar:
        for step in range(steps):
            loss = loss_of(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()

            bar.update()
            pending.append(loss.detach())
            if step == 0 or (step + 1) % LOG_EVERY == 0 or step + 1 == steps:
                losses += mean_over_ranks(pending)
                pending.clear()
                if step == 0:  # the first step compiles, so the clock starts after it
                    bar.set_postfix(loss=f"{losses[-1]:.4f}")
                    start = time.perf_counter()
                else:
                    rate = step * tokens / (time.perf_counter() - start)
                    bar.set_postfix({"loss": f"{losses[-1]:.4f}", "tokens/s": f"{rate:,.0f}"})
    return losses, rate
