"""Predicted and measured steps side by side: seconds and peak memory of many plans, and what ``shardtrace.plan`` chose.

    python examples/benchmarks/predictions.py                             # two ranks of this machine, loopback
    python examples/benchmarks/predictions.py slow-link --rates 1         # as root, on Linux
    python examples/benchmarks/predictions.py --ranks 4 --rounds 1        # for memory: four ranks share two cores

The ranks are calibrated first. Then the planner chooses, knowing only these rates, and all plans are timed in
interleaved rounds. Peaks are those of the allocator's own records.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "gpt2"))

import shardtrace  # before thunder: makes it importable on the newest torch
from passes.plan import CostModel
from passes.plan.cost import hardware
from shardtrace.options.policies import grouped
from shardtrace.planner.calibrate import calibrate
from shardtrace.planner.compose import ComposedStep
from shardtrace.planner.estimate import Estimate, Setting, estimate, optimizer_cost
from shardtrace.planner.training_plan import TrainingPlan

import thunder
import torch
import torch.distributed as dist
from torch import nn

import slow_link
from contenders import Contender, World
from job import Job, Sizes
from launch import RankFailed, run_ranks
from measure import compiled_traces, interleaved, quartiles, slowest
from memory import metered
from training import Training, make_batches, make_model

SIZES = {
    "deep": Sizes(layers=6, width=192, heads=3, batch=4, seq=128, optimizer="adamw"),
    "wide": Sizes(layers=2, width=512, heads=8, batch=4, seq=128, optimizer="adamw"),
    "long": Sizes(layers=3, width=256, heads=4, batch=2, seq=384, optimizer="adamw"),
}
ROUNDED = {"gather_dtype": "int8", "reduce_wire": "int8"}
WARM_UP = 3
PLANNED = "planned"
BUDGET = "zero3, 0.85 of its peak"


def plans(layers: int) -> dict[str, dict[str, Any]]:
    """Options of ``fsdp`` by name."""
    first = {f"h.{i}": "full" for i in range(layers // 2)}
    kept = {f"h.{i}.*": "zero2" for i in range(layers // 2, layers)}
    found: dict[str, dict[str, Any]] = {}
    for strategy in ("ddp", "zero2", "zero3"):
        found[strategy] = {"sharding_strategy": strategy}
        for what in ("cheap", "full"):
            found[f"{strategy}, {what}"] = {"sharding_strategy": strategy, "activation_checkpointing": what}
    found["zero3, prefetch 3"] = {"sharding_strategy": "zero3", "prefetch": 3}
    found["zero3, half full"] = {"sharding_strategy": "zero3", "activation_checkpointing": first}
    found["half zero2"] = {"sharding_strategy": {**kept, "*": "zero3"}}
    found["half zero2, half full"] = {**found["half zero2"], "activation_checkpointing": first}
    found["fsdp's defaults"] = {"bucketing_strategy": "auto"}
    found["zero2, layers"] = {"sharding_strategy": "zero2", "bucketing_strategy": "layer"}
    found["zero3, layers"] = {"sharding_strategy": "zero3", "bucketing_strategy": "layer"}
    found["zero3, loss in 4 chunks"] = {"sharding_strategy": "zero3", "chunk_loss": 4}
    for what in ("host", "full+host"):
        found[f"zero3, {what}"] = {"sharding_strategy": "zero3", "activation_checkpointing": what}
    found[BUDGET] = {"sharding_strategy": "zero3", "activation_checkpointing": None}
    return found


def rounded_plans() -> dict[str, dict[str, Any]]:
    """Options of ``fsdp`` by name: strategies that round what they send, beside exact ones."""
    found: dict[str, dict[str, Any]] = {}
    for strategy in ("zero2", "zero3"):
        exact = found[strategy] = {"sharding_strategy": strategy}
        found[f"{strategy}, int8 gathers"] = {**exact, "gather_dtype": "int8"}
        found[f"{strategy}, fp8 gathers"] = {**exact, "gather_dtype": "fp8"}
        found[f"{strategy}, int8 reductions"] = {**exact, "reduce_wire": "int8"}
        found[f"{strategy}, int4 reductions"] = {**exact, "reduce_wire": "int4"}
        found[f"{strategy}, int8 both"] = {**exact, **ROUNDED}
    found["ddp"] = {"sharding_strategy": "ddp"}
    found["ddp, int8 reductions"] = {"sharding_strategy": "ddp", "reduce_wire": "int8"}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", nargs="?", choices=["loopback", "slow-link"], default="loopback")
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="of the slow link, in Gbit/s")
    parser.add_argument("--wires", action="store_true", help="plans that round what they send, in place of the others")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results/predictions.json"))
    options = parser.parse_args(arguments)
    rows = []
    for model in options.models:
        for rate in options.rates if options.setting == "slow-link" else [None]:
            name = f"{model}, {options.ranks} ranks, {f'{rate:g} Gbit/s' if rate else 'loopback'}"
            found = measure(name, SIZES[model], options.ranks, options.rounds, rate, wires=options.wires)
            print(report(name, found), flush=True)
            rows += [{"setting": name, **row} for row in found]
    print(summary(rows))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def measure(
    name: str, sizes: Sizes, ranks: int, rounds: int, rate: float | None, *, wires: bool
) -> list[dict[str, Any]]:
    """A row for each plan, by name: seconds and bytes, measured and predicted."""
    job = Job(name, "gloo", ranks, "cpu", sizes, rounds, 2, "", rates=(rate,) if rate else ())
    with slow_link.two_namespaces() if rate else nullcontext(()) as ends:
        (rates,) = run_ranks(job, ends, Path(__file__))
        cost = CostModel.from_dict(rates)
        chosen = shardtrace.plan(
            make_model(sizes, torch.device("cpu")),
            make_batches(sizes, 0, torch.device("cpu"))[0],
            world_size=ranks,
            device="cpu",
            cost_model=cost,
        )
        given = {"cost": rates, "planned": chosen.to_json(), "wires": wires}
        return run_ranks(replace(job, given=given), ends, Path(__file__))


# ---- a rank ----


def rank(job: Job) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        assert dist.group.WORLD is not None
        if job.rates and job.interface is not None:
            slow_link.set_rate(job.interface, job.rates[0])
        world = World(dist.group.WORLD, torch.device("cpu"))
        if job.given:
            results = run(job, world, **job.given)
        else:
            results = [asdict(calibrate(world.group, world.device, save=False))]
        if dist.get_rank() == 0:
            Path(job.result).write_text(json.dumps(results))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run(job: Job, world: World, cost: Mapping[str, Any], planned: str, wires: bool) -> list[dict[str, Any]]:
    setting = Setting(CostModel.from_dict(cost), hardware("cpu"), optimizer_cost("AdamW"))
    steps: dict[str, Training] = {}
    predicted: dict[str, Estimate] = {}
    peaks: dict[str, int] = {}
    named = rounded_plans() if wires else plans(job.sizes.layers)
    for name, options in {**named, PLANNED: {"plan": TrainingPlan.from_json(planned)}}.items():
        if name == BUDGET:
            options = {**options, "memory": int(0.85 * predicted["zero3"].tensors)}

        def build(options: Mapping[str, Any] = options) -> Training:
            contender = Contender("shardtrace", lambda model, world: sharded(model, world, setting.cost, options))
            training = Training(contender, world, job.sizes, make_batches(job.sizes, dist.get_rank(), world.device))
            for _ in range(WARM_UP):
                training()
            return training

        steps[name], built = metered(build, world.device)
        _, step = metered(steps[name], world.device)
        unused = sum(x.nbytes for batch in steps[name].batches[1:] for x in batch)
        peaks[name] = built.kept + step.peak - unused
        predicted[name] = estimate(ComposedStep(*compiled_traces(steps[name].model)), setting)
    timed = interleaved(
        steps, rounds=job.rounds, steps_per_round=job.steps_per_round, barrier=dist.barrier, device=world.device
    )
    seconds = {name: quartiles(one.seconds) for name, one in slowest(timed, world.group).items()}
    return [
        {
            "plan": name,
            "seconds": seconds[name][1],
            "noise": (seconds[name][2] - seconds[name][0]) / 2,
            "predicted_seconds": predicted[name].seconds,
            "peak": peaks[name],
            "predicted_peak": predicted[name].tensors + predicted[name].away,  # on CPUs, both are in one memory
        }
        for name in steps
    ]


def sharded(model: nn.Module, world: World, cost: CostModel, options: Mapping[str, Any]) -> nn.Module:
    if "plan" not in options:
        options = grouped({"bucketing_strategy": "block", "cost_model": cost, **options})
    return thunder.jit(shardtrace.fsdp(model, mesh=world.group, **options))


# ---- the report ----


def report(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{name:32} {'measured':>10} {'predicted':>10} {'':6} {'peak':>10} {'predicted':>10}"]
    for row in rows:
        seconds, peak = error(row, "seconds"), error(row, "peak")
        lines.append(
            f"{row['plan']:32} {row['seconds'] * 1e3:7.1f} ms {row['predicted_seconds'] * 1e3:7.1f} ms {seconds:+6.1%} "
            f"{row['peak'] / 2**20:6.1f} MiB {row['predicted_peak'] / 2**20:6.1f} MiB {peak:+6.2%}"
        )
    best = min(row["seconds"] for row in rows)
    chosen = next(row["seconds"] for row in rows if row["plan"] == PLANNED)
    lines.append(f"Kendall's tau {tau(rows):.2f}; the choice takes {chosen / best - 1:.1%} longer than the best")
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    found = []
    for what in ("seconds", "peak"):
        errors = sorted(abs(error(row, what)) for row in rows)
        found.append(f"{what}: median error {median(errors):.2%}, worst {errors[-1]:.2%}")
    return f"{len(rows)} plans; " + "; ".join(found)


def error(row: Mapping[str, Any], what: str) -> float:
    return float(row[f"predicted_{what}"] / row[what] - 1)


def tau(rows: Sequence[Mapping[str, Any]]) -> float:
    """Kendall's tau over pairs whose measured seconds differ by more than their noise: 1 if all are predicted in the
    right order, -1 if none is."""
    signs = []
    for a, b in combinations(rows, 2):
        measured, predicted = a["seconds"] - b["seconds"], a["predicted_seconds"] - b["predicted_seconds"]
        if abs(measured) > a["noise"] + b["noise"]:
            signs.append(1 if measured * predicted > 0 else -1)
    return sum(signs) / len(signs) if signs else 1.0


if __name__ == "__main__":
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_file():  # as a rank
        rank(Job.read(Path(sys.argv[1])))
    else:
        try:
            sys.exit(main())
        except RankFailed as failed:
            sys.exit(f"RankFailed: {failed}")
