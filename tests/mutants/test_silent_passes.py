"""Silent bugs that a pass can make, and did, built again as passes of a user, or by a patch of what passes call: each
makes a step that is not proven."""

import warnings
from functools import partial

import shardtrace
from passes import PassAfterLowering, PassBeforeAutodiff, blocks
from passes.analysis.calls import block_function
from passes.analysis.recognise import is_backward, is_gather, is_issue, is_return, is_unpack
from passes.borders import run_setter
from passes.comm.symbols import REDUCE_SCATTER
from passes.kernels import executors
from passes.plan import BucketPlan
from shardtrace.record import calls
from shardtrace.record.replay import Replay
from shardtrace.testing import fake_ranks

import pytest
import thunder
import torch
from models import Net
from thunder.core.proxies import Proxy, variableify
from thunder.core.trace import from_trace
from thunder.core.transform_common import Transform
from thunder.executors import torchex
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def step_with(*transforms, model=None, **jit):
    """Compiles and proves a step in which a pass has its turn."""
    with fake_ranks(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model if model is not None else Net(Block(), Block(), Block())
        model = shardtrace.fsdp(model, checks=shardtrace.Checks(prove=True))
        jitted = thunder.jit(model, transforms=list(transforms), **jit)
        thunder.compile_data(jitted).get_computation_and_inputs(torch.randn(3, 6))


def rewritten(trace, line):
    """The trace with a change of each line."""
    new = from_trace(trace)
    new.bound_symbols = [line(b) for b in trace.bound_symbols]
    return new


def unchanged(trace):
    return trace


def same_shape(values):
    for i, a in enumerate(values):
        for j in range(i):
            b = values[j]
            if isinstance(a, Proxy) and isinstance(b, Proxy) and a.name != b.name and a.shape == b.shape:
                return j, i
    return None


def exchanged(values):
    places = same_shape(values)
    if places is None:
        return values
    new = list(values)
    i, j = places
    new[i], new[j] = new[j], new[i]
    return type(values)(new)


def swaps_parameters_of_a_shared_block(trace):
    def line(b):
        return b.from_bsym(args=exchanged(b.args)) if block_function(b) and not is_backward(trace) else b

    return rewritten(trace, line)


def runs_one_block_with_the_parameters_of_another(trace):
    calls = [b for b in trace.bound_symbols if block_function(b)]
    if is_backward(trace) or len(calls) < 2:
        return trace
    first, second = calls[0], calls[1]
    wrong = second.from_bsym(args=(second.args[0], *first.args[1:]))
    return rewritten(trace, lambda b: wrong if b is second else b)


def swaps_members_of_a_gather(trace):
    def line(b):
        return b.from_bsym(args=(exchanged(b.args[0]), *b.args[1:])) if is_issue(b) and is_gather(b) else b

    return rewritten(trace, line)


def swaps_gradients_in_a_reduction(trace):
    def line(b):
        return b.from_bsym(args=(exchanged(b.args[0]), *b.args[1:])) if is_issue(b) and not is_gather(b) else b

    return rewritten(trace, line)


def swaps_reduced_gradients(trace):
    def line(b):
        return b.from_bsym(output=exchanged(b.output)) if b.sym.id == REDUCE_SCATTER.wait.id else b

    return rewritten(trace, line)


def drops_a_gradient(trace):
    def line(b):
        if not is_return(b) or not is_backward(trace):
            return b
        gradients = list(b.args[0])
        gradients[next(i for i, g in enumerate(gradients) if g is not None)] = None
        return b.from_bsym(args=(tuple(gradients),))

    return rewritten(trace, line)


def returns_gradients_in_another_order(trace):
    def line(b):
        return b.from_bsym(args=(exchanged(tuple(b.args[0])),)) if is_return(b) and is_backward(trace) else b

    return rewritten(trace, line)


def saves_another_value(trace):
    def line(b):
        if not is_return(b) or is_backward(trace):
            return b
        result, (saved, others) = b.args
        return b.from_bsym(args=(result, (exchanged(saved), others)))

    return rewritten(trace, line)


WRONG = [
    swaps_parameters_of_a_shared_block,
    runs_one_block_with_the_parameters_of_another,
    swaps_members_of_a_gather,
    swaps_gradients_in_a_reduction,
    swaps_reduced_gradients,
    drops_a_gradient,
    returns_gradients_in_another_order,
    saves_another_value,
]


def test_a_right_pass_is_proven():
    step_with(PassAfterLowering(unchanged))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_pass_is_found(wrong):
    with pytest.raises(AssertionError, match=r"could not be proven|after pass"):
        step_with(PassAfterLowering(wrong))


class Rolled(nn.Module):
    """Two calls of torch that differ in a number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.roll(torch.roll(self.linear(x), 1, 1) * x, 2, 1)


class Scaled(Block):
    """Differs from others in a number."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return super().forward(x) * self.factor


def loses_a_gradient_of_each_block(monkeypatch):
    right = blocks.needs_of_calls

    def needs(trace):
        for line, found in right(trace):
            fewer = found.gradients - {max(found.gradients)} if found is not None and found.gradients else None
            yield line, found if fewer is None else found._replace(gradients=fewer)

    monkeypatch.setattr(blocks, "needs_of_calls", needs)


def loses_an_output_of_each_block(monkeypatch):
    right = blocks.needs_of_calls

    def needs(trace):
        for line, found in right(trace):
            yield line, found if found is None else found._replace(outputs=frozenset())

    monkeypatch.setattr(blocks, "needs_of_calls", needs)


def prepares_a_block_with_two_parameters_exchanged(monkeypatch):
    right = blocks.prepared

    def prepared(block, needs):
        trace = right(block, needs)
        a, b = (p for p in trace.args if tuple(p.shape) == (6, 6))

        def line(x):
            read = {p.name for p in x.flat_proxy_args} & {a.name, b.name}
            if is_unpack(x) or is_return(x) or len(read) != 1:
                return x
            old, new = (a, b) if a.name in read else (b, a)
            return x.from_bsym_swap_proxies({variableify(old): new}, skip_output=True)

        return rewritten(trace, line)

    monkeypatch.setattr(blocks, "prepared", prepared)


def takes_blocks_of_other_numbers_for_equal(monkeypatch):
    right = calls.Numbers.value
    monkeypatch.setattr(calls.Numbers, "value", lambda self, v: "float" if type(v) is float else right(self, v))


def takes_fusions_of_other_numbers_for_equal(monkeypatch):
    right = blocks._value
    monkeypatch.setattr(executors, "SMALL", 0.0)
    monkeypatch.setattr(blocks, "_value", lambda v, numbers: right(v, numbers) if isinstance(v, Proxy) else type(v))


def divides_by_another_number(monkeypatch):
    monkeypatch.setattr(BucketPlan, "divisor", property(lambda plan: 1.0))


def two_lines_mean_other_functions_by_one_name(monkeypatch):
    monkeypatch.setattr(Replay, "_name", lambda self, call: "torch_call")


INSIDE = [
    loses_a_gradient_of_each_block,
    loses_an_output_of_each_block,
    prepares_a_block_with_two_parameters_exchanged,
    takes_blocks_of_other_numbers_for_equal,
    takes_fusions_of_other_numbers_for_equal,
    divides_by_another_number,
    two_lines_mean_other_functions_by_one_name,
]


@pytest.mark.parametrize("break_it", INSIDE)
def test_a_bug_inside_a_pass_is_found(break_it, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    fuses = break_it is takes_fusions_of_other_numbers_for_equal
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match="could not be proven"):
        step_with(
            model=Net(Scaled(1.0), Scaled(2.0), Scaled(3.0), Block(), Block(), Rolled()),
            **({"executors": ["sdpa", "torch_kernels", "torchcompile"]} if fuses else {}),
        )


class Ends(nn.Module):
    """Returns two results and sets two buffers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("square", torch.zeros(6))

    def forward(self, x):
        y, z = torch.tanh(self.a(x)), torch.sigmoid(self.b(x))
        self.mean, self.square = self.mean + y.detach().mean(0), self.square + y.detach().square().mean(0)
        return y, z


def gives_autograd_the_outputs_in_another_order(trace):
    def line(b):
        if not is_return(b) or is_backward(trace):
            return b
        result, saved = b.args
        return b.from_bsym(args=({**result, "flat_output": exchanged(result["flat_output"])}, saved))

    return rewritten(trace, line)


def sets_another_buffer(trace):
    return rewritten(
        trace, lambda b: b.from_bsym(args=(b.args[0], exchanged(b.args[1]))) if b.sym.id == run_setter.id else b
    )


def returns_results_in_another_order(trace):
    def line(b):
        return b.from_bsym(args=(tuple(reversed(b.args[0])),)) if is_return(b) else b

    return rewritten(trace, line)


@pytest.mark.parametrize(
    "wrong",
    [
        PassAfterLowering(gives_autograd_the_outputs_in_another_order),
        PassBeforeAutodiff(sets_another_buffer, over="epilogue"),
        PassBeforeAutodiff(returns_results_in_another_order, over="epilogue"),
    ],
    ids=str,
)
def test_an_end_of_a_step_that_is_wrong_is_found(wrong):
    with pytest.raises(AssertionError, match=r"autograd gets other outputs|the epilogue (does|returns)"):
        step_with(wrong, model=Ends())


class Sine(Transform):
    """Runs after all passes."""

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        def line(b):
            return torchex.ex.opmap["sin"].bind(b.args[0], output=b.output) if b.sym.name == "torch_tanh_0" else b

        return rewritten(computation_trace, line)


def test_a_transform_of_thunders_own_kind_is_proven_after_it_ran():
    with pytest.raises(AssertionError, match=r"computes torch.sin.*\n.*computes torch_tanh"):
        step_with(Sine(), model=nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
