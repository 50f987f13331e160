"""Models of Hugging Face with a loss, built where they are to live."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from job import Sizes


class WithLoss(nn.Module):
    """A model of Hugging Face with cross entropy. ``argument`` is the name of its input."""

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model, self.argument = model, argument

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(**{self.argument: x}).logits.flatten(0, -2), y.flatten())


class Llama(WithLoss):
    """A Llama of the given sizes, with four heads of queries for one of keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        config = LlamaConfig(
            vocab_size=sizes.vocab,
            hidden_size=sizes.width,
            intermediate_size=sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=max(1, sizes.heads // 4),
            max_position_embeddings=sizes.seq,
            tie_word_embeddings=True,
            use_cache=False,
        )
        super().__init__(LlamaForCausalLM(config), "input_ids")

    @property
    def h(self) -> list[nn.Module]:
        """The blocks, by the name that they have in the GPT."""
        return list(cast(LlamaForCausalLM, self.model).model.layers)


def make_llama(sizes: Sizes, device: torch.device) -> Llama:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, sizes.dtype))  # a cast would round the frequencies of the positions, too
    try:
        with device:
            return Llama(sizes)
    finally:
        torch.set_default_dtype(before)
