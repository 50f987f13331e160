"""The lines of models whose ranks compute with parts of parameters."""

import shardtrace
from shardtrace import CompilePolicy, TensorParallel

import pytest
import thunder
import torch
import torch.nn.functional as F
from contexts import Attention, Tokens, mesh_of
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from torch import nn


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
    return {b.args[0].name.removeprefix("t_"): b.args[1].name for b in lines}


def remarks(cmodel):
    return "".join(str(t.get_provenance()) for t in thunder.last_traces(cmodel))


def test_lines_of_an_mlp(compiled):
    assert_expected_inline(
        text(stage(compiled(MLP, torch.ones(3, 4)), "shard_parameters"), dels=False),
        """\
t0 = cut(t_up_weight, dim0_of_2x4)
t1 = cut(t_up_bias, dim0_of_2x4)
t2 = ltorch.linear(x, t0, t1)
t3 = ltorch.gelu(t2, approximate='none')
t4 = cut(t_down_weight, dim1_of_2x4)
t5 = ltorch.linear(t3, t4, None)
t6 = sum_sequence(t5, dim0_of_1)
t7 = ltorch.add(t6, t_down_bias, alpha=1)
t8 = to_output(t7, dim0_of_1)
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


def test_more_ranks_than_shared_heads(compiled):
    cmodel = compiled(lambda: Grouped(heads=4, shared=2), torch.ones(2, 3, 8), ranks=4)
    assert cuts(cmodel) == {}


def test_blocks_are_compiled_once(compiled):
    model = compiled(lambda: Tokens(layers=3), torch.ones(2, 3, dtype=torch.long))
    assert len(cuts(model)) == 9
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
    assert lines[-5:] == ["cut", "dropout", "gather_sequence", "to_output", "python_return"]
    assert shardtrace.prove(cmodel).verdict == "proven"


def test_random_numbers_that_do_not_divide_are_refused(compiled):
    with pytest.raises(RuntimeError, match="all ranks of tensor_parallel hold as a whole, and they would differ"):
        compiled(lambda: Dropping(width=5), torch.ones(3, 5))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"context_parallel": "tensor"}, "context_parallel and tensor_parallel cannot be combined yet"),
        ({"memory": "80GB"}, "memory and tensor_parallel cannot be combined yet"),
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
    with pytest.raises(ValueError, match="'colwise', 'rowwise', 'whole', not"):
        TensorParallel("tensor", {"*": how})


def test_inline_blocks(compiled):
    policy = CompilePolicy(repeated_blocks="inline")
    cmodel = compiled(lambda: Tokens(layers=2), torch.ones(2, 3, dtype=torch.long), compile_policy=policy)
    assert len(cuts(cmodel)) == 6
    assert shardtrace.prove(cmodel).verdict == "proven"
