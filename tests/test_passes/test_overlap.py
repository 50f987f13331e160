"""When collectives of values are issued and waited for, and what is computed meanwhile."""

from collections import Counter
from itertools import product

import shardtrace
from passes.analysis.calls import block_functions
from passes.analysis.recognise import is_products
from passes.comm import sequence
from passes.plan import CostModel, Device, Link
from passes.plan.plan import ContextPlan, Split
from passes.proof import certificates
from passes.schedule import not_in_pieces, overlap_sequence, rows_at
from shardtrace import CompilePolicy

import pytest
import thunder
import torch
from contexts import VOCAB, gpt, mesh_of
from thunder import torch as ltorch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

SIZE = 64
PRODUCT = 2 * SIZE**3  # seconds, at one FLOP/s
LETTERS = {
    "matmul": "m",
    "exp": "e",
    "copy_": "c",
    "dropout": "d",
    "sin": "s",
    "reduce_scatter_parts": "<",
    "all_gather_parts": "<",
}
LETTERS |= {"wait_reduce_scatter_parts": ">", "wait_all_gather_parts": ">"}


def part(products):
    """Rows of ranks whose collectives take as long as so many products."""
    bandwidth = SIZE * SIZE * 4 / 2 / (products * PRODUCT)
    cost = CostModel(Link(bandwidth, latency=0.0), Device(1.0, 1.0, bandwidth=1e15, overhead=0.0))
    return sequence.Part(ContextPlan(2, pieces=1, cost=cost), Split.along(0, SIZE))


def order(write):
    """The lines of a backward, a letter each: ``write`` is given the gradient of a product and its two operands, and
    gives what is returned."""
    trace = TraceCtx()
    with tracectx(trace):
        matrix = {"shape": (SIZE, SIZE), "device": devices.cpu, "dtype": dtypes.float32}
        trace.args = [TensorProxy(name, **matrix) for name in ("g", "x", "w")]
        for a in trace.args:
            prims.unpack_trivial(a, name=a.name)
        prims.python_return(write(*trace.args))
    return "".join(LETTERS.get(b.sym.name, "") for b in overlap_sequence(trace).bound_symbols)


def test_gradients_of_parameters_are_computed_while_rows_are_sent():
    def write(g, x, w):
        return ltorch.matmul(g, x), ltorch.exp(sequence.SCATTER(ltorch.matmul(g, w), part(1)))

    assert order(write) == "m<m>e"


@pytest.mark.parametrize(
    ("products", "expected"), [(0.5, "mmme<m>e"), (1, "mme<m>em"), (2, "e<mm>emm"), (9, "e<mmmm>e")]
)
def test_as_many_move_as_the_collective_takes_and_the_next_one(products, expected):
    def write(g, x, w):
        made = [ltorch.matmul(g, x) for _ in range(4)]
        return made, ltorch.exp(sequence.SCATTER(ltorch.exp(w), part(products)))

    assert order(write) == expected


def test_what_is_left_comes_behind_the_next_collective():
    def write(g, x, w):
        made, p = [ltorch.matmul(g, x) for _ in range(4)], part(2)
        rows = ltorch.exp(sequence.SCATTER(ltorch.exp(w), p))
        return made, ltorch.exp(sequence.GATHER(rows, p))

    assert order(write) == "e<mm>e<mm>e"


@pytest.mark.parametrize("read", [True, False])
def test_no_line_moves_past_one_that_changes_a_value(read):
    def write(g, x, w):
        made = ltorch.matmul(g, x)
        prims.copy_(g, x if read else w, grad_enabled=False)
        return made, ltorch.exp(sequence.SCATTER(ltorch.matmul(g, g), part(1)))

    assert order(write) == "mcm<>e"


def test_random_numbers_are_drawn_where_they_were():
    def write(g, x, w):
        made = ltorch.matmul(g, x), ltorch.dropout(g)
        return *made, ltorch.exp(sequence.SCATTER(ltorch.matmul(g, w), part(1)))

    assert order(write) == "dm<m>e"


def test_a_line_is_not_later_than_what_reads_it():
    def write(g, x, w):
        made = ltorch.matmul(g, x)
        sent = sequence.SCATTER(ltorch.matmul(g, w), part(9))
        return ltorch.exp(made), ltorch.exp(sent)

    assert order(write) == "m<me>e"


def test_a_line_moves_once():
    """The second time it would come behind one that has moved with it, and that reads it."""

    def write(g, x, w):
        made, p = ltorch.matmul(g, x), part(9)
        beside = ltorch.exp(made)
        first = sequence.SCATTER(ltorch.matmul(g, w), p)
        after = ltorch.sin(made)
        second = sequence.SCATTER(ltorch.exp(w), p)
        return beside, after, ltorch.exp(first), ltorch.exp(second)

    assert order(write) == "m<me<es>e>e"


# ---- products in pieces ----


def compiled(latency=0.0, **options):
    """A step of a GPT on two ranks, where products take as long as the rows that travel."""
    cost = CostModel(Link(1e6, latency), Device(1e6, 1e6, bandwidth=1e12, overhead=0.0))
    policy = CompilePolicy(cost_model=cost, **options)
    mesh = mesh_of((1, 2), "tensor")
    model = shardtrace.fsdp(gpt(layers=2), mesh=mesh, tensor_parallel="tensor", compile_policy=policy)
    x = torch.randint(VOCAB, (4, 8))
    jitted = thunder.jit(model)
    jitted(x, x).backward()
    return jitted


def lines_of(jitted):
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    bodies = [*traces, *(called.trace for called in block_functions(*traces))]
    return [b for body in bodies for b in body.bound_symbols]


def test_products_are_computed_while_their_rows_travel(fake_ranks):
    fake_ranks(2)
    jitted = compiled()
    found = Counter(b.sym.name for b in lines_of(jitted) if is_products(b))
    assert set(found) == {"all_gather_products", "reduce_scatter_products"}
    assert shardtrace.prove(jitted).verdict == "proven"
    apart = compiled(disable_passes=["overlap_sequence"])
    assert sorted(shardtrace.collectives(jitted)) == sorted(shardtrace.collectives(apart))
    sooner, later = (shardtrace.inspect(m).totals.seconds for m in (jitted, apart))
    assert sooner < later


def test_products_are_not_cut_where_each_piece_waits_for_a_link(fake_ranks):
    fake_ranks(2)
    assert not any(map(is_products, lines_of(compiled(latency=1e3))))


def other_part(line):
    part = line.args[1]
    return replaced(line, 1, sequence.Part(part.plan, Split.along(1, part.split.length)))


def replaced(line, at, value):
    return line.from_bsym(args=(*line.args[:at], value, *line.args[at + 1 :]))


def with_products(line, change):
    of = line.args[2]
    return replaced(line, 2, sequence.Products("changed", *change(list(of.products), list(of.shapes)), of.pieces))


CHANGES = {
    "rows": lambda line: replaced(line, 0, line.args[-1]),
    "an operand": lambda line: replaced(line, 3, line.args[0]),
    "part": other_part,
    "function": lambda line: with_products(line, lambda p, s: ([p[0]._replace(function=torch.add), *p[1:]], s)),
    "place of the rows": lambda line: with_products(line, lambda p, s: ([p[0]._replace(at=1), *p[1:]], s)),
    "shape": lambda line: with_products(line, lambda p, s: (p, [tuple(reversed(s[0])), *s[1:]])),
    "lines": lambda line: line.from_bsym(subsymbols=[b for b in line.subsymbols if rows_at(b) is None]),
}


def test_a_line_whose_products_are_not_those_of_its_lines_is_found(fake_ranks):
    fake_ranks(2)
    lines = {b.sym.name: b for b in lines_of(compiled()) if is_products(b)}
    for line in lines.values():
        assert not_in_pieces(line) == ""
        for name, change in CHANGES.items():
            assert not_in_pieces(change(line)), (line.sym.name, name)
    whole, *results = lines["all_gather_products"].output
    assert not_in_pieces(lines["all_gather_products"].from_bsym(output=(*results, whole)))


def found_of_products(gathers, pieces=2, leads=True):
    certificates._found_of_products.cache_clear()
    function = sequence._gather_products if gathers else sequence._sum_products
    return certificates._found_of_products(certificates.Beside(function, gathers, 3, pieces, leads))


@pytest.mark.parametrize("gathers", [True, False])
def test_products_in_pieces_do_what_their_lines_do(gathers, monkeypatch):
    for pieces, leads in product((1, 4), (True, False)):
        assert found_of_products(gathers, pieces, leads) == ""
    send = "_broadcast" if gathers else "_reduce"
    right = getattr(sequence, send)
    with monkeypatch.context() as patch:
        patch.setattr(sequence, send, lambda rows, root, part: right(rows, (root + 1) % 3, part))
        assert "rank 0 gets" in found_of_products(gathers)
    monkeypatch.setattr(sequence, "_wait", lambda future, part: None)
    assert "rank 0 gets" in found_of_products(gathers)
    certificates._found_of_products.cache_clear()
