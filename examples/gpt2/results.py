"""The result of a training: figures that are written as JSON, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from common import table


class Report(TypedDict):
    """Figures of one training. A list of bytes has one entry for each rank."""

    losses: list[float]  # of each step
    val_loss: float | None
    tokens_per_s: float | None
    parameter_bytes: list[int]
    optimizer_bytes: list[int]
    step_bytes: list[int]  # peak memory of tensors in a step, predicted from its traces
    peak_bytes: list[int]  # measured: of torch's allocator on a GPU, else of the whole process
    collectives: dict[str, tuple[int, int]]  # count and bytes


COLUMNS = ("", "rank", "parameters", "optimizer", "a step", "peak", "tokens/s", "final loss", "val. loss")
LEGEND = (
    "in MB: parameters; optimizer state; peak memory of tensors in a step, predicted from its traces; measured\n"
    "peak memory (on a GPU of torch's allocator, on a CPU of the whole process)"
)


def result_table(reports: dict[str, Report]) -> str:
    """One line for each rank of each script. Figures of all ranks stand in the first line."""
    rows: list[Sequence[Any]] = [COLUMNS]
    for name, report in reports.items():
        speed = None if report["tokens_per_s"] is None else f"{report['tokens_per_s']:,.0f}"
        shared = (speed, report["losses"][-1], report["val_loss"])
        kinds = (report["parameter_bytes"], report["optimizer_bytes"], report["step_bytes"], report["peak_bytes"])
        for rank, sizes in enumerate(zip(*kinds, strict=True)):
            megabytes = [f"{size / 1e6:,.2f}" for size in sizes]
            rows.append([name, rank, *megabytes, *shared] if rank == 0 else ["", rank, *megabytes, "", "", ""])
    return f"{table(rows)}\n{LEGEND}"
