from functools import partial

import shardtrace
from passes.kernels.parts import CausalAttention
from shardtrace import ContextParallel

import pytest
import thunder
import torch
import torch.nn.functional as F
from contexts import (
    Attention,
    Hidden,
    Mixture,
    Tokens,
    batch,
    hugging_face,
    inside,
    mesh_of,
    of_hugging_face,
    of_logits,
)
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from thunder.core.proxies import TensorProxy
from torch import nn
from torch.utils._pytree import tree_leaves


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(4, 2)

    def forward(self, x):
        return self.attention(x).pow(2).mean()


@pytest.fixture
def sharded(fake_ranks):
    """A model on fake ranks, one for data and four for context, unless another shape is asked for."""

    def make(model, context_parallel="context", *, shape=(1, 4), **options):
        fake_ranks(shape[0] * shape[1])
        return shardtrace.fsdp(model, mesh=mesh_of(shape), context_parallel=context_parallel, **options)

    return make


def lines_of(model):
    return [
        b for t in (thunder.last_traces(model)[-1], thunder.last_backward_traces(model)[-1]) for b in t.bound_symbols
    ]


def sent(model):
    """The collectives of sequences: kind, phase and bytes."""
    rows = shardtrace.collectives(model)
    return [(row.kind, row.phase, row.bytes) for row in rows if row.kind.endswith(("_parts", "_heads", "_positions"))]


def test_lines_of_a_tiny_model(fake_ranks):
    fake_ranks(2)
    context = ContextParallel("context", attention="gather")
    cmodel = compile_fake(Tiny, torch.ones(1, 8, 4), mesh=mesh_of((1, 2)), context_parallel=context)
    assert_expected_inline(
        text(stage(cmodel, "shard_parameters"), dels=False),
        """\
t0 = cut(x, context_dim1_of_8)
(t1,) = torch_linear_part(t0, t_attention_qkv_weight, t_attention_qkv_bias)
(t2, t3, t4) = ltorch.chunk(t1, 3, -1)
t5 = ltorch.view(t3, (1, 4, 2, 2))
t6 = ltorch.transpose(t5, 1, 2)
t7 = gather_parts(t6, context_dim2_of_8)
t8 = ltorch.view(t4, (1, 4, 2, 2))
t9 = ltorch.transpose(t8, 1, 2)
t10 = gather_parts(t9, context_dim2_of_8)
t11 = ltorch.view(t2, (1, 4, 2, 2))
t12 = ltorch.transpose(t11, 1, 2)
(y,) = torch_causal_attention_part(t12, t7, t10)
t13 = ltorch.transpose(y, 1, 2)
t14 = ltorch.reshape(t13, (1, 4, 4))
(t15,) = torch_linear_part_2(t14, t_attention_out_weight, t_attention_out_bias)
(t16,) = torch_pow_part(t15)
(t17,) = torch_mean_part(t16)
t18 = sum_parts(t17, context_ranks)
t19 = ltorch.mul(t18, 0.5)
t20 = to_output(t19, context_ranks)
return {'output': (t20,), 'flat_args': [x, t_attention_out_bias, t_attention_out_weight, t_attention_qkv_bias, t_attention_qkv_weight]}""",
    )


def test_keys_and_values_are_sent_before_heads_are_repeated(sharded):
    """They are gathered in forward and once more for backward; their gradients are reduced once."""
    model = sharded(hugging_face("Llama"), ContextParallel("context", attention="gather"))
    of_hugging_face(model, *batch(0, 16), use_cache=False).backward()
    of_keys = 2 * 2 * 16 * 4 * 4  # rows, key heads, positions, width of a head, bytes
    gathers = [row for row in sent(model) if row[2] == of_keys and row[0] != "all_reduce_parts"]
    assert sorted(gathers) == [
        *[("all_gather_parts", "backward", of_keys)] * 2,
        *[("all_gather_parts", "forward", of_keys)] * 2,
        *[("reduce_scatter_parts", "backward", of_keys)] * 2,
    ]


def test_a_long_sequence_makes_no_square_of_positions(sharded, monkeypatch):
    monkeypatch.setattr(CausalAttention, "__call__", lambda self, query, key, value, **options: query * 1)
    length = 131072
    model = sharded(hugging_face("Llama"), ContextParallel("context", attention="gather"), shape=(1, 64))
    tokens = torch.zeros(1, length, dtype=torch.long)
    model(input_ids=tokens, labels=tokens, use_cache=False)
    sizes = [v.numel for b in lines_of(model) for v in tree_leaves((b.args, b.output)) if isinstance(v, TensorProxy)]
    assert max(sizes) <= length * 32  # the logits that it returns


def test_exchanged_heads_are_sent_once_in_each_direction(sharded):
    """And once more the result of attention, of which backward needs both layouts and forward saves one."""
    model = sharded(Tokens(heads=4, layers=1), ContextParallel("context", attention="ulysses"))
    of_logits(model, *batch(0, 16)).backward()
    share = 2 * 16 * 16 * 4 // 4  # rows, positions, width, bytes; of four ranks
    assert sorted(row for row in sent(model) if row[0].startswith("all_to_all")) == [
        *[("all_to_all_heads", "backward", share)],
        *[("all_to_all_heads", "forward", share)] * 3,
        *[("all_to_all_positions", "backward", share)] * 4,
        *[("all_to_all_positions", "forward", share)],
    ]


@pytest.mark.parametrize("attention", ["gather", "ulysses"])
def test_activations_are_those_of_a_part(sharded, attention):
    def saved(ranks):
        model = Tokens(width=64, heads=4, layers=4)
        context = ContextParallel("context", attention=attention)
        shardtrace.fsdp(model, mesh=mesh_of((8 // ranks, ranks)), context_parallel=context)
        tokens = torch.zeros(1, 1024, dtype=torch.long)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        return max(line.saved for line in shardtrace.memory(model).forward.lines)

    sharded(nn.Linear(2, 2), shape=(8, 1))
    assert saved(4) == pytest.approx(saved(1) / 4, rel=0.01)


# ---- what is refused ----


class PositionDropout(Tokens):
    def __init__(self):
        super().__init__(layers=1)
        self.position = nn.Embedding(16, 16)

    def forward(self, x):
        position = F.dropout(self.position(torch.arange(x.shape[1])), 0.1)
        return self.head(self.embedding(x) + position)


def test_tokens_of_experts_are_sent_once_in_each_direction(sharded):
    """Each rank has all tokens, and a part of the middle dimension of each expert. Their weights and choices, and the
    three numbers of the loss, are small."""
    model = sharded(Mixture(), shape=(1, 2))
    inside(model, *batch(0, 12)).backward()
    tokens = 2 * 12 * 8 * 4
    large = [(kind, phase) for kind, phase, size in sent(model) if size >= tokens]
    assert large == [
        ("all_gather_parts", "forward"), ("reduce_scatter_parts", "forward"),
        ("all_gather_parts", "backward"), ("all_gather_parts", "backward"), ("reduce_scatter_parts", "backward"),
    ]  # fmt: skip
    products = [b for b in lines_of(model) if "grouped" in b.sym.name and "backward" not in b.sym.name]
    assert [b.args[1].shape for b in products] == [(4, 8, 16), (4, 8, 8)]  # of matrices of 32 and 16
    parts = [row.bytes for row in shardtrace.collectives(model) if row.bucket == "experts" and row.kind == "all_gather"]
    assert parts == [4 * 48 * 8 * 4 // 2] * 2  # half of the experts, in each direction
    saved = thunder.last_traces(model)[-1].bound_symbols[-1].flat_proxy_args
    assert (2 * 12, 8) not in {t.shape for t in saved if isinstance(t, TensorProxy)}  # the tokens of all ranks


def test_random_numbers_of_whole_values_are_those_of_the_first_rank(sharded):
    model = sharded(PositionDropout())
    model(batch(0, 16)[0])
    assert shardtrace.prove(model).verdict == "proven"


def test_arguments_without_a_sequence_are_refused(sharded):
    model = sharded(nn.Linear(4, 4), ContextParallel("context", sequence_dim=2))
    with pytest.raises(RuntimeError, match=r"has a dimension 2 .* are \(3, 4\): pass the dimension of the sequence as"):
        model(torch.ones(3, 4))


def test_short_sequences_are_remarked(sharded):
    model = sharded(Tokens(layers=1))
    model(batch(0, 3)[0])
    assert "arguments of shapes (2, 3) are too short to be split" in "".join(map(str, thunder.last_traces(model)))


def test_uneven_parts_of_results_are_refused(sharded):
    model = sharded(Tokens(layers=1), ContextParallel("context", returns="part"))
    with pytest.raises(RuntimeError, match=r"divide into 8 chunks, and this one has 13 positions: pad the batch, or"):
        model(batch(0, 13)[0])


@pytest.mark.parametrize("whole_first", [True, False])
def test_models_that_split_otherwise_are_refused(sharded, whole_first):
    models = [sharded(Hidden()), shardtrace.fsdp(Hidden())]
    step = thunder.jit(lambda one, other, x: one(x) + other(x))
    with pytest.raises(
        RuntimeError, match=r"Hidden is computed together with a model that splits .* pass the same mesh"
    ):
        step(*(reversed(models) if whole_first else models), torch.ones(2, 16, 16))


@pytest.mark.parametrize("strategy", ["hybrid_zero3", "hybrid_zero2", "zero3_secondary"])
def test_hybrid_strategies_are_refused(sharded, strategy):
    with pytest.raises(ValueError, match=r'cannot be combined with a hybrid strategy .*choose "zero3"'):
        sharded(Tokens(), shape=(2, 2), sharding_strategy=strategy)


@pytest.mark.parametrize("name", ["sequence", ContextParallel("cp")])
def test_meshes_without_the_dimension_are_refused(sharded, name):
    with pytest.raises(ValueError, match=r"needs a DeviceMesh that has a dimension of this name, not one of \('data'"):
        sharded(Tokens(), name)


def test_a_mesh_is_needed(fake_ranks):
    fake_ranks(2)
    with pytest.raises(ValueError, match=r"needs a DeviceMesh that has a dimension of this name, not None: pass mesh="):
        shardtrace.fsdp(Tokens(), context_parallel="context")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (partial(ContextParallel, "context", sequence_dim=-1), "sequence_dim must be the number of a dimension"),
        (partial(ContextParallel, "context", returns="all"), 'returns must be "whole" or "part"'),
        (partial(ContextParallel, "context", attention="ring"), 'attention must be "auto", "gather" or "ulysses"'),
        (partial(ContextParallel, 3), "mesh_dim must be the name"),
        (partial(shardtrace.fsdp, Tokens(), context_parallel=3), "context_parallel must be the name"),
    ],
)
def test_wrong_options_are_refused(fake_ranks, given, error):
    fake_ranks(2)
    with pytest.raises((TypeError, ValueError), match=error):
        given()
