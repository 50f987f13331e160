"""shardtrace beside PyTorch FSDP2, thunder.distributed, DDP and a single device, in one run.

    python examples/benchmarks/compare.py loopback
    python examples/benchmarks/compare.py slow-link --rates 1,2      # as root, on Linux
    python examples/benchmarks/compare.py cuda

Starts its own ranks, prints a table for each setting and one of all targets, and writes results.json and steps.svg.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import slow_link
from job import CannotRun, Job, Sizes
from launch import RankFailed, run_ranks
from report import legend, plot, table, target_table
from targets import Result, targets

WORLDS = (1, 8, 64)  # one rank over nccl; one of many, whose peers are fake
CPU_SIZES = {"layers": 8, "width": 384, "batch": 4, "seq": 128}
CUDA_SIZES = {"layers": 12, "width": 768, "batch": 8, "seq": 1024}  # GPT-2


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: runs the finally blocks
    settings: dict[str, Callable[[argparse.Namespace], Iterable[Result]]]
    settings = {"loopback": loopback, "slow-link": slow, "cuda": cuda}
    asked = list(settings) if args.setting == "all" else [args.setting]
    results: list[Result] = []
    cannot, failed = 0, False
    try:
        for name in asked:
            try:
                for result in settings[name](args):
                    results.append(result)
                    print(f"\n{table(result)}", flush=True)
            except CannotRun as reason:
                print(f"{name}: cannot run: {reason}", file=sys.stderr)
                cannot += 1
            except RankFailed as error:  # results so far are kept
                print(f"{name}: RankFailed: {error}", file=sys.stderr)
                failed = True
    finally:  # also of a run that is stopped
        if results:
            finish(results, args.out)
    failed = failed or any(result["failed"] for result in results)
    return 1 if failed or cannot == len(asked) else 0  # with "all", settings that cannot run are skipped


def loopback(args: argparse.Namespace) -> list[Result]:
    return run_ranks(job(args, "loopback", "gloo", 2))


def slow(args: argparse.Namespace) -> list[Result]:
    with slow_link.two_namespaces() as ends:
        return run_ranks(job(args, "slow link", "gloo", 2, rates=args.rates), ends)


def cuda(args: argparse.Namespace) -> Iterator[Result]:
    for one in cuda_jobs(args, gpus()):
        yield from run_ranks(one)


def gpus() -> int:
    """The GPUs of this machine. Raises CannotRun if there is none."""
    import torch  # slow to import, and only this setting needs it here: ranks import it themselves

    if not torch.cuda.is_available():
        raise CannotRun("torch sees no CUDA device (torch.cuda.is_available() is False)")
    return torch.cuda.device_count()


def cuda_jobs(args: argparse.Namespace, real: int) -> list[Job]:
    """A rank on each GPU, then those of ``--worlds``: a real one, or one of many whose peers are fake."""
    every = [job(args, "cuda, nccl", "nccl", real)] if real > 1 else []
    return every + [
        job(args, "cuda, nccl", "nccl", 1)
        if n == 1
        else job(args, f"cuda, one of {n} ranks (the others are fake)", "fake", n)
        for n in args.worlds
    ]


def job(args: argparse.Namespace, setting: str, backend: str, world_size: int, **link: Any) -> Job:
    on_cuda = setting.startswith("cuda")
    given = {name: value for name in CPU_SIZES if (value := getattr(args, name)) is not None}
    sizes = {**(CUDA_SIZES if on_cuda else CPU_SIZES), **given}
    heads = args.heads or max(1, sizes["width"] // 64)
    if sizes["width"] % heads:
        raise SystemExit(f"width {sizes['width']} is not divisible by {heads} heads: pass --heads")
    return Job(
        setting,
        backend,
        world_size,
        "cuda" if on_cuda else "cpu",
        Sizes(**sizes, heads=heads, optimizer=args.optimizer, experts=args.experts),
        args.rounds,
        args.steps_per_round,
        args.only,
        **link,
    )


def finish(results: list[Result], out: Path) -> None:
    reached = targets([r for r in results if not r["sizes"]["experts"]])  # they are of the GPT
    print(f"\n{legend()}\n\n{target_table(reached)}\n")
    out.mkdir(parents=True, exist_ok=True)
    data = {"settings": results, "targets": [{**t._asdict(), "met": t.met} for t in reached]}
    (out / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    print(f"figures: {out / 'results.json'}\n{plot(results, out / 'steps.svg')}")


# ---- the command line ----


def parse_args() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    choices = ["loopback", "slow-link", "cuda", "all"]
    add("setting", nargs="?", choices=choices, default="loopback", help="default: loopback")
    add("--layers", type=positive, help="blocks of the model (8; on CUDA 12)")
    add("--width", type=positive, help="width of the model (384; on CUDA 768)")
    add("--heads", type=positive, help="heads of each attention (width / 64)")
    add("--batch", type=positive, help="sequences on each rank (4; on CUDA 8)")
    add("--seq", type=positive, help="tokens of a sequence (128; on CUDA 1024)")
    add("--experts", type=positive, default=0, help="experts in the place of each MLP, two for each token (none)")
    add("--optimizer", choices=["sgd", "adamw"], default="sgd", help="optimizer of all contenders (sgd)")
    add("--rounds", type=positive, default=5, help="rounds, in each of which all contenders run (5)")
    add("--steps-per-round", type=positive, default=2, help="timed steps of a contender in a round (2)")
    add("--only", type=pattern, default="", metavar="REGEX", help="run only matching contenders (and 'host overhead')")
    add("--rates", type=rates, default=(1.0, 2.0), help="rates of the slow link, in Gbit/s (1,2)")
    add("--worlds", type=worlds, default=WORLDS, help="on CUDA: numbers of ranks, of which one is real (1,8,64)")
    add("--out", type=Path, default=Path("benchmark-results"), help="folder for results.json and steps.svg")
    return parser.parse_args()


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def worlds(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def rates(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates in Gbit/s, such as 1,2")
    return values


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
