"""Sharding by ``thunder.compile`` with a plugin and a recipe of Thunder."""

from contextlib import nullcontext

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from thunder.recipes import BaseRecipe
from torch import nn


class Pruning(BaseRecipe):
    """Thunder's base recipe, which prunes the prologue's checks, without a fuser."""

    def setup_fuser(self):
        pass


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def compiled(plugin, model=None):
    return thunder.compile(mlp() if model is None else model, recipe=Pruning(), plugins=plugin)


def kinds(cmodel):
    cmodel(torch.ones(2, 4)).sum().backward()
    return [row.kind for row in shardtrace.collectives(cmodel)]


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        (lambda: "shardtrace", shardtrace.fsdp),
        (lambda: "shardtrace-ddp", shardtrace.ddp),
        (lambda: shardtrace.FSDP(sharding_strategy="zero2", bucketing_strategy="layer"), None),
        (lambda: shardtrace.FSDP(process_group=dist.group.WORLD), shardtrace.fsdp),
    ],
)
def test_what_fsdp_does(fake_ranks, plugin, expected):
    fake_ranks(2)
    cmodel = compiled(plugin())
    found = kinds(cmodel)
    if expected is None:
        assert found == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    else:
        assert found == kinds(thunder.jit(expected(mlp())))


def test_one_bucket_for_each_size(fake_ranks):
    fake_ranks(2)
    assert kinds(compiled(shardtrace.DDP(bucket_size_in_mb=8))) == ["all_reduce"]
    assert kinds(compiled(shardtrace.DDP(bucket_size_in_mb=1e-6))) == ["all_reduce"] * 4
    assert kinds(thunder.jit(shardtrace.ddp(mlp(), bucket_size_in_mb=1e-6))) == ["all_reduce"] * 4


def test_thunders_names_of_mesh_dimensions(fake_ranks):
    fake_ranks(4)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    cmodel = compiled(shardtrace.FSDP(process_group=mesh))
    assert cmodel.get_parameter("0.weight").to_local().shape == (4, 4)  # half of the rows
    assert set(kinds(cmodel)) == {"all_gather", "reduce_scatter", "all_reduce"}


@on_ranks(2)
def test_gradients_of_a_recipe_that_prunes_checks():
    """The line that tells steps inside no_sync from others is not pruned."""
    torch.manual_seed(0)
    model, single = mlp(), mlp()
    single.load_state_dict(model.state_dict())
    x = torch.arange(16.0).view(4, 4) / 16
    (single(x).square().mean()).backward()
    cmodel = compiled(shardtrace.FSDP(sharding_strategy="zero2"), model)
    for number, rows in enumerate(x.view(2, 2, 4)):  # two steps of one row for each rank
        with shardtrace.no_sync(cmodel) if number == 0 else nullcontext():
            (cmodel(rows[dist.get_rank() :][:1]).square().mean() / 2).backward()
    expected = {name: p.grad for name, p in single.named_parameters()}
    torch.testing.assert_close(shardtrace.full_gradients(model), expected)


def test_buffers_that_get_memory(fake_ranks):
    fake_ranks(2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    cmodel = compiled(shardtrace.FSDP(init_policy=shardtrace.InitPolicy(device="cpu")), model)
    assert not any(t.is_meta for t in (*cmodel.parameters(), *cmodel.buffers()))
    assert cmodel.get_buffer("1.running_var").tolist() == [1] * 4


def test_refused(fake_ranks):
    fake_ranks(2)
    with pytest.raises(TypeError, match="process_group and mesh are the same"):
        shardtrace.FSDP(process_group=dist.group.WORLD, mesh=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"shardtrace\.DDP takes no sharding_strategy"):
        shardtrace.DDP(sharding_strategy="zero3")
    with pytest.raises(TypeError, match="unexpected keyword argument 'move_state_dict_to_cpu'"):
        compiled(shardtrace.FSDP(move_state_dict_to_cpu=True))
    with pytest.raises(RuntimeError, match="was given a function: call shardtrace"):
        thunder.compile(lambda x: x.sin(), recipe=Pruning(), plugins="shardtrace")(torch.ones(2))
    with pytest.raises(RuntimeError, match=r'use a recipe with interpreter="thunder.jit"'):
        compiled("shardtrace", torch.fx.symbolic_trace(mlp()))
