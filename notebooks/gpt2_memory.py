# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Where the memory of GPT-2 goes
#
# How much memory does a GPU need to train GPT-2 with DDP, ZeRO-2, ZeRO-3, or whole tensors on their owners? shardtrace
# predicts it from the compiled trace, line by line. Here you turn traces of a few blocks into a formula for all four
# sizes of GPT-2 on any number of GPUs. Then you check the formula against other traces, and the traces against the
# allocations of two real processes. It takes half a minute on a CPU.

# %%
import json
import os
import subprocess
import sys

import shardtrace

import matplotlib.pyplot as plt
import pandas as pd
import torch
from gpt2.model import GPT  # beside this notebook

pd.set_option("display.float_format", "{:.1f}".format)
MB, GB = 2**20, 2**30

# %% [markdown]
# ## Four strategies
#
# N ranks train a model of P bytes of parameters, in fp32 with AdamW:
#
# | strategy | parameters, gradients, AdamW's state on a rank | whole parameters during a step |
# |---|---|---|
# | `ddp` | P, P, 2 P | always |
# | `zero2` | P/N, P/N, 2 P/N | all, from forward until backward has used them |
# | `zero3` | P/N, P/N, 2 P/N | the bucket in use, and the next |
# | `owner` | whole tensors: about P/N, about P/N, about 2 P/N | the bucket in use, and the next |
#
# ZeRO-1 is missing because in shardtrace it is ZeRO-2: gradients are reduced to their shards as soon as they exist, and
# no rank keeps them whole. The hybrid strategies are ZeRO-2 and ZeRO-3, where N is the number of GPUs of one node.
#
# ## Traces
#
# `shardtrace.inspect` compiles a step for fake ranks, 8 here, and `.memory` lists the live memory at each of its lines.
# Thunder needs a second or two for each block. These models therefore have one to three blocks, with the width of GPT-2
# (one with that of GPT-2 XL) and GPT-2's own vocabulary.

# %%
RANKS, BATCH, SEQUENCE = 8, 4, 256


def predict(strategy, blocks, width, sequence=SEQUENCE):
    """The inspection of a step on one of 8 fake ranks. The loss is computed of all logits at once, not in chunks."""
    with torch.device("meta"):
        model = GPT(blocks, width)
    tokens = torch.zeros(BATCH, sequence, dtype=torch.long)
    at_once = shardtrace.CompilePolicy(chunk_loss=None)
    return shardtrace.inspect(
        model, (tokens, tokens), world_size=RANKS, sharding_strategy=strategy, compile_policy=at_once
    )


cases = [
    ("ddp", 2, 768, 256),
    ("zero2", 2, 768, 256),
    ("zero3", 1, 768, 256),
    ("zero3", 2, 768, 256),
    ("zero3", 3, 768, 256),
    ("owner", 2, 768, 256),
    ("zero3", 2, 1600, 128),
]
traced = {case: predict(*case) for case in cases}

# %% [markdown]
# The plots show the memory at each line by its use, in models of two blocks with GPT-2's width. Two moments compete for
# the peak. When **backward begins**, all activations are alive, and the logits with their gradient. When it **ends**,
# all gradients are. (AdamW's state is not in a trace. It is added below.)

# %%
SHADES = {
    "inputs": ("parameters or shards", "#999999"),
    "saved": ("saved for backward", "#56B4E9"),
    "activations": ("activations", "#CC79A7"),
    "gradients": ("gradients", "#E69F00"),
    "unsharded": ("gathered", "#0072B2"),
    "in_flight": ("in flight", "#F0E442"),
}  # safe for the colour-blind
figure, panels = plt.subplots(1, 4, figsize=(12, 3.6), sharey=True, facecolor="white")
for axes, strategy in zip(panels, ("ddp", "zero2", "zero3", "owner"), strict=True):
    memory = traced[strategy, 2, 768, 256].memory.to_pandas()
    memory = memory[memory.code.str.contains("=|return|del ")].reset_index()  # without the unpacking of arguments
    kinds = [memory[kind] / MB for kind in SHADES]
    axes.stackplot(memory.index, kinds, colors=[colour for _, colour in SHADES.values()], step="post")
    axes.step(memory.index, memory.during / MB, "k", linewidth=0.8, where="post")
    axes.axvline(memory.index[memory.phase == "backward"][0], color="black", linestyle=":")
    axes.set(title=strategy, xlabel="line, forward then backward")
    axes.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("MiB")
labels = [label for label, _ in SHADES.values()] + ["needed while a line runs"]
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in SHADES.values()] + [plt.Line2D([], [], color="k")]
figure.legend(handles, labels, ncols=7, loc="lower center", frameon=False, columnspacing=1)
figure.tight_layout(rect=(0, 0.07, 1, 1))
plt.show()

# %% [markdown]
# `owner` has an extra cost at the end. The embedding is one tensor, owned by one rank, which on gloo receives the
# gradients of all 7 peers before it adds them. (nccl reduces on the way.)
#
# ## A formula
#
# How much does forward save? The logits, which are whole here (by default a loss of this size is computed in chunks of
# them), and a number of activations of `4 * tokens * width` bytes each:

# %%
VOCABULARY, CONTEXT = 50257, 1024


def saved(case):
    """The memory that forward saves, without the logits, in activations."""
    _, _, width, sequence = case
    tokens = BATCH * sequence
    at_end = next(row for row in reversed(traced[case].memory) if row.phase == "forward").saved
    return (at_end - 4 * tokens * VOCABULARY) / (4 * tokens * width)


pd.DataFrame([(*case, saved(case)) for case in cases], columns=["strategy", "blocks", "width", "sequence", "saved"])

# %% [markdown]
# Each block adds 16: extrapolating from one and two blocks, 18 and 34, gives the 50 of three. The strategy does
# not matter, and neither does the length of the sequence, because fused attention saves no probabilities.
#
# The rest are parameters. This gives the peak in bytes on the fullest rank:


# %%
def peak(strategy, blocks, width, batch, sequence=SEQUENCE, ranks=RANKS, gloo=True, adam=True):
    """Bytes by use at the peak of a step."""
    activation, logits = 4 * batch * sequence * width, 4 * batch * sequence * VOCABULARY
    table, block = 4 * VOCABULARY * width, 4 * (12 * width**2 + 13 * width)
    whole = table + 4 * CONTEXT * width + blocks * block + 8 * width
    held = whole if strategy == "ddp" else whole / ranks
    gathered = {"ddp": 0, "zero2": whole}.get(strategy, table)  # the head's weight, which is the embedding's
    # at the end: the gradients of the table from both its uses, and their sum
    if strategy == "ddp":
        reduced = whole + 2 * table
    elif strategy == "owner":
        held = max(held, table)
        reduced = 2 * table + table * (ranks - 1 if gloo else 1)
    else:  # shards of gradients, and two blocks on their way
        arriving = (ranks - 1 if gloo else 1) / ranks
        reduced = (blocks - 2) * block / ranks + 2 * block * (1 + arriving) + 3 * table

    begins = {
        "gathered": gathered,
        "saved for backward": logits + (16 * blocks + 2) * activation,
        "gradients": 2 * logits,  # of the loss and of the logits
    }
    ends = {"gathered": 0, "saved for backward": 0, "gradients": reduced}
    most = max(begins, ends, key=lambda parts: sum(parts.values()))
    return {"parameters": held, "AdamW": 2 * held if adam else 0, **most}


# %% [markdown]
# The formula ignores small terms: a few activations, the batch, the position embedding, which is not gathered again.
# Compare it with the traces:

# %%
comparison = []
for case, step in traced.items():
    strategy, blocks, width, sequence = case
    formula = sum(peak(strategy, blocks, width, BATCH, sequence, adam=False).values())
    comparison.append((*case, step.totals.peak / MB, formula / MB, 100 * (formula / step.totals.peak - 1)))
pd.DataFrame(
    comparison, columns=["strategy", "blocks", "width", "sequence", "traced, MiB", "formula, MiB", "difference, %"]
)

# %% [markdown]
# ## The sizes of GPT-2
#
# Now apply the formula to 8 GPUs with 4 sequences of 256 tokens each. First check that it counts parameters as PyTorch
# does:

# %%
SIZES = {"124M": (12, 768), "355M": (24, 1024), "774M": (36, 1280), "1.5B": (48, 1600)}
for name, (blocks, width) in SIZES.items():
    with torch.device("meta"):
        model = GPT(blocks, width)
    counted = sum(p.numel() for p in model.parameters())
    assert peak("ddp", blocks, width, BATCH)["parameters"] == 4 * counted
    print(f"{name:>5}: {blocks} blocks of width {width:4}, {counted:13,} parameters")

# %%
STRATEGIES = ("ddp", "zero2", "zero3", "owner")
USES = {
    "parameters": "#999999",
    "AdamW": "#CC79A7",
    "gathered": "#0072B2",
    "saved for backward": "#56B4E9",
    "gradients": "#E69F00",
}
figure, panels = plt.subplots(1, 4, figsize=(12, 3.8), facecolor="white")
for axes, (name, size) in zip(panels, SIZES.items(), strict=True):
    bars = pd.DataFrame({s: peak(s, *size, BATCH) for s in STRATEGIES}).T[list(USES)] / GB
    bars.plot.bar(stacked=True, ax=axes, color=list(USES.values()), legend=False, width=0.75, rot=0)
    for k, total in enumerate(bars.sum(axis=1)):
        axes.text(k, total, f"{total:.1f}", ha="center", va="bottom")
    axes.set_title(name)
    axes.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("GiB on the fullest of 8 GPUs, predicted")
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in USES.values()]
figure.legend(handles, USES, ncols=5, loc="lower center", frameon=False)
figure.tight_layout(rect=(0, 0.07, 1, 1))
plt.show()

# %% [markdown]
# - **DDP** holds 16 bytes for each parameter, for any number of GPUs.
# - **ZeRO-2** divides this by the number of GPUs. During a step it adds one whole copy of the parameters, 4 bytes each
#   at its peak.
# - **ZeRO-3** removes this copy too. Only activations remain, which no strategy shards. The next step would be a
#   smaller batch or recomputation.
# - **owner** needs as much as ZeRO-3, unless one tensor exceeds a rank's share. The embedding is a third of the
#   smallest GPT-2, and the table shows the rank that owns it.
#
# ## Measured
#
# Do ranks allocate the predicted memory? [gpt2/measure.py](gpt2/measure.py) trains a GPT-2 of two blocks, width 512, on
# two ranks with gloo, once with each strategy, with one bucket per layer. *Measured* is the peak memory of tensors in
# the allocations that PyTorch's profiler records, over a whole step with AdamW, including the tensors that live between
# steps. *Predicted* is `shardtrace.memory(model, persistent=...)`, where the persistent bytes are AdamW's state.
# Neither includes the other memory of a process (code, sockets, the allocator's reserve).

# %%
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
environment = {**os.environ, "OMP_NUM_THREADS": "1"}
done = subprocess.run([*torchrun, "gpt2/measure.py"], env=environment, capture_output=True, text=True, check=True)
result = json.loads(done.stdout.splitlines()[-1])

# %% tags=["varies"]
measured = pd.DataFrame(
    [
        (strategy, rank, p / MB, m / MB, m - p)
        for strategy, (predicted, found) in ((s, r.values()) for s, r in result.items())
        for rank, (p, m) in enumerate(zip(predicted, found, strict=True))
    ],
    columns=["strategy", "rank", "predicted, MiB", "measured, MiB", "difference, bytes"],
)
measured

# %% tags=["varies"]
bars = measured.set_index(measured.strategy + ", rank " + measured["rank"].astype(str))
axes = bars[["predicted, MiB", "measured, MiB"]].plot.barh(color=["#56B4E9", "#E69F00"], figsize=(9, 3.6), width=0.8)
axes.figure.set_facecolor("white")
axes.invert_yaxis()
axes.set(xlabel="MiB of tensors at the peak of a step")
axes.legend(["predicted", "measured"], frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
axes.spines[["top", "right"]].set_visible(False)
axes.figure.tight_layout()
plt.show()

# %% [markdown]
# They agree except for a few hundred bytes: AdamW's step counter of each tensor, and other single numbers.
#
# ## What fits in 80 GB
#
# How many sequences of 1024 tokens fit into a GPU with 80 GB in one step? Two sizes of GPT-3 join those of GPT-2,
# because the strategy matters only for larger models. The formula is the same, in fp32, with one change for GPUs: nccl
# reduces on the way. That was not traced here, and nothing was measured on a GPU. A real GPU also needs memory for its
# libraries and for fragmentation: subtract a tenth.

# %%
LARGE = {"GPT-3 6.7B": (32, 4096), "GPT-3 13B": (40, 5120)}


def most_sequences(strategy, size, ranks, memory=80e9):
    """The largest batch of a rank that fits; 0 if none does."""

    def fits(batch):
        return sum(peak(strategy, *size, batch, 1024, ranks, gloo=False).values()) <= memory

    batch = 0
    while fits(batch + 1):
        batch += 1
    return batch


columns = {f"{s}, {n} GPUs": (s, n) for n in (8, 64) for s in ("zero2", "zero3", "owner")}
fitting = {
    name: {"ddp": most_sequences("ddp", size, 1)} | {c: most_sequences(s, size, n) for c, (s, n) in columns.items()}
    for name, size in (SIZES | LARGE).items()
}
pd.DataFrame(fitting).T

# %% [markdown]
# As long as the states are a small part of 80 GB, activations decide, and the strategies hardly differ: DDP is enough
# for all of GPT-2. With 6.7 billion parameters DDP no longer fits (16 bytes each are 106 GB). ZeRO-2 still fits, but
# its copy of all parameters takes 27 GB, which ZeRO-3 turns into a larger batch. With 13 billion parameters, this copy
# is 51 GB: on 8 GPUs only ZeRO-3 and owners fit. (The logits are half of what a sequence of the smallest GPT-2 takes.
# Without `chunk_loss=None` they are never there as a whole.)
#
# For your own model, you need no formula: use `shardtrace.inspect(model, inputs, world_size=...).totals.peak`, or
# `shardtrace.memory(model)` after a step. [inspect_zero3](inspect_zero3.ipynb) shows how to read the rest.
