"""What a training has come to: figures that can be kept as JSON, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from common import table


class Report(TypedDict):
    """Lists of bytes are by rank."""

    losses: list[float]  # of each step
    val_loss: float | None
    tokens_per_s: float | None
    parameter_bytes: list[int]
    optimizer_bytes: list[int]
    step_bytes: list[int]  # the peak of tensors in a step, predicted from its traces
    peak_bytes: list[int]  # measured: on a GPU its allocator's, else the whole process's
    collectives: dict[str, tuple[int, int]]  # count and bytes


COLUMNS = ("", "rank", "parameters", "optimizer", "a step", "peak", "tokens/s", "final loss", "val. loss")
LEGEND = (
    "in MB: parameters and the optimizer's state; the most that tensors take in a step, predicted from its\n"
    "traces; and the measured peak (of the whole process, on a GPU of what torch allocated)"
)


def result_table(reports: dict[str, Report]) -> str:
    """A line for each rank of each script; what all ranks share stands in the first."""
    rows: list[Sequence[Any]] = [COLUMNS]
    for name, report in reports.items():
        speed = None if report["tokens_per_s"] is None else f"{report['tokens_per_s']:,.0f}"
        shared = (speed, report["losses"][-1], report["val_loss"])
        kinds = (report["parameter_bytes"], report["optimizer_bytes"], report["step_bytes"], report["peak_bytes"])
        for rank, sizes in enumerate(zip(*kinds, strict=True)):
            megabytes = [f"{size / 1e6:,.2f}" for size in sizes]
            rows.append([name, rank, *megabytes, *shared] if rank == 0 else ["", rank, *megabytes, "", "", ""])
    return f"{table(rows)}\n{LEGEND}"
