"""Train the same GPT-2 four ways, one after the other, and compare memory, speed and loss.

One run on a single device, and one run of each strategy on the ranks of this machine:

    python examples/gpt2/compare.py --ranks 2 --model tiny --steps 50

All four train on the same global batches and end at the same loss. Takes every option of the scripts.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

import shardtrace  # noqa: F401  before thunder: makes it importable on the newest torch

import torch

from trainer import Report, add_count, arguments, result_table

SCRIPTS = ("single_device", "ddp", "owner", "fsdp")
TOLERANCE = 1e-2  # relative difference of the final losses: sums in another order drift apart slowly


def main() -> None:
    args, options = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reports = {name: run(name, args.ranks, options, Path(folder)) for name in SCRIPTS}
    done = {name: report for name, report in reports.items() if report is not None}
    if done:
        print(result_table(done))
    if args.json is not None:
        args.json.write_text(json.dumps(done) + "\n")
    if len(done) < len(SCRIPTS):
        sys.exit(f"failed: {', '.join(name for name in SCRIPTS if name not in done)}")
    losses = [report["losses"][-1] for report in done.values()]
    spread = (max(losses) - min(losses)) / min(losses)
    print(f"\nfinal losses differ by {spread:.1e} of their value")
    if not spread < TOLERANCE:
        sys.exit("the strategies did not end at the same loss")


def parse_args() -> tuple[Namespace, list[str]]:
    """All arguments, and the list of those to pass to the scripts."""
    own = ArgumentParser(add_help=False)
    add_count(own, "--ranks", max(2, torch.cuda.device_count()), "ranks of each run except single_device")
    parser = arguments(__doc__, parents=[own])
    parser.set_defaults(steps=50, eval_batches=0)
    args = parser.parse_args()  # checked here, or all four scripts would report the same mistake
    if args.batch_size % args.ranks:
        sys.exit(f"--batch-size {args.batch_size} is for all ranks and is not divisible by {args.ranks} ranks")
    _, given = own.parse_known_args()
    return args, [f"--steps={args.steps}", f"--eval-batches={args.eval_batches}", *given]


def run(name: str, ranks: int, options: list[str], folder: Path) -> Report | None:
    """Runs a script in its own processes. Returns None if it failed."""
    print(f"{name}:", file=sys.stderr)
    script, out = Path(__file__).with_name(f"{name}.py"), folder / name
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    launch = [sys.executable, *(torchrun if name != "single_device" else [])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([*launch, script, *options, f"--json={out}"], env=environment, stdout=subprocess.DEVNULL)
    if done.returncode:
        return None
    report: Report = json.loads(out.read_text())
    return report


if __name__ == "__main__":
    main()
