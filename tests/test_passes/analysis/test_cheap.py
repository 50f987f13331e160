"""What a cheap block saves: the results of products and attention, and nothing that cheap lines make of them."""

import shardtrace
from passes.analysis.calls import block_functions
from passes.analysis.flops import is_library_call

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core.proxies import TensorProxy
from torch import nn

ROWS, WIDTH = 64, 16


class Block(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.mix = nn.Linear(4 * WIDTH, WIDTH), mix

    def forward(self, x):
        return x + self.down(self.mix(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.blocks = nn.ModuleList([Block(mix) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def step(mix, **options):
    torch.manual_seed(0)
    cmodel = thunder.jit(shardtrace.fsdp(Net(mix), mp_policy="fp32", **options))
    cmodel(torch.ones(ROWS, WIDTH, requires_grad=True)).backward()
    return cmodel, torch.cat([p.grad.flatten() for p in cmodel.parameters()])


def saved(cmodel):
    """The shapes of what each call of a block saves beside its inputs."""
    (part,) = block_functions(thunder.last_traces(cmodel)[-1])
    lists = [r for r in part.trace.bound_symbols[-1].args[0] if isinstance(r, list)]
    return sorted(tuple(p.shape) for found in lists for p in found if isinstance(p, TensorProxy))


wide = (ROWS, 4 * WIDTH)


@pytest.mark.parametrize(
    ("mix", "kept"),
    [
        (F.gelu, [wide]),  # the product; the activation and the norm are computed again
        (lambda y: F.gelu(torch.sin(y) * 2), [wide]),  # one value of a chain
        # the sum is smaller than what it is made of, and backward needs no more
        (lambda y: torch.exp(y.sum(-1, keepdim=True)).expand(wide) * 2, [(ROWS, 1)]),
        (lambda y: F.dropout(y, 0.5), [wide, wide]),  # the mask, which is never drawn again, and the result
    ],
)
def test_what_is_saved(single_rank, mix, kept):
    torch.manual_seed(1)
    cheap, gradients = step(mix, activation_checkpointing="cheap")
    assert saved(cheap) == kept
    torch.manual_seed(1)
    plain, expected = step(mix)
    assert torch.equal(gradients, expected)
    assert shardtrace.memory(cheap).peak < shardtrace.memory(plain).peak


def products(cmodel):
    parts = block_functions(thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1])
    return sum(is_library_call(b.sym) for part in parts for b in part.trace.bound_symbols)


def test_no_product_is_computed_twice(single_rank):
    plain, cheap, full = (products(step(F.gelu, activation_checkpointing=what)[0]) for what in (None, "cheap", "full"))
    assert plain == cheap == full - 1  # the last product of a block is not needed again
