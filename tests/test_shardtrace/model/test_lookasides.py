"""What Thunder traces in place of functions that it cannot interpret: masks of transformers, losses built in forward."""

import sys
import types

import shardtrace

import pytest
import thunder
import torch
from torch import nn


def causal_mask_function(batch, head, query, key):
    return key <= query


def refuse_vmap(*args, **kwargs):
    raise AssertionError("not replaced")


def ignore_causal_mask(padding_mask, query_length, kv_length, kv_offset, local_size=None):
    return (padding_mask is None or bool(padding_mask.all())) and (local_size is None or kv_length < local_size)


def find_packed_sequence_indices(position_ids):
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


class Outputs:
    """As in transformers 5."""

    def set(self, value):
        raise AssertionError("not replaced")

    def get(self):
        raise AssertionError("not replaced")

    def reset(self, token):
        raise AssertionError("not replaced")


@pytest.fixture
def masking(monkeypatch):
    """The names of transformers that are replaced, in modules of our own."""
    masks, outputs = (types.ModuleType(f"transformers.{name}") for name in ("masking_utils", "utils.output_capturing"))
    masks.causal_mask_function = causal_mask_function
    masks.sdpa_mask_recent_torch = types.FunctionType(refuse_vmap.__code__, globals())
    masks._ignore_causal_mask_sdpa = types.FunctionType(ignore_causal_mask.__code__, globals(), argdefs=(None,))
    masks.find_packed_sequence_indices = types.FunctionType(find_packed_sequence_indices.__code__, globals())
    outputs.CompileableContextVar = type("Variable", (), {n: getattr(Outputs, n) for n in ("set", "get", "reset")})
    monkeypatch.setitem(sys.modules, masks.__name__, masks)
    monkeypatch.setitem(sys.modules, outputs.__name__, outputs)
    return masks, outputs.CompileableContextVar()


class Attention(nn.Module):
    """Attention with a mask from a module of ``transformers``, and a loss that forward builds."""

    def __init__(self, masks, collector):
        super().__init__()
        self.masks, self.collector = masks, collector
        self.linear = nn.Linear(4, 4)

    def mask(self, x, attention_mask, position_ids):
        positions = torch.arange(x.shape[1])
        ids = positions.unsqueeze(0) if position_ids is None else position_ids
        packed = self.masks.find_packed_sequence_indices(ids.expand(x.shape[0], -1))
        mask = self.masks.sdpa_mask_recent_torch(
            batch_size=x.shape[0],
            cache_position=positions,
            kv_length=x.shape[1],
            mask_function=lambda b, h, q, k: (k <= q) & (k > q - 3),
            attention_mask=attention_mask,
            local_size=3,
            dtype=torch.float32,
        )
        return mask if packed is None else mask & (packed[:, None, :, None] == packed[:, None, None, :])

    def forward(self, x, labels, attention_mask=None, position_ids=None, outputs=()):
        token = self.collector.set({name: [] for name in outputs})
        mask = self.mask(x, attention_mask, position_ids)
        y = self.linear(x)[:, None]
        y = nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask)[:, 0]
        self.collector.reset(token)
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        return loss(y.flatten(0, 1), labels.flatten())


class Plain(Attention):
    """The same without modules of transformers."""

    def mask(self, x, attention_mask, position_ids):
        n = x.shape[1]
        q, k = torch.arange(n)[:, None], torch.arange(n)
        mask = ((k <= q) & (k > q - 3)).expand(x.shape[0], 1, n, n)
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :]
        packed = torch.zeros(x.shape[:2]) if position_ids is None else find_packed_sequence_indices(position_ids)
        return mask & (packed[:, None, :, None] == packed[:, None, None, :])


class Ignored:
    def set(self, value):
        return None

    get = reset = set


@pytest.mark.parametrize("case", ["plain", "padded", "packed"])
def test_masks_without_vmap(single_rank, masking, case):
    torch.manual_seed(0)
    model = Attention(*masking)
    eager = Plain(None, Ignored())
    eager.load_state_dict(model.state_dict())
    x, labels = torch.randn(2, 6, 4), torch.randint(0, 4, (2, 6))
    given = {}
    if case == "padded":
        given["attention_mask"] = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool()
    if case == "packed":
        given["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    cmodel = thunder.jit(shardtrace.fsdp(model))
    loss, expected = cmodel(x, labels, **given), eager(x, labels, **given)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(model.linear.weight.grad, eager.linear.weight.grad)


def test_outputs_that_hooks_would_collect(single_rank, masking, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="5.0"))
    cmodel = thunder.jit(shardtrace.fsdp(Attention(*masking)))
    with pytest.raises(Exception, match=r"Thunder cannot trace output_hidden_states, which transformers 5\.0 collects"):
        cmodel(torch.randn(2, 6, 4), torch.zeros(2, 6, dtype=torch.long), outputs=("hidden_states",))


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "sliding_window": 4,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_models_of_transformers(single_rank, name):
    """With padding and sliding windows."""
    transformers = pytest.importorskip("transformers", reason="pip install 'shardtrace[examples]'")
    pytest.importorskip("transformers.masking_utils", reason="transformers before 4.53 has no masks by vmap")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(1, 64, (2, 8))
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}
    expected = model(**batch, use_cache=False).loss
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    loss = thunder.jit(shardtrace.fsdp(model))(**batch, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, gradients)
