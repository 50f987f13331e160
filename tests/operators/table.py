"""The rows of a run as a summary and as the table of the docs.

python tests/operators/table.py build/operators/rows.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

OUTCOMES = ["equal", "refused", "wrong", "internal error", "timeout"]
Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """The last row of each case."""
    return last(file.read_text().splitlines()) if file.exists() else []


def last(lines: Iterable[str]) -> list[Row]:
    rows = map(json.loads, lines)
    return list({(row["source"], row["case"]): row for row in rows}.values())


def kind(row: Row) -> str:
    """The group of a row in the table, such as "operators, in place, float32"."""
    parts = row["case"].split("/")
    if row["source"] == "operators":
        return f"{row['source']}, {'alias' if parts[1].startswith('alias') else parts[1]}, {parts[-2]}"
    return f"{row['source']}, {parts[-2] if row['source'] == 'modules' else parts[-1]}"


def counts(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, Counter[str]]:
    """The number of cases of each outcome that eager PyTorch can do, by group."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        if row["outcome"] in OUTCOMES:
            found.setdefault(key(row), Counter())[row["outcome"]] += 1
    return found


def reason(row: Row) -> str:
    """The error of a row without what differs between operators."""
    text = re.sub(r"the forward of \w+ ", "the forward ", str(row.get("error", "")))
    return re.sub(r" \((aten|The tensor)[^)]*\)?", "", text)


def summary(rows: list[Row]) -> str:
    """The counts of each source, and each case that is neither equal nor refused."""
    lines = [f"{source}: {_counted(found)}" for source, found in counts(rows, lambda row: row["source"]).items()]
    others = [row for row in rows if row["outcome"] in OUTCOMES[1:]]
    for row in sorted(others, key=lambda row: OUTCOMES.index(row["outcome"])):
        lines.append(f"{row['outcome']}: {row['case']}: {reason(row)} [{row.get('place', '')}]"[:240])
    return "\n".join(lines)


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in OUTCOMES if found[outcome])


def markdown(rows: list[Row]) -> str:
    """The table of the docs: counts, and the reason of each case that is not equal."""
    lines = [f"| cases | {' | '.join(['eager can', *OUTCOMES])} |", "|---" * (len(OUTCOMES) + 2) + "|"]
    grouped = counts(rows, kind)
    for name, found in {**grouped, "all": sum(grouped.values(), Counter())}.items():
        lines.append(f"| {name} | {found.total()} | {' | '.join(str(found[o]) for o in OUTCOMES)} |")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["outcome"] in OUTCOMES[1:]:
            names = reasons.setdefault((row["outcome"], reason(row)), [])
            name = row["case"].split("/")[1] if row["source"] == "compositions" else row["operator"]
            names += [name] if name not in names else []
    if reasons:
        lines += ["", "| outcome | reason | operators |", "|---|---|---|"]
    for (outcome, text), names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        shown = text.replace("|", "\\|").replace("<", "\\<").replace("\n", " ")
        lines.append(f"| {outcome} | {shown} | {', '.join(f'`{n}`' for n in names)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(read(Path(sys.argv[1] if len(sys.argv) > 1 else "build/operators/rows.jsonl"))))
