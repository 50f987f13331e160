"""CPU milliseconds of a step on tiny tensors, for which a GPU would wait: eager PyTorch, FSDP2, ZeRO-3 on fake ranks.

python examples/benchmarks/host_time.py                  # the table, and seconds of the first step
python examples/benchmarks/host_time.py --gradients      # one process: gradients and loss beside eager's, bit for bit

Models are those of Hugging Face and litgpt, with blocks of width 32. Steps of the contenders take turns; the figures
are medians.
"""

from __future__ import annotations

import argparse
import copy
import re
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import shardtrace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

Batch = Mapping[str, Any]
Make = Callable[[int], tuple[nn.Module, Batch]]  # of a number of blocks

WORDS, TOKENS, WIDTH = 64, 8, 32


def _language(name: str, **sizes: Any) -> Make:
    """A language model of Hugging Face. ``sizes``: the options of its configuration."""

    def make(blocks: int) -> tuple[nn.Module, Batch]:
        import transformers

        number = next(key for key in ("n_layer", "num_layers", "num_hidden_layers") if key in sizes)
        config = getattr(transformers, f"{name}Config")(**{**sizes, number: blocks}, vocab_size=WORDS, use_cache=False)
        kind = {"T5": "T5ForConditionalGeneration", "GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}
        model = getattr(transformers, kind.get(name, f"{name}ForCausalLM"))(config)
        ids = torch.randint(WORDS, (2, TOKENS))
        # without a mask T5 makes one, unless a compiler runs it
        mask = {"attention_mask": torch.ones_like(ids)} if name == "T5" else {}
        return model, {"input_ids": ids, "labels": ids, **mask}

    return make


def _images(name: str, size: int, **sizes: Any) -> Make:
    """A model of images of Hugging Face."""

    def make(blocks: int) -> tuple[nn.Module, Batch]:
        import transformers

        depth = {"depths": [blocks // 4] * 4} if name == "ResNet" else {"num_hidden_layers": blocks, "image_size": size}
        config = getattr(transformers, f"{name}Config")(**{**sizes, **depth}, num_labels=4)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
        return model, {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(4, (2,))}

    return make


class _Scored(nn.Module):
    """litgpt's model with a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.model(input_ids)
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def _litgpt(blocks: int) -> tuple[nn.Module, Batch]:
    from litgpt import GPT, Config

    config = Config(
        n_layer=blocks, n_head=4, n_embd=WIDTH, block_size=TOKENS, vocab_size=WORDS, padded_vocab_size=WORDS,
        intermediate_size=2 * WIDTH,
    )  # fmt: skip
    ids = torch.randint(WORDS, (2, TOKENS))
    return _Scored(GPT(config)), {"input_ids": ids, "labels": ids}


LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
BERT = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 8, "num_attention_heads": 4}
MODELS: Mapping[str, Make] = {
    "GPT-2": _language("GPT2", n_embd=WIDTH, n_head=4, n_positions=TOKENS, n_layer=8),
    "Llama": _language("Llama", **LLAMA),
    "Qwen3": _language("Qwen3", **LLAMA, head_dim=8),
    "Gemma 2": _language("Gemma2", **LLAMA, head_dim=8),
    "Mixtral": _language("Mixtral", **LLAMA, num_local_experts=4),
    "BERT": _language("Bert", **BERT),
    "ViT": _images("ViT", 16, **BERT, patch_size=8),
    "T5": _language("T5", d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_heads=4, num_layers=8, decoder_start_token_id=0),
    "litgpt": _litgpt,
    "ResNet": _images("ResNet", 32, embedding_size=8, hidden_sizes=[8, 8, 16, 16]),
}


def make(name: str, blocks: int = 8, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Batch]:
    """A model in training mode, and a batch."""
    torch.manual_seed(0)
    model, batch = MODELS[name](blocks)
    floating = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    return model.to(dtype).train(), floating


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Forward and backward. Returns the loss."""
    loss: torch.Tensor = model(**batch)["loss"]
    loss.backward()
    return loss.detach()


def use_fsdp2(model: nn.Module) -> nn.Module:
    """Shards the outermost lists of blocks, block by block, as its users do."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in blocks):
            blocks.extend(f"{name}.{i}" for i in range(len(module)))
    for block in blocks:
        fully_shard(model.get_submodule(block), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def host_time(name: str, steps: int, with_fsdp2: bool) -> str:
    """The row of a model."""
    eager, batch = make(name)
    contenders = {"eager": eager}
    if with_fsdp2:
        contenders["fsdp2"] = use_fsdp2(copy.deepcopy(eager))
    contenders["zero3"] = shardtrace.fsdp(copy.deepcopy(eager), sharding_strategy="zero3")
    times: dict[str, list[float]] = {key: [] for key in contenders}
    for _ in range(steps):
        for key, model in contenders.items():
            begin = time.process_time()
            step(model, batch)
            times[key].append(1e3 * (time.process_time() - begin))
            model.zero_grad()
    typical = {key: median(found[len(found) // 4 :]) for key, found in times.items()}
    columns = [f"{key} {typical[key]:6.2f}" for key in contenders]
    ratios = [f"{key} {typical[key] / typical['eager']:5.2f}x" for key in contenders if key != "eager"]
    return f"{name:8} {'  '.join(columns)} ms   {'  '.join(ratios)}   first step {times['zero3'][0] / 1e3:5.2f} s"


def gradients(name: str, dtype: torch.dtype) -> str:
    """Compares a step of one process with eager PyTorch's."""
    eager, batch = make(name, 2 if name != "ResNet" else 4, dtype)
    model = shardtrace.fsdp(copy.deepcopy(eager), sharding_strategy="zero3")
    losses = []
    for one in (eager, model):
        torch.manual_seed(1)  # dropout
        losses.append(step(one, batch))
    pairs = {
        key: (p.grad, getattr(q.grad, "to_local", lambda grad=q.grad: grad)())
        for (key, p), q in zip(eager.named_parameters(), model.parameters(), strict=True)
    }
    other = [key for key, (a, b) in pairs.items() if a is not b and (a is None or b is None or not torch.equal(a, b))]
    rows = f"{len(pairs) - len(other)} of {len(pairs)} gradients equal"
    loss = "equal" if torch.equal(*losses) else "not equal"
    return f"{name:8} {str(dtype).removeprefix('torch.'):9} {rows}, loss {loss} {' '.join(other[:4])}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--gradients", action="store_true", help="compare gradients and losses in place of times")
    parser.add_argument("--no-fsdp2", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    world = 1 if options.gradients else 2
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    rows: list[str] = []
    for name in tqdm([n for n in MODELS if re.search(options.only, n)], unit="model"):
        if options.gradients:
            rows.extend(gradients(name, dtype) for dtype in (torch.float32, torch.bfloat16))
        else:
            rows.append(host_time(name, options.steps, not options.no_fsdp2))
    print("\n".join(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
