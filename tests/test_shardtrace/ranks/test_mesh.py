"""Models on different process groups."""

import shardtrace

import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens
from ranks import on_ranks
from sharded_training import ROWS, my_rows


@on_ranks(3)
def test_different_groups():
    """Two models in one process: one on all ranks, the other on the first two. The third rank has only the first."""
    pair = dist.new_group([0, 1])
    torch.manual_seed(0)
    wide, narrow = Zoo(), Zoo()
    expected = {k: v.clone() for k, v in narrow.state_dict().items()}
    shardtrace.fsdp(wide)
    models = [thunder.jit(wide)]
    if dist.get_rank() < 2:
        models.append(thunder.jit(shardtrace.fsdp(narrow, mesh=pair, sharding_strategy="zero2")))
    for _ in range(2):
        for cmodel in models:
            cmodel(*my_rows(tokens(ROWS))).backward()
    if dist.get_rank() < 2:
        full = shardtrace.full_state_dict(narrow)
        torch.testing.assert_close(dict(full), expected, rtol=0, atol=0)
