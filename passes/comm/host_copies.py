"""Copies of reduced gradients to the host, and the end of all copies to and from there."""

from __future__ import annotations

from passes.plan import Bucket

import torch
from thunder.core.codeutils import ContextObject


def issue_offload(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> torch.Tensor:
    """Starts to copy this rank's shards of a bucket's gradients to the host."""
    assert bucket.plan.host is not None
    return bucket.plan.host.send(bucket.layout.flat_row(grads))


def finish_offload(row: torch.Tensor, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """This rank's shards. Nobody may read them before :func:`finish_copies`."""
    return bucket.layout.unpack_row(row)


def finish_copies(memory: ContextObject) -> None:
    """Blocks the program until gradients have arrived and shards are read, because the optimizer runs next."""
    memory.obj.finish()
