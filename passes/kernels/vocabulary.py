"""Embeddings and losses of which each rank has a part of the vocabulary. As torch's functions, they fail for tokens and
labels that are in nobody's part.

    rows = part_of_embedding(tokens, table)     zeros for tokens of other ranks; ranks add these rows up
    numbers = part_of_loss(logits, labels)      three of each row, which ranks gather
    loss = loss_of_parts(all_numbers, labels)   cross entropy; no rank has the logits of all classes

Source: Megatron-LM (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from passes.plan.plan import ContextPlan

import torch
from torch.nn import functional as F

NUMBERS = 3  # of a row: the largest logit, the sum of exponentials, and the logit of the label


def _places(
    ids: torch.Tensor, size: int, plan: ContextPlan, ignored: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids are in this rank's part of ``size`` entries, and where: 0 for those of other ranks and ``ignored``
    ones, and -1, which torch refuses, for those in nobody's part."""
    places = ids - plan.rank * size
    own = (places >= 0) & (places < size)
    known = (ids >= 0) & (ids < size * plan.ranks)
    known = known if ignored is None else known | (ids == ignored)
    return own, places.where(own, 0).where(known, -1)


@dataclass(frozen=True)
class PartOfEmbedding:
    """``torch.nn.functional.embedding`` with this rank's rows of the table."""

    plan: ContextPlan

    __name__ = "embedding"
    of_tensors = staticmethod(F.embedding)

    def __call__(
        self, tokens: torch.Tensor, table: torch.Tensor, padding_idx: int | None = None, *args: Any, **options: Any
    ) -> torch.Tensor:
        first, rows = self.plan.rank * len(table), len(table)
        own, places = _places(tokens, rows, self.plan)
        padding = padding_idx - first if padding_idx is not None and first <= padding_idx < first + rows else None
        found = F.embedding(places, table, padding)
        return found.masked_fill(~own.unsqueeze(-1), 0)


@dataclass(frozen=True)
class PartOfLoss:
    """The :data:`NUMBERS` of each row of logits (rows, this rank's classes), for labels (rows,), of which one value is
    ``ignored``."""

    plan: ContextPlan
    ignored: int

    __name__ = "loss"

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        own, places = _places(labels, logits.shape[-1], self.plan, self.ignored)
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        most = logits.detach().amax(-1, keepdim=True)
        most = most.where(most.isfinite(), 0)  # all of its classes may be masked
        total = (logits - most).exp().sum(-1, keepdim=True)
        of_label = logits.gather(-1, places.unsqueeze(-1))
        return torch.cat([most, total, of_label.where(own.unsqueeze(-1), 0)], -1)


@dataclass(frozen=True)
class LossOfParts:
    """``torch.nn.functional.cross_entropy`` of the numbers (rows, ranks * NUMBERS) of all ranks."""

    dtype: torch.dtype

    __name__ = "cross_entropy"
    of_tensors = staticmethod(F.cross_entropy)

    def __call__(
        self,
        numbers: torch.Tensor,
        labels: torch.Tensor,
        weight: None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        most, total, of_label = numbers.unflatten(-1, (-1, NUMBERS)).unbind(-1)
        largest = most.amax(-1, keepdim=True)
        losses = (total * (most - largest).exp()).sum(-1).log() + largest.squeeze(-1) - of_label.sum(-1)
        counts = labels != ignore_index
        losses = losses.where(counts, 0)
        if reduction == "mean":
            losses = losses.sum() / counts.sum()
        elif reduction == "sum":
            losses = losses.sum()
        return losses.to(self.dtype)
