"""``save_pretrained`` of Hugging Face's libraries: whole values, or an error."""

import json

import shardtrace

import pytest
from torch import nn


class Saved(nn.Module):
    """Like transformers: without a ``state_dict`` argument it saves ``state_dict()``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def save_pretrained(self, path, state_dict=None):
        return path, state_dict or self.state_dict()


class Outer(nn.Module):
    """Like diffusers: no ``state_dict`` argument. All of its parameters are in submodules."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Saved()])

    def save_pretrained(self, path):
        return path, self.state_dict()


class Adapted(Saved):
    """Like peft: it takes the state dict among other keywords."""

    def save_pretrained(self, path, **kwargs):
        return path, kwargs.get("state_dict") or self.state_dict()


@pytest.mark.parametrize("strategy", ["zero3", "owner"])
def test_shards_are_not_written(fake_ranks, strategy):
    fake_ranks(2)
    model = shardtrace.fsdp(Outer(), sharding_strategy=strategy)
    inside = r"call it inside shardtrace.full_params\(model\), on one rank"
    with pytest.raises(RuntimeError, match=f"save_pretrained would write this rank's shards of Outer: {inside}"):
        model.save_pretrained("here")
    with pytest.raises(RuntimeError, match=rf"shards of Saved: pass state_dict=shardtrace.full_state_dict.*{inside}"):
        model.inner[0].save_pretrained("here")
    values = {"linear.weight": 0}
    assert model.inner[0].save_pretrained("here", values) == ("here", values)
    adapted = shardtrace.fsdp(Adapted(), sharding_strategy=strategy)
    assert adapted.save_pretrained("here", state_dict=values) == ("here", values)
    with shardtrace.full_params(model):
        assert model.save_pretrained("here")[1]["inner.0.linear.weight"].shape == (4, 4)


def test_what_is_whole_is_written(fake_ranks):
    fake_ranks(2)
    assert shardtrace.ddp(Saved()).save_pretrained("here")[1]["linear.weight"].shape == (4, 4)


def test_in_a_world_of_one(single_rank):
    assert shardtrace.fsdp(Saved()).save_pretrained("here")[1]["linear.weight"].shape == (4, 4)


def test_the_architecture_that_transformers_writes(single_rank, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=16)
    model = shardtrace.fsdp(transformers.GPT2LMHeadModel(config))
    model.save_pretrained(tmp_path, state_dict=shardtrace.full_state_dict(model))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
