"""Pretrain a small Llama with Lightning Fabric: the training loop is litgpt's own, the strategy is shardtrace.

Fabric starts the ranks itself, or torchrun does. On two ranks of this machine:

    python examples/lightning_pretrain.py --devices 2
    torchrun --nproc_per_node=2 examples/lightning_pretrain.py --precision bf16-mixed --save checkpoint

The model learns bytes. Needs Lightning and litgpt 0.5.13: `pip install '.[lightning]' litgpt==0.5.13`.
"""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import common
from text import Text, add_training, load_text

try:
    from shardtrace.lightning import ShardtraceStrategy, jitted

    from lightning.fabric import Fabric
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.model import GPT, Config
    from litgpt.pretrain import fit, initialize_weights
except ImportError:
    sys.exit("this example needs Lightning and litgpt: pip install '.[lightning]' litgpt==0.5.13")

SMALL = {"n_embd": 128, "n_head": 4, "n_query_groups": 2, "intermediate_size": 256}
BYTES = {"vocab_size": 256, "padded_vocab_size": 256}
EVAL_BATCHES = 4


class Windows(Dataset[Tensor]):
    """Consecutive windows of a text. Each begins with the last token of the one before."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:  # (length + 1,)
        return self.tokens[index * self.length :][: self.length + 1].long()


def main() -> None:
    args = parse_args()
    fabric = Fabric(
        accelerator=args.device or "auto", devices=args.devices, strategy=strategy(args), precision=args.precision
    )
    fabric.launch()
    config = Config.from_name("Llama-3-8B", n_layer=args.layers, block_size=args.seq_len, **SMALL, **BYTES)
    fabric.seed_everything(args.seed, verbose=False)
    with fabric.init_module(empty_init=True):  # no memory for parameters
        model = GPT(config)
    initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
    whole = common.parameter_bytes(model)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=args.lr))
    train_data, val_data = fabric.setup_dataloaders(*dataloaders(args, load_text(args.text)))

    state = {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
    fit(
        fabric,
        devices=fabric.world_size,
        state=state,
        train_dataloader=train_data,
        val_dataloader=val_data,
        out_dir=Path("unused"),
        tokenizer_dir=None,
        train=TrainArgs(
            save_interval=None,
            log_interval=10,
            global_batch_size=args.batch_size,
            micro_batch_size=args.batch_size // fabric.world_size // args.accumulate,
            max_tokens=args.steps * args.batch_size * args.seq_len,
            lr_warmup_steps=10,
            max_norm=1.0,
        ),
        eval=EvalArgs(interval=args.steps + 1, max_iters=EVAL_BATCHES),
    )

    counted = common.traffic(jitted(model))  # the last call was an evaluation
    rows = [
        (type(model.module).__name__, "bytes"),
        ("  parameters, whole model", whole),
        (f"  parameters, each of {fabric.world_size} rank(s)", common.parameter_bytes(model.module)),
        ("  gathered in an evaluation", sum(size for _, size in counted.values())),
    ]
    fabric.print(f"\n{common.table(rows)}")
    if args.save:
        fabric.save(args.save, state)
        fabric.print(f"\nsaved {args.save}")


def strategy(args: Namespace) -> ShardtraceStrategy:
    return ShardtraceStrategy(
        sharding_strategy=args.sharding_strategy,
        bucketing_strategy=args.bucketing_strategy,
        state_dict_type=args.state_dict_type,
    )


def dataloaders(args: Namespace, text: Text) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    rows = args.batch_size // args.devices // args.accumulate
    return (
        DataLoader(Windows(text.train, args.seq_len), batch_size=rows, shuffle=True, drop_last=True),
        DataLoader(Windows(text.val, args.seq_len), batch_size=rows, drop_last=True),
    )


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", common.world_size()))  # torchrun's, or that of one process
    common.add_count(parser, "--devices", devices, "ranks on this machine")
    add("--precision", default="32-true", help="precision of Fabric, such as bf16-mixed; default: %(default)s")
    add("--lr", type=common.non_negative, default=3e-3, help="learning rate of AdamW; default: %(default)s")
    add("--save", type=Path, metavar="PATH", help="save a checkpoint here")
    add("--state-dict-type", choices=["sharded", "full"], default="sharded", help="default: sharded, a folder")
    common.add_count(parser, "--layers", 2, "layers of the model")
    common.add_count(parser, "--accumulate", 2, "batches whose gradients are added up before a step")
    add_training(parser, steps=100, batch_size=16, seq_len=64)
    common.add_sharding(parser, mixed_precision=False)
    args = parser.parse_args()
    if args.batch_size % (args.devices * args.accumulate):
        parser.error(f"--batch-size {args.batch_size} is not divisible by {args.devices} ranks x {args.accumulate}")
    return args


if __name__ == "__main__":
    main()
