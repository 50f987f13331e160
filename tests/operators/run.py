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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardtrace
import shardtrace.testing

import sources
import table
import torch
import torch.distributed as dist
from cases import Case
from judge import judge

OUT = Path("build/operators/rows.jsonl")
LIMIT = 1200.0  # seconds for all cases of an operator
processes = multiprocessing.get_context("fork")
__all__ = ["main", "shardtrace"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="*", default=list(sources.SOURCES), choices=list(sources.SOURCES))
    parser.add_argument("--only", nargs="*", default=["*"], help="names of operators, with * and ?")
    parser.add_argument("--cases", nargs="*", default=["*"], help="cases of these, such as '*/in place/*'")
    parser.add_argument("--most", type=int, default=100, help="cases of each variant and dtype of an operator")
    parser.add_argument("--again", nargs="*", help="cases that had one of these outcomes in --out, such as wrong")
    parser.add_argument("--missing", action="store_true", help="cases that have no row in --out")
    parser.add_argument("--jobs", type=int, default=1, help="operators at a time")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON lines; the last row of a case counts")
    return parser.parse_args(arguments)


class Chosen:
    """The operators and cases that the options ask for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._known = {(r["source"], r["case"]): r for r in table.read(options.out)}

    def operators(self) -> list[tuple[str, str]]:
        found = [(source, name) for source in self._options.source for name in sources.SOURCES[source].names()]
        found = [pair for pair in found if any(fnmatch.fnmatch(pair[1], pattern) for pattern in self._options.only)]
        if self._options.again is not None:
            again = [r for r in self._known.values() if r["outcome"] in self._options.again]
            found = [pair for pair in found if pair in {(r["source"], r["operator"]) for r in again}]
        return found

    def cases(self, source: str, name: str) -> Iterator[Case]:
        count: Counter[str] = Counter()
        for case in sources.SOURCES[source].cases(name):
            kind = case.name.rpartition("/")[0] if source == "operators" else case.name
            if count[kind] < self._options.most and self._is_wanted(source, case.name):
                count[kind] += 1
                yield case

    def _is_wanted(self, source: str, case: str) -> bool:
        row = self._known.get((source, case))
        if self._options.missing and row is not None:
            return False
        if self._options.again is not None and (row is None or row["outcome"] not in self._options.again):
            return False
        return any(fnmatch.fnmatch(case, pattern) for pattern in self._options.cases)


def run_one(chosen: Chosen, source: str, name: str, out: Path) -> None:
    """All cases of an operator, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, out.open("a") as file:
        os.environ["SHARDTRACE_CACHE"] = folder
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for case in chosen.cases(source, name):
            began = time.monotonic()
            row = {"source": source, "operator": name, **judge(case)}
            row["seconds"] = round(time.monotonic() - began, 3)
            file.write(json.dumps(row) + "\n")
            file.flush()
            torch._dynamo.reset()
    sys.stdout.flush()
    os._exit(0)


def run(chosen: Chosen, jobs: int, out: Path) -> None:
    waiting, running = chosen.operators(), []
    total = len(waiting)
    while waiting or running:
        while waiting and len(running) < jobs:
            source, name = waiting.pop(0)
            process: Any = processes.Process(target=run_one, args=(chosen, source, name, out))
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
                    row = {"source": source, "operator": name, "case": f"{name}/all/-/-"}
                    row["outcome"] = "timeout" if late else "internal error"
                    row["error"] = f"the process ended with {process.exitcode}"
                    with out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                print(f"\r{total - len(waiting) - len(running)}/{total} {name:40}", end="", flush=True)


def main() -> None:
    options = parse()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    chosen = Chosen(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    count = len(options.out.read_text().splitlines()) if options.out.exists() else 0
    run(chosen, options.jobs, options.out)
    rows = table.last(options.out.read_text().splitlines()[count:])
    print(f"\n{table.summary(rows)}\n{len(rows)} cases in {time.time() - began:.0f} s, rows in {options.out}")


if __name__ == "__main__":
    main()
