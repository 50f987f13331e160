"""Train GPT-2 with Muon, which orthogonalizes the update of each weight matrix, and with AdamW alone.

Muon needs whole matrices. Each one is owned by one rank, so that Muon sends nothing and each update is computed once.
AdamW trains the other parameters, which are sharded.

Muon: An optimizer for hidden layers in neural networks, Keller Jordan 2024. On two ranks of this machine:

    torchrun --nproc_per_node=2 examples/gpt2/muon.py --model tiny --steps 200
"""

from argparse import Namespace

import shardtrace

import torch
from torch import nn
from torch.optim import Optimizer

from trainer import arguments, is_main, start, table


def main() -> None:
    parser = arguments(__doc__)
    args = parser.parse_args()
    if args.optimizer != "adamw":
        parser.error("argument --optimizer: this script compares Muon with adamw")
    rows: list[tuple[object, ...]] = [("", "final loss", "validation loss")]
    with start(args) as trainer:
        for name, matrices in (("AdamW", "zero3"), ("Muon and AdamW", "owner")):
            model = trainer.build_model()
            strategy = {is_hidden_matrix: matrices, "*": "zero3"}
            shardtrace.fsdp(model, sharding_strategy=strategy, init_policy=shardtrace.InitPolicy(device=trainer.device))
            report = trainer.run(model, *optimizers(model, args, muon=matrices == "owner"))
            rows.append((name, report["losses"][-1], report["val_loss"]))
        if is_main():
            print(f"\n{table(rows)}")


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Matrices of the blocks: neither embeddings, nor the head, nor biases and norms."""
    return name.startswith("h.") and parameter.ndim == 2


def optimizers(model: nn.Module, args: Namespace, *, muon: bool) -> list[Optimizer]:
    matrices, others = shardtrace.split_parameters(model, is_hidden_matrix)
    options = {"lr": args.lr, "weight_decay": args.weight_decay}
    if not muon:
        return [torch.optim.AdamW([*matrices, *others], **options)]
    # updates as large as those of AdamW, so that both take the same learning rate
    return [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options), torch.optim.AdamW(others, **options)]


if __name__ == "__main__":
    main()
