"""Faults that no other test has. CONTRIBUTING.md has the table of all, and what FSDP2 does with them."""

import fault_workers as workers


def test_a_parameter_unused_on_one_rank(two_ranks):
    for ok, text in two_ranks.outcomes(workers.unused_on_one_rank):
        assert not ok
        assert text.startswith(
            "RankMismatchError: the ranks differ in the collectives of Switch: rank 0 has 2, rank 1 has 1; the first "
            "difference, at position 1: rank 0 has forward: all_gather of second "
        )


def test_a_parameter_that_is_not_contiguous(two_ranks):
    two_ranks.run(workers.non_contiguous)


def test_batch_norm_buffers(two_ranks):
    for warnings in two_ranks.run(workers.batch_norm_buffers):
        assert warnings == [
            "2 buffers differ between ranks ('1.running_mean' and others): each rank has its own in its state dict, and "
            "a checkpoint gets the first rank's; call shardtrace.sync_buffers(model) before"
        ]


def test_an_optimizer_that_was_built_before(two_ranks):
    two_ranks.run(workers.optimizer_built_before)


def test_conversion_after_a_step(two_ranks):
    for ok, text in two_ranks.outcomes(workers.converted_after_a_step):
        assert not ok
        assert (
            "the dtype of parameter 'weight' was torch.float32 when fsdp() sharded it and is torch.bfloat16 now" in text
        )
