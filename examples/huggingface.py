"""Shard a causal language model of Hugging Face, train it, and save it so that from_pretrained loads it.

On two ranks of this machine, with a small random model or with weights from a local folder:

    torchrun --nproc_per_node=2 examples/huggingface.py --config llama
    torchrun --nproc_per_node=2 examples/huggingface.py --from-pretrained path/to/model --save path/to/result

Random models learn bytes. If the folder has a tokenizer, the model learns its tokens.
"""

import math
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from contextlib import nullcontext
from pathlib import Path
from textwrap import shorten
from typing import Any

import shardtrace

import torch
import torch.distributed as dist
from torch.nn import Module

import common
from loop import train
from text import Text, add_training, batches, checked_text, get_batch

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
except ImportError:
    sys.exit("this example needs transformers: pip install 'shardtrace[examples]'")

CONFIGS = (
    *("llama", "gpt2", "gpt_neox", "gemma", "gemma2", "mistral", "phi3", "qwen2", "qwen3"),
    *("mixtral", "qwen3_moe"),  # mixtures of experts
)
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "vocab_size": 256,  # the bytes
    "num_local_experts": 8,
    "num_experts": 8,  # likewise
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
EVAL_BATCHES = 4


def main() -> None:
    args = parse_args()
    config, encode = architecture(args)
    text = checked_text(args, config.max_position_embeddings, encode)
    device = common.pick_device(args.device)
    with common.process_group(device):
        torch.manual_seed(args.seed)  # every rank builds the same model
        model = build_model(args, config)
        whole_bytes = common.parameter_bytes(model)
        shardtrace.fsdp(
            model,
            sharding_strategy=args.sharding_strategy,
            bucketing_strategy=args.bucketing_strategy,
            mp_policy=args.mp_policy,
            # each rank reads only its rows of the weights
            init_policy=shardtrace.InitPolicy(device=device, weights=args.from_pretrained),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        torch.manual_seed(args.seed + dist.get_rank())  # each rank drops out its own units

        data = batches(text.train, args.batch_size, args.seq_len, args.seed, device)
        losses, rate = train(
            lambda step: next_token_loss(model, data(step)[0]),
            [optimizer],
            args.steps,
            tokens=args.batch_size * args.seq_len,
        )
        traffic = common.traffic(model)  # the last call was a training step
        val_loss = evaluate(model, text, args, device)
        if args.generate:
            prompt = text.val[None, : args.seq_len // 2].long().to(device)
            generated = shardtrace.Generator(model)(prompt, max_new_tokens=args.generate)[0, prompt.shape[1] :]

        with tempfile.TemporaryDirectory() as scratch:
            folder = args.save or common.from_ranks(Path(scratch))[0]  # the same one for all
            shardtrace.export_safetensors(folder, model, config=config)  # every rank sends its shards
            if common.is_main():
                loaded_loss = evaluate_loaded(folder, text, args)
                rows = [
                    (type(model).__name__.removeprefix("FSDP"), ""),
                    ("  bytes of parameters, whole model", whole_bytes),
                    (f"  bytes of parameters, each of {common.world_size()} rank(s)", common.parameter_bytes(model)),
                    ("  loss, first step", losses[0]),
                    ("  loss, last step", losses[-1]),
                    ("  tokens/s", None if rate is None else int(rate)),
                    ("  validation loss, sharded", val_loss),
                    ("  perplexity of the held-out text", math.exp(val_loss)),
                    ("  validation loss, as from_pretrained loads it", loaded_loss),
                ]
                print(f"\n{common.table(rows)}\n\n{common.traffic_table(traffic)}")
                if args.generate:
                    what = generated.tolist() if encode else bytes(generated.tolist()).decode(errors="replace")
                    print(f"\n--- generated, sharded ---\n{what}")
                if args.save:
                    print(f"\nsaved {folder}")
                if abs(loaded_loss - val_loss) > 1e-3 * val_loss:
                    sys.exit("the loaded model differs from the saved one: their validation losses are not equal")


def next_token_loss(model: Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of the next token. The model shifts the labels itself."""
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


@torch.no_grad()
def evaluate(model: Module, text: Text, args: Namespace, device: torch.device) -> float:
    """The mean loss over held-out batches. Each rank evaluates its share."""
    model.eval()
    data = batches(text.val, args.batch_size, args.seq_len, args.seed, device)
    losses = [next_token_loss(model, data(step)[0]) for step in range(EVAL_BATCHES)]
    return sum(common.mean_over_ranks(losses)) / EVAL_BATCHES


@torch.no_grad()
def evaluate_loaded(folder: Path, text: Text, args: Namespace) -> float:
    """The same loss of the saved model, without sharding and without Thunder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    shape = {"batch_size": args.batch_size, "seq_len": args.seq_len, "seed": args.seed}
    whole = [get_batch(text.val, **shape, step=step, rank=0, world_size=1)[0] for step in range(EVAL_BATCHES)]
    return sum(next_token_loss(model, tokens).item() for tokens in whole) / EVAL_BATCHES


def architecture(args: Namespace) -> tuple[Any, Any]:
    """The model's config, and its tokenizer's ``encode`` (None for bytes)."""
    if args.from_pretrained is None:
        return AutoConfig.for_model(args.config, num_hidden_layers=args.layers, **SMALL), None
    try:
        config = AutoConfig.from_pretrained(args.from_pretrained)
        has_tokenizer = (args.from_pretrained / "tokenizer_config.json").is_file()
        return config, AutoTokenizer.from_pretrained(args.from_pretrained).encode if has_tokenizer else None
    except (OSError, ValueError) as error:
        sys.exit(f"--from-pretrained {args.from_pretrained}: {shorten(str(error), 200)}")


def build_model(args: Namespace, config: Any) -> Any:
    """A random model in host memory, or one without memory if its weights are in files."""
    with nullcontext() if args.from_pretrained is None else shardtrace.init_empty_weights():
        return AutoModelForCausalLM.from_config(config).float().train()


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", choices=CONFIGS, default="llama", help="architecture of a small random model; default: llama")
    common.add_count(parser, "--layers", 2, "layers of the random model")
    add("--from-pretrained", type=common.folder, metavar="DIR", help="load a model that save_pretrained wrote")
    add(
        "--save",
        type=common.new_folder,
        metavar="DIR",
        help="save the model here; default: a temporary folder, to test that it can be loaded",
    )
    common.add_count(parser, "--generate", 0, "tokens to generate after training, greedily", at_least=0)
    add("--lr", type=common.non_negative, default=3e-3, help="learning rate of AdamW; default: %(default)s")
    add_training(parser, steps=100, batch_size=8, seq_len=64)
    common.add_sharding(parser)
    args = parser.parse_args()
    if args.save and (args.save / "config.json").exists():
        parser.error(f"argument --save: there is a model in {args.save}")
    return args


if __name__ == "__main__":
    main()
