"""The rows of a run as a summary and as a page for the docs.

python tests/operators/outcomes.py build/operators/rows.jsonl > docs/operators.md
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """The last row of each case."""
    return last(file.read_text().splitlines()) if file.exists() else []


def last(lines: Iterable[str]) -> list[Row]:
    rows = map(json.loads, lines)
    return list({(row["source"], row["case"]): row for row in rows}.values())


def summary(rows: list[Row]) -> str:
    """The counts of each source, and what is not equal by its cause."""
    lines = []
    for source in dict.fromkeys(row["source"] for row in rows):
        counted = Counter(row["outcome"] for row in rows if row["source"] == source)
        lines.append(f"{source}: {', '.join(f'{n} {o}' for o, n in counted.most_common())}")
    for outcome in ("refused", "internal error", "timeout", "wrong"):
        for row in rows:
            if row["outcome"] == outcome:
                lines.append(f"{outcome}: {row['case']}: {row.get('error', '')} [{row.get('place', '')}]"[:220])
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary(read(Path(sys.argv[1]))))
