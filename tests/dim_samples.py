"""Calls that torch's database of operators lacks, or has only with dims too short to be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def _made(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch._C.DisableTorchFunction():  # it is no part of the sample
        return make()


def x(*shape: int) -> torch.Tensor:
    return _made(lambda: torch.rand(shape) + 0.5)


def n(*shape: int, high: int = 4) -> torch.Tensor:
    return _made(lambda: torch.randint(high, shape))


def b(*shape: int) -> torch.Tensor:
    return _made(lambda: torch.rand(shape) > 0.5)


def _ends(*rows: int) -> torch.Tensor:
    return _made(lambda: torch.tensor(rows, dtype=torch.int32))


def matrices() -> torch.Tensor:
    """Positive definite."""
    return _made(lambda: torch.eye(4) + (a := torch.rand(4, 4, 4)) @ a.mT)


def _write(index: Any, value: Any) -> Callable[[], Any]:
    def call() -> None:
        x(4, 6, 8)[index] = value

    return call


OPERATORS = [
    *(lambda f=f: f(x(4, 6), x(6)) for f in (torch.Tensor.__radd__, torch.Tensor.__rmul__, torch.Tensor.__rsub__)),
    *(
        lambda f=f: f(x(4, 6), x(4, 1))
        for f in (torch.Tensor.__rpow__, torch.Tensor.__rtruediv__, torch.Tensor.__rdiv__)
    ),
    *(
        lambda f=f: f(x(4, 6), x(6))
        for f in (torch.Tensor.__truediv__, torch.Tensor.__floordiv__, torch.Tensor.__mod__)
    ),
    *(lambda f=f: f(x(4, 6), 2) for f in (torch.Tensor.__rfloordiv__, torch.Tensor.__rmod__, torch.Tensor.__pow__)),
    *(
        lambda name=name: getattr(x(4, 6), f"__i{name}__")(x(6))
        for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")
    ),
    *(
        lambda name=name: getattr(n(4, 6), f"__{name}__")(n(4, 1))
        for name in [
            "and",
            "or",
            "xor",
            "iand",
            "ior",
            "ixor",
            "rand",
            "ror",
            "rxor",
            "lshift",
            "rshift",
            "rlshift",
            "rrshift",
            "ilshift",
            "irshift",
        ]
    ),
    lambda: ~b(4, 6),
    lambda: +x(4, 6),
    lambda: -x(4, 6),
    lambda: x(4, 6).__rmatmul__(x(8, 4)),
    lambda: x(4, 6) @ x(6, 8),
    lambda: x(4, 6) @ x(6),
    lambda: x(5, 4, 6) @ x(2, 1, 6, 8),
]
CASTS = [
    *(
        lambda name=name: getattr(x(4, 6), name)()
        for name in ["float", "half", "bfloat16", "double", "long", "int", "short", "byte", "char"]
    ),
    *(
        lambda name=name: getattr(x(4, 6), name)()
        for name in ["bool", "cfloat", "cdouble", "chalf", "cpu", "detach", "contiguous"]
    ),
    lambda: x(4, 6).to(torch.bfloat16),
    lambda: x(4, 6).to(n(2)),
    lambda: x(4, 6).type(torch.float64),
    lambda: x(4, 6).type_as(n(2)),
    lambda: torch.detach_copy(x(4, 6)),
    lambda: x(4, 6).copy_(x(6)),
    lambda: x(4, 6).fill_(2),
    lambda: x(4, 6).zero_(),
    lambda: torch.complex(x(4, 6), x(4, 6)).real,
    lambda: torch.complex(x(4, 6), x(4, 6)).imag,
    lambda: torch.view_as_real(torch.complex(x(4, 6), x(4, 6))),
    lambda: torch.view_as_complex(x(4, 6, 2)),
    lambda: torch.negative(x(4, 6)),
    lambda: torch.absolute(x(4, 6)),
    lambda: torch.fix(x(4, 6)),
    *(lambda f=f: f(x(4, 6) / 2) for f in (torch.arcsin, torch.arctan, torch.arcsinh, torch.arctanh)),
    *(lambda f=f: f(x(4, 6) / 2) for f in (torch.special.erf, torch.special.erfinv, torch.special.expm1)),
    *(lambda f=f: f(x(4, 6) / 2) for f in (torch.special.i0, torch.special.log1p, torch.special.digamma)),
]
RESHAPES = [
    *(lambda shape=shape: x(4, 6, 8).view(shape) for shape in ((24, 8), (4, 48), (4, 2, 3, 8), (2, 2, 6, -1), (8, 24))),
    *(lambda shape=shape: x(4, 6, 8).reshape(*shape) for shape in ((-1,), (6, 4, 8), (1, 4, 1, 6, 8, 1), (3, 8, 8))),
    lambda: torch.reshape(x(4, 6, 8), shape=(4, 6, 2, 4)),
    lambda: x(1, 4, 1, 4).view(4, 1, 4),
    lambda: x(4, 6, 8).flatten(1),
    lambda: x(4, 6, 8).flatten(0, 1),
    lambda: x(4, 6, 8).ravel(),
    lambda: x(4, 6, 8).unflatten(2, (2, 4)),
    lambda: x(4, 6, 8).unflatten(-1, (4, -1)),
    lambda: torch.unflatten(x(24, 8), dim=0, sizes=(4, 6)),
    lambda: x(4, 6, 8).view_as(x(24, 8)),
    lambda: x(4, 48).reshape_as(x(4, 6, 8)),
    lambda: x(4, 6).unsqueeze(1),
    lambda: x(4, 1, 6).squeeze(1),
    lambda: x(4, 1, 6).squeeze(),
    lambda: x(4, 1, 6).squeeze((0, 1)),
]
MOVES = [
    lambda: x(4, 6, 8).T,
    lambda: x(4, 6, 8).mT,
    lambda: x(4, 6).H,
    lambda: x(4, 6, 8).mH,
    lambda: x(4, 6, 8).permute(2, 0, 1),
    lambda: torch.permute(x(4, 6, 8), dims=(1, -1, 0)),
    lambda: x(4, 6, 8).movedim((0, 1), (2, 0)),
    lambda: x(4, 6, 8).transpose(-1, 0),
    lambda: x(4, 1, 8).expand(-1, 6, 8),
    lambda: x(6, 1).expand(size=(4, 6, 8)),
    lambda: torch.broadcast_to(x(6, 1), (4, 6, 8)),
    lambda: x(6, 1).expand_as(x(4, 6, 8)),
    lambda: x(4, 1, 8).repeat(1, 6, 1),
    lambda: x(6, 8).repeat(4, 1, 2),
    lambda: torch.tile(x(4, 1, 8), (6, 1)),
    lambda: x(4, 6).repeat_interleave(2, 1),
    lambda: x(4, 6).repeat_interleave(n(6), dim=1),
    lambda: torch.meshgrid(x(4), x(6), indexing="ij"),
    lambda: torch.meshgrid([x(4), x(6), x(5)], indexing="xy"),
    lambda: torch.tril(x(4, 6, 8)),
    lambda: torch.triu(x(4, 6, 8), diagonal=1),
    lambda: torch.diagonal(x(4, 6, 8), 0, 1, 2),
    lambda: torch.linalg.diagonal(x(4, 6, 8)),
    lambda: x(4, 6, 8).unfold(1, 2, 1),
    lambda: x(4, 6, 8).narrow(1, 0, 6),
    lambda: torch.narrow(x(4, 6, 8), dim=1, start=0, length=6),
    lambda: x(4, 6, 8).narrow(1, 2, 3),
    lambda: torch.split(x(4, 6, 8), [2, 4], dim=1),
    lambda: torch.unsafe_split_with_sizes(x(4, 6, 8), [2, 4], 1),
    lambda: x(4, 6, 8).chunk(3, -2),
    lambda: torch.cat([x(4, 6, 8), x(4, 2, 8)], dim=1),
    lambda: torch.cat([x(0), x(4, 2, 8)], dim=1),
    lambda: torch.stack([x(4, 6), x(4, 6)], dim=1),
    lambda: torch.vstack([x(6), x(4, 6)]),
    lambda: torch.hstack([x(4, 6), x(4, 2)]),
    lambda: torch.dstack([x(6), x(1, 6, 2)]),
    lambda: torch.column_stack([x(6), x(6, 2)]),
    lambda: torch.roll(x(4, 6, 8), 1, 1),
    lambda: torch.roll(x(4, 6, 8), 1),
    lambda: x(4, 6, 8).flip(0, 1),
    lambda: F.pad(x(4, 6, 8), (0, 0, 1, -1)),
    lambda: F.pad(x(4, 6, 8), (2, 1), mode="reflect"),
    *(lambda name=name: getattr(x(4), f"new_{name}")(4, 6) for name in ("zeros", "ones", "empty")),
    lambda: x(4).new_full((4, 6), 3.0),
    lambda: x(4).new_zeros(size=(4, 6)),
    lambda: torch.zeros(4, 6, dtype=torch.float64),
    lambda: torch.ones((4, 6)),
    lambda: torch.full((4, 6), 3.0),
    lambda: torch.full(size=(4, 6), fill_value=x()),
    lambda: torch.rand_like(x(4, 6)),
]
INDICES = [
    *(lambda index=index: x(4, 6, 8)[index] for index in (0, slice(1, 3), (slice(None), slice(0, 6)), (..., -1))),
    *(
        lambda index=index: x(4, 6, 8)[index]
        for index in (None, (slice(None), None, 2), (..., slice(None, None, 2), 1))
    ),
    *(lambda index=index: x(4, 6, 8)[index] for index in ((slice(-9, 99), ..., None), (slice(0, 4), slice(-2, None)))),
    lambda: x(4, 6, 8)[n(5)],
    lambda: x(4, 6, 8)[n(5, 4)],
    lambda: x(4, 6, 8)[:, n(5, 4)],
    lambda: x(4, 6, 8)[..., 1::2],
    lambda: x(4, 6, 8)[n(5, 1), n(4)],
    lambda: x(4, 6, 8)[:, n(5), n(5)],
    lambda: x(4, 6, 8)[n(5), :, n(5)],
    lambda: x(4, 6, 8)[n(5), None, n(5)],
    lambda: x(4, 6, 8)[None, :, n(5)],
    lambda: x(4, 6, 8)[0, :, n(5)],
    lambda: x(4, 6, 8)[n(5), 0, n(5)],
    lambda: x(4, 6, 8)[:, n(), n(5)],
    lambda: x(4, 6, 8)[n(), :, n(5)],
    lambda: x(4, 6, 8)[..., n(5)],
    lambda: x(4, 6, 8)[b(4, 6)],
    lambda: x(4, 6, 8)[[0, 1]],
    _write(0, 1.0),
    _write((slice(None), 0), x(4, 8)),
    _write((slice(None), slice(1, 3)), x(2, 8)),
    _write((..., slice(0, 8)), x(6, 1)),
    _write((slice(None), n(5)), x(4, 5, 8)),
    lambda: F.embedding(n(4, 6), x(10, 8)),
    lambda: torch.embedding(x(10, 8), n(4, 6)),
    lambda: F.one_hot(n(4, 6), 10),
    lambda: F.one_hot(n(4, 6)),
    lambda: torch.gather(x(4, 6, 8), 1, n(4, 5, 8)),
    lambda: torch.gather(x(4, 6, 8), 1, n(1, 5, 8)),
    lambda: torch.gather(x(4, 6, 8), -1, n(4, 5, 8)),
    lambda: torch.take_along_dim(x(4, 6, 8), n(1, 5, 8), 1),
    lambda: torch.index_select(x(4, 6, 8), 1, n(5)),
    lambda: torch.take(x(4, 6), n(5, 4)),
    lambda: torch.scatter(x(4, 6, 8), 1, n(4, 5, 8), x(4, 5, 8)),
    lambda: torch.scatter(x(4, 6, 8), 1, n(1, 5, 8), 3.0),
    lambda: torch.scatter_add(x(4, 6, 8), 1, n(4, 5, 6), x(4, 5, 8)),
    lambda: torch.index_add(x(4, 6, 8), 1, n(5), x(4, 5, 8)),
    lambda: torch.index_fill(x(4, 6, 8), 1, n(5), 3.0),
    lambda: torch.bucketize(x(4, 6), torch.linspace(0, 1, 5)),
    lambda: torch.searchsorted(torch.linspace(0, 1, 20).view(4, 5), x(4, 6)),
    lambda: torch.searchsorted(torch.linspace(0, 1, 5), x(4, 6)),
    lambda: torch.isin(n(4, 6), n(3)),
    lambda: x(4, 6).masked_fill(b(6), -1.0),
]
REDUCTIONS = [
    *(
        lambda name=name, dim=dim: getattr(torch, name)(x(4, 6, 8), dim=dim, keepdim=dim != 0)
        for name in [
            "sum",
            "mean",
            "nansum",
            "nanmean",
            "amax",
            "amin",
            "any",
            "all",
            "logsumexp",
            "median",
            "argmax",
            "argmin",
            "var",
            "std",
        ]
        for dim in (0, 1)
    ),
    *(
        lambda name=name: getattr(torch, name)(x(4, 6))
        for name in [
            "sum",
            "mean",
            "nansum",
            "amax",
            "amin",
            "any",
            "all",
            "prod",
            "max",
            "min",
            "argmax",
            "median",
            "count_nonzero",
            "norm",
        ]
    ),
    lambda: torch.sum(x(4, 6, 8), (0, -1)),
    lambda: x(4, 6, 8).mean((1, 2), True),
    lambda: torch.prod(x(4, 6), 1),
    lambda: torch.max(x(4, 6), 1),
    lambda: torch.max(x(4, 6), x(6)),
    lambda: torch.var(x(4, 6), True),
    lambda: torch.norm(x(4, 6), dim=1),
    lambda: torch.linalg.norm(x(4, 6), dim=1),
    lambda: torch.linalg.vector_norm(x(4, 6, 8), 2, (1, 2)),
    lambda: torch.linalg.matrix_norm(x(4, 6, 8)),
    lambda: torch.linalg.vecdot(x(4, 6), x(4, 6)),
    lambda: torch.diff(x(4, 6)),
    lambda: F.gumbel_softmax(x(4, 6)),
    lambda: F.softmax(x(4, 6, 8), dim=-1),
    lambda: F.normalize(x(4, 6, 8)),
    lambda: F.layer_norm(x(4, 6, 8), (8,), x(8), x(8)),
    lambda: F.layer_norm(x(4, 6, 8), (6, 8), bias=x(6, 8)),
    lambda: F.rms_norm(x(4, 6, 8), (8,), x(8)),
    lambda: F.group_norm(x(4, 6, 8), 3, x(6), x(6)),
    lambda: F.batch_norm(x(4, 6, 8), x(6), x(6), x(6), x(6)),
    lambda: F.batch_norm(x(4, 6, 8), None, None, x(6), x(6), True),
    lambda: F.instance_norm(x(4, 6, 8), weight=x(6)),
    *(
        lambda name=name: getattr(torch, name)(matrices())
        for name in ["inverse", "det", "logdet", "slogdet", "cholesky"]
    ),
    *(
        lambda name=name: getattr(torch.linalg, name)(matrices())
        for name in [
            "inv",
            "det",
            "slogdet",
            "cholesky",
            "pinv",
            "svdvals",
            "eigvalsh",
            "eigh",
            "qr",
            "svd",
            "matrix_exp",
        ]
    ),
    lambda: torch.matrix_power(x(4, 5, 5), 2),
    lambda: torch.linalg.matrix_power(x(4, 5, 5), 2),
]
EQUATIONS = {
    "bqd,bkd->bqk": ((4, 5, 6), (4, 8, 6)),
    "b q d, b k d -> b q k": ((4, 5, 6), (4, 8, 6)),
    "...d,de->...e": ((4, 5, 6), (6, 8)),
    "ij,jk": ((4, 5), (5, 6)),
    "Bi,iA": ((4, 5), (5, 6)),
    "...ij,...jk": ((4, 1, 5, 6), (8, 6, 4)),
    "bij->b": ((4, 5, 6),),
    "bii->bi": ((4, 5, 5),),
    "ii": ((5, 5),),
    "i,j->ij": ((4,), (5,)),
    "i,j->i": ((4,), (5,)),
    "a,ab,bc->c": ((4,), (4, 5), (5, 6)),
    "bd,bd->b": ((4, 6), (1, 6)),
}
PRODUCTS = [
    *(lambda e=e, s=s: torch.einsum(e, *(x(*shape) for shape in s)) for e, s in EQUATIONS.items()),
    lambda: torch.einsum("ij,jk->ik", [x(4, 5), x(5, 6)]),
    lambda: F.linear(x(4, 6, 8), x(5, 8)),
    lambda: F.linear(x(4, 6, 8), x(5, 8), x(5)),
    lambda: F.bilinear(x(4, 5), x(4, 6), x(8, 5, 6), x(8)),
    lambda: torch.matmul(x(6), x(4, 6, 8)),
    *([lambda: F.grouped_mm(x(8, 16), x(2, 16, 32), offs=_ends(3, 8))] if hasattr(F, "grouped_mm") else ()),
    lambda: torch.baddbmm(x(6, 8), batch2=x(4, 5, 8), batch1=x(4, 6, 5)),
    lambda: torch.addmm(x(8), x(4, 6), x(6, 8)),
    lambda: torch.mm(x(4, 6), x(6, 8)),
    lambda: torch.ger(x(4), x(6)),
    lambda: torch.tensordot(x(4, 5, 6), x(5, 6, 8)),
    lambda: torch.tensordot(x(4, 5, 6), x(6, 4, 8), dims=([0, 2], [1, 0])),
    lambda: torch.inner(x(4, 5, 6), x(8, 6)),
    lambda: torch.cdist(x(4, 5, 6), x(8, 6)),
    lambda: F.conv1d(x(4, 6, 8), x(5, 6, 3), x(5), padding=1),
    lambda: F.conv1d(x(4, 6, 8), x(5, 6, 3), padding="same"),
    lambda: F.conv1d(x(4, 6, 8), x(6, 1, 3), None, 1, 2, 1, 6),
    lambda: F.conv1d(x(6, 8), x(5, 6, 1)),
    lambda: F.conv2d(x(4, 6, 8, 8), x(5, 6, 3, 3)),
    lambda: F.conv3d(x(4, 2, 4, 4, 4), x(5, 2, 3, 3, 3), x(5)),
    lambda: F.conv_transpose1d(x(4, 6, 8), x(6, 5, 3), x(5)),
    lambda: F.conv_transpose2d(x(4, 6, 5, 5), x(6, 2, 3, 3), None, 2, 1, 1, 3),
    lambda: F.scaled_dot_product_attention(x(4, 6, 8, 2), x(4, 6, 5, 2), x(4, 6, 5, 3)),
    lambda: F.scaled_dot_product_attention(
        x(4, 6, 8, 2), x(4, 2, 8, 2), x(4, 2, 8, 2), enable_gqa=True, is_causal=True
    ),
    lambda: F.scaled_dot_product_attention(x(4, 6, 8, 2), x(4, 6, 8, 2), x(4, 6, 8, 2), b(4, 1, 8, 8)),
    lambda: F.scaled_dot_product_attention(x(4, 6, 8, 2), x(4, 6, 8, 2), x(4, 6, 8, 2), attn_mask=x(6, 8, 8)),
]
OTHERS = [
    *(lambda k=k: getattr(F, f"lp_pool{k}d")(x(4, 5, *(6,) * k), 2, 2) for k in (1, 2, 3)),
    *(
        lambda name=name, k=k: getattr(F, f"{name}{k}d")(x(4, 5, *(6,) * k), 2)
        for name in ("max_pool", "adaptive_max_pool", "avg_pool")
        for k in (1, 2, 3)
    ),
    *(
        lambda name=name, k=k: getattr(F, f"{name}{k}d")(x(4, 5, *(6,) * k), 2, return_indices=True)
        for name in ("max_pool", "adaptive_max_pool")
        for k in (1, 2, 3)
    ),
    lambda: F.upsample(x(4, 5, 6), scale_factor=2),
    lambda: F.interpolate(x(4, 5, 6, 6), size=(12, 12), mode="bilinear"),
    lambda: F.grid_sample(x(4, 5, 6, 6), x(4, 8, 8, 2) - 1, align_corners=False),
    lambda: F.pixel_shuffle(x(4, 8, 5, 5), 2),
    lambda: F.pixel_unshuffle(x(4, 2, 6, 6), 2),
    lambda: F.channel_shuffle(x(4, 8, 5, 5), 2),
    lambda: torch.native_channel_shuffle(x(4, 8, 5, 5), 2),
    lambda: F.dropout1d(x(4, 5, 6)),
    lambda: F.dropout2d(x(4, 5, 6, 6)),
    lambda: F.prelu(x(4, 6, 8), x(6)),
    lambda: F.prelu(x(4, 6, 8), x(1)),
    lambda: F.glu(x(4, 6, 8), 1),
    lambda: F.cosine_similarity(x(4, 6, 8), x(6, 8), dim=-1),
    lambda: F.pairwise_distance(x(4, 6), x(4, 6), keepdim=True),
    *(
        lambda r=r, f=f: f(x(4, 6), x(4, 6) / 2, reduction=r)
        for f in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.soft_margin_loss)
        for r in ("none", "mean", "sum")
    ),
    *(
        lambda r=r: F.binary_cross_entropy_with_logits(x(4, 6), x(4, 6), x(6), reduction=r, pos_weight=x(4, 1))
        for r in ("none", "mean", "sum")
    ),
    *(lambda r=r: F.margin_ranking_loss(x(4), x(4), x(4), reduction=r) for r in ("none", "mean", "sum")),
    *(lambda r=r: F.cross_entropy(x(4, 5, 6), n(4, 6), reduction=r) for r in ("none", "mean", "sum")),
    lambda: F.cross_entropy(x(4, 5), x(4, 5), x(5), reduction="none", label_smoothing=0.1),
    lambda: F.nll_loss(x(4, 5), n(4), x(5), reduction="sum"),
    lambda: F.cosine_embedding_loss(x(4, 5), x(4, 5), x(4).sign(), reduction="none"),
    lambda: F.triplet_margin_loss(x(4, 5), x(4, 5), x(4, 5)),
]

SAMPLES: dict[str, list[Callable[[], Any]]] = {
    "operators": OPERATORS,
    "casts": CASTS,
    "reshapes": RESHAPES,
    "moves": MOVES,
    "indices": INDICES,
    "reductions": REDUCTIONS,
    "products": PRODUCTS,
    "others": OTHERS,
}
