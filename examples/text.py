"""Real English text as bytes, and batches that do not depend on the number of ranks."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common import add_count, add_device, check_batch, file

Batches = Callable[[int], tuple[Tensor, Tensor]]  # step -> this rank's inputs and targets


class Text(NamedTuple):
    train: Tensor  # (n_tokens,) of an integer type
    val: Tensor  # (n_tokens,), the held-out end of the text


Encode = Callable[[str], list[int]]  # a tokenizer's


def load_text(path: Path | None = None, held_out: float = 0.1, encode: Encode | None = None) -> Text:
    """The tokens of a file, or of the Python reference, half a megabyte that comes with every Python.

    Without ``encode`` the bytes are the tokens.
    """
    data = python_reference() if path is None else path.read_bytes()
    if encode is None:
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        tokens = torch.tensor(encode(data.decode(errors="replace")), dtype=torch.int32)
    n_train = int(len(tokens) * (1 - held_out))
    return Text(tokens[:n_train], tokens[n_train:])


def python_reference() -> bytes:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def get_batch(
    tokens: Tensor, *, batch_size: int, seq_len: int, seed: int, step: int, rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """This rank's rows of a global batch of random windows: inputs and targets, (rows, seq_len) int64.

    The global batch depends only on (seed, step): 1, 2 or 4 ranks see the same data, each rank its share.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(tokens) - seq_len, (batch_size,), generator=generator)
    rows = batch_size // world_size
    windows = starts[rank * rows : (rank + 1) * rows, None] + torch.arange(seq_len + 1)  # (rows, seq_len + 1)
    batch = tokens[windows].long()
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def batches(tokens: Tensor, batch_size: int, seq_len: int, seed: int, device: torch.device) -> Batches:
    """This rank's share of each global batch, on its device."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = get_batch(
            tokens, batch_size=batch_size, seq_len=seq_len, seed=seed, step=step, rank=rank, world_size=world_size
        )
        return inputs.to(device), targets.to(device)

    return batch


# ---- the command line ----


def add_training(parser: ArgumentParser, *, steps: int, batch_size: int, seq_len: int) -> None:
    """Adds the options for data and duration."""
    add_count(parser, "--steps", steps, "training steps")
    add_count(parser, "--batch-size", batch_size, "sequences in a step, over all ranks")
    add_count(parser, "--seq-len", seq_len, "tokens in a sequence")
    add_count(parser, "--seed", 0, "seed of the model and the batches", at_least=0)
    parser.add_argument("--text", type=file, metavar="FILE", help="text to train on; default: the Python reference")
    add_device(parser)


def checked_text(args: Namespace, longest: int, encode: Encode | None = None) -> Text:
    """The text. Every rank stops if a batch cannot be divided equally or a sequence is too long."""
    check_batch(args.batch_size)
    if args.seq_len > longest:
        sys.exit(f"--seq-len {args.seq_len} is longer than the {longest} positions of the model")
    text = load_text(args.text, encode=encode)
    if args.seq_len >= len(text.val):
        sys.exit(f"--seq-len {args.seq_len} needs a longer text: a tenth is held out, here {len(text.val)} tokens")
    return text
