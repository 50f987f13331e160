"""The stop at the end of a trace that gathers from host memory."""

import shardtrace
from passes.analysis.recognise import ends_copies
from passes.schedule import wait_copies
from shardtrace.testing import compile_only

import thunder
import torch
from golden import stage
from hosts import on_absent_cuda
from torch.distributed.fsdp import CPUOffloadPolicy


def test_one_stop_at_the_end_of_each_trace(fake_ranks):
    fake_ranks(2)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    cmodel = thunder.jit(
        shardtrace.fsdp(net, init_policy=shardtrace.InitPolicy(device="cuda"), offload_policy=CPUOffloadPolicy())
    )
    compile_only(cmodel, ((on_absent_cuda(3, 4),), {}))
    for traces in (thunder.last_traces, thunder.last_backward_traces):
        lines = stage(cmodel, "wait_copies", traces).bound_symbols
        assert [b for b in lines if ends_copies(b)] == lines[-2:-1]
        assert str(lines[-2]) == "wait_copies(memory_0)"


def test_a_trace_that_gathers_from_the_device_stays_as_it_is(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(torch.nn.Linear(4, 4)))
    compile_only(cmodel, ((torch.ones(3, 4),), {}))
    trace = stage(cmodel, "schedule")
    assert wait_copies(trace) is trace
