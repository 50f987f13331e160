"""Models of transformers: masks made by vmap, losses made in forward, outputs that hooks collect."""

import copy

import shardtrace

import pytest
import torch
from against_eager import check
from torch import nn

transformers = pytest.importorskip("transformers", reason="pip install 'shardtrace[examples]'")

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "sliding_window": 4,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
MIXTURE = {"num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": True}


class Causal(nn.Module):
    """Passes a batch by keywords, as training scripts do."""

    def __init__(self, name, **options):
        super().__init__()
        config = transformers.AutoConfig.for_model(name, **SMALL | options)
        self.model = transformers.AutoModelForCausalLM.from_config(config)
        if "output_hidden_states" in options:
            self.double()  # their gradients are large

    def forward(self, batch):
        return self.model(**batch, use_cache=False)


def batch(step):
    tokens = torch.randint(1, 32, (2, 8))
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    return {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}


def packed(step):
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    tokens = torch.randint(1, 32, (1, 8))
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


@pytest.mark.parametrize(
    ("name", "options", "inputs"),
    [
        ("llama", {}, batch),
        ("mistral", {}, batch),
        ("qwen2", {}, packed),
        ("gemma2", {"attn_implementation": "eager"}, batch),
        ("llama", {"output_hidden_states": True}, batch),
        ("llama", {"output_attentions": True, "attn_implementation": "eager"}, batch),
        ("mixtral", MIXTURE, batch),
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 4}, batch),
    ],
    ids=["llama", "mistral", "packed", "gemma2", "hidden states", "attentions", "mixtral", "gpt2"],
)
def test_model(name, options, inputs, single_rank):
    found = shardtrace.check(lambda: Causal(name, **options), (inputs(0),))
    assert found.ok, found


def test_smoothed_labels(single_rank):
    class Smoothed(Causal):
        def forward(self, batch):
            logits = super().forward(batch).logits
            loss = nn.CrossEntropyLoss(label_smoothing=0.1)
            return loss(logits.flatten(0, 1), batch["labels"].flatten())

    check(lambda: Smoothed("llama"), lambda step: (batch(step),))


def test_a_cache_whose_length_is_read(single_rank):
    """Gemma 2 makes one in evaluation, if its config asks for it, and looks at values."""
    config = transformers.AutoConfig.for_model("gemma2", **SMALL, attn_implementation="eager")
    eager = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = shardtrace.fsdp(copy.deepcopy(eager)).eval()
    with torch.no_grad():
        for _ in range(2):
            tokens = torch.randint(0, 10, (2, 8))
            found, expected = model(input_ids=tokens), eager(input_ids=tokens)
            torch.testing.assert_close(found.logits, expected.logits)
            for name in ("key_cache", "value_cache"):
                pair = (getattr(out.past_key_values, name) for out in (found, expected))
                torch.testing.assert_close(*pair)
