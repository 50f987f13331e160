"""Gradient accumulation: ``no_sync``. (The lines of the trace: tests/test_passes/test_accumulate.py.)"""

import shardtrace

import pytest
import step_workers as workers
import thunder
import torch
from models import Zoo

PARTS = {"embed*": "ddp", "blocks.0.*": "owner", "*": "zero3"}


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp", PARTS])
def test_micro_batches_equal_one_batch(two_ranks, strategy):
    two_ranks.run(workers.accumulate, strategy=strategy)


def test_hybrid(four_ranks):
    four_ranks.run(workers.accumulate, strategy="hybrid_zero2", mesh=(2, 2))


def test_reduced_in_each_step(two_ranks):
    two_ranks.run(workers.accumulate, strategy="zero3", reduce_each=True)


def test_sums_are_in_fp32(two_ranks):
    two_ranks.run(workers.sums_in_fp32)


def test_a_sum_that_is_not_reduced_is_an_error(two_ranks):
    for message in two_ranks.run(workers.left_behind):
        assert (
            "parameter 'second.weight' has gradients from no_sync that the step after it did not reduce, as it did not "
            "use the parameter: use it there too, or call no_sync(model, reduce_each=True)"
        ) in message


def freeze_between():
    """The reducing step says so, compiled before or not; unfrozen, it reduces what was added up."""
    model = shardtrace.fsdp(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), timeout=20)
    cmodel, x, weight = thunder.jit(model), torch.ones(2, 4), model[0].weight
    messages = []
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            cmodel(x).square().sum().backward()
        weight.requires_grad_(False)
        try:
            cmodel(x)
        except RuntimeError as error:
            messages.append(str(error))
        with torch.no_grad():
            cmodel(x)  # reduces nothing
        with model.no_sync():
            cmodel(x)
        weight.requires_grad_(True)
        cmodel(x).square().sum().backward()
        twice = weight.grad.clone()
        weight.grad = None
        cmodel(x).square().sum().backward()
        torch.testing.assert_close(twice, 2 * weight.grad)
        weight.requires_grad_(False)
        cmodel(x).sum().backward()  # a step of a frozen parameter is compiled, for the second turn
        weight.requires_grad_(True)
    return messages


def test_a_parameter_that_is_frozen_before_its_sum_is_reduced(two_ranks):
    for messages in two_ranks.run(freeze_between):
        assert len(messages) == 2
        for message in messages:
            assert "parameter '0.weight' was frozen before the gradients that no_sync has added up for it" in message


def test_an_exception_drops_the_sums(two_ranks):
    two_ranks.run(workers.dropped_by_an_exception)


@pytest.mark.filterwarnings("ignore:No op since neither")  # says Thunder, which does not know of ours
def test_thunders_own_no_sync(two_ranks):
    two_ranks.run(workers.with_thunders_own_no_sync)


def test_of_an_unsharded_model():
    with pytest.raises(ValueError, match=r"Zoo is not sharded: call shardtrace\.fsdp"), shardtrace.no_sync(Zoo()):
        pass
