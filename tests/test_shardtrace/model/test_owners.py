import shardtrace
from shardtrace.model.distribute import Owned, assign_owners

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Zoo

sizes = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.integers(1, 1000)), min_size=1, max_size=30)


def parameters(sizes):
    return [Owned(f"{module}.{i}", module, size) for i, (module, size) in enumerate(sizes)]


def load(owned, owners, ranks):
    return [sum(p.bytes for p in owned if owners[p.name] == rank) for rank in range(ranks)]


@given(sizes, st.integers(1, 5))
def test_bytes_are_even(sizes, ranks):
    owned = parameters(sizes)
    best = max(sum(p.bytes for p in owned) / ranks, max(p.bytes for p in owned))  # a lower bound
    # a rank gets a tensor only while its load is the smallest: that load is at most the mean
    assert max(load(owned, assign_owners(owned, ranks, 1.0), ranks)) <= 2 * best


@given(sizes, st.integers(1, 5))
def test_modules_stay_together(sizes, ranks):
    owned = parameters(sizes)
    owners = assign_owners(owned, ranks, 0.0)
    assert all(len({owners[p.name] for p in owned if p.module == module}) <= 1 for module in "abcd")


def test_in_between_only_small_modules_stay_together():
    owned = parameters([("a", 10), ("a", 10), ("b", 400), ("b", 400)])
    owners = assign_owners(owned, 2, 0.5)
    assert owners["a.0"] == owners["a.1"]
    assert owners["b.2"] != owners["b.3"]


def test_the_largest_goes_first():
    owned = parameters([("a", 1), ("b", 1), ("c", 2)])
    assert load(owned, assign_owners(owned, 2, 1.0), 2) == [2, 2]


@pytest.mark.parametrize("evenness", [0.0, 0.5, 1.0])
def test_owners_have_about_the_same_bytes(fake_ranks, evenness):
    held = []
    for rank in range(4):
        fake_ranks(4, rank=rank)
        model = shardtrace.fsdp(Zoo(), sharding_strategy="owner", init_policy=shardtrace.InitPolicy(evenness=evenness))
        held.append(sum(p.numel() for p in model.parameters()))
        torch.distributed.destroy_process_group()
    assert sum(held) == sum(p.numel() for p in Zoo().parameters())
    if evenness == 1:
        assert max(held) <= 4 / 3 * max(sum(held) / 4, max(p.numel() for p in Zoo().parameters()))
