"""Train a small GPT-2 by Lightning's Trainer with the strategy "shardtrace". The Trainer or torchrun starts the ranks:

    python examples/trainers/lightning_trainer.py --devices 2 --folder checkpoints
    python examples/trainers/lightning_trainer.py --devices 2 --epochs 4 --resume checkpoints/last.ckpt

A checkpoint is that of a single process, which continues from it, and from whose checkpoint the ranks continue.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from windows import VOCABULARY, Windows

try:
    import shardtrace.lightning  # noqa: F401  registers the strategy

    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("this example needs Lightning and transformers: pip install 'shardtrace[examples]'")

SMALL = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
BATCH = 16  # over all ranks


class Model(LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)  # every rank builds the same model
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        self.gpt = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **SMALL, **rates))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.gpt(input_ids=batch["input_ids"]).logits  # compiles itself; the rest is PyTorch
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self.batches(Windows(64))

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self.batches(Windows(16, first=64))

    def batches(self, windows: Windows) -> DataLoader[dict[str, Tensor]]:
        """The same windows in the same order for any number of ranks, each of which has its share of a batch."""
        ranks = self.trainer.world_size
        share: DistributedSampler[Any] = DistributedSampler(windows, ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(windows, batch_size=BATCH // ranks, sampler=share)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1, help="ranks on this machine")
    parser.add_argument("--precision", default="32-true", help="such as bf16-mixed; default: %(default)s")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", default="checkpoints", help="where checkpoints are saved; default: %(default)s")
    parser.add_argument("--average", type=float, metavar="DECAY", help="validate and save an average of the weights")
    parser.add_argument("--resume", metavar="FILE", help="continue from this checkpoint")
    args = parser.parse_args()
    saves = ModelCheckpoint(args.folder, save_last=True, save_top_k=2, monitor="val_loss", filename="{epoch}")
    averages = [EMAWeightAveraging(decay=args.average)] if args.average else []
    trainer = Trainer(
        strategy="shardtrace" if args.devices > 1 else "auto",  # one process trains as it is
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        callbacks=[saves, *averages],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(args.dropout), ckpt_path=args.resume)
    if trainer.is_global_zero:
        print({name: round(value.item(), 5) for name, value in sorted(trainer.callback_metrics.items())})


if __name__ == "__main__":
    main()
