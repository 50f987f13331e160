"""Parameters in host memory. (Traces: tests/test_passes/comm/test_host_copies.py; on a GPU: tests/gpu.)"""

import copy

import shardtrace

import pytest
import thunder
import torch
from golden import text
from hosts import slow_host
from models import Zoo, tokens
from ranks import on_ranks
from sharded_training import (
    ROWS,
    expected_gradients,
    make_optimizer,
    mean_over_ranks,
    micro_batches,
    my_rows,
    overflow_on_one_rank,
    reference,
    sharded_zoo,
)
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

ON_HOST = {"init_policy": shardtrace.InitPolicy(device="cpu"), "offload_policy": CPUOffloadPolicy()}


def train(strategy, mesh=None):
    model = sharded_zoo(strategy, mesh=mesh, **ON_HOST)
    cmodel = thunder.jit(model)
    optimizer = make_optimizer("adamw", model.parameters())
    losses = []
    for step in range(3):
        loss = cmodel(*my_rows(tokens(ROWS, step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses, model


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_a_world_of_one_trains_from_host_memory(single_rank, strategy):
    expected_losses, expected = reference(3, "adamw")
    with slow_host():
        found_losses, model = train(strategy)
    torch.testing.assert_close(found_losses, expected_losses, rtol=1e-5, atol=1e-6)
    for name, value in shardtrace.full_state_dict(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6)
    host = model._shardtrace.entries[0].home.host
    assert host.loads > host.sends > 0


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_nothing_reads_a_copy_before_it_is_there(single_rank, strategy):
    torch.manual_seed(0)
    expected = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    model = copy.deepcopy(expected)
    with slow_host(loads_late=True):
        shardtrace.fsdp(model, sharding_strategy=strategy, **ON_HOST)
    x = torch.randn(2, 6)
    for m in (expected, thunder.jit(model)):
        m(x).sum().backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["owner", {"blocks.0.*": "ddp", "*": "zero3"}])
def test_ranks_train_from_host_memory(strategy):
    train_and_compare(strategy)


@on_ranks(2)
def test_replicas_of_one_rank_each():
    train_and_compare("hybrid_zero3", mesh=(2, 1))


def train_and_compare(strategy, mesh=None):
    expected_losses, expected = reference(3, "adamw")
    with slow_host(direct=strategy == "owner"):  # gloo does not gather uneven rows
        losses, model = train(strategy, mesh=mesh)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=2e-6)
    for name, value in shardtrace.full_state_dict(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    with shardtrace.full_params(model):
        torch.testing.assert_close(model.position, expected["position"], rtol=1e-5, atol=2e-6)
    for entry in model._shardtrace.entries:
        replicated = entry.strategy.value == "ddp" or (entry.name == "scale" and strategy != "owner")
        assert (entry.home.host is None) == replicated
        assert entry.home.host is None or entry.home.host.sends > 0


@on_ranks(2)
def test_the_step_around_it(tmp_path):
    """Accumulation, clipping and checkpoints."""
    with slow_host():
        model, other = sharded_zoo(**ON_HOST), sharded_zoo(seed=1, **ON_HOST)
    cmodel, optimizer = thunder.jit(model), make_optimizer("adamw", model.parameters())
    *inside, last = micro_batches(0, 3)
    with model.no_sync():
        for batch in inside:
            (cmodel(*my_rows(batch)) / 3).backward()
    (cmodel(*my_rows(last)) / 3).backward()
    _, expected = expected_gradients(0, 3)
    found = shardtrace.full_gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)
    norm = shardtrace.clip_grad_norm_(model, 0.1)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(expected.values()), rtol=1e-5, atol=1e-6)
    optimizer.step()

    shardtrace.save_checkpoint(tmp_path, model, optimizer, step=1)
    loaded = make_optimizer("adamw", other.parameters())
    shardtrace.load_checkpoint(tmp_path, other, loaded)
    found = shardtrace.full_state_dict(other)
    for name, value in shardtrace.full_state_dict(model).items():
        assert torch.equal(value, found[name])
    shardtrace.load_full_state_dict(other, found, broadcast_from=0)


@on_ranks(2)
def test_half_precision_with_an_overflow():
    with slow_host():
        overflow_on_one_rank("zero3", **ON_HOST)


def test_on_the_cpu_nothing_changes(fake_ranks):
    fake_ranks(2)
    traces = []
    for policy in (None, OffloadPolicy(), CPUOffloadPolicy()):
        torch.manual_seed(0)
        cmodel = thunder.jit(
            shardtrace.fsdp(Zoo(), init_policy=shardtrace.InitPolicy(device="cpu"), offload_policy=policy)
        )
        cmodel(*tokens(2)).backward()
        traces.append(text(thunder.last_backward_traces(cmodel)[-1]))
    assert traces[0] == traces[1] == traces[2]


def test_replicas_are_not_kept_on_the_host(fake_ranks):
    fake_ranks(2)
    with pytest.raises(ValueError, match='keeps nothing in host memory with sharding_strategy="ddp"'):
        shardtrace.ddp(Zoo(), **ON_HOST)


@pytest.mark.parametrize("policy", [True, "cpu", CPUOffloadPolicy])
def test_what_is_no_policy(fake_ranks, policy):
    fake_ranks(2)
    with pytest.raises(TypeError, match=r"offload_policy must be torch\.distributed\.fsdp\.CPUOffloadPolicy\(\)"):
        shardtrace.fsdp(Zoo(), init_policy=shardtrace.InitPolicy(device="cpu"), offload_policy=policy)
