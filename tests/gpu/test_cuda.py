"""The settings of the CUDA benchmarks, for correctness: a real nccl group of one, and fake groups of many ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from models import Zoo, tokens
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import shardtrace  # isort: skip  before thunder: makes it importable on the newest torch
from passes.analysis.liveness import step_liveness
from passes.plan import Placement

import thunder
from exchange import EVEN, SHAPES, exchange_bucket

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

EXECUTORS = {"default": None, "torchcompile": ["sdpa", "torchcompile"], "nvfuser": ["sdpa", "nvfuser"]}
WIDTH, BLOCKS = 512, 3


@pytest.fixture(params=EXECUTORS)
def executors(request):
    if request.param == "nvfuser" and thunder.nvfuser_executor is None:
        if os.environ.get("SHARDTRACE_GPU_NVFUSER"):
            pytest.fail("make gpu NVFUSER=1 asks for nvFuser, which does not import here: pip install '.[nvfuser]'")
        pytest.skip("nvFuser does not import here: make gpu NVFUSER=1 makes this a failure")
    return EXECUTORS[request.param]


@pytest.fixture
def nccl_of_one(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Blocks(nn.Module):
    """Blocks of two linear layers, large enough that what the allocator rounds up to does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("placement", list(Placement))
def test_collectives_of_nccl(nccl_of_one, placement, dtype):
    """nccl runs our gathers and all_reduces, in a group of one, where a model would have no collectives. (A
    reduce_scatter of one rank is not sent.)"""
    device = torch.device("cuda", 0)
    for shapes in (SHAPES, EVEN):
        exchange_bucket(placement, shapes, getattr(torch, dtype), dist.group.WORLD, device=device)


def on_cuda(row):
    return [t.cuda() for t in tokens(6, row)]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_nccl_world_of_one_trains_as_a_single_process(nccl_of_one, executors, strategy):
    torch.manual_seed(0)
    expected = Zoo().cuda()
    torch.manual_seed(0)
    model = shardtrace.fsdp(Zoo(), sharding_strategy=strategy, device="cuda")
    cmodel = thunder.jit(model, executors=executors)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (expected, cmodel)]
    for step in range(3):
        losses = [m(*on_cuda(step)) for m in (expected, cmodel)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for name, value in shardtrace.full_state_dict(cmodel).items():
        torch.testing.assert_close(value.cuda(), expected.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert shardtrace.collectives(cmodel) == []  # nobody to talk to


@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_one_of_many_ranks(fake_ranks, executors, strategy, world_size):
    """Compiles (which verifies), issues what it should, and takes the memory that the traces promise."""
    fake_ranks(world_size)
    torch.cuda.set_device(0)
    x = torch.randn(16, WIDTH, device="cuda")
    before = torch.cuda.memory_allocated()
    model = shardtrace.fsdp(Blocks(), sharding_strategy=strategy, device="cuda")
    shards = torch.cuda.memory_allocated() - before
    whole = 4 * BLOCKS * (8 * WIDTH * WIDTH + 5 * WIDTH)
    assert shards == pytest.approx(whole / world_size, rel=0.05)

    cmodel = thunder.jit(model, executors=executors)
    for _ in range(3):
        cmodel(x).backward()
        model.zero_grad()
    kinds = [(c.kind, c.phase) for c in shardtrace.collectives(cmodel)]
    gathers = [("all_gather", "forward")] * BLOCKS + [("all_gather", "backward")] * BLOCKS * (strategy == "zero3")
    assert sorted(kinds) == sorted([*gathers, *[("reduce_scatter", "backward")] * BLOCKS])

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    idle = torch.cuda.memory_allocated()
    cmodel(x).backward()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated()
    forward = next(t for t in reversed(thunder.last_traces(cmodel)) if t.bound_symbols)
    backward = thunder.last_backward_traces(cmodel)[-1]
    arguments = sum(s.nbytes() for s in {t.untyped_storage() for t in (x, *cmodel.parameters())})
    promised = step_liveness(forward, backward, persistent=idle - arguments).peak
    assert measured == pytest.approx(promised, rel=0.1)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_shards_in_host_memory(nccl_of_one, executors, strategy, pin_memory):
    torch.manual_seed(0)
    expected = Zoo().cuda()
    torch.manual_seed(0)
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    model = shardtrace.fsdp(Zoo(), sharding_strategy=strategy, offload_policy=policy)
    assert {e.shard.is_pinned() for e in model._shardtrace.entries} == {pin_memory}
    cmodel = thunder.jit(model, executors=executors)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-2) for m in (expected, cmodel)]
    for step in range(4):  # with no wait but the step's own between writing shards and reading them
        for m, optimizer in zip((expected, cmodel), optimizers, strict=True):
            m(*on_cuda(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in shardtrace.full_state_dict(cmodel).items():
        torch.testing.assert_close(value.cpu(), expected.state_dict()[name].cpu(), rtol=1e-4, atol=1e-5)
    assert {t.device.type for s in optimizers[1].state.values() for t in s.values()} == {"cpu"}
    with pytest.raises(Exception, match=r"the device of parameter .* was cpu when fsdp\(\) sharded it and is cuda"):
        thunder.jit(model.cuda())(*on_cuda(0))


@pytest.mark.parametrize("world_size", [1, 8])
def test_memory_of_a_model_in_host_memory(fake_ranks, executors, world_size):
    fake_ranks(world_size)
    torch.cuda.set_device(0)
    x = torch.randn(16, WIDTH, device="cuda")
    before = torch.cuda.memory_allocated()
    model = shardtrace.fsdp(Blocks(), offload_policy=CPUOffloadPolicy())
    assert torch.cuda.memory_allocated() == before
    cmodel = thunder.jit(model, executors=executors)
    for _ in range(3):
        cmodel(x).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    idle = torch.cuda.memory_allocated()
    cmodel(x).backward()
    torch.cuda.synchronize()
    promised = shardtrace.memory(cmodel, persistent=idle - x.nbytes).peak
    assert torch.cuda.max_memory_allocated() == pytest.approx(promised, rel=0.1)


def test_a_checkpoint_of_a_gpu_is_loaded_on_it_and_on_the_cpu(nccl_of_one, tmp_path):
    def trained(seed):
        torch.manual_seed(seed)
        model = shardtrace.fsdp(Zoo(), device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for p in model.parameters():
            p.grad = torch.rand_like(p)
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(0)
    with shardtrace.AsyncCheckpointer() as checkpointer:
        checkpointer.save(tmp_path, model, optimizer, step=1)
        drawn = torch.rand(3, device="cuda")
    other, other_optimizer = trained(1)
    shardtrace.load_checkpoint(tmp_path, other, other_optimizer)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    plain = Zoo()
    shardtrace.load_checkpoint(tmp_path, plain)
    for p, q, r in zip(model.parameters(), other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p.cpu(), r)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, other_optimizer.state[q][key])
            assert value.device == other_optimizer.state[q][key].device
