from passes.kernels import executor

import pytest
import thunder
import torch
from eager import compare


def squares(parts):
    return torch.cat([(p * p * (i + 1)).flatten() for i, p in enumerate(parts)])


PARTS = {
    "chunk": lambda a: squares(a.chunk(3, dim=-1)),
    "chunk, fewer": lambda a: squares(torch.chunk(a, 4, 1)),
    "chunk, one of them": lambda a: a.chunk(2, -1)[1] * 2,
    "chunk, keywords": lambda a: squares(torch.chunk(a, chunks=2)),
}


@pytest.mark.parametrize("name", PARTS)
def test_equals_eager(name):
    compare(PARTS[name], torch.randn(4, 6, requires_grad=True), kernels=[name.partition(",")[0]])


def test_gradients_are_joined_and_not_padded():
    jitted = thunder.jit(lambda a: sum(p * p for p in a.chunk(2)), executors=[executor])
    jitted(torch.randn(4, 6, requires_grad=True))
    backward = str(thunder.last_backward_traces(jitted)[-1])
    assert "torch.cat" in backward
    assert "pad" not in backward


def test_integers_are_left_to_thunder():
    jitted = thunder.jit(lambda a: a.chunk(2), executors=[executor])
    torch.testing.assert_close(list(jitted(torch.arange(4))), [torch.arange(2), torch.arange(2, 4)])
    assert not any(b.sym.executor is executor for b in thunder.last_traces(jitted)[-1].bound_symbols)
