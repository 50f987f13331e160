"""Models of sequences, trained on ranks that hold parts of a sequence or of parameters, and in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import shardtrace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toy_gpt import GPT, GPTConfig

VOCAB = 32
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]  # of tokens (B, T) and labels (B, T)


class Attention(nn.Module):
    """Causal, if there is no mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class Shared(nn.Module):
    """Causal attention in which two heads of queries share one of keys and values, all three in one matrix: "cut" by
    one line, or by a slice for each, which leave so many columns ``unread``."""

    def __init__(self, width: int, heads: int, shared: int, by: str = "cut", unread: int = 0) -> None:
        super().__init__()
        self.heads, self.by, size = (heads, shared, shared), by, width // heads
        self.qkv, self.out = nn.Linear(width, (heads + 2 * shared) * size + unread), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (B, T, width), (heads, shared, _) = x.shape, self.heads
        size, qkv = width // heads, self.qkv(x)
        ends = [0, heads * size, (heads + shared) * size, (heads + 2 * shared) * size]
        sliced = [qkv[..., a:b] for a, b in pairwise(ends)]
        parts = qkv.split([n * size for n in self.heads], -1) if self.by == "cut" else sliced
        q, k, v = (t.view(B, T, n, size).transpose(1, 2) for t, n in zip(parts, self.heads, strict=True))
        k, v = (t.repeat_interleave(heads // shared, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention, self.up = nn.LayerNorm(width), Attention(width, heads), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + torch.tanh(self.up(x))


class Hidden(nn.Module):
    """Layers of hidden states (B, T, width). Returns hidden states."""

    def __init__(
        self, width: int = 16, heads: int = 2, layers: int = 2, around: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.layers, self.around = nn.ModuleList(Layer(width, heads) for _ in range(layers)), around

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask) if self.around is None else self.around(layer, x, mask)
        return x


class Tokens(Hidden):
    """Tokens (B, T) to logits (B, T, VOCAB)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        width = self.layers[0].up.in_features
        self.embedding, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(super().forward(self.embedding(tokens), mask))


class Experts(nn.Module):
    """Two of four experts for each of the tokens (..., 8), as transformers 5 computes them: in "grouped" products of
    the rows that choose an expert, or in products with a matrix for each row. ``turns``: gates take turns with what
    they are multiplied by, and there are biases."""

    def __init__(self, grouped: bool = True, turns: bool = False) -> None:
        super().__init__()
        self.grouped, self.turns, self.router = grouped, turns, nn.Linear(8, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((32, 8), (8, 16)))
        self.up_bias, self.down_bias = (nn.Parameter(torch.randn(4, n)) if turns else None for n in (32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 8)
        weights, chosen = self.router(rows).softmax(-1, torch.float).topk(2)
        expert, order = chosen.flatten().sort()
        ends = torch.histc(expert.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        h = self._product(rows[order // 2], self.up, self.up_bias, expert, ends)
        gate, up = (h[..., ::2], h[..., 1::2]) if self.turns else h.chunk(2, -1)
        h = self._product(F.silu(gate) * up, self.down, self.down_bias, expert, ends)
        h = (h * weights.flatten()[order, None])[order.argsort()]
        return h.view(-1, 2, 8).sum(1).view(x.shape).to(x.dtype)

    def _product(self, x: torch.Tensor, w: torch.Tensor, bias: Any, expert: Any, ends: Any) -> torch.Tensor:
        y = F.grouped_mm(x, w.mT, offs=ends) if self.grouped else torch.bmm(w[expert], x.unsqueeze(-1)).squeeze(-1)
        return y if bias is None else y + bias[expert]


class Mixture(nn.Module):
    """Tokens (B, T) to a loss, by experts beside one that all tokens share."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.experts = nn.Embedding(VOCAB, 8), Experts(**options)
        self.shared, self.back, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, VOCAB)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        h = h + (self.experts(h) + self.back(F.silu(self.shared(h))))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Sparse(nn.Module):
    """Tokens (B, T) to a loss, by layers of experts."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Experts()) for _ in range(layers))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Convolution(nn.Module):
    """A causal convolution along the sequence, beside a residual."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.conv = nn.Embedding(VOCAB, width), nn.Conv1d(width, width, 4, groups=width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        return self.head(F.silu(self.conv(F.pad(h.transpose(1, 2), (3, 0))).transpose(1, 2)) + h)


def gpt(dropout: float = 0.0, layers: int = 1) -> nn.Module:
    return GPT(GPTConfig(layers, n_embd=16, n_head=2, block_size=16, vocab_size=VOCAB, dropout=dropout))


def hugging_face(kind: str, **options: Any) -> nn.Module:
    """A causal language model of this kind, or a masked one, with one block."""
    import transformers

    bert = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    options |= bert if kind == "Bert" else {"num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, **options,
    )  # fmt: skip
    made: nn.Module = getattr(transformers, f"{kind}ForMaskedLM" if kind == "Bert" else f"{kind}ForCausalLM")(config)
    return made


def of_logits(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *args: Any) -> torch.Tensor:
    return F.cross_entropy(model(x, *args).flatten(0, 1), y.flatten())


def inside(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x, y)


def of_hugging_face(model: nn.Module, x: torch.Tensor, y: torch.Tensor, **others: Any) -> torch.Tensor:
    return model(input_ids=x, labels=y, **others).loss


def batch(step: int, length: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    return torch.randint(1, VOCAB, (rows, length)), torch.randint(1, VOCAB, (rows, length))


def mesh_of(shape: tuple[int, ...], *inner: str) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", *(inner or ("context",))))


def train_both(
    build: Callable[[], nn.Module],
    loss_of: Loss,
    *,
    shape: tuple[int, ...] = (1, 2),
    rows: int = 2,
    length: int = 13,
    steps: int = 2,
    micro: int = 1,
    tolerance: float = 1e-5,
    step: Loss | None = None,
    context: Any = "context",
    tensor: Any = None,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    **options: Any,
) -> nn.Module:
    """Asserts that losses and all gradients over steps of an optimizer are those of one process with the whole batch.
    ``micro`` batches are added up for each step, of which only the last one reduces. ``step`` computes the loss of the
    sharded model, if that is another function. ``tensor`` is a tensor_parallel, in the place of the context, or beside it
    if the mesh's ``shape`` has three dimensions. Returns the sharded model."""
    names = ["context", "tensor"] if len(shape) == 3 else ["tensor" if tensor is not None else "context"]
    mesh = mesh_of(shape, *names)
    torch.manual_seed(0)
    whole = build()
    parallel = {f"{name}_parallel": {"context": context, "tensor": tensor}[name] for name in names}
    model = shardtrace.fsdp(copy.deepcopy(whole), mesh=mesh, **parallel, **options)
    optimizers = [optimizer(m.parameters(), lr=0.1 if optimizer is torch.optim.SGD else 0.01) for m in (whole, model)]
    row = mesh.get_local_rank("data")
    for number in range(steps):
        for i in range(micro):
            batches = [batch((number * micro + i) * shape[0] + d, length, rows) for d in range(shape[0])]
            expected = [loss_of(whole, *b) for b in batches]
            (sum(expected) / len(expected)).backward()
            with shardtrace.no_sync(model) if i + 1 < micro else nullcontext():
                loss = (step or loss_of)(model, *batches[row])
                loss.backward()
            torch.testing.assert_close(loss.detach().float(), expected[row].detach(), rtol=tolerance, atol=tolerance)
        compare_gradients(model, whole, tolerance)
        for one in optimizers:
            one.step()
            one.zero_grad()
    if tensor is not None:
        found = shardtrace.full_state_dict(model)
        torch.testing.assert_close(found, dict(whole.state_dict()), rtol=10 * tolerance, atol=10 * tolerance)
    return model


def compare_gradients(model: nn.Module, whole: nn.Module, tolerance: float) -> None:
    """Asserts that all gradients are those of the whole model."""
    found = shardtrace.full_gradients(model)
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(
            found[name].float(), grad, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def on_each_rank_equal(x: torch.Tensor) -> bool:
    """Whether all ranks have the same value."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return all(torch.equal(f, x) for f in found)
