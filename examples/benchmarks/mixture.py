"""A mixture of experts in the place of a block's MLP, as in Mixtral. All experts of a block are two parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import GPT

TOP = 2  # experts of a token


class Experts(nn.Module):
    """Each token's experts, whose results are added with their weights. Rows are sorted by expert."""

    def __init__(self, number: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(number, 2 * hidden, width) * 0.02)
        self.down = nn.Parameter(torch.randn(number, width, hidden) * 0.02)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Tokens (n, width), the numbers of their experts (n, TOP) and the experts' weights -> (n, width)."""
        sorted_experts, rows = experts.flatten().sort()
        ends = torch.searchsorted(
            sorted_experts, torch.arange(1, len(self.down) + 1, device=x.device), out_int32=True
        )  # of each expert's rows
        gate, up = F.grouped_mm(x[rows // TOP], self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        y = y * weights.flatten()[rows].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, rows // TOP, y)


class Mixture(nn.Module):
    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, number, bias=False)
        self.experts = Experts(number, width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens).softmax(-1).topk(TOP)
        return self.experts(tokens, experts, weights / weights.sum(-1, keepdim=True)).view_as(x)


def with_experts(model: GPT, number: int) -> GPT:
    """The GPT with this many experts in the place of each MLP."""
    for block in model.h:
        block.mlp = Mixture(number, model.config.n_embd)
    return model
