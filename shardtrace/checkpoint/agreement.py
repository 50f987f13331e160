"""One error for all ranks."""

from __future__ import annotations

from shardtrace.checkpoint.files import CheckpointError
from shardtrace.checkpoint.state import ModelState
from shardtrace.ranks.consensus import RankMismatchError, compare


def agree(model: ModelState, what: str, lines: list[str], error: Exception | None, *, timeout: float = 0.0) -> None:
    """Raise CheckpointError on every rank if one of them has an error, or if their lines differ.

    Args:
        timeout: seconds to wait for the other ranks, in addition to the timeout of ``fsdp``.
    """
    found = str(error) if error is not None else ""
    if model.group is not None:
        timeout += model.states[0].options.checks.timeout
        try:
            compare(model.group, what, lines, timeout=timeout, error=found)
        except RankMismatchError as mismatch:
            found = found or str(mismatch)
    if found:
        raise CheckpointError(found) from None
