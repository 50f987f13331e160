"""What people write in a forward, and around a model: a line and an action each, which hypothesis puts together.

A line is a function of the model and its values ``v`` (``v.x`` has the shape of the input), an action a function of a
:class:`Trainer`.
"""

from __future__ import annotations

import copy
import functools
import types
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import shardtrace
from shardtrace.options.policies import grouped

import thunder
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

D, ROWS = 4, 3
FACTOR = 1.0
ELSEWHERE = types.SimpleNamespace(scale=1.0, seen=[])


@dataclass
class Values:
    x: torch.Tensor
    other: torch.Tensor
    kept: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Output:
    """What some models return."""

    y: torch.Tensor
    kept: dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ByValues(nn.Module):
    """PyTorch has to run it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x.sum().item() > 0 else x - self.weight


class Counting(nn.Module):
    """PyTorch has to run it, and it keeps something."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.load = 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.load = x.detach().abs().mean() if x.sum().item() < 1e9 else self.load
        return x.clamp(-3, 3)


class Model(nn.Module):
    """Runs its lines. All kinds of state that they use are there, used or not."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines, self.n, self.options, self.scales = lines, 0, {"scale": 1.0}, [1.0, 2.0]
        self.config = types.SimpleNamespace(scale=1.5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.fc, self.tied, self.batch_norm = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.BatchNorm1d(D)
        self.tied.weight = self.fc.weight
        self.conv, self.cell, self.by_values = nn.Conv1d(1, 1, 3, padding=1), nn.GRUCell(D, D), ByValues()
        self.table, self.gamma = nn.Embedding(7, D), nn.Parameter(torch.full((D,), 0.5))
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(D))
        self.fc.register_forward_hook(lambda module, args, output: output * self.options["scale"])
        self.totals, self.optional, self.temperature = [torch.zeros(D), torch.ones(D)], None, 1.0
        self.activation, self.counting = F.silu, Counting()
        both = torch.zeros(D)
        self.register_buffer("both", both)
        self.register_buffer("part", both[:2])
        self.register_buffer("table_of_scales", torch.ones(D))
        scale = 0.5

        def inner(x: torch.Tensor) -> torch.Tensor:
            return x * scale

        self.closure = inner

    def forward(self, x: torch.Tensor, other: torch.Tensor, *, as_object: bool = False) -> Any:
        v = Values(x, other)
        for line in self.lines:
            LINES[line](self, v)
        y = v.x + sum(t.mean() for t in v.kept)
        return Output(y, {"last": v.kept[-1:], "n": len(v.kept)}) if as_object else y


LINES: dict[str, Any] = {}


def line(function: Any) -> Any:
    LINES[function.__name__] = function
    return function


@line
def linear(m: Model, v: Values) -> None:
    v.x = m.fc(v.x)


@line
def tied(m: Model, v: Values) -> None:
    v.x = m.tied(v.x).tanh()


@line
def block(m: Model, v: Values) -> None:
    v.x = m.blocks[0](v.x)


@line
def all_blocks(m: Model, v: Values) -> None:
    for part in m.blocks:
        v.x = part(v.x)


@line
def checkpointed(m: Model, v: Values) -> None:
    v.x = checkpoint(m.blocks[1], v.x, use_reentrant=False)


@line
def layer_scale(m: Model, v: Values) -> None:
    v.x = v.x + m.gamma * F.silu(v.x)


@line
def norm(m: Model, v: Values) -> None:
    v.x = m.batch_norm(v.x)


@line
def convolution(m: Model, v: Values) -> None:
    v.x = m.conv(v.x.unsqueeze(1)).squeeze(1)


@line
def recurrent(m: Model, v: Values) -> None:
    state = torch.zeros_like(v.x)
    for _ in range(2):
        state = m.cell(v.x, state)
    v.x = state


@line
def attend(m: Model, v: Values) -> None:
    x = v.x.unsqueeze(0)
    mask = torch.ones(len(v.x), len(v.x), dtype=torch.bool).triu(1)
    v.x = m.attention(x, x, x, attn_mask=mask, need_weights=False)[0].squeeze(0)


@line
def embed(m: Model, v: Values) -> None:
    v.x = v.x + m.table(torch.arange(len(v.x)) % 7)


@line
def second_input(m: Model, v: Values) -> None:
    v.x = v.x + v.other.sigmoid()


@line
def keep(m: Model, v: Values) -> None:
    v.kept.append(v.x)


@line
def stack(m: Model, v: Values) -> None:
    v.x = torch.stack([*v.kept, v.x]).sum(0)


@line
def views(m: Model, v: Values) -> None:
    a, b = v.x.chunk(2, dim=-1)
    v.x = torch.cat([b, -a], dim=-1)


@line
def write(m: Model, v: Values) -> None:
    v.x = v.x * 1.0
    v.x[:, 1:] *= 0.5


@line
def write_through_a_view(m: Model, v: Values) -> None:
    v.x = v.x.clone()
    v.x.view(-1)[1:].add_(1.0)
    v.x.t()[0] = v.other.mean()


@line
def write_the_input(m: Model, v: Values) -> None:
    v.other.detach().mul_(1.0)
    v.x = v.x + v.other


@line
def masked(m: Model, v: Values) -> None:
    v.x = v.x.masked_fill(v.x < -1, -1.0).clamp(max=2.0)


@line
def indexed(m: Model, v: Values) -> None:
    v.x = v.x[torch.arange(len(v.x)).flip(0)] * torch.tensor([1.0, 2.0, 0.5, 1.0])


@line
def spectrum(m: Model, v: Values) -> None:
    v.x = torch.fft.irfft(torch.fft.rfft(v.x) * torch.polar(torch.ones(3), torch.arange(3.0)), n=D)


@line
def without_gradient(m: Model, v: Values) -> None:
    with torch.no_grad():
        weight = v.x.softmax(-1)
    v.x = v.x * weight


@line
def drop(m: Model, v: Values) -> None:
    v.x = F.dropout(v.x, 0.25, m.training)


@line
def drawn(m: Model, v: Values) -> None:
    v.x = v.x + 0.1 * torch.rand_like(v.x) if m.training else v.x


@line
def running_mean(m: Model, v: Values) -> None:
    m.count += 1
    m.mean = 0.9 * m.mean + 0.1 * v.x.detach().mean(0)
    v.x = v.x - m.mean + 0.01 * m.count


@line
def calls(m: Model, v: Values) -> None:
    m.n += 1


@line
def last(m: Model, v: Values) -> None:
    m.last = v.x.square().mean()


@line
def global_variable(m: Model, v: Values) -> None:
    v.x = v.x * FACTOR


@line
def object_elsewhere(m: Model, v: Values) -> None:
    v.x = v.x * ELSEWHERE.scale


@line
def attributes(m: Model, v: Values) -> None:
    v.x = v.x * m.config.scale + sum(m.scales)


@line
def closure(m: Model, v: Values) -> None:
    v.x = m.closure(v.x)


@line
def by_values(m: Model, v: Values) -> None:
    v.x = m.by_values(v.x)


@line
def writes_into_a_list(m: Model, v: Values) -> None:
    m.totals[0].add_(v.x.detach().mean(0))
    v.x = v.x + m.totals[0].tanh()


@line
def writes_into_all_of_a_list(m: Model, v: Values) -> None:
    with torch.no_grad():
        torch._foreach_mul_(m.totals, 0.9)
        torch.add(m.totals[1], 1.0, out=m.totals[1])
    v.x = v.x * m.totals[1].sigmoid()


@line
def writes_in_inference_mode(m: Model, v: Values) -> None:
    with torch.inference_mode():
        m.part.mul_(0.5).add_(0.1)
    v.x = v.x + m.both.clone()


@line
def reads_what_is_replaced(m: Model, v: Values) -> None:
    v.x = v.x * m.table_of_scales[: v.x.shape[-1]] + (0.0 if m.optional is None else m.optional)


@line
def cuts_the_gradient(m: Model, v: Values) -> None:
    y = m.fc(v.x)
    y.detach_()
    v.x = v.x + 0.1 * y.tanh()


@line
def reads_values(m: Model, v: Values) -> None:
    positive = v.other > 0
    v.x = v.x * (1.5 if positive.any() else 0.5)
    if torch.isnan(v.x).any():
        raise ValueError("nan")


@line
def anneals(m: Model, v: Values) -> None:
    v.x = v.x / m.temperature


@line
def calls_a_function(m: Model, v: Values) -> None:
    v.x = m.activation(v.x)


@line
def counts_in_pytorch(m: Model, v: Values) -> None:
    v.x = m.counting(v.x) + m.counting.load


@line
def mapped(m: Model, v: Values) -> None:
    v.x = torch.vmap(lambda row: row / (1 + row.square().sum()))(v.x)


# ---- around the model ----


class Trainer:
    """A model, how it is called, and what is seen of it."""

    def __init__(self, lines: list[str], sharded: bool, options: dict[str, Any]) -> None:
        global FACTOR
        FACTOR, ELSEWHERE.scale = 1.0, 1.0
        torch.default_generator.manual_seed(0)
        self.model, self.sharded = Model(lines), sharded
        self.call: Any = thunder.jit(shardtrace.fsdp(self.model, **grouped(options))) if sharded else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.002, weight_decay=0.1, eps=0.01)
        self.batch, self.seen, self.as_object = ROWS, [], False

    def act(self, name: str, seed: int) -> None:
        ACTIONS[name](self, seed)

    def forward(self, seed: int) -> torch.Tensor:
        """The loss of a batch."""
        draw = torch.Generator().manual_seed(seed)
        x, other = torch.randn(2, self.batch, D, generator=draw)  # parts of one tensor
        other = other.clone() if "write_the_input" in self.model.lines else other
        torch.default_generator.manual_seed(seed)
        x.requires_grad_()
        out = self.call(x, other, as_object=self.as_object) if self.as_object else self.call(x, other)
        y = out.y if self.as_object else out
        kept = out.kept["last"] if self.as_object else []
        self.seen += [t.detach().clone() for t in (y, other, *kept)]
        return (y.tanh() * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum()  # bounded, as are the steps

    def no_sync(self) -> Any:
        return shardtrace.no_sync(self.model) if self.sharded else nullcontext()

    def look(self) -> None:
        model = self.model
        self.seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        self.seen += [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
        self.seen += [t.clone() for t in (*model.totals, model.counting.load, torch.tensor(model.counting.calls))]
        self.seen += [torch.tensor(model.n), torch.as_tensor(getattr(model, "last", 0.0)).detach().clone()]


ACTIONS: dict[str, Any] = {}


def action(function: Any) -> Any:
    ACTIONS[function.__name__] = function
    return function


@action
def step(t: Trainer, seed: int) -> None:
    t.forward(seed).backward()
    t.look()
    t.optimizer.step()
    t.optimizer.zero_grad()


@action
def accumulate(t: Trainer, seed: int) -> None:
    with t.no_sync():
        t.forward(seed).backward()
    step(t, seed + 1)


@action
def two_forwards(t: Trainer, seed: int) -> None:
    (t.forward(seed) + t.forward(seed + 1)).backward()
    t.look()


@action
def clip(t: Trainer, seed: int) -> None:
    t.forward(seed).backward()
    clip_grad_norm = shardtrace.clip_grad_norm_ if t.sharded else torch.nn.utils.clip_grad_norm_
    t.seen.append(clip_grad_norm(t.model.parameters(), 0.1))
    t.look()


@action
def evaluate(t: Trainer, seed: int) -> None:
    t.model.eval()
    with torch.no_grad():
        t.forward(seed)
    t.model.train()


@action
def freeze(t: Trainer, seed: int) -> None:
    for parameter in t.model.blocks[0].parameters():
        parameter.requires_grad_(not parameter.requires_grad)


@action
def other_shape(t: Trainer, seed: int) -> None:
    t.batch = 2 * ROWS if t.batch == ROWS else ROWS


@action
def other_argument(t: Trainer, seed: int) -> None:
    t.as_object = not t.as_object


@action
def change_state(t: Trainer, seed: int) -> None:
    global FACTOR
    FACTOR, ELSEWHERE.scale = 2.0, 0.5
    t.model.options["scale"], t.model.scales[0] = 0.75, 3.0
    t.model.config.scale = 0.25


@action
def replace_state(t: Trainer, seed: int) -> None:
    """A table that grows, and an optional tensor that comes and goes."""
    t.model.table_of_scales = torch.full((D + seed % 3,), 1.0 + 0.01 * seed)
    t.model.optional = torch.full((D,), 0.1) if t.model.optional is None else None


@action
def anneal(t: Trainer, seed: int) -> None:
    for number in range(3):
        t.model.temperature = 1.0 + 0.1 * number + 0.01 * seed
        step(t, seed + number)


@action
def other_function(t: Trainer, seed: int) -> None:
    t.model.activation = F.gelu if t.model.activation is F.silu else F.silu


@action
def reseed(t: Trainer, seed: int) -> None:
    torch.default_generator.manual_seed(seed + 1000)
    t.seen.append(torch.rand(2))


@action
def change_in_place(t: Trainer, seed: int) -> None:
    with torch.no_grad():
        t.model.totals[0].fill_(0.25)
        t.model.both.add_(0.1)


@action
def evaluate_in_inference_mode(t: Trainer, seed: int) -> None:
    t.model.eval()
    with torch.inference_mode():
        t.forward(seed)
    t.model.train()


@action
def switch_after_forward(t: Trainer, seed: int) -> None:
    loss = t.forward(seed)
    with t.no_sync():
        loss.backward()
    step(t, seed + 1)


@action
def save_and_load(t: Trainer, seed: int) -> None:
    """Also the state that is in no state dict goes back."""
    saved = copy.deepcopy(shardtrace.full_state_dict(t.model) if t.sharded else t.model.state_dict())
    step(t, seed)
    load = functools.partial(shardtrace.load_full_state_dict, t.model) if t.sharded else t.model.load_state_dict
    load(saved)
    t.look()


programs = st.lists(st.sampled_from(sorted(LINES)), min_size=1, max_size=8)
scripts = st.lists(st.sampled_from(sorted(ACTIONS)), max_size=5)
options = st.fixed_dictionaries(
    {},
    optional={
        "repeated_blocks": st.just("inline"),
        "activation_checkpointing": st.sampled_from(["full", "cheap"]),
        "recording": st.just(1),
    },
)
