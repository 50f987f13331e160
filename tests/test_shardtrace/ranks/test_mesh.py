"""Models on different process groups."""

import shardtrace
from shardtrace.ranks.mesh import choose_device

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


def test_the_device_is_chosen_as_by_fsdp2(fake_ranks, monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda:1")
    assert choose_device(None, None, cpu) == cpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device(None, None, cpu) == gpu  # no process group yet: it will be one of nccl
    assert choose_device("cpu", None, gpu) == cpu
    fake_ranks(2)
    assert choose_device(None, None, cpu) == cpu  # these ranks cannot reach GPUs
    assert choose_device(None, None, cpu, on_host=True) == gpu
    assert choose_device(None, None, torch.device("cuda:0")) == torch.device("cuda:0")
    mesh = dist.init_device_mesh("cpu", (2,))
    assert choose_device(None, mesh, gpu) == cpu
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert choose_device(None, None, cpu) == gpu
