"""Regions that torch.compile compiles take the lines of torch."""

import shardtrace
from passes.kernels.executors import Regions, with_regions

import pytest
import thunder
import torch
import torch.nn.functional as F
from eager import uncompiled
from thunder.executors.torch_compile import torch_compile_cat_ex, torch_compile_ex
from torch import nn

EXECUTORS = ["sdpa", "torch_kernels", "torchcompile"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))).square())


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x).tanh()
        return self.second(x + torch.rand_like(x)).tanh()


class Gates(nn.Module):
    """Backward begins with zeros, the gradient of the second half."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        states = self.linear(x).unbind(-1)
        return torch.stack([F.silu(s) for s in states[:3]]).exp()


class Deep(nn.Module):
    """Equal blocks, and before them a scale of two numbers. Random numbers are in no region."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.blocks = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])

    def forward(self, x):
        scale = self.scale.square().exp().sum()
        x = torch.rand_like(x) * scale * x
        for block in self.blocks:
            x = torch.rand_like(x) * block(x).tanh().sin()
        return x


def compiled(model, x, **policy):
    """The jitted model after a step that was proven, and its gradients; regions run uncompiled."""
    policy = shardtrace.CompilePolicy(jit={"executors": EXECUTORS}, **policy)
    sharded = shardtrace.fsdp(model, compile_policy=policy, checks=shardtrace.Checks(prove=True))
    with uncompiled():
        sharded(x).sum().backward()
    return sharded, [p.grad for p in sharded.parameters()]


def inside(trace):
    """The names of the lines in each region of a trace."""
    return [[line.sym.name for line in b.subsymbols] for b in trace.bound_symbols if b.sym.is_fusion]


def of_step(model):
    return inside(thunder.last_traces(model)[-1]), inside(thunder.last_backward_traces(model)[-1])


def test_forward_is_a_region_and_backward_another(single_rank):
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    block = Block()
    block(x).sum().backward()
    expected = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    sharded, found = compiled(block, x)
    [forward], [backward] = of_step(sharded)
    assert forward[0] == "aten_native_layer_norm"
    assert forward[-1] == "torch_add_0"
    assert backward.count("aten_mm") == 4
    assert "torch_gelu_0" in backward  # cheap: it is computed again
    assert "torch_linear_0" not in backward  # a product is not
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_random_numbers_are_drawn_by_torch(single_rank):
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(3, 4)
    torch.manual_seed(1)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    sharded, found = compiled(model, x)
    forward, _ = of_step(sharded)
    assert len(forward) == 2
    assert not any("rand" in name for region in forward for name in region)
    torch.testing.assert_close(found, expected)


def test_a_line_without_parts_is_in_no_region(single_rank):
    """Thunder would drop it from the region."""
    _, found = compiled(Gates(), torch.randn(3, 4))
    assert all(torch.isfinite(g).all() for g in found)
    zeros = thunder.torch.zeros.bind(3, output=None)
    assert torch_compile_ex.can_fuse(zeros)
    assert not Regions().can_fuse(zeros)


def test_a_product_alone_is_no_region(single_rank):
    sharded, _ = compiled(nn.Linear(4, 4), torch.randn(3, 4))
    assert of_step(sharded)[0] == []


def test_small_regions_stay_lines(single_rank, monkeypatch):
    """See Note [Small regions]. Each block saves 4 % of forward and backward, both together enough."""
    monkeypatch.setattr("passes.kernels.executors.SMALL", 0.06)
    sharded, _ = compiled(Deep(), torch.randn(512, 256))
    first, second = forward = of_step(sharded)[0]
    assert first == second
    assert "torch_tanh_0" in first
    outside = [b.sym.name for b in thunder.last_traces(sharded)[-1].bound_symbols]
    assert "torch_exp_0" in outside
    assert not any("torch_exp_0" in region for region in forward)


@pytest.mark.parametrize("kernels", [True, False])
def test_only_where_kernels_are_wanted(single_rank, kernels):
    sharded, _ = compiled(Block(), torch.randn(3, 4), kernels=kernels)
    (forward, *_), _ = of_step(sharded)
    assert ("torch_gelu_0" in forward) == kernels


def test_other_executors_stay():
    assert with_regions((torch_compile_cat_ex, torch_compile_ex))[1] == torch_compile_ex
    assert with_regions((torch_compile_cat_ex,))[0] is torch_compile_cat_ex
