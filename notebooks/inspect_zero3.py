# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a ZeRO-3 schedule before it runs
#
# In PyTorch's FSDP, hooks issue the collectives while the model runs. Only a profile of the real job on the real
# cluster shows that a gather came too late, or that memory was held for too long.
#
# shardtrace compiles the step instead. Thunder traces the model into a list of lines. Passes insert every `all_gather`
# and `reduce_scatter` as a line, and move each to its best position. The schedule therefore exists before any rank
# does, and `shardtrace.inspect` shows it: here for one of **64 GPUs**, on a laptop without any. Nothing in this
# notebook runs a model.

# %%
from dataclasses import replace

import shardtrace
from passes.plan import CostModel, Device, Link
from shardtrace import CompilePolicy

import matplotlib.pyplot as plt
import pandas as pd
import torch
from gpt2.model import GPT  # beside this notebook

pd.set_option("display.max_colwidth", None, "display.float_format", "{:.2f}".format)

# %% [markdown]
# ## A model and an imaginary machine
#
# The model has three blocks with the width of GPT-2 XL. On the meta device they have shapes but no memory; `inspect`
# compiles a copy and allocates only 1/64 of it. The vocabulary is that of bytes, so that the blocks, and not the
# embedding, are most of the model.
#
# The cost model describes the machine: H100s by their data sheet, with 400 Gbit/s of network each. Real kernels reach
# perhaps half of these rates: compare the times below only with each other. `shardtrace calibrate` measures
# the rates of a real machine, which are then used by default.

# %%
with torch.device("meta"):
    model = GPT(blocks=3, width=1600, vocabulary=256)

batch = torch.zeros(64, 256, dtype=torch.long)  # 64 sequences of 256 tokens on each GPU; values do not matter

cluster = CostModel(
    link=Link(bandwidth=50e9, latency=20e-6),  # bytes/s that a GPU sends while it receives as many; s
    device=Device(flops=494e12, half_flops=989e12, bandwidth=3.35e12, overhead=5e-6),  # TF32, bf16, HBM, a launch
)
policy = CompilePolicy(cost_model=cluster)
options = {
    "world_size": 64,
    "mp_policy": "bf16",
    "compile_policy": policy,
    "bucketing_strategy": "block",
    "jit_options": {"executors": ["sdpa", "torch_kernels", "torchcompile"]},  # fuses, as nvFuser does on a GPU
}
step = shardtrace.inspect(model, (batch, batch), **options)  # ZeRO-3, a bucket for each block, prefetch 1

# %% [markdown]
# ## The inspector
#
# The value of the cell is the whole page: click a bar or a line, step through the passes with the arrow keys, press `d`
# for the diff of a pass. (GitHub shows no frames: there you see only the numbers. `step.to_html("step.html")` writes
# the page to a file.)

# %% tags=["varies"]
step

# %% [markdown]
# ## The timeline
#
# `print(step)` draws it in a terminal. Time goes from left to right, forward and then backward:
#
# - **compute** shows how busy the GPU is, **exposed** the times when it waits for the network;
# - **parameters** and **gradients** show the link: gathers and reductions;
# - **memory** is the memory of all tensors; the summary names the line at its peak.

# %%
print(str(step).partition("\n\npasses:")[0])

# %% [markdown]
# The next plot shows the same to scale. Backward begins at the dotted line, and compute waits while the lower bar is
# red. No schedule removes the waits for the first gathers and the last reductions, because there is no other work
# meanwhile. (Smaller buckets make both shorter.) The options can only change the exposed communication between them.

# %%
GATHER, REDUCE, COMPUTE, EXPOSED = "#0072B2", "#E69F00", "#009E73", "#D55E00"  # safe for the colour-blind
SHADES = {
    "inputs": ("shards, batch", "#999999"),
    "saved": ("saved for backward", "#56B4E9"),
    "activations": ("activations", "#CC79A7"),
    "gradients": ("gradients", "#E69F00"),
    "unsharded": ("gathered parameters", "#0072B2"),
    "in_flight": ("in flight", "#F0E442"),
}
MB, MS = 2**20, 1e-3


def draw(step):
    """The network, the compute and the memory of a step, on one axis of milliseconds."""
    figure, (top, below) = plt.subplots(2, 1, figsize=(11, 5), sharex=True, height_ratios=(1, 2), facecolor="white")
    end = step.totals.seconds / MS
    top.barh(0, end, color=COMPUTE)
    for row in step.collectives:
        start, stop, idle = row.start / MS, row.stop / MS, row.exposed / MS
        top.barh(1, stop - start, left=start, color=GATHER if "gather" in row.kind else REDUCE, edgecolor="white")
        top.barh(0, idle, left=stop - idle, color=EXPOSED)
        if stop - start > end / 40:
            top.text((start + stop) / 2, 1, row.bucket.replace("blocks.", "b"), ha="center", va="center", color="white")
    top.set_yticks([0, 1], ["compute", "network"])
    keys = {"gather": GATHER, "reduce": REDUCE, "compute": COMPUTE, "exposed": EXPOSED}
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in keys.values()]
    top.legend(patches, keys, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)

    memory = step.memory.to_pandas()
    labels, colours = zip(*SHADES.values(), strict=True)
    areas = [memory[kind] / MB for kind in SHADES]
    below.stackplot(memory.time / MS, areas, labels=labels, colors=colours, step="post")
    below.step(memory.time / MS, memory.during / MB, "k", linewidth=0.8, where="post", label="needed meanwhile")
    below.legend(ncols=7, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize="small", columnspacing=1)
    below.set(xlabel="predicted ms", ylabel="MiB", xlim=(0, end))
    for axes in (top, below):
        axes.axvline(memory.time[memory.phase == "backward"].min() / MS, color="black", linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    plt.show()


draw(step)

# %% [markdown]
# ## The collectives
#
# The table has a row for each collective, in order of issue. `issue` and `wait` are line numbers of the executed trace;
# `bytes` is the size of the unsharded bucket on the wire (bf16 here). In ZeRO-3 each bucket is gathered for forward,
# gathered again for backward, and its gradients are reduced to the ranks that hold its shards.

# %%
rows = step.collectives.to_pandas()
rows = rows.assign(MiB=rows.bytes / MB, start=rows.start / MS, stop=rows.stop / MS, exposed=rows.exposed / MS)
rows[["phase", "kind", "bucket", "MiB", "issue", "wait", "start", "stop", "exposed"]]

# %% [markdown]
# Each has two reasons: one for the position of its issue, one for that of its wait.

# %%
reasons = rows[["why_issued", "why_waited"]].replace(r"(issued|waited for) here: ", "", regex=True)
pd.concat([rows[["kind", "bucket"]], reasons], axis=1)

# %% [markdown]
# How to read them:
#
# | reason | meaning |
# |---|---|
# | in order of first use, as early as the limits allow | nothing delayed it |
# | not earlier, as more than prefetch=1 ... | a larger `prefetch` would let it start earlier |
# | not earlier, as more than ... bytes would be in flight | so would a larger `max_inflight_bytes` |
# | not earlier, as from here it still arrives in time | an earlier issue would cost memory and save no time |
# | its gradients are complete | a reduction starts as soon as it can |
# | the next line uses it; compute is idle for ... | exposed: time that could be saved |
# | the trace ends; compute is idle for ... | exposed too, and nothing is left to hide it |
# | it makes room for ... | the bytes in flight are needed for another bucket |
#
# Collectives are lines of the program (`thunder.last_traces` shows the reason as a comment above each). These are the
# lines around the first wait for a block:

# %%
forward = step.stages[[s.phase for s in step.stages].index("backward") - 1]  # the last pass of forward
first = step.collectives[1]
for number in range(first.issue - 1, first.wait + 3):
    code = forward.lines[number].code
    print(f"{number:3}  {code if len(code) < 110 else code[:109] + '…'}")

# %% [markdown]
# ## The memory
#
# `.memory` has a row for each line: `during` is the memory needed while the line runs, `total` the memory alive after
# it, and the other columns are the parts of the total. The five lines that need the most:

# %%
memory = step.memory.to_pandas()
most = memory.nlargest(5, "during")
sizes = most.columns[most.columns.get_loc("during") :]
most.assign(code=most.code.str.slice(0, 32) + "…", **(most[sizes] / MB))[["phase", "line", "code", *sizes]]

# %% [markdown]
# Most of it is activations, which sharding does not touch. Forward holds the parameters of two blocks at a time, for
# any depth of the model: the block in use and, because `prefetch` is 1, the next one. It also holds the bucket "root",
# the embedding, throughout, because the head at the other end shares its weight. shardtrace proves such limits at every
# line of a trace before it runs (`passes/analysis/verify.py`), or raises.

# %%
bucket = max(row.bytes for row in step.collectives)
gathering = memory[memory.phase == "forward"]
print(f"a block                 {bucket / MB:6.1f} MiB in bf16")
print(f"all parameters          {sum(p.numel() for p in model.parameters()) * 2 / MB:6.1f} MiB")
print(f"gathered or on the way  {(gathering.unsharded + gathering.in_flight).max() / MB:6.1f} MiB at most in forward")

# %% [markdown]
# ## The passes
#
# `.stages` has the trace after each pass; the inspector shows their differences. A few passes are shardtrace's, the
# others are Thunder's. Differentiation adds most of the lines, and fusions remove most of them again. The last pass
# only moves lines.

# %%
changes = ("added", "removed", "moved")
pd.DataFrame(
    [s.phase, s.name, len(s.lines), *(s.changes[change] for change in changes)]
    for s in step.stages
    if not s.is_unchanged
).set_axis(["phase", "pass", "lines", *changes], axis=1)

# %% [markdown]
# ## Parts of parameters
#
# With tensor parallelism, two ranks share a batch, and each computes with its part of the parameters. Of a dim that is
# split, the inspector and the traces show what this rank has: `3200 of 6400`.

# %%
split = shardtrace.inspect(model, (batch, batch), mesh_shape=(32, 2), tensor_parallel="tensor", **options)
forward = split.stages[[s.phase for s in split.stages].index("backward") - 1]
types = [kind.text for line in forward.lines for kind in line.template.types if kind]
print(*dict.fromkeys(text for text in types if " of " in text), sep="\n")

# %% [markdown]
# The 25 heads of this model do not divide by two, and attention is computed whole on both ranks. The vocabulary does:
# the loss is computed on parts of the logits.

# %% [markdown]
# ## What each option changes
#
# Now change one option at a time, with two blocks instead of three. Each case takes a second or two.

# %%
with torch.device("meta"):
    shallow = GPT(blocks=2, width=1600, vocabulary=256)

changed = {
    "ZeRO-3, as above": {},
    "ZeRO-2": {"sharding_strategy": "zero2"},
    "buckets: none": {"bucketing_strategy": "none"},
    "buckets: 25 MB": {"bucketing_strategy": 25},
    "..., 25 MB in flight": {"bucketing_strategy": 25, "compile_policy": replace(policy, max_inflight_bytes=25 * MB)},
    "prefetch 0": {"compile_policy": replace(policy, prefetch=0)},
    "fp32": {"mp_policy": None},
}
for name, bandwidth in (("100 Gbit/s", 12.5e9), ("1.6 Tbit/s", 200e9)):
    other = replace(cluster, link=Link(bandwidth=bandwidth, latency=20e-6))
    changed[name] = {"compile_policy": replace(policy, cost_model=other)}
steps = {name: shardtrace.inspect(shallow, (batch, batch), **options | change) for name, change in changed.items()}


# %%
def numbers(step):
    totals, forward = step.totals, [row for row in step.memory if row.phase == "forward"]
    return {
        "step, ms": totals.seconds / MS,
        "exposed, ms": totals.exposed / MS,
        "collectives": totals.collectives,
        "sent, MiB": totals.sent / MB,
        "peak, MiB": totals.peak / MB,
        "saved, MiB": forward[-1].saved / MB,
        "gathered at most, MiB": max(row.unsharded for row in step.memory) / MB,
    }


table = pd.DataFrame.from_dict({name: numbers(s) for name, s in steps.items()}, orient="index")
table.apply(lambda column: column.map(("{:.1f}" if "ms" in column.name else "{:.0f}").format))

# %%
y = range(len(table))
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True, width_ratios=(3, 2), facecolor="white")
busy = table["step, ms"] - table["exposed, ms"]
left.barh(y, busy, color=COMPUTE, label="compute")
left.barh(y, table["exposed, ms"], left=busy, color=EXPOSED, label="exposed communication")
left.axvline(table["step, ms"].iloc[0], color="black", linestyle=":")
left.set_xlabel("predicted ms of a step")
left.legend(frameon=False)
right.barh(y, table["gathered at most, MiB"], color=GATHER)
right.set_xlabel("MiB of gathered parameters, at most")
left.set_yticks(y, table.index)
left.invert_yaxis()
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# Conclusions:
#
# - **ZeRO-2** keeps the parameters that forward has gathered: backward waits for no parameters, and a third less is
#   sent. In exchange, all parameters are unsharded at once.
# - **Buckets** somewhat smaller than a block, here of 25 MB, are best. The first gather and the last reduction, which
#   nothing can hide, are short, and less memory is held. One collective for each tensor is too small: latencies add up,
#   and compute itself is slower, because no fusion reaches across a wait.
# - **prefetch 0** means that no gather overlaps with compute. The first bucket ahead gains the most.
# - **max_inflight_bytes** of a single bucket (compare with the row above it) makes each collective wait until the
#   previous one is used. This bounds the buffers in flight and costs time.
# - **fp32** sends twice the bytes, and computes at half the rate or less.
# - On a **slow link**, communication dominates the step, and the schedule cannot help. Send less: bf16, ZeRO-2, or
#   `"hybrid_zero3"`, which gathers only inside a node. On a **fast link**, only the ends of the step stay exposed.
#
# The peak says little here, because at this batch size it consists of activations. They differ because fusions differ:
# with fewer waits between lines, the compiler fuses more and saves less for backward. For a case in which parameters
# dominate, see [gpt2_memory](gpt2_memory.ipynb).
#
# To see your own model, call `shardtrace.inspect(model, inputs, world_size=...)`, or run `shardtrace explain` in a
# shell.
