"""Silent bugs that a pass can make, and did, built again as passes of a user: each makes a step that is not proven."""

import warnings

import shardtrace
from passes import PassAfterLowering
from passes.analysis.calls import block_function
from passes.analysis.recognise import is_backward, is_gather, is_issue, is_return
from passes.comm.symbols import wait_reduce_scatter
from shardtrace.testing import fake_ranks

import pytest
import thunder
import torch
from models import Net
from thunder.core.proxies import Proxy
from thunder.core.trace import from_trace
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def step_with(run):
    """Compiles and proves a step in which a pass has its turn."""
    with fake_ranks(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = shardtrace.fsdp(Net(Block(), Block(), Block()), checks=shardtrace.Checks(prove=True))
        jitted = thunder.jit(model, transforms=[PassAfterLowering(run)])
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
        return b.from_bsym(output=exchanged(b.output)) if b.sym.id == wait_reduce_scatter.id else b

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
    step_with(unchanged)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_pass_is_found(wrong):
    with pytest.raises(AssertionError, match=r"could not be proven|after pass"):
        step_with(wrong)
