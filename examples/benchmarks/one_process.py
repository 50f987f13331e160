"""Step and peak memory of one process with torch's own kernels, against eager PyTorch, over shapes of models.

python examples/benchmarks/one_process.py --only "GPT|Llama"
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1] / "gpt2"))

import shardtrace  # before thunder: makes it importable on the newest torch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.models.bert import BertConfig, BertForMaskedLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.resnet import ResNetConfig, ResNetForImageClassification
from transformers.models.vit import ViTConfig, ViTForImageClassification

from hf_llama import WithLoss
from measure import interleaved
from memory import metered
from model import GPT, GPTConfig

WORDS, TOKENS, BATCH = 512, 128, 4
TEXT = {"vocab_size": WORDS, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
PATCHES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024}


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=WORDS, block_size=TOKENS, n_layer=4, n_head=6, n_embd=384))


def llama() -> nn.Module:
    config = LlamaConfig(**TEXT, intermediate_size=688, num_key_value_heads=2, use_cache=False)
    return WithLoss(LlamaForCausalLM(config), "input_ids")


def bert() -> nn.Module:
    # eager and compiled steps draw other numbers in attention with dropout
    config = BertConfig(**TEXT, intermediate_size=1024, attention_probs_dropout_prob=0.0)
    return WithLoss(BertForMaskedLM(config), "input_ids")


def vit() -> nn.Module:
    return WithLoss(ViTForImageClassification(ViTConfig(**PATCHES, image_size=128, patch_size=8)), "pixel_values")


def resnet() -> nn.Module:
    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], layer_type="basic")
    return WithLoss(ResNetForImageClassification(config), "pixel_values")


MODELS = {"GPT": gpt, "Llama": llama, "BERT": bert, "ViT": vit, "ResNet": resnet}


class Row(NamedTuple):
    """Ratios to eager PyTorch, and how many parameters have gradients that are equal bit for bit."""

    step: float
    peak: float
    equal: int
    parameters: int

    def __str__(self) -> str:
        return f"step {self.step:.3f}  peak {self.peak:.3f}  gradients bit for bit: {self.equal} of {self.parameters}"


def batch(name: str) -> tuple[Tensor, Tensor]:
    if name in ("ViT", "ResNet"):
        return torch.randn(8, 3, 128, 128), torch.randint(0, 2, (8,))
    return torch.randint(WORDS, (BATCH, TOKENS)), torch.randint(WORDS, (BATCH, TOKENS))


def compare(name: str, rounds: int, dtype: torch.dtype) -> Row:
    torch.manual_seed(0)
    x, y = batch(name)
    x = x.to(dtype) if x.is_floating_point() else x
    eager = MODELS[name]().to(dtype)
    for module in eager.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    models = {"eager": eager, "kernels": copy.deepcopy(eager)}
    callables: dict[str, Any] = {"eager": models["eager"], "kernels": shardtrace.fsdp(models["kernels"])}
    cpu, peaks, steps = torch.device("cpu"), {}, {}
    for how, model in models.items():
        steps[how] = step = _step(callables[how], model, x, y)
        step()
        model.zero_grad()
        peaks[how] = metered(step, cpu)[1].peak
    gradients = [[p.grad for p in model.parameters()] for model in models.values()]
    equal = sum(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(*gradients, strict=True)
    )
    timed = interleaved(steps, rounds=rounds, steps_per_round=3, barrier=lambda: None, device=cpu)
    ratio = median(b / a for a, b in zip(timed["eager"].seconds, timed["kernels"].seconds, strict=True))
    return Row(ratio, peaks["kernels"] / peaks["eager"], equal, len(gradients[0]))


def _step(run: Callable[..., Any], model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        run(x, y).backward()

    return step


def rows(only: str, rounds: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Row]]:
    for name in MODELS:
        if re.search(only, name):
            yield name, compare(name, rounds, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression of names of models")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    print(f"torch {torch.__version__}, shardtrace {shardtrace.__version__}, ratios to eager PyTorch")
    for name, row in rows(args.only, args.rounds, getattr(torch, args.dtype)):
        print(f"{name:8}{row}", flush=True)


if __name__ == "__main__":
    main()
