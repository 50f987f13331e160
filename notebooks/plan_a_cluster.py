# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Plan a cluster
#
# You want to train Llama-3-8B and have not rented anything yet. How many GPUs? Does it fit? Which strategy, and what
# should be recomputed? `shardtrace.plan` answers on a laptop: it compiles the model for ranks that do not exist,
# composes the traces of many combinations, and predicts each one's seconds and bytes. No GPU is needed, and nothing
# runs.
#
# All times here are modelled from data sheets. `examples/benchmarks/published.py` sets such predictions beside
# published runs of this model.

# %%
import shardtrace

import pandas as pd
import torch

from llama.model import CONFIGS, Llama  # beside this notebook

pd.set_option("display.float_format", "{:.1f}".format)

# %% [markdown]
# ## Eight GPUs
#
# The model is on the meta device: its 16 GB of weights have no memory. The inputs are those of one rank, here one
# sequence of 8192 tokens. Precision is never chosen for you, so we ask for bf16.

# %%
with torch.device("meta"):
    model = Llama(CONFIGS["8B"])
tokens = torch.zeros(1, 8192, dtype=torch.long)


def plan(ranks, **options):
    options = {"device": "h100-sxm", "memory": "80GB", "fixed": {"mp_policy": "bf16"}, **options}
    return shardtrace.plan(model, (tokens, tokens), world_size=ranks, **options)


eight = plan(8)
eight

# %% [markdown]
# Read the plan from its memory. Weights, gradients and AdamW's state take 16 bytes for each parameter, spread over
# eight ranks. Most of the rest is what forward saves for backward. There is room to save everything, so that no block
# recomputes anything: the loss is computed in chunks, and the logits are never there as a whole.
#
# Each point of the curve is a step that no other one beats in both memory and time. From the left, blocks recompute
# less and less. The slope is the price of memory: on the left a GiB saves about 10 ms, on the right less than 1.
#
# ## Another budget
#
# The budget only picks a point of this curve. The rows are a table, so other budgets need no new plan:

# %%
front = eight.pareto.to_pandas()
budgets = {"a 40 GB GPU": 40e9, "a 48 GB GPU": 48e9, "an 80 GB GPU": 80e9, "a 141 GB GPU": 141e9}
best = {name: front[front.memory <= budget].iloc[-1] for name, budget in budgets.items()}
table = pd.DataFrame(best).T[["memory", "seconds", "strategy", "recomputing"]]
table.memory, table.seconds = table.memory / 2**30, 1e3 * table.seconds
table.rename(columns={"memory": "GiB", "seconds": "ms"})

# %% [markdown]
# (With the speed of an H100. `device="a100-80"` or `"h200"` plans for others.)
#
# ## 64 GPUs
#
# More ranks hold less each, and their links are slower: 400 Gbit/s between machines instead of NVLink inside one.

# %%
plans = {8: eight, 64: plan(64)}


def summary(found):
    kinds = {kind: nbytes / 2**30 for kind, nbytes in found.memory.items()}
    return {
        "tokens/s a GPU": found.tokens / found.seconds,
        "MFU %": 100 * found.mfu,
        "exposed ms": 1e3 * found.exposed,
        "GiB of weights": kinds.get("inputs", 0.0),
        "GiB of AdamW": kinds["optimizer"],
        "GiB saved": kinds["saved"],
        "recomputing": found.chosen.recomputing,
        "strategy": found.chosen.strategy,
    }


pd.DataFrame({ranks: summary(found) for ranks, found in plans.items()})

# %% [markdown]
# From 8 to 64 GPUs, weights and optimizer almost vanish, and the memory that they free is left for larger batches. Each
# GPU is a little faster, although its links are slower: it updates fewer weights. More GPUs would have little left to
# free. Communication stays hidden behind compute: a block has tens of milliseconds of work, and the parameters of the
# next one arrive in a few.
#
# ## Too little memory
#
# Two GPUs hold 64 GB of weights, gradients and AdamW's state each. With 40 GB there is no step on the device, even if
# all blocks recompute everything. The planner then moves shards and the optimizer to the memory of the host. If that
# did not help either, an error would say what is needed.

# %%
two = plan(2, memory="40GB", fixed={"mp_policy": "bf16", "activation_checkpointing": "full"})
print(two.options["offload_policy"])
print(f"{two.seconds:.1f} s, of which {two.optimizer:.1f} s are AdamW on the host. {two.notes[0]}")

# %% [markdown]
# A step then takes most of its time on the host: rent more GPUs instead, or accumulate gradients over several batches,
# so that AdamW runs less often (`accumulation=8`).
#
# ## Use it
#
# A plan is data. Write it to a file, take it to the cluster, and pass it to `fsdp`. Ranks compare it by its hash, and a
# plan for another model or number of ranks is refused.

# %%
text = eight.to_json()
read = shardtrace.TrainingPlan.from_json(text)
print(len(text), "characters;", "the same plan" if read.hash == eight.hash else "another one")

# %% [markdown]
# ```python
# eight.to_json("plan.json")
# model = shardtrace.fsdp(model, plan="plan.json")  # in the script that torchrun starts
# ```
#
# On the command line, a training script can be planned as it is:
#
# ```console
# shardtrace plan train.py --world-size 64 --memory 80GB --device h100-sxm --out plan.json --page plan.html
# ```
