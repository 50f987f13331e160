import shardtrace

import pytest
import workers
from torch import nn


def test_round_trips(two_ranks):
    two_ranks.run(workers.state_dicts)


def test_round_trips_on_three_ranks(three_ranks):
    three_ranks.run(workers.state_dicts)


@pytest.mark.parametrize("broken_on", [None, 1])
def test_a_state_dict_that_does_not_fit(two_ranks, broken_on):
    for ok, error in two_ranks.outcomes(workers.wrong_state_dict, broken_on=broken_on):
        assert not ok
        assert error.startswith("RuntimeError")
        assert "position has shape (2, 2), the model's is (5, 6); missing key scale" in error


def test_full_params_runs_without_thunder(two_ranks):
    two_ranks.run(workers.full_params_call)


def test_not_sharded(fake_ranks):
    fake_ranks(2)
    with pytest.raises(ValueError, match=r"Linear is not sharded: call shardtrace.fsdp"):
        shardtrace.full_state_dict(nn.Linear(2, 2))


def test_extra_state_and_odd_buffers(two_ranks):
    two_ranks.run(workers.extra_state_and_odd_buffers)


def test_errors_inside_full_params(two_ranks):
    two_ranks.run(workers.errors_inside_full_params)
