"""Mixed precision in a model with batch norms."""

import copy

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d, **options):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), norm(8, **options), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


@pytest.mark.parametrize(("strategy", "precision"), [("zero3", "bf16"), ("ddp", "fp16")])
def test_norms_with_running_statistics_keep_their_dtype(fake_ranks, strategy, precision):
    fake_ranks(2)
    model = shardtrace.fsdp(Net(), mp_policy=precision, sharding_strategy=strategy)
    cmodel = thunder.jit(model)
    out = cmodel(torch.randn(8, 4))
    out.sum().backward()
    low = {"bf16": "bf16", "fp16": "f16"}[precision]
    assert out.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    dtypes = {(c.phase, name, c.dtype) for c in shardtrace.collectives(cmodel) for name in c.parameters}
    backward = {("backward", "norm.weight", "f32"), ("backward", "last.weight", low)}
    forward = {("forward", "norm.weight", "f32"), ("forward", "last.weight", low)} if strategy == "zero3" else set()
    assert dtypes >= forward | backward
    assert model.norm.running_mean.dtype == model.norm.weight.grad.dtype == torch.float32
    assert model.norm.num_batches_tracked == 1
    model.eval()
    assert cmodel(torch.randn(8, 4)).dtype == out.dtype


@pytest.mark.parametrize(
    "net",
    [
        lambda: Net(affine=False),
        lambda: Net(track_running_stats=False),
        lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
        lambda: Net().bfloat16(),
    ],
)
def test_other_norms(fake_ranks, net):
    fake_ranks(2)
    model = shardtrace.fsdp(net(), mp_policy="bf16")
    x = torch.randn(8, 2, 4) if isinstance(model, nn.Sequential) else torch.randn(8, 4)
    assert thunder.jit(model)(x).dtype == torch.bfloat16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, scale, seen):
        seen.append(x.dtype)
        return (self.linear(x) * scale).tanh().float()


class Blocks(nn.Module):
    """Buffers and what blocks return are in fp32."""

    def __init__(self):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 2)
        self.register_buffer("position", torch.linspace(0, 1, 4))

    def forward(self, x):
        seen, x = [], x + self.position
        for block in self.blocks:
            x = block(x, scale=self.position, seen=seen)
        return self.last(x.to(self.last.weight.dtype)), seen


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compile_policy": shardtrace.CompilePolicy(eager=["blocks.1"])},
        {"compile_policy": shardtrace.CompilePolicy(repeated_blocks="inline")},
    ],
)
def test_blocks_cast_their_inputs_as_in_fsdp2(options):
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(torch.bfloat16)
    other, model = (m := Blocks()), copy.deepcopy(m)
    for module in (*other.blocks, other):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)), mp_policy=policy)
    run = thunder.jit(shardtrace.fsdp(model, mp_policy=policy, **options))
    x = torch.randn(3, 4)
    (expected, _), (found, seen) = other(x), run(x)
    assert torch.equal(expected, found)
    assert set(seen) == {torch.bfloat16}
    for result in (expected, found):
        result.sum().backward()
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_local(), b.grad, rtol=2e-2, atol=1e-2)
    with shardtrace.full_params(model):
        assert set(model(x)[1]) == {torch.float32}


@pytest.mark.usefixtures("single_rank")
def test_blocks_that_do_not_cast():
    policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        thunder.jit(shardtrace.fsdp(Blocks(), mp_policy=policy))(torch.randn(3, 4))


def train_in_bf16():
    """A step is close to that of one process in fp32. The statistics are those of this rank's rows."""
    torch.manual_seed(0)
    single = Net()
    model = copy.deepcopy(single)
    cmodel = thunder.jit(shardtrace.fsdp(model, mp_policy="bf16"))
    x = torch.randn(16, 4)
    for run in (single, cmodel):
        run(x).float().square().mean().backward()
    torch.testing.assert_close(model.norm.running_var, single.norm.running_var, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(model.norm.weight.grad.full_tensor(), single.norm.weight.grad, rtol=5e-2, atol=1e-2)
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), single.first.weight.grad, rtol=5e-2, atol=2e-2)


def test_a_step(two_ranks):
    two_ranks.run(train_in_bf16)
