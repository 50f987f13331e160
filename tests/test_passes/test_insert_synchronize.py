import shardtrace
from passes.plan import Placement

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from models import Zoo, tokens
from torch import nn


def two_linear():
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5))


def synchronized(cmodel):
    """The members of each bucket, and whether they are reduced; of replicated ones after ``replicated``."""
    lines = [b for b in stage(cmodel, "insert_synchronize").bound_symbols if b.sym.name == "synchronize"]
    buckets = [b.args[1] for b in lines]
    kinds = ["replicated " * (b.plan.placement is Placement.REPLICATE) for b in buckets]
    return {
        kind + b.label: {m.parameter.name: m.trainable for m in b.members}
        for kind, b in zip(kinds, buckets, strict=True)
    }


@pytest.mark.parametrize("world_size", [2, 8, 128])
def test_golden(fake_ranks, world_size):
    fake_ranks(world_size)
    trace = stage(compile_fake(two_linear, torch.ones(3, 6)), "insert_synchronize")
    assert_expected_inline(
        text(trace),
        """\
(t0, t1) = synchronize((t_0_weight, t_0_bias), b_0)
(t2,) = torch_linear_0(input, t0, t1)
(t3,) = torch_tanh_0(t2)
(t4, t5) = synchronize((t_2_weight, t_2_bias), b_2)
(t6,) = torch_linear_1(t3, t4, t5)
return {'output': (t6,), 'flat_args': [input, t_0_bias, t_0_weight, t_2_bias, t_2_weight]}""",
    )


def test_full_shapes_come_back(fake_ranks):
    fake_ranks(8, rank=7)
    trace = stage(compile_fake(two_linear, torch.ones(3, 6)), "insert_synchronize")
    full = [tuple(o.shape) for b in trace.bound_symbols if b.sym.name == "synchronize" for o in b.flat_proxy_outs]
    assert full == [(64, 6), (64,), (5, 64), (5,)]


def test_zoo_of_parameters(fake_ranks):
    """Tied ones once, unused and empty ones not at all, frozen ones unreduced; grouped by first use around the blocks."""
    fake_ranks(2)
    cmodel = compile_fake(Zoo, *tokens(2), bucketing_strategy="block")
    block = {"norm": True, "up.weight": True, "up.bias": True, "down": True}
    assert synchronized(cmodel) == {
        "embedding..root": {"embedding.weight": True, "position": True, "offset": True},
        "blocks.0": {f"blocks.0.{k}": v for k, v in block.items()},
        "blocks.1": {f"blocks.1.{k}": v for k, v in block.items()},
        "replicated root": {"scale": True},
        "root": {"frozen": False, "row": True},
    }


class Detached(nn.Module):
    """Uses one parameter only where no gradient flows, and returns one unchanged."""

    def __init__(self):
        super().__init__()
        self.used, self.quiet, self.returned = (nn.Parameter(torch.ones(4, 2)) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            y = x * self.quiet.sum()
        return (x * self.used).sum() + y.sum(), self.returned


def test_no_grad_use_is_not_reduced_and_a_returned_parameter_is_whole(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(Detached()))
    loss, returned = cmodel(torch.ones(4, 2))
    assert returned.shape == (4, 2)
    (loss + returned.sum()).backward()
    assert synchronized(cmodel) == {"root": {"quiet": False, "used": True, "returned": True}}
    assert cmodel.quiet.grad is None
    assert cmodel.returned.grad.to_local().shape == (2, 2)


def test_dtypes_get_buckets_of_their_own(fake_ranks):
    fake_ranks(2)

    def mixed():
        model = two_linear()
        model[2].to(torch.bfloat16)
        return nn.Sequential(*[model[0], model[1], Cast(), model[2]])

    cmodel = compile_fake(mixed, torch.ones(3, 6), bucketing_strategy=100)
    rows = shardtrace.collectives(cmodel)
    assert {(r.kind, r.dtype) for r in rows} == {
        (k, d) for k in ("all_gather", "reduce_scatter") for d in ("f32", "bf16")
    }


class Cast(nn.Module):
    def forward(self, x):
        return x.to(torch.bfloat16)


class Counts(nn.Module):
    """Adds to a parameter, seen through ``view``, in place."""

    def __init__(self, view):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.view = view

    def forward(self, x):
        self.view(self.calls).add_(1)
        return self.linear(x)


@pytest.mark.parametrize(
    "view",
    [torch.ravel, torch.positive, torch.detach, lambda p: p.view(2, 2).moveaxis(0, 1)],
    ids=["ravel", "positive", "detach", "moveaxis"],
)
def test_views_that_are_updated_in_place_are_refused(fake_ranks, view):
    """Thunder's own list of symbols that return views lacks some of these."""
    fake_ranks(2)
    with pytest.raises(RuntimeError, match="parameter 'calls' is updated in place in forward"):
        compile_fake(lambda: Counts(view), torch.ones(3, 4))


@pytest.mark.parametrize("result", [lambda p: p + 1, lambda p: p.to(torch.bfloat16)], ids=["sum", "cast"])
def test_results_may_be_updated_in_place(fake_ranks, result):
    fake_ranks(2)
    compile_fake(lambda: Counts(result), torch.ones(3, 4))
