"""Models that Thunder cannot trace: the error says which module and which line. A model's own errors stay as they are."""

import shardtrace
from passes.compat import notes_of

import pytest
import thunder
import torch
from torch import nn

X = torch.randn(2, 4)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)


class Branch(Part):
    def forward(self, x):
        x = self.fc(x)
        if x.sum() > 0:
            return x
        return -x


class Unknown(Part):
    def forward(self, x):
        return torch.bincount(self.fc(x).long().flatten())


class Generator(Part):
    def forward(self, x):
        return sum(row for row in self.rows(self.fc(x)))

    def rows(self, x):
        yield x.no_such_method()


class Recovers(Part):
    def forward(self, x):
        try:
            x.no_such_method()
        except AttributeError:
            x = self.fc(x)
        return x.tolist()


class Refuses(Part):
    def forward(self, x):
        if x.shape[0] != 3:
            raise ValueError("not three rows")
        return self.fc(x)


class Replaces(Part):
    def forward(self, x):
        try:
            return self.fc(x).no_such_method()
        except AttributeError as error:
            raise KeyError("no such method") from error


def error_of(model, *args):
    cmodel = thunder.jit(shardtrace.fsdp(model))
    try:
        cmodel(*args)
    except Exception as error:
        return error
    raise AssertionError("it was traced")


def text_of(error):
    """The message with its notes, which Python 3.10 has in the message."""
    return f"{error}{notes_of(error)}"


@pytest.mark.parametrize(
    ("cls", "error", "function", "line"),
    [
        (Branch, NotImplementedError, "forward", "if x.sum() > 0:"),
        (Unknown, NotImplementedError, "forward", "return torch.bincount(self.fc(x).long().flatten())"),
        (Generator, AttributeError, "rows", "yield x.no_such_method()"),
        (Recovers, NotImplementedError, "forward", "return x.tolist()"),
    ],
)
def test_module_and_line(fake_ranks, cls, error, function, line):
    fake_ranks(2)
    found = error_of(nn.Sequential(nn.Linear(4, 4), nn.Sequential(cls())), X)
    assert isinstance(found, error)
    place, source, hint = text_of(found).split("\n")[-3:]
    assert place.startswith(f"Thunder was tracing 1.0 ({cls.__name__}) of Sequential, at {__file__}:")
    assert place.endswith(f" in {function}:")
    assert source == f"    {line}"
    assert "docs/guide.md#models-that-thunder-cannot-trace" in hint


@pytest.mark.parametrize(("cls", "error"), [(Refuses, ValueError), (Replaces, KeyError)])
def test_errors_of_the_model_stay_as_they_are(fake_ranks, cls, error):
    fake_ranks(2)
    found = error_of(nn.Sequential(nn.Linear(4, 4), cls()), X)
    assert type(found) is error
    assert "Thunder" not in text_of(found)


def test_in_a_jitted_function(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(Branch())
    with pytest.raises(NotImplementedError) as info:
        thunder.jit(lambda x: model(x).sum())(X)
    assert "Thunder was tracing Branch, at" in text_of(info.value)


def test_weights_in_a_list(fake_ranks):
    """The list of an nn.LSTM keeps the shards. Thunder wraps such an error, and the note is that of its cause."""
    fake_ranks(2)
    found = error_of(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), X)
    assert "parameter '1.weight_ih_l0' of Sequential is used outside the forward" in str(found)
    assert "or through a list of its own, as in nn.LSTM" in str(found)
    assert "Thunder was tracing 1 (LSTM) of Sequential, at" in text_of(found)


def test_mixtral(fake_ranks):
    transformers = pytest.importorskip("transformers")
    fake_ranks(2)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_local_experts": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, use_cache=False))
    found = error_of(model, torch.zeros(1, 4, dtype=torch.long))
    assert "torch.where() does not support only specifying a condition" in str(found)
    assert "tracing model.layers.0.block_sparse_moe (MixtralSparseMoeBlock) of MixtralForCausalLM" in text_of(found)
    assert "torch.where(expert_mask[expert_idx])" in text_of(found)
