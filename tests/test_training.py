"""Sharded training against the single-process model on the whole batch: losses and all parameters."""

import pytest
import workers


@pytest.mark.parametrize("bucketing", ["none", "layer", "block", 0.0005])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_two_ranks(two_ranks, strategy, bucketing):
    two_ranks.run(workers.train_zoo, strategy=strategy, bucketing=bucketing)


@pytest.mark.parametrize(("strategy", "bucketing"), [("zero2", "block"), ("zero3", "none"), ("zero3", "block")])
def test_three_ranks(three_ranks, strategy, bucketing):
    three_ranks.run(workers.train_zoo, strategy=strategy, bucketing=bucketing)
