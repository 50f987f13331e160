# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write a pass
#
# On a slow link, a step of FSDP mostly waits for gathered parameters. ZeRO++
# ([Wang et al., 2023](https://arxiv.org/abs/2306.10209)) sends them as int8 with scales: a quarter of the bytes. Here
# you add this to shardtrace as your own pass. You write it, test it in a single process, see mistakes caught, measure
# it on two real ranks, and read it in the inspector.
#
# shardtrace has it built in, as [`CommPolicy(gather_dtype="int8")`](../docs/guide/communication.md#fewer-bytes): in
# smaller blocks, with every strategy. What follows is its shortest form.
#
# [fsdp_by_hand](fsdp_by_hand.ipynb) introduces the other passes. Everything runs on a CPU in under a minute.

# %%
import inspect
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import shardtrace
from passes import Bucket, PassAfterLowering, VerificationError, Wire
from passes.analysis.recognise import bucket_of, is_collective, is_gather
from passes.compat.versions import all_gather_single
from passes.plan import Placement
from shardtrace.testing import compile_fake, fake_ranks, stage, text

import thunder
import torch
from thunder.core import dtypes
from thunder.core.trace import from_trace
from torch import nn

# %% [markdown]
# ## How int8 travels
#
# The first part has nothing to do with traces. Each row of a weight gets a scale that maps its largest value to 127; a
# bias is one row. A rank packs its shard of a bucket into one buffer of bytes: the scales, then the values.


# %%
def quantize(shard):
    """``(rows, *rest)`` -> int8 ``(rows, numel of rest)`` and its fp32 scales ``(rows,)``."""
    rows = shard.flatten(1) if shard.dim() > 1 else shard[None]
    scales = rows.abs().amax(1).clamp(min=1e-30) / 127
    return (rows / scales[:, None]).round().to(torch.int8), scales


def count_scales(member):
    shape = member.parameter.shard_shape
    return shape[0] if len(shape) > 1 else 1


def issue_int8(shards, bucket):
    values, scales = zip(*map(quantize, shards), strict=True)
    row = torch.cat([torch.cat(scales).view(torch.int8), *(v.flatten() for v in values)])
    rows = row.new_empty(bucket.plan.world_size * len(row))
    work = all_gather_single(rows, row, group=bucket.plan.group, async_op=True)
    return work, rows, row  # the future keeps ``row`` alive while it is sent


def finish_int8(future, bucket):
    work, rows, _ = future
    work.wait()
    ranks, counts = bucket.plan.world_size, [count_scales(m) for m in bucket.members]
    scales, values = rows.view(ranks, -1).split([4 * sum(counts), bucket.numel], dim=1)
    scales = scales.contiguous().view(torch.float32).split(counts, dim=1)
    values = values.split([m.numel for m in bucket.members], dim=1)
    full = []
    for m, s, v in zip(bucket.members, scales, values, strict=True):
        shape = m.parameter.full_shape
        rounded = (v.reshape(*s.shape, -1) * s[:, :, None]).flatten()
        full.append(rounded[: math.prod(shape)].view(shape))  # without the last rank's padding
    return tuple(full)


def count_bytes(bucket):
    return bucket.plan.world_size * (bucket.numel + 4 * sum(map(count_scales, bucket.members)))


INT8 = Wire(issue=issue_int8, finish=finish_int8, bytes=count_bytes)

# %% [markdown]
# A `Wire` is another way to gather a bucket. The scheduler, the memory estimate and the inspector ask it for its bytes,
# and run its functions on tensors without memory. Nothing else has to know about it.
#
# ## The pass
#
# A pass is a function from a trace to a trace. It never changes its input, and it returns the same object if there is
# nothing to do. This pass replaces the bucket of each gather, in the line that issues it and in the line that waits.


# %%
def is_quantizable(line):
    """True for both halves of a gather of fp32 shards."""
    if not (is_collective(line) and is_gather(line)):
        return False
    bucket = bucket_of(line)
    return bucket.dtype is dtypes.float32 and bucket.plan.placement is Placement.SHARD


def quantize_gathers(trace, chosen=is_quantizable):
    """Gathers fp32 shards as int8. Reductions and other parameters stay as they are."""
    buckets = {}
    new = from_trace(trace)
    for line in trace.bound_symbols:
        if chosen(line):
            b = bucket_of(line)
            int8 = Bucket(b.label, f"{b.name}_int8", b.plan, b.members, dtypes.int8, wire=INT8)
            line = line.from_bsym(args=(line.args[0], buckets.setdefault(b, int8)))
        new.bound_symbols.append(line)
    return new if buckets else trace


# %% [markdown]
# Gradients need no extra code: autodiff has already made the `reduce_scatter` lines, which the pass does not touch. The
# gradients are those of the rounded weights, in fp32, and each rank's optimizer applies them to its own fp32 shards.
#
# ## Plugging it in
#
# `PassAfterLowering` turns the function into a Thunder Transform, which `thunder.jit` accepts. shardtrace's own passes
# arrange themselves around it: the pass sees forward and backward with all collectives in place, its result is
# verified, and then `schedule` works with its bytes. (`PassBeforeAutodiff` is for passes whose lines autodiff has to
# differentiate; it runs after `regather`.)
#
# `fake_ranks` makes this process one of two ranks; the other does not exist. This is enough to compile.


# %%
def build(width=64, layers=2):
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())))


x = torch.randn(8, 64)
with fake_ranks(2):
    plain = compile_fake(build, x)
    int8 = compile_fake(build, x, transforms=[PassAfterLowering(quantize_gathers)])

print(re.sub(r", 'flat_args': \[.*?\]", ", ...", text(stage(int8, "quantize_gathers"), dels=False)))

# %% [markdown]
# ## A golden test
#
# This text is a test. In a test file, write `assert_expected_inline(text(trace), """""")` from `expecttest`, and let
# `EXPECTTEST_ACCEPT=1 pytest` fill in the string; here it is written by hand. Backward gathers int8 and reduces fp32,
# and `schedule` still moves the gather ahead of compute.

# %%
backward = stage(int8, "schedule", thunder.last_backward_traces)
lines = [line for line in text(backward, dels=False).splitlines() if "gather" in line or "reduce" in line]

expected = """\
bw_ft3 = all_gather((t_2_weight, t_2_bias), b_2_int8)
(bw_t5, bw_t6) = wait_all_gather(bw_ft3, b_2_int8)
ft12 = reduce_scatter((t9, t11), b_2)
ft18 = reduce_scatter((t15, t17), b_0)
(t19, t20) = wait_reduce_scatter(ft12, b_2)
(t21, t22) = wait_reduce_scatter(ft18, b_0)"""

assert "\n".join(lines) == expected, "\n".join(lines)

# %% [markdown]
# ## Bytes on the wire
#
# `shardtrace.collectives` lists the collectives of a step. A row of 64 values takes 64 bytes plus 4 for its scale, not
# 256:

# %%
for name, cmodel in (("fp32", plain), ("int8", int8)):
    print(name)
    for row in shardtrace.collectives(cmodel):
        print(f"  {row.phase:8}  {row.kind:14}  {row.bucket}  {row.dtype:3}  {row.bytes:6,} bytes")

# %% [markdown]
# ## Two mistakes
#
# The first pass below chooses all collectives, which would round gradients too. The second one forgets the lines that
# wait. The result of a pass is verified at once; the error names the pass and shows the line:

# %%
mistakes = {
    "quantize_everything": is_collective,
    "quantize_issues": lambda line: line.sym.name == "all_gather",
}
for name, chosen in mistakes.items():
    broken = PassAfterLowering(lambda trace, chosen=chosen: quantize_gathers(trace, chosen), name)
    try:
        with fake_ranks(2):
            compile_fake(build, x, transforms=[broken])
    except VerificationError as error:
        print(re.sub(r"  # \w+: .*|, 'flat_args': \[.*?\]", "", str(error)), end="\n\n")

# %% [markdown]
# ## On two real ranks
#
# Now the numbers. The script below contains the source of the functions above, and `torchrun` starts it on two CPU
# ranks. First it checks one step against a single process whose weights were rounded in the same way. Then it trains a
# student network on the outputs of a fixed teacher, with fp32 and with int8 gathers.

# %%
MAIN = """
def rounded(shard):
    values, scales = quantize(shard)
    return (values * scales[:, None]).view(shard.shape)


def check_gradients(rank):
    model, alone = build(), build()
    for p in alone.parameters():
        p.data = torch.cat([rounded(shard) for shard in p.data.chunk(2)])
    batch = torch.randn(16, 64)
    alone(batch).square().mean().backward()
    cmodel = thunder.jit(shardtrace.fsdp(model), transforms=[PassAfterLowering(quantize_gathers)])
    cmodel(batch.chunk(2)[rank]).square().mean().backward()
    pairs = zip(cmodel.parameters(), alone.parameters())
    return all(torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-7) for p, q in pairs)


def train(rank, transforms):
    teacher, student = build(layers=1), build()
    cmodel = thunder.jit(shardtrace.fsdp(student), transforms=transforms)
    optimizer = torch.optim.AdamW(cmodel.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(200):
        batch = torch.randn(64, 64, generator=generator)
        loss = torch.nn.functional.mse_loss(cmodel(batch), teacher(batch).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


dist.init_process_group("gloo")
rank = dist.get_rank()
found = {
    "exact": check_gradients(rank),
    "fp32": train(rank, []),
    "int8": train(rank, [PassAfterLowering(quantize_gathers)]),
}
if rank == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()
"""

IMPORTS = """
import copy, json, math
import shardtrace
from passes import Bucket, PassAfterLowering, Wire
from passes.compat.versions import all_gather_single
from passes.plan import Placement
from passes.analysis.recognise import bucket_of, is_collective, is_gather
import thunder, torch
import torch.distributed as dist
from thunder.core import dtypes
from thunder.core.trace import from_trace
from torch import nn
"""

functions = [quantize, count_scales, issue_int8, finish_int8, count_bytes, is_quantizable, quantize_gathers, build]
source = IMPORTS + "\n\n".join(map(inspect.getsource, functions))
source += "\n\nINT8 = Wire(issue=issue_int8, finish=finish_int8, bytes=count_bytes)\n" + MAIN

with tempfile.TemporaryDirectory() as folder:
    script = Path(folder, "int8.py")
    script.write_text(source)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(torchrun, capture_output=True, text=True)
assert done.stdout, done.stderr
found = json.loads(done.stdout.splitlines()[-1])
print("gradients equal those of a single process with rounded weights:", found["exact"])

# %% tags=["varies"]
print("step   fp32     int8")
for step in (0, 50, 100, 150, 199):
    mean = [sum(found[kind][max(0, step - 10) : step + 1]) / min(step + 1, 11) for kind in ("fp32", "int8")]
    print(f"{step:4}   {mean[0]:.5f}  {mean[1]:.5f}")

# %% [markdown]
# These are means of eleven steps. On this toy, the two cannot be told apart. For a real model, measure with your data.
# Finer scales, one for each block of a few hundred values as in ZeRO++, cost little more.
#
# ## In the inspector
#
# How much would it save on eight ranks? `shardtrace.inspect` compiles for fake ranks, with your pass among the others,
# and runs nothing. Times are predicted by the default cost model: a link of 1 Gbit/s and a fast device.

# %%
options = {"example_inputs": torch.randn(512, 1024), "world_size": 8}
with torch.device("meta"):
    larger = build(width=1024, layers=4)
fp32 = shardtrace.inspect(larger, **options)
int8 = shardtrace.inspect(larger, **options, jit_options={"transforms": [PassAfterLowering(quantize_gathers)]})

for name, seen in (("fp32", fp32), ("int8", int8)):
    rows = seen.collectives
    end, idle = max(r.stop for r in rows), sum(r.exposed for r in rows)
    print(
        f"{name}: {sum(r.bytes for r in rows) / 2**20:4.1f} MiB, {1e3 * idle:.0f} ms idle of {1e3 * end:.0f} predicted"
    )

# %% [markdown]
# The whole page, with your pass between the others under `passes`. (GitHub shows only its tables.)

# %% tags=["varies"]
int8

# %% [markdown]
# ## Where to go from here
#
# - [Design](../docs/design.md) describes how to write a pass, [CONTRIBUTING](../CONTRIBUTING.md) how to test it.
# - `passes/analysis/recognise.py` tells lines apart; `passes/plan/bucket.py` has everything about a bucket.
# - `shardtrace.memory(cmodel)` predicts the effect of your pass on the peak.
