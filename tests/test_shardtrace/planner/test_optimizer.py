import functools

from shardtrace.planner.estimate import optimizer_cost

import pytest
import torch


def test_state_and_work_of_an_element():
    adam, sgd = optimizer_cost("AdamW"), optimizer_cost(torch.optim.SGD)
    momentum = optimizer_cost(functools.partial(torch.optim.SGD, momentum=0.9))
    assert (adam.name, adam.state) == ("AdamW", 8.0)
    assert (sgd.state, sgd.moved, momentum.state) == (0.0, 12.0, 4.0)  # reads p and its gradient, writes p
    assert adam.moved > momentum.moved > sgd.moved


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"torch\.optim has no optimizer 'Adamw'"):
        optimizer_cost("Adamw")
