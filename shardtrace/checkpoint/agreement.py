"""One error for all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from shardtrace.checkpoint.files import CheckpointError
from shardtrace.checkpoint.state import ModelState
from shardtrace.ranks.consensus import RankMismatchError, compare
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException


def agree(model: ModelState, what: str, lines: list[str], error: Exception | None, *, timeout: float = 0.0) -> None:
    """Raise CheckpointError on every rank if one of them has an error, or if their lines differ.

    Args:
        timeout: seconds to wait for the other ranks, in addition to the timeout of ``fsdp``.
    """
    found = str(error) if error is not None else ""
    if model.group is not None:
        timeout += model.states[0].options.timeout
        try:
            compare(model.group, what, lines, timeout=timeout, error=found)
        except RankMismatchError as mismatch:
            found = found or str(mismatch)
    if found:
        raise CheckpointError(found) from None


@contextmanager
def together(group: dist.ProcessGroup | None, what: str, failure: str) -> Iterator[dict[str, Any]]:
    """Around a call of torch.distributed.checkpoint; yields its arguments for the ranks of ``group``.

    Raises CheckpointError that begins with ``failure`` and has the failures of all ranks.
    """
    alone = group is None or is_alone(group)
    try:
        with nullcontext() if group is None else communicating(what, group), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield {"process_group": None if alone else group, "no_dist": alone}
    except CheckpointException as exception:
        failures = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(exception.failures.items())]
        raise CheckpointError(f"{failure}: {'; '.join(failures)}") from None
