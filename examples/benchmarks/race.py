"""The race: all contenders run in turn, and their measurements become the rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import shardtrace  # before thunder: makes it importable on the newest torch

import thunder
import torch
import torch.distributed as dist

from contenders import Contender, World
from job import Job
from measure import Timed, interleaved, own_lines, quartiles, raw_exchange, slowest
from terminal import progress_bar
from training import Silenced, Training

LINK_CHECK = 64 << 20  # bytes


@dataclass
class Entrant:
    """A contender that was built, compiled and measured once. ``silent`` is the same one on a no-op backend."""

    contender: Contender
    training: Training
    silent: Training | Silenced | None
    facts: dict[str, Any]


def race(job: Job, world: World, entrants: list[Entrant], rate: float | None) -> dict[str, Any]:
    steps: dict[str, Any] = {}
    for e in entrants:
        steps[e.contender.name] = e.training
        if e.silent is not None:
            steps[f"{e.contender.name} | no-op"] = e.silent
    moved = {}
    if job.backend == "gloo" and world.group.size() > 1:
        for e in entrants:
            if e.contender.name in ("shardtrace zero2", "shardtrace zero3"):
                sizes = [c.bytes for c in shardtrace.collectives(e.training.model)]
                moved[e.contender.name] = sum(sizes)
                steps[f"{e.contender.name} | raw communication"] = raw_exchange(sizes, world.group)
                steps[f"{e.contender.name} | own communication"] = own_lines(e.training.model, world.device)
        steps["link"] = raw_exchange([LINK_CHECK], world.group)

    total = job.rounds * len(steps)
    with progress_bar(total=total, desc=f"{job.name(rate)}: rounds", unit="turn") as bar:

        def advance(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        timed = interleaved(
            steps,
            rounds=job.rounds,
            steps_per_round=job.steps_per_round,
            barrier=dist.barrier,
            device=world.device,
            interface=job.interface,
            advance=advance,
        )
    timed = timed if job.backend == "fake" else slowest(timed, world.group)
    return {
        "setting": job.name(rate),
        "rate_gbit": rate,
        "world_size": world.group.size(),
        "sizes": job.as_json()["sizes"],
        "versions": {"torch": torch.__version__, "thunder": thunder.__version__},
        "rounds": job.rounds,
        "steps_per_round": job.steps_per_round,
        **link(timed, moved, world.group.size(), rate),
        "contenders": {e.contender.name: row(e, timed, job) for e in entrants},
    }


def row(entrant: Entrant, timed: dict[str, Timed], job: Job) -> dict[str, Any]:
    name, peer = entrant.contender.name, entrant.contender.peer
    seconds, wire = timed[name].seconds, timed[name].wire_bytes
    low, middle, high = quartiles(seconds)
    noop = timed.get(f"{name} | no-op")
    return {
        **entrant.facts,
        "step_s": {"q1": low, "median": middle, "q3": high},
        "seconds": seconds,
        "processor_s": median(timed[name].processor),
        "tokens_per_s": job.sizes.batch * job.sizes.seq * job.processes / middle,
        "peer": peer,
        # median of the ratios of each round: what slows a round down slows both
        "speed_of_peer": ratio(timed, peer, name) if peer in timed else None,
        "wire_bytes": median(wire) if wire else None,
        "exposed_s": median(a - b for a, b in zip(seconds, noop.seconds, strict=True)) if noop else None,
    }


def ratio(timed: dict[str, Timed], slow: str | None, fast: str) -> float:
    assert slow is not None
    return median(a / b for a, b in zip(timed[slow].seconds, timed[fast].seconds, strict=True))


def link(timed: dict[str, Timed], moved: dict[str, int], world_size: int, rate: float | None) -> dict[str, Any]:
    """The measured rate of the link, and for each strategy the time its bytes need without compute."""
    if "link" not in timed:
        return {"measured_gbit": None, "communication": {}}
    share = (world_size - 1) / world_size
    return {
        "measured_gbit": LINK_CHECK * share * 8 / 1e9 / median(timed["link"].seconds),
        "communication": {
            name: {
                "bytes": total,
                "formula_s": total * share * 8 / 1e9 / rate if rate else None,
                "raw_s": median(timed[f"{name} | raw communication"].seconds),
                "own_s": median(timed[f"{name} | own communication"].seconds),
            }
            for name, total in moved.items()
        },
    }
