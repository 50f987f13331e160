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
    """An inspection of three equal blocks, ZeRO-3 over two ranks."""
    return shardtrace.inspect(nn.Sequential(*(Block() for _ in range(3))), torch.ones(2, 6), world_size=2)
