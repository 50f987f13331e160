"""One training step, the same for all contenders: forward, backward, optimizer, zero_grad."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

from passes.comm import native

import torch
from torch import Tensor

from allocator import default_allocator
from contenders import Contender, World
from job import Sizes
from mixture import with_experts
from model import GPT, GPTConfig

N_BATCHES = 4  # batches, used in turn


def make_model(sizes: Sizes, device: torch.device) -> Any:
    torch.manual_seed(0)  # every rank and every contender starts from the same values
    if sizes.model == "Llama":
        from hf_llama import make_llama  # transformers takes seconds to import

        return make_llama(sizes, device)
    model = GPT(GPTConfig(sizes.layers, sizes.width, sizes.heads, sizes.seq, sizes.vocab))
    return (with_experts(model, sizes.experts) if sizes.experts else model).to(device)


def make_batches(sizes: Sizes, rank: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    data = torch.randint(sizes.vocab, (N_BATCHES, sizes.batch, sizes.seq + 1), generator=generator).to(device)
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in data]


class Training:
    """A contender with its optimizer. A call runs one step and keeps no gradient."""

    def __init__(self, contender: Contender, world: World, sizes: Sizes, batches: list[tuple[Tensor, Tensor]]) -> None:
        # SGD costs almost nothing, so that the differences between contenders stay visible
        optimizers: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        make = partial(optimizers[sizes.optimizer], lr=1e-4)
        self.model, self.optimizer = contender.start(make_model(sizes, world.device), world, make)
        self.batches = batches
        self.is_ours = contender.name.startswith("shardtrace")
        self.step = 0

    def __call__(self) -> Tensor:
        loss: Tensor = self.model(*self.batches[self.step % len(self.batches)])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_ours else default_allocator()


class Silenced:
    """A shardtrace contender on gloo that sends no messages. It is not compiled again.

    ``turn`` silences the steps inside, and restores the values of the parameters afterwards.
    """

    def __init__(self, training: Training) -> None:
        self.training = training

    def __call__(self) -> Tensor:
        return self.training()

    @contextmanager
    def turn(self) -> Iterator[None]:
        parameters = list(self.training.model.parameters())
        before = [p.detach().clone() for p in parameters]
        with mock.patch.object(native, "exchange", _send_nothing):
            yield
        with torch.no_grad():
            for p, values in zip(parameters, before, strict=True):
                p.copy_(values)


def _send_nothing(*args: object) -> list[object]:
    return []
