import warnings

import shardtrace

import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn


@on_ranks(2)
def test_batch_norm_buffers():
    """Each rank has its own running statistics: full_state_dict warns until sync_buffers has made them equal."""
    model = shardtrace.fsdp(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    thunder.jit(model)(torch.randn(8, 4) * (1 + dist.get_rank()) + dist.get_rank()).sum().backward()
    means = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(means, model[1].running_mean)
    assert not torch.equal(means[0], means[1])
    said = []
    for sync in (lambda model: None, shardtrace.sync_buffers):
        sync(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = shardtrace.full_state_dict(model)["1.running_mean"]
        said.append([str(w.message) for w in caught])
    torch.testing.assert_close(found, torch.stack(means).mean(0))
    assert model[1].num_batches_tracked == 1
    assert said[1] == []
    assert said[0] == [
        "2 buffers differ between ranks ('1.running_mean' and others): each rank has its own in its state dict, and "
        "a checkpoint gets the first rank's; call shardtrace.sync_buffers(model) before"
    ]
