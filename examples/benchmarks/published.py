"""Published runs beside what ``shardtrace.plan`` predicts for them, from data sheets alone. Nothing is measured here.

    python examples/benchmarks/published.py

``RUNS`` are torchtitan's, of Llama 3 with FSDP2, in eager mode or compiled: bf16 parameters, gradients reduced in fp32,
AdamW, sequences of 8192 tokens. "selective layer" recomputes every second block. "selective op" recomputes every second
product of a block: its activations have about the bytes, and their recomputation about the FLOPs, of 20 blocks with
``"cheap"`` among 12 with ``"full"``, which stand for it here. ``LONG`` are runs with long sequences, which ranks share.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2] / "notebooks"))

import shardtrace  # before thunder: makes it importable on the newest torch
from passes.plan.cost import MEMORY, cluster, hardware
from shardtrace.planner.training_plan import TrainingPlan

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from llama.model import CONFIGS, Config, Llama

MODELS = CONFIGS | {"Qwen3-8B": Config(width=4096, layers=36, heads=32, hidden=12_288, vocabulary=151_936)}


class Run(NamedTuple):
    """A published run: ``speed`` in tokens/s of a GPU, ``memory`` in GiB reserved on a GPU, ``bandwidth`` in bytes/s of
    its memory if it differs from that of ``device``, ``tokens`` of a sequence, which is split over ``context`` ranks,
    ``tensor``: the ranks that share a batch and compute with parts of parameters, ``clock`` over that of ``device``.
    ``compiled``: blocks by torch.compile, for which the executor of that name stands, and the loss not.
    """

    model: str
    ranks: int
    device: str
    batch: int
    checkpointing: str
    speed: float
    memory: float | None = None
    bandwidth: float | None = None
    tokens: int = 8192
    context: int | None = None
    tensor: int | None = None
    attention: str = "flash2"
    clock: float = 1.0
    compiled: bool = False


# The clock of an H100 with HBM2e and a limit of 500 W, over that of one of 700 W: fitted to the compiled run on 8
WATTS_500 = 500 / 700
# https://github.com/pytorch/torchtitan: on H100s from benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, the
# others from docs/performance.md of 2024. None of 70B is compiled without tensor parallelism, too
HBM2E = 2.4e12
H100: dict[str, Any] = {"device": "h100-sxm", "batch": 2, "checkpointing": "selective op", "bandwidth": HBM2E}
H100["clock"] = WATTS_500
RUNS = (
    Run("8B", 8, **H100, speed=5762, memory=82.4),
    Run("8B", 8, **H100, speed=6667, memory=77.0, compiled=True),
    Run("8B", 128, **H100, speed=5605, memory=67.0),
    Run("8B", 128, **H100, speed=6514, memory=62.0, compiled=True),
    Run("8B", 64, "a100-80", 1, "selective op", 2973),
    Run("8B", 64, "a100-80", 1, "selective layer", 2904),
    Run("70B", 64, "a100-80", 1, "full", 331),
)
LONG = (
    # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 2: with torch.compile and Float8, which are not
    # predicted; ring attention
    Run("8B", 8, "h100-sxm", 1, "full", 3890, memory=83.9, tokens=2**15, bandwidth=HBM2E, clock=WATTS_500),
    Run("8B", 8, "h100-sxm", 1, "full", 2540, memory=84.2, tokens=2**16, context=2, bandwidth=HBM2E, clock=WATTS_500),
    Run("8B", 8, "h100-sxm", 1, "full", 1071, memory=84.0, tokens=2**17, context=4, bandwidth=HBM2E, clock=WATTS_500),
    Run("8B", 8, "h100-sxm", 1, "full", 548, memory=84.5, tokens=2**18, context=8, bandwidth=HBM2E, clock=WATTS_500),
    # https://github.com/huggingface/transformers/pull/48324: 606 s a step with flash attention 2, and
    # https://github.com/huggingface/trl/pull/6846: 380 s with cuDNN's, from which the rate of "flash3" is. Both offload
    # activations and compute the loss in parts: their memory is not predicted
    Run("Qwen3-8B", 8, "h100-sxm", 1, "full", 2**17 / 606, tokens=2**20, context=8),
    Run("Qwen3-8B", 8, "h100-sxm", 1, "full", 2**17 / 380, tokens=2**20, context=8, attention="flash3"),
    # https://arxiv.org/abs/2602.21196, table 3: Ulysses in parts, flash attention 3; activations are offloaded
    Run("8B", 8, "h100-sxm", 1, "full", 2280, tokens=2**17, context=8, attention="flash3"),
)
# Table 4 of the same page: with torch.compile and Float8, which are not predicted. The first page, of 2024: in bf16
TENSOR = (
    Run("70B", 256, "h100-sxm", 16, "full", 829, memory=71.9, bandwidth=HBM2E, clock=WATTS_500, tensor=8),
    Run("405B", 128, "h100-sxm", 2, "full", 109, bandwidth=HBM2E, clock=WATTS_500, tensor=8),
)


class Loss(torch.autograd.Function):
    """Cross-entropy as eager PyTorch computes it: torchtitan's train.py of 2024 compiled blocks, and not the loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor) -> Tensor:
        scores = F.log_softmax(logits.flatten(0, 1).float(), dim=-1)
        loss, weight = torch.ops.aten.nll_loss_forward(scores, y.flatten(), None, 1, -100)
        ctx.save_for_backward(scores, y.flatten(), weight)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scores, y, weight = ctx.saved_tensors
        grad = torch.ops.aten.nll_loss_backward(grad, scores, y, None, 1, -100, weight)
        grad = torch.ops.aten._log_softmax_backward_data(grad, scores, 1, torch.float32)
        return grad.to(ctx.dtype).view(ctx.shape), None


class EagerLoss(Llama):
    """Llama with a loss that no executor compiles."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, cos, sin = self.embedding(x), self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for layer in self.layers:
            h = layer(h, cos, sin)
        return Loss.apply(self.output(self.norm(h)), y)


def predict(run: Run) -> TrainingPlan:
    """The plan with the options of a run."""
    config = replace(MODELS[run.model], context=run.tokens)
    with torch.device("meta"):
        model = EagerLoss(config) if run.compiled else Llama(config)
    cost = cluster(hardware(run.device), inside=None, between=None, node_ranks=None, attention=run.attention)
    device = cost.device
    bandwidth = device.bandwidth if run.bandwidth is None else MEMORY * run.bandwidth
    flops, half_flops = run.clock * device.flops, run.clock * device.half_flops
    cost = replace(cost, device=replace(device, flops=flops, half_flops=half_flops, bandwidth=bandwidth))
    fixed = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "sharding_strategy": "zero3",
        "compile_policy": shardtrace.CompilePolicy(chunk_loss=None),  # the runs had whole logits
        "activation_checkpointing": checkpointing(run.checkpointing, config.layers),
    }
    x = torch.zeros(run.batch, run.tokens, dtype=torch.long)
    options: dict[str, Any] = {"device": run.device, "memory": "1TB", "cost_model": cost, "fixed": fixed}
    options |= {"context": run.context, "tensor": run.tensor}
    if run.compiled:
        options["jit_options"] = {"executors": ["sdpa", "torch_kernels", "torchcompile"]}
    return shardtrace.plan(model, (x, x), world_size=run.ranks, **options)


def checkpointing(kind: str, layers: int) -> str | Mapping[str, str]:
    """The option of ``fsdp`` for one of torchtitan's."""
    if kind == "full":
        return "full"
    if kind == "selective layer":
        return {f"layers.{i}": "full" for i in range(0, layers, 2)}
    full = round(12 / 32 * layers)
    return {f"layers.{i}": "full" if i < full else "cheap" for i in range(layers)}


def row(run: Run) -> str:
    """The run in a table of Markdown."""
    found = predict(run)
    speed, peak = found.tokens / found.seconds, found.peak / 2**30
    split = f" over {run.context}" if run.context else f", tensor {run.tensor}" if run.tensor else ""
    kernels = f", {run.attention}" if run.attention != "flash2" else ", compiled" if run.compiled else ""
    cells = [f"{run.model} on {run.ranks} {run.device}, {run.checkpointing}, {run.tokens:,} tokens{split}{kernels}"]
    cells += [f"{run.speed:,.0f}", f"{speed:,.0f}", f"{speed / run.speed - 1:+.1%}" if run.speed else ""]
    cells += [f"{run.memory or ''}", f"{peak:.1f}", f"{peak / run.memory - 1:+.1%}" if run.memory else ""]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("| run | tokens/s a GPU | predicted | | GiB a GPU | predicted | |")
    print("|---|---|---|---|---|---|---|")
    for run in (*RUNS, *LONG, *TENSOR):
        print(row(run), flush=True)
