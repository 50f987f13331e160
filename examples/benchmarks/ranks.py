"""The script of each rank. ``launch.py`` runs ``python ranks.py JOB`` with the variables of torchrun."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import shardtrace  # before thunder: makes it importable on the newest torch
from passes.analysis.liveness import step_liveness

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import slow_link
from contenders import Contender, World, chosen
from job import Job, Sizes
from measure import compiled_traces, seconds_in_passes, timed_steps
from memory import Metered, metered, traffic
from overhead import NAME as HOST_OVERHEAD
from overhead import host_overhead
from race import Entrant, race
from terminal import progress_bar
from training import Silenced, Training, make_batches

WARM_UP = 3  # steps: the second may compile again, and DDP rebuilds its buckets in it
OVERHEAD_STEPS = 20
PATIENCE = timedelta(minutes=5)  # wait for the other rank before an error: a link may stall


def main() -> None:
    job = Job.read(Path(sys.argv[1]))
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a no-op backend leaves denormal numbers that no real step has
    device = device_of(job)
    if job.backend == "fake":
        dist.init_process_group("fake", rank=0, world_size=job.world_size, store=FakeStore())
    else:
        dist.init_process_group(job.backend, timeout=PATIENCE)
    try:
        assert dist.group.WORLD is not None
        results = run(job, World(dist.group.WORLD, device))
        if dist.get_rank() == 0:
            Path(job.result).write_text(json.dumps(results))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def device_of(job: Job) -> torch.device:
    """The device of this rank, which also is the current one."""
    if job.device != "cuda":
        return torch.device(job.device)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def run(job: Job, world: World) -> list[dict[str, Any]]:
    """One result for each rate of the link, or one if there is no limited link."""
    silent = World(dist.new_group(backend="fake"), world.device) if job.backend == "gloo" else None
    field = chosen(job.only, world.device.type, job.sizes.experts, job.world_size)
    first_kernels(world.device)
    gc.freeze()  # garbage is collected before each measurement: not looked for among what was imported
    with progress_bar(iterable=field, desc=f"{job.setting}: build and compile", unit="contender") as bar:
        entrants, failed = [], {}
        for contender in bar:
            bar.set_postfix_str(contender.name)
            try:
                entrants.append(prepare(contender, job, world, silent))
            except Exception as error:
                if job.processes > 1:  # the other ranks would wait for this one
                    raise
                traceback.print_exc()
                failed[contender.name] = f"{type(error).__name__}: {error}"
    if not entrants:
        raise SystemExit(f"no contender could run: {failed}")
    overhead = None
    if silent is not None and re.search(job.only, HOST_OVERHEAD):
        overhead = host_overhead(silent, rounds=job.rounds, steps_per_round=OVERHEAD_STEPS)

    gc.collect()
    gc.freeze()  # the garbage collector skips what compiling left behind while steps are timed
    results = []
    for rate in job.rates or [None]:
        if rate is not None:
            assert job.interface is not None
            dist.barrier()
            slow_link.set_rate(job.interface, rate)
        results.append({"host_overhead": overhead, "failed": failed, **race(job, world, entrants, rate)})
    return results


def first_kernels(device: torch.device) -> None:
    """Makes libraries allocate what they keep (cuBLAS: for each thread). Otherwise the first contender pays for it."""
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    (weight @ weight).sum().backward()


def prepare(contender: Contender, job: Job, world: World, silent: World | None) -> Entrant:
    def build() -> tuple[Training, list[float]]:
        batches = make_batches(job.sizes, dist.get_rank(), world.device)
        training = Training(contender, world, job.sizes, batches)
        return training, timed_steps(training, WARM_UP, world.device)

    (training, seconds), built = metered(build, world.device)
    _, step = metered(training, world.device)
    noop: Training | Silenced | None = None
    ours = contender.name.startswith("shardtrace")
    if silent is not None and ours:
        noop = Silenced(training)
    elif silent is not None and contender.communicates:
        noop = Training(contender, silent, job.sizes, training.batches)
        timed_steps(noop, WARM_UP, world.device)
    facts = {
        "first_step_s": seconds[0],
        "compile_s": max(0.0, seconds[0] - min(seconds[1:])),
        "peak_bytes": built.kept + step.peak,
        "kept_bytes": built.kept,
        **sent(contender, training, step, job.sizes),
    }
    if ours:
        facts["passes_s"] = seconds_in_passes(training.model)
        facts["predicted_peak_bytes"] = predicted_peak(training, built.kept)
    return Entrant(contender, training, noop, facts)


def predicted_peak(training: Training, kept: int) -> int:
    """The peak that the compiled traces predict, in bytes. ``kept`` bytes live between steps; traces know only those
    that are their arguments."""
    tensors = (*training.model.parameters(), *training.batches[0])
    arguments = {(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors}
    forward, backward = compiled_traces(training.model)
    return step_liveness(forward, backward, persistent=kept - sum(storage.nbytes() for storage in arguments)).peak


def sent(contender: Contender, training: Training, step: Metered, sizes: Sizes) -> dict[str, Any]:
    if contender.name.startswith("shardtrace"):
        rows = shardtrace.collectives(training.model)
        return {"collectives": len(rows), "bytes": sum(row.bytes for row in rows)}
    return traffic(step.events, getattr(torch, sizes.dtype))._asdict()


if __name__ == "__main__":
    main()
