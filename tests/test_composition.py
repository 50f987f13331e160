"""The README's table of what composes with what: a tiny step is compiled for each cell."""

import re
from contextlib import nullcontext
from pathlib import Path

import shardtrace

import pytest
import thunder
import torch
from eager import uncompiled
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

README = (Path(__file__).parents[1] / "README.md").read_text()
X = torch.randn(4, 64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def net():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(64, 64))


# ---- the table ----

STRATEGIES = {
    "zero3": ["zero3"],
    "zero2": ["zero2", "zero1"],
    "hybrid": ["hybrid_zero3", "hybrid_zero2"],
    "secondary": ["zero3_secondary"],
    "owner": ["owner"],
    "ddp": ["ddp"],
}


def table():
    """The cells of the README's table: (feature, strategy, cell)."""
    lines = README.partition("## What composes with what")[2].partition("\n## ")[0].splitlines()
    (_, *names), _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
    ]
    for row, *cells in rows:
        (feature,) = re.findall(r"\[(.*)\]\(", row)
        for name, cell in zip(names, cells, strict=True):
            yield from ((feature, strategy, cell) for strategy in STRATEGIES[name])


def test_table_has_all():
    assert {strategy for _, strategy, _ in table()} == {s.value for s in shardtrace.ShardingStrategy}
    assert {feature for feature, _, _ in table()} == FEATURES.keys()
    assert {cell for _, _, cell in table()} == {"yes", "refused", "slower"}


# ---- a step of each feature ----


def mesh(strategy):
    needs = strategy.startswith("hybrid") or strategy == "zero3_secondary"
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))} if needs else {}


def step(strategy, *, accumulate=False, executors=None, **options):
    model = shardtrace.fsdp(net(), sharding_strategy=strategy, **mesh(strategy), **options)
    cmodel = thunder.jit(model, **({"executors": executors} if executors else {}))
    for context in [shardtrace.no_sync(model)] * accumulate + [nullcontext()]:
        with context:
            cmodel(X).sum().backward()
    return model, cmodel


def half(strategy):
    for precision in ("bf16", "fp16"):
        step(strategy, mp_policy=precision)


def one_step(strategy):
    """What needs no options: one compilation has all."""
    model, cmodel = step(strategy, accumulate=True)
    assert shardtrace.block_traces(cmodel)
    shardtrace.clip_grad_norm_(model, 1.0)
    torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1).step(lambda: torch.tensor(0.0))


def checkpointing(strategy):
    for what in ("full", "cheap"):
        step(strategy, activation_checkpointing=what)


def rounded(**wires):
    return {"comm_policy": shardtrace.CommPolicy(**wires)}


def offload(strategy):
    """On a GPU that need not be here: on a CPU the policy changes nothing."""
    ranks = {"mesh_shape": (2, 2)} if mesh(strategy) else {"world_size": 4}
    torch.distributed.destroy_process_group()
    gpu = {"init_policy": shardtrace.InitPolicy(device="cuda")}
    options = {"sharding_strategy": strategy, "offload_policy": CPUOffloadPolicy()}
    assert shardtrace.inspect(net(), X, **ranks, **gpu, **options).totals.collectives


def torchcompile(strategy):
    with uncompiled():
        step(strategy, executors=["sdpa", "torch_kernels", "torchcompile"])


def long_sequences(strategy):
    sizes, names = ((1, 2, 2), ("replicate", "shard", "context")) if mesh(strategy) else ((2, 2), ("data", "context"))
    over = {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names)}
    rows = shardtrace.ContextParallel("context", sequence_dim=0)
    model = shardtrace.fsdp(net(), sharding_strategy=strategy, context_parallel=rows, **over)
    model(X).sum().backward()


def fabric(strategy):
    pytest.importorskip("lightning.fabric", reason="pip install 'shardtrace[lightning]'")
    from shardtrace.lightning import ShardtraceStrategy

    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Here(LightningEnvironment):
        creates_processes_externally = True
        world_size, global_rank, local_rank = (lambda self: 4), (lambda self: 0), (lambda self: 0)

    options = ShardtraceStrategy(sharding_strategy=strategy, **mesh(strategy))
    launched = Fabric(accelerator="cpu", devices=4, strategy=options, plugins=[Here()], precision="bf16-mixed")
    launched.launch()
    model = net()
    model, optimizer = launched.setup(model, torch.optim.SGD(model.parameters()))
    with launched.no_backward_sync(model):
        launched.backward(model(X).sum())
    launched.backward(model(X).sum())
    launched.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()


FEATURES = {
    "bf16, fp16": half,
    **dict.fromkeys(("accumulation", "clipping", "compiled blocks", "Muon"), one_step),
    "checkpointing": checkpointing,
    "rounded gathers": lambda strategy: step(strategy, **rounded(gather_dtype="int8")),
    "rounded reductions": lambda strategy: step(strategy, **rounded(reduce_wire="int8")),
    "error feedback in fp16": lambda strategy: step(
        strategy, mp_policy="fp16", **rounded(reduce_wire="int8", error_feedback=True)
    ),
    "CPU offload": offload,
    "torchcompile": torchcompile,
    "long sequences": long_sequences,
    "Lightning Fabric": fabric,
}
REFUSALS = r"changes nothing|keeps nothing in host memory|fp16 scales the gradients|cannot be combined with"


@pytest.mark.parametrize(
    ("feature", "strategy", "cell"), dict.fromkeys((FEATURES[feature], *others) for feature, *others in table())
)
def test_cell(fake_ranks, feature, strategy, cell):
    """ "Slower" compiles as "yes" does."""
    fake_ranks(4)
    with pytest.raises((ValueError, RuntimeError), match=REFUSALS) if cell == "refused" else nullcontext():
        feature(strategy)
