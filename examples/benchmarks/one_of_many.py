"""A step of Llama-3-8B as one of many ranks, on one GPU: seconds and peaks, beside FSDP2 and what is predicted.

    python examples/benchmarks/one_of_many.py                      # 8 ranks, one sequence of 8192 tokens on each
    python examples/benchmarks/one_of_many.py --tiny --device cpu  # a rehearsal

The other ranks do not exist: gathers and reductions send nothing, and gathered parameters are whatever their memory
holds. That is filled with random numbers first, because products of zeros take less power, and so less time. ZeRO-3,
bf16 parameters, gradients reduced in fp32, AdamW. Prints a table and writes results.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "notebooks"))

import shardtrace

import torch
import torch.distributed as dist
from published import RUNS, predict
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from compare import positive
from llama.model import CONFIGS, Config, Llama, rotations
from report import aligned

PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def initialize(module: nn.Module, config: Config) -> None:
    """Values of a module's own parameters and buffers."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.normal_(std=0.02)
        if isinstance(module, Llama):
            cos, sin = rotations(config.context, config.width // config.heads)
            module.cos.copy_(cos)
            module.sin.copy_(sin)


def use_shardtrace(config: Config, device: torch.device, recomputed: Mapping[str, str]) -> nn.Module:
    with torch.device("meta"):
        model = Llama(config)
    init = shardtrace.InitPolicy(device=device, param_init_fn=lambda module: initialize(module, config))
    return shardtrace.fsdp(model, mp_policy=PRECISION, activation_checkpointing=recomputed, init_policy=init)


def use_fsdp2(config: Config, device: torch.device, recomputed: Mapping[str, str]) -> nn.Module:
    with torch.device("meta"):
        model = Llama(config)
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),)), "mp_policy": PRECISION}
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer) if f"layers.{i}" in recomputed else layer
        fully_shard(model.layers[i], **options)
    fully_shard(model, **options)
    model.to_empty(device=device)
    for module in model.modules():
        initialize(module, config)
    return model


def measure(model: nn.Module, config: Config, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the first and of the shortest step, and the peak in GiB."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = torch.randint(config.vocabulary, (args.batch, config.context), device=args.device)
    seconds = []
    for i in range(args.steps + 1):
        if i == 2 and args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    return {"first_s": seconds[0], "step_s": min(seconds[1:]), "peak_gib": peak / 2**30}


def fill_memory() -> None:
    """Leaves random numbers in memory that torch's allocator then hands out."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    torch.empty(int(0.9 * free) // 4, device="cuda").normal_(std=0.02)


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    device = torch.device(args.device)
    config = replace(CONFIGS["8B"], context=8192)
    if args.tiny:
        config = replace(config, layers=2, width=128, heads=16, hidden=128, vocabulary=256, context=64)
    names = [f"layers.{i}" for i in range(config.layers)]
    full = dict.fromkeys(names[: round(12 / 32 * config.layers)], "full")
    mixed = {name: full.get(name, "cheap") for name in names}
    builders: dict[str, Callable[[], nn.Module]] = {
        "fsdp2, 12 blocks recomputed": lambda: use_fsdp2(config, device, full),
        "shardtrace, the same": lambda: use_shardtrace(config, device, full),
        "shardtrace, others cheap": lambda: use_shardtrace(config, device, mixed),
    }
    dist.init_process_group("fake", rank=0, world_size=args.ranks, store=FakeStore())
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    rows = [["contender", "first s", "step s", "peak GiB"]]
    for name, build in builders.items():
        if args.device == "cuda":
            fill_memory()
        try:
            found[name] = measure(build(), config, args)
            rows.append([name, *(f"{value:.3f}" for value in found[name].values())])
        except Exception as error:  # whatever a contender raises; the others still run
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {failed[name]}", file=sys.stderr)
        gc.collect()
    dist.destroy_process_group()
    if not args.tiny:
        plan = predict(RUNS[0]._replace(ranks=args.ranks, batch=args.batch, bandwidth=None, clock=1.0))
        rows.append(["predicted, others cheap", "", f"{plan.seconds:.3f}", f"{plan.peak / 2**30:.3f} reserved"])
    print("\n".join(aligned(rows)))
    args.out.mkdir(parents=True, exist_ok=True)
    results = {"settings": [{"contenders": found, "failed": failed}]}
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return int(bool(failed))


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=8)
    parser.add_argument("--batch", type=positive, default=1, help="sequences on each rank (1)")
    parser.add_argument("--steps", type=positive, default=6, help="steps after the first (6)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that proves nothing but that this runs")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder for results.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
