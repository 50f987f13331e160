"""Compiles a matrix of models for nvFuser on a GPU that need not exist, trains through its regions on two ranks, and
prints what was found as JSON. (tests/test_nvfuser.py runs it in a process of its own, because Thunder registers
executors when it is imported.)"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ["SHARDTRACE_PROVE"] = "0"  # nvFuser draws random numbers its own way: docs/proof.md, "Unproven"

import fused
from fused import on_cpu

import shardtrace  # isort: skip
from passes.analysis.calls import block_function
from passes.analysis.recognise import is_collective, is_offload
from passes.analysis.verify import verify
from passes.compat.jit import attention_of_gpus
from passes.plan import Keep, Level
from shardtrace.record.arguments import claim
from shardtrace.testing import compile_only, fake_ranks, text

import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """Two blocks, and an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


TOKENS = torch.arange(24).view(2, 12) % 20
CASES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero3, inline": {"compile_policy": shardtrace.CompilePolicy(repeated_blocks="inline")},
    "zero3, dataflow": {
        "compile_policy": shardtrace.CompilePolicy(repeated_blocks="inline"),
        "jit_options": {"fusion_type": "dataflow"},
    },
    "mix, bf16": {
        "sharding_strategy": {"embedding*": "ddp", "blocks.0.*": "owner", "*": "zero2"},
        "bucketing_strategy": "layer",
        "mp_policy": "bf16",
    },
    "hybrid, fp32 reduction, checkpointing, after no_sync": {
        "sharding_strategy": "hybrid_zero3",
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "activation_checkpointing": Block,
        "gradients": "added",
    },
    "offload, fp16": {"offload_policy": CPUOffloadPolicy(), "mp_policy": "fp16"},
    "zero2, bf16, inside no_sync": {"sharding_strategy": "zero2", "mp_policy": "bf16", "gradients": "kept"},
}
DEVICE = torch.device("cuda:0")


def compiled() -> dict[str, Any]:
    """For each case: the number of regions in forward and backward, and what is wrong with its traces."""
    found = {}
    for name, options in CASES.items():
        traces = compile_step(**options)
        wrong = []
        for trace in traces:
            verify(trace)
            regions = [b for b in all_lines(trace) if b.sym.is_fusion]
            wrong += [str(b) for b in regions for part in b.subsymbols if is_collective(part) or is_offload(part)]
        found[name] = {"regions": [count_regions(trace) for trace in traces], "wrong": wrong}
        if name == "zero3, inline":
            found[name]["text"] = text(traces[0], dels=False)
    return found


def compile_step(
    *, gradients: str = "", train: bool = True, jit_options: dict[str, Any] | None = None, **options: Any
) -> list[TraceCtx]:
    """The forward and the backward of one of 8 ranks on a GPU, which need not exist. ``gradients``: "kept" as inside
    ``no_sync``, "added" as in the step after it. ``options`` are those of ``fsdp``."""
    with fake_ranks(8):
        if str(options.get("sharding_strategy")).startswith("hybrid"):
            options["mesh"] = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
        with torch.device("meta"):
            model = Model().train(train)
        shardtrace.fsdp(
            model, init_policy=shardtrace.InitPolicy(device=DEVICE, param_init_fn=lambda module: None), **options
        )
        runtime = model._shardtrace.runtime
        runtime.keep = Keep() if gradients == "kept" else None
        runtime.kept.used |= {Level.WHOLE} if gradients == "added" else set()
        jitted = thunder.jit(model, **(jit_options or {}))
        with attention_of_gpus():
            compile_only(jitted, ((claim(TOKENS, DEVICE),), {}))
    return [thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]]


def all_lines(trace: Any) -> Iterator[BoundSymbol]:
    """The lines of a trace, with those of a block for each of its calls."""
    for bsym in trace.bound_symbols:
        called = block_function(bsym)
        yield from [bsym] if called is None else called.trace.bound_symbols


def count_regions(trace: Any) -> int:
    return sum(b.sym.is_fusion for b in all_lines(trace))


def plain() -> list[int]:
    """The regions of the model that is not sharded. Thunder's interpreter takes half of its time for torch's ``__call__``
    of the 19 modules, which calls no hook here."""
    model = Model()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(claim(parameter, DEVICE))
    jitted = thunder.jit(model)
    with attention_of_gpus(), mock.patch.object(nn.Module, "__call__", lambda self, *args: self.forward(*args)):
        compile_only(jitted, ((claim(TOKENS, DEVICE),), {}))
    return [count_regions(t[-1]) for t in (thunder.last_traces(jitted), thunder.last_backward_traces(jitted))]


def train(rank: int, store: str, results: Any) -> None:
    """Trains on a rank through nvFuser's regions, and eagerly on all rows."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    expected, model = Model().eval(), Model().eval()  # without dropout
    model.load_state_dict(expected.state_dict())
    shardtrace.fsdp(model, sharding_strategy={"blocks.1.*": "zero2", "*": "zero3"})
    with on_cpu():
        jitted = thunder.jit(model, executors=["nvfuser"])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (expected, model)]
        for step in range(3):
            for run, optimizer, rows in zip((expected, jitted), optimizers, ((0, 1), (rank,)), strict=True):
                tokens = (TOKENS + step).remainder(20)[list(rows)]
                F.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    full = shardtrace.full_state_dict(model)
    apart = max((full[name] - value).abs().max().item() for name, value in expected.state_dict().items())
    results.put((apart, fused.runs))
    dist.destroy_process_group()


def trained() -> list[Any]:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    store = tempfile.mktemp(prefix="nvfuser")
    ranks = [context.Process(target=train, args=(rank, store, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
    return [] if results.empty() else [results.get() for _ in ranks]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {"trained": trained()}  # first, because forks must not copy threads
    named = sys.modules["nvfuser"] is sys.modules["nvfuser_direct"]
    print(json.dumps({**found, "plain": plain(), "compiled": compiled(), "named": named}))
