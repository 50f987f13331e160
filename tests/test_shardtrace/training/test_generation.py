"""Generation with sharded models of Hugging Face."""

from types import SimpleNamespace

import shardtrace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from torch import nn

transformers = pytest.importorskip("transformers", reason="pip install 'shardtrace[hf]'")

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"num_hidden_layers": 1, "vocab_size": 20, "max_position_embeddings": 16}


@pytest.mark.usefixtures("single_rank")
def test_the_tokens_of_generate():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10)  # random models repeat one token otherwise
    shardtrace.fsdp(model, mp_policy="fp32")
    prompts = torch.tensor([[0, 5, 6], [7, 8, 9]])
    options = {"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]), "max_new_tokens": 5, "pad_token_id": 0}
    with shardtrace.full_params(model):
        expected = model.eval().generate(prompts, do_sample=False, eos_token_id=None, **options)
    assert torch.equal(shardtrace.Generator(model.train())(prompts, **options), expected)
    assert model.training


class Tiny(nn.Module):
    """A language model of one attention, with the interface of Hugging Face's."""

    dtype = torch.float32

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
        self.embedding, self.qkv, self.head = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 20)

    def generate(self):
        """Marks it as a model that generates."""

    def forward(self, input_ids, attention_mask, past_key_values=None, **others):
        q, k, v = self.qkv(self.embedding(input_ids))[:, None].chunk(3, -1)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, 0)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return SimpleNamespace(logits=self.head(x[:, 0]))


@on_ranks(2)
def test_all_ranks_are_in_step():
    torch.manual_seed(0)
    model = Tiny()
    with torch.no_grad():
        model.embedding.weight.mul_(5)
    shardtrace.fsdp(model)
    assert transformers.integrations.fsdp.is_fsdp_managed_module(model)
    prompts = torch.tensor([[1, 5, 6], [7, 8, 9]]) + dist.get_rank()
    expected = prompts
    with shardtrace.full_params(model), torch.no_grad():
        assert not transformers.integrations.fsdp.is_fsdp_managed_module(model)
        for _ in range(5):  # without a cache
            length = expected.shape[1]
            mask = torch.zeros(length, length).masked_fill(torch.ones(length, length).tril() == 0, -1e9)
            expected = torch.cat([expected, model(expected, mask).logits[:, -1:].argmax(-1)], 1)
    generate = shardtrace.Generator(model)
    assert torch.equal(generate(prompts, max_new_tokens=5), expected)

    said = [expected[0, 3].item()]  # the first rank's first sequence ends at once
    dist.broadcast_object_list(said, src=0)
    found = generate(prompts, max_new_tokens=5, eos_token_id=said[0], pad_token_id=0)
    for row, tokens in zip(found[:, 3:].tolist(), expected[:, 3:].tolist(), strict=True):
        end = tokens.index(said[0]) + 1 if said[0] in tokens else 5
        assert row == (tokens[:end] + [0] * 5)[: len(row)]
    lengths = torch.tensor([found.shape[1], -found.shape[1]])
    dist.all_reduce(lengths, op=dist.ReduceOp.MAX)
    assert lengths[0] == -lengths[1]


def test_refused(fake_ranks):
    fake_ranks(2)
    with pytest.raises(ValueError, match="Linear is not sharded"):
        shardtrace.Generator(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Linear is no causal language model"):
        shardtrace.Generator(shardtrace.fsdp(nn.Linear(2, 2)))
    config = transformers.MistralConfig(**SMALL, sliding_window=4)
    with pytest.raises(ValueError, match=r"MistralForCausalLM has a sliding window: call model\.generate inside"):
        shardtrace.Generator(shardtrace.fsdp(transformers.MistralForCausalLM(config)))
