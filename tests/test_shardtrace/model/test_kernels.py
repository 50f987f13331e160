import shardtrace
from passes.plan import default_cost_model
from shardtrace.model.tracing import add_kernels
from shardtrace.testing import compile_fake
from shardtrace.testing import fake_ranks as in_fake_ranks

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.executors.torch_compile import torch_compile_ex
from torch import nn


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width=16):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        heads = [t.view(rows, length, 2, width // 2).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def lines(blocks):
    """The lines of both executed traces, with those that free values and without the headers of functions."""
    x = torch.randn(2, 4, 16)
    with in_fake_ranks(2):
        jitted = compile_fake(lambda: nn.Sequential(*(Block() for _ in range(blocks))), x)
    return [len(traces(jitted)[-1].bound_symbols) for traces in (thunder.last_traces, thunder.last_backward_traces)]


def test_a_block_of_zero3_has_few_lines():
    forward, backward = (two - one for one, two in zip(lines(1), lines(2), strict=True))
    assert forward <= 60
    assert backward <= 100


def executors_of(jitted):
    jitted(torch.ones(3, 4)).sum().backward()
    names = [executor.name for executor in thunder.compile_data(jitted).executors_list]
    return [name for name in names if not name.startswith("__ad_hoc")]  # Thunder's own


DEFAULT = ["torch_calls", "sdpa", "torch_kernels", "torchcompile_xentropy", "torch", "python"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_by_default(fake_ranks, world_size):
    fake_ranks(world_size)
    jitted = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4)))
    assert executors_of(jitted) == DEFAULT
    assert executors_of(jitted) == DEFAULT


def test_on_if_the_model_was_jitted_before(fake_ranks):
    fake_ranks(2)
    assert executors_of(shardtrace.fsdp(thunder.jit(nn.Linear(4, 4)))) == DEFAULT


def test_off(fake_ranks):
    fake_ranks(2)
    jitted = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4), compile_policy=shardtrace.CompilePolicy(kernels=False)))
    assert "torch_kernels" not in executors_of(jitted)


@pytest.mark.parametrize("chosen", [["torch"], ["sdpa"], []])
def test_chosen_executors_stay(fake_ranks, chosen):
    fake_ranks(2)
    jitted = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4)), executors=chosen)
    assert "torch_kernels" not in executors_of(jitted)


def test_added_by_hand(fake_ranks):
    fake_ranks(2)
    jitted = thunder.jit(shardtrace.fsdp(nn.Linear(4, 4)), executors=[shardtrace.kernels])
    assert executors_of(jitted) == ["torch_calls", "torch_kernels", "torch", "python"]


def test_off_if_a_default_executor_fuses(monkeypatch):
    """As nvFuser does where it is installed."""
    defaults = (torch_compile_ex, *thunder.get_default_executors())
    monkeypatch.setattr("shardtrace.model.tracing.get_default_executors", lambda: defaults)

    class Data:
        executors_list = (*defaults, *thunder.get_always_executors())

    add_kernels(Data, default_cost_model("cpu", "gloo"))
    assert shardtrace.kernels not in Data.executors_list
