"""The lines of models whose ranks compute with parts of parameters."""

import shardtrace
from shardtrace import CompilePolicy, TensorParallel

import pytest
import thunder
import torch
import torch.nn.functional as F
from contexts import Attention, Mixture, Shared, Tokens, mesh_of
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from torch import nn
from torch.utils._pytree import tree_leaves


class MLP(nn.Module):
    def __init__(self, width=4, middle=8, between=F.gelu):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(width, middle), nn.Linear(middle, width), between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


class Grouped(nn.Module):
    """Attention in which two heads of queries share one of keys and values."""

    def __init__(self, heads=4, shared=2, size=2):
        super().__init__()
        self.heads, self.shared, width = heads, shared, heads * size
        self.q, self.k, self.v = (nn.Linear(width, n * size, bias=False) for n in (heads, shared, shared))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            layer(x).view(b, t, n, -1).transpose(1, 2)
            for layer, n in ((self.q, self.heads), (self.k, self.shared), (self.v, self.shared))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.fixture
def compiled(fake_ranks):
    """A step of a model on fake ranks, one for data and two for tensors, unless another number is asked for."""

    def make(build, *inputs, tensor="tensor", ranks=2, **options):
        fake_ranks(ranks)
        return compile_fake(build, *inputs, mesh=mesh_of((1, ranks), "tensor"), tensor_parallel=tensor, **options)

    return make


def cuts(cmodel):
    """The parts of parameters with which a step computes: the name of each, and its part."""
    lines = [b for b in stage(cmodel, "shard_parameters").bound_symbols if b.sym.name == "cut"]
    return {b.args[0].name.removeprefix("t_"): b.args[1].name.removeprefix("tensor_") for b in lines}


def remarks(cmodel):
    return "".join(str(t.get_provenance()) for t in thunder.last_traces(cmodel))


def test_lines_of_an_mlp(compiled):
    assert_expected_inline(
        text(stage(compiled(MLP, torch.ones(3, 4)), "shard_parameters"), dels=False),
        """\
t0 = cut(t_up_weight, tensor_dim0_of_2x4)
t1 = cut(t_up_bias, tensor_dim0_of_2x4)
(t2,) = torch_linear_part(x, t0, t1)
(t3,) = torch_gelu_part(t2)
t4 = cut(t_down_weight, tensor_dim1_of_2x4)
(t5,) = torch_linear_part_2(t3, t4)
t6 = sum_parts(t5, tensor_ranks)
t7 = ltorch.add(t6, t_down_bias, alpha=1)
t8 = to_output(t7, tensor_ranks)
return {'output': (t8,), 'flat_args': [x, t_down_bias, t_down_weight, t_up_bias, t_up_weight]}""",
    )


def test_heads_of_attention(compiled):
    cmodel = compiled(lambda: Attention(16, 4), torch.ones(2, 3, 16))
    assert cuts(cmodel) == {"qkv_weight": "dim0_of_3x2x8", "qkv_bias": "dim0_of_3x2x8", "out_weight": "dim1_of_2x8"}
    assert shardtrace.prove(cmodel).verdict == "proven"


def test_parts_are_shown(compiled):
    """A split dim is printed as 8 of 16, and so the inspector has it."""
    cmodel = compiled(lambda: Attention(16, 4), torch.ones(2, 3, 16))
    lines = [line for stage in shardtrace.inspect(cmodel).stages for line in stage.lines]
    types = {kind.text for line in lines for kind in line.template.types if kind}
    assert {"cpu f32[16, 8 of 16]", "cpu f32[24 of 48, 16]", "cpu f32[2, 3, 24 of 48]"} <= types
    assert "cpu f32[2, 3, 24 of 48]" in str(thunder.last_traces(cmodel)[-1])


def test_heads_that_share_keys_and_values(compiled):
    cmodel = compiled(Grouped, torch.ones(2, 3, 8))
    assert cuts(cmodel) == {
        "q_weight": "dim0_of_2x4", "k_weight": "dim0_of_2x2", "v_weight": "dim0_of_2x2", "out_weight": "dim1_of_2x4"
    }  # fmt: skip
    assert shardtrace.prove(cmodel).verdict == "proven"


@pytest.mark.parametrize(
    ("build", "qkv"),
    [
        (lambda: Shared(16, 4, 2), "dim0_of_2_1_1x2x4"),  # as litgpt writes it
        (lambda: Shared(16, 4, 4, by="slices"), "dim0_of_3x2x8"),  # as Phi-3 does
        (lambda: Shared(16, 4, 2, by="slices"), "dim0_of_2_1_1x2x4"),  # as Phi-4 does
    ],
)
def test_keys_that_queries_share_in_one_matrix(compiled, build, qkv):
    cmodel = compiled(build, torch.ones(2, 3, 16))
    assert cuts(cmodel) == {"qkv_weight": qkv, "qkv_bias": qkv, "out_weight": "dim1_of_2x8"}
    assert shardtrace.prove(cmodel).verdict == "proven"


def test_a_matrix_is_whole_if_slices_of_several_sizes_leave_some_of_it(compiled):
    cmodel = compiled(lambda: Shared(16, 4, 2, by="slices", unread=4), torch.ones(2, 3, 16))
    assert "no parameter is split" in remarks(cmodel)


def copied(keys, shared):
    keys[..., :2].copy_(shared[0])
    keys[..., 2:].copy_(shared[1])


def assigned(keys, shared):
    keys[..., :2], keys[..., 2:] = shared


def narrowed(keys, shared):
    for start, value in zip((0, 2), shared, strict=True):
        keys.narrow(-1, start, value.shape[-1]).copy_(value)


class Latent(nn.Module):
    """Keys of four heads are written from two values, one of which all heads share, as in DeepSeek's attention."""

    def __init__(self, write):
        super().__init__()
        self.q, self.kv, self.rot = (nn.Linear(8, n, bias=False) for n in (16, 24, 2))
        self.out, self.write = nn.Linear(16, 8, bias=False), write

    def forward(self, x):
        b, t, _ = x.shape
        q, kv = (layer(x).view(b, t, 4, -1).transpose(1, 2) for layer in (self.q, self.kv))
        k, v = kv.split([2, 4], -1)
        keys = kv.new_empty(b, 4, t, 4)
        self.write(keys, (k, self.rot(x).view(b, 1, t, 2).expand(-1, 4, -1, -1)))
        return self.out(F.scaled_dot_product_attention(q, keys, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("write", [copied, assigned, narrowed])
def test_values_that_are_written_in_slices(compiled, write):
    cmodel = compiled(lambda: Latent(write), torch.ones(2, 3, 8))
    weights = {name: part for name, part in cuts(cmodel).items() if name.endswith("weight")}
    assert weights == {"q_weight": "dim0_of_2x8", "kv_weight": "dim0_of_2x12", "out_weight": "dim1_of_2x8"}
    assert shardtrace.prove(cmodel).verdict == "proven"


needs_grouped = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped products")
MIXTURES = {  # of experts, and how the matrix of their gates is cut
    "grouped": ({}, {"mp_policy": "bf16"}, "dim1_of_2x2x8"),  # weights of routing are float32
    "batched": ({"turns": True, "grouped": False}, {}, "dim1_of_2x16"),
}


@needs_grouped
@pytest.mark.parametrize("name", MIXTURES)
def test_experts(compiled, name):
    how, options, gates = MIXTURES[name]
    tokens = torch.ones(4, 5, dtype=torch.long)
    policy = CompilePolicy(returns="loss")
    cmodel = compiled(lambda: Mixture(**how), tokens, tokens, compile_policy=policy, **options)
    biases = {"experts_up_bias": gates} if how else {}
    assert {k: v for k, v in cuts(cmodel).items() if "experts" in k} == {
        "experts_up": gates, "experts_down": "dim2_of_2x8", **biases
    }  # fmt: skip
    assert "each rank computes the whole products with experts.router.weight" in remarks(cmodel)
    sent = [(row.kind, row.bytes) for row in shardtrace.collectives(cmodel) if row.bucket.startswith("tensor")]
    rows, numbers = 4 * 5 * 8 * (2 if options else 4), 4 * 5 * 3 * 2 * 4
    assert sent == [  # one sum: of all experts of a token, and the one that tokens share
        ("reduce_scatter_parts", rows), ("all_gather_parts", rows), ("all_gather_parts", numbers),
        ("reduce_scatter_parts", numbers), ("reduce_scatter_parts", rows), ("all_gather_parts", rows),
    ]  # fmt: skip
    assert shardtrace.prove(cmodel).verdict == "proven"


@needs_grouped
def test_experts_whose_parts_torch_would_refuse_are_whole(compiled):
    """Strides of grouped products are multiples of 16 bytes."""
    tokens = torch.ones(2, 3, dtype=torch.long)
    assert not [k for k in cuts(compiled(Mixture, tokens, tokens, ranks=8)) if "experts" in k]


def test_more_ranks_than_shared_heads(compiled):
    cmodel = compiled(lambda: Grouped(heads=4, shared=2), torch.ones(2, 3, 8), ranks=4)
    assert cuts(cmodel) == {}


def test_blocks_are_compiled_once(compiled):
    model = compiled(lambda: Tokens(layers=3), torch.ones(2, 3, dtype=torch.long))
    assert len(cuts(model)) == 10
    assert "is compiled once for 3 calls" in remarks(model)
    assert "each rank computes the whole products with layers.*.up.weight, head.weight" in remarks(model)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(4, 4), (2, 4)),
        (lambda: MLP(middle=7), (2, 4)),
        (lambda: MLP(between=lambda h: F.layer_norm(h, (8,))), (2, 4)),
        (lambda: MLP(between=lambda h: h.flip(-1)), (2, 4)),
        (lambda: Attention(6, 3), (2, 3, 6)),
    ],
    ids=["one product", "odd", "norm between", "mixed between", "three heads"],
)
def test_nothing_to_split(compiled, build, shape):
    cmodel = compiled(build, torch.ones(shape))
    assert cuts(cmodel) == {}
    assert "no parameter is split over the 2 ranks of tensor_parallel" in remarks(cmodel)
    assert shardtrace.prove(cmodel).verdict == "proven"


class Read(MLP):
    """A value between the products is also read elsewhere."""

    def forward(self, x):
        h = self.up(x)
        return self.down(h) + h.std(-1, keepdim=True)


def test_a_value_that_others_read_is_whole(compiled):
    assert cuts(compiled(Read, torch.ones(2, 4))) == {}


class Returned(MLP):
    def forward(self, x):
        h = self.up(x)
        return self.down(h).sum(), h


def test_a_value_that_is_returned_is_gathered(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(Returned(), mesh=mesh_of((1, 2), "tensor"), tensor_parallel="tensor"))
    total, h = cmodel(torch.ones(2, 4))
    (total + h.sum()).backward()
    assert h.shape == (2, 8)
    assert len(cuts(cmodel)) == 3
    assert shardtrace.prove(cmodel).verdict == "proven"


# ---- parts of a vocabulary ----


class Language(nn.Module):
    """Tokens and labels (B, T) to a loss. Embedding and head are tied, logits are capped, labels are shifted."""

    def __init__(self, vocabulary=32, loss=F.cross_entropy, returns=None):
        super().__init__()
        self.wte, self.head = nn.Embedding(vocabulary, 8, padding_idx=3), nn.Linear(8, vocabulary, bias=False)
        self.head.weight, self.loss, self.returns = self.wte.weight, loss, returns

    def forward(self, x, y):
        logits = self.head(self.wte(x)).float()[:, :-1]
        logits = 3 * torch.tanh(logits / 3)
        loss = self.loss(logits.flatten(0, 1), y[:, 1:].flatten())
        return loss if self.returns is None else (loss, self.returns(logits))


TOKENS = torch.ones(2, 6, dtype=torch.long)


def test_lines_of_a_loss_on_parts_of_a_vocabulary(compiled):
    cmodel = compiled(Language, TOKENS, TOKENS)
    assert_expected_inline(
        text(stage(cmodel, "shard_parameters"), dels=False),
        """\
t0 = cut(t_wte_weight, tensor_dim0_of_2x16)
(t1,) = torch_embedding_part(x, t0)
t2 = scatter_parts(t1, tensor_dim0_of_2)
t3 = gather_parts(t2, tensor_dim0_of_2)
(t4,) = torch_linear_part(t3, t0)
logits = ltorch.getitem(t4, (slice(None,None,None), slice(None,-1,None), slice(None,None,None)))
(t5,) = torch_div_part(logits)
(t6,) = torch_tanh_part(t5)
(t7,) = torch_mul_part(t6)
t8 = ltorch.flatten(t7, 0, 1)
t9 = ltorch.getitem(y, (slice(None,None,None), slice(1,None,None)))
t10 = ltorch.flatten(t9, 0, -1)
(t11,) = torch_loss_part(t8, t10)
t12 = gather_parts(t11, tensor_dim1_of_2x3)
(loss,) = torch_cross_entropy_part(t12, t10)
t13 = to_output(loss, tensor_ranks)
return {'output': (t13,), 'flat_args': [x, y, t_wte_weight]}""",
    )
    assert shardtrace.prove(cmodel).verdict == "proven"
    sent = [(row.kind, row.phase, row.bytes) for row in shardtrace.collectives(cmodel) if row.kind.endswith("_parts")]
    rows, numbers = 2 * 6 * 8 * 4, 2 * 5 * 2 * 3 * 4
    assert sent == [
        ("reduce_scatter_parts", "forward", rows), ("all_gather_parts", "forward", rows),
        ("all_gather_parts", "forward", numbers), ("reduce_scatter_parts", "backward", numbers),
        ("reduce_scatter_parts", "backward", rows), ("all_gather_parts", "backward", rows),
    ]  # fmt: skip


def test_a_small_table_is_whole_beside_a_head_that_is_cut(compiled):
    cmodel = compiled(lambda: Language(vocabulary=16), TOKENS, TOKENS)
    lines = {b.sym.name for b in stage(cmodel, "shard_parameters").bound_symbols}
    assert lines >= {"torch_embedding_0", "cut", "torch_loss_part"}
    assert "sum_parts" not in lines
    assert shardtrace.prove(cmodel).verdict == "proven"


@pytest.mark.parametrize(
    "options",
    [
        {"vocabulary": 33},
        {"returns": lambda logits: logits},
        {"returns": lambda logits: logits.logsumexp(-1).square().mean()},
        {"loss": lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1)},
        {"loss": lambda logits, labels: F.cross_entropy(logits, labels, torch.arange(32.0))},
        {"loss": lambda logits, labels: F.cross_entropy(logits, F.one_hot(labels, 32).float())},
        {"loss": lambda logits, labels: F.nll_loss(logits.log_softmax(-1), labels)},
    ],
    ids=["odd", "returned", "read", "smoothed", "weighted", "probabilities", "nll"],
)
def test_losses_of_whole_logits(fake_ranks, options):
    fake_ranks(2)
    model = shardtrace.fsdp(Language(**options), mesh=mesh_of((1, 2), "tensor"), tensor_parallel="tensor")
    cmodel = thunder.jit(model)
    loss, *_ = tree_leaves(cmodel(TOKENS, TOKENS))
    loss.backward()
    lines = {b.sym.name for b in stage(cmodel, "shard_parameters").bound_symbols}
    assert not lines & {"torch_loss_part", "gather_parts"}
    assert shardtrace.prove(cmodel).verdict == "proven"


# ---- what the user says ----


def test_parameters_that_the_user_cuts(compiled):
    how = TensorParallel("tensor", {"up.*": "rowwise", "down.*": "colwise"})
    cmodel = compiled(MLP, torch.ones(2, 4), tensor=how)
    assert cuts(cmodel) == {
        "up_weight": "dim1_of_2x2", "x": "dim1_of_2x2", "down_weight": "dim0_of_2x2", "down_bias": "dim0_of_2x2"
    }  # fmt: skip
    assert shardtrace.prove(cmodel).verdict == "proven"


def test_parameters_that_the_user_leaves_whole(compiled):
    assert cuts(compiled(MLP, torch.ones(2, 4), tensor=TensorParallel("tensor", {"up.*": "whole"}))) == {}


class WithTable(MLP):
    def __init__(self, **options):
        super().__init__(**options)
        self.table = nn.Parameter(torch.ones(2, 4))

    def forward(self, x):
        return super().forward(x + self.table)


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"table": "colwise"}, "'table' is to be colwise, and is not the matrix of a product"),
        ({"up.weight": "colwise"}, "dim 0 of 7 does not divide by 2 ranks"),
        ({"middle.*": "whole"}, "no parameter matches 'middle.*' of tensor_parallel"),
    ],
)
def test_parameters_that_cannot_be_cut(compiled, parameters, error):
    with pytest.raises((RuntimeError, ValueError), match=error.replace("*", r"\*").replace(".", r"\.")):
        compiled(lambda: WithTable(middle=7), torch.ones(2, 4), tensor=TensorParallel("tensor", parameters))


# ---- refusals ----


class Dropping(MLP):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


def test_random_numbers_of_whole_values_are_drawn_in_parts(compiled):
    cmodel = compiled(Dropping, torch.ones(3, 4))
    lines = [b.sym.name for b in stage(cmodel, "shard_parameters").bound_symbols]
    assert lines[-5:] == ["cut", "dropout", "gather_parts", "to_output", "python_return"]
    assert shardtrace.prove(cmodel).verdict == "proven"


def test_random_numbers_that_do_not_divide_are_those_of_the_first_rank(compiled):
    cmodel = compiled(lambda: Dropping(width=5), torch.ones(3, 5))
    lines = [b.sym.name for b in stage(cmodel, "shard_parameters").bound_symbols]
    assert lines[-5:] == ["dropout", "cut", "gather_parts", "to_output", "python_return"]
    assert shardtrace.prove(cmodel).verdict == "proven"


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.layer(grad), None


class Recomputing(MLP):
    def forward(self, x):
        return Reversible.apply(super().forward(x), self.up)


def test_a_layer_that_backward_calls_is_refused(compiled):
    policy = CompilePolicy(eager=[Recomputing])
    with pytest.raises(
        RuntimeError, match="Linear is called in backward, by a function that computes its own gradient"
    ):
        compiled(lambda: nn.Sequential(Recomputing(4, 4)), torch.ones(3, 4), compile_policy=policy)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"context_parallel": "tensor"}, "context_parallel and tensor_parallel both name 'tensor'"),
        ({"sharding_strategy": "hybrid_zero3"}, "tensor_parallel shards parameters over all ranks of the mesh"),
        ({"tensor_parallel": "model"}, r"tensor_parallel='model' needs a DeviceMesh that has a dimension of this name"),
        ({"tensor_parallel": 2}, "must be the name of a mesh dimension or TensorParallel"),
    ],
)
def test_options_that_cannot_be_combined(fake_ranks, options, error):
    fake_ranks(2)
    given = {"mesh": mesh_of((1, 2), "tensor"), "tensor_parallel": "tensor", **options}
    with pytest.raises((ValueError, TypeError), match=error):
        shardtrace.fsdp(MLP(), **given)


@pytest.mark.parametrize("how", ["rows", 0, None])
def test_ways_that_do_not_exist(how):
    with pytest.raises(ValueError, match='"colwise", "rowwise" or "whole", not'):
        TensorParallel("tensor", {"*": how})


def test_inline_blocks(compiled):
    policy = CompilePolicy(repeated_blocks="inline")
    cmodel = compiled(lambda: Tokens(layers=2), torch.ones(2, 3, dtype=torch.long), compile_policy=policy)
    assert len(cuts(cmodel)) == 7
    assert shardtrace.prove(cmodel).verdict == "proven"
