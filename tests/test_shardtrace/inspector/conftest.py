import shardtrace

import pytest
import torch
from models import Block, Zoo, tokens
from torch import nn


@pytest.fixture(scope="session")
def zoo():
    """An inspection of a model with parameters of every kind, ZeRO-3 over four ranks."""
    return shardtrace.inspect(Zoo(), tokens(2), world_size=4)


@pytest.fixture(scope="session")
def three_blocks():
    """An inspection of three equal blocks whose lines are written for each, ZeRO-3 over two ranks."""
    return _three_blocks(compile_policy=shardtrace.CompilePolicy(repeated_blocks="inline"))


@pytest.fixture(scope="session")
def three_calls():
    """The same blocks, as calls."""
    return _three_blocks()


def _three_blocks(**options):
    x = torch.ones(2, 6, requires_grad=True)  # else the first block, which then has no gradient to pass on, is unlike
    return shardtrace.inspect(nn.Sequential(*(Block() for _ in range(3))), x, world_size=2, **options)
