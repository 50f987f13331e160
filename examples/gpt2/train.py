"""Train a byte-level GPT-2 with shardtrace on any number of ranks.

    torchrun --nproc_per_node=2 examples/gpt2/train.py --model tiny --sharding-strategy zero3

The three lines that matter are in `main`: `shardtrace.fsdp`, `thunder.jit` and an ordinary optimizer.
"""

import argparse
import json
import math
import os
import resource
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import shardtrace  # before thunder: makes it importable on the newest torch

import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from model import CONFIGS, GPT
from text import Text, get_batch, load_text

LOG_EVERY = 10  # steps between two looks at the loss, each of which costs one all_reduce
WARMUP = 20  # steps
PROMPT = b"The "
TEMPERATURE = 0.8

Batches = Callable[[int], tuple[Tensor, Tensor]]  # step -> this rank's inputs and targets


def main() -> None:
    args = parse_args()
    text = load_text(args.text)
    check(args, text)
    device = pick_device(args.device)
    torch.manual_seed(args.seed)  # every rank builds the same model
    model = GPT(CONFIGS[args.model])
    whole_bytes = parameter_bytes(model)
    try:
        model = shardtrace.fsdp(
            model,
            sharding_strategy=args.sharding_strategy,
            bucketing_strategy=args.bucketing_strategy,
            device=device,
        )
        cmodel = thunder.jit(model, executors=args.executors)
        optimizer = torch.optim.AdamW(cmodel.parameters(), lr=args.lr, weight_decay=args.weight_decay)

        losses = train(cmodel, optimizer, batches(text.train, args, device), args)
        collectives = shardtrace.collectives(cmodel)  # of the last call: a training step
        cmodel.eval()
        val_loss = evaluate(cmodel, batches(text.val, args, device), args.eval_batches)
        sample = generate(cmodel, args, device)
        if dist.get_rank() == 0:
            print(f"\nvalidation loss {val_loss:.4f}\n\n--- sample ---\n{sample}\n--------------\n")
            print_table(whole_bytes, parameter_bytes(model), device, collectives)
            if args.json is not None:
                args.json.write_text(json.dumps({"losses": losses, "val_loss": val_loss}) + "\n")
        dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- the loops: each runs in step on all ranks, for every call of a sharded model is a collective ----


def train(cmodel: Module, optimizer: Optimizer, data: Batches, args: Namespace) -> list[float]:
    """Runs the steps and returns the loss of each, averaged over ranks."""
    schedule = LambdaLR(optimizer, lambda step: lr_scale(step, args.steps))
    losses: list[float] = []
    pending: list[Tensor] = []
    with tqdm(total=args.steps, desc="train", unit="step", disable=dist.get_rank() != 0) as bar:
        for step in range(args.steps):
            loss = cmodel(*data(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            bar.update()
            pending.append(loss.detach())
            if step == 0 or (step + 1) % LOG_EVERY == 0 or step + 1 == args.steps:
                losses += mean_over_ranks(pending)
                pending.clear()
                if step == 0:  # the first step compiles, so the clock starts after it
                    bar.set_postfix(loss=f"{losses[-1]:.4f}")
                    start = time.perf_counter()
                else:
                    rate = step * args.batch_size * args.seq_len / (time.perf_counter() - start)
                    bar.set_postfix({"loss": f"{losses[-1]:.4f}", "tokens/s": f"{rate:,.0f}"})
    return losses


@torch.no_grad()
def evaluate(cmodel: Module, data: Batches, n_batches: int) -> float:
    """The mean loss over global batches. Asks for logits, as `generate` does: one trace serves both."""
    losses = []
    for step in range(n_batches):
        inputs, targets = data(step)
        losses.append(F.cross_entropy(cmodel(inputs).flatten(0, 1), targets.flatten()))
    return sum(mean_over_ranks(losses)) / n_batches


@torch.no_grad()
def generate(cmodel: Module, args: Namespace, device: torch.device) -> str:
    """Samples `--sample-bytes` bytes after the prompt, the same on all ranks.

    The context is padded on the right to the shape of a batch: one shape means one trace, and a causal model
    does not see the padding.
    """
    generator = torch.Generator().manual_seed(args.seed)
    rows = args.batch_size // dist.get_world_size()
    sample = bytearray(PROMPT)
    for _ in range(args.sample_bytes):
        context = torch.tensor(sample[-args.seq_len :])
        inputs = F.pad(context, (0, args.seq_len - len(context))).expand(rows, -1).contiguous()
        logits = cmodel(inputs.to(device))[0, len(context) - 1].float().cpu()
        probabilities = F.softmax(logits / TEMPERATURE, dim=0)
        sample.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return sample.decode(errors="replace")


# ---- what the loops are made of ----


def batches(tokens: Tensor, args: Namespace, device: torch.device) -> Batches:
    shape = {"batch_size": args.batch_size, "seq_len": args.seq_len, "seed": args.seed}
    where = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}

    def batch(step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = get_batch(tokens, step=step, **shape, **where)
        return inputs.to(device), targets.to(device)

    return batch


def lr_scale(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to zero."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    total = torch.stack(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


# ---- the report ----


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def peak_memory(device: torch.device) -> tuple[str, int]:
    """What was measured, and the peak of this process in bytes."""
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated", torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return "ru_maxrss of the whole process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def print_table(whole_bytes: int, shard_bytes: int, device: torch.device, collectives: list) -> None:
    source, peak = peak_memory(device)
    print(f"{'memory':<48}{'bytes':>20}")
    print(f"{'  parameters, whole model':<48}{whole_bytes:>20,}")
    print(f"{f'  parameters, each of {dist.get_world_size()} ranks':<48}{shard_bytes:>20,}")
    print(f"{f'  peak of rank 0 ({source})':<48}{peak:>20,}")

    sizes = defaultdict(list)
    for c in collectives:
        sizes[c.kind, c.phase].append(c.bytes)
    print(f"\n{'collectives in a step':<38}{'count':>10}{'bytes':>20}")
    for (kind, phase), bytes_ in sizes.items():
        print(f"{f'  {kind}, {phase}':<38}{len(bytes_):>10}{sum(bytes_):>20,}")
    if not sizes:
        print("  none: a world of one has nobody to talk to")


# ---- the command line ----


def parse_args() -> Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT-2 with shardtrace, under torchrun.")
    add = parser.add_argument
    add("--model", choices=CONFIGS, default="tiny")
    add("--sharding-strategy", choices=["zero2", "zero3"], default="zero3")
    add("--bucketing-strategy", type=bucketing, default="block", help="none, layer, block or a size in MB")
    add("--executors", type=lambda names: names.split(","), help="Thunder's, best first, comma separated")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    add("--steps", type=int, default=700)
    add("--batch-size", type=int, default=16, help="sequences in a step, over all ranks")
    add("--seq-len", type=int, default=128, help="in bytes")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--weight-decay", type=float, default=0.1)
    add("--text", type=file, help="a file to train on; default: the Python reference")
    add("--seed", type=int, default=0)
    add("--eval-batches", type=int, default=10)
    add("--sample-bytes", type=int, default=128)
    add("--json", type=Path, help="write the losses to this file")
    return parser.parse_args()


def bucketing(value: str) -> str | float:
    if value in ("none", "layer", "block"):
        return value
    try:
        return float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r}, not none, layer, block or a size in MB") from None


def file(value: str) -> Path:
    if not Path(value).is_file():
        raise argparse.ArgumentTypeError(f"no file {value!r}")
    return Path(value)


def check(args: Namespace, text: Text) -> None:
    """Stops every rank before anything is built."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    block_size, held_out = CONFIGS[args.model].block_size, len(text.val)
    if min(args.steps, args.batch_size, args.seq_len, args.eval_batches) < 1:
        sys.exit("--steps, --batch-size, --seq-len and --eval-batches must be at least 1")
    if args.batch_size % ranks:
        sys.exit(f"--batch-size {args.batch_size} is that of all ranks, and not divisible by {ranks} ranks")
    if args.seq_len > block_size:
        sys.exit(f"--seq-len {args.seq_len} is longer than the {block_size} positions of {args.model}")
    if args.seq_len >= held_out:
        sys.exit(f"--seq-len {args.seq_len} needs a longer text: a tenth is held out, here {held_out} bytes")


def pick_device(name: str | None) -> torch.device:
    """The CPU, or this rank's GPU."""
    if (name or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    main()
