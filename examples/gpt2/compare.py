"""Train the same GPT-2 four ways, one after the other, and compare memory, speed and loss.

On one device, and with each strategy on all ranks of this machine:

    python examples/gpt2/compare.py --ranks 2 --model tiny --steps 50

The global batch is the same for all, and so is the loss at the end. All options of the scripts are understood.
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

SCRIPTS = ("single_device", "ddp", "zero3", "fsdp")
TOLERANCE = 1e-2  # of the final losses, relative: sums in another order part slowly from each other


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
    """The arguments, and those among them that the scripts are given."""
    own = ArgumentParser(add_help=False)
    add_count(own, "--ranks", max(2, torch.cuda.device_count()), "of all but single_device")
    parser = arguments(__doc__, parents=[own])
    parser.set_defaults(steps=50, eval_batches=0)
    args = parser.parse_args()  # the scripts would say four times what is wrong
    if args.batch_size % args.ranks:
        sys.exit(f"--batch-size {args.batch_size} is that of all ranks, and not divisible by {args.ranks} ranks")
    _, given = own.parse_known_args()
    return args, [f"--steps={args.steps}", f"--eval-batches={args.eval_batches}", *given]


def run(name: str, ranks: int, options: list[str], folder: Path) -> Report | None:
    """Runs a script in processes of its own; None if it failed."""
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
