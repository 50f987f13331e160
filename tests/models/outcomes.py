"""The rows of a sweep as a summary and as a table for the docs.

python tests/models/outcomes.py build/sweep/rows.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OUTCOMES = ["equal", "wrong", "refused", "crashed", "timeout"]
Row = dict[str, Any]


def read(file: Path) -> dict[tuple[str, str], Row]:
    """The last row of each model."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(row["family"], row["name"]): row for row in rows}


def line(row: Row) -> str:
    """A row for the terminal."""
    seconds = row.get("seconds", row.get("eager_seconds", 0.0))
    notes = [
        note
        for note, holds in (
            ("shares", row.get("reference")),
            ("random", row.get("random")),
            ("float64", row.get("dtype") == "float64"),
        )
        if holds
    ]
    facts = f"{row['family']:>12} {row['name']:<28} {row['outcome']:<11} {seconds:6.1f} s  {reason(row)}"
    return facts + (f"  ({', '.join(notes)})" if notes else "")


def reason(row: Row) -> str:
    """How far a model is off, or its error."""
    if "error" in row:
        return f"{row['error']} [{row['place']}]" if "place" in row else str(row["error"])
    if "difference" not in row:
        return ""
    text = f"{row['difference']:.1e}, gradients {row.get('gradient_difference', 0.0):.1e}"
    more = f" and {row['wrong_gradients'] - 1} more" if row.get("wrong_gradients", 0) > 1 else ""
    return f"{text} at {row['where']}{more}" if row["outcome"] == "wrong" else text


def counts(rows: Iterable[Row]) -> dict[str, Counter[str]]:
    """For each family, the number of models of each outcome."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(row["family"], Counter())[row["outcome"]] += 1
    return found


def summary(rows: list[Row]) -> str:
    """The counts of each family, and what is not equal by its cause."""
    lines = [f"{family}: {', '.join(f'{n} {o}' for o, n in c.most_common())}" for family, c in counts(rows).items()]
    causes: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] in ("refused", "crashed", "timeout"):
            causes.setdefault(str(row.get("error", ""))[:110], []).append(row["name"])
    for cause, names in sorted(causes.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(names):4} {cause}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}")
    steps = sorted(row["step"] for row in rows if "step" in row)
    if steps:
        lines.append(f"first step: median {steps[len(steps) // 2]:.1f} s, longest {steps[-1]:.1f} s")
    return "\n".join(lines)


def markdown(rows: Iterable[Row]) -> str:
    """The table of the docs: counts of the models that eager PyTorch trains, by family, and those that are not equal."""
    counted = [row for row in rows if row["outcome"] in OUTCOMES]
    lines = [f"| family | {' | '.join(['trained by eager', *OUTCOMES])} |", "|---" * (len(OUTCOMES) + 2) + "|"]
    total: Counter[str] = Counter()
    for family, found in counts(counted).items():
        total += found
        lines.append(f"| {family} | {found.total()} | {' | '.join(str(found[o]) for o in OUTCOMES)} |")
    lines.append(f"| all | {total.total()} | {' | '.join(str(total[o]) for o in OUTCOMES)} |")
    others = [row for row in counted if row["outcome"] != "equal"]
    if others:
        lines += ["", "| model | outcome | reason |", "|---|---|---|"]
        for row in sorted(others, key=lambda row: (row["family"], row["outcome"], row["name"])):
            text = str(row.get("error") or reason(row)).replace("|", "\\|").replace("<", "\\<")
            lines.append(f"| {row['family']} `{row['name']}` | {row['outcome']} | {text} |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = read(Path(sys.argv[1] if len(sys.argv) > 1 else "build/sweep/rows.jsonl")).values()
    print(markdown(found))
