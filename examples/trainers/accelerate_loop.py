"""Train a small BERT in a loop of your own with accelerate, which neither wraps nor moves the sharded model:

    torchrun --nproc_per_node=2 examples/trainers/accelerate_loop.py --cpu --epochs 2 --save out
    torchrun --nproc_per_node=2 examples/trainers/accelerate_loop.py --cpu --epochs 4 --first-epoch 2 --load out/state

The state is that of a single process, whose state the ranks load, too.
"""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import shardtrace  # before thunder: makes it importable on the newest torch

import torch
from torch.utils.data import DataLoader

from windows import VOCABULARY, Windows

try:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from transformers import BertConfig, BertForSequenceClassification
except ImportError:
    sys.exit("this example needs transformers and accelerate: pip install 'shardtrace[examples]'")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "max_position_embeddings": 32}
BATCH = 16  # over all ranks


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=2, mixed_precision=args.mixed_precision)
    set_seed(0)  # every rank builds the same model
    config = BertConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **SMALL)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = args.dropout
    model = BertForSequenceClassification(config)
    if accelerator.num_processes > 1:
        model = shardtrace.fsdp(model)  # the line that is added; one process trains as it is
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = BATCH // accelerator.num_processes
    batches = DataLoader(Windows(64, classes=True), batch_size=rows)
    held_out = DataLoader(Windows(17, first=64, classes=True), batch_size=rows)
    model, optimizer, batches, held_out = accelerator.prepare(model, optimizer, batches, held_out)
    if args.load:
        accelerator.load_state(args.load)

    for epoch in range(args.first_epoch, args.epochs):
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        loss = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.5f}, {evaluate(accelerator, model, held_out):.5f}")
    if args.save:
        accelerator.save_state(str(args.save / "state"))
        whole = accelerator.get_state_dict(model)  # every rank calls it
        save = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
        accelerator.unwrap_model(model).save_pretrained(args.save / "model", state_dict=whole, **save)
    accelerator.end_training()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, batches: DataLoader[dict[str, torch.Tensor]]) -> float:
    """The mean of the logits over the held-out windows, each of which counts once."""
    model.eval()
    logits = [accelerator.gather_for_metrics(model(**batch).logits) for batch in batches]
    model.train()
    return torch.cat(logits).mean().item()


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cpu", action="store_true", help="train on the CPU")
    add("--mixed-precision", default="no", choices=["no", "bf16", "fp16"])
    add("--dropout", type=float, default=0.1)
    add("--epochs", type=int, default=2)
    add("--first-epoch", type=int, default=0, help="epochs that the loaded state has done")
    add("--load", type=Path, metavar="DIR", help="continue from this state")
    add("--save", type=Path, metavar="DIR", help="save the state, and the model for from_pretrained, here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
