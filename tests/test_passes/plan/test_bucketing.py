from passes.plan.bucket import MB, Use, choose_pieces, group_uses
from passes.plan.cost import GLOO, Link
from passes.plan.plan import BucketPlan, Member, ShardedParameter

import pytest
from thunder.core import dtypes

EMBED, H0, H1, NORM, HEAD = ("embed", None), ("h.0.mlp", "h.0"), ("h.1.mlp", "h.1"), ("norm", None), ("head", None)


def uses(bucketing, *places, rows=256, dtype=dtypes.float32, device="cpu", plan=None):
    """Parameters "weight" and "bias" of each (layer, block), in order of use; weights of ``rows`` KB over 2 ranks."""
    plan = plan or BucketPlan("Model", world_size=2, bucketing=bucketing)
    return [
        Use(Member(ShardedParameter(plan, f"{layer}.{name}", shape, layer, block=block), trainable=True), dtype, device)
        for layer, block in places
        for name, shape in (("weight", (rows, 256)), ("bias", (256,)))
    ]


def summary(groups):
    return {g.label: [u.parameter.name for u in g.uses] for g in groups}


def test_none_is_one_parameter_each():
    assert summary(group_uses(uses("none", H0))) == {
        "h.0.mlp.weight": ["h.0.mlp.weight"],
        "h.0.mlp.bias": ["h.0.mlp.bias"],
    }


def test_layer_is_what_a_module_owns():
    assert list(summary(group_uses(uses("layer", EMBED, H0, H1)))) == ["embed", "h.0.mlp", "h.1.mlp"]


def test_block_groups_the_rest_by_first_use():
    groups = summary(group_uses(uses("block", EMBED, H0, H1, NORM, HEAD)))
    assert list(groups) == ["embed", "h.0", "h.1", "norm..head"]
    assert groups["norm..head"] == ["norm.weight", "norm.bias", "head.weight", "head.bias"]


def test_block_stays_together_whatever_comes_between():
    groups = summary(group_uses(uses("block", H0, NORM, H0)[:4] + uses("block")))
    assert list(groups) == ["h.0", "norm"]


def test_size_packs_consecutive_parameters():
    """A weight is 256 KB; 0.6 MB hold two with their biases."""
    groups = group_uses(uses(0.6, EMBED, H0, H1, NORM))
    assert [len(g.uses) for g in groups] == [4, 4]
    assert all(sum(u.bytes for u in g.uses) <= 0.6 * 2**20 for g in groups)


def test_larger_than_the_size_goes_by_itself():
    groups = group_uses(uses(0.1, EMBED))
    assert [g.label for g in groups] == ["embed", "embed"]


@pytest.mark.parametrize("other", [{"dtype": dtypes.bfloat16}, {"device": "cuda:0"}, {}])
def test_dtypes_devices_and_models_do_not_mix(other):
    """The last case is another model, which has another plan."""
    first = uses("block", H0)
    plan = first[0].parameter.plan if other else None
    assert len(group_uses(first + uses("block", H0, plan=plan, **other))) == 2


def test_a_block_in_pieces_of_consecutive_parameters():
    plan = BucketPlan("Model", world_size=2, pieces=2)
    groups = group_uses(uses("block", H0, ("h.0.attn", "h.0"), H1, ("h.1.attn", "h.1"), EMBED, plan=plan))
    assert [g.label for g in groups] == ["h.0.mlp", "h.0.attn", "h.1.mlp", "h.1.attn", "embed"]


def test_pieces_cover_a_block_that_one_parameter_dominates():
    plan = BucketPlan("Model", world_size=2, pieces=4)
    (whole,) = group_uses(uses("block", H0, plan=plan)[:1])
    assert whole.label == "h.0"


SLOW, FAST = Link(0.117e9, 300e-6), Link(300e9, 30e-6)


@pytest.mark.parametrize(
    ("block_bytes", "blocks", "ranks", "link", "pieces"),
    [
        (7 * MB, 8, 2, SLOW, 3),
        (7 * MB, 8, 2, GLOO, 1),  # nobody has measured it
        (7 * MB, 8, 1, SLOW, 1),
        (10_000, 8, 2, SLOW, 1),  # all of it takes less than a latency
        (400 * MB, 32, 8, FAST, 1),  # 1.2 ms, and a latency for each of 96 collectives
        (400 * MB, 32, 8, Link(12e9, 30e-6), 4),
        (400 * MB, 32, 8, Link(10e9, 0), 4),
        (0, 0, 8, SLOW, 1),
    ],
)
def test_pieces_follow_from_the_link(block_bytes, blocks, ranks, link, pieces):
    assert choose_pieces(block_bytes, blocks, ranks, link) == pieces
