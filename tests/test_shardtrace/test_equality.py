"""Sharded training compared with one process that trains on the whole batch: losses, parameters, gradients."""

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from sharded_training import train_zoo

PARTS = {"embed*": "ddp", "blocks.0.*": "owner", "blocks.*": "zero3", "*": "zero2"}


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "bucketing", "optimizer", "late"),
    [
        ("zero2", 0.0005, "adamw", False),
        ("zero3", "layer", "sgd", False),  # sgd shows gradients that are wrong by a factor
        ("zero3", 0.0005, "adamw", True),
        ("ddp", "none", "adamw", True),
        ("owner", "model", "adamw", True),
    ],
)
def test_two_ranks(strategy, bucketing, optimizer, late):
    """Some run over a backend that behaves like nccl, the others by messages of gloo. The other buckets make no other
    lines: tests/test_passes proves them."""
    train_zoo(strategy, bucketing, optimizer, late=late, evaluate=late or strategy == "zero3")


@on_ranks(3)
@pytest.mark.parametrize("late", [False, True])
def test_three_ranks(late):
    """A model with every kind of collective."""
    train_zoo(PARTS, late=late)


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [({"embed*": "ddp", "*": "hybrid_zero3"}, None), ("hybrid_zero3", "bf16")],
)
def test_hybrid(strategy, precision):
    """The other hybrid strategy is in training/test_accumulation.py."""
    train_zoo(strategy, mesh=(2, 2), precision=precision, late=precision is not None, evaluate=precision is None)


@on_ranks(2)
def test_bf16():
    train_zoo(PARTS, precision="bf16")


class Mixed(torch.nn.Module):
    """Parameters of three dtypes in one block."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 5), torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)])
        self.layers[1].to(torch.bfloat16)
        self.layers[2].to(torch.float16)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float().square().mean()


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_mixed_dtypes(strategy):
    torch.manual_seed(0)
    expected, model = Mixed(), Mixed()
    model.load_state_dict(expected.state_dict())
    x = torch.randn(4 * dist.get_world_size(), 4)
    cmodel = thunder.jit(shardtrace.fsdp(model, sharding_strategy=strategy, bucketing_strategy=100))
    expected(x).backward()
    cmodel(x[4 * dist.get_rank() :][:4]).backward()
    assert {(c.kind, c.dtype) for c in shardtrace.collectives(cmodel)} >= {
        (kind, dtype) for kind in ("all_gather", "reduce_scatter") for dtype in ("f32", "bf16", "f16")
    }
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == q.dtype
        torch.testing.assert_close(
            p.grad.full_tensor(), q.grad, rtol=2e-2, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@on_ranks(2)
def test_accumulation_and_hooks():
    """Gradients add up over backward passes, and hooks on shards run."""
    model = torch.nn.Linear(4, 6)
    cmodel = thunder.jit(shardtrace.fsdp(model))
    seen = []
    model.weight.register_hook(lambda grad: seen.append(grad.shape))
    cmodel(torch.ones(2, 4)).sum().backward()
    once = model.weight.grad.clone()
    cmodel(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model.weight.grad, 2 * once)
    assert seen == [model.weight.shape] * 2
