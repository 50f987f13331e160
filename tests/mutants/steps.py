"""The right steps: small models of many kinds, compiled as rank 0 of a few ranks that do not exist.

A :class:`Step` is the forward and the backward that would run, and what each rank would pass to them.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from zlib import crc32

import shardtrace
from passes.analysis.recognise import is_gather, is_issue
from passes.comm.symbols import Kept, accumulated, replicated
from passes.plan import CostModel, Device, Link
from passes.proof.callable import Border
from passes.proof.program import UnprovenError
from passes.proof.prove import Proof, claim
from shardtrace.inspector.checking import prove_compiled
from shardtrace.testing import compile_sharded, fake_ranks

import thunder
import torch
import torch.distributed as dist
from simulate import World, of_rank
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.trace import TraceCtx
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from contexts import Mixture
from models import Zoo
from models import tokens as zoo_tokens
from toy_gpt import GPT, GPTConfig


class Step(NamedTuple):
    """A compiled step of one of the ranks of ``world``, and a reference for its proof.

    ``args``, ``kept``: for each rank, the arguments of forward and the kept gradients. ``reference``: what the
    proof compares with. ``border``: the prologue and the epilogue.
    """

    forward: TraceCtx
    backward: TraceCtx | None
    world: World
    args: list[list[Any]]
    kept: list[dict[Any, Kept]]
    reference: Any
    border: Border | None = None


# ---- models ----


class Residual(nn.Module):
    """Convolutions with batch normalization."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.bn2(self.second(F.relu(self.bn1(self.first(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 4, 3), nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Noisy(nn.Module):
    """Blocks with dropout, around one that draws itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.25, self.training)
        return x * torch.rand_like(x)


class Kinds(nn.Module):
    """Blocks of two classes that could be taken for each other."""

    class Relu(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.relu(self.up(x)))

    class Tanh(Relu):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(width) for kind in (self.Relu, self.Tanh, self.Relu, self.Tanh))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Recurrent(nn.Module):
    """A convolution over time, then an LSTM, which is one line of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lstm, self.head = (
            nn.Conv1d(3, 4, 3, padding=1),
            nn.LSTM(4, 4, batch_first=True),
            nn.Linear(4, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(F.silu(self.conv(x)).transpose(1, 2))
        return self.head(y)


class Torch(nn.Module):
    """Lines that torch differentiates, a module that PyTorch runs, writes in place, a running mean."""

    class ByValues(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight if x.sum().item() > -1e9 else x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.own = nn.Linear(6, 6), nn.Linear(6, 6), self.ByValues()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).cumsum(0).flip(1)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        z = torch.logcumsumexp(y - self.mean, 1)
        z[:, :3] *= 0.5
        return self.second(self.own(z)) + torch.roll(y, 1, 1)


class Ends(nn.Module):
    """Two results and two buffers set in forward, alike, and fusions that could be taken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("peak", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (torch.tanh(self.first(x).logcumsumexp(0)) * 3 - 1).logcumsumexp(0)
        z = (torch.sigmoid(y) * 2 + 1).logcumsumexp(0) + self.second(x)
        self.mean, self.peak = y.detach().mean(0), z.detach().amax(0)
        return y, z


def _gpt() -> nn.Module:
    return GPT(GPTConfig(n_layer=2, n_embd=8, n_head=2, block_size=8, vocab_size=12))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=12, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, use_cache=False,
    ))  # fmt: skip


def _moe() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(
        vocab_size=12, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, use_cache=False,
    ))  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=12, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


def _ids(rows: int = 2, length: int = 6) -> torch.Tensor:
    return torch.arange(rows * length).view(rows, length) * 5 % 12


def _labelled() -> dict[str, Any]:
    return {"input_ids": _ids(), "labels": _ids()}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "gpt": (_gpt, lambda: (_ids(1, 7), _ids(1, 7).flip(1))),  # rows that do not divide by ranks
    "llama": (_llama, _labelled),
    "moe": (_moe, _labelled),
    "experts": (Mixture, lambda: (_ids(), _ids())),
    "bert": (_bert, _labelled),
    "resnet": (ResNet, lambda: (torch.randn(3, 3, 6, 6),)),
    "tied and frozen": (Zoo, lambda: zoo_tokens(2)),
    "noisy": (Noisy, lambda: (torch.randn(3, 6),)),
    "kinds": (Kinds, lambda: (torch.randn(3, 6),)),
    "wide": (lambda: Kinds(64), lambda: (torch.randn(3, 64),)),
    "recurrent": (Recurrent, lambda: (torch.randn(2, 3, 5),)),
    "torch": (Torch, lambda: (torch.randn(3, 6),)),
    "ends": (Ends, lambda: (torch.randn(3, 6),)),
}

# ---- settings ----


class Setting(NamedTuple):
    world: World
    options: Mapping[str, Any] = {}
    executors: tuple[str, ...] = ()
    gradients: str = "reduced"  # or "kept", "added"


def _rounded(**wires: Any) -> dict[str, Any]:
    return {"comm_policy": shardtrace.CommPolicy(**wires)}


ONE_NODE, NODES, TENSORS = World(1, 3), World(2, 2), World(1, 4, 2)
TENSOR = {"tensor_parallel": "tensor"}
LARGE = CostModel(Link(1e6, 0.0), Device(1e6, 1e6, bandwidth=1e12, overhead=0.0))  # products are in pieces
INLINE = {"compile_policy": shardtrace.CompilePolicy(repeated_blocks="inline")}

SETTINGS: dict[str, Setting] = {
    "zero3": Setting(ONE_NODE, {"sharding_strategy": "zero3"}),
    "zero2": Setting(ONE_NODE, {"sharding_strategy": "zero2"}),
    "ddp": Setting(ONE_NODE, {"sharding_strategy": "ddp"}),
    "hybrid": Setting(NODES, {"sharding_strategy": "hybrid_zero3"}),
    "secondary": Setting(NODES, {"sharding_strategy": "zero3_secondary"}),
    "owner": Setting(ONE_NODE, {"sharding_strategy": "owner"}),
    "inline": Setting(ONE_NODE, {"sharding_strategy": "zero3", **INLINE}),
    "layers": Setting(ONE_NODE, {"sharding_strategy": "zero3", "bucketing_strategy": "layer"}),
    "bf16": Setting(ONE_NODE, {"mp_policy": "bf16"}),
    "checkpointing": Setting(ONE_NODE, {"activation_checkpointing": "full"}),
    "cheap": Setting(ONE_NODE, {"activation_checkpointing": "cheap", "sharding_strategy": "zero2"}),
    "wires": Setting(ONE_NODE, _rounded(gather_dtype="int8", reduce_wire="int8")),
    "offload": Setting(ONE_NODE, {"offload_policy": CPUOffloadPolicy(), "init_policy": shardtrace.InitPolicy(device="cuda")}),
    "kept": Setting(ONE_NODE, gradients="kept"),
    "added": Setting(NODES, {"sharding_strategy": "hybrid_zero2"}, gradients="added"),
    "tensor": Setting(TENSORS, TENSOR),
    "tensor ddp": Setting(TENSORS, {"sharding_strategy": "ddp", **TENSOR}),
    "products": Setting(TENSORS, {**TENSOR, "compile_policy": shardtrace.CompilePolicy(cost_model=LARGE)}),
    "tensor inline": Setting(TENSORS, {**INLINE, **TENSOR}),
    "torchcompile": Setting(ONE_NODE, {}, ("sdpa", "torch_kernels", "torchcompile")),
    "torchcompile hybrid": Setting(NODES, {"sharding_strategy": "hybrid_zero3"}, ("sdpa", "torch_kernels", "torchcompile")),
}  # fmt: skip

# Which settings each model is compiled with, every setting at least once.
PAIRS: dict[str, tuple[str, ...]] = {
    "gpt": ("zero3", "hybrid", "tensor", "tensor ddp", "checkpointing", "torchcompile", "secondary", "added"),
    "llama": ("zero3", "secondary", "tensor ddp", "bf16", "inline", "tensor inline", "products"),
    "moe": ("zero2", "zero3"),
    "experts": ("tensor", "tensor ddp"),
    "bert": ("zero3", "ddp", "tensor", "owner"),
    "resnet": ("zero3", "ddp", "torchcompile hybrid"),
    "tied and frozen": ("zero3", "hybrid", "owner", "layers", "added", "kept"),
    "noisy": ("zero3", "cheap", "inline", "torchcompile"),
    "kinds": ("zero3", "offload", "secondary", "kept"),
    "wide": ("wires",),
    "recurrent": ("zero2", "layers", "bf16"),
    "torch": ("zero3", "ddp", "added", "hybrid"),
    "ends": ("torchcompile", "zero3", "hybrid"),
}


# ---- compiling ----


def compile_step(model: str, setting: str) -> Step:
    """Compiles a model with a setting, as Thunder would before it runs the first step."""
    build, example = MODELS[model]
    chosen = SETTINGS[setting]
    torch.manual_seed(0)
    claims: list[Any] = []
    borders: list[Border] = []

    def remember(
        record: Any, parameters: Any, forward: Any, backward: Any, context: Any, border: Any, *_: Any
    ) -> Proof:
        borders[:] = [border]
        try:
            claims[:] = [claim(record, parameters, forward, backward)]
        except UnprovenError as error:
            claims[:] = [error]
        return Proof("proven")

    with (
        mock.patch("passes.proof.prove.prove", remember),
        mock.patch("shardtrace.inspector.checking.prove_traces", remember),
        warnings.catch_warnings(),
        fake_ranks(chosen.world.size),
        mock.patch("torch.compile", functools.partial(torch.compile, backend="eager")),
    ):
        warnings.simplefilter("ignore")
        values = example()
        given = ((), values) if isinstance(values, dict) else (tuple(values), {})
        options = {"checks": shardtrace.Checks(prove=True), **chosen.options}
        replicas, shards, tensors = chosen.world
        if tensors > 1:
            names = ("data", "tensor")
            options |= {"mesh": dist.init_device_mesh("cpu", (shards // tensors, tensors), mesh_dim_names=names)}
        elif replicas > 1:
            options["mesh"] = dist.init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        jit = {"executors": list(chosen.executors)} if chosen.executors else {}
        if "offload_policy" in options:
            jitted = compile_sharded(build(), given, fsdp_options=options, jit_options=jit)
            forward, backward = _last(jitted)
            assert forward is not None
            prove_compiled(thunder.compile_data(jitted), thunder.last_traces(jitted), forward, backward)
            return _step(forward, backward, chosen.world, [None] * len(forward.args), claims[-1], borders[-1])
        module = shardtrace.fsdp(build(), **options)
        jitted = thunder.jit(module, **jit)
        if chosen.gradients == "added":
            with shardtrace.no_sync(module):
                _compiled(jitted, given)
        with shardtrace.no_sync(module) if chosen.gradients == "kept" else nullcontext():
            inputs = _compiled(jitted, given)
            forward, backward = _last(jitted)
        return _step(forward, backward, chosen.world, list(inputs), claims[-1], borders[-1])


def _compiled(jitted: Any, given: Any) -> Any:
    _, inputs, _ = thunder.compile_data(jitted).get_computation_and_inputs(*given[0], **given[1])
    return inputs


def _last(jitted: Any) -> tuple[TraceCtx, TraceCtx | None]:
    backwards = thunder.last_backward_traces(jitted)
    return thunder.last_traces(jitted)[-1], backwards[-1] if backwards else None


def _step(
    forward: TraceCtx, backward: TraceCtx | None, world: World, inputs: list[Any], reference: Any, border: Border
) -> Step:
    args = [
        [_value(p, v, forward, world, rank) for p, v in zip(forward.args, inputs, strict=True)]
        for rank in range(world.size)
    ]
    kept = [_kept(backward, rank) for rank in range(world.size)]
    return Step(forward, backward, world, args, kept, reference, border)


def _kept(backward: TraceCtx | None, rank: int) -> dict[Any, Kept]:
    """The gradients that earlier steps have kept on a rank."""
    found: dict[Any, Kept] = {}
    for bsym in backward.bound_symbols if backward is not None else ():
        if bsym.sym.id == accumulated.id:
            grads, bucket = bsym.args
            for _, member in zip(grads, bucket.members, strict=True):
                total = _random(member.parameter.full_shape, bsym.output[0], member.parameter.index + 1000 * rank)
                found[bucket.plan.axis, member.parameter.index] = Kept(member.parameter, total)
    return found


def random_like(value: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(crc32(name.encode()) + rank)
    return torch.randn(value.shape, generator=draw).to(value.dtype)


def _value(proxy: Any, value: Any, forward: TraceCtx, world: World, rank: int) -> Any:
    """A rank's value of an argument of forward: a shard, a buffer (the same on all ranks), or a part of the batch."""
    if not isinstance(proxy, TensorProxy):
        return value
    for bsym in forward.bound_symbols:
        if bsym.sym.id == replicated.id or (is_issue(bsym) and is_gather(bsym)):
            for shard, member in zip(bsym.args[0], bsym.args[1].members, strict=True):
                if shard.name == proxy.name:
                    place = world.group(member.parameter.plan.axis, rank).index(rank)
                    bucket = of_rank(bsym.args[1], place)
                    at = [m.parameter.name for m in bucket.members].index(member.parameter.name)
                    shape, seed = (
                        bucket.members[at].parameter.shard_shape,
                        (0 if bsym.sym.id == replicated.id else place),
                    )
                    return _random(shape, proxy, seed).mul_(0.5)
    held = ProxyTag.STATIC_MEMORY_LOCATION in proxy.tags
    shape = tuple(proxy.shape)
    known = value.detach() if isinstance(value, torch.Tensor) and value.device.type == "cpu" else None
    batch = rank // world.tensors
    noise = _random(shape, proxy, 0 if held else 100 + batch)
    if not noise.is_floating_point():
        base = known.clone() if known is not None else noise
        return base if held else base.roll(batch)
    base = known.clone() if known is not None else torch.zeros_like(noise)
    return base + (0.1 * noise.abs() if held else noise)


def _random(shape: tuple[int, ...], proxy: TensorProxy, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(crc32(proxy.name.encode()) + seed)
    dtype = thunder.core.dtypes.to_torch_dtype(proxy.dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=draw).to(dtype)
    return torch.randn(shape, generator=draw).to(dtype)
