"""GPT-2 in plain PyTorch. Nothing in this file knows about sharding or compiling.

Language Models are Unsupervised Multitask Learners, Radford et al. 2019. The sizes are the paper's, plus "tiny" for
CPUs. The vocabulary is the 256 bytes (`vocab_size=50257` for GPT-2's own tokens).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class GPTConfig:
    n_layer: int = 12
    n_embd: int = 768
    n_head: int = 12
    block_size: int = 1024  # longest sequence, in tokens
    vocab_size: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")


CONFIGS = {
    "tiny": GPTConfig(n_layer=2, n_embd=128, n_head=4, block_size=256),  # learns in a minute on a CPU
    "gpt2": GPTConfig(n_layer=12, n_embd=768, n_head=12),
    "gpt2_medium": GPTConfig(n_layer=24, n_embd=1024, n_head=16),
    "gpt2_large": GPTConfig(n_layer=36, n_embd=1280, n_head=20),
    "gpt2_xl": GPTConfig(n_layer=48, n_embd=1600, n_head=25),
}


class ResidualLinear(nn.Linear):
    """A linear layer whose output is added to the residual stream, one of 2 * n_layer that do so."""

    def __init__(self, in_features: int, out_features: int, n_layer: int) -> None:
        self.init_std = 0.02 / math.sqrt(2 * n_layer)
        super().__init__(in_features, out_features)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = ResidualLinear(config.n_embd, config.n_embd, config.n_layer)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        # (B, T, 3C) -> 3 x (B, n_head, T, C / n_head)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = self.proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.proj = ResidualLinear(4 * config.n_embd, config.n_embd, config.n_layer)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(F.gelu(self.fc(x), approximate="tanh"))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(init_weights)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens (B, T) -> logits (B, T, vocab_size); with targets (B, T) -> mean cross-entropy ()."""
        position = torch.arange(idx.shape[1], device=idx.device)
        x = F.dropout(self.wte(idx) + self.wpe(position), self.config.dropout, self.training)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def init_weights(module: nn.Module) -> None:
    """GPT-2's initialisation of one module, without its children. For `apply`, and as a `param_init_fn`."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=module.init_std if isinstance(module, ResidualLinear) else 0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()
