"""Makes mutants of right steps and prints who found them, by kind.

    python tests/mutants/run.py --number 5000
    python tests/mutants/run.py --only gpt/zero3 --seed 17       one mutant again, with what was changed

A mutant is made by its model, setting and seed alone. The exit status is 1 if one was missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import shardtrace  # noqa: E402, F401  before thunder
from passes.proof.callable import other_borders  # noqa: E402
from passes.proof.prove import check  # noqa: E402

from kinds import KINDS, Mutant, mutate  # noqa: E402
from steps import PAIRS, Step, compile_step  # noqa: E402
from verdict import Prove, Verdict, judge, remember  # noqa: E402

OUTCOMES = ("verify", "prove", "equivalent", "missed")


class Row(NamedTuple):
    model: str
    setting: str
    seed: int
    mutant: Mutant
    verdict: Verdict


def pairs() -> list[tuple[str, str]]:
    """Each model with each of its settings. The first settings of all models come first."""
    found = [(i, model, setting) for model, settings in PAIRS.items() for i, setting in enumerate(settings)]
    return [(model, setting) for _, model, setting in sorted(found, key=lambda pair: pair[0])]


def mutant_of(step: Step, model: str, setting: str, seed: int) -> Mutant:
    """The mutant of a seed. A kind that finds nothing in the step makes way for another one."""
    rng = Random(f"{model}/{setting}/{seed}")
    while (mutant := mutate(step, rng)) is None:
        pass
    return mutant


def rows(chosen: list[tuple[str, str]], seeds: Callable[[int], range]) -> Iterator[Row]:
    """``seeds``: those of the n-th pair."""
    for n, (model, setting) in enumerate(chosen):
        step = compile_step(model, setting)
        prove = prover_of(step)
        if prove is None:
            print(f"no mutants of {model}/{setting}, which is not proven itself", flush=True)
            continue
        remember(step)
        for seed in seeds(n):
            mutant = mutant_of(step, model, setting, seed)
            yield Row(model, setting, seed, mutant, judge(mutant.step, step, prove, runs=mutant.kind.runs))


def table(counts: Counter[tuple[str, str]]) -> str:
    width = max(map(len, KINDS)) + 2
    lines = [f"{'':{width}}" + "".join(f"{o:>12}" for o in OUTCOMES)]
    for name in [*KINDS, "all"]:
        numbers = [
            sum(n for (k, o), n in counts.items() if o == outcome and name in (k, "all")) for outcome in OUTCOMES
        ]
        if any(numbers):
            lines.append(f"{name:{width}}" + "".join(f"{n:12}" for n in numbers))
    return "\n".join(lines)


def prover_of(step: Step) -> Prove | None:
    """Proves mutants of a step. None if the step itself is not proven, so that nothing would follow."""

    def prove(mutant: Step) -> tuple[str, str]:
        if isinstance(step.reference, Exception):
            return "unproven", str(step.reference)
        try:
            found = check(step.reference, mutant.forward, mutant.backward)
            if mutant.border is not None and (others := list(other_borders(mutant.border))):
                return "unproven", others[0]
        except Exception as error:
            return "raises", f"{type(error).__name__}: {error}"
        return found.verdict, str(found)

    verdict, why = prove(step)
    if verdict in ("proven", "rounding"):
        return prove
    print(f"{verdict}: {why[:300]}")
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=5000)
    parser.add_argument("--only", nargs="*", help="model/setting")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    chosen = [pair for pair in pairs() if not options.only or "/".join(pair) in options.only]
    each, more = divmod(options.number, len(chosen))
    start, counts = time.perf_counter(), Counter[tuple[str, str]]()

    def seeds(n: int) -> range:
        return range(each + (n < more)) if options.seed is None else range(options.seed, options.seed + 1)

    for row in rows(chosen, seeds):
        counts[row.mutant.kind.name, row.verdict.outcome] += 1
        if row.verdict.outcome == "missed" or options.seed is not None:
            again = f"--only '{row.model}/{row.setting}' --seed {row.seed}"
            print(
                f"{row.verdict.outcome}: {row.mutant.kind.name}: {again}\n  {row.mutant.where}\n  {row.verdict.why}",
                flush=True,
            )
    print(table(counts))
    print(f"{counts.total()} mutants in {time.perf_counter() - start:.0f} s")
    return int(any(outcome == "missed" for _, outcome in counts))


if __name__ == "__main__":
    raise SystemExit(main())
