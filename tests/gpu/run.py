"""Runs all that needs a GPU, part by part, and prints a table: make gpu.

    python3 tests/gpu/run.py                     # with any Python that has torch, lightning-thunder and pytest
    python3 tests/gpu/run.py --only bench,bf16 --limit 500

A part that fails stops no other. The exit status is 1 if one did, 0 on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "examples" / "benchmarks"
PATIENCE = 20.0  # seconds


class Part(NamedTuple):
    """A part: its arguments for Python, and what counts its successes and failures in the folder of its results."""

    name: str
    command: Sequence[str]
    count: Callable[[Path], tuple[int, int]]


class Outcome(NamedTuple):
    name: str
    passed: int
    failed: int
    seconds: float
    note: str = ""


def parts(nvfuser: bool) -> list[Part]:
    """All parts. ``{out}`` in a command is the folder of its results."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={out}/tests.xml", str(ROOT / "tests" / "gpu")]
    return [
        Part("tests", [*pytest, "-k", "not nvfuser"], of_tests),
        *([Part("nvFuser", [*pytest, "-k", "nvfuser"], of_tests)] if nvfuser else []),
        Part("bench", [str(BENCHMARKS / "compare.py"), "cuda", "--out={out}"], of_benchmark),
        Part("bf16", [str(BENCHMARKS / "bf16.py"), "--out={out}"], of_benchmark),
        Part("8B", [str(BENCHMARKS / "one_of_many.py"), "--out={out}"], of_benchmark),
    ]


def of_tests(folder: Path) -> tuple[int, int]:
    suite = ElementTree.parse(folder / "tests.xml").getroot()[0]
    total, errors, failures, skipped = (int(suite.get(n, 0)) for n in ("tests", "errors", "failures", "skipped"))
    return total - errors - failures - skipped, errors + failures


def of_benchmark(folder: Path) -> tuple[int, int]:
    """The contenders that ran in all settings, and those that failed."""
    settings = json.loads((folder / "results.json").read_text())["settings"]
    return sum(len(s["contenders"]) for s in settings), sum(len(s["failed"]) for s in settings)


def run(part: Part, limit: float, out: Path | None, nvfuser: bool) -> Outcome:
    """Runs a part, whose output goes to the terminal. A part that ends badly has at least one failure."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    environment |= {"OMP_NUM_THREADS": "1", "SHARDTRACE_GPU_NVFUSER": "1" if nvfuser else ""}
    with tempfile.TemporaryDirectory(prefix="shardtrace-gpu-") as temporary:
        folder = Path(temporary) if out is None else out / part.name
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *(word.replace("{out}", str(folder)) for word in part.command)]
        start, note, ended_well = time.monotonic(), "", False
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            code = process.wait(limit)
            ended_well, note = code == 0, f"exit status {code}" if code else ""
        except subprocess.TimeoutExpired:
            note = f"stopped after {limit:g} s"
        finally:
            end(process)
        try:
            passed, failed = part.count(folder)
        except (OSError, ElementTree.ParseError, ValueError):
            passed, failed, note = 0, 0, note or "left no results"
            ended_well = False
    return Outcome(part.name, passed, failed if ended_well else max(1, failed), time.monotonic() - start, note)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process. It has the time to end its ranks."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def table(outcomes: Sequence[Outcome]) -> str:
    head = f"{'part':8}  {'passed':>6}  {'failed':>6}  {'seconds':>7}"
    rows = [f"{o.name:8}  {o.passed:6}  {o.failed:6}  {o.seconds:7.0f}  {o.note}".rstrip() for o in outcomes]
    return "\n".join([head, *rows])


def gpus() -> int:
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    if not gpus():
        print("make gpu: torch sees no CUDA device, so nothing was run")
        return 0
    asked = [part for part in parts(args.nvfuser) if args.only is None or part.name in args.only]
    outcomes = []
    for part in asked:
        print(f"==== {part.name}", flush=True)
        outcomes.append(run(part, args.limit, args.out, args.nvfuser))
    print(f"\n{table(outcomes)}")
    return int(any(o.failed for o in outcomes))


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvfuser", action="store_true", help="a part with nvFuser, which fails where it is missing")
    parser.add_argument("--only", type=names, help="parts: " + ",".join(part.name for part in parts(True)))
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of a part (1800)")
    parser.add_argument("--out", type=Path, help="folder to keep the results of all parts in")
    return parser.parse_args(arguments)


def names(text: str) -> list[str]:
    known = [part.name for part in parts(True)]
    if unknown := set(text.split(",")) - set(known):
        raise argparse.ArgumentTypeError(f"there is no part {', '.join(unknown)}: the parts are {', '.join(known)}")
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
