"""A block is differentiated and lowered once. Its calls are lines that pass parameters and keep one list for backward."""

import shardtrace
from passes.analysis.calls import block_function, block_functions
from passes.analysis.liveness import step_liveness
from passes.analysis.recognise import names
from passes.pipeline import PassAfterLowering, PassBeforeAutodiff

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from golden import compile_fake, text
from thunder.core.trace import from_trace
from torch import nn

WIDTH = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(blocks or (Block(), Block(), Block()))

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def traces(cmodel):
    return thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]


def functions(cmodel):
    """The functions of blocks that a step calls, by name."""
    return {called.name: called for trace in traces(cmodel) for called in block_functions(trace)}


def test_golden(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(Net, torch.ones(2, WIDTH))
    forward, backward = traces(cmodel)
    assert_expected_inline(
        text(forward, dels=False),
        """\
ft0 = all_gather((t_scale,), b_root)
ft1 = all_gather((t_blocks_0_up_weight, t_blocks_0_up_bias, t_blocks_0_down_weight), b_blocks_0)
(t2,) = wait_all_gather(ft0, b_root)
t3 = torch_mul_0(x, t2)
ft4 = all_gather((t_blocks_1_up_weight, t_blocks_1_up_bias, t_blocks_1_down_weight), b_blocks_1)
(t5, t6, t7) = wait_all_gather(ft1, b_blocks_0)
(t8, saved44) = Block_forward(t3, t5, t6, t7)
ft9 = all_gather((t_blocks_2_up_weight, t_blocks_2_up_bias, t_blocks_2_down_weight), b_blocks_2)
(t10, t11, t12) = wait_all_gather(ft4, b_blocks_1)
(t13, saved62) = Block_forward(t8, t10, t11, t12)
(t14, t15, t16) = wait_all_gather(ft9, b_blocks_2)
(t17, saved80) = Block_forward(t13, t14, t15, t16)
return {'output': (t17,), 'flat_args': [x, t_blocks_0_down_weight, t_blocks_0_up_bias, t_blocks_0_up_weight, t_blocks_1_down_weight, t_blocks_1_up_bias, t_blocks_1_up_weight, t_blocks_2_down_weight, t_blocks_2_up_bias, t_blocks_2_up_weight, t_scale], 'flat_output': (t17,)}, ((t_blocks_2_up_weight, t_blocks_2_up_bias, t_blocks_2_down_weight, t13, t_blocks_1_up_weight, t_blocks_1_up_bias, t_blocks_1_down_weight, t8, t_blocks_0_up_weight, t_blocks_0_up_bias, t_blocks_0_down_weight, t3, x), (saved80, saved62, saved44))""",
    )
    assert_expected_inline(
        text(backward, dels=False),
        """\
C0, C1, = saved_for_backward
clear_mutable_collection(saved_for_backward)
t0, = cotangents
clear_mutable_collection(cotangents)
t_blocks_2_up_weight, t_blocks_2_up_bias, t_blocks_2_down_weight, t1, \\
t_blocks_1_up_weight, t_blocks_1_up_bias, t_blocks_1_down_weight, t2, \\
t_blocks_0_up_weight, t_blocks_0_up_bias, t_blocks_0_down_weight, t3, x, = C0
clear_mutable_collection(C0)
saved80, saved62, saved44, = C1
clear_mutable_collection(C1)
bw_ft4 = all_gather((t_blocks_2_up_weight, t_blocks_2_up_bias, t_blocks_2_down_weight), b_blocks_2)
bw_ft5 = all_gather((t_blocks_1_up_weight, t_blocks_1_up_bias, t_blocks_1_down_weight), b_blocks_1)
(bw_t6, bw_t7, bw_t8) = wait_all_gather(bw_ft4, b_blocks_2)
(t9, t10, t11, t12) = Block_backward(saved80, t1, bw_t6, bw_t8, t0)
ft13 = reduce_scatter((t10, t11, t12), b_blocks_2)
(bw_t14, bw_t15, bw_t16) = wait_all_gather(bw_ft5, b_blocks_1)
bw_ft17 = all_gather((t_blocks_0_up_weight, t_blocks_0_up_bias, t_blocks_0_down_weight), b_blocks_0)
(t18, t19, t20, t21) = Block_backward(saved62, t2, bw_t14, bw_t16, t9)
(t22, t23, t24) = wait_reduce_scatter(ft13, b_blocks_2)
ft25 = reduce_scatter((t19, t20, t21), b_blocks_1)
(bw_t26, bw_t27, bw_t28) = wait_all_gather(bw_ft17, b_blocks_0)
(t29, t30, t31, t32) = Block_backward(saved44, t3, bw_t26, bw_t28, t18)
ft33 = reduce_scatter((t30, t31, t32), b_blocks_0)
t34 = aten_mul_Tensor(t29, x)
t35 = aten_sum_dim_IntList(t34, [0], True)
t36 = aten_view(t35, [4])
(t37, t38, t39) = wait_reduce_scatter(ft25, b_blocks_1)
ft40 = reduce_scatter((t36,), b_root)
(t41, t42, t43) = wait_reduce_scatter(ft33, b_blocks_0)
(t44,) = wait_reduce_scatter(ft40, b_root)
return (None, t43, t42, t41, t39, t38, t37, t24, t23, t22, t44)""",
    )
    assert_expected_inline(
        text(functions(cmodel)["Block_forward"].trace),
        """\
t0 = torch_linear_0(t1, t_blocks_0_up_weight, t_blocks_0_up_bias)
del t_blocks_0_up_weight, t_blocks_0_up_bias
t2 = torch_tanh_0(t0)
del t0
t3 = torch_linear_1(t2, t_blocks_0_down_weight)
del t_blocks_0_down_weight
t4 = torch_add_0(t1, t3)
del t1, t3
return (t4, [t2])""",
    )
    assert_expected_inline(
        text(functions(cmodel)["Block_backward"].trace),
        """\
t0, = saved
release(saved)
del saved
t1 = aten_t(t2)
t3 = aten_mm(t1, t0)
del t1
t4 = aten_mm(t2, t_blocks_0_down_weight)
del t_blocks_0_down_weight
t5 = aten_tanh_backward(t4, t0)
del t4, t0
t6 = aten_mm(t5, t_blocks_0_up_weight)
del t_blocks_0_up_weight
t7 = aten_t(t5)
t8 = aten_mm(t7, t9)
del t7, t9
t10 = aten_sum_dim_IntList(t5, [0], True)
del t5
t11 = aten_view(t10, [8])
del t10
t12 = torch.add(t2, t6, alpha=1)
del t2, t6
return (t12, t8, t11, t3)""",
    )


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_parameters_are_passed_and_never_in_the_list(fake_ranks, strategy):
    fake_ranks(2)
    cmodel = compile_fake(Net, torch.ones(2, WIDTH), sharding_strategy=strategy)
    last = functions(cmodel)["Block_forward"].trace.bound_symbols[-1]
    assert all(p.shape == (2, 8) for p in last.args[0][-1])  # activations
    _, (saved, others) = traces(cmodel)[0].bound_symbols[-1].args
    gathered = {p.name for p in saved if tuple(p.shape) in ((8, WIDTH), (WIDTH, 8))}
    assert bool(gathered) == (strategy == "zero2")
    assert len(others) == 3


class Frozen(Net):
    """The first block gets an input without a gradient."""

    def __init__(self):
        super().__init__()
        self.scale.requires_grad_(False)


def test_a_call_with_an_input_without_a_gradient_is_of_another_kind(fake_ranks):
    fake_ranks(1)
    cmodel = compile_fake(Frozen, torch.ones(2, WIDTH))
    found = functions(cmodel)
    assert sorted(found) == ["Block_backward", "Block_forward"]
    assert len(found["Block_backward"].trace.bound_symbols[-1].args[0]) == 4
    assert sum(block_function(b) is not None for b in traces(cmodel)[0].bound_symbols) == 2


class Two(Block):
    def forward(self, x):
        return super().forward(x), torch.sin(x)


class LastUnread(Net):
    """Nobody reads the second result of the last block."""

    def forward(self, x):
        for block in self.blocks:
            x, y = block(x)
            x = x + y if block is not self.blocks[-1] else x
        return x


def test_calls_whose_results_get_other_gradients_have_a_function_of_their_own(fake_ranks):
    fake_ranks(1)
    cmodel = compile_fake(lambda: LastUnread(Two(), Two(), Two()), torch.ones(2, WIDTH, requires_grad=True))
    found = functions(cmodel)
    assert sorted(found) == ["Two_2_backward", "Two_2_forward", "Two_backward", "Two_forward"]
    given = {name: len(found[name].trace.args) for name in found if "backward" in name}
    assert given["Two_2_backward"] < given["Two_backward"]
    assert not any(b.sym.name in ("cos", "sin") for b in found["Two_2_backward"].trace.bound_symbols)


class Pair(Block):
    """Returns values that nobody uses, or only without gradients."""

    def forward(self, x):
        y = super().forward(x)
        return y, torch.sin(y), torch.cos(x)


class Pairs(Net):
    def forward(self, x):
        for block in self.blocks:
            x, _, z = block(x)
            with torch.no_grad():
                z = z * 2
            x = x + z
        return x


def test_results_without_a_gradient(fake_ranks):
    fake_ranks(1)
    cmodel = compile_fake(lambda: Pairs(Pair(), Pair(), Pair()), torch.ones(2, WIDTH, requires_grad=True))
    _, backward = traces(cmodel)
    calls = [b for b in backward.bound_symbols if block_function(b) is not None]
    assert len(calls) == 3
    assert not any("zeros" in b.sym.name or "full" in b.sym.name for b in backward.bound_symbols)
    for called in block_functions(backward):
        assert not any(b.sym.name in ("sin", "cos", "neg") for b in called.trace.bound_symbols)


class Noisy(Block):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class Twice(Net):
    def forward(self, x):
        return self.blocks[0](x) - self.blocks[0](x) + self.blocks[1](x)


def test_two_random_calls_on_the_same_values_draw_twice(fake_ranks):
    fake_ranks(1)
    cmodel = compile_fake(lambda: Twice(Noisy(), Noisy()), torch.ones(2, WIDTH))
    assert sum(block_function(b) is not None for b in traces(cmodel)[0].bound_symbols) == 3


def test_without_gradients(fake_ranks):
    fake_ranks(1)
    net = Net()
    cmodel = thunder.jit(shardtrace.fsdp(net))
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        found = cmodel(x)
    (part,) = block_functions(thunder.last_traces(cmodel)[-1])
    assert part.name == "Block"
    assert not part.saved
    with shardtrace.full_params(net):
        assert torch.equal(found, net(x))


def swap(old, new):
    """A user's pass: one function in place of another, wherever it finds it."""

    def run(trace):
        if not any(b.sym.name == old for b in trace.bound_symbols):
            return trace
        swapped = from_trace(trace)
        for bsym in trace.bound_symbols:
            if bsym.sym.name == old:
                bsym = new(bsym)
            swapped.bound_symbols.append(bsym)
        return swapped

    return run


def test_passes_of_users_run_on_blocks(fake_ranks):
    fake_ranks(1)
    seen = []

    def late(trace):
        seen.append({b.sym.name for b in trace.bound_symbols})
        return trace

    early = swap("torch_tanh_0", lambda b: thunder.torch.sin.bind(*b.args, output=b.output[0], subsymbols=[
        thunder.core.prims.sin.bind(*b.args, output=b.output[0])
    ]))  # fmt: skip
    net = Net()
    model = shardtrace.fsdp(net, checks=shardtrace.Checks(prove=False))  # sin makes it another program
    cmodel = thunder.jit(model, transforms=[PassBeforeAutodiff(early, "early"), PassAfterLowering(late)])
    x = torch.randn(2, WIDTH)
    cmodel(x).sum().backward()
    assert any("sin" in found for found in seen)
    assert not any("torch_tanh_0" in found for found in seen)


@pytest.mark.parametrize("how", ["inline", "once"])
def test_a_backward_that_is_called_twice(fake_ranks, how):
    """The list is kept with ``retain_graph=True``, and empty otherwise."""
    fake_ranks(1)
    net = Net()
    loss = thunder.jit(shardtrace.fsdp(net, compile_policy=shardtrace.CompilePolicy(repeated_blocks=how)))(
        torch.ones(2, WIDTH)
    ).sum()
    loss.backward(retain_graph=True)
    once = net.scale.grad.clone()
    loss.backward()
    assert torch.equal(net.scale.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "zero2"}, {"activation_checkpointing": Block}], ids=str)
def test_the_peak_is_not_above_that_of_the_lines(fake_ranks, options):
    fake_ranks(2)
    peaks = []
    for how in ("inline", "once"):
        cmodel = compile_fake(
            Net, torch.ones(64, WIDTH), compile_policy=shardtrace.CompilePolicy(repeated_blocks=how), **options
        )
        peaks.append(step_liveness(*traces(cmodel)).peak)
    assert peaks[1] <= peaks[0] * 1.01


@pytest.mark.parametrize("bucketing", ["layer", "none", 0.0001])
def test_lines_stay_where_a_block_has_several_buckets(fake_ranks, bucketing):
    fake_ranks(2)
    cmodel = compile_fake(Net, torch.ones(2, WIDTH), bucketing_strategy=bucketing)
    assert not functions(cmodel)
    assert "several buckets" in str(shardtrace.inspect(cmodel))


def test_names_are_unique(fake_ranks):
    """Two kinds of blocks of the same name."""
    fake_ranks(1)
    other = type("Block", (Block,), {"forward": lambda self, x: torch.sin(Block.forward(self, x))})
    cmodel = compile_fake(lambda: Net(Block(), Block(), other(), other()), torch.ones(2, WIDTH))
    assert sorted(functions(cmodel)) == ["Block_2_backward", "Block_2_forward", "Block_backward", "Block_forward"]
    assert names(traces(cmodel)[0].bound_symbols[-1].args)
