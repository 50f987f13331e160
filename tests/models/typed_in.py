"""Well-known architectures, typed in from their descriptions in a few lines each, with the constructs that matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from case import BATCH, Case
from torch import nn

VOCABULARY, LENGTH, WIDTH, HEADS, SIZE, CLASSES = 96, 16, 32, 4, 16, 5
MODELS: dict[str, Callable[[], Case]] = {}


def model(function: Callable[[], Case]) -> Callable[[], Case]:
    """Enters a function that makes a case, by its name."""
    MODELS[function.__name__] = function
    return function


def _language(network: nn.Module) -> Case:
    """A model that is called with tokens and targets, and returns logits and the loss."""
    words = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    return Case(network, (words[:, :-1], words[:, 1:].contiguous()), loss=lambda result: result[1])


def _images(network: nn.Module) -> Case:
    """A classifier of images."""
    images, labels = torch.randn(BATCH, 3, SIZE, SIZE), torch.randn(BATCH, CLASSES).softmax(-1)
    return Case(Classifier(network), (images, labels))


class Classifier(nn.Module):
    """A network and its loss for soft labels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.network(x), y)


# ---------------------------------------------------------------------------------------------------------------------
# Language models


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("allowed", torch.ones(LENGTH, LENGTH).tril().view(1, 1, LENGTH, LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(x).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.allowed[:, :, :t, :t] == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, t, c))


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = CausalAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.words.weight = self.head.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        position = torch.arange(0, words.size(1), dtype=torch.long, device=words.device)
        x = self.words(words) + self.positions(position)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@model
def nanogpt() -> Case:
    return _language(NanoGPT())


class RMSNorm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotations(head: int, length: int) -> torch.Tensor:
    """Unit complex numbers, (length, head / 2)."""
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, head, 2)[: head // 2].float() / head))
    angles = torch.outer(torch.arange(length), frequencies).float()
    return torch.polar(torch.ones_like(angles), angles)


class ComplexAttention(nn.Module):
    """Rotates queries and keys as complex numbers; fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    @staticmethod
    def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.rotate(self.q(x).view(b, t, HEADS, -1), turns)
        k = self.rotate(self.k(x).view(b, t, HEADS // 2, -1), turns)
        v = self.v(x).view(b, t, HEADS // 2, -1)
        k, v = (
            y[:, :, :, None, :].expand(b, t, HEADS // 2, 2, WIDTH // HEADS).reshape(b, t, HEADS, -1) for y in (k, v)
        )
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, -1))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.first, self.second = ComplexAttention(), RMSNorm(), RMSNorm()
        self.gate, self.up = nn.Linear(WIDTH, 80, bias=False), nn.Linear(WIDTH, 80, bias=False)
        self.down = nn.Linear(80, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.first(x), turns)
        y = self.second(h)
        return h + self.down(F.silu(self.gate(y)) * self.up(y))


class ComplexLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(2))
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("turns", rotations(WIDTH // HEADS, 2 * LENGTH), persistent=False)
        self.last_loss: torch.Tensor | None = None

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.words(words)
        turns = self.turns[: words.shape[1]]
        for block in self.blocks:
            x = block(x, turns)
        logits = self.head(self.norm(x))
        self.last_loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, self.last_loss


@model
def llama_complex() -> Case:
    return _language(ComplexLlama())


class SelectiveScan(nn.Module):
    """Mamba's mixer, with the recurrence as a loop in Python."""

    def __init__(self, inner: int = 2 * WIDTH, state: int = 8, rank: int = 4) -> None:
        super().__init__()
        self.inner, self.state, self.rank = inner, state, rank
        self.enter = nn.Linear(WIDTH, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.select = nn.Linear(inner, rank + 2 * state, bias=False)
        self.step = nn.Linear(rank, inner)
        self.log_decay = nn.Parameter(torch.arange(1, state + 1).float().repeat(inner, 1).log())
        self.skip = nn.Parameter(torch.ones(inner))
        self.leave = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, length, _ = x.shape
        x, gate = self.enter(x).split([self.inner, self.inner], dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :length].transpose(1, 2))
        step, b, c = self.select(x).split(split_size=[self.rank, self.state, self.state], dim=-1)
        step = F.softplus(self.step(step))
        decay = torch.exp(torch.einsum("bld,dn->bldn", step, -torch.exp(self.log_decay.float())))
        entering = torch.einsum("bld,bln,bld->bldn", step, b, x)
        state = torch.zeros(x.shape[0], self.inner, self.state, device=x.device)
        results = []
        for t in range(length):
            state = decay[:, t] * state + entering[:, t]
            results.append(torch.einsum("bdn,bn->bd", state, c[:, t, :]))
        y = torch.stack(results, dim=1) + x * self.skip
        return self.leave(y * F.silu(gate))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": RMSNorm(), "mixer": SelectiveScan()}) for _ in range(2))
        self.norm = RMSNorm()

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.words(words)
        for layer in self.layers:
            x = x + layer["mixer"](layer["norm"](x))
        logits = F.linear(self.norm(x), weight=self.words.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@model
def mamba() -> Case:
    return _language(Mamba())


class Recurrent(nn.Module):
    """A language model of recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), VOCABULARY)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        x, _ = self.recurrent(self.words(words))
        logits = self.head(x)
        return logits, F.cross_entropy(logits.transpose(1, 2), targets)


@model
def lstm() -> Case:
    return _language(Recurrent(nn.LSTM))


@model
def lstm_bidirectional() -> Case:
    return _language(Recurrent(nn.LSTM, bidirectional=True))


@model
def gru() -> Case:
    return _language(Recurrent(nn.GRU))


class Cells(nn.Module):
    """A recurrence of ``nn.LSTMCell``, written as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.LSTMCell(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.words(words)
        hidden = cell = torch.zeros(x.shape[0], WIDTH)
        logits = torch.empty(x.shape[0], LENGTH, VOCABULARY)
        for t in range(LENGTH):
            hidden, cell = self.cell(x[:, t], (hidden, cell))
            logits[:, t] = self.head(hidden)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@model
def lstm_cells() -> Case:
    return _language(Cells())


class Stack(nn.Module):
    """``nn.TransformerEncoder`` with a causal mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        logits = self.head(self.encoder(self.words(words), mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@model
def transformer_encoder() -> Case:
    return _language(Stack())


@model
def transformer_encoder_norm_first() -> Case:
    return _language(Stack(norm_first=True, activation="gelu"))


class Translator(nn.Module):
    """``nn.Transformer``: encoder, decoder, masks of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 1, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        causal = self.transformer.generate_square_subsequent_mask(words.shape[1])
        y = self.transformer(self.words(words), self.words(targets), tgt_mask=causal, src_key_padding_mask=words == 0)
        logits = self.head(y)
        return logits, F.cross_entropy(logits.flatten(0, 1), words.flatten())


@model
def transformer() -> Case:
    return _language(Translator())


class Attentive(nn.Module):
    """``nn.MultiheadAttention`` with and without its weights, and with keys of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, kdim=24, vdim=24, bias=False)
        self.narrow, self.head = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.words(words)
        y, weights = self.first(x, x, x, need_weights=True)
        z = self.narrow(y)
        x, _ = self.second(y, z, z, need_weights=False)
        logits = self.head(x + weights.sum(-1, keepdim=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@model
def multihead_attention() -> Case:
    return _language(Attentive())


class Experts(nn.Module):
    """A mixture of experts that sends each token to its two experts by index."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.words, self.router = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, WIDTH, 48) / 6)
        self.down = nn.Parameter(torch.randn(count, 48, WIDTH) / 6)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.words(words).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        share = torch.zeros(len(x), len(self.up)).scatter_(1, chosen, weights)
        y = torch.einsum("neh,ehw->new", F.gelu(torch.einsum("nw,ewh->neh", x, self.up)), self.down)
        logits = self.head(x + (y * share.unsqueeze(-1)).sum(1))
        return logits, F.cross_entropy(logits, targets.flatten())


@model
def experts() -> Case:
    return _language(Experts())


# ---------------------------------------------------------------------------------------------------------------------
# Images


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class InvertedResidual(nn.Module):
    """EfficientNet's block, with activations in place."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        inner, out = 3 * width, width * stride
        self.layers = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.SiLU(inplace=True),
            SqueezeExcite(inner), nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.residual = stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        if self.residual:
            y += x
        return y


@model
def efficientnet() -> Case:
    return _images(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True), InvertedResidual(8, 1),
            InvertedResidual(8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, CLASSES),
        )
    )  # fmt: skip


@model
def efficientnet_dropout_in_place() -> Case:
    layers = (InvertedResidual(3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2, inplace=True))
    return _images(nn.Sequential(*layers, nn.Linear(6, CLASSES)))


class DenseBlock(nn.Module):
    """DenseNet's block: a list that grows, concatenated before each layer."""

    def __init__(self, width: int, growth: int = 6, layers: int = 3) -> None:
        super().__init__()
        widths = range(width, width + growth * layers, growth)
        self.norms = nn.ModuleList(nn.BatchNorm2d(w) for w in widths)
        self.convs = nn.ModuleList(nn.Conv2d(w, growth, 3, padding=1, bias=False) for w in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)), inplace=True)))
        return torch.cat(features, 1)


@model
def densenet() -> Case:
    return _images(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), DenseBlock(8), nn.Conv2d(26, 12, 1), nn.AvgPool2d(2), DenseBlock(12),
            nn.BatchNorm2d(30), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(30, CLASSES),
        )
    )  # fmt: skip


class BasicBlock(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        out = width * stride
        self.first, self.second = (
            nn.Conv2d(width, out, 3, stride, 1, bias=False),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = (
            nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if stride > 1 else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(self.relu(self.norm1(self.first(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


@model
def resnet() -> Case:
    return _images(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
            BasicBlock(8, 1), BasicBlock(8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
        )
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 16, 24)) -> None:
        super().__init__()
        a, b, c = widths
        self.down1, self.down2, self.middle = self.double(3, a), self.double(a, b), self.double(b, c)
        self.up2, self.up1 = (
            nn.ConvTranspose2d(c, b, 2, 2),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        )
        self.join2, self.join1 = self.double(2 * b, b), self.double(a + b, a)
        self.head = nn.Conv2d(a, 2, 1)

    @staticmethod
    def double(width: int, out: int) -> nn.Sequential:
        layers = (nn.Conv2d(w, out, 3, padding=1, padding_mode="reflect") for w in (width, out))
        return nn.Sequential(*(m for conv in layers for m in (conv, nn.GroupNorm(4, out), nn.ReLU(inplace=True))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        y = self.up2(self.middle(F.max_pool2d(b, 2)))
        y = self.join2(torch.cat([b, y], dim=1))
        return self.head(self.join1(torch.cat([a, self.up1(y)], dim=1)))


@model
def unet() -> Case:
    return Case(UNet(), (torch.randn(BATCH, 3, SIZE, SIZE),))


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(approximate="tanh"), nn.Linear(64, WIDTH))
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(condition).unsqueeze(1).chunk(6, dim=-1)
        b, n, _ = x.shape
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, WIDTH)
        x = x + gate1 * self.out(y)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer: patches, sinusoids of the time step, modulation by adaptive norms."""

    def __init__(self, patch: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Conv2d(3, WIDTH, patch, patch)
        self.register_buffer("positions", torch.randn(1, (SIZE // patch) ** 2, WIDTH))
        self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.labels = nn.Embedding(CLASSES + 1, WIDTH)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.out = nn.Linear(WIDTH, patch * patch * 3)

    @staticmethod
    def sinusoids(t: torch.Tensor, width: int = 16) -> torch.Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(width // 2, dtype=torch.float32) / (width // 2)).to(
            device=t.device
        )
        angles = t[:, None].float() * frequencies[None]
        return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(self.sinusoids(t)) + self.labels(y)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulate(condition).chunk(2, dim=1)
        x = self.out(self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))
        side, p = SIZE // self.patch, self.patch
        x = torch.einsum("nhwpqc->nchpwq", x.reshape(shape=(x.shape[0], side, side, p, p, 3)))
        return x.reshape(shape=(x.shape[0], 3, side * p, side * p))


@model
def dit() -> Case:
    images, times, labels = (
        torch.randn(BATCH, 3, SIZE, SIZE),
        torch.randint(0, 1000, (BATCH,)),
        torch.randint(0, CLASSES, (BATCH,)),
    )
    return Case(DiT(), (images, times, labels))


class Parametrized(nn.Module):
    """Weight norm and spectral norm as parametrizations, and a power iteration that writes into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3, padding=1))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.prelu = nn.PReLU(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.prelu(self.first(x)).transpose(1, 2))


@model
def parametrizations() -> Case:
    return Case(Parametrized(), (torch.randn(BATCH, 4, LENGTH),))


class Wavelets(nn.Module):
    """Spectra, gathers, cumulative sums, sorting, a Fourier layer."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=-1) * torch.view_as_complex(self.filter)
        y = torch.fft.irfft(spectrum, n=WIDTH, dim=-1)
        order = y.detach().argsort(-1)
        return self.mix(torch.gather(y, -1, order).cumsum(-1)) + spectrum.abs().mean(-1, keepdim=True)


@model
def spectra() -> Case:
    return Case(Wavelets(), (torch.randn(BATCH, LENGTH, WIDTH),))
