"""Where collectives of values are issued and waited for, and which lines run in between."""

from passes.comm import sequence
from passes.overlap import overlap_sequence
from passes.plan import CostModel, Device, Link
from passes.plan.plan import ContextPlan, Split

import pytest
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
