"""Sharded training against the single-process model on the whole batch: losses and all parameters."""

import pytest
import workers


@pytest.mark.parametrize(
    ("strategy", "bucketing", "optimizer"),
    [
        ("zero2", "none", "adamw"),
        ("zero2", "layer", "adamw"),
        ("zero2", 0.0005, "adamw"),
        ("zero3", "layer", "sgd"),  # which sees gradients that are wrong by a factor
        ("zero3", "block", "adamw"),
        ("zero3", 0.0005, "adamw"),
    ],
)
def test_two_ranks(two_ranks, strategy, bucketing, optimizer):
    two_ranks.run(workers.train_zoo, strategy=strategy, bucketing=bucketing, optimizer=optimizer)


@pytest.mark.parametrize(("strategy", "bucketing"), [("zero2", "block"), ("zero3", "none"), ("zero3", "block")])
def test_three_ranks(three_ranks, strategy, bucketing):
    three_ranks.run(workers.train_zoo, strategy=strategy, bucketing=bucketing)


def test_losses_of_ddp(two_ranks):
    two_ranks.run(workers.losses_of_ddp)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_mixed_dtypes(two_ranks, strategy):
    two_ranks.run(workers.mixed_dtypes, strategy=strategy)


def test_accumulation_and_hooks(two_ranks):
    two_ranks.run(workers.retain_and_accumulate)


def test_fsdp_needs_no_more_memory_than_one_module(two_ranks):
    assert max(two_ranks.run(workers.peak_of_fsdp)) < 1
