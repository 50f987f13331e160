"""Gradients on their way to the host, after their reduction."""

from __future__ import annotations

from passes.plan import Bucket
from passes.plan.host_memory import Sent

import torch


def issue_offload(grads: tuple[torch.Tensor, ...], bucket: Bucket) -> Sent:
    """This rank's shards of a bucket's gradients start for the host."""
    assert bucket.plan.host is not None
    return bucket.plan.host.send(bucket.layout.flat_row(grads))


def finish_offload(future: Sent, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """Waits, with the program: what follows is the optimizer's, on the host."""
    future.copied.synchronize()
    return bucket.layout.unpack_row(future.row)
