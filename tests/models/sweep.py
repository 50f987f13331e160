"""Trains third-party models one step with shardtrace, each in processes of its own, and compares with eager PyTorch.

    python tests/models/sweep.py --family hf-causal --pattern 'llama*' --ranks 2

Each model is a line of JSON in ``--out`` and one on the terminal. ``outcomes.py`` writes the table of the docs.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import without_cuda  # isort: skip

import argparse
import fnmatch
import json
import logging
import random
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import shardtrace
import shardtrace.testing

import catalogue
import outcomes
import torch
from trial import Settings, describe, processes, try_model

__all__ = ["main", "shardtrace", "without_cuda"]

OUT = Path("build/sweep/rows.jsonl")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", default=[], help=f"some of {', '.join(catalogue.FAMILIES)}; default all")
    parser.add_argument("--pattern", nargs="*", default=["*"], help="names of models, with * and ?")
    parser.add_argument("--quick", action="store_true", help="15 models that cover the constructs")
    parser.add_argument("--sample", type=int, help="so many models, drawn at random")
    parser.add_argument(
        "--only", nargs="*", help="models that had one of these outcomes in --out, such as wrong refused"
    )
    parser.add_argument("--missing", action="store_true", help="models that have no row in --out")
    parser.add_argument("--ranks", type=int, default=2, help="2 gloo ranks, 1 for a single process, 0 for eager only")
    parser.add_argument("--mesh", type=mesh, help="such as '1x2 tensor': ranks of data x ranks that share a batch")
    parser.add_argument("--fake", action="store_true", help="compile for fake ranks in one process, without comparing")
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--executors", nargs="*", default=[], help="of thunder.jit, such as sdpa torchcompile")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one model")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time; one has as many processes as ranks")
    parser.add_argument("--out", type=Path, help="JSON lines; a model's last row counts")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--here", action="store_true", help="one model, in this process with one rank, for a debugger")
    options = parser.parse_args(arguments)
    if options.mesh is not None:
        options.ranks = options.mesh[0] * options.mesh[1]
    if options.out is None:
        options.out = OUT if options.mesh is None else OUT.with_stem("{}x{}-{}".format(*options.mesh))
    return options


def mesh(text: str) -> tuple[int, int, str]:
    """Of text such as "1x2 tensor"."""
    found = re.fullmatch(r"(\d+)x(\d+) (context|tensor)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not such as '1x2 tensor' or '2x1 context'")
    return int(found[1]), int(found[2]), found[3]


def chosen(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The families and names of the models to run."""
    unknown = set(options.family) - {*catalogue.FAMILIES, "faults"}
    if unknown:
        sys.exit(f"no family {', '.join(sorted(unknown))}; there are {', '.join(catalogue.FAMILIES)}")
    families = options.family or catalogue.FAMILIES
    models = [(family, name) for family in families for name in catalogue.names(family)]
    if options.quick:
        models = [model for model in catalogue.QUICK if model[0] in families]
    models = [model for model in models if any(fnmatch.fnmatch(model[1], pattern) for pattern in options.pattern)]
    rows = outcomes.read(options.out)
    if options.only is not None:
        models = [model for model in models if model in rows and rows[model]["outcome"] in options.only]
    if options.missing:
        models = [model for model in models if model not in rows]
    if options.sample is not None:
        models = random.Random(0).sample(models, min(options.sample, len(models)))
    return models


def run(models: list[tuple[str, str]], settings: Settings, jobs: int, out: Path) -> list[dict[str, Any]]:
    """A row for each model, written as soon as it is known."""
    waiting, running, rows = list(models), [], []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        while waiting or running:
            while waiting and len(running) < jobs:
                family, name = waiting.pop(0)
                log = out.parent / "logs" / family / f"{name.replace('/', '_').replace(':', '_')}.log"
                reader, writer = processes.Pipe(duplex=False)
                process = processes.Process(target=_supervise, args=(family, name, settings, log, writer))
                process.start()
                writer.close()
                running.append((process, reader))
            time.sleep(0.01)
            for pair in list(running):
                process, reader = pair
                if reader.poll():
                    row = reader.recv()
                    process.join()
                    running.remove(pair)
                    rows.append(row)
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    print(f"{len(rows):4}/{len(models)} {outcomes.line(row)}", flush=True)
    return rows


def _supervise(family: str, name: str, settings: Settings, log: Path, writer: Any) -> None:
    try:
        row = try_model(family, name, settings, log)
    except Exception as error:
        row = {"family": family, "name": name, "outcome": "the sweep failed", **describe(error)}
    writer.send(row)


def here(family: str, name: str, settings: Settings) -> None:
    """One model in this process: an error keeps its traceback, and a debugger sees it."""
    import tempfile

    from trial import make_reference, shard_and_compare

    folder = Path(tempfile.mkdtemp())
    print(make_reference(family, name, 1, folder / "reference.pt"))
    print(shard_and_compare(family, name, 0, settings, folder / "reference.pt", folder / "store"))


def main() -> None:
    options = parse()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    models = chosen(options)
    if options.list:
        print("\n".join(f"{family} {name}" for family, name in models))
        return
    if options.here:
        here(*models[0], Settings(1, options.fake, options.strategy, options.limit, executors=options.executors))
        return
    settings = Settings(options.ranks, options.fake, options.strategy, options.limit, options.mesh, options.executors)
    began = time.monotonic()
    rows = run(models, settings, options.jobs, options.out)
    print(f"\n{outcomes.summary(rows)}\n{len(rows)} models in {time.monotonic() - began:.0f} s, rows in {options.out}")


if __name__ == "__main__":
    main()
