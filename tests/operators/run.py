"""Holds operators, modules and compositions under fsdp against eager PyTorch.

    python tests/operators/run.py --only 'nn.functional.*' --jobs 2

Each case is a line of JSON in ``--out``. ``table.py`` writes the table of the docs.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import fnmatch
import json
import logging
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import shardtrace
import shardtrace.testing

import sources
import table
import torch
import torch.distributed as dist
from judge import judge

OUT = Path("build/operators/rows.jsonl")
LIMIT = 240.0  # seconds for all cases of an operator
processes = multiprocessing.get_context("fork")
__all__ = ["main", "shardtrace"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="*", default=list(sources.SOURCES), choices=list(sources.SOURCES))
    parser.add_argument("--only", nargs="*", default=["*"], help="names of operators, with * and ?")
    parser.add_argument("--cases", nargs="*", default=["*"], help="cases of these, such as '*/in place/*'")
    parser.add_argument("--most", type=int, default=100, help="cases of each variant and dtype of an operator")
    parser.add_argument("--again", nargs="*", help="operators that had one of these outcomes in --out, such as wrong")
    parser.add_argument("--missing", action="store_true", help="operators that have no row in --out")
    parser.add_argument("--jobs", type=int, default=1, help="operators at a time")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON lines; the last row of a case counts")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[tuple[str, str]]:
    found = [(source, name) for source in options.source for name in sources.SOURCES[source].names()]
    found = [pair for pair in found if any(fnmatch.fnmatch(pair[1], pattern) for pattern in options.only)]
    rows = table.read(options.out)
    if options.again is not None:
        again = {(r["source"], r["operator"]) for r in rows if r["outcome"] in options.again}
        found = [pair for pair in found if pair in again]
    if options.missing:
        known = {(r["source"], r["operator"]) for r in rows}
        found = [pair for pair in found if pair not in known]
    return found


def run_one(source: str, name: str, patterns: list[str], most: int, out: Path) -> None:
    """All cases of an operator, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, out.open("a") as file:
        os.environ["SHARDTRACE_CACHE"] = folder
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        count: Counter[str] = Counter()
        for case in sources.SOURCES[source].cases(name):
            kind = case.name.rpartition("/")[0] if source == "operators" else case.name
            if count[kind] < most and any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns):
                count[kind] += 1
                began = time.monotonic()
                row = {"source": source, "operator": name, **judge(case)}
                row["seconds"] = round(time.monotonic() - began, 3)
                file.write(json.dumps(row) + "\n")
                file.flush()
                torch._dynamo.reset()
    sys.stdout.flush()
    os._exit(0)


def run(todo: Iterable[tuple[str, str]], patterns: list[str], most: int, jobs: int, out: Path) -> None:
    waiting, running = list(todo), []
    total = len(waiting)
    while waiting or running:
        while waiting and len(running) < jobs:
            source, name = waiting.pop(0)
            process: Any = processes.Process(target=run_one, args=(source, name, patterns, most, out))
            process.start()
            running.append((process, source, name, time.monotonic()))
        time.sleep(0.01)
        for item in list(running):
            process, source, name, began = item
            late = time.monotonic() - began > LIMIT
            if late:
                process.kill()
            if late or not process.is_alive():
                process.join()
                running.remove(item)
                if process.exitcode:
                    outcome = "timeout" if late else "internal error"
                    row = {"source": source, "operator": name, "case": f"{name}/all/-/-", "outcome": outcome}
                    row["error"] = f"the process ended with {process.exitcode}"
                    with out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                print(f"\r{total - len(waiting) - len(running)}/{total} {name:40}", end="", flush=True)


def main() -> None:
    options = parse()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    todo = chosen(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    count = len(options.out.read_text().splitlines()) if options.out.exists() else 0
    run(todo, options.cases, options.most, options.jobs, options.out)
    rows = table.last(options.out.read_text().splitlines()[count:])
    print(f"\n{table.summary(rows)}\n{len(rows)} cases in {time.time() - began:.0f} s, rows in {options.out}")


if __name__ == "__main__":
    main()
