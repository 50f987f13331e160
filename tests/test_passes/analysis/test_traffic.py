"""Collectives and bytes of a step against closed formulas."""

import shardtrace

import pytest
import torch
from golden import compile_fake
from torch import nn

ROWS = [(6, 64), (64, 64), (64, 5)]  # in, out features


def mlp():
    return nn.Sequential(*(nn.Linear(i, o) for i, o in ROWS))


def padded_bytes(world_size):
    return sum(-(-o // world_size) * world_size * (i + 1) * 4 for i, o in ROWS)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize(("bucketing", "buckets"), [("none", 6), ("layer", 3), ("block", 3), (0.0025, 3), (100, 1)])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_counts_and_bytes(fake_ranks, strategy, bucketing, buckets, world_size):
    fake_ranks(world_size)
    x = torch.ones(3, 6, requires_grad=True)
    cmodel = compile_fake(mlp, x, sharding_strategy=strategy, bucketing_strategy=bucketing)
    rows = shardtrace.collectives(cmodel)
    sent = {(r.kind, r.phase): [] for r in rows}
    for r in rows:
        sent[r.kind, r.phase].append(r.bytes)
    everything = padded_bytes(world_size)
    assert sum(sent["all_gather", "forward"]) == sum(sent["reduce_scatter", "backward"]) == everything
    assert len(sent["all_gather", "forward"]) == len(sent["reduce_scatter", "backward"]) == buckets
    again = sent.get(("all_gather", "backward"), [])
    if strategy == "zero2":
        assert again == []
    elif bucketing == "none":  # biases are not needed in backward
        assert len(again) == 3
    else:
        assert (sum(again), len(again)) == (everything, buckets)


def test_rows_are_readable(fake_ranks):
    fake_ranks(2)
    rows = shardtrace.collectives(compile_fake(mlp, torch.ones(3, 6)))
    head, line, *_ = str(rows).splitlines()
    assert head.split() == ["kind", "phase", "bucket", "dtype", "bytes", "parameters"]
    assert line.split()[:4] == [*rows[0][:4]]
    assert len(str(rows).splitlines()) == len(rows) + 1
    assert repr(rows) == str(rows)
    assert f"<td>{rows[0].kind}</td><td>forward</td>" in rows._repr_html_()
    assert str(type(rows)()) == "no rows"
    assert str(type(rows)([rows[0]] * 100)).endswith("and 40 more rows: see to_pandas()")
    first = rows[0]
    assert first == ("all_gather", "forward", "0", "f32", 64 * 7 * 4, ("0.weight", "0.bias"))
    assert str(first) == "all_gather of 0 (f32, 1792 bytes: 0.weight, 0.bias)"
