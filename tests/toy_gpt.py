"""A GPT of six equal blocks that compiles in seconds."""

import sys
from pathlib import Path

import shardtrace

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt2"))

from model import GPT, GPTConfig

BLOCKS = 6
RANKS = 4


def gpt(blocks=BLOCKS):
    return GPT(GPTConfig(n_layer=blocks, n_embd=32, n_head=2, block_size=16, vocab_size=48))


def tokens(batch=4):
    return torch.zeros(batch, 16, dtype=torch.int64)


def plan_blocks():
    fixed = {"prefetch": 2, "bucketing_strategy": "block"}
    options = {"world_size": RANKS, "device": "cpu", "link": "1gbit", "memory": 2_000_000, "fixed": fixed}
    return shardtrace.plan(gpt(2), (tokens(), tokens()), **options)


def plan_rounded(**options):
    """A plan of layers without blocks, whose messages may be rounded."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    options = {"link": "1gbit", "allowed": {"gather_dtype": ["int8", "fp8"], "reduce_wire": "int8"}} | options
    return shardtrace.plan(model, torch.zeros(8, 512), world_size=RANKS, device="cpu", **options)
