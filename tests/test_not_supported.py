"""The README's list of what is not supported: each line of what cannot be right is refused, by an error that says what to do."""

import re
from pathlib import Path

import shardtrace

import pytest
import thunder
import torch
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

X = torch.ones(2, 4)


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class ByValue(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else x


class Writes(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(2)
        return super().forward(x)


def parallelism():
    shardtrace.fsdp(net(), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "stage")))


def operators():
    weight = shardtrace.fsdp(nn.Linear(3, 3)).weight
    torch.cdist(weight, weight)


def values():
    shardtrace.fsdp(ByValue(4, 4), compile_policy=shardtrace.CompilePolicy(eager=None))(X)


def writes():
    shardtrace.fsdp(Writes(4, 4))(X)


def sparse():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    shardtrace.fsdp(model)


def penalties():
    x = X.clone().requires_grad_()
    torch.autograd.grad(shardtrace.fsdp(net())(x).sum(), x, create_graph=True)


def hooks():
    model = shardtrace.fsdp(net())
    model[0].register_full_backward_hook(lambda *_: None)
    model(X)


def graphs():
    thunder.jit(shardtrace.fsdp(net()), transforms=[CUDAGraphTransform()])(X)


def transforms():
    torch.vmap(shardtrace.fsdp(net()))(X)


def switches():
    shardtrace.fsdp(net(), shard_placement_fn=lambda p: None)


REFUSED = {
    "pipeline parallelism": (parallelism, "mesh must have one dimension"),
    "operators on parameters that DTensor lacks": (operators, "does not have a sharding strategy"),
    "compiling code that branches on values of activations": (values, "depends on the values of tensors"),
    "a parameter that forward writes into": (writes, "weight"),
    "sparse or quantized parameters": (sparse, "is a sparse tensor"),
    "gradient penalties": (penalties, "create_graph=True"),
    "hooks on a module's backward": (hooks, "has a hook on its backward"),
    "CUDA graphs": (graphs, "a CUDA graph cannot hold"),
    "`torch.func`, `torch.jit`": (transforms, "a transform of torch.func cannot see"),
    "FSDP2's `shard_placement_fn`": (switches, r"fsdp\(\) has no shard_placement_fn"),
}
NOT_REFUSED = {"GPUs", "`model.generate` on shards"}


def test_the_list_is_complete():
    page = (Path(__file__).parents[1] / "README.md").read_text()
    (listed,) = re.findall(r"^## What is not supported\n\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("| ") for line in listed.splitlines()[2:]]
    known = [*REFUSED, *NOT_REFUSED]
    assert [line for line in lines if not line.startswith(tuple(known))] == []
    assert [name for name in known if not any(line.startswith(name) for line in lines)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_listed_is_refused(name, fake_ranks):
    fake_ranks(2)
    use, message = REFUSED[name]
    with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError), match=message):
        use()
