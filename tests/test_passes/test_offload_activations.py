"""What blocks save is kept in host memory: the lines, the numbers, the memory of the device, and the proof."""

import re
from functools import partial

import shardtrace
from passes.analysis.calls import block_function
from passes.analysis.liveness import step_liveness
from passes.analysis.recognise import TRIP_WAITS, is_deletion, is_trip
from passes.analysis.verify import VerificationError
from passes.pipeline import PassAfterLowering
from passes.plan import HostMemory
from passes.proof.prove import UnprovenStepError
from passes.save import LOAD, STORE

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from golden import compile_fake, text
from models import Block, Net
from thunder.core.trace import from_trace
from thunder.executors.passes import del_last_used
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

X = torch.linspace(-1, 1, 24).view(4, 6)
WAYS = ["host", "cheap+host", "full+host"]


def net(blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Net(*(Block() for _ in range(blocks))))


def step_of(compiled):
    return thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]


def trips(trace):
    lines = [b for b in trace.bound_symbols if is_trip(b) or b.sym.id in TRIP_WAITS or block_function(b)]
    return re.sub(r"(saved|stored)\d+", r"\1", text(with_lines(trace, lines), dels=False))


def with_lines(trace, lines):
    new = from_trace(trace)
    new.bound_symbols = lines
    return new


def test_lines(fake_ranks):
    fake_ranks(2)
    compiled = compile_fake(net, X, activation_checkpointing={"1.blocks.0": "host", "1.blocks.1": "host"})
    forward, backward = step_of(compiled)
    assert_expected_inline(
        trips(forward),
        """\
(t0, saved) = Block_forward(t1, t2, t3, t4, t5)
ft6 = store((saved, t1), away_1_blocks_0)
(t7, saved) = Block_forward(t0, t8, t9, t10, t11)
stored = wait_store(ft6, away_1_blocks_0)
ft12 = store((saved, t0), away_1_blocks_1)
(t13, saved) = Block_forward(t7, t14, t15, t16, t17)
stored = wait_store(ft12, away_1_blocks_1)""",
    )
    assert_expected_inline(
        trips(backward),
        """\
ft0 = load(stored, away_1_blocks_1)
(t1, t2, t3, t4, t5) = Block_backward(saved, t6, bw_t7, bw_t8, bw_t9, t10)
ft11 = load(stored, away_1_blocks_0)
(saved, t12) = wait_load(ft0, away_1_blocks_1)
(t13, t14, t15, t16, t17) = Block_backward(saved, t12, bw_t18, bw_t19, bw_t20, t1)
(saved, t21) = wait_load(ft11, away_1_blocks_0)
(t22, t23, t24, t25, t26) = Block_backward(saved, t21, bw_t27, bw_t28, bw_t29, t13)""",
    )


def gradients(way, strategy, use):
    model = net()
    sharded = shardtrace.fsdp(model, sharding_strategy=strategy, activation_checkpointing=way)
    use(sharded)
    return [p.grad.clone() for p in model.parameters()]


def twice(model):
    loss = model(X).logsumexp(-1).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_batches(model):
    first, second = (model(x).logsumexp(-1).sum() for x in (X, X[:2]))
    first.backward()
    second.backward()


def accumulated(model):
    with shardtrace.no_sync(model):
        model(X).sum().backward()
    model(X).logsumexp(-1).sum().backward()


@pytest.mark.parametrize("use", [twice, two_batches, accumulated])
def test_numbers(single_rank, use):
    expected = gradients(None, "zero3", use)
    for way in WAYS:
        found = gradients(way, "zero2" if way == "host" else "zero3", use)
        assert all(map(torch.equal, found, expected)), way


def test_the_memory_of_the_device_is_free_meanwhile(single_rank, monkeypatch):
    """Nothing holds what has travelled, from its wait in forward to its load in backward."""
    model, sent, copy = shardtrace.fsdp(net(), activation_checkpointing="host"), [], HostMemory.copy
    model(X).sum().backward()  # compiles

    def noting(host, values):
        sent.append(StorageWeakRef(values.untyped_storage()))
        return copy(host, values)

    monkeypatch.setattr(HostMemory, "copy", noting)
    loss = model(X).sum()
    assert len(sent) > 3
    assert all(ref.expired() for ref in sent)
    loss.backward()


def test_less_memory_is_predicted(fake_ranks):
    fake_ranks(2)
    x = torch.ones(512, 6)

    def peak(way):
        return step_liveness(*step_of(compile_fake(partial(net, 6), x, activation_checkpointing=way))).peak

    assert peak("host") < 0.5 * peak(None)
    assert peak("full+host") < 0.8 * peak("full")


def test_frozen_blocks_store_nothing(fake_ranks):
    fake_ranks(2)

    def build():
        model = net()
        for module in (model[0], model[1].blocks[0], model[1].blocks[1]):
            module.requires_grad_(False)
        return model

    assert "store" not in trips(step_of(compile_fake(build, X, activation_checkpointing="host"))[0])


# ---- wrong steps ----


def swapped(trace):
    """Backward loads what another block has stored."""
    lines = [b for b in trace.bound_symbols if not is_deletion(b)]
    loads = [b for b in lines if b.sym.id == LOAD.issue.id]
    new = {id(a): a.from_bsym(args=(b.args[0], a.args[1])) for a, b in zip(loads, loads[1:] + loads[:1], strict=True)}
    return del_last_used(with_lines(trace, [new.get(id(b), b) for b in lines])) if loads else trace


def without_waits(trace):
    """The memory of the device is used again while it is copied."""
    return with_lines(trace, [b for b in trace.bound_symbols if b.sym.id != STORE.wait.id])


@pytest.mark.parametrize(("wrong", "error"), [(swapped, UnprovenStepError), (without_waits, VerificationError)])
def test_wrong_copies_are_found(fake_ranks, wrong, error):
    fake_ranks(2)
    with pytest.raises(error):
        compile_fake(net, X, activation_checkpointing="host", transforms=[PassAfterLowering(wrong)])
