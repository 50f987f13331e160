"""One error for all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from shardtrace.checkpoint.files import CheckpointError
from shardtrace.checkpoint.state import ModelState
from shardtrace.ranks.consensus import RankMismatchError, compare
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException


@dataclass
class Said:
    """What a rank says before ranks are compared: its lines, and for how many seconds the others may be busy, in
    addition to the timeout of ``fsdp``."""

    lines: list[str] = field(default_factory=list)
    timeout: float = 0.0


@contextmanager
def agreement(model: ModelState, what: str, *errors: type[Exception]) -> Iterator[Said]:
    """Around a block that runs on every rank and communicates nothing; yields what it fills in.

    Raises CheckpointError on every rank if a block has raised one of ``errors`` or a CheckpointError, or if the ranks
    have said different lines.
    """
    said, found = Said(), ""
    caught: tuple[type[Exception], ...] = (CheckpointError, *errors)
    try:
        yield said
    except caught as error:
        found = str(error)
    if model.group is not None:
        timeout = said.timeout + model.states[0].options.checks.timeout
        try:
            compare(model.group, what, said.lines, timeout=timeout, error=found)
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
