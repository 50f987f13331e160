"""Steps of Llamas in bf16, beside eager PyTorch, torch.compile and FSDP2: ratios of time and of peak memory.

    python examples/benchmarks/bf16.py                      # on one GPU, then on all of this machine
    python examples/benchmarks/bf16.py --tiny --device cpu  # a rehearsal on one gloo rank, then on two

Prints a table and the ratios of each model, and writes results.json.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from compare import gpus, positive
from job import CannotRun, Job, Sizes
from launch import RankFailed, run_ranks
from report import aligned, table
from targets import STRATEGIES, Result, speed, variants

LLAMA = Sizes(16, 2048, 32, batch=4, seq=2048, model="Llama", vocab=32000, hidden=8192, dtype="bfloat16")
MODELS = {"0.5B": replace(LLAMA, width=1536, heads=12, hidden=4096), "1B": LLAMA}
TINY = {"tiny": replace(LLAMA, layers=2, width=64, heads=4, batch=2, seq=16, vocab=128, hidden=128)}
ALONE = "^single (eager|compiled)$|^shardtrace zero3( torchcompile| nvfuser)?$"
TOGETHER = f"{ALONE}|^shardtrace zero2( torchcompile| nvfuser)?$|^fsdp2 "


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: runs the finally blocks
    try:
        ranks = 2 if args.device == "cpu" else gpus()
    except CannotRun as reason:
        print(f"bf16: cannot run: {reason}", file=sys.stderr)
        return 1
    results: list[Result] = []
    failed = False
    args.out.mkdir(parents=True, exist_ok=True)
    for job in jobs(args, ranks):
        try:
            found = run_ranks(job)
        except RankFailed as error:
            print(f"{job.setting}: RankFailed: {error}", file=sys.stderr)
            failed = True
            continue
        results += found
        (args.out / "results.json").write_text(json.dumps({"settings": results}, indent=1) + "\n")
        for result in found:
            failed = failed or bool(result["failed"])
            print(f"\n{table(result)}\n\n{ratios(result)}", flush=True)
    return int(failed)


def jobs(args: argparse.Namespace, ranks: int) -> Iterator[Job]:
    backend = "gloo" if args.device == "cpu" else "nccl"
    for name, sizes in (TINY if args.tiny else MODELS).items():
        for world in sorted({1, ranks}):
            only = args.only or (ALONE if world == 1 else TOGETHER)
            setting = f"Llama {name}, {args.device}"
            yield Job(setting, backend, world, args.device, sizes, args.rounds, args.steps_per_round, only)


def ratios(result: Result) -> str:
    """The step and the peak of each of our contenders, over those of each rival."""
    rows, lines = result["contenders"], [["contender", "over", "step", "peak"]]
    for name, strategy in variants(result):
        peer = STRATEGIES[strategy]
        for rival in ("single eager", "single compiled", peer, f"{peer} compiled"):
            if (faster := speed(result, name, rival)) is not None:
                peak = rows[name]["peak_bytes"] / rows[rival]["peak_bytes"]
                lines.append([name, rival, f"{1 / faster:.3f}", f"{peak:.3f}"])
    return "\n".join(aligned(lines))


def parse_args() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    add("--tiny", action="store_true", help="a model that proves nothing but that this runs")
    add("--only", default="", metavar="REGEX", help="run only matching contenders")
    add("--rounds", type=positive, default=5, help="rounds, in each of which all contenders run (5)")
    add("--steps-per-round", type=positive, default=3, help="timed steps of a contender in a round (3)")
    add("--out", type=Path, default=Path("benchmark-results"), help="folder for results.json")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
