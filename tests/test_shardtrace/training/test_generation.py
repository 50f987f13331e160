"""Generation with sharded models of Hugging Face."""

import shardtrace

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

transformers = pytest.importorskip("transformers", reason="pip install 'shardtrace[hf]'")

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"num_hidden_layers": 1, "vocab_size": 20, "max_position_embeddings": 16}


def llama():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10)  # random models repeat one token otherwise
    return shardtrace.fsdp(model)


@on_ranks(2)
def test_the_tokens_of_generate_in_step():
    model = llama()
    assert transformers.integrations.fsdp.is_fsdp_managed_module(model)
    prompts = torch.tensor([[0, 5, 6], [7, 8, 9]]) + dist.get_rank()
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 5, "pad_token_id": 0}
    with shardtrace.full_params(model):
        assert not transformers.integrations.fsdp.is_fsdp_managed_module(model)
        model.eval()
        if dist.get_rank() == 0:  # each rank by itself
            expected = model.generate(prompts, do_sample=False, eos_token_id=None, **options)
    generate = shardtrace.Generator(model)
    found = generate(prompts, **options)
    assert not model.training
    if dist.get_rank() == 0:
        assert torch.equal(found, expected)
    # a rank that is done goes on with the other one
    said = [found[:, 3:].tolist()]
    dist.broadcast_object_list(said, src=0)
    ends = said[0][0][0]
    again = generate(prompts, eos_token_id=ends, **options)
    for row, all_tokens in zip(again[:, 3:].tolist(), found[:, 3:].tolist(), strict=True):
        end = all_tokens.index(ends) + 1 if ends in all_tokens else len(row)
        assert row == (all_tokens[:end] + [0] * 5)[: len(row)]


def test_refused(fake_ranks):
    fake_ranks(2)
    with pytest.raises(ValueError, match="Linear is not sharded"):
        shardtrace.Generator(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Linear is no causal language model"):
        shardtrace.Generator(shardtrace.fsdp(nn.Linear(2, 2)))
    config = transformers.MistralConfig(**SMALL, sliding_window=4)
    with pytest.raises(ValueError, match=r"MistralForCausalLM has a sliding window: call model\.generate inside"):
        shardtrace.Generator(shardtrace.fsdp(transformers.MistralForCausalLM(config)))
