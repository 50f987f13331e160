"""Llama 3 in plain PyTorch (Grattafiori et al., 2024, "The Llama 3 herd of models", https://arxiv.org/abs/2407.21783).

Nothing in this file knows about sharding or compiling. Make it on the meta device to plan: the sizes below have 16 to
810 GB of weights in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    width: int
    layers: int
    heads: int
    hidden: int  # width inside an MLP
    kv_heads: int = 8
    vocabulary: int = 128_256
    context: int = 8192  # longest sequence, in tokens


CONFIGS = {
    "8B": Config(width=4096, layers=32, heads=32, hidden=14_336),
    "70B": Config(width=8192, layers=80, heads=64, hidden=28_672),
    "405B": Config(width=16_384, layers=126, heads=128, hidden=53_248),
}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.size = config.width, config.width // config.heads
        self.wq = nn.Linear(width, config.heads * self.size, bias=False)
        self.wk = nn.Linear(width, config.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(width, config.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(config.heads * self.size, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same"""
        batch, tokens, _ = x.shape
        q, k, v = (w(x).view(batch, tokens, -1, self.size) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (repeat(t, q.shape[2] // t.shape[2]) for t in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, tokens, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, in fp32. (batch, tokens, heads, size) -> the same"""
    half, precise = x.shape[-1] // 2, x.float()
    turned = torch.cat((-precise[..., half:], precise[..., :half]), dim=-1)
    return (precise * cos + turned * sin).to(x.dtype)


def repeat(x: Tensor, times: int) -> Tensor:
    """Each head several times. (batch, tokens, heads, size) -> (batch, tokens, times * heads, size)"""
    batch, tokens, heads, size = x.shape
    return x[:, :, :, None, :].expand(batch, tokens, heads, times, size).reshape(batch, tokens, heads * times, size)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(config.width, eps=1e-5), Attention(config)
        self.mlp_norm, self.mlp = nn.RMSNorm(config.width, eps=1e-5), MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens and targets (batch, tokens) -> mean cross-entropy."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        cos, sin = rotations(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, cos, sin = self.embedding(x), self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for layer in self.layers:
            h = layer(h, cos, sin)
        logits = self.output(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def rotations(tokens: int, size: int, base: float = 500_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of each position, (tokens, 1, size) each."""
    angles = torch.outer(torch.arange(tokens), base ** (-torch.arange(0, size, 2) / size))
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos(), angles.sin()
