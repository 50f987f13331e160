"""Train GPT-2 and keep a moving average of its parameters: torch's AveragedModel on shards, without communication.

On two ranks of this machine:

    torchrun --nproc_per_node=2 examples/gpt2/ema.py --model tiny --steps 200 --save checkpoints
"""

import shardtrace

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainer import OPTIMIZERS, arguments, is_main, new_folder, start, table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--decay", type=float, default=0.98, help="of the moving average; default: %(default)s")
    parser.add_argument("--save", type=new_folder, metavar="DIR", help="save a checkpoint of both models here")
    args = parser.parse_args()
    with start(args) as trainer:
        model = trainer.build_model()
        shardtrace.fsdp(model, init_policy=shardtrace.InitPolicy(device=trainer.device))
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.decay))  # as many shards again
        optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
        report = trainer.run(model, optimizer)
        if args.save:
            shardtrace.save_checkpoint(args.save, model, optimizer, ema=ema, step=args.steps)
        if args.eval_batches:
            take_over(model, ema.module)
            rows = [("", "validation loss"), ("model", report["val_loss"]), ("average", trainer.evaluate(model))]
            if is_main():
                print(f"\n{table(rows)}")


@torch.no_grad()
def take_over(model: nn.Module, other: nn.Module) -> None:
    """Copies the shards of another model, so that the compiled step evaluates it."""
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.copy_(theirs)


if __name__ == "__main__":
    main()
