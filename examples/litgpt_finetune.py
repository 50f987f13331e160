"""Fine-tune a litgpt model with LoRA: the base is frozen and sharded, and only gradients of adapters are reduced.

On two ranks of this machine, with a small random model or with a checkpoint of litgpt:

    torchrun --nproc_per_node=2 examples/litgpt_finetune.py --model pythia-14m --layers 2
    torchrun --nproc_per_node=2 examples/litgpt_finetune.py --checkpoint path/to/checkpoint --save adapters.pth

Random models learn bytes, checkpoints learn their own tokens. Needs litgpt 0.5.13: `pip install litgpt==0.5.13`.
"""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import shardtrace

import torch
import torch.nn.functional as F

import common
from common import add_count
from loop import train
from text import add_training, batches, checked_text

try:
    from litgpt.lora import GPT, Config, lora_filter, mark_only_lora_as_trainable
    from litgpt.tokenizer import Tokenizer
except ImportError:
    sys.exit("this example needs litgpt: pip install litgpt==0.5.13")

WHERE = ("query", "key", "value", "projection", "mlp", "head")  # LoRA: Hu et al. 2021
WEIGHTS = "lit_model.pth"  # a checkpoint's file of weights


def main() -> None:
    args = parse_args()
    config, encode = architecture(args)
    text = checked_text(args, config.block_size, encode)
    device = common.pick_device(args.device)
    with common.process_group(device):
        torch.manual_seed(args.seed)  # every rank builds the same model
        model = build_model(args, config)
        mark_only_lora_as_trainable(model)
        frozen, adapters = parameters_by_kind(model)
        shardtrace.fsdp(
            model,
            sharding_strategy=args.sharding_strategy,
            bucketing_strategy=args.bucketing_strategy,
            mp_policy=args.mp_policy,
            init_policy=shardtrace.InitPolicy(device=device),
        )
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)

        data = batches(text.train, args.batch_size, args.seq_len, args.seed, device)

        def loss_of(step: int) -> torch.Tensor:
            inputs, targets = data(step)
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

        losses, rate = train(loss_of, [optimizer], args.steps, tokens=args.batch_size * args.seq_len)
        reduced = {n for c in shardtrace.collectives(model) if "reduce" in c.kind for n in c.parameters}
        if common.is_main():
            rows = [
                (config.name, "number", "bytes"),
                ("  frozen parameters", len(frozen), sum(frozen.values())),
                ("  adapters", len(adapters), sum(adapters.values())),
                (f"  all, on each of {common.world_size()} rank(s)", "", common.parameter_bytes(model)),
                ("  optimizer state, on each rank", "", common.optimizer_bytes(optimizer)),
            ]
            print(f"\n{common.table(rows)}\n\n{common.traffic_table(common.traffic(model))}")
            counts = [len(reduced & names.keys()) for names in (adapters, frozen)]
            print(f"  with gradients of {counts[0]} adapters, {counts[1]} frozen parameters")
            speed = "" if rate is None else f", {rate:,.0f} tokens/s"
            print(f"\nloss {losses[0]:.4f} -> {losses[-1]:.4f}{speed}")
        if args.save:
            save_adapters(model, args.save)


def parameters_by_kind(model: GPT) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of each frozen parameter and of each trained one, by name."""
    kinds: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for name, parameter in model.named_parameters():
        kinds[parameter.requires_grad][name] = parameter.numel() * parameter.element_size()
    return kinds


def save_adapters(model: GPT, path: Path) -> None:
    """Writes the adapters as litgpt does. Every rank must call this, because each sends its shards."""
    state = shardtrace.full_state_dict(model, rank0_only=True, cpu=True)
    if common.is_main():
        torch.save({"model": {name: value for name, value in state.items() if lora_filter(name, value)}}, path)
        print(f"\nsaved {path}")


def architecture(args: Namespace) -> tuple[Config, Any]:
    """The model's configuration with adapters, and its tokenizer's ``encode`` (None for bytes)."""
    lora = {"lora_r": args.rank, "lora_alpha": 2 * args.rank, **{f"lora_{place}": True for place in WHERE}}
    try:
        if args.checkpoint is not None:
            tokenizer = Tokenizer(args.checkpoint)
            return Config.from_checkpoint(args.checkpoint, **lora), lambda text: tokenizer.encode(text).tolist()
        layers = {} if args.layers is None else {"n_layer": args.layers}
        return Config.from_name(args.model, **lora, **layers, vocab_size=256, padded_vocab_size=256), None
    except (ValueError, OSError, NotImplementedError) as error:
        what = f"--model {args.model}" if args.checkpoint is None else f"--checkpoint {args.checkpoint}"
        sys.exit(f"{what}: {str(error).strip() or 'no tokenizer in it'}")


def build_model(args: Namespace, config: Config) -> GPT:
    """Builds the model in host memory."""
    model = GPT(config)
    if args.checkpoint is not None:
        if not (args.checkpoint / WEIGHTS).is_file():
            sys.exit(f"--checkpoint {args.checkpoint}: no {WEIGHTS} in it")
        state = torch.load(args.checkpoint / WEIGHTS, mmap=True, weights_only=True)
        model.load_state_dict(state.get("model", state), strict=False)  # a checkpoint has no adapters
    return model


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="pythia-14m", metavar="NAME", help="name of a litgpt configuration; default: %(default)s")
    add("--layers", type=common.whole_number(1), metavar="N", help="layers of the random model; default: all")
    add("--checkpoint", type=common.folder, metavar="DIR", help="load weights and tokenizer from a litgpt folder")
    add_count(parser, "--rank", 8, "rank of the adapters")
    add("--lr", type=common.non_negative, default=1e-2, help="learning rate of AdamW; default: %(default)s")
    add("--save", type=common.new_file, metavar="FILE", help="write the adapters to this file")
    add_training(parser, steps=100, batch_size=8, seq_len=64)
    common.add_sharding(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
