"""What takes real ranks: broadcasts, groups, meta-device models, and ranks that differ."""

import pytest
import workers


@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_from(two_ranks, source):
    two_ranks.run(workers.broadcast_from, source=source)


@pytest.mark.parametrize("with_init_fn", [False, True])
def test_meta_device(two_ranks, with_init_fn):
    two_ranks.run(workers.meta_device, with_init_fn=with_init_fn)


def test_different_groups(three_ranks):
    three_ranks.run(workers.on_different_groups)


def all_raise(ranks, message, function, error="RankMismatchError", **kwargs):
    for ok, text in ranks.outcomes(function, **kwargs):
        assert not ok
        assert text.startswith(error)
        assert message in text.split("\n\n")[0]


@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", "the first difference, at position 0: rank 0 has parameter a0.weight of shape ("),
        ("dtype", "position 0: rank 0 has parameter a0.weight of shape (6, 6), torch."),
        ("depth", "the ranks differ in the parameters of Sequential: rank 0 has "),
        ("name", "position 0: rank 0 has parameter "),
        ("frozen", "position 0: rank 0 has parameter a0.weight"),
    ],
)
def test_another_model_on_one_rank(two_ranks, how, message, on):
    all_raise(two_ranks, message, workers.differs, how=how, on=on)


def test_a_refusal_on_one_rank_is_raised_on_all(two_ranks):
    outcomes = two_ranks.outcomes(workers.refuses_on_one_rank, on=1)
    assert [ok for ok, _ in outcomes] == [False, False]
    assert "rank 1: parameter 'weight' has a gradient" in outcomes[0][1]
    assert outcomes[1][1].startswith("ValueError: parameter 'weight' has a gradient")


def test_a_rank_that_does_not_come(three_ranks):
    outcomes = three_ranks.outcomes(workers.does_not_come, on=1)
    three_ranks.stop()  # from now on their comparisons do not meet
    assert [ok for ok, _ in outcomes] == [False, True, False]
    for rank in (0, 2):
        assert "rank(s) 1 did not come to compare the parameters of Linear within 0.5 s" in outcomes[rank][1]


def test_layers_in_another_order(two_ranks):
    message = (
        "the ranks differ in the collectives of Branches; the first difference, at position 0: "
        "rank 0 has forward: all_gather of left (f32, 80 bytes: left.weight, left.bias); "
        "rank 1 has forward: all_gather of right"
    )
    all_raise(two_ranks, message, workers.runs_in_another_order)


def test_a_new_shape_on_one_rank_alone(two_ranks):
    two_ranks.run(workers.compiles_alone)


@pytest.mark.parametrize("on", [0, 1])
def test_a_parameter_changed_on_one_rank_is_an_error_on_all(two_ranks, on):
    for ok, text in two_ranks.outcomes(workers.changed_on_one_rank, on=on):
        assert not ok
        assert "the dtype of parameter 'weight' was torch.float32 when fsdp() sharded it" in text
