"""The training loop of the language models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common import mean_over_ranks, progress

LOG_EVERY = 10  # steps between two reports of the loss, each of which costs one all_reduce


def train(
    loss_of: Callable[[int], Tensor],
    optimizers: Sequence[Optimizer],
    steps: int,
    *,
    tokens: int,
    schedules: Sequence[LRScheduler] = (),
    start: int = 0,
    losses: Sequence[float] = (),
    save: Callable[[int, list[float]], object] | None = None,
    save_every: int = 1,
) -> tuple[list[float], float | None]:
    """Runs the training steps, on all ranks in step, because every call of a sharded model is a collective.

    Args:
        loss_of: computes the loss of a step on this rank's share of the batch.
        tokens: tokens of a step, over all ranks.
        start: steps done before a restart, whose losses are ``losses``.
        save: called after every ``save_every`` steps with the number of steps done and their losses.

    Returns:
        The loss of each step from the first, averaged over ranks, and the tokens per second of all ranks (None after
        fewer than two steps).
    """
    losses = list(losses)
    pending: list[Tensor] = []
    rate = None
    with progress(total=steps, initial=start, desc="train", unit="step") as bar:
        for step in range(start, steps):
            loss = loss_of(step)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()

            bar.update()
            pending.append(loss.detach())
            saves = save is not None and (step + 1) % save_every == 0
            if saves or step == start or (step + 1) % LOG_EVERY == 0 or step + 1 == steps:
                losses += mean_over_ranks(pending)
                pending.clear()
                if step == start:  # the first step compiles, so the clock starts after it
                    bar.set_postfix(loss=f"{losses[-1]:.4f}")
                    began = time.perf_counter()
                else:
                    rate = (step - start) * tokens / (time.perf_counter() - began)
                    bar.set_postfix({"loss": f"{losses[-1]:.4f}", "tokens/s": f"{rate:,.0f}"})
            if save is not None and saves:
                save(step + 1, losses)
    return losses, rate
