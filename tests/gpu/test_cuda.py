"""What one GPU can prove: over a real nccl group of one, and as one of many ranks whose peers are fake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Zoo, tokens
from proof import (
    EXECUTORS,
    RIVALS,
    WIDTH,
    Blocks,
    issued,
    missing_gpus,
    missing_nvfuser,
    numbers_over_a_group_of_one,
    step_times,
    traces_and_memory,
)
from torch.distributed.fsdp import CPUOffloadPolicy

import shardtrace  # isort: skip  before thunder: makes it importable on the newest torch
from passes.plan import Placement

import thunder
from exchange import EVEN, SHAPES, exchange_bucket

GPU = torch.device("cuda", 0)
MISSING = missing_gpus(1, torch.cuda.device_count())
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(params=EXECUTORS)
def executors(request):
    if request.param == "nvfuser" and (reason := missing_nvfuser(bool(os.environ.get("SHARDTRACE_GPU_NVFUSER")))):
        pytest.skip(reason)
    return EXECUTORS[request.param]


def parametrize_executors(names, *, all_of_default, some_of_others):
    """Cases for each set of executors: fewer for those whose kernels take long to compile."""
    cases = [(e, *values) for e in EXECUTORS for values in (all_of_default if e == "default" else some_of_others)]
    return pytest.mark.parametrize(("executors", *names), cases, indirect=["executors"])


@pytest.fixture
def case(request):
    """The parameters of the test, for the table."""
    return ", ".join(map(str, request.node.callspec.id.split("-")))


@pytest.fixture
def nccl_of_one(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("placement", list(Placement))
def test_collectives_of_nccl(nccl_of_one, proves, case, placement, dtype):
    """nccl runs our gathers and reductions, in a group of one."""
    before = issued(dist.group.WORLD)
    for shapes in (SHAPES, EVEN):
        exchange_bucket(placement, shapes, getattr(torch, dtype), dist.group.WORLD, device=GPU)
    ran = issued(dist.group.WORLD) - before
    assert ran > 0
    proves("a bucket over nccl", case, f"{ran} collectives ran; values and means are right")


@parametrize_executors(
    ("strategy", "precision"),
    all_of_default=[(s, p) for s in ("zero2", "zero3", "ddp", "owner") for p in (None, "bf16")],
    some_of_others=[("zero3", None), ("zero2", "bf16")],
)
def test_a_model_over_nccl(nccl_of_one, executors, proves, case, strategy, precision):
    result = numbers_over_a_group_of_one(dist.group.WORLD, GPU, strategy, precision=precision, executors=executors)
    proves("a model over nccl", case, result)


def on_cuda(row):
    return [t.cuda() for t in tokens(6, row)]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_nccl_world_of_one_trains_as_a_single_process(nccl_of_one, executors, strategy):
    torch.manual_seed(0)
    expected = Zoo().cuda()
    torch.manual_seed(0)
    model = shardtrace.fsdp(Zoo(), sharding_strategy=strategy, init_policy=shardtrace.InitPolicy(device="cuda"))
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


@parametrize_executors(
    ("strategy", "world_size"),
    all_of_default=[("zero2", 8), ("zero3", 8), ("zero2", 64), ("zero3", 64)],
    some_of_others=[("zero2", 64), ("zero3", 8)],
)
def test_one_of_many_ranks(fake_ranks, executors, proves, case, strategy, world_size):
    """Compiles (which verifies), issues what it should, and takes the memory that the traces promise."""
    fake_ranks(world_size)
    torch.cuda.set_device(0)
    traces, memory = traces_and_memory(GPU, strategy, executors=executors)
    proves("traces of a rank", case, traces)
    proves("memory of a rank", case, memory)


@parametrize_executors(
    ("strategy", "pin_memory"),
    all_of_default=[("zero2", True), ("zero3", True), ("zero2", False), ("zero3", False)],
    some_of_others=[("zero3", True)],
)
def test_shards_in_host_memory(nccl_of_one, executors, strategy, pin_memory):
    torch.manual_seed(0)
    expected = Zoo().cuda()
    torch.manual_seed(0)
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    model = shardtrace.fsdp(Zoo(), sharding_strategy=strategy, offload_policy=policy)
    in_host_memory = [e.shard for e in model._shardtrace.entries if e.home.host is not None and e.shard.numel()]
    assert {shard.is_pinned() for shard in in_host_memory} == {pin_memory}
    cmodel = thunder.jit(model, executors=executors)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-2) for m in (expected, cmodel)]
    for step in range(4):  # with no wait but the step's own between writing shards and reading them
        for m, optimizer in zip((expected, cmodel), optimizers, strict=True):
            m(*on_cuda(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in shardtrace.full_state_dict(cmodel).items():
        torch.testing.assert_close(value.cpu(), expected.state_dict()[name].cpu(), rtol=1e-4, atol=1e-5)
    for p, state in optimizers[1].state.items():
        assert {t.device.type for t in state.values()} <= {p.device.type, "cpu"}  # steps are counted on the CPU
    assert model.scale.is_cuda  # whole on each rank
    with pytest.raises(Exception, match=r"the device of parameter .* was cpu when fsdp\(\) sharded it and is cuda"):
        thunder.jit(model.cuda())(*on_cuda(0))


@pytest.mark.parametrize("world_size", [1, 8])
def test_memory_of_a_model_in_host_memory(fake_ranks, executors, proves, case, world_size):
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
    measured = torch.cuda.max_memory_allocated()
    assert measured == pytest.approx(promised, rel=0.1)
    proves("memory, offloaded", case, f"peak {measured / 1e6:.1f} MB, predicted {promised / 1e6:.1f} MB")


def test_a_checkpoint_of_a_gpu_is_loaded_on_it_and_on_the_cpu(nccl_of_one, tmp_path):
    def trained(seed):
        torch.manual_seed(seed)
        model = shardtrace.fsdp(Zoo(), init_policy=shardtrace.InitPolicy(device="cuda"))
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


def test_step_times(proves, tmp_path):
    """One of 8 ranks, whose peers are fake, beside FSDP2 and torch.compile. (All settings: make bench SETTING=cuda.)"""
    ours = ["", " torchcompile", *([] if missing_nvfuser(False) else [" nvfuser"])]
    names = [*(f"shardtrace zero3{suffix}" for suffix in ours), *RIVALS.values()]
    compare = Path(__file__).parents[2] / "examples" / "benchmarks" / "compare.py"
    only = "|".join(f"^{name}$" for name in names)
    arguments = ["cuda", "--worlds=8", f"--only={only}", "--rounds=3", f"--out={tmp_path}"]
    subprocess.run([sys.executable, compare, *arguments], check=True, timeout=280)
    results = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert set(results[0]["contenders"]) == set(names)
    for proof in step_times(results):
        proves(*proof)
