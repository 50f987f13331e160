"""GPT-2 in plain PyTorch, for the notebooks here.

Language Models are Unsupervised Multitask Learners, Radford et al. 2019. A block is two modules that own their tensors:
Thunder takes a good part of a second to trace each call of a module, and the notebooks compile many models.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD = 64  # width of an attention head, in all sizes of GPT-2
CONTEXT = 1024  # longest sequence, in tokens


class Projection(nn.Module):
    """Weights and bias of a linear layer, and the layer norm before it."""

    def __init__(self, width: int, inside: int, outside: int) -> None:
        super().__init__()
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.in_weight, self.in_bias = matrix(inside, width), nn.Parameter(torch.zeros(inside))
        self.out_weight, self.out_bias = matrix(width, outside), nn.Parameter(torch.zeros(width))

    def enter(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., inside)"""
        x = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias)
        return F.linear(x, self.in_weight, self.in_bias)

    def leave(self, x: Tensor) -> Tensor:
        """(..., outside) -> (..., width)"""
        return F.linear(x, self.out_weight, self.out_bias)


class Attention(Projection):
    def __init__(self, width: int) -> None:
        super().__init__(width, inside=3 * width, outside=width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (t.view(batch, tokens, -1, HEAD).transpose(1, 2) for t in self.enter(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.leave(y.transpose(1, 2).reshape(batch, tokens, width))


class MLP(Projection):
    def __init__(self, width: int) -> None:
        super().__init__(width, inside=4 * width, outside=4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(F.gelu(self.enter(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class GPT(nn.Module):
    """Tokens and targets (batch, tokens) -> mean cross-entropy. The head shares the embedding's weight."""

    def __init__(self, blocks: int, width: int, vocabulary: int = 50257) -> None:
        super().__init__()
        self.embedding, self.positions = matrix(vocabulary, width), matrix(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.embedding(x, self.embedding) + self.positions[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.embedding)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(0.02 * torch.randn(rows, columns))
