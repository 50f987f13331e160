"""Strategies: their names, the collectives that they send, and bad input."""

import re

import shardtrace
from shardtrace import CommPolicy, ShardingStrategy
from shardtrace.model.state import state_of
from shardtrace.options.policies import grouped
from shardtrace.options.strategy import assign, parse_bucketing_strategy, parse_rules, parse_sharding_strategy

import pytest
import thunder
import torch
import torch.distributed.fsdp
from golden import compile_fake
from models import Zoo
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from torch import nn


@pytest.mark.parametrize(
    ("spelling", "strategy"),
    [
        ("zero3", ShardingStrategy.ZERO3),
        ("ZeRO2", ShardingStrategy.ZERO2),
        ("FULL_SHARD", ShardingStrategy.ZERO3),
        ("shard_grad_op", ShardingStrategy.ZERO2),
        (ShardingStrategy.ZERO2, ShardingStrategy.ZERO2),
        (FSDPType.ZERO3, ShardingStrategy.ZERO3),
        (torch.distributed.fsdp.ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.ZERO2),
        (torch.distributed.fsdp.ShardingStrategy.NO_SHARD, ShardingStrategy.DDP),
        (torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_ZERO3),
        (torch.distributed.fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.HYBRID_ZERO2),
        ("shard_grad", ShardingStrategy.ZERO2),
        ("DDP", ShardingStrategy.DDP),
        ("Owner", ShardingStrategy.OWNER),
    ],
)
def test_strategies_as_the_neighbours_spell_them(spelling, strategy):
    assert parse_sharding_strategy(spelling) is strategy


@pytest.mark.parametrize(
    ("spelling", "bucketing"),
    [("Block", "block"), ("none", "none"), (FSDPBucketingStrategy.LAYER, "layer"), (25, 25.0), (0.5, 0.5)],
)
def test_bucketings(spelling, bucketing):
    assert parse_bucketing_strategy(spelling) == bucketing


def test_the_first_pattern_that_matches_counts():
    rules = parse_rules({"embed.*": "ddp", "*.bias": "zero2", "*": "zero3"})
    names = ["embed.weight", "embed.bias", "h.0.bias", "h.0.weight"]
    parameters = dict.fromkeys(names, nn.Parameter(torch.ones(2)))
    assert [s.value for s in assign(rules, parameters).values()] == ["ddp", "ddp", "zero2", "zero3"]


def is_matrix(name, p):
    return p.ndim == 2 and "embed" not in name


def never(name, p):
    return False


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.head  # a third name, of a shared module


@pytest.mark.parametrize("pattern", ["embed.*", "head.*", "again.weight"])
def test_patterns_match_any_name_of_a_tied_parameter(fake_ranks, pattern):
    fake_ranks(2)
    model = shardtrace.fsdp(Tied(), sharding_strategy={pattern: "zero2", "*": "zero3"})
    assert state_of(model).entries[0].strategy is ShardingStrategy.ZERO2
    with pytest.raises(
        ValueError, match=f"gather_dtype='int8' for '{pattern[:3]}.* changes nothing: 'embed.weight' has"
    ):
        shardtrace.fsdp(Tied(), comm_policy=CommPolicy(gather_dtype={pattern: "int8"}))


def test_two_names_that_match_different_patterns_are_refused(fake_ranks):
    fake_ranks(2)
    rules = {"head.*": "zero2", "embed.*": "zero3"}
    message = "'embed.weight' and 'head.weight' are one tied parameter, and the patterns 'embed.*' and 'head.*' choose"
    with pytest.raises(ValueError, match=re.escape(message)):
        shardtrace.fsdp(Tied(), sharding_strategy=rules)
    with pytest.raises(ValueError, match=r"gather_dtype: 'embed.weight' and 'head.weight' are one tied parameter"):
        shardtrace.fsdp(Tied(), comm_policy=CommPolicy(gather_dtype={"head.*": "int8", "embed.*": None}))
    listed = dict.fromkeys(("embed.weight", "head.weight", "again.weight"), "zero2")
    shardtrace.fsdp(Tied(), sharding_strategy=listed | rules)


def test_predicates_see_whole_parameters(fake_ranks):
    fake_ranks(4)
    model = shardtrace.fsdp(Zoo(), sharding_strategy={"*.norm": "ddp", is_matrix: "owner", "*": "zero3"})
    assert model.blocks[0].norm.to_local().shape == (6,)
    assert model.blocks[1].up.weight.shape in ((7, 6), (0, 6))
    assert model.embedding.weight.to_local().shape == (3, 6)
    assert model.scale.to_local().shape == ()
    chosen, others = shardtrace.split_parameters(thunder.jit(model), is_matrix)
    names = {id(p): name for name, p in model.named_parameters()}
    single, rest = shardtrace.split_parameters(whole := Zoo(), is_matrix)
    whole_names = {id(p): name for name, p in whole.named_parameters()}
    assert [names[id(p)] for p in chosen] == [whole_names[id(p)] for p in single]
    assert [names[id(p)] for p in others] == [whole_names[id(p)] for p in rest]
    assert "blocks.0.down" in {names[id(p)] for p in chosen}
    with pytest.raises(ValueError, match="no parameter matches the predicate never of sharding_strategy"):
        shardtrace.fsdp(Zoo(), sharding_strategy={never: "owner", "*": "zero3"})


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "owner"])
def test_one_rank_is_the_model_itself(fake_ranks, strategy):
    fake_ranks(1)
    model = Zoo()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    shardtrace.fsdp(model, sharding_strategy=strategy)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


# ---- counts and bytes ----

ROWS = [(6, 64), (64, 64), (64, 5)]  # in, out features
BYTES = sum(o * (i + 1) for i, o in ROWS) * 4
PADDED = sum(-(-o // 2) * 2 * (i + 1) for i, o in ROWS) * 4  # over two ranks


def mlp():
    return nn.Sequential(*(nn.Linear(i, o) for i, o in ROWS))


def sent(**options):
    cmodel = compile_fake(mlp, torch.ones(3, 6), **options)
    found = {}
    for row in shardtrace.collectives(cmodel):
        count, size = found.get((row.phase, row.kind), (0, 0))
        found[row.phase, row.kind] = count + 1, size + row.bytes
    return found


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", {("backward", "all_reduce"): (3, BYTES)}),
        ("zero1", {("forward", "all_gather"): (3, PADDED), ("backward", "reduce_scatter"): (3, PADDED)}),
        ("zero2", {("forward", "all_gather"): (3, PADDED), ("backward", "reduce_scatter"): (3, PADDED)}),
        (
            "zero3",
            {
                ("forward", "all_gather"): (3, PADDED),
                ("backward", "all_gather"): (2, PADDED - 64 * 7 * 4),  # not the first layer: its input has no gradient
                ("backward", "reduce_scatter"): (3, PADDED),
            },
        ),
        (
            "owner",
            {
                ("forward", "broadcast"): (3, BYTES),
                ("backward", "broadcast"): (2, BYTES - 64 * 7 * 4),
                ("backward", "reduce"): (3, BYTES),
            },
        ),
    ],
)
def test_counts_and_bytes(fake_ranks, strategy, expected):
    fake_ranks(2)
    assert sent(sharding_strategy=strategy) == expected
    half = {key: (count, size // 2) for key, (count, size) in expected.items()}
    assert sent(sharding_strategy=strategy, mp_policy="bf16") == half


def test_gradients_may_be_reduced_in_more_bits_than_they_have(fake_ranks):
    fake_ranks(2)
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert sent(sharding_strategy="zero2", mp_policy=policy) == {
        ("forward", "all_gather"): (3, PADDED // 2),
        ("backward", "reduce_scatter"): (3, PADDED),
    }


def test_hybrid_counts(fake_ranks):
    """The inner dimension carries the usual collectives, and the outer one reduces the shards of the gradients."""
    fake_ranks(8)
    mesh = torch.distributed.init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicate", "shard"))
    found = sent(sharding_strategy="hybrid_zero2", mesh=mesh)
    assert found == {
        ("forward", "all_gather"): (3, PADDED),
        ("backward", "reduce_scatter"): (3, PADDED),
        ("backward", "all_reduce"): (3, PADDED // 2),
    }


def test_a_replicated_parameter_is_whole(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(mlp(), sharding_strategy={"0.*": "ddp", "*": "zero3"})
    assert [tuple(p.to_local().shape) for p in model.parameters()] == [(64, 6), (64,), (32, 64), (32,), (3, 64), (3,)]


# ---- other spellings ----


@pytest.mark.parametrize(("reshard", "strategy"), [(True, "zero3"), (False, "zero2")])
def test_fsdp2s_reshard_after_forward(fake_ranks, reshard, strategy):
    fake_ranks(2)
    assert [
        value.value for _, value in state_of(shardtrace.fsdp(mlp(), reshard_after_forward=reshard)).options.rules
    ] == [strategy]


def test_what_callers_of_other_libraries_write(fake_ranks):
    fake_ranks(2)
    kinds = sent(auto_wrap=True, mp="bf16", shard_strat="SHARD_GRAD_OP", TransformerBlock=nn.Linear)
    assert kinds == {("forward", "all_gather"): (3, PADDED // 2), ("backward", "reduce_scatter"): (3, PADDED // 2)}
    assert sent(auto_wrap=False, shard_strat="NO_SHARD") == {("backward", "all_reduce"): (1, BYTES)}


def test_policies_of_torch(fake_ranks):
    from functools import partial

    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

    fake_ranks(2)
    by_size = partial(size_based_auto_wrap_policy, min_num_params=1000)  # only the second layer is that large
    assert sent(bucketing_strategy=by_size, sharding_strategy="ddp")["backward", "all_reduce"][0] == 3
    for policy in (
        ModuleWrapPolicy({nn.Linear}),
        partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
    ):
        assert sent(auto_wrap_policy=policy, sharding_strategy="ddp")["backward", "all_reduce"] == (3, BYTES)


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding_strategy": "zero4"}, "unknown sharding_strategy 'zero4': choose one of 'ddp', 'zero1'"),
        ({"mp_policy": "int8"}, "unknown mp_policy 'int8': choose one of 'bf16'"),
        (
            {"mp_policy": torch.distributed.fsdp.MixedPrecisionPolicy(torch.int8)},
            "param_dtype of mp_policy is torch.int8",
        ),
        ({"sharding_strategy": "hybrid_zero3"}, "a hybrid strategy needs a mesh of two dimensions"),
        ({"sharding_strategy": {"9.*": "ddp", "*": "zero3"}}, r"no parameter matches '9\.\*'"),
        ({"sharding_strategy": {"0.*": "ddp"}}, "no pattern of sharding_strategy matches parameter '1.weight'"),
        ({"sharding_strategy": {}}, "a mapping is of patterns"),
        ({"mp": "bf16", "mp_policy": "fp16"}, "mp_policy and mp both say what mp_policy is to be"),
        ({"reshard_after_forward": 1}, r"reshard_after_forward=1: pass True .zero3., False .zero2., or the number"),
        ({"reshard_after_forward": 3}, r"reshard_after_forward=3 does not divide the 2 ranks"),
        ({"reshard_after_forward": True, "sharding_strategy": "ddp"}, "both say what sharding_strategy is to be"),
        ({"auto_wrap": False, "TransformerBlock": nn.Linear}, "both say what bucketing_strategy is to be"),
        ({"bucketing_strategy": nn.Conv2d}, "Sequential has no module that"),
        ({"evenness": 2}, "evenness must be a number from 0 to 1"),
        ({"timeout": "a minute"}, "timeout must be a number of seconds, not 'a minute'"),
        ({"accumulation_dtype": "bf16"}, "accumulation_dtype must be a torch.dtype, or None, not 'bf16'"),
        ({"steps": "always"}, "steps must be True, False, or None, not 'always'"),
        ({"kernels": "torch"}, "kernels must be True or False, not 'torch'"),
    ],
)
def test_bad_input(fake_ranks, options, message):
    fake_ranks(2)
    with pytest.raises((ValueError, TypeError), match=message):
        shardtrace.fsdp(mlp(), **grouped(options))


def test_an_unknown_argument(fake_ranks):
    fake_ranks(2)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zeros'$"):
        shardtrace.fsdp(mlp(), zeros="zero3")
    with pytest.raises(TypeError, match=r"'shard_strategy'; did you mean sharding_strategy\?"):
        shardtrace.fsdp(mlp(), shard_strategy="zero3")


def test_a_mesh_of_one_dimension_does_not_fit_a_hybrid(fake_ranks):
    fake_ranks(2)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"not one of shape \(2,\)"):
        shardtrace.fsdp(mlp(), sharding_strategy="hybrid_shard", mesh=mesh)
