from dataclasses import replace

from passes.analysis.calls import block_functions
from passes.analysis.flops import bytes_made, bytes_moved, flops
from passes.analysis.liveness import sequence_bytes
from passes.analysis.recognise import bucket_of, is_issue, is_sequence_issue, is_sequence_wait, is_wait
from passes.analysis.seconds import block_seconds, compute_seconds, link_seconds, sequence_seconds, wire_seconds
from passes.plan import CostModel, Device, Link, Wire
from shardtrace import CommPolicy, CompilePolicy, ContextParallel
from shardtrace.inspector.timeline import predicted

import pytest
import thunder
import torch
from golden import compile_fake
from torch import nn
from torch.distributed import init_device_mesh
from toy_gpt import GPT, GPTConfig

MODEL = CostModel(Link(bandwidth=1000.0, latency=0.5), Device(flops=2e3, half_flops=8e3, bandwidth=1e3, overhead=0.25))


def product(dtype):
    """The lowered line of a matrix product."""
    jitted = thunder.jit(torch.matmul)
    jitted(torch.ones(3, 4, dtype=dtype), torch.ones(4, 5, dtype=dtype))
    (line,) = [b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name == "matmul"]
    return line


def test_arithmetic_then_memory():
    line = product(torch.float32)
    work, moved, made = flops(line), bytes_moved(line), bytes_made(line)
    assert (work, moved, made) == (120, 4 * (12 + 20 + 15), 4 * 15)

    def seconds(line, **rates):
        return compute_seconds(replace(MODEL, device=replace(MODEL.device, **rates)), line)

    assert seconds(line, flops=1.0, half_flops=1e9) == pytest.approx(0.25 + work + moved / 1e3)
    assert seconds(line, flops=1e9, bandwidth=2.0) == pytest.approx(0.25 + moved / 2)
    assert seconds(line, flops=1e9, bandwidth=1e9, allocation=2.0) == pytest.approx(0.25 + made / 2)
    half = product(torch.bfloat16)
    assert seconds(half, flops=1e9, half_flops=2.0, bandwidth=1e9, overhead=0.0) == pytest.approx(work / 2, rel=1e-6)


def test_a_collective_takes_its_part_of_the_device_where_it_is_issued(fake_ranks):
    fake_ranks(2)
    forward = thunder.last_traces(compile_fake(lambda: nn.Linear(4, 4), torch.ones(2, 4)))[-1]
    (gather,) = [b for b in forward.bound_symbols if is_issue(b)]
    cost = replace(MODEL, link=replace(MODEL.link, busy=0.5, busy_per_byte=0.1))
    assert compute_seconds(MODEL, gather) == 0
    assert compute_seconds(cost, gather) == 0.5 + 0.1 * bucket_of(gather).bytes / 2


def test_a_block_waits_for_parts_of_a_sequence(fake_ranks):
    """For keys and values, which follow each other, less what it computes between."""
    fake_ranks(2)
    gather = ContextParallel("context", attention="gather")
    mesh = {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context")), "context_parallel": gather}
    tokens = torch.zeros(2, 16, dtype=torch.long)
    config = GPTConfig(n_layer=2, n_embd=16, n_head=2, block_size=16, vocab_size=32, dropout=0.0)
    cmodel = compile_fake(lambda: GPT(config), tokens, tokens, **mesh)
    block = block_functions(thunder.last_traces(cmodel)[-1])[0]
    lines = block.trace.bound_symbols
    slow = replace(MODEL, link=Link(bandwidth=1e9, latency=1e6))
    first, second = (i for i, b in enumerate(lines) if is_sequence_issue(b))
    last = max(i for i, b in enumerate(lines) if is_sequence_wait(b))
    assert sequence_bytes(lines[first]) == 2 * 16 * 16 * 4
    seconds = [compute_seconds(slow, b) for b in lines]
    found = block_seconds(slow, block)
    exposed = sum(sent.exposed for sent in found.sent)
    assert [sent.issue for sent in found.sent] == [lines[first], lines[second]]
    assert found.total == pytest.approx(sum(seconds) + exposed)
    links = sequence_seconds(slow, lines[first]) + sequence_seconds(slow, lines[second])
    assert exposed == pytest.approx(links - sum(seconds[first + 1 : last]))
    fast = replace(MODEL, link=Link(bandwidth=1e15, latency=0.0))
    assert all(sent.exposed < 1e-9 * block_seconds(fast, block).total for sent in block_seconds(fast, block).sent)
    timeline = predicted([thunder.last_traces(cmodel)[-1]], slow)[0]
    of_blocks = [span for span in timeline.spans if span.in_block]
    assert sum(span.exposed for span in of_blocks) == pytest.approx(2 * exposed)
    assert [span.stop - span.start for span in of_blocks] == pytest.approx(2 * [s.stop - s.start for s in found.sent])


def test_links_inside_a_machine_take_their_own_part():
    inside, between = Link(2e3, 0.5, busy=0.25), Link(1e3, 0.5, busy=1.0)
    cost = CostModel(between, MODEL.device, inside, 4)
    assert cost.busy_seconds(1000, 4) == 0.25
    assert cost.busy_seconds(1000, 2, apart=True) == 1.0
    assert cost.busy_seconds(1000, 1) == 0


def test_a_wire_takes_the_device_before_its_message_leaves_and_after_it_has_arrived(fake_ranks):
    """A matrix in blocks of 256, a bias as it is. On each of two ranks 2048 and 32 elements."""
    fake_ranks(2)
    line, x = (lambda: nn.Linear(64, 64)), torch.ones(2, 64)
    forward = thunder.last_traces(
        compile_fake(
            line, x, comm_policy=CommPolicy(gather_dtype="int8"), compile_policy=CompilePolicy(cost_model=MODEL)
        )
    )[-1]
    (gather,) = [b for b in forward.bound_symbols if is_issue(b)]
    (wait,) = [b for b in forward.bound_symbols if is_wait(b)]
    packed = 0.25 * (8 + 1) + (33 * 2048 + 2 * 32 * 4) / 1e3  # kernels, and the bytes of their memory
    restored = 0.25 * (2 + 2) + (13 * 4096 + 4 * 64 * 4) / 1e3  # of two ranks, at once
    assert compute_seconds(MODEL, gather) == wire_seconds(MODEL, gather) == pytest.approx(packed)
    assert compute_seconds(MODEL, wait) == wire_seconds(MODEL, wait) == pytest.approx(restored)
    (timeline,) = predicted([forward], MODEL)
    (span,) = timeline.spans
    assert span.start == pytest.approx(timeline.starts[span.issue] + packed)
    assert timeline.starts[span.wait + 1] == pytest.approx(span.stop + restored)


def test_a_reduction_is_rounded_for_others_and_added_here(fake_ranks):
    fake_ranks(4)
    x = torch.ones(2, 64)
    jitted = compile_fake(
        lambda: nn.Linear(64, 64, bias=False),
        x,
        comm_policy=CommPolicy(reduce_wire="int4"),
        compile_policy=CompilePolicy(cost_model=MODEL),
    )
    backward = thunder.last_backward_traces(jitted)[-1]
    (reduce,) = [b for b in backward.bound_symbols if is_issue(b) and bucket_of(b).wire is not None]
    issue, finish, late = bucket_of(reduce).work
    assert not late
    assert issue == pytest.approx(
        (9 + 2, 3 * 36.5 * 1024 + 8 * 1024)
    )  # for three ranks at once; the own part is copied
    assert finish == pytest.approx((3 * 7, 3 * 21 * 1024))


def test_the_second_half_of_an_all_reduce_on_a_wire_is_waited_for(fake_ranks):
    fake_ranks(2)
    x, options = (
        torch.ones(2, 64),
        {
            "sharding_strategy": "ddp",
            "comm_policy": CommPolicy(reduce_wire="int8"),
            "compile_policy": CompilePolicy(cost_model=MODEL),
        },
    )
    backward = thunder.last_backward_traces(compile_fake(lambda: nn.Linear(64, 64, bias=False), x, **options))[-1]
    (reduce,) = [b for b in backward.bound_symbols if is_issue(b)]
    (wait,) = [b for b in backward.bound_symbols if is_wait(b)]
    bucket, half = bucket_of(reduce), 4096 + 16 * 4  # codes, and a scale for each 256 of them
    assert (bucket.crossings * bucket.bytes, bucket.work.late) == (2 * half, half)
    assert link_seconds(reduce) == pytest.approx(MODEL.collective_seconds(half, 2))
    worked = MODEL.kernel_seconds(bucket.work.finish)
    assert wire_seconds(MODEL, wait) == pytest.approx(worked + MODEL.collective_seconds(half, 2))


def test_a_wire_of_a_user_takes_no_time(fake_ranks):
    fake_ranks(2)
    full = torch.zeros(4, 4), torch.zeros(4)
    wire = Wire(lambda tensors, bucket: None, lambda future, bucket: full, lambda bucket: 7)
    forward = thunder.last_traces(
        compile_fake(lambda: nn.Linear(4, 4), torch.ones(2, 4), comm_policy=CommPolicy(gather_dtype=wire))
    )[-1]
    (gather,) = [b for b in forward.bound_symbols if is_issue(b)]
    assert bucket_of(gather).bytes == 7
    assert compute_seconds(MODEL, gather) == 0
