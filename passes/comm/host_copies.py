"""Copies of reduced gradients to the host, and the end of copies of shards from there."""

from __future__ import annotations

from passes.plan import Bucket
from passes.plan.host_memory import Sent

import torch
from thunder.core.codeutils import ContextObject


def issue_offload(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> Sent:
    """Starts to copy this rank's shards of a bucket's gradients to the host."""
    assert bucket.plan.host is not None
    return bucket.plan.host.send(bucket.layout.flat_row(grads))


def finish_offload(future: Sent, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """Blocks the program, because the optimizer runs next on the host."""
    future.copied.synchronize()
    return bucket.layout.unpack_row(future.row)


def finish_copies(memory: ContextObject) -> None:
    """Blocks the program until shards are read, because the optimizer may change them next."""
    memory.obj.finish_loads()
