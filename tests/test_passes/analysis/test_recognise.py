"""Each recogniser finds the right lines, and no others, in traces of real models."""

import shardtrace
from passes.analysis import recognise
from passes.analysis.recognise import (
    bucket_of,
    constant_inputs,
    is_constant,
    is_decomposed_by_autodiff,
    is_random,
    is_repeatable,
    names,
    nbytes,
    parameter_aliases,
    unsharded_values,
    updated_in_place,
)
from shardtrace.testing import compile_only, fake_ranks

import pytest
import thunder
import torch
import torch.nn.functional as F
from golden import stage
from hosts import on_absent_cuda
from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy


class Net(nn.Module):
    """A weight that is transposed and cast, a buffer, random numbers, constants, and statistics updated in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4, 4).tril())

    def forward(self, x):
        hidden = F.dropout(self.norm(self.linear(x)), 0.5)
        masked = self.weight.t().double().float() * self.mask
        return hidden @ masked + torch.zeros(4).cos() + torch.arange(4)


def compiled(executors):
    """A step of two ranks. Fusions run uncompiled."""
    with fake_ranks(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        cmodel = thunder.jit(shardtrace.fsdp(Net()), executors=executors)
        cmodel(torch.ones(3, 4)).sum().backward()
    return cmodel


@pytest.fixture(scope="module")
def of_torch():
    return compiled(None)


@pytest.fixture(scope="module")
def of_fusions():
    return compiled(["torchcompile"])


@pytest.fixture(params=["of_torch", "of_fusions"])
def net(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def traced(of_torch):
    """A trace before autodiff, and its lines by the names of their symbols."""
    trace = stage(of_torch, "keep_random")
    return trace, {b.sym.name: b for b in trace.bound_symbols}


def found(recogniser, trace):
    """The names of the symbols that it finds, each once, in order."""
    return list(dict.fromkeys(b.sym.name for b in trace.bound_symbols if recogniser(b)))


GATHER, REDUCE = ["all_gather", "wait_all_gather"], ["reduce_scatter", "wait_reduce_scatter"]
LINES = {  # in forward, in backward
    "is_issue": (GATHER[:1], [GATHER[0], REDUCE[0]]),
    "is_wait": (GATHER[1:], [GATHER[1], REDUCE[1]]),
    "is_collective": (GATHER, [*GATHER, *REDUCE]),
    "is_gather": (GATHER, GATHER),
    "is_offload": ([], []),
    "issues_future": (GATHER[:1], [GATHER[0], REDUCE[0]]),
    "waits_for_future": (GATHER[1:], [GATHER[1], REDUCE[1]]),
    "is_return": (["python_return"], ["python_return"]),
    "is_unpack": (["unpack_trivial"], ["unpack_trivial", "unpack_sequence"]),
    "is_deletion": (["python_del"], ["clear_mutable_collection", "python_del"]),
}


def test_lines_of_a_lowered_step(net):
    forward, backward = thunder.last_traces(net)[-1], thunder.last_backward_traces(net)[-1]
    for name, expected in LINES.items():
        recogniser = getattr(recognise, name)
        assert tuple(sorted(found(recogniser, t)) for t in (forward, backward)) == tuple(map(sorted, expected)), name
    assert (recognise.is_backward(forward), recognise.is_backward(backward)) == (False, True)
    buckets = [bucket_of(b).name for b in forward.bound_symbols if recognise.is_issue(b)]
    assert buckets == [bucket_of(b).name for b in forward.bound_symbols if recognise.is_wait(b)]


def test_copies_to_the_host():
    with fake_ranks(2):
        model = shardtrace.fsdp(
            nn.Linear(4, 4), init_policy=shardtrace.InitPolicy(device="cuda:0"), offload_policy=CPUOffloadPolicy()
        )
        cmodel = thunder.jit(model)
        compile_only(cmodel, ((on_absent_cuda(3, 4),), {}))
    forward, backward = thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]
    assert found(recognise.is_offload, forward) == []
    assert found(recognise.is_offload, backward) == ["offload", "wait_offload"]
    assert found(recognise.issues_future, backward)[-1] == "offload"
    assert found(recognise.waits_for_future, backward)[-1] == "wait_offload"
    assert "offload" not in found(recognise.is_collective, backward)


def test_random_lines(traced):
    trace, lines = traced
    assert found(is_random, trace) == ["dropout"]
    parts = {part.sym.name: is_random(part) for part in lines["dropout"].subsymbols}
    assert parts == {"uniform_like": True, "lt": False, "mul": False}


def test_random_lines_when_lowered(net):
    """The parts of fusions, and operators, are recognised by their tags."""
    forward, backward = thunder.last_traces(net)[-1], thunder.last_backward_traces(net)[-1]
    random = [b for b in forward.bound_symbols if is_random(b)]
    assert len(random) == 1
    assert random[0].sym.is_fusion or random[0].sym.name == "dropout_mask"
    assert found(is_random, backward) == []


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), True),
        (lambda x: F.dropout2d(x, 0.5), True),
        (lambda x: F.dropout2d(x, 0.5, training=False), False),
        (lambda x: x + torch.randn(4), True),
        (torch.bernoulli, True),
        (lambda x: torch.multinomial(x[0, 0], 2), True),
        (lambda x: F.rrelu(x, training=True), True),
        (torch.logit, False),  # taken from torch unchanged
        (lambda x: F.softmax(x, -1).exp(), False),
    ],
)
def test_random_functions(function, expected):
    jitted = thunder.jit(lambda x: function(x))
    jitted(torch.rand(2, 1, 4, 4))
    first, last = thunder.last_traces(jitted)[0], thunder.last_traces(jitted)[-1]
    assert any(map(is_random, first.bound_symbols)) == expected
    if expected:
        assert any(map(is_random, last.bound_symbols))


def test_random_operators_of_users():
    """An operator that is like a random symbol is random. Others are recognised only by name."""
    executor = OperatorExecutor("test_recognise")
    like = executor.register_operator("mine", like=thunder.torch.bernoulli, fn=torch.bernoulli)
    meta = lambda x: TensorProxy(like=x)  # noqa: E731
    named = executor.register_operator("fused_dropout", meta=meta, fn=F.dropout)
    plain = executor.register_operator("fused_tanh", meta=meta, fn=torch.tanh)
    jitted = thunder.jit(lambda x: plain(named(like(x))))
    jitted(torch.rand(3))
    random = {b.sym.name: is_random(b) for b in thunder.last_traces(jitted)[0].bound_symbols}
    assert [random[name] for name in ("mine", "fused_dropout", "fused_tanh")] == [True, True, False]


def test_what_may_be_repeated(traced):
    trace, lines = traced
    assert not is_repeatable(lines["dropout"])
    assert is_repeatable(lines["torch_linear_0"])
    changing = {b.sym.name for b in trace.bound_symbols if recognise.changes_values(b)}
    assert changing == {"batch_norm", "copy_"}  # running statistics, and the number of batches
    assert changing.isdisjoint(found(is_repeatable, trace))


def test_values_updated_in_place(traced):
    trace, _ = traced
    updated = updated_in_place(trace)
    assert {name for name in updated if "norm" in name} == {
        "t_norm_num_batches_tracked",
        "t_norm_running_mean",
        "t_norm_running_var",
    }
    assert not any("weight" in name or "mask" in name for name in updated)


def test_constants(traced):
    trace, _ = traced
    assert found(is_constant, trace) == ["zeros", "arange"]
    assert constant_inputs(trace) == {"t_mask"}  # neither shards, nor statistics, nor the model's input


def test_lines_that_autodiff_takes_apart(traced):
    _, lines = traced
    assert all(is_decomposed_by_autodiff(lines[name]) for name in ("dropout", "t"))
    assert not is_decomposed_by_autodiff(lines["zeros"])  # no gradient flows through it
    assert not any(map(is_decomposed_by_autodiff, lines["t"].subsymbols))  # prims have grad rules


def test_values_that_hold_parameters(net):
    """Forward: the gathered parameters, the weight transposed and cast, and its product with the mask."""
    forward = thunder.last_traces(net)[-1]
    gathered = names([b.flat_proxy_outs for b in forward.bound_symbols if b.sym.name == "wait_all_gather"])
    aliases, unsharded = parameter_aliases(forward), unsharded_values(forward)
    assert gathered < aliases <= unsharded.keys()
    (product,) = unsharded.keys() - aliases
    (bucket,) = unsharded[product]
    assert "weight" in {m.parameter.name for m in bucket.members}
    result, _ = forward.bound_symbols[-1].args
    assert names(result["output"]).isdisjoint(unsharded)


def test_names_and_bytes(traced):
    _, lines = traced
    weight, *_ = lines["torch_linear_0"].flat_proxy_args[1:]
    assert names({"a": [weight, 3], "b": (None, weight)}) == {weight.name}
    assert nbytes([weight, 3, weight]) == 2 * 4 * 4 * 4
