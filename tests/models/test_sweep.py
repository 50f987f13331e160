"""The sweep itself: it tells equal from wrong, refused, crashed and late, and writes the table."""

from pathlib import Path

import faults
import outcomes
from ranks import Fork

HERE = Path(__file__).parent


def test_every_fault_has_its_outcome(tmp_path):
    """The fault that hangs has a limit of its own, which ends it. Both sweeps run at once, in forks."""
    sweeps = {}
    for pattern, limit in {"hangs": 10, "[!h]*": 200}.items():
        folder = tmp_path / str(limit)
        folder.mkdir()
        arguments = ["--family", "faults", "--pattern", pattern, "--limit", str(limit), "--out", f"{folder}/rows.jsonl"]
        sweeps[folder] = Fork(HERE / "sweep.py", arguments, {}, [folder / "stdout", folder / "stderr"], daemon=False)
    rows = {}
    for folder, sweep in sweeps.items():
        assert sweep.wait() == 0, (folder / "stderr").read_text()
        rows |= outcomes.read(folder / "rows.jsonl")
    assert {name: row["outcome"] for (_, name), row in rows.items()} == faults.OUTCOMES
    assert "faint" in rows["faults", "gradient_wrong"]["where"]
    assert "raised on purpose" in rows["faults", "raises"]["error"]


def test_table():
    rows = [
        {"family": "a", "name": "one", "outcome": "equal", "difference": 1e-8},
        {"family": "a", "name": "two", "outcome": "refused", "error": "ValueError: a | b"},
        {"family": "b", "name": "three", "outcome": "wrong", "difference": 0.5, "where": "loss"},
        {"family": "b", "name": "four", "outcome": "eager fails", "error": "ImportError: natten"},
    ]
    assert outcomes.markdown(rows).splitlines() == [
        "| family | trained by eager | equal | wrong | refused | crashed | timeout |",
        "|---|---|---|---|---|---|---|",
        "| a | 2 | 1 | 0 | 1 | 0 | 0 |",
        "| b | 1 | 0 | 1 | 0 | 0 | 0 |",
        "| all | 3 | 1 | 1 | 1 | 0 | 0 |",
        "",
        "| model | outcome | reason |",
        "|---|---|---|",
        "| a `two` | refused | ValueError: a \\| b |",
        "| b `three` | wrong | 5.0e-01, gradients 0.0e+00 at loss |",
    ]
