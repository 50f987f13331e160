"""Races: none in compiled traces, and one as soon as any wait between two streams is left out."""

import shardtrace
from passes.analysis.recognise import ends_copies
from passes.analysis.verify import COMPUTE, NONE, Wait, Work, actions, races, unordered
from passes.plan import Keep, Level
from shardtrace.testing import compile_only

import pytest
import thunder
import torch
from hosts import on_absent_cuda
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

MIX = {"0.*": "ddp", "1.*": "owner", "2.*": "zero3", "*": "zero2"}


def net():
    """Dropout, blocks, and a frozen parameter."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4)]
    blocks[1][0].bias.requires_grad_(False)
    return nn.Sequential(*blocks)


def compiled(world_size=2, *, kept=None, **options):
    """The forward and the backward of a step on CUDA. ``kept``: inside no_sync, or after it."""
    if world_size == 4:
        options["mesh"] = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shardtrace.fsdp(net(), init_policy=shardtrace.InitPolicy(device="cuda:0"), **options)
    runtime = model._shardtrace.runtime
    runtime.keep = Keep() if kept == "inside" else None
    runtime.kept.used |= {Level.WHOLE} if kept == "after" else set()
    cmodel = thunder.jit(model)
    compile_only(cmodel, ((on_absent_cuda(3, 4),), {}))
    return [thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]]


MATRIX = {
    "zero3": {},
    "zero2": {"sharding_strategy": "zero2", "activation_checkpointing": True},
    "mix": {"sharding_strategy": MIX, "mp_policy": "bf16", "compile_policy": shardtrace.CompilePolicy(prefetch=3)},
    "hybrid": {"world_size": 4, "sharding_strategy": "hybrid_zero3", "mp_policy": "fp16"},
    "inside no_sync": {"kept": "inside"},
    "after no_sync": {"kept": "after", "sharding_strategy": "owner"},
    "offload": {"offload_policy": CPUOffloadPolicy(), "mp_policy": "fp16"},
    "offload of one": {"world_size": 1, "offload_policy": CPUOffloadPolicy()},
    "offload, hybrid": {"world_size": 4, "sharding_strategy": "hybrid_zero2", "offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("case", MATRIX)
def test_each_wait_is_needed(fake_ranks, case):
    fake_ranks(MATRIX[case].get("world_size", 2))
    for trace in compiled(**MATRIX[case]):
        work = list(actions(trace))
        assert races(trace) == unordered(work) == []
        waits = [i for i, action in enumerate(work) if isinstance(action, Wait)]
        stop = {i for i in waits if ends_copies(trace.bound_symbols[work[i].line])}
        dropped = [{i} for i in waits if i not in stop]
        if stop:
            dropped.append(stop)  # it waits for all copies, and later ones follow earlier ones
        assert dropped
        for left_out in dropped:
            assert unordered([action for i, action in enumerate(work) if i not in left_out]), work[min(left_out)]


def test_memory_in_flight_is_not_written(fake_ranks):
    """A write to a shard, and a free of an unsharded parameter, at any line: found exactly while it is in use."""
    fake_ranks(2)
    forward, _ = compiled()
    work, names = list(actions(forward)), [b.sym.name for b in forward.bound_symbols]
    issue, wait = names.index("all_gather"), names.index("wait_all_gather")
    shard = forward.bound_symbols[issue].args[0][0].name
    write = Work(-1, COMPUTE, NONE, frozenset([shard]))
    racing = {work[i].line for i in range(len(work)) if unordered([*work[: i + 1], write, *work[i + 1 :]])}
    assert racing == {line for line in range(issue, wait) if names[line] != "python_del"} - {wait}


def test_a_race_is_told():
    one = frozenset(["t0"])
    found = unordered([Work(0, "copy", NONE, one), Work(1, COMPUTE, one, NONE), Work(2, COMPUTE, NONE, one)])
    assert [(race.line, race.message) for race in found] == [
        (1, "t0 is read by compute, and may still be written by copy"),
        (2, "t0 is written or freed by compute, and may still be written by copy"),
    ]
    ordered = [Work(0, "copy", NONE, one), Wait(1, COMPUTE, "copy"), Work(1, COMPUTE, one, NONE)]
    assert unordered([*ordered, Wait(2, "other", COMPUTE), Work(2, "other", NONE, one)]) == []
    assert len(unordered([*ordered, Work(2, "other", NONE, one)])) == 2  # after a write and a read
