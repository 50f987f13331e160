"""Each traced line is marked, and the lines that autodiff and lowering make from it keep the mark."""

from passes.analysis.origins import marked, origin_of
from passes.analysis.recognise import is_collective, is_deletion, is_return, is_unpack

import thunder
import torch
from expecttest import assert_expected_inline
from golden import compile_fake
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        return hidden * hidden


def origins(trace):
    """The origins of the lines of compute, in order, each once."""
    lines = (b for b in trace.bound_symbols if not (is_deletion(b) or is_return(b) or is_unpack(b) or is_collective(b)))
    found = [f"{origin_of(b)}: {b.sym.name}" for b in lines]
    return "\n".join(dict.fromkeys(found))


def test_forward_and_backward(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(Model, torch.ones(2, 4, requires_grad=True))
    assert_expected_inline(
        origins(thunder.last_traces(cmodel)[-1]),
        """\
t0: linear
hidden: tanh
t2: mul""",
    )
    assert_expected_inline(
        origins(thunder.last_backward_traces(cmodel)[-1]),
        """\
t2: mul
None: add
hidden: tanh_backward
t0: linear_backward_input
t0: linear_backward_weight
t0: sum""",
    )


def test_the_line_that_is_marked_stays_as_it_is():
    cmodel = thunder.jit(Model())
    cmodel(torch.ones(2, 4))
    for bsym in thunder.last_traces(cmodel)[0].bound_symbols:
        new = marked(bsym)
        assert origin_of(bsym) is None
        assert str(new) == str(bsym)
        assert origin_of(new) == (bsym.flat_proxy_outs[0].name if bsym.flat_proxy_outs else None)
