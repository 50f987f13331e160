"""Compositions of what models use: compact tables of functions of a model and its inputs, family by family.

Each runs in float32, in bfloat16, and under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cases import Case, Step
from torch import nn
from torch.nn import functional as F

Function = Callable[..., Any]
Table = dict[str, Function]
inf = float("inf")


class Model(nn.Module):
    """Calls a function with itself. Has what the functions need."""

    def __init__(self, function: Function, *, autocast: bool = False) -> None:
        super().__init__()
        self.function, self.autocast = function, autocast
        self.fc, self.norm, self.table = nn.Linear(8, 8), nn.LayerNorm(8), nn.Embedding(8, 8)
        self.w, self.v = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(3, 8))
        self.gamma, self.scalar = nn.Parameter(torch.full((8,), 0.1)), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("cache", torch.zeros(5, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("ints", torch.arange(8))

    def forward(self, *args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.function(self, *args)


class Holder(nn.Module):
    """Calls a function with a module, which it owns, and the input."""

    def __init__(self, module: nn.Module, function: Function, *, autocast: bool = False) -> None:
        super().__init__()
        self.module, self.function, self.autocast = module, function, autocast

    def forward(self, *args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.function(self.module, *args)


def _tied() -> torch.Tensor:
    return torch.tensor([[1.0, 1, 2, 2, 0, 0, -1, -1]] * 3)


# ---- writes in place: each write through each view ----

WRITES: Table = {
    "mul_": lambda v: v.mul_(2.0),
    "mul_ by itself": lambda v: v.mul_(v.tanh()),
    "add_": lambda v: v.add_(1.0, alpha=2),
    "div_": lambda v: v.div_(v.detach().abs() + 1),
    "copy_": lambda v: v.copy_(v.flip(0).clone()),
    "fill_": lambda v: v.fill_(0.5),
    "zero_": lambda v: v.zero_(),
    "sigmoid_": lambda v: v.sigmoid_(),
    "clamp_": lambda v: v.clamp_(-0.5, 0.5),
    "masked_fill_": lambda v: v.masked_fill_(v > 0, 0.0),
    "silu": lambda v: F.silu(v, inplace=True),
    "lerp_": lambda v: v.lerp_(torch.ones_like(v), 0.3),
    "pow_": lambda v: v.pow_(2),
    "index_copy_": lambda v: v.index_copy_(0, torch.tensor([0]), torch.ones_like(v[:1])),
    "iadd": lambda v: v.__iadd__(v.detach() * 2),
}
VIEWS: Table = {
    "itself": lambda y: y,
    "columns": lambda y: y[:, :4],
    "row": lambda y: y[0],
    "steps": lambda y: y[:, ::2],
    "flat": lambda y: y.view(-1),
    "transposed": lambda y: y.T,
    "narrow": lambda y: y.narrow(1, 2, 3),
    "heads": lambda y: y.view(3, 2, 4).transpose(0, 1)[1],
    "diagonal": lambda y: y.diagonal(),
    "select": lambda y: y.view(3, 2, 4).swapaxes(1, 2)[..., 0],
}


def _written(write: Function, view: Function) -> Function:
    def call(m: Any, x: torch.Tensor) -> Any:
        y = m.fc(x)
        write(view(y))
        return y * 2, view(y).sum()

    return call


def _unseen(write: Function, view: Function) -> Function:
    def call(m: Any, x: torch.Tensor) -> Any:
        y = m.fc(x)
        with torch.no_grad():
            write(view(y))
        return y * 2

    return call


def _through(m: Any, x: torch.Tensor, *writes: Function) -> Any:
    y = m.fc(x)
    for write in writes:
        write(y)
    return y


def _set(key: Any, value: Any) -> Function:
    def call(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.fc(x)
        y[key(y) if callable(key) else key] = value(m, y) if callable(value) else value
        return y * 2

    return call


IN_PLACE: Table = {
    **{f"{w} {v}": _written(write, view) for w, write in WRITES.items() for v, view in VIEWS.items()},
    **{f"no_grad {w} {v}": _unseen(WRITES[w], VIEWS[v]) for w in ("mul_", "zero_", "copy_") for v in VIEWS},
    "set row": _set(0, 1.0),
    "set columns": _set((slice(None), slice(0, 2)), lambda m, y: m.gamma[:2]),
    "set mask": _set(lambda y: y > 0, 0.0),
    "set mask of tensor": _set(lambda y: y > 0, lambda m, y: m.scalar.detach().to(y.dtype)),
    "set indices": _set(torch.tensor([0, 2]), lambda m, y: m.v[:2].to(y.dtype)),
    "set ellipsis": _set((..., 0), lambda m, y: y[..., 1]),
    "set none": _set((None, 0), 2.0),
    "saved before": lambda m, x: (lambda y: y.exp() * y.clone().mul_(2))(m.fc(x)),
    "relu chain": lambda m, x: m.fc(x).mul_(2).add_(m.gamma).relu_(),
    "dropout": lambda m, x: F.dropout(m.fc(x), 0.5, inplace=True),
    "add residual": lambda m, x: m.norm(m.fc(x).add_(x)),
    "two views": lambda m, x: _through(m, x, lambda y: y[:, :4].mul_(2), lambda y: y[:2].add_(1)),
    "view kept": lambda m, x: (lambda y: (lambda v: (y.mul_(3), v + 1))(y[:, 2:5]))(m.fc(x)),
    "view of view": lambda m, x: _through(m, x, lambda y: y.view(3, 2, 4)[:, 0][:, 1:].add_(5)),
    "expanded after": lambda m, x: m.gamma.clone().mul_(2).expand(3, 8) * x,
    "new_zeros": lambda m, x: m.fc(x).new_zeros(3, 8).index_add_(0, torch.tensor([0, 0, 1]), m.fc(x)),
    "empty filled": lambda m, x: torch.empty(3, 8, dtype=x.dtype).copy_(m.fc(x)),
    "list of rows": lambda m, x: torch.stack([r.clone().mul_(2) for r in m.fc(x).unbind(0)]),
    "out": lambda m, x: torch.add(m.fc(x).detach(), 1, out=torch.empty(3, 8, dtype=m.fc(x).dtype)) * m.fc(x),
    "triu_": lambda m, x: m.w.clone().triu_() @ x.mT.to(m.w.dtype),
    "swap halves": lambda m, x: _through(m, x, lambda y: y[:, :4].copy_(y[:, 4:].clone())),
    "argument": lambda m, x: x.detach().mul_(2) * m.gamma,
}

# ---- state ----


def _state(change: Function) -> Function:
    def call(m: Any, x: torch.Tensor) -> Any:
        change(m, m.fc(x).detach().to(m.running.dtype))
        return m.fc(x) + m.running

    return call


def _attribute(name: str, value: Function) -> Function:
    return _state(lambda m, y: setattr(m, name, value(m, y)))


STATE: Table = {
    "replaced": _attribute("running", lambda m, y: m.running * 0.9 + y.mean(0) * 0.1),
    "lerp_": _state(lambda m, y: m.running.lerp_(y.mean(0), 0.1)),
    "copy_": _state(lambda m, y: m.running.copy_(y.mean(0))),
    "mul_ add_": _state(lambda m, y: m.running.mul_(0.9).add_(y.mean(0), alpha=0.1)),
    "slice": _state(lambda m, y: m.cache[:3].copy_(y)),
    "item": _state(lambda m, y: m.cache.__setitem__(slice(1, 4), y)),
    "data": _state(lambda m, y: m.running.data.mul_(0.5)),
    "count": _state(lambda m, y: m.count.add_(1)),
    "count +=": _attribute("count", lambda m, y: m.count + 1),
    "roll": _attribute("cache", lambda m, y: torch.cat([m.cache[3:], y])),
    "index_copy_": _state(lambda m, y: m.cache.index_copy_(0, torch.tensor([4, 0, 2]), y)),
    "by count": _state(lambda m, y: m.cache.index_copy_(0, m.count.view(1), y[:1])),
    "no_grad": lambda m, x: (torch.no_grad()(lambda: m.running.add_(m.fc(x).mean(0).float()))(), m.fc(x) * m.running)[
        1
    ],
    "read first": lambda m, x: (lambda before: (m.running.add_(1), before * m.fc(x), m.running * m.fc(x))[1:])(
        m.running * 1
    ),
    "attribute": lambda m, x: (setattr(m, "last", m.fc(x)), m.last * 2)[1],
}

# ---- losses ----


def _loss(name: str, **options: Any) -> Function:
    def call(m: Any, x: torch.Tensor) -> torch.Tensor:
        return getattr(F, name)(m.fc(x), *_targets(name, m, x), **options)

    return call


def _targets(name: str, m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    classes, other = torch.tensor([1, 0, 7]), m.v.detach().to(x.dtype)
    return {
        "cross_entropy": (classes,),
        "multi_margin_loss": (classes,),
        "multilabel_margin_loss": (torch.tensor([[1, 0, -1, 2, 3, 4, 5, 6]] * 3),),
        "multilabel_soft_margin_loss": ((other > 0).to(x.dtype),),
        "binary_cross_entropy_with_logits": ((other > 0).to(x.dtype),),
        "soft_margin_loss": (torch.where(other > 0, 1.0, -1.0).to(x.dtype),),
        "hinge_embedding_loss": (torch.where(other > 0, 1.0, -1.0).to(x.dtype),),
        "kl_div": (other.softmax(-1),),
        "gaussian_nll_loss": (other, other.abs() + 0.1),
        "cosine_embedding_loss": (other, torch.tensor([1, -1, 1])),
        "margin_ranking_loss": (other, torch.where(other > 0, 1.0, -1.0).to(x.dtype)),
        "triplet_margin_loss": (other, other.flip(0)),
    }.get(name, (other,))


REDUCED = [
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cross_entropy", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "binary_cross_entropy_with_logits", "soft_margin_loss",
    "hinge_embedding_loss", "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "cosine_embedding_loss",
    "margin_ranking_loss", "triplet_margin_loss",
]  # fmt: skip
WEIGHT = torch.arange(1.0, 9.0)
LOSSES: Table = {
    **{f"{name} {r}": _loss(name, reduction=r) for name in REDUCED for r in ("mean", "sum", "none")},
    "kl_div batchmean": _loss("kl_div", reduction="batchmean", log_target=True),
    "cross_entropy ignore": _loss("cross_entropy", ignore_index=0),
    "cross_entropy smoothing": _loss("cross_entropy", label_smoothing=0.1, ignore_index=7),
    "cross_entropy all ignored": lambda m, x: F.cross_entropy(m.fc(x), torch.full((3,), -100)),
    "cross_entropy sum ignored": lambda m, x: F.cross_entropy(m.fc(x), torch.full((3,), -100), reduction="sum"),
    "cross_entropy probabilities": lambda m, x: F.cross_entropy(
        m.fc(x), m.v.detach().to(x.dtype).softmax(-1), label_smoothing=0.1
    ),
    "cross_entropy weight": lambda m, x: F.cross_entropy(
        m.fc(x), torch.tensor([1, 0, 7]), WEIGHT.to(m.fc(x).dtype), label_smoothing=0.1
    ),
    "cross_entropy pixels": lambda m, x: F.cross_entropy(m.fc(x).T[None], torch.ones(1, 3, dtype=torch.long)),
    "cross_entropy one": lambda m, x: F.cross_entropy(m.fc(x)[0], torch.tensor(3)),
    "cross_entropy float": lambda m, x: F.cross_entropy(m.fc(x).float(), torch.tensor([1, 0, 7])),
    "nll_loss": lambda m, x: F.nll_loss(m.fc(x).log_softmax(-1), torch.tensor([1, 0, -100])),
    "nll_loss weight": lambda m, x: F.nll_loss(
        F.log_softmax(m.fc(x), -1), torch.tensor([1, 0, 7]), WEIGHT.to(F.log_softmax(m.fc(x), -1).dtype)
    ),
    "nll_loss 2d": lambda m, x: F.nll_loss(m.fc(x).T[None].log_softmax(1), torch.ones(1, 3, dtype=torch.long)),
    "bce": lambda m, x: F.binary_cross_entropy(m.fc(x).float().sigmoid(), (m.v.detach() > 0).float()),
    "bce at ends": lambda m, x: F.binary_cross_entropy((m.fc(x) * 100).float().clamp(0, 1), (m.v.detach() > 0).float()),
    "bce logits weight": lambda m, x: F.binary_cross_entropy_with_logits(
        m.fc(x).float(), (m.v.detach() > 0).float(), weight=m.running + 2, pos_weight=m.running + 3
    ),
    "smooth_l1 beta": _loss("smooth_l1_loss", beta=0.3),
    "huber delta": _loss("huber_loss", delta=0.3),
    "poisson full": _loss("poisson_nll_loss", log_input=True, full=False),
    "ctc": lambda m, x: F.ctc_loss(
        m.fc(x).float().log_softmax(-1)[:, None], torch.tensor([[1, 2]]), torch.tensor([3]), torch.tensor([2])
    ),
    "mse at equal": lambda m, x: F.mse_loss(m.fc(x), m.fc(x).detach()) + F.l1_loss(m.fc(x), m.fc(x).detach()),
    "z loss": lambda m, x: m.fc(x).logsumexp(-1).pow(2).mean(),
    "contrastive": lambda m, x: F.cross_entropy(
        F.normalize(m.fc(x), dim=-1) @ F.normalize(x, dim=-1).T.to(m.fc(x).dtype) * m.scalar.exp(), torch.arange(3)
    ),
    "focal": lambda m, x: (lambda p: ((1 - p) ** 2 * -p.log()).mean())(m.fc(x).float().sigmoid()),
    "dice": lambda m, x: (lambda p: 1 - (2 * (p * 0.5).sum() + 1) / (p.sum() + 2))(m.fc(x).sigmoid()),
}

# ---- subgradients: ties, zeros, bounds ----

POINTWISE = {
    "relu": F.relu, "relu6": lambda y: F.relu6(y * 6), "abs": torch.abs, "sign": lambda y: y.sign() * y, "hardtanh": F.hardtanh,
    "hardsigmoid": lambda y: F.hardsigmoid(y * 3), "hardswish": lambda y: F.hardswish(y * 3), "leaky": F.leaky_relu,
    "elu": F.elu, "celu": F.celu, "selu": F.selu, "softshrink": lambda y: F.softshrink(y, 1.0), "hardshrink": lambda y: F.hardshrink(y, 1.0),
    "threshold": lambda y: F.threshold(y, 1.0, 0.5), "tanhshrink": F.tanhshrink, "softsign": F.softsign, "clamp": lambda y: y.clamp(-1, 2),
    "clamp_min": lambda y: y.clamp_min(0), "clamp_max": lambda y: y.clamp_max(1), "clamp tensor": lambda y: torch.clamp(y, min=torch.zeros_like(y)),
    "maximum": lambda y: torch.maximum(y, y.detach().flip(1)), "minimum": lambda y: torch.minimum(y, torch.zeros_like(y)),
    "max scalar": lambda y: y.max(), "min scalar": lambda y: y.min(), "max": lambda y: y.max(-1)[0], "min": lambda y: y.min(-1).values,
    "amax": lambda y: y.amax(-1), "amin": lambda y: y.amin((0, 1)), "aminmax": lambda y: torch.stack(y.aminmax(dim=1)), "median": lambda y: y.median(), "median dim": lambda y: y.median(-1)[0],
    "sort": lambda y: y.sort(-1, stable=True)[0] * torch.arange(8), "topk": lambda y: y.topk(2)[0], "kthvalue": lambda y: y.kthvalue(3)[0], "mode": lambda y: y.mode(-1)[0],
    "cummax": lambda y: y.cummax(-1)[0], "cumprod": lambda y: y.cumprod(-1), "prod": lambda y: y.prod(-1), "prod all": lambda y: y.prod(), "logsumexp": lambda y: y.logsumexp(-1),
    "std": lambda y: y[:, :2].std(-1), "var": lambda y: y.var(-1, unbiased=False), "norm": lambda y: y[:, 4:6].norm(dim=-1), "norm 1": lambda y: y.norm(1), "norm inf": lambda y: y.norm(inf, dim=-1),
    "norm 3": lambda y: y.norm(3, dim=-1), "norm 0": lambda y: y.norm(0) * y.sum(), "norm -inf": lambda y: torch.linalg.vector_norm(y, -inf, dim=-1), "norm half": lambda y: torch.linalg.vector_norm(y.abs() + 1, 0.5, dim=-1),
    "normalize": lambda y: F.normalize(y[:, 4:], dim=-1), "normalize 1": lambda y: F.normalize(y, p=1, dim=0), "cosine": lambda y: F.cosine_similarity(y[:, 4:6], y[:, :2], dim=-1),
    "cdist": lambda y: torch.cdist(y, y), "pdist": lambda y: F.pdist(y + torch.arange(3)[:, None]), "pairwise": lambda y: F.pairwise_distance(y, y.detach()),
    "sqrt": lambda y: y.abs().sqrt(), "pow 0": lambda y: y**0, "pow half": lambda y: y.abs() ** 0.5, "pow 3": lambda y: y**3, "pow -1": lambda y: (y + 3) ** -1, "pow tensor": lambda y: (y.abs() + 1) ** y,
    "rpow": lambda y: 2**y, "rdiv": lambda y: 1 / (y + 3), "floor div": lambda y: y // 2 + y, "mod": lambda y: y % 1.5, "rmod": lambda y: 5 % (y + 3), "fmod": lambda y: torch.fmod(y, 0.7), "remainder": lambda y: torch.remainder(y, -0.7),
    "round": lambda y: y.round() + y, "floor": lambda y: y.floor() * y, "trunc": lambda y: y.trunc() * y, "frac": lambda y: y.frac(), "atan2": lambda y: torch.atan2(y, y + 3), "hypot": lambda y: torch.hypot(y, y.detach()),
    "xlogy": lambda y: torch.xlogy(y.abs(), y.abs()), "sinc": torch.sinc, "logaddexp": lambda y: torch.logaddexp(y, y.flip(1)), "nan_to_num": lambda y: torch.nan_to_num(y / y), "where nan": lambda y: torch.where(y > 0, y.log(), 0.0),
    "softmax -inf": lambda y: y.masked_fill(y > 0, -inf).softmax(-1), "log_softmax -inf": lambda y: y.masked_fill(y > 0, -inf).log_softmax(-1).masked_fill(y > 0, 0.0), "softmax all -inf": lambda y: y.masked_fill(y > -9, -inf).softmax(-1),
    "softmax dtype": lambda y: y.softmax(-1, dtype=torch.float32), "gelu": F.gelu, "gelu tanh": lambda y: F.gelu(y, approximate="tanh"), "glu": lambda y: F.glu(y), "mish": F.mish, "silu": F.silu, "softplus": lambda y: F.softplus(y, 3, 1), "logsigmoid": F.logsigmoid,
    "prelu": lambda y: F.prelu(y, torch.tensor([0.2], dtype=y.dtype)), "rrelu": lambda y: F.rrelu(y), "expm1": torch.expm1, "log1p": lambda y: y.abs().log1p(), "erfinv": lambda y: (y / 3).erfinv(), "digamma": lambda y: (y + 3).digamma(), "lgamma": lambda y: (y + 3).lgamma(),
    "quantile": lambda y: y.float().quantile(0.3, dim=-1), "renorm": lambda y: y.renorm(2, 0, 1.0), "max pool": lambda y: F.max_pool1d(y[None], 2), "adaptive max": lambda y: F.adaptive_max_pool1d(y[None], 3), "lp pool": lambda y: F.lp_pool1d(y[None].abs(), 2, 2), "avg pool": lambda y: F.avg_pool1d(y[None], 3, 2, 1, count_include_pad=False),
}  # fmt: skip
TIES: Table = {name: lambda m, x, f=f: f(_tied().to(x.dtype) + 0 * x) * m.scalar for name, f in POINTWISE.items()}
SMOOTH: Table = {name: lambda m, x, f=f: f(m.fc(x)) for name, f in POINTWISE.items()}

# ---- shapes: 0-dim, empty, broadcast, strides ----

SHAPES: Table = {
    "x * mean": lambda m, x: (lambda y: y * y.mean())(m.fc(x)),
    "scalar * sum": lambda m, x: m.scalar * m.fc(x).sum(),
    "scalar + row": lambda m, x: m.scalar + m.fc(x),
    "scalar.exp": lambda m, x: m.scalar.exp() * m.fc(x),
    "scalar of tensor": lambda m, x: m.fc(x) * m.gamma[0] + m.gamma.sum(),
    "where scalar": lambda m, x: torch.where(m.fc(x) > 0, m.scalar, m.fc(x)),
    "where number": lambda m, x: torch.where(m.fc(x) > 0, 1.0, -1.0) * m.fc(x),
    "int + float": lambda m, x: (m.ints + 0.5) * m.fc(x),
    "int / int": lambda m, x: (m.ints / 3) * m.fc(x),
    "int tensor * float": lambda m, x: m.ints * m.fc(x),
    "bool * float": lambda m, x: (m.fc(x) > 0) * m.fc(x),
    "bool sum": lambda m, x: (m.fc(x) > 0).sum(-1, keepdim=True) * m.fc(x),
    "double scalar tensor": lambda m, x: m.fc(x) * torch.tensor(0.3, dtype=torch.float64),
    "double vector": lambda m, x: m.fc(x) * torch.arange(8, dtype=torch.float64),
    "sum dtype": lambda m, x: m.fc(x).sum(-1, dtype=torch.float64),
    "mean dtype": lambda m, x: m.fc(x).mean(dtype=torch.float64),
    "mean of count": lambda m, x: m.fc(x).sum() / m.ints.numel() / m.ints.sum(),
    "sum to 0-dim": lambda m, x: m.fc(x).sum().sum(0) * m.scalar,
    "0-dim stack": lambda m, x: torch.stack([m.scalar, m.fc(x).mean().to(m.scalar.dtype)]),
    "0-dim view": lambda m, x: m.scalar.view(1).expand(8) * m.fc(x),
    "0-dim max": lambda m, x: torch.maximum(m.scalar.to(m.fc(x).dtype), m.fc(x)),
    "0-dim softmax": lambda m, x: m.scalar.softmax(0) * m.fc(x),
    "empty rows": lambda m, x: m.fc(x[:0]),
    "empty sum": lambda m, x: m.fc(x[:0]).sum() + m.fc(x).sum(),
    "empty mean": lambda m, x: m.fc(x[:0]).mean(0),
    "empty cat": lambda m, x: torch.cat([m.fc(x), m.fc(x)[:0]]),
    "empty of other rank": lambda m, x: torch.cat([m.fc(x), torch.empty(0, dtype=m.fc(x).dtype)]),
    "empty softmax": lambda m, x: m.fc(x)[:, :0].softmax(-1).sum() + m.fc(x),
    "empty matmul": lambda m, x: m.fc(x)[:, :0] @ m.w.to(m.fc(x).dtype)[:0],
    "empty norm": lambda m, x: m.norm(m.fc(x)[:0]),
    "empty prod": lambda m, x: m.fc(x)[:, :0].prod(-1) + m.fc(x).sum(-1),
    "empty index": lambda m, x: m.fc(x)[torch.empty(0, dtype=torch.long)],
    "empty embedding": lambda m, x: m.table(torch.empty(0, dtype=torch.long)).sum() + m.fc(x),
    "broadcast both": lambda m, x: m.fc(x)[:, None] * m.fc(x)[None],
    "broadcast sum": lambda m, x: (m.gamma + m.v[:, :1]).sum(0) * x,
    "expand write": lambda m, x: m.gamma.expand(3, 8).clone() * x,
    "strided linear": lambda m, x: F.linear(x.T.contiguous().T, m.w),
    "transposed weight": lambda m, x: x @ m.w.T + m.w.T[0],
    "as_strided": lambda m, x: m.fc(x).as_strided((2, 4), (8, 2)) * 2,
    "permute view": lambda m, x: m.fc(x).view(3, 2, 4).permute(2, 0, 1).reshape(4, 6),
    "narrow": lambda m, x: m.fc(x).narrow(1, 2, 3) * 2,
    "negative dims": lambda m, x: m.fc(x).unsqueeze(-3).squeeze(-3).transpose(-1, -2),
    "squeeze all": lambda m, x: m.fc(x)[None, :, None].squeeze(),
    "squeeze several": lambda m, x: m.fc(x)[None, :, None].squeeze((0, 2)),
    "split sizes": lambda m, x: [t * i for i, t in enumerate(m.fc(x).split([1, 5, 2], -1))],
    "tensor_split": lambda m, x: [t * 2 for t in m.fc(x).tensor_split(3, -1)],
    "hstack": lambda m, x: torch.hstack([m.fc(x), m.v.to(m.fc(x).dtype)]),
    "vstack": lambda m, x: torch.vstack([m.fc(x), m.gamma.to(m.fc(x).dtype)]),
    "dstack": lambda m, x: torch.dstack((m.fc(x), m.v.to(m.fc(x).dtype))),
    "column_stack": lambda m, x: torch.column_stack((m.fc(x), m.v.to(m.fc(x).dtype))),
    "meshgrid": lambda m, x: [t * 2 for t in torch.meshgrid(m.gamma, m.v[0], indexing="ij")],
    "block_diag": lambda m, x: torch.block_diag(m.w, m.v),
    "cartesian": lambda m, x: torch.cartesian_prod(m.gamma, m.v[0]),
    "broadcast_tensors": lambda m, x: [t * 2 for t in torch.broadcast_tensors(m.gamma, m.v)],
    "atleast": lambda m, x: torch.atleast_3d(m.scalar, m.gamma),
    "flip": lambda m, x: m.fc(x).flip(0, 1) * torch.arange(8),
    "roll": lambda m, x: m.fc(x).roll((1, 2), (0, 1)),
    "rot90": lambda m, x: m.fc(x).rot90(),
    "repeat": lambda m, x: m.fc(x).repeat(2, 1, 3),
    "repeat_interleave": lambda m, x: m.fc(x).repeat_interleave(3, 1),
    "repeat_interleave counts": lambda m, x: m.fc(x).repeat_interleave(torch.tensor([1, 2, 0]), 0, output_size=3),
    "tile": lambda m, x: m.fc(x).tile(2),
    "unfold": lambda m, x: m.fc(x).unfold(1, 3, 2) * 2,
    "diag": lambda m, x: m.w.diag() * x,
    "diag_embed": lambda m, x: m.fc(x).diag_embed(),
    "tril": lambda m, x: m.w.tril(-1) @ m.w.triu(1),
    "trace": lambda m, x: m.w.trace() * x,
    "einsum": lambda m, x: torch.einsum("bi,ij,bj->b", x, m.w, x),
    "einsum ellipsis": lambda m, x: torch.einsum("...i,ji->...j", x, m.w),
    "tensordot": lambda m, x: torch.tensordot(x, m.w, 1),
    "bilinear": lambda m, x: F.bilinear(x, x, m.w[None]),
    "addmm": lambda m, x: torch.addmm(m.gamma.to(m.fc(x).dtype), m.fc(x), m.w.to(m.fc(x).dtype), beta=0.5, alpha=2),
    "baddbmm": lambda m, x: torch.baddbmm(m.v[None], x[None], m.w[None], beta=0),
    "addcmul": lambda m, x: torch.addcmul(m.fc(x), m.v, m.gamma, value=0.3),
    "addcdiv": lambda m, x: torch.addcdiv(m.fc(x), m.v, m.gamma, value=0.3),
    "lerp": lambda m, x: torch.lerp(m.v, x, m.gamma),
    "outer": lambda m, x: torch.outer(m.gamma, m.v[0]),
    "kron": lambda m, x: torch.kron(m.w[:2], m.v),
    "matmul vector": lambda m, x: x @ m.gamma,
    "vector matmul": lambda m, x: m.gamma @ m.w,
    "dot": lambda m, x: m.gamma @ m.v[0],
    "matmul 4d": lambda m, x: x.view(1, 3, 2, 4) @ m.w.view(2, 1, 1, 4, 8)[0],
    "linear of vector": lambda m, x: m.fc(x[0]),
    "linear 4d": lambda m, x: m.fc(x[None, :, None]),
    "chain": lambda m, x: torch.linalg.multi_dot([x, m.w, m.w]),
    "return tuple": lambda m, x: (m.fc(x), {"a": [m.v * 2, None, 3]}, "text"),
    "return argument": lambda m, x: (x, m.fc(x)),
    "return parameter": lambda m, x: (m.w, m.fc(x)),
    "return buffer": lambda m, x: (m.ints, m.fc(x)),
    "return twice": lambda m, x: (lambda y: (y, y))(m.fc(x)),
    "return view": lambda m, x: (lambda y: (y, y[0]))(m.fc(x)),
    "no gradient": lambda m, x: (m.fc(x).detach(), m.fc(x).argmax(-1), m.fc(x)),
    "no tensor from input": lambda m, x: m.w.sum(),
    "constant": lambda m, x: m.fc(x) * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]),
}  # fmt: skip

# ---- indices and routers ----


def _router(k: int, style: str) -> Function:
    def call(m: Any, x: torch.Tensor) -> torch.Tensor:
        scores = m.fc(x)
        weights, chosen = scores.softmax(-1).topk(k, dim=-1)
        if style == "scatter":
            gate = torch.zeros_like(scores).scatter(-1, chosen, weights.to(scores.dtype))
            return gate @ m.w.to(gate.dtype)
        if style == "one_hot":
            return torch.einsum("bke,bk,ed->bd", F.one_hot(chosen, 8).to(m.w.dtype), weights.to(m.w.dtype), m.w)
        if style == "gather":
            return (m.w[chosen] * weights[..., None]).sum(1)
        out = torch.zeros(3, 8, dtype=m.w.dtype)
        for i in range(k):
            out.index_add_(0, torch.arange(3), (m.w[chosen[:, i]] * weights[:, i : i + 1]).to(out.dtype))
        return out

    return call


INDEX = torch.tensor([2, 0, 2])
INDICES: Table = {
    **{f"router {k} {s}": _router(k, s) for k in (1, 2) for s in ("scatter", "one_hot", "gather", "index_add")},
    "straight through": lambda m, x: (lambda p: F.one_hot(p.argmax(-1), 8).to(p.dtype) + p - p.detach())(m.fc(x).softmax(-1)) @ m.w,
    "gumbel": lambda m, x: F.gumbel_softmax(m.fc(x), hard=True, tau=0.5),
    "load balance": lambda m, x: (lambda p: (p.mean(0) * F.one_hot(p.topk(2)[1], 8).float().mean((0, 1))).sum())(m.fc(x).softmax(-1)),
    "gather": lambda m, x: m.fc(x).gather(1, INDEX[:, None].expand(3, 4)),
    "take_along_dim": lambda m, x: m.fc(x).take_along_dim(m.fc(x).argsort(-1), -1),
    "take": lambda m, x: m.fc(x).take(INDEX),
    "index_select": lambda m, x: m.w.index_select(0, INDEX) * x,
    "index twice": lambda m, x: m.w[INDEX, INDEX.flip(0)],
    "index list": lambda m, x: m.w[[0, 2, 2]] * x,
    "index mixed": lambda m, x: m.fc(x)[:, None, INDEX] * 2,
    "index bool": lambda m, x: m.w[torch.tensor([True, False] * 4)] * 2,
    "index 2d": lambda m, x: m.w[INDEX[:, None]] * 2,
    "index tensor 0-dim": lambda m, x: m.w[torch.tensor(1)] * x,
    "index range": lambda m, x: m.w[torch.arange(3), torch.arange(3)],
    "index negative": lambda m, x: m.w[torch.tensor([-1, 1])],
    "index_put": lambda m, x: m.w.index_put((INDEX,), x.to(m.w.dtype)),
    "index_put accumulate": lambda m, x: m.w.index_put((INDEX,), x.to(m.w.dtype), accumulate=True),
    "index_put_ two": lambda m, x: m.w.clone().index_put_((INDEX, INDEX), m.gamma[:3]),
    "index_add": lambda m, x: m.w.index_add(0, INDEX, x.to(m.w.dtype), alpha=2),
    "index_copy": lambda m, x: m.w.index_copy(0, torch.tensor([2, 0, 1]), x.to(m.w.dtype)),
    "index_fill": lambda m, x: m.w.index_fill(0, INDEX, 2.0),
    "index_reduce": lambda m, x: m.w.index_reduce(0, INDEX, x.to(m.w.dtype), "mean"),
    "scatter": lambda m, x: m.fc(x).scatter(1, INDEX[:, None], 0.0),
    "scatter tensor": lambda m, x: m.fc(x).scatter(1, INDEX[:, None], m.v[:, :1].to(m.fc(x).dtype)),
    "scatter_add": lambda m, x: m.fc(x).scatter_add(1, INDEX[:, None].expand(3, 2), m.v[:, :2].to(m.fc(x).dtype)),
    "scatter_reduce amax": lambda m, x: m.fc(x).scatter_reduce(0, INDEX[:, None].expand(3, 8), m.fc(x), "amax"),
    "scatter_reduce mean": lambda m, x: m.fc(x).scatter_reduce(0, INDEX[:, None].expand(3, 8), m.fc(x), "mean", include_self=False),
    "scatter_reduce prod": lambda m, x: m.fc(x).scatter_reduce(0, INDEX[:, None].expand(3, 8), m.fc(x), "prod"),
    "masked_scatter": lambda m, x: m.fc(x).masked_scatter(torch.eye(3, 8, dtype=torch.bool), m.v.to(m.fc(x).dtype)),
    "masked_fill tensor": lambda m, x: m.fc(x).masked_fill(m.fc(x) > 0, m.scalar.to(m.fc(x).dtype)),
    "masked_select": lambda m, x: m.fc(x).masked_select(m.fc(x) > 0).sum(),
    "nonzero": lambda m, x: m.fc(x)[m.fc(x).gt(0).nonzero(as_tuple=True)].sum(),
    "item": lambda m, x: m.fc(x) * m.fc(x).max().item(),
    "embedding": lambda m, x: m.table(INDEX) * x,
    "embedding padding": lambda m, x: F.embedding(INDEX, m.w, padding_idx=2) * x,
    "embedding padding negative": lambda m, x: F.embedding(INDEX, m.w, padding_idx=-6) * x,
    "embedding frequency": lambda m, x: F.embedding(INDEX, m.w, scale_grad_by_freq=True) * x,
    "embedding 2d": lambda m, x: F.embedding(INDEX[None].expand(2, 3), m.w),
    "embedding_bag": lambda m, x: F.embedding_bag(INDEX, m.w, torch.tensor([0, 2]), mode="mean"),
    "embedding_bag sum": lambda m, x: F.embedding_bag(INDEX[None], m.w, mode="sum", per_sample_weights=m.gamma[None, :3]),
    "searchsorted": lambda m, x: m.gamma[torch.searchsorted(torch.arange(7.0), m.fc(x).float())] * x,
    "bucketize": lambda m, x: m.table(torch.bucketize(m.fc(x).float(), torch.linspace(-1, 1, 7))),
    "sort": lambda m, x: m.fc(x).sort(-1, descending=True)[0] * torch.arange(8),
    "argsort gather": lambda m, x: m.fc(x).gather(-1, m.fc(x).argsort(-1)) * torch.arange(8),
    "unique": lambda m, x: m.w[INDEX.unique()] * 2,
    "bincount": lambda m, x: torch.bincount(INDEX, minlength=8) * m.fc(x),
    "cumsum mask": lambda m, x: (m.fc(x).softmax(-1).cumsum(-1) < 0.9) * m.fc(x),
    "multinomial": lambda m, x: m.w[torch.multinomial(m.fc(x).float().softmax(-1), 1)[:, 0]] * x,
    "select_scatter": lambda m, x: m.w.select_scatter(x[0].to(m.w.dtype), 0, 1),
    "slice_scatter": lambda m, x: m.w.slice_scatter(x.to(m.w.dtype), 0, 1, 4),
    "diagonal_scatter": lambda m, x: m.w.diagonal_scatter(m.gamma),
}  # fmt: skip

# ---- attention ----


def _heads(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack((m.fc(x), m.fc(x * 2), m.fc(x + 1))).view(3, 3, 2, 4).transpose(1, 2)  # heads, length, width


def _attention(mask: Function | None = None, **options: Any) -> Function:
    def call(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.fc(x), m.fc(x * 2), m.fc(x + 1)
        q, k, v = (t.view(1, 3, 2, 4).transpose(1, 2) for t in (q, k, v))
        given = None if mask is None else mask(q)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=given, **options)

    return call


def _by_hand(mask: Function) -> Function:
    def call(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = _heads(m, x)
        scores = q @ k.transpose(-1, -2) / math.sqrt(4)
        return mask(scores).softmax(-1) @ v

    return call


CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()
HOLES = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
ATTENTION: Table = {
    "plain": _attention(),
    "causal": _attention(is_causal=True),
    "scale": _attention(scale=0.3),
    "bool": _attention(lambda q: CAUSAL),
    "bool fully masked": _attention(lambda q: HOLES),
    "bool 4d": _attention(lambda q: HOLES.expand(1, 2, 3, 3)),
    "float": _attention(lambda q: torch.zeros(3, 3, dtype=q.dtype).masked_fill(~CAUSAL, -inf)),
    "float fully masked": _attention(lambda q: torch.zeros(3, 3, dtype=q.dtype).masked_fill(~HOLES, -inf)),
    "finfo.min": _attention(lambda q: torch.zeros(3, 3, dtype=q.dtype).masked_fill(~HOLES, torch.finfo(q.dtype).min)),
    "finfo.min per head": _attention(lambda q: torch.zeros(1, 2, 3, 3, dtype=q.dtype).masked_fill(~HOLES, torch.finfo(q.dtype).min)),
    "finfo.min and bias": lambda m, x: (lambda h: F.scaled_dot_product_attention(*h[:, None], attn_mask=m.w[:3, :3].masked_fill(~HOLES, torch.finfo(m.w.dtype).min).to(h.dtype)))(_heads(m, x)),
    "finfo.min plus bias": lambda m, x: (lambda h: F.scaled_dot_product_attention(*h[:, None], attn_mask=(m.w[:3, :3] + torch.zeros(3, 3, dtype=m.w.dtype).masked_fill(~HOLES, torch.finfo(m.w.dtype).min)).to(h.dtype)))(_heads(m, x)),
    "bias": lambda m, x: F.scaled_dot_product_attention(*_heads(m, x)[:, None], attn_mask=m.w[:3, :3].to(_heads(m, x).dtype)),
    "dropout": _attention(dropout_p=0.5),
    "grouped": lambda m, x: (lambda h: F.scaled_dot_product_attention(h[0][None], h[1][None, :1], h[2][None, :1], enable_gqa=True))(_heads(m, x)),
    "three dims": lambda m, x: F.scaled_dot_product_attention(*_heads(m, x)),
    "two dims": lambda m, x: F.scaled_dot_product_attention(m.fc(x), m.fc(x), m.v.to(m.fc(x).dtype)),
    "longer keys": lambda m, x: (lambda h: F.scaled_dot_product_attention(h[0][:, :1], h[1], h[2]))(_heads(m, x)),
    "longer keys causal": lambda m, x: (lambda h: F.scaled_dot_product_attention(h[0][:, :2], h[1], h[2], is_causal=True))(_heads(m, x)),
    "by hand": _by_hand(lambda s: s.masked_fill(~CAUSAL, -inf)),
    "by hand fully masked": _by_hand(lambda s: s.masked_fill(~HOLES, torch.finfo(s.dtype).min)),
    "by hand nan": _by_hand(lambda s: s.masked_fill(~HOLES, -inf)),
    "by hand in place": _by_hand(lambda s: s.masked_fill_(~CAUSAL, -1e4)),
    "alibi": _by_hand(lambda s: s + (torch.arange(3) - torch.arange(3)[:, None]) * torch.tensor([0.5, 0.25]).view(2, 1, 1)),
    "soft cap": _by_hand(lambda s: 5 * torch.tanh(s / 5)),
    "relative bias": lambda m, x: (lambda h: (h[0] @ h[1].mT + m.w[(torch.arange(3)[:, None] - torch.arange(3)) + 2, 0]).softmax(-1) @ h[2].to(m.w.dtype))(_heads(m, x)),
    "linear attention": lambda m, x: (lambda h: (F.elu(h[0]) + 1) @ ((F.elu(h[1]) + 1).mT @ h[2]))(_heads(m, x)),
    "float32 softmax": _by_hand(lambda s: s.float().softmax(-1).to(s.dtype)),
}  # fmt: skip


def _rope(m: Any, x: torch.Tensor, style: str) -> torch.Tensor:
    y = m.fc(x)
    angles = torch.outer(torch.arange(3.0), 1.0 / 100 ** (torch.arange(0, 8, 2) / 8))
    if style == "complex":
        turned = torch.view_as_complex(y.float().view(3, 4, 2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(1).type_as(y)
    cos, sin = angles.cos().repeat(1, 2).to(y.dtype), angles.sin().repeat(1, 2).to(y.dtype)
    if style == "halves":
        return y * cos + torch.cat((-y[:, 4:], y[:, :4]), -1) * sin
    return y * cos + torch.stack((-y[:, 1::2], y[:, ::2]), -1).flatten(-2) * sin


ATTENTION |= {f"rope {s}": lambda m, x, s=s: _rope(m, x, s) for s in ("complex", "halves", "pairs")}

# ---- images ----


def _image(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.fc(x)[:, :, None] * m.gamma[:6].to(m.fc(x).dtype))[None]  # (1, 3, 8, 6)


def _pad(mode: str, widths: tuple[int, ...], value: float | None = None) -> Function:
    return lambda m, x: F.pad(_image(m, x) if len(widths) > 2 else m.fc(x)[None], widths, mode=mode, value=value)


PADDING = [("constant", (1, 2)), ("constant", (-1, 2, 1, 0)), ("reflect", (1, 2)), ("reflect", (1, 2, 2, 1)), ("replicate", (1, 2)), ("replicate", (1, 2, 2, 1)), ("circular", (1, 2)), ("circular", (1, 2, 2, 1))]  # fmt: skip
IMAGES: Table = {
    **{f"pad {mode} {len(w)}": _pad(mode, w, 0.5 if mode == "constant" else None) for mode, w in PADDING},
    **{f"interpolate {mode}": lambda m, x, mode=mode: F.interpolate(_image(m, x), scale_factor=1.5, mode=mode) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")},
    "interpolate size": lambda m, x: F.interpolate(_image(m, x), (5, 9), mode="bilinear", align_corners=True, antialias=False),
    "interpolate antialias": lambda m, x: F.interpolate(_image(m, x), (5, 4), mode="bilinear", antialias=True),
    "grid_sample": lambda m, x: F.grid_sample(_image(m, x), F.affine_grid(torch.eye(2, 3, dtype=_image(m, x).dtype)[None] * 0.7, [1, 3, 4, 4], align_corners=False), align_corners=False),
    "conv": lambda m, x: F.conv2d(_image(m, x), m.w.view(-1)[:54].view(2, 3, 3, 3), m.gamma[:2], padding="same"),
    "conv strided": lambda m, x: F.conv2d(_image(m, x), m.w.view(-1)[:54].view(2, 3, 3, 3), stride=2, padding=1, dilation=2),
    "conv grouped": lambda m, x: F.conv2d(_image(m, x), m.w.view(-1)[:27].view(3, 1, 3, 3), groups=3, padding=(0, 1)),
    "conv unbatched": lambda m, x: F.conv1d(m.fc(x), m.w.view(-1)[:27].view(3, 3, 3), padding="valid"),
    "conv transposed": lambda m, x: F.conv_transpose2d(_image(m, x), m.w.view(-1)[:54].view(3, 2, 3, 3), stride=2, padding=1, output_padding=1),
    "conv3d": lambda m, x: F.conv3d(_image(m, x)[:, None], m.w.view(-1)[:54].view(2, 1, 3, 3, 3), padding=1),
    "max_pool": lambda m, x: F.max_pool2d(_image(m, x), 3, 2, 1, ceil_mode=True),
    "max_pool indices": lambda m, x: F.max_unpool2d(*F.max_pool2d(_image(m, x), 2, return_indices=True), 2),
    "avg_pool": lambda m, x: F.avg_pool2d(_image(m, x), 3, 2, 1, divisor_override=5),
    "adaptive_avg": lambda m, x: F.adaptive_avg_pool2d(_image(m, x), (3, None)),
    "pixel_shuffle": lambda m, x: F.pixel_shuffle(F.pixel_unshuffle(_image(m, x), 2), 2) * 2,
    "channel shuffle": lambda m, x: F.channel_shuffle(_image(m, x), 3) * torch.arange(6),
    "unfold fold": lambda m, x: F.fold(F.unfold(_image(m, x), 2, stride=2), (8, 6), 2, stride=2),
    "unfold overlap": lambda m, x: F.fold(F.unfold(_image(m, x), 3, padding=1), (8, 6), 3, padding=1),
    "windows": lambda m, x: _image(m, x).view(1, 3, 4, 2, 3, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 3) * 2,
    "channels_last": lambda m, x: F.conv2d(_image(m, x).contiguous(memory_format=torch.channels_last), m.w.view(-1)[:54].view(2, 3, 3, 3)),
    "to channels_last": lambda m, x: _image(m, x).to(memory_format=torch.channels_last).flatten(1) * 2,
    "batch_norm": lambda m, x: F.batch_norm(m.fc(x), None, None, m.gamma, m.gamma, training=True),
    "instance_norm": lambda m, x: F.instance_norm(_image(m, x), weight=m.gamma[:3], bias=m.gamma[:3]),
    "group_norm": lambda m, x: F.group_norm(m.fc(x), 2, m.gamma, m.gamma),
    "layer_norm": lambda m, x: F.layer_norm(m.fc(x), (8,), m.gamma, None),
    "layer_norm 2": lambda m, x: F.layer_norm(_image(m, x), (8, 6), eps=1e-3),
    "rms_norm": lambda m, x: F.rms_norm(m.fc(x), (8,), m.gamma.to(m.fc(x).dtype)),
    "rms by hand": lambda m, x: (lambda y: (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(m.fc(x)) * m.gamma)(m.fc(x).float()),
    "local response": lambda m, x: F.local_response_norm(_image(m, x), 2),
    "grn": lambda m, x: (lambda y: y * (y.norm(2, 1, keepdim=True) / (y.norm(2, 1, keepdim=True).mean(-1, keepdim=True) + 1e-6)))(_image(m, x)),
    "LayerScale": lambda m, x: x + m.gamma * m.fc(m.norm(x)),
    "LayerScale in place": lambda m, x: x + m.fc(m.norm(x)).mul_(m.gamma),
    "drop path": lambda m, x: x + m.fc(x).div(0.8) * m.fc(x).new_empty(3, 1).bernoulli_(0.8),
    "squeeze excite": lambda m, x: (lambda y: y * y.mean((2, 3), keepdim=True).sigmoid())(_image(m, x)),
    "FiLM": lambda m, x: (lambda y: y * (1 + m.fc(x).chunk(2, -1)[0]).repeat(1, 2) + m.fc(x).chunk(2, -1)[1].repeat(1, 2))(m.norm(x)),
    "weight standardised": lambda m, x: F.linear(x, (m.w - m.w.mean(1, keepdim=True)) / m.w.std(1, keepdim=True)),
    "spectral": lambda m, x: F.linear(x, m.w / torch.linalg.matrix_norm(m.w.float(), 2).to(m.w.dtype)),
    "dropout2d": lambda m, x: F.dropout2d(_image(m, x), 0.5),
    "alpha_dropout": lambda m, x: F.alpha_dropout(m.fc(x), 0.5, training=True),
    "noise": lambda m, x: m.fc(x) + torch.randn_like(x) * m.gamma,
    "uniform_": lambda m, x: m.fc(x) * torch.empty(3, 8).uniform_(0.5, 1),
    "random mask": lambda m, x: m.fc(x).masked_fill(torch.rand(3, 8) > 0.5, 0.0),
    "seeded": lambda m, x: (torch.manual_seed(3), m.fc(x) * torch.rand(3, 8))[1],
    "generator": lambda m, x: m.fc(x) * torch.rand(3, 8, generator=torch.Generator().manual_seed(3)),
    "randperm": lambda m, x: m.fc(x)[:, torch.randperm(8)],
}  # fmt: skip

# ---- complex numbers ----


def _complex(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(m.fc(x).float().view(3, 4, 2))


COMPLEX: Table = {
    "multiply": lambda m, x: (_complex(m, x) * _complex(m, x + 1)).abs(),
    "divide": lambda m, x: torch.view_as_real(_complex(m, x) / (_complex(m, x * 2) + 3)),
    "conjugate": lambda m, x: (_complex(m, x).conj() * _complex(m, x + 1)).real,
    "result": lambda m, x: _complex(m, x) * 2j,
    "conjugate result": lambda m, x: _complex(m, x).conj(),
    "conjugate transposed": lambda m, x: (_complex(m, x).mH @ _complex(m, x)).real,
    "imag": lambda m, x: _complex(m, x).imag * 2,
    "imag result": lambda m, x: _complex(m, x).imag,
    "real write": lambda m, x: (lambda z: (z.real.mul_(2), z * 1)[1])(_complex(m, x).clone()),
    "angle": lambda m, x: _complex(m, x).angle(),
    "exp": lambda m, x: torch.view_as_real(_complex(m, x).exp()),
    "polar": lambda m, x: torch.view_as_real(torch.polar(m.fc(x).float().abs(), m.fc(x).float())),
    "complex": lambda m, x: torch.complex(m.fc(x).float(), m.v.float()).abs(),
    "number": lambda m, x: torch.view_as_real(_complex(m, x) * (1 + 2j)),
    "real times complex": lambda m, x: torch.view_as_real(m.gamma[:4].float() * _complex(m, x)),
    "power": lambda m, x: (_complex(m, x) ** 2).abs(),
    "sum": lambda m, x: _complex(m, x).sum().abs(),
    "matmul": lambda m, x: (_complex(m, x) @ _complex(m, m.w).T).abs(),
    "einsum": lambda m, x: torch.einsum("bi,ji->bj", _complex(m, x), _complex(m, x).conj()).abs(),
    "softmax of abs": lambda m, x: _complex(m, x).abs().softmax(-1),
    "zeros abs": lambda m, x: (_complex(m, x) * 0).abs(),
    "in place": lambda m, x: torch.view_as_real(_complex(m, x).clone().mul_(2j)),
    "rows in place": lambda m, x: (lambda z: (z[0].mul_(1j), z.abs())[1])(_complex(m, x).clone()),
    "cumsum": lambda m, x: _complex(m, x).cumsum(-1).abs(),
    "where": lambda m, x: torch.where(_complex(m, x).real > 0, _complex(m, x), 0j).abs(),
    "rfft": lambda m, x: torch.fft.irfft(torch.fft.rfft(m.fc(x).float()) * 2, n=8),
    "fft2": lambda m, x: torch.fft.fft2(m.fc(x).float()).real,
    "fftn shift": lambda m, x: torch.fft.fftshift(torch.fft.fftn(m.fc(x).float())).abs(),
    "filter": lambda m, x: torch.fft.irfft(torch.fft.rfft(m.fc(x).float(), norm="ortho") * torch.view_as_complex(m.w.float()[:5, :2].contiguous()), n=8, norm="ortho"),
    "long convolution": lambda m, x: torch.fft.irfft(torch.fft.rfft(m.fc(x).float(), n=16) * torch.fft.rfft(m.v.float(), n=16), n=16)[..., :8],
    "stft": lambda m, x: torch.stft(m.fc(x).float().flatten(), 8, 4, window=torch.hann_window(8), return_complex=True).abs(),
    "state space": lambda m, x: (torch.exp(_complex(m, x) * 0.1).cumprod(-1) * _complex(m, x)).real,
    "eig": lambda m, x: torch.linalg.eigvals(m.w.float()).abs().sum(),
    "eigh": lambda m, x: torch.linalg.eigvalsh(m.w.float() + m.w.float().T),
    "svd": lambda m, x: torch.linalg.svdvals(m.w.float()),
    "qr": lambda m, x: torch.linalg.qr(m.w.float())[1].abs(),
    "solve": lambda m, x: torch.linalg.solve(m.w.float() + 3 * torch.eye(8), x.float().T),
    "inverse": lambda m, x: torch.linalg.inv(m.w.float() + 3 * torch.eye(8)),
    "cholesky": lambda m, x: torch.linalg.cholesky(m.w.float() @ m.w.float().T + torch.eye(8)),
    "matrix_exp": lambda m, x: torch.matrix_exp(m.w.float() - m.w.float().T),
    "det": lambda m, x: torch.linalg.slogdet(m.w.float())[1],
    "matrix norm": lambda m, x: torch.linalg.norm(m.w.float()) + torch.norm(m.w.float()) + m.w.float().norm(p="nuc"),
    "cross": lambda m, x: torch.cross(m.w.float()[:, :3], m.w.float()[:, 3:6], dim=1) + torch.linalg.cross(m.w.float()[:, :3], m.w.float()[:, 3:6]),
}  # fmt: skip

# ---- dtypes and autograd ----


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 3 * ctx.saved_tensors[0].cos()


def _inner(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.fc(x.to(m.w.dtype)) @ m.w


GRADIENTS: Table = {
    "detach": lambda m, x: m.fc(x) * m.fc(x).detach(),
    "no_grad": lambda m, x: m.fc(x) * torch.no_grad()(lambda: m.fc(x).softmax(-1))(),
    "inference inside": lambda m, x: m.fc(x) * torch.no_grad()(lambda: m.v * 2)(),
    "enable in no_grad": lambda m, x: torch.no_grad()(lambda: m.fc(x) + torch.enable_grad()(lambda: m.v * 2)())(),
    "data": lambda m, x: m.fc(x) * m.gamma.data,
    "requires_grad": lambda m, x: m.fc(x) if m.fc(x).requires_grad else x * 0,
    "custom": lambda m, x: Doubled.apply(m.fc(x)),
    "checkpoint": lambda m, x: torch.utils.checkpoint.checkpoint(lambda y: m.fc(y).relu() @ m.w, x, use_reentrant=False),
    "vmap": lambda m, x: torch.vmap(lambda r: r * r.sum())(m.fc(x)),
    "functional_call": lambda m, x: torch.func.functional_call(m.fc, {"weight": m.w, "bias": m.gamma}, (x,)),
    "gradient inside": lambda m, x: torch.autograd.grad(m.fc(x).pow(2).sum(), x, create_graph=True)[0],
    "clip by value": lambda m, x: m.fc(x).clamp(-0.1, 0.1) + (m.fc(x) - m.fc(x).detach()),
    "float and back": lambda m, x: m.fc(x).float().softmax(-1).type_as(x),
    "half and back": lambda m, x: m.fc(x).to(torch.bfloat16).float() * 2,
    "double": lambda m, x: m.fc(x).double() * m.gamma.double(),
    "to other": lambda m, x: m.fc(x).to(m.gamma) * m.gamma,
    "long": lambda m, x: m.fc(x).long() * m.fc(x),
    "int8 codes": lambda m, x: (lambda y: (y * 16).round().to(torch.int8).to(y.dtype) / 16 + y - y.detach())(m.fc(x)),
    "bits": lambda m, x: (m.fc(x) > 0).long().bitwise_and(1).bitwise_xor(1) * m.fc(x),
    "autocast off inside": lambda m, x: _inner(m, x),
    "tied": lambda m, x: m.table(INDEX) @ m.table.weight.T,
    "parameter times parameter": lambda m, x: F.linear(x, m.w * m.gamma),
    "lora": lambda m, x: m.fc(x) + x @ m.w[:, :2] @ m.w[:2] * 0.5,
    "weight norm": lambda m, x: F.linear(x, torch._weight_norm(m.w, m.w.detach().norm(dim=1, keepdim=True), 0)),
    "swiglu": lambda m, x: (lambda a, b: F.silu(a) * b)(*m.fc(x).chunk(2, -1)),
    "scan": lambda m, x: torch.stack(list(_scan(m, x))),
    "loop in place": lambda m, x: _loop(m, x),
    "python sum": lambda m, x: sum(m.fc(x).unbind(0)),
    "python max": lambda m, x: max([m.fc(x)[:1], m.fc(x)[1:2]], key=lambda t: t.shape[0]) * 2,
    "len and iter": lambda m, x: [r * i for i, r in enumerate(m.fc(x))] + [len(x)],
    "format": lambda m, x: {f"{tuple(x.shape)}": m.fc(x)},
    "hook": lambda m, x: (lambda y: (y.register_hook(lambda g: g * 2), y * 3)[1])(m.fc(x)),
    "retain_grad": lambda m, x: (lambda y: (y.retain_grad(), y * 3)[1])(m.fc(x)),
    "numpy": lambda m, x: m.fc(x) * float(m.ints.numpy().sum()),
    "tolist": lambda m, x: m.fc(x) * sum(m.ints.tolist()),
    "branch": lambda m, x: m.fc(x) if m.fc(x).sum() > 0 else m.fc(x) * 2,
    "assert": lambda m, x: (torch._assert(x.shape[0] == 3, "rows"), m.fc(x))[1],
}  # fmt: skip


def _scan(m: Any, x: torch.Tensor) -> Iterator[torch.Tensor]:
    h = torch.zeros(8, dtype=x.dtype)
    for row in m.fc(x):
        h = torch.tanh(row + h @ m.w)
        yield h


def _loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(3, 8, dtype=m.fc(x).dtype)
    h = m.fc(x)[0]
    for i in range(3):
        h = h * 0.5 + m.fc(x)[i]
        out[i] = h
    return out


# ---- recurrent cells and other modules ----

MODULES: dict[str, tuple[Callable[[], nn.Module], Function]] = {
    **{
        f"{cls.__name__} {options}": (lambda cls=cls, options=options: cls(8, 4, **options), lambda n, x: n(x[None]))
        for cls in (nn.RNN, nn.GRU, nn.LSTM)
        for options in ({}, {"batch_first": True, "num_layers": 2}, {"bidirectional": True}, {"bias": False})
    },
    "LSTM projected": (lambda: nn.LSTM(8, 4, proj_size=2), lambda n, x: n(x[None])),
    "LSTM state": (lambda: nn.LSTM(8, 4), lambda n, x: n(x[None], (x[None, :, :4], x[None, :, 4:]))),
    "GRU unbatched": (lambda: nn.GRU(8, 4), lambda n, x: n(x)),
    "RNN relu": (lambda: nn.RNN(8, 4, nonlinearity="relu", dropout=0.5, num_layers=2), lambda n, x: n(x[None])),
    "LSTMCell": (lambda: nn.LSTMCell(8, 4), lambda n, x: n(x, (x[:, :4], x[:, 4:]))),
    "LSTMCell alone": (lambda: nn.LSTMCell(8, 4), lambda n, x: n(x)),
    "GRUCell": (lambda: nn.GRUCell(8, 4), lambda n, x: n(x, x[:, :4])),
    "RNNCell": (lambda: nn.RNNCell(8, 4), lambda n, x: n(x, x[:, :4])),
    "packed": (lambda: nn.GRU(8, 4, batch_first=True), lambda n, x: n(nn.utils.rnn.pack_padded_sequence(x[None], [2], batch_first=True))[1]),
    "BatchNorm": (lambda: nn.BatchNorm1d(8), lambda n, x: n(x)),
    "BatchNorm momentum None": (lambda: nn.BatchNorm1d(8, momentum=None), lambda n, x: n(x)),
    "BatchNorm eval": (lambda: nn.BatchNorm1d(8).eval(), lambda n, x: n(x)),
    "BatchNorm twice": (lambda: nn.BatchNorm1d(8), lambda n, x: n(n(x))),
    "BatchNorm no stats": (lambda: nn.BatchNorm1d(8, track_running_stats=False, affine=False), lambda n, x: n(x)),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), lambda n, x: n(x[None])),
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda n, x: n(x, x, x)),
    "attention masked": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda n, x: n(x[None], x[None], x[None], attn_mask=~CAUSAL, need_weights=False)[0]),
    "attention padding": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda n, x: n(x[None], x[None], x[None], key_padding_mask=torch.tensor([[False, False, True]]))[0]),
    "attention bias_kv": (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True), lambda n, x: n(x, x, x)[0]),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True), lambda n, x: n(x[None])),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2), lambda n, x: n(x[None], mask=~CAUSAL)),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0), lambda n, x: n(x[:, None], x[:, None], tgt_is_causal=True, tgt_mask=nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype))),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), lambda n, x: n(x)),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), lambda n, x: n(x)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), lambda n, x: n(x)),
    "max_norm": (lambda: nn.Embedding(8, 8, max_norm=1.0), lambda n, x: n(INDEX) * x),
    "padding_idx": (lambda: nn.Embedding(8, 8, padding_idx=2), lambda n, x: n(INDEX) * x),
    "frozen": (lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)), lambda n, x: n(x)),
    "in place activations": (lambda: nn.Sequential(nn.Linear(8, 8), nn.SiLU(True), nn.Linear(8, 8), nn.Hardswish(True), nn.ELU(True), nn.Dropout(0.5, True)), lambda n, x: n(x)),
    "conv block": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm1d(4), nn.ReLU(True), nn.MaxPool1d(2)), lambda n, x: n(x[None])),
    "conv circular": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), lambda n, x: n(x[None, None])),
    "parameter list": (lambda: nn.ParameterList([torch.randn(8, 8), torch.randn(8)]), lambda n, x: x @ n[0] + n[1]),
    "parameter dict": (lambda: nn.ParameterDict({"a": torch.randn(8, 8)}), lambda n, x: x @ n["a"]),
    "scripted": (lambda: torch.jit.script(nn.Linear(8, 8)), lambda n, x: n(x).relu()),
    "bilinear": (lambda: nn.Bilinear(8, 8, 2), lambda n, x: n(x, x)),
    "adaptive softmax": (lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 8, [4]), lambda n, x: n.log_prob(x)),
    "fold": (lambda: nn.Linear(8, 4), lambda n, x: nn.functional.fold(n(x).T[None], (2, 4), (2, 2))),
}  # fmt: skip

FAMILIES: dict[str, Table] = {
    "in place": IN_PLACE, "state": STATE, "losses": LOSSES, "ties": TIES, "pointwise": SMOOTH, "shapes": SHAPES, "indices": INDICES,
    "attention": ATTENTION, "images": IMAGES, "complex": COMPLEX, "gradients": GRADIENTS,
}  # fmt: skip
MODES = ("float32", "bfloat16", "autocast")


def names() -> list[str]:
    return [*FAMILIES, "modules"]


def cases(family: str) -> Iterator[Case]:
    for mode in MODES:
        if family == "modules":
            for name, (make, function) in MODULES.items():
                yield _case(
                    f"modules/{name}/{mode}",
                    lambda make=make, f=function, on=mode: Holder(make(), f, autocast=on == "autocast"),
                    mode,
                )
        else:
            for name, function in FAMILIES[family].items():
                yield _case(
                    f"{family}/{name}/{mode}", lambda f=function, on=mode: Model(f, autocast=on == "autocast"), mode
                )


def _case(name: str, make: Callable[[], nn.Module], mode: str) -> Case:
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32

    def build(precise: bool) -> nn.Module:
        module = make().to(dtype)
        if precise:
            module = module.double()
            module.autocast = False  # type: ignore[assignment]
        return module

    def steps(precise: bool) -> list[Step]:
        found = []
        for seed in (0, 1):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
            found.append(Step(((x.double() if precise else x).requires_grad_(),), {}))
        return found

    return Case(name, build, steps, eps=torch.finfo(torch.bfloat16).eps if name.endswith("autocast") else 0.0)
