"""Parts of sequences: how they are cut, put together and summed up, and that each gradient is the adjoint."""

from passes.comm.sequence import (
    Part,
    _issue_gather,
    _issue_scatter,
    _issue_sum,
    _issue_to_heads,
    _issue_to_positions,
    _wait_gather,
    _wait_scatter,
    _wait_sum,
    _wait_to_positions,
    _widen,
    local_part,
)
from passes.plan import PlainRuntime
from passes.plan.plan import ContextPlan, Split

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

SPLITS = {  # shapes of whole values
    "sequence": (Split.along(1, 8), (2, 8, 3)),
    "last": (Split.along(2, 8), (2, 3, 8)),
    "rows": (Split(0, 3, 8, 1), (24, 5)),
    "columns": (Split(1, 1, 8, 4), (2, 32)),
    "padded": (Split.along(1, 13), (2, 13, 3)),
    "shorter than its chunks": (Split.along(0, 3), (3, 2)),
}
cases = pytest.mark.parametrize(("split", "shape"), SPLITS.values(), ids=SPLITS)


def whole(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_each_rank_has_an_early_and_a_late_chunk():
    x = torch.arange(8)
    parts = [local_part(x, Part(ContextPlan(2, rank), Split.along(0, 8))).tolist() for rank in range(2)]
    assert parts == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_each_rank_has_one_chunk_of_a_parameter():
    x = torch.arange(12)
    parts = [local_part(x, Part(ContextPlan(2, r, pieces=1), Split(0, 3, 2, 2))).tolist() for r in range(2)]
    assert parts == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


def test_padding_repeats_the_last_position_or_is_filled():
    x = torch.arange(5)
    assert local_part(x, Part(ContextPlan(2, 0), Split.along(0, 5))).tolist() == [0, 1, 4, 4]
    assert local_part(x, Part(ContextPlan(2, 0), Split.along(0, 5), fill=-100)).tolist() == [0, 1, -100, -100]


@cases
def test_the_parts_of_all_ranks_are_the_whole(split, shape):
    x = whole(shape)
    parts = [Part(ContextPlan(2, rank), split) for rank in range(2)]
    assert all(local_part(x, p).shape == p.local_shape(shape) for p in parts)
    torch.testing.assert_close(sum(_widen(local_part(x, p), p) for p in parts), x)


@on_ranks(2)
@cases
@pytest.mark.parametrize("pieces", [1, 2])
def test_gather_and_scatter(split, shape, pieces):
    rank = dist.get_rank()
    part = Part(ContextPlan(2, rank, pieces=pieces, direct=True, runtime=PlainRuntime(dist.group.WORLD)), split)
    x, gradients = whole(shape), [whole(shape, seed) for seed in (1, 2)]
    found = _wait_gather(_issue_gather(local_part(x, part), part), part)
    torch.testing.assert_close(found, x, rtol=0, atol=0)
    found = _wait_scatter(_issue_scatter(gradients[rank], part), part, shape)
    expected = local_part(sum(gradients), part)
    if split.length == 8:  # else it is zero where the part is padded
        torch.testing.assert_close(found, expected)
    # the gradient of a gather: sum over ranks of <gather(x), g> is that of <x, scatter(g)>, whatever is padded
    y = local_part(whole(shape, 5 + rank), part)
    left = (_wait_gather(_issue_gather(y, part), part) * gradients[rank]).sum()
    right = (y * found).sum()
    sums = [_wait_sum(_issue_sum(v.reshape(1), part), part) for v in (left, right)]
    torch.testing.assert_close(*sums)


@on_ranks(2)
@pytest.mark.parametrize("length", [8, 13])
def test_exchange_of_heads_for_positions_and_back(length):
    rank, shape = dist.get_rank(), (3, 4, length, 5)
    part = Part(ContextPlan(2, rank, runtime=PlainRuntime(dist.group.WORLD)), Split.along(2, length))
    x = whole(shape)
    heads = _wait_gather(_issue_to_heads(local_part(x, part), part), part)
    torch.testing.assert_close(heads, x.chunk(2, 1)[rank])
    back = _wait_to_positions(_issue_to_positions(heads, part), part, tuple(heads.shape))
    torch.testing.assert_close(_widen(back, part), _widen(local_part(x, part), part))
