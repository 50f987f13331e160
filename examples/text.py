"""Real English text as bytes, and batches of it that do not depend on the number of ranks."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Text(NamedTuple):
    train: Tensor  # (n_bytes,) uint8
    val: Tensor  # (n_bytes,) uint8, the held-out end of the text


def load_text(path: Path | None = None, held_out: float = 0.1) -> Text:
    """The bytes of a file, or of the Python reference that comes with every Python (half a megabyte)."""
    data = python_reference() if path is None else path.read_bytes()
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    n_train = int(len(tokens) * (1 - held_out))
    return Text(tokens[:n_train], tokens[n_train:])


def python_reference() -> bytes:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def get_batch(
    tokens: Tensor, *, batch_size: int, seq_len: int, seed: int, step: int, rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """This rank's rows of a global batch of random windows: inputs and targets, (rows, seq_len) int64.

    The global batch depends on (seed, step) alone: 1, 2 or 4 ranks see the same data, each its share.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(tokens) - seq_len, (batch_size,), generator=generator)
    rows = batch_size // world_size
    windows = starts[rank * rows : (rank + 1) * rows, None] + torch.arange(seq_len + 1)  # (rows, seq_len + 1)
    batch = tokens[windows].long()
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
