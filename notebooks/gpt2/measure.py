"""Measured and predicted memory of a real training step. Started by torchrun, it prints one line of JSON.

The profiler records every allocation and every free of a tensor in CPU memory, from before the model is built:
parameters, AdamW's state, gradients, activations, and the buffers of collectives.
"""

import gc
import json

import shardtrace

import thunder
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from model import GPT

STRATEGIES = ("ddp", "zero2", "zero3", "owner")


def main():
    dist.init_process_group("gloo")
    gc.freeze()  # garbage is collected before each peak is read: not looked for among what was imported
    results = {strategy: train(strategy) for strategy in STRATEGIES}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, results)
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {s: {"predicted": [r[s][0] for r in ranks], "measured": [r[s][1] for r in ranks]} for s in results}
            )
        )
    dist.destroy_process_group()


def train(strategy):
    """Peak bytes of the second step of a run, predicted and measured."""
    first, kept, _ = metered(lambda: build(strategy))
    step, model = first
    _, _, peak = metered(step)
    rows = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    shards = sum(p.numel() * p.element_size() for p in rows)
    return shardtrace.memory(model, persistent=2 * shards).peak, kept + peak  # AdamW keeps two numbers for each


def build(strategy):
    """A step of a small GPT-2 whose buckets are layers, after its first call; and the jitted model."""
    torch.manual_seed(0)
    model = shardtrace.fsdp(
        GPT(blocks=2, width=512, vocabulary=256), sharding_strategy=strategy, bucketing_strategy="layer"
    )
    model = thunder.jit(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.randint(256, (2, 2, 32))

    def step():
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step, model


def metered(function):
    """The result of ``function``, the bytes that it leaves allocated, and the most that it had allocated at a time."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = function()
        gc.collect()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return result, now, peak


if __name__ == "__main__":
    main()
