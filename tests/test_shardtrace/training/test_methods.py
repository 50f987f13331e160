"""What scripts for FSDP2 and DDP call on a model: whole gradients, unshard, conversions, loading, switches."""

import copy

import shardtrace
from shardtrace.model.state import own_state

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import prune


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 3))


X = torch.linspace(-1, 1, 8).view(2, 4)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "owner", "ddp"])
def test_whole_gradients(strategy):
    eager = net()
    model = shardtrace.fsdp(copy.deepcopy(eager), sharding_strategy=strategy)
    for m in (eager, model):
        m[3].requires_grad_(False)
        m(X).square().mean().backward()
    expected = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    torch.testing.assert_close(shardtrace.full_gradients(model), expected)
    assert len(expected) == 4
    assert shardtrace.full_gradients(model, rank0_only=True).keys() == (
        expected.keys() if dist.get_rank() == 0 else set()
    )


def test_methods_of_fsdp2_on_submodules(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(net())
    for way in ("forward", "backward"):
        name = f"set_modules_to_{way}_prefetch"
        with pytest.raises(NotImplementedError, match=rf"{name} does nothing in .*CompilePolicy\(prefetch=2\)\)"):
            getattr(model[2], name)([model[3], model[0]])
        with pytest.raises(NotImplementedError, match=r"gathers ahead by itself: leave the call out$"):
            getattr(model[2], name)([model[3]])
    for module in (model, model[2]):
        for recurse in (False, True):
            module.set_reshard_after_forward(True, recurse=recurse)  # what ZeRO-3 does
            module.set_reshard_after_backward(True, recurse=recurse)
        with pytest.raises(NotImplementedError, match=r'set_reshard_after_backward\(False\) .*or "zero2" to gather'):
            module.set_reshard_after_backward(False)
    with pytest.raises(NotImplementedError, match=r'fsdp\(model, sharding_strategy="zero2"\)'):
        model.set_reshard_after_forward(False)
    with pytest.raises(NotImplementedError, match=r'sharding_strategy=\{"2.\*": "zero2", "\*": "zero3"\}\)'):
        model[2].set_reshard_after_forward(False)
    for sync in (False, True):  # a script that goes through all modules
        for module in reversed([*model.modules()]):
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(sync)
                module.set_is_last_backward(sync)
        assert model.require_backward_grad_sync is sync
    model[0].set_requires_gradient_sync(False)
    with pytest.raises(NotImplementedError, match="switched off for different parts of Sequential"):
        model[2].set_requires_all_reduce(False)


def test_switches_that_follow_each_other(fake_ranks):
    """As in FSDP2: gradients that are not reduced over shards are not reduced over replicas, whatever that switch says."""
    fake_ranks(2)
    model = shardtrace.fsdp(net())

    def kept():
        keep = own_state(model).runtime.keep
        return keep and (keep.level.value, keep.parameters)

    model.set_requires_gradient_sync(False)
    for flag in (True, False):
        model.set_requires_all_reduce(flag)
        assert kept() == ("whole", None)
    model.set_requires_gradient_sync(True)
    assert kept() is None
    model[0].set_requires_gradient_sync(False)
    model.set_requires_all_reduce(True)
    assert kept() == ("whole", {0, 1})
    model[2].set_requires_gradient_sync(True)
    assert kept() == ("whole", {0, 1})
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    assert kept() == ("replicas", None)
    model[0].set_requires_all_reduce(True)
    assert kept() == ("replicas", {2, 3, 4, 5})
    model.set_requires_gradient_sync(False)
    assert kept() == ("whole", None)


def test_a_switch_holds_for_a_parameter_that_was_replaced(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(net())
    model[0].weight = nn.Parameter(torch.ones(5, 4))
    model.set_requires_gradient_sync(False)
    model(X).sum().backward()
    assert [p.grad for p in model.parameters()] == [None] * 6  # on this rank they are kept


@on_ranks(2)
def test_gradients_of_a_block_are_reduced_later():
    eager = net()
    model, rank = shardtrace.fsdp(copy.deepcopy(eager)), dist.get_rank()
    for step in range(2):
        model[0].set_requires_gradient_sync(step == 1)
        model(X * (rank + 1 + step)).square().mean().backward()
        assert (model[0].weight.grad is None) == (step == 0)
        assert model[2].weight.grad is not None
        for other in range(2):
            (eager(X * (other + 1 + step)).square().mean() / 2).backward()
    torch.testing.assert_close(shardtrace.full_gradients(model), {n: p.grad for n, p in eager.named_parameters()})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 3))


def test_a_switch_without_the_blocks_inside(fake_ranks):
    """As in FSDP2, whose root has the parameters that no block has."""
    fake_ranks(2)
    model = shardtrace.fsdp(blocks(), bucketing_strategy=Block)
    for off, kept in (([model], {0, 3}), ([model[1]], {1}), ([model, model[2]], {0, 2, 3})):
        for module in off:
            module.set_requires_gradient_sync(False, recurse=False)
        model(X).sum().backward()
        missing = {name for name, p in model.named_parameters() if p.grad is None}
        assert {int(name[0]) for name in missing} == kept
        model.set_requires_gradient_sync(True)
        assert model.require_backward_grad_sync
        model(X).sum().backward()
        model.zero_grad()


def test_a_switch_of_a_model_that_has_a_sharded_block(fake_ranks):
    fake_ranks(2)
    model = blocks()
    shardtrace.fsdp(model[1])
    shardtrace.fsdp(model)
    model.set_requires_gradient_sync(False)
    model(X).sum().backward()
    assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("mp_policy", [None, "bf16"])
def test_a_part_is_unsharded_by_hand(mp_policy):
    eager = blocks()
    model = shardtrace.fsdp(copy.deepcopy(eager), mp_policy=mp_policy)
    part, other = model[1], model[2]
    handle = part.unshard(async_op=True)
    handle.wait()
    assert type(part.up.weight) is nn.Parameter
    assert torch.equal(part.up.weight, eager[1].up.weight)
    assert isinstance(other.up.weight, DTensor)
    hidden = X[:, :4]
    with torch.no_grad():
        assert torch.equal(part(hidden), eager[1](hidden))  # by PyTorch, as inside full_params
        assert type(part.up.weight) is nn.Parameter
        part.up.reshard()
        assert isinstance(part.up.weight, DTensor)
        assert type(part.down.weight) is nn.Parameter
        torch.testing.assert_close(
            model(X).float(), eager(X), rtol=2e-2 if mp_policy else None, atol=2e-2 if mp_policy else None
        )
        assert isinstance(part.down.weight, DTensor)  # the step has gathered by itself
    for each in model.modules():  # as scripts do
        each.unshard()
    with torch.no_grad():
        assert torch.equal(model(X), eager(X))
    for each in model.modules():
        each.reshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("use", ["step", "state dict", "jitted", "copy", "load", "convert"])
def test_what_ends_unshard_of_a_part(use):
    eager = blocks()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    model[1].unshard()
    if use == "step":
        model[1](X[:, :4])
        model[1].unshard()
        for m in (eager, model):
            m(X).square().mean().backward()
        torch.testing.assert_close(shardtrace.full_gradients(model), {n: p.grad for n, p in eager.named_parameters()})
    elif use == "state dict":
        torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), dict(eager.state_dict()))
    elif use == "jitted":
        cmodel = thunder.jit(model)
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(cmodel(X), eager(X))
            assert isinstance(model[1].up.weight, DTensor)
            model[1].unshard()
        model[1].reshard()
    elif use == "copy":
        assert all(isinstance(p, DTensor) for p in copy.deepcopy(model).parameters())
    elif use == "load":
        model.load_state_dict({name: t + 1 for name, t in eager.state_dict().items()})
        assert torch.equal(shardtrace.full_state_dict(model)["1.up.weight"], eager[1].up.weight + 1)
    else:
        model.double()
        assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert all(isinstance(p, DTensor) for p in model.parameters())


@on_ranks(2)
def test_a_block_that_is_sharded_before_its_root_is_unsharded_by_hand():
    eager = blocks()
    model = copy.deepcopy(eager)
    shardtrace.fsdp(model[1])
    shardtrace.fsdp(model)
    with torch.no_grad():
        model[1].unshard()
        assert type(model[1].up.weight) is nn.Parameter
        torch.testing.assert_close(model(X), eager(X))
        model[1].reshard()
        model[1].unshard()
        model.unshard()
        assert torch.equal(model(X), eager(X))
        model.reshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.unshard()
    (model[1](X[:, :4]).sum() + 0 * model(X).sum()).backward()  # reduces, as it reshards
    (eager[1](X[:, :4]).sum() + 0 * eager(X).sum()).backward()
    torch.testing.assert_close(shardtrace.full_gradients(model), {n: p.grad for n, p in eager.named_parameters()})


@on_ranks(2)
def test_unshard_and_reshard():
    eager = net()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    model.unshard()
    assert type(model[0].weight) is nn.Parameter
    assert model.unshard() is None  # nothing
    model.unshard(async_op=True).wait()
    with torch.no_grad():
        torch.testing.assert_close(model(X), eager(X))
    model.reshard()
    model.reshard()
    assert isinstance(model[0].weight, DTensor)
    model.unshard()
    model(X).square().mean().backward()  # as in FSDP2: gradients are reduced
    eager(X).square().mean().backward()
    assert isinstance(model[0].weight, DTensor)
    torch.testing.assert_close(shardtrace.full_gradients(model), {n: p.grad for n, p in eager.named_parameters()})


@on_ranks(2)
def test_conversion_after_sharding():
    """Of all parameters, of some, and back; gradients are of the new dtype."""
    eager = net()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    model(X).sum().backward()
    for convert in (lambda m: m.double(), lambda m: m.float()):
        x = X.double() if convert(model)[0].weight.dtype == torch.float64 else X
        convert(eager)
        model.zero_grad()
        eager.zero_grad()
        for m in (eager, model):
            m(x).square().mean().backward()
        assert model[0].weight.grad.dtype == x.dtype
        torch.testing.assert_close(shardtrace.full_gradients(model), {n: p.grad for n, p in eager.named_parameters()})


@on_ranks(2)
def test_conversion_while_gradients_add_up():
    model = shardtrace.fsdp(net())
    with model.no_sync():
        model(X).sum().backward()
    model.double()
    with pytest.raises(RuntimeError, match=r"'0.weight' was replaced or converted before the gradients that no_sync"):
        model(X.double())
    model.float()
    model(X).sum().backward()
    model.set_requires_gradient_sync(False)
    model.double().zero_grad()
    model(X.double()).sum().backward()
    assert model[0].weight.grad is None


@on_ranks(2)
def test_parameters_that_are_replaced():
    """By whole values, and by DTensors."""
    eager = net()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    model(X)
    new = torch.arange(20.0).view(5, 4) / 20
    for m in (eager, model):
        m[0].weight = nn.Parameter(new.clone())
        m[2].bias = nn.Parameter(torch.ones_like(m[2].bias))
    for m in (eager, model):
        m(X).square().mean().backward()
    assert isinstance(model[0].weight, DTensor)
    torch.testing.assert_close(shardtrace.full_gradients(model), {n: p.grad for n, p in eager.named_parameters()})
    torch.testing.assert_close(shardtrace.full_state_dict(model)["0.weight"], new)


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_dtensors_and_whole_tensors(assign):
    eager, mesh = net(), init_device_mesh("cpu", (2,))
    wanted = {name: torch.randn_like(p) for name, p in eager.named_parameters()}
    for made in (wanted, {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in wanted.items()}):
        model = shardtrace.fsdp(copy.deepcopy(eager))
        parameters = list(model.parameters())
        model.load_state_dict(made, assign=assign)
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), wanted)
    part = {name.removeprefix("0."): t + 1 for name, t in wanted.items() if name.startswith("0.")}
    model[0].load_state_dict(part, assign=assign)
    torch.testing.assert_close({n: t.full_tensor() for n, t in model[0].state_dict().items()}, part)
    nn.ModuleDict({"inner": model}).load_state_dict({f"inner.{n}": t for n, t in wanted.items()}, assign=assign)
    torch.testing.assert_close(dict(shardtrace.full_state_dict(model)), wanted)


@on_ranks(2)
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_switches_that_accumulate(way):
    eager = net()
    model = shardtrace.fsdp(copy.deepcopy(eager))
    for last in (False, True):
        if way == "DDP":
            model.require_backward_grad_sync = last
        else:
            model.set_requires_gradient_sync(last)
        for m in (eager, model):
            m(X * (2 - last)).square().mean().backward()
        assert (model[0].weight.grad is None) is not last
    assert model.require_backward_grad_sync
    torch.testing.assert_close(shardtrace.full_gradients(model), {n: p.grad for n, p in eager.named_parameters()})


# ---- one process ----


def test_what_a_compiled_step_does_not_have(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(net())
    with pytest.raises(NotImplementedError, match=r"set_gradient_divide_factor of FSDP2 .*CommPolicy\(gradient_divide"):
        model.set_gradient_divide_factor(2.0)
    for name in [n for n in dir(torch.distributed.fsdp.FSDPModule) if not n.startswith(("_", "reset_iter"))]:
        assert hasattr(model, name), name


def test_a_number_of_ranks_after_forward(fake_ranks):
    fake_ranks(8)
    model = shardtrace.fsdp(net(), reshard_after_forward=2)
    model(X).sum().backward()
    (plan,) = model._shardtrace.plans.values()
    assert (plan.world_size, plan.secondary.world_size) == (8, 2)
    (plan,) = shardtrace.fsdp(
        net(), reshard_after_forward=2, mesh=init_device_mesh("cpu", (8,))
    )._shardtrace.plans.values()
    assert (plan.world_size, plan.secondary.world_size) == (8, 2)
    (key,) = shardtrace.fsdp(net(), reshard_after_forward=8)._shardtrace.plans  # all ranks, as True
    assert key[0] is shardtrace.ShardingStrategy.ZERO3
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("nodes", "ranks"))
    with pytest.raises(ValueError, match='pass sharding_strategy="zero3_secondary" with a 2-D mesh'):
        shardtrace.fsdp(net(), reshard_after_forward=2, mesh=mesh)
    with pytest.raises(ValueError, match='or sharding_strategy="hybrid_zero3" to shard over the last dimension'):
        shardtrace.fsdp(net(), reshard_after_forward=True, mesh=mesh)


@pytest.mark.parametrize("name", ["shard_placement_fn", "dp_mesh_dims"])
def test_arguments_of_fsdp2_that_are_refused(fake_ranks, name):
    fake_ranks(2)
    with pytest.raises(TypeError, match=rf"fsdp\(\) has no {name}: "):
        shardtrace.fsdp(net(), **{name: None})


def _vmap(model):
    torch.vmap(model)(torch.ones(3, 2, 4))


def _jvp(model):
    torch.func.jvp(model, (X,), (X,))


def _trace(model):
    torch.jit.trace(model, X)


def _script(model):
    torch.jit.script(model)


def _functional_call(model):
    torch.func.functional_call(model, {name: p.clone() for name, p in model.named_parameters()}, (X,))


def _prune(model):
    prune.l1_unstructured(model[0], "weight", 0.5)
    model(X)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (_vmap, "a transform of torch.func cannot see into .*full_params"),
        (_jvp, "a transform of torch.func cannot see into .*full_params"),
        (_trace, "torch.jit.trace cannot see into .*full_params"),
        (_script, "torch.jit.script cannot compile FSDPSequential: .*full_params"),
        (_functional_call, "'0.weight' was replaced .* by a DTensor: .*functional_call, prune.*full_params"),
        (_prune, "'0.weight' was replaced .*: .*functional_call, prune.*full_params"),
    ],
)
def test_tools_that_need_whole_parameters(fake_ranks, use, message):
    """They say so; inside full_params they work."""
    fake_ranks(2)
    model = shardtrace.fsdp(net())
    with pytest.raises((RuntimeError, TypeError), match=message):
        use(model)


def test_torch_compile_leaves_a_sharded_model_alone(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(net())
    torch.compile(model)(X).sum().backward()
    assert {c.kind for c in shardtrace.collectives(model)} == {"all_gather", "reduce_scatter"}


def test_no_sync_of_the_jitted_model(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(net()))
    with cmodel.no_sync():
        cmodel(X).sum().backward()
    assert all(p.grad is None for p in cmodel.parameters())
