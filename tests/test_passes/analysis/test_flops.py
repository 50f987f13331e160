"""The cost of lines: FLOPs against PyTorch's counter and closed formulas, bytes by hand, seconds from both."""

import sys
from pathlib import Path

import shardtrace
from passes.analysis.flops import bytes_moved, flops, is_free, work
from passes.analysis.recognise import bucket_of, is_collective, is_issue
from passes.analysis.seconds import collective_seconds, compute_seconds
from passes.plan import CostModel, Device, Link

import pytest
import thunder
import torch
import torch.nn.functional as F
from golden import compile_fake
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors import sdpaex
from thunder.extend import OperatorExecutor
from torch.distributed import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "gpt2"))

from model import GPT, GPTConfig

MODEL = CostModel(Link(bandwidth=1000.0, latency=0.5), Device(flops=2e3, half_flops=8e3, bandwidth=1e3, overhead=0.25))
WIDTH, TOKENS, BATCH, WORDS = 32, 8, 2, 20


def lines_of(function, *args, **options):
    """The lowered lines of a function."""
    jitted = thunder.jit(function, **options)
    jitted(*args)
    return thunder.last_traces(jitted)[-1].bound_symbols


def line_of(function, *args, name):
    (found,) = [b for b in lines_of(function, *args) if b.sym.name == name]
    return found


def gpt():
    return GPT(GPTConfig(n_layer=1, n_embd=WIDTH, n_head=2, block_size=TOKENS, vocab_size=WORDS))


def counted_by_torch(model, *args):
    """FLOPs of forward and of backward in eager mode, with attention as plain products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(*args)
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


@pytest.fixture
def no_inductor(monkeypatch):
    """Fuses regions, but runs them uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize("executors", [None, ["sdpa", "torchcompile"]])
def test_a_sharded_gpt(fake_ranks, no_inductor, executors):
    fake_ranks(2)
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    cmodel = thunder.jit(shardtrace.fsdp(gpt()), executors=executors)
    cmodel(tokens, tokens).backward()
    forward, backward = (
        traces(cmodel)[-1].bound_symbols for traces in (thunder.last_traces, thunder.last_backward_traces)
    )

    rows = BATCH * TOKENS
    products = 2 * rows * 12 * WIDTH**2 + 2 * rows * WIDTH * WORDS  # a block's four linear layers, and the head
    attention = 2 * 2 * rows * TOKENS * WIDTH
    assert sum(map(flops, forward)) == products + attention
    recomputed = attention // 2 if executors is None else 0  # the kernel computes the scores again
    assert sum(map(flops, backward)) == 2 * (products + attention) + recomputed
    assert (products + attention, 2 * (products + attention)) == counted_by_torch(gpt(), tokens, tokens)

    for line in [*forward, *backward]:
        computes = not (is_collective(line) or is_free(line))
        seconds = compute_seconds(MODEL, line)
        assert (seconds >= 0.25) if computes else (seconds == 0), line
        if line.sym.is_fusion:
            assert flops(line) == sum(map(flops, line.subsymbols))
            border = {p.name: p for p in (*line.flat_proxy_args, *line.flat_proxy_outs)}
            assert bytes_moved(line) == sum(p.numel * p.dtype.bytes for p in border.values())
    assert any(line.sym.is_fusion for line in forward) == (executors is not None)
    for line in filter(is_issue, forward):
        assert collective_seconds(MODEL, bucket_of(line)) == 0.5 + bucket_of(line).bytes / 2 / 1000


a, b, c = torch.ones(3, 4), torch.ones(4, 5), torch.ones(3, 5)
stack, other = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
image = torch.ones(2, 4, 9, 9)


@pytest.mark.parametrize(
    ("function", "args", "count"),
    [
        (torch.matmul, (a, b), 2 * 3 * 4 * 5),
        (torch.matmul, (stack, b), 2 * 2 * 3 * 4 * 5),
        (torch.matmul, (a, b[:, 0]), 2 * 3 * 4),
        (torch.mm, (a, b), 2 * 3 * 4 * 5),
        (torch.mv, (a, b[:, 0]), 2 * 3 * 4),
        (torch.bmm, (stack, other), 2 * 2 * 3 * 4 * 5),
        (torch.addmm, (c, a, b), 2 * 3 * 4 * 5),
        (torch.baddbmm, (torch.ones(2, 3, 5), stack, other), 2 * 2 * 3 * 4 * 5),
        (F.linear, (stack, c.new_ones(5, 4), c.new_ones(5)), 2 * 2 * 3 * 4 * 5),
        (lambda x, y: torch.einsum("ij,jk->ik", x, y), (a, b), 2 * 3 * 4 * 5),
        (F.conv2d, (image, torch.ones(6, 4, 3, 3)), 2 * (2 * 6 * 7 * 7) * (4 * 3 * 3)),
        (lambda x, w: F.conv2d(x, w, groups=2), (image, torch.ones(6, 2, 3, 3)), 2 * (2 * 6 * 7 * 7) * (2 * 3 * 3)),
        (F.conv_transpose2d, (image, torch.ones(4, 6, 3, 3)), 2 * (2 * 4 * 9 * 9) * (6 * 3 * 3)),
        (F.scaled_dot_product_attention, (other, other, torch.ones(2, 4, 3)), 2 * 2 * 4 * 4 * (5 + 3)),
        (torch.tanh, (a,), 0),
        (lambda x: torch.softmax(x, 1).sum(), (a,), 0),
    ],
)
def test_flops_of_a_function(function, args, count):
    assert sum(map(flops, lines_of(lambda *xs: function(*xs), *args))) == count


@pytest.mark.parametrize(("function", "args"), [(torch.mm, (a, b)), (torch.addmm, (c, a, b))])
def test_flops_of_gradients_that_torch_takes(function, args):
    jitted = thunder.jit(lambda *xs: function(*xs))
    jitted(*args[:-1], args[-1].clone().requires_grad_()).sum().backward()
    assert sum(map(flops, thunder.last_backward_traces(jitted)[-1].bound_symbols)) == 3 * 2 * 3 * 4 * 5


def test_flops_of_convolutions_backward():
    model = torch.nn.Conv2d(4, 6, 3)
    jitted = thunder.jit(model)
    jitted(image.clone().requires_grad_()).sum().backward()
    (forward,) = [n for b in thunder.last_traces(jitted)[-1].bound_symbols if (n := flops(b))]
    assert sum(map(flops, thunder.last_backward_traces(jitted)[-1].bound_symbols)) >= 2 * forward


@pytest.mark.parametrize("kind", ["sdpea", "sdpfa"])
def test_flops_of_fused_attention(kind):
    dtype = dtypes.float32 if kind == "sdpea" else dtypes.bfloat16
    trace = TraceCtx()
    with tracectx(trace):
        q, k, v = (TensorProxy(shape=(2, 3, rows, 8), device=devices.cpu, dtype=dtype) for rows in (16, 32, 32))
        if kind == "sdpea":
            out, *rest = sdpaex.sdpea_gradfwd(q, k, v, None, 0.0, True)
            sdpaex.sdpea_bwd(out, q, k, v, None, out, *rest, 0.0, True)
        else:
            out, *rest, seed, offset, _ = sdpaex.sdpfa_gradfwd(q, k, v, 0.0, True)
            sdpaex.sdpfa_bwd(out, q, k, v, out, *rest, 0.0, True, seed, offset)
    forward, backward = trace.bound_symbols
    product = 2 * (2 * 3) * 16 * 32 * 8
    assert (flops(forward), flops(backward)) == (2 * product, 5 * product)
    rate = MODEL.device.flops if kind == "sdpea" else MODEL.device.half_flops
    seconds = 0.25 + 5 * product / rate + bytes_moved(backward) / 1000
    assert compute_seconds(MODEL, backward) == pytest.approx(seconds)


x, whole = torch.ones(6, 10), 6 * 10 * 4
index = torch.tensor([1, 3])


@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        (lambda x: x + x[0], "add", 2 * whole + 10 * 4),
        (lambda x: x * x, "mul", 2 * whole),
        (lambda x: x.to(torch.bfloat16), "to", whole + whole // 2),
        (lambda x: x.sum(1), "sum", whole + 6 * 4),
        (lambda x: x.reshape(3, 20), "reshape", 0),
        (lambda x: x.permute(1, 0), "permute", 0),
        (lambda x: x.split(2), "split", 0),
        (lambda x: torch.cat((x, x)), "cat", 3 * whole),
        (lambda x: torch.index_select(x, 0, index), "index_select", 2 * (2 * 10 * 4) + 2 * 8),
        (lambda x: F.embedding(index, x), "embedding", 2 * (2 * 10 * 4) + 2 * 8),
        (lambda x: torch.zeros(3, 4) + x[:3, :4], "zeros", 3 * 4 * 4),
    ],
)
def test_bytes(function, name, expected):
    lines = [
        line for line in lines_of(function, x) if line.sym.name.replace("torch_prims_reshape_impl", "reshape") == name
    ]
    assert [bytes_moved(line) for line in lines] == [expected]


def test_a_slice_is_a_view():
    assert sum(map(bytes_moved, lines_of(lambda x: x[1:3, ::2], x))) == 0


def test_an_unknown_symbol_moves_what_goes_in_and_out_and_computes_what_its_parts_do():
    executor = OperatorExecutor("test_cost")
    meta = lambda x: TensorProxy(like=x)  # noqa: E731
    unknown = executor.register_operator("unknown", meta=meta, fn=torch.tanh)
    line = line_of(unknown, x, name="unknown")
    assert (flops(line), bytes_moved(line)) == (0, 2 * whole)
    assert compute_seconds(MODEL, line) == pytest.approx(0.25 + 2 * whole / 1000)
    product = line_of(torch.matmul, a, b, name="matmul")
    assert flops(line.from_bsym(subsymbols=[product, product])) == 2 * flops(product)


@pytest.mark.filterwarnings("ignore:The 'symbolic values' cache option")
def test_symbolic_values():
    lines = lines_of(lambda x, y: x @ y + 1, a, b, cache="symbolic values")
    assert sum(map(flops, lines)) == 2 * 3 * 4 * 5
    assert sum(map(bytes_moved, lines)) >= 4 * (12 + 20 + 15)


def test_attention_of_a_part_of_a_sequence(fake_ranks):
    """Each of two ranks computes half of the causal attention, forward and backward."""
    fake_ranks(2)
    mesh = {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context")), "context_parallel": "context"}
    tokens = torch.zeros(2, 16, dtype=torch.long)
    config = GPTConfig(n_layer=2, n_embd=16, n_head=2, block_size=16, vocab_size=32, dropout=0.0)
    steps = [compile_fake(lambda: GPT(config), tokens, tokens, **options) for options in ({}, mesh)]
    for traces in (thunder.last_traces, thunder.last_backward_traces):
        whole, part = (sum(work(b).attention for b in traces(cmodel)[-1].bound_symbols) for cmodel in steps)
        assert whole == 2 * part > 0
