"""The effect of ``fsdp`` on a model, and its errors. In one process: other ranks are fake."""

import copy
import inspect
import pickle
from contextlib import nullcontext

import shardtrace
from passes.plan import CostModel, Device, Link
from shardtrace.model.state import state_of

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens
from torch import nn


class Net(nn.Module):
    """A small net."""

    def __init__(self, width=5):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 3)

    def forward(self, x, *, scale: float = 1.0):
        """Runs the net."""
        return self.second(torch.tanh(self.first(x))) * scale


@pytest.fixture
def ranks(fake_ranks):
    fake_ranks(2)


# ---- the model afterwards ----


def test_the_class_stays_recognisable(ranks):
    model = Net()
    assert shardtrace.fsdp(model) is model
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"  # libraries write it into files
    assert repr(type(model)).endswith(".FSDPNet'>")
    assert repr(model).startswith("FSDPNet(")
    assert type(model).__doc__ == "A small net."
    assert str(inspect.signature(model.forward)) == "(x, *, scale: float = 1.0)"
    assert model.forward.__doc__ == "Runs the net."
    assert {n: tuple(p.to_local().shape) for n, p in model.named_parameters()} == {
        "first.weight": (3, 4),
        "first.bias": (3,),
        "second.weight": (2, 5),
        "second.bias": (2,),
    }


def test_shards_are_rows_and_padding_is_zero(fake_ranks):
    fake_ranks(2, rank=1)
    whole = Net()
    model = shardtrace.fsdp(copy.deepcopy(whole))
    assert torch.equal(model.first.weight.to_local(), whole.first.weight[3:])
    (rows,) = (e.rows for e in state_of(model).entries if e.name == "first.weight")
    assert rows.shape == (3, 4)
    assert not rows[2].any()


def test_special_parameters(fake_ranks):
    fake_ranks(8, rank=3)
    model = shardtrace.fsdp(Zoo())
    assert model.head.weight is model.embedding.weight
    assert model.scale.shape == model.scale.to_local().shape == ()  # replicated
    assert model.nothing.shape == (0, 6)
    assert model.shift.shape == (6,)  # buffers are whole
    assert not model.frozen.requires_grad


def test_deepcopy_is_a_sharded_model_of_its_own(ranks):
    model = shardtrace.fsdp(Net())
    other = copy.deepcopy(model)
    assert type(other) is type(model)
    assert torch.equal(other.first.weight, model.first.weight)
    assert other.first.weight is not model.first.weight
    for m in (other, model):
        thunder.jit(m)(torch.ones(2, 4)).sum().backward()
    assert model.first.weight.grad is not other.first.weight.grad


def test_a_copy_is_plain_while_the_parameters_are_whole(ranks):
    model = shardtrace.fsdp(Net(), activation_checkpointing=lambda m: isinstance(m, nn.Linear), mp_policy="bf16")
    shardtrace.register_forward_method(model, "extra_repr")
    holder = nn.ModuleDict({"model": model})
    with shardtrace.full_params(model):
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        for kept in (copy.deepcopy(model), copy.deepcopy(holder)["model"]):
            assert [type(m) for m in kept.modules()] == [Net, nn.Linear, nn.Linear]
            assert not any(name.startswith("_shardtrace") for m in kept.modules() for name in vars(m))
            assert kept.extra_repr() == ""
        part = copy.deepcopy(model.first)
    assert type(part) is nn.Linear
    assert all(torch.equal(value, values[name]) for name, value in kept.state_dict().items())
    kept(torch.ones(2, 4)).sum().backward()
    assert state_of(model) is not None
    assert model.first.weight.grad is None
    del kept.extra_repr
    torch.testing.assert_close(pickle.loads(pickle.dumps(kept)).state_dict(), kept.state_dict())
    kept.zero_grad()
    assert shardtrace.fsdp(kept).first.weight.shape == model.first.weight.shape


@pytest.mark.parametrize("whole", [False, True])
def test_pickling_is_refused_clearly(ranks, whole):
    model = shardtrace.fsdp(Net())
    with shardtrace.full_params(model) if whole else nullcontext():
        for make in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match=r"FSDPNet is sharded and cannot be pickled.*full_state_dict.*deepcopy"):
                make(model)


def test_state_dicts_keep_the_names(ranks):
    names = list(Net().state_dict())
    model = shardtrace.fsdp(Net())
    assert list(model.state_dict()) == list(thunder.jit(model).state_dict()) == names


def test_optimizers_from_anywhere_hold_the_same_shards(ranks):
    model = Net()
    before = torch.optim.SGD(model.parameters(), lr=1.0)
    cmodel = thunder.jit(shardtrace.fsdp(model))
    after = torch.optim.SGD(cmodel.parameters(), lr=1.0)
    with torch.no_grad():
        before.step()
    for a, b, c in zip(
        before.param_groups[0]["params"], after.param_groups[0]["params"], model.parameters(), strict=True
    ):
        assert a is b is c


# ---- ways of calling ----


def kinds(cmodel):
    return [c.kind for c in shardtrace.collectives(cmodel)]


def test_shapes_keywords_eval_and_no_grad(ranks):
    cmodel = thunder.jit(shardtrace.fsdp(Net()))
    cmodel(torch.ones(2, 4)).sum().backward()
    cmodel(x=torch.ones(3, 4), scale=2.0).sum().backward()
    cmodel.eval()
    with torch.no_grad():
        assert not cmodel(torch.ones(2, 4)).requires_grad
    assert set(kinds(cmodel)) == {"all_gather"}
    cmodel.train()
    cmodel(torch.ones(2, 4)).sum().backward()
    assert "reduce_scatter" in kinds(cmodel)
    assert thunder.cache_misses(cmodel) == 3


def test_inference_of_a_frozen_model(ranks):
    cmodel = thunder.jit(shardtrace.fsdp(Net().requires_grad_(False)))
    assert cmodel(torch.ones(2, 4)).shape == (2, 3)
    assert kinds(cmodel) == ["all_gather"]


def test_a_function_that_closes_over_the_model(ranks):
    model, other = shardtrace.fsdp(Net()), shardtrace.fsdp(Net(7))

    @thunder.jit
    def step(x):
        return model(x).sum() + other(x).sum()

    step(torch.ones(2, 4)).backward()
    assert all(p.grad is not None for m in (model, other) for p in m.parameters())
    assert sorted(kinds(step)) == ["all_gather"] * 3 + ["reduce_scatter"] * 2 or kinds(step)


def test_called_twice_in_one_step_it_is_gathered_once(ranks):
    model = shardtrace.fsdp(Net())
    step = thunder.jit(lambda x: model(x).sum() + model(2 * x).sum())
    step(torch.ones(2, 4)).backward()
    assert [c.kind for c in shardtrace.collectives(step) if c.phase == "forward"] == ["all_gather"]


def test_a_sharded_part_of_a_larger_model(ranks):
    outer = nn.Sequential(nn.Linear(4, 4), Net())
    shardtrace.fsdp(outer[1], ignored_params=outer[0].parameters())
    cmodel = thunder.jit(outer)
    cmodel(torch.ones(2, 4)).sum().backward()
    assert outer[0].weight.grad.shape == (4, 4)
    assert outer[1].first.weight.grad.to_local().shape == (3, 4)
    assert {p for c in shardtrace.collectives(cmodel) for p in c.parameters} == set(Net().state_dict())


def test_parts_that_are_sharded_already_keep_their_sharding(ranks):
    model = nn.Sequential(nn.Linear(4, 4), Net())
    shardtrace.fsdp(model[1], sharding_strategy="zero2")
    shardtrace.fsdp(model, sharding_strategy="zero3")
    cmodel = thunder.jit(model)
    cmodel(torch.ones(2, 4, requires_grad=True)).sum().backward()
    again = [c.parameters for c in shardtrace.collectives(cmodel) if (c.kind, c.phase) == ("all_gather", "backward")]
    assert again == [("0.weight", "0.bias")]


def test_a_jitted_model_gives_a_new_one_with_the_same_options(ranks):
    old = thunder.jit(Net(), executors=["sdpa"], cache="constant values")
    old(torch.ones(2, 4))
    new = shardtrace.fsdp(old)
    assert new is not old
    assert new._model is old._model
    assert thunder.compile_data(new).executors_list[-1].name == thunder.compile_data(old).executors_list[-1].name
    new(torch.ones(2, 4)).sum().backward()
    assert "reduce_scatter" in kinds(new)


def test_requires_grad_may_change(ranks):
    model = shardtrace.fsdp(Net())
    cmodel = thunder.jit(model)
    reduced = []
    for trainable in (True, False, True):
        model.first.requires_grad_(trainable)
        cmodel.zero_grad()
        cmodel(torch.ones(2, 4)).sum().backward()
        reduced.append({p for c in shardtrace.collectives(cmodel) if c.kind == "reduce_scatter" for p in c.parameters})
        assert (model.first.weight.grad is not None) == trainable
    everything = set(Net().state_dict())
    assert reduced == [everything, {"second.weight", "second.bias"}, everything]


def test_parameters_are_restored_when_tracing_fails(ranks):
    class Fails(Net):
        def forward(self, x):
            super().forward(x)
            raise KeyError("from the model")

    model = shardtrace.fsdp(Fails())
    with pytest.raises(KeyError, match="from the model"):
        thunder.jit(model)(torch.ones(2, 4))
    assert model.first.weight.to_local().shape == (3, 4)
    assert not model.first.weight.is_meta


def test_world_of_one(single_rank):
    torch.manual_seed(0)
    model = Zoo()
    whole = copy.deepcopy(model)
    cmodel = thunder.jit(shardtrace.fsdp(model))
    cmodel(*tokens(2)).backward()
    whole(*tokens(2)).backward()
    torch.testing.assert_close(model.scale.grad, whole.scale.grad)
    assert kinds(cmodel) == []
    assert shardtrace.full_state_dict(cmodel).keys() == whole.state_dict().keys()
    with shardtrace.full_params(model):
        assert model.scale.shape == ()


def test_groups_and_meshes(fake_ranks):
    fake_ranks(4)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    inner = shardtrace.fsdp(Net(), mesh=mesh["inner"]).first.weight
    assert inner.to_local().shape == (3, 4)
    assert inner.device_mesh == mesh["inner"]
    assert shardtrace.fsdp(Net(), mesh=dist.group.WORLD).first.weight.to_local().shape == (2, 4)
    with pytest.raises(ValueError, match=r"mesh must have one dimension, this one has shape \(2, 2\)"):
        shardtrace.fsdp(Net(), mesh=mesh)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh or a ProcessGroup, not int"):
        shardtrace.fsdp(Net(), mesh=3)


# ---- bad input ----


def refused(message, model, error=ValueError, **options):
    """``fsdp`` refuses the model and leaves it as it was."""
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(error, match=message):
        shardtrace.fsdp(model, **options)
    assert [p.shape for p in model.parameters()] == shapes


def test_twice(ranks):
    refused("Net is sharded already", shardtrace.fsdp(Net()))


@pytest.mark.parametrize("strategy", ["zero4", None, 3])
def test_unknown_strategy(ranks, strategy):
    refused(r"unknown sharding_strategy .*'zero2', 'zero3', .*'full_shard'", Net(), sharding_strategy=strategy)


@pytest.mark.parametrize("bucketing", ["blocks", 0, -1, None, True])
def test_unknown_bucketing(ranks, bucketing):
    refused(
        r"unknown bucketing_strategy .*'none', 'layer', 'block', 'model', a size in MB",
        Net(),
        bucketing_strategy=bucketing,
    )


@pytest.mark.parametrize("prefetch", [-1, 1.5, True])
def test_bad_prefetch(prefetch):
    with pytest.raises(ValueError, match="prefetch must be a number of buckets"):
        shardtrace.CompilePolicy(prefetch=prefetch)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bucketing_strategy": nn.Sequential}, 1),
        ({"bucketing_strategy": (nn.Sequential, nn.Linear)}, 2),  # a bucket of the inner ones and one of the outer
        ({"bucketing_strategy": (nn.Sequential, nn.Linear), "sharding_strategy": "zero2"}, 3),
        ({"bucketing_strategy": (nn.Sequential, nn.Linear), "compile_policy": shardtrace.CompilePolicy(prefetch=0)}, 0),
    ],
)
def test_default_prefetch(ranks, options, expected):
    model = shardtrace.fsdp(nn.ModuleList([nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))]), **options)
    assert {plan.prefetch for plan in state_of(model).plans.values()} == {expected}


def test_no_group_and_no_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    refused("no process group and no torchrun environment.*start the script with torchrun", Net(), RuntimeError)


def test_not_a_module(ranks):
    with pytest.raises(TypeError, match=r"fsdp takes an nn.Module, not function"):
        shardtrace.fsdp(lambda x: x)


def test_gradients_lazy_parameters_and_patched_forwards(ranks):
    model = Net()
    model(torch.ones(2, 4)).sum().backward()
    refused(r"parameter 'first.weight' has a gradient: call zero_grad\(\)", model)
    patched = Net()
    patched.forward = lambda x: x
    refused("Net has a forward set on the instance", patched)
    with pytest.raises(ValueError, match=r"parameter 'weight' has no shape yet"):
        shardtrace.fsdp(nn.LazyLinear(3))
    scripted, sparse = torch.jit.script(nn.Linear(4, 4)), Net()
    refused("0 is a TorchScript module, whose parameters cannot be sharded", nn.Sequential(scripted))
    sparse.first.weight = nn.Parameter(torch.eye(4).to_sparse())
    refused("parameter 'first.weight' is a sparse tensor", sparse)
    refused(
        r"broadcast_from=5 is not one of the group's ranks \[0, 1\]",
        Net(),
        init_policy=shardtrace.InitPolicy(broadcast_from=5),
    )


def remove(model):
    del model.first.weight


def move(model):
    model.first.weight = nn.Parameter(torch.zeros(3, 4, device="meta"))


def resize(model):
    model.first.weight = nn.Parameter(torch.zeros(3, 4))


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove, r"parameter 'first.weight' was replaced after fsdp\(\) by a NoneType"),
        (move, r"the device of parameter 'first.weight' was cpu when fsdp\(\) sharded it and is meta now"),
        (resize, r"the shape of parameter 'first.weight' was \(5, 4\) when fsdp\(\) sharded it and is \(3, 4\) now"),
    ],
)
def test_parameters_changed_after_sharding(ranks, change, message, called_before):
    model = shardtrace.fsdp(Net())
    cmodel = thunder.jit(model)
    if called_before:
        cmodel(torch.ones(2, 4))
    change(model)
    with pytest.raises(RuntimeError, match=message):
        cmodel(torch.ones(2, 4))


def test_a_shard_used_outside_its_modules_forward(ranks):
    model = shardtrace.fsdp(Net())
    weights = [model.first.weight]
    step = thunder.jit(lambda x: model(x).sum() + weights[0].sum())
    with pytest.raises(RuntimeError, match=r"parameter 'first.weight' of Net is used outside the forward"):
        step(torch.ones(2, 4))


def test_a_part_called_by_itself(ranks):
    model = shardtrace.fsdp(Net())
    for call in (model.first, thunder.jit(model.first), thunder.jit(lambda x: model.first(x))):
        assert call(torch.ones(2, 4)).shape == (2, 5)
    assert isinstance(model.first, nn.Linear)
    assert repr(model.first) == repr(Net().first)
    with pytest.raises(ValueError, match="Linear is part of a sharded Net: shard the inner modules first"):
        shardtrace.fsdp(model.first)
    other = copy.deepcopy(model)
    with shardtrace.full_params(other):
        other.first(torch.ones(2, 4))  # the copy has its own state
        with pytest.raises(RuntimeError, match="inside full_params"):
            thunder.jit(other.first)(torch.ones(2, 4))


@pytest.mark.parametrize("view", [lambda p: p, lambda p: p[:2], lambda p: p.view(2, 2), lambda p: p.chunk(2)[1]])
def test_a_parameter_updated_in_place(ranks, view):
    class Counts(Net):
        def __init__(self):
            super().__init__()
            self.calls = nn.Parameter(torch.zeros(4), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                view(self.calls).add_(1.0)
            return super().forward(x) + self.calls.sum()

    with pytest.raises(RuntimeError, match=r"parameter 'calls' is updated in place in forward.*make it a buffer"):
        thunder.jit(shardtrace.fsdp(Counts()))(torch.ones(2, 4))


def test_looking_at_a_parameter_is_no_use(ranks):
    """Hugging Face models ask their parameters for a dtype. This gathers nothing and sets no order of first use."""

    class Asks(Net):
        def forward(self, x):
            for _, p in self.named_parameters():
                assert p.is_floating_point()
            return self.second(torch.tanh(self.first(x)))

    cmodel = thunder.jit(shardtrace.fsdp(Asks(), bucketing_strategy="none"))
    cmodel(torch.ones(2, 4))
    assert [c.bucket for c in shardtrace.collectives(cmodel) if c.phase == "forward"] == [
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    ]


def test_graphs_and_gradients_from_before_and_inside_full_params(ranks):
    model = Net()
    old = model(torch.ones(2, 4)).sum()  # its graph keeps gradient accumulators of whole shapes alive
    cmodel = thunder.jit(shardtrace.fsdp(model))
    cmodel(torch.ones(2, 4)).sum().backward()
    grad = model.first.weight.grad
    with shardtrace.full_params(model):
        assert model.first.weight.grad is None
        inside = model(torch.ones(2, 4)).sum()
        inside.backward()
        assert model.first.weight.grad.shape == (5, 4)
    assert model.first.weight.grad is grad
    cmodel(torch.ones(2, 4)).sum().backward()
    del old, inside


def test_without_a_cache(ranks):
    cmodel = thunder.jit(shardtrace.fsdp(Net()), cache="no caching")
    cmodel(torch.ones(2, 4)).sum().backward()
    assert "reduce_scatter" in kinds(cmodel)


@pytest.mark.parametrize("value", [-1, 1.5, True, "1MB"])
def test_max_inflight_bytes_is_a_number_of_bytes(fake_ranks, value):
    fake_ranks(2)
    with pytest.raises(ValueError, match="max_inflight_bytes must be a number of bytes, or None"):
        shardtrace.fsdp(nn.Linear(4, 4), compile_policy=shardtrace.CompilePolicy(max_inflight_bytes=value))


def test_limits_and_the_cost_model_reach_the_trace(fake_ranks):
    """On a link this fast, each gather is issued just in time. One bucket is in flight."""
    fake_ranks(2)
    fast = CostModel(Link(1e12, 0.0), Device(1e3, 1e3, 1e3, 1.0))
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    cmodel = thunder.jit(
        shardtrace.fsdp(model, compile_policy=shardtrace.CompilePolicy(cost_model=fast, max_inflight_bytes=1))
    )
    cmodel(torch.ones(2, 4))
    names = [b.sym.name for b in thunder.last_traces(cmodel)[-1].bound_symbols if "del" not in b.sym.name]
    assert [n for n in names if "gather" in n or "linear" in n] == [
        "all_gather", "wait_all_gather", "all_gather", "torch_linear_0",
        "wait_all_gather", "all_gather", "torch_linear_1", "wait_all_gather", "torch_linear_1",
    ]  # fmt: skip
