"""Greedy generation with sharded models of Hugging Face, all ranks in step."""

from __future__ import annotations

from typing import Any

from shardtrace.model.state import sharded_states
from shardtrace.model.tracing import recorded
from shardtrace.ranks.failure import communicating
from shardtrace.ranks.mesh import is_alone

import thunder
import torch
import torch.distributed as dist
from torch import nn


class Generator:
    """Generates tokens with a sharded causal language model of Hugging Face, which stays sharded. ::

        generate = shardtrace.Generator(model)
        tokens = generate(prompts, max_new_tokens=20, eos_token_id=tokenizer.eos_token_id)

    Keys and values are kept in tensors of a fixed size, so that Thunder compiles one step for a shape of prompts and
    one for all tokens that follow. Each step gathers the parameters of the model, bucket by bucket. Where the whole
    model fits, ``with shardtrace.full_params(model): model.generate(...)`` is faster and does more.

    Args:
        model: the sharded model, whose attention sees all tokens before (no sliding window). Not jitted, or the result
            of ``thunder.jit``, whose module is taken.
        options: of ``thunder.jit``.

    Raises:
        ValueError: the model is not sharded, is not a causal language model of Hugging Face, or has a sliding window or
            no static cache (in transformers 4.51, GPT-2 and GPT-NeoX).
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model: Any
        self.model, states = sharded_states(model)
        self.state = states[0]
        self.config: Any = getattr(self.model, "config", None)
        if not hasattr(self.model, "generate") or not hasattr(self.config, "num_hidden_layers"):
            raise ValueError(
                f"{type(self.model).__name__} is no causal language model of Hugging Face: write your own loop, in "
                "which every rank calls the jitted model equally often"
            )
        window = getattr(self.config, "sliding_window", None) and getattr(self.config, "use_sliding_window", True)
        supports = getattr(self.model, "_supports_static_cache", getattr(self.model, "_can_compile_fullgraph", True))
        if window or not supports:
            what = "has a sliding window" if window else "takes no static cache"
            raise ValueError(
                f"{type(self.model).__name__} {what}: call model.generate inside shardtrace.full_params(model)"
            )
        self._cache = _cache_class()
        self._step = thunder.jit(self._forward, **options)

    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: int | None = None,
        pad_token_id: int = 0,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Appends the most likely tokens, one after the other. A collective: every rank must call it, each with prompts
        of its own. A rank that is done goes on with the others until all are done.

        Args:
            input_ids: prompts, (batch, length) int64. Pad shorter ones on the left.
            max_new_tokens: equal on all ranks.
            eos_token_id: ends a sequence. Its place and those after it hold it and ``pad_token_id``.
            attention_mask: (batch, length), 0 where a prompt is padded.

        Returns:
            Prompts and new tokens, (batch, length + new), where new is at most ``max_new_tokens``.
        """
        training, rows, length = self.model.training, *input_ids.shape
        device, total = input_ids.device, length + max_new_tokens
        visible = torch.ones(rows, total, dtype=torch.bool, device=device)
        if attention_mask is not None:
            visible[:, :length] = attention_mask.bool()
        keys, values = self._empty(rows, total, device)
        tokens, done = input_ids, torch.zeros(rows, dtype=torch.bool, device=device)
        slots = torch.arange(total, device=device)
        self.model.eval()
        try:
            inputs, places = input_ids, slots[:length]
            for step in range(max_new_tokens):
                mask = (slots <= places[:, None]) & visible[:, None, None, :]  # (rows, 1, inputs, total)
                positions = (visible.cumsum(-1) - 1).clamp(min=0)[:, places]
                logits, keys, values = self._step(inputs, positions, places, self._additive(mask), keys, values)
                new = torch.where(done, pad_token_id, logits.argmax(-1))
                tokens = torch.cat([tokens, new[:, None]], 1)
                done = done | (new == eos_token_id) if eos_token_id is not None else done
                if eos_token_id is not None and self._all_done(done):
                    break
                inputs, places = new[:, None], slots[length + step : length + step + 1]
        finally:
            self.model.train(training)
        return tokens

    def _forward(self, *tensors: Any) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        return _forward(self.model, self._cache, *tensors)

    def _empty(self, rows: int, total: int, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = rows, heads, total, size
        made = [torch.zeros(shape, dtype=self._dtype, device=device) for _ in range(2 * config.num_hidden_layers)]
        return made[: config.num_hidden_layers], made[config.num_hidden_layers :]

    @property
    def _dtype(self) -> torch.dtype:
        policy = self.state.options.precision
        return policy.param_dtype if policy is not None and policy.param_dtype is not None else self.model.dtype

    def _additive(self, mask: torch.Tensor) -> torch.Tensor:
        smallest = torch.finfo(self._dtype).min
        return torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill(~mask, smallest)

    def _all_done(self, done: torch.Tensor) -> bool:
        left = (~done).sum()
        if not is_alone(self.state.group):
            with communicating("the number of texts to be continued", self.state.group):
                dist.all_reduce(left, group=self.state.group)
        return not left.item()


@recorded
def _forward(
    model: Any,
    cache_class: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    mask: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    cache = cache_class(keys, values, places)
    output = model(
        input_ids=input_ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        cache_position=places,
        use_cache=True,
    )
    return output.logits[:, -1], cache.keys, cache.values


def _cache_class() -> Any:
    """A cache of transformers whose tensors are arguments and results of a step."""
    from transformers.cache_utils import Cache

    class Tensors(Cache):
        def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], places: torch.Tensor) -> None:
            self.keys, self.values, self.places = [*keys], [*values], places
            self.layers: list[Any] = []  # of transformers 4.56 and later, which have no tensors here

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, cache_kwargs: Any = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.keys[layer_idx] = torch.index_copy(self.keys[layer_idx], 2, self.places, key_states)
            self.values[layer_idx] = torch.index_copy(self.values[layer_idx], 2, self.places, value_states)
            return self.keys[layer_idx], self.values[layer_idx]

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

    return Tensors
