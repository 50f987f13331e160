"""Seconds until the first step of training is done, on two ranks, over the number of blocks; against FSDP2.

python examples/benchmarks/first_step.py --blocks 2 8 --only "zero3|fsdp2 reshard"

Each figure is of new processes: the first step less a later one. Contenders that torch.compile run twice, with an empty
cache of inductor and with the one that the first run has filled.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "gpt2"))

import shardtrace  # noqa: F401  before thunder: makes it importable on the newest torch

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from contenders import Contender, World, use_fsdp2, use_shardtrace
from model import GPT, GPTConfig

WORDS, TOKENS, BATCH, WIDTH, HEADS = 256, 128, 4, 384, 6
COMPILED = ["sdpa", "torch_kernels", "torchcompile"]
RESULT = "seconds:"


def use_fsdp2_compiled_whole(model: GPT, world: World) -> nn.Module:
    sharded = use_fsdp2(model, world, reshard=True)
    sharded.compile()
    return sharded


CONTENDERS = [
    Contender("shardtrace zero3", partial(use_shardtrace, strategy="zero3")),
    Contender("shardtrace zero3 torchcompile", partial(use_shardtrace, strategy="zero3", executors=COMPILED)),
    Contender("fsdp2 reshard", partial(use_fsdp2, reshard=True)),
    Contender("fsdp2 reshard, blocks compiled", partial(use_fsdp2, reshard=True, compiled=True)),
    Contender("fsdp2 reshard, model compiled", use_fsdp2_compiled_whole),
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--contender", help=argparse.SUPPRESS)  # the contender that this process is a rank of
    options = parser.parse_args(arguments)
    if options.contender is not None:
        measure(next(c for c in CONTENDERS if c.name == options.contender), options.blocks[0])
        return
    field = [c for c in CONTENDERS if re.search(options.only, c.name)]
    runs = [(c, n) for n in options.blocks for c in field]
    rows = []
    with tqdm(runs, desc="first step", unit="run") as bar:
        for contender, blocks in bar:
            bar.set_postfix_str(f"{contender.name}, {blocks} blocks")
            with tempfile.TemporaryDirectory(prefix="shardtrace-inductor-") as cache:
                compiles = "compile" in contender.name
                for state in ("empty", "filled") if compiles else ("",):
                    rows.append((contender.name, state, blocks, start(contender.name, blocks, cache)))
    for name, state, blocks, seconds in rows:
        print(f"{name:32} {state:8} {blocks:4} blocks {seconds:8.1f} s")


def start(name: str, blocks: int, cache: str) -> float:
    """Runs the ranks of a contender in new processes."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command, "--contender", name, "--blocks", str(blocks)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = re.findall(rf"{RESULT}(-?[\d.]+) ", done.stdout)  # lines of two ranks may run together
    if done.returncode or not found:
        raise SystemExit(f"{name} failed:\n{done.stdout[-4000:]}")
    return max(map(float, found))


def measure(contender: Contender, blocks: int) -> None:
    """A rank: prints the seconds of its first step, with building the model's sharding, less those of a later one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    config = GPTConfig(n_layer=blocks, n_embd=WIDTH, n_head=HEADS, block_size=TOKENS, vocab_size=WORDS)
    torch.manual_seed(0)
    model = GPT(config)
    x = torch.randint(WORDS, (BATCH, TOKENS))
    dist.barrier()
    begin = time.perf_counter()
    run = contender.build(model, World(dist.group.WORLD, torch.device("cpu")))
    seconds = []
    for _ in range(3):
        run(x, x).backward()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    print(f"{RESULT}{seconds[0] - min(seconds[1:]):.3f} ", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
