"""The table of what was proven, printed at the end."""

import sys
from pathlib import Path

import pytest
import torch
from proof import Proof, table

# the tests of rounded buckets, which run on GPUs, too
sys.path.append(str(Path(__file__).parents[1] / "test_passes" / "comm"))

PROOFS = pytest.StashKey[list[Proof]]()


@pytest.fixture
def proves(request):
    """Adds a line to the table: ``proves(what, case, result)``."""

    def add(what, case, result):
        request.config.stash.setdefault(PROOFS, []).append(Proof(what, case, result))

    return add


def pytest_terminal_summary(terminalreporter):
    if not torch.cuda.is_available():
        return
    proofs = terminalreporter.config.stash.get(PROOFS, [])
    counts = {outcome: len(terminalreporter.stats.get(outcome, [])) for outcome in ("passed", "failed", "skipped")}
    terminalreporter.section("what this run has proven")
    terminalreporter.line(table(proofs) if proofs else "nothing")
    terminalreporter.line(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    for reason in sorted({report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])}):
        terminalreporter.line(f"not proven: {reason}")
