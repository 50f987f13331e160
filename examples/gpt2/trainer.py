"""The trainer that the scripts in this folder share: data, loop, evaluation and report.

It knows nothing about sharding. A script passes it a model, sharded or compiled, and an optimizer.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # examples/, where common.py and text.py are

import shardtrace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import common
from checkpoints import Checkpoints, add_checkpoints
from common import add_count, is_main, mean_over_ranks, new_file, new_folder, non_negative, table, whole_number
from loop import train
from model import CONFIGS, GPT
from results import Report, result_table
from text import Batches, Text, add_training, batches, checked_text

__all__ = [  # for the scripts
    "OPTIMIZERS",
    "Checkpoints",
    "Report",
    "Trainer",
    "add_checkpoints",
    "add_count",
    "arguments",
    "is_main",
    "new_file",
    "new_folder",
    "result_table",
    "start",
    "table",
]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
LR = {"adamw": 3e-3, "sgd": 0.1}  # of the tiny model
WARMUP = 20  # steps
PROMPT = b"The "
TEMPERATURE = 0.8


@contextmanager
def start(args: Namespace, *, most_ranks: int | None = None) -> Iterator[Trainer]:
    """Makes a trainer, and the process group for as long as the context lasts."""
    if most_ranks is not None and common.world_size() > most_ranks:
        sys.exit(f"{common.script()} runs in {most_ranks} process, not in {common.world_size()}")
    text = checked_text(args, CONFIGS[args.model].block_size)
    args.lr = LR[args.optimizer] if args.lr is None else args.lr
    device = common.pick_device(args.device)
    with common.process_group(device):
        yield Trainer(args, text, device)


class Trainer:
    """Trains on all ranks in step, because every call of a sharded model is a collective."""

    def __init__(self, args: Namespace, text: Text, device: torch.device) -> None:
        self.args, self.text, self.device = args, text, device

    def build_model(self) -> GPT:
        """Builds the same model on every rank, in host memory."""
        torch.manual_seed(self.args.seed)
        config = CONFIGS[self.args.model]
        return GPT(replace(config, n_layer=self.args.layers or config.n_layer))

    def run(self, model: Module, *optimizers: Optimizer, checkpoints: Checkpoints | None = None) -> Report:
        """Trains, evaluates and prints the result. ``--json`` writes it to a file.

        After a restart whose checkpoint has all steps, nothing is trained and the result is that of the checkpoint.
        """
        args = self.args
        data = self.batches(self.text.train)
        schedules = [LambdaLR(optimizer, lambda step: lr_scale(step, args.steps)) for optimizer in optimizers]
        with shardtrace.AsyncCheckpointer() as checkpointer:
            state = {"model": model, "optimizer": optimizers, "schedulers": schedules}
            resumed = checkpoints.resume(state) if checkpoints is not None else {}
            if resumed.get("start", 0) >= args.steps:
                if is_main():
                    print(f"all {args.steps} steps were done before")
                model(*data(0)).backward()  # compiles the step that the table describes; nothing is updated
                model.zero_grad()
            losses, rate = train(
                lambda step: model(*data(step)),
                optimizers,
                args.steps,
                tokens=args.batch_size * args.seq_len,
                schedules=schedules,
                **(checkpoints.saving(checkpointer, state) | resumed if checkpoints is not None else {}),
            )
        held = sum(map(common.optimizer_bytes, optimizers))
        step = shardtrace.memory(model, persistent=held).peak  # the last call was a training step
        collectives = common.traffic(model)
        model.eval()
        val_loss = self.evaluate(model) if args.eval_batches else None
        sample = self.generate(model) if args.sample_bytes else None

        memory = (common.parameter_bytes(model), held, step, common.peak_memory(self.device))
        parameters, states, steps, peaks = (list(sizes) for sizes in zip(*common.from_ranks(memory), strict=True))
        report = Report(
            losses=losses,
            val_loss=val_loss,
            tokens_per_s=rate,
            parameter_bytes=parameters,
            optimizer_bytes=states,
            step_bytes=steps,
            peak_bytes=peaks,
            collectives=collectives,
        )
        if is_main():
            if sample is not None:
                print(f"\n--- sample ---\n{sample}\n--------------")
            print(f"\n{result_table({common.script(): report})}\n\n{common.traffic_table(collectives)}")
            if args.json is not None:
                args.json.write_text(json.dumps(report) + "\n")
        return report

    @torch.no_grad()
    def evaluate(self, model: Module) -> float:
        """The mean loss over held-out batches. Computed from logits, so that `generate` shares the compiled trace."""
        data = self.batches(self.text.val)
        losses = []
        for step in range(self.args.eval_batches):
            inputs, targets = data(step)
            losses.append(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
        return sum(mean_over_ranks(losses)) / len(losses)

    @torch.no_grad()
    def generate(self, model: Module) -> str:
        """Samples `--sample-bytes` bytes after the prompt, the same on all ranks.

        The context is padded on the right to the shape of a batch, so that one trace serves all lengths. A causal
        model does not see the padding.
        """
        args = self.args
        generator = torch.Generator().manual_seed(args.seed)
        rows = args.batch_size // dist.get_world_size()
        sample = bytearray(PROMPT)
        for _ in range(args.sample_bytes):
            context = torch.tensor(sample[-args.seq_len :])
            inputs = F.pad(context, (0, args.seq_len - len(context))).expand(rows, -1).contiguous()
            logits = model(inputs.to(self.device))[0, len(context) - 1].float().cpu()
            probabilities = F.softmax(logits / TEMPERATURE, dim=0)
            sample.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return sample.decode(errors="replace")

    def batches(self, tokens: Tensor) -> Batches:
        return batches(tokens, self.args.batch_size, self.args.seq_len, self.args.seed, self.device)


def lr_scale(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to zero."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))


# ---- the command line ----


def arguments(doc: str | None, *, sharding: bool = False, parents: Sequence[ArgumentParser] = ()) -> ArgumentParser:
    """The options of all scripts, with ``sharding`` also those of `fsdp`. ``doc`` is the description."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter, parents=parents)
    add = parser.add_argument
    add("--model", choices=CONFIGS, default="tiny", help="size; default: tiny, which learns in a minute on a CPU")
    add("--layers", type=whole_number(1), metavar="N", help="number of blocks; default: that of the model")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw; sgd has momentum 0.9")
    add(
        "--lr",
        type=non_negative,
        help="peak learning rate; default: 3e-3 for adamw, 0.1 for sgd; large models need less",
    )
    add(
        "--weight-decay", "--weight_decay", type=non_negative, default=0.1, metavar="DECAY", help="default: %(default)s"
    )
    add_count(parser, "--eval-batches", 10, "held-out batches to evaluate after training", at_least=0)
    add_count(parser, "--sample-bytes", 0, "bytes of text to generate after training", at_least=0)
    add_training(parser, steps=700, batch_size=16, seq_len=128)
    add("--json", type=new_file, metavar="FILE", help="write losses and figures to this file")
    if sharding:
        common.add_sharding(parser)
    return parser
