# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # FSDP by hand
#
# PyTorch's FSDP wraps modules and hooks into their forward and backward. In shardtrace, FSDP is a compiler: a few
# functions that take a program and return a program. Here you call them one by one, read what each changes, and end
# with exactly the traces that `shardtrace.fsdp` compiles. Then two real processes run them.
#
# You should know what DDP and FSDP do. Thunder is explained on the way. Everything runs on a CPU in half a minute.
#
# Thunder has [a tutorial of FSDP](https://github.com/Lightning-AI/lightning-thunder/blob/main/notebooks/dev_tutorials/fsdp_tutorial.ipynb)
# for the same model. The steps are the same, side by side:
#
# | | Thunder's tutorial | here |
# |---|---|---|
# | the functional trace | `thunder.jit(model)` | the same |
# | shards | cuts the model's parameters | changes shapes in the trace; the model stays as it is |
# | unsharded for use | `synchronize` for each parameter, before the model | for each bucket, before its first use |
# | autodiff | `all_gather` in forward, `reduce_scatter` in backward | the same, one for each bucket |
# | ZeRO-3 | | `regather`: backward gathers again |
# | overlap | | `schedule`: collectives run beside compute |
# | proof | | `verify` |
# | on two ranks | a script for two GPUs | these traces, on two processes; `examples/traces.py` prints those of `fsdp` |

# %%
import re
import subprocess
import sys
import tempfile
from difflib import SequenceMatcher
from pathlib import Path
from textwrap import indent

import passes
from passes import BucketPlan, ShardedParameter, TracedParameters
from passes.parameters import insert_synchronize, shard_parameters
from passes.save import regather
from passes.schedule import schedule
from shardtrace import CompilePolicy
from shardtrace.testing import compile_fake, fake_ranks, stage, text

import thunder
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


# %% [markdown]
# ## The functional trace
#
# `thunder.jit` runs the model's Python once, with stand-ins for tensors ("proxies"), and records every operation. The
# result is a *trace*: a straight-line program in which each value is assigned once and nothing changes in place.
# Parameters are inputs like any other: `t_0_weight` is `model[0].weight`.

# %%
model = build()
x = torch.randn(8, 64)
jitted = thunder.jit(model)
jitted(x)

prologue = thunder.last_prologue_traces(jitted)[0]  # fetches the inputs of each call and checks their shapes
computation = thunder.last_traces(jitted)[2]  # the model; later traces are Thunder's next steps


def show(trace, dels=False):
    """Prints a trace from its signature on, without definitions, places and bookkeeping; ``del`` only if asked."""
    lines = re.sub(r", 'flat_args': \[.*?\]", ", ...", str(trace)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def "))
    left_out = ("    # ", "clear_mutable_collection", ".py:", "Collection", *(() if dels else ("  del ",)))
    print("\n".join(line for line in lines[start:] if line and not any(word in line for word in left_out)))


show(computation)

# %% [markdown]
# ## The plan
#
# Passes never touch the model. They read a *plan*, which is plain data: the world size, the strategy, the parameters. A
# `BucketPlan` with `regather=True` is ZeRO-3. `TracedParameters` lists the inputs that are sharded parameters.

# %%
plan = BucketPlan("Sequential", world_size=2, regather=True, strategy="sharded by hand")
inputs = {proxy.name: proxy for proxy in computation.args}
parameters = TracedParameters()
for index, (name, parameter) in enumerate(model.named_parameters()):
    layer = name.partition(".")[0]
    proxy = inputs["t_" + name.replace(".", "_")]
    parameters.add(
        proxy.history,  # the origin of the value: it identifies a proxy, however it is renamed
        ShardedParameter(plan, name, tuple(parameter.shape), layer, block=layer, index=index, dtype=proxy.dtype),
    )

# %% [markdown]
# ## Pass 1: parameters are shards
#
# Each rank holds half of the rows of every parameter: 64 become 32. The pass changes only the shapes of the inputs, in
# the trace and in the prologue's checks.

# %%
prologue, sharded = (shard_parameters(t, parameters=parameters) for t in (prologue, computation))

for before, after in zip(computation.args, sharded.args, strict=True):
    print(f"{after.name:10}  {tuple(before.shape)!s:8}  ->  {tuple(after.shape)}")

# %% [markdown]
# `input` is not a parameter: each rank has its own batch. The trace is wrong now: `linear` expects 64 rows and gets 32.
#
# ## Pass 2: unsharded for their use
#
# `synchronize` takes shards and returns full parameters. The pass inserts one before the first use of each *bucket*. A
# bucket is a set of parameters that travel in one message: here, a layer's weight and bias.

# %%
synchronized = insert_synchronize(sharded, parameters=parameters)
show(synchronized)

# %% [markdown]
# The comments are no part of the program that runs. They are made when a trace is printed: what a bucket carries, and
# the types of all results. `synchronize` takes the 32 rows of this rank and returns all 64.
#
# ## Autodiff makes the collectives
#
# `synchronize` has a rule for Thunder's autodiff, like `linear` and `tanh`. Forward becomes `all_gather` and a wait. In
# backward, the gradients of the full parameters become `reduce_scatter` and a wait, which returns this rank's shard of
# the mean over ranks. Parameters that are gathered in one bucket are reduced in one bucket, without another pass.
#
# `thunder.jit` does the next steps. First it differentiates. The result is one trace, forward and then backward:

# %%
from thunder.common import transform_for_execution
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.transform_common import dce
from thunder.executors.passes import del_last_used
from thunder.transforms.autodiff import grad_transform_on_trace, split_into_forward_and_backward

data, stats = thunder.compile_data(jitted), thunder.compile_stats(jitted)


def differentiate(computation):
    with compile_data_and_stats(data, stats):
        return grad_transform_on_trace(dce(computation))


joint = differentiate(synchronized)
show(joint)

# %% [markdown]
# Then it assigns each operation to an executor (here PyTorch's functions) and splits the trace into forward and
# backward:


# %%
def lower(joint):
    with compile_data_and_stats(data, stats):
        lowered = transform_for_execution(joint, executors_list=data.executors_list, use_del_last_used=False)[-1]
        forward, backward = split_into_forward_and_backward(lowered)
    return del_last_used(forward), del_last_used(backward, clear_mutable_collections=True)


zero2_forward, zero2_backward = lower(joint)
show(zero2_forward)

# %% [markdown]
# The second part of the returned values is saved for backward. Its first entry is the gathered weight of the second
# layer, all 64 rows. A parameter that stays unsharded from forward to backward is ZeRO-2.
#
# ## Pass 3: gather again
#
# For ZeRO-3, `regather` tags the lines that depend only on shards. Thunder's autodiff repeats tagged lines in backward
# instead of saving their results. It is activation checkpointing for parameters.

# %%
zero3_forward, zero3_backward = lower(differentiate(regather(synchronized)))
for name, forward in (("ZeRO-2", zero2_forward), ("ZeRO-3", zero3_forward)):
    _, (saved, _) = forward.bound_symbols[-1].args
    print(f"{name} saves", ", ".join(f"{p.name}{list(p.shape)}" for p in saved))

# %% [markdown]
# Compare the two backward traces. ZeRO-3 gathers once more (`bw_` marks recomputed values) and needs no gathered
# parameter from forward:


# %%
def side_by_side(left, right, width=50):
    """Prints two traces with equal lines, except for the numbers of values, next to each other."""
    columns = [[s for s in text(t, dels=False).splitlines() if "clear_mutable" not in s] for t in (left, right)]
    shapes = [[re.sub(r"bw_|\d+", "", line) for line in column] for column in columns]
    for _, a, b, c, d in SequenceMatcher(None, *shapes, autojunk=False).get_opcodes():
        for k in range(max(b - a, d - c)):
            mine = columns[0][a + k] if a + k < b else ""
            other = columns[1][c + k] if c + k < d else ""
            print(f"{mine:{width}}{other}".rstrip())


print(f"{'ZeRO-2':50}ZeRO-3\n")
side_by_side(zero2_backward, zero3_backward)

# %% [markdown]
# The bias of `b_2` is gathered with its weight and dropped unused, because a bucket travels as one message.
#
# ## How gradients are averaged
#
# The mean is the sum over ranks, divided by their number. This fails in fp16, whose largest number is 65504: two
# gradients of 40000 have a mean of 40000, but their sum overflows.

# %%
a = b = torch.tensor([40000.0], dtype=torch.float16)
print("sum, then divide:", ((a + b) / 2).item())
print("divide, then sum:", (a / 2 + b / 2).item())

# %% [markdown]
# By default `reduce_scatter` never sums undivided gradients. With gloo on CPUs, ranks exchange the pieces of their
# gradients, and the receiver multiplies each piece by 1/N as it adds it (`passes/comm/direct.py`). With NCCL the
# collective averages (`ReduceOp.AVG`), which scales before it adds. On other backends gradients are divided while they
# are packed, before the collective (`passes/comm/native.py`). The price is at the other end of the range: a quotient
# below fp16's smallest number is lost. Loss scaling exists for this reason.
#
# ## Pass 4: the schedule
#
# Each collective is two lines, issue and wait. Their positions determine the overlap. `schedule` moves them, guided by
# a cost model of compute and links, and deletes each gathered parameter after its last use.

# %%
forward, backward = schedule(zero3_forward), schedule(zero3_backward)
show(forward, dels=True)

# %% [markdown]
# Both layers are issued at once: the second one travels while the first one computes. A comment above each collective
# says why it is where it is. The same in backward, where the first reduction runs beside the rest of backward:

# %%
show(backward, dels=True)

# %% [markdown]
# ## verify
#
# `verify` proves the invariants of every trace: each future is waited for once, nothing is used after its `del`, memory
# and bytes in flight stay within their limits. Our plan promises ZeRO-3. Without `regather`, the proof fails:

# %%
passes.verify(forward)
passes.verify(backward)

try:
    passes.verify(zero2_forward)
except passes.VerificationError as error:
    print(re.sub(r", 'flat_args': \[.*?\]", ", ...", str(error)))

# %% [markdown]
# ## `fsdp` does the same
#
# `fake_ranks` makes this process rank 0 of two; the other does not exist, and collectives do nothing. This is enough to
# compile. Your traces and those of `shardtrace.fsdp` are the same, line by line. (`CompilePolicy(kernels=False)`,
# because you used Thunder's own rules for gradients. By default a sharded model runs torch's kernels, whose traces are
# shorter.)

# %%
ours = {
    "zero2": (schedule(zero2_forward), schedule(zero2_backward)),
    "zero3": (forward, backward),
}
for strategy, by_hand in ours.items():
    with fake_ranks(2):
        compiled = compile_fake(build, x, sharding_strategy=strategy, compile_policy=CompilePolicy(kernels=False))
    theirs = stage(compiled, "schedule"), stage(compiled, "schedule", thunder.last_backward_traces)
    for mine, its in zip(by_hand, theirs, strict=True):
        assert text(mine) == text(its)
    print(f"{strategy}: {sum(len(text(t).splitlines()) for t in theirs)} lines, all equal")

# %% [markdown]
# ## On two real ranks
#
# A trace is a Python program. Take the text of the two traces, put a `def` above each, and define its names: the
# collectives are functions of `passes.comm.direct`, the buckets are arguments. The rest of the script makes the shards
# and compares the step with that of one process on the whole batch.

# %%
HEADER = """
import torch
import torch.distributed as dist
from passes import Bucket, BucketPlan, ShardedParameter
from passes.comm.direct import finish_all_gather as wait_all_gather
from passes.comm.direct import finish_reduce_scatter as wait_reduce_scatter
from passes.comm.direct import issue_all_gather as all_gather
from passes.comm.direct import issue_reduce_scatter as reduce_scatter
from passes.plan import Member, PlainRuntime
from thunder.core import dtypes
from torch import nn

clear_mutable_collection = list.clear
"""

MAIN = """
def make_bucket(name, plan, dtype=dtypes.float32, **shapes):
    parameters = [ShardedParameter(plan, k, shape, name) for k, shape in shapes.items()]
    return Bucket(name, name, plan, tuple(Member(p, True) for p in parameters), dtype)


def check(what, holds):
    results = [None, None]
    dist.all_gather_object(results, bool(holds))
    if dist.get_rank() == 0:
        print(f"{what}: {'yes' if all(results) else 'NO'}", flush=True)


def main(rank):
    plan = BucketPlan("Sequential", world_size=2, rank=rank, direct=True, runtime=PlainRuntime(dist.group.WORLD))
    b_0 = make_bucket("b_0", plan, weight=(64, 64), bias=(64,))
    b_2 = make_bucket("b_2", plan, weight=(64, 64), bias=(64,))

    torch.manual_seed(0)  # equal on both ranks
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    batch = torch.randn(16, 64)
    whole = model(batch)
    whole.square().mean().backward()

    w0, b0, w2, b2 = (p.detach().chunk(2)[rank].clone() for p in model.parameters())
    result, (saved, other) = forward(batch.chunk(2)[rank], b0, w0, b2, w2, b_0, b_2)
    (y,) = result["output"]
    check("the forward equals that of a single process", torch.allclose(y, whole.chunk(2)[rank], atol=1e-6))

    cotangent = 2 * y / y.numel()  # the gradient of the mean square
    _, *grads = backward([list(saved), list(other)], [cotangent], b_0, b_2)
    expected = [p.grad.chunk(2)[rank] for p in (model[0].bias, model[0].weight, model[2].bias, model[2].weight)]
    check("so do the shards of all gradients", all(map(torch.allclose, grads, expected)))

    half = make_bucket("half", plan, dtypes.float16, weight=(4, 4))
    (mean,) = wait_reduce_scatter(reduce_scatter((torch.full((4, 4), 40000.0).half(),), half), half)
    check("fp16 gradients of 40000 on both ranks average to 40000", (mean == 40000).all())


dist.init_process_group("gloo")
main(dist.get_rank())
dist.barrier()
dist.destroy_process_group()
"""


def function(name, arguments, trace):
    return f"def {name}({', '.join(arguments)}, b_0, b_2):\n{indent(text(trace), '    ')}\n\n\n"


source = HEADER + "\n\n"
source += function("forward", [p.name for p in forward.args], forward)
source += function("backward", ["saved_for_backward", "cotangents"], backward) + MAIN.lstrip()

with tempfile.TemporaryDirectory() as folder:
    script = Path(folder, "step.py")
    script.write_text(source)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(torchrun, capture_output=True, text=True)
checks = [line for line in done.stdout.splitlines() if line.endswith((": yes", ": NO"))]
print("\n".join(checks))
assert [line[-3:] for line in checks] == ["yes"] * 3, done.stderr

# %% [markdown]
# ## What else `fsdp` does
#
# - It makes the plan from your module: blocks, tied and frozen weights, row counts that N does not divide.
# - It keeps the shards as the module's parameters, so that any optimizer that works element by element can update them.
# - It adds the passes to `thunder.jit`, and compares the compiled collectives on all ranks.
#
# ```python
# cmodel = thunder.jit(shardtrace.fsdp(model, sharding_strategy="zero3"))
# cmodel(x).square().mean().backward()
# ```
#
# Next, [write_a_pass](write_a_pass.ipynb) adds your own pass. For larger models, `shardtrace.inspect(cmodel)` shows on
# one page everything that you have printed here.
