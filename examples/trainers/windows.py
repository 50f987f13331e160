"""The data of the trainers' examples: windows of a text as bytes, each with a class."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 256


class Windows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of the Python reference, from window ``first`` on.

    ``labels`` are the bytes themselves, for a model that shifts them; with ``classes``, whether a window has a period.
    """

    def __init__(self, count: int, length: int = 32, first: int = 0, *, classes: bool = False) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        self.rows = torch.tensor(list(text[first * length : (first + count) * length])).view(count, length)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": (row == ord(".")).any().long() if self.classes else row}
