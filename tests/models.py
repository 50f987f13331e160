"""Small models for the tests. They trace in about a second and have every kind of parameter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """RMS norm and a gated product. Weights are used through broadcasts, casts, slices and transposes."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(width) + 0.5)
        self.up = nn.Linear(width, 7)
        self.down = nn.Parameter(torch.randn(7, width) / 3)  # used transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norm
        return x + F.linear(torch.tanh(self.up(y)), self.down.t())


class Net(nn.Module):
    """Calls its blocks one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Zoo(nn.Module):
    """Parameters of every special kind, two blocks, an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)  # 11 rows: divisible by neither 2 nor 3
        self.position = nn.Parameter(torch.randn(5, 6))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Parameter(torch.randn(1, 6), requires_grad=False)  # fewer rows than ranks
        self.scale = nn.Parameter(torch.tensor(1.3))  # 0-dim
        self.nothing = nn.Parameter(torch.zeros(0, 6))  # no elements
        self.unused = nn.Parameter(torch.ones(4, 2))
        self.row = nn.Parameter(torch.randn(1, 6))  # its shard has the full shape
        self.offset = nn.Parameter(torch.randn(6))  # used in two places
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.full((6,), 0.1))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The loss if there are targets, the logits otherwise."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]] + self.offset
        for block in self.blocks:
            x = block(x)
        x = x * self.scale + self.frozen + self.shift + self.row + self.offset + self.nothing.sum(0)
        logits = self.head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.reshape(-1, 11), targets.reshape(-1))


class Switch(nn.Module):
    """Uses one of its layers, or both if ``both``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.second(self.first(x)) if both else self.first(x)


class Weighted(nn.Module):
    """Two linear layers. ``factors`` weigh the outputs of the last one, and with them the rows of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.first(x))) * factors).sum()


def tokens(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of :class:`Zoo`, of shape (rows, 5)."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 11, (rows, 6), generator=generator)
    return data[:, :-1], data[:, 1:]
