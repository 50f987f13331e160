"""Models that ``fsdp`` refuses to shard, and steps that a sharded model refuses to run, so that no parameter silently
trains unreduced."""

import copy
from types import SimpleNamespace

import shardtrace
from shardtrace.testing import compile_only

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


X = torch.ones(2, 8)
REPLACED = "module '2' of Sequential was replaced, moved or removed after fsdp()"


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_module_that_is_replaced_before_the_first_call(fake_ranks, strategy):
    fake_ranks(2)
    model = shardtrace.fsdp(mlp(), sharding_strategy=strategy)
    model[2] = nn.Linear(8, 8)
    with pytest.raises(Exception, match=REPLACED):
        thunder.jit(model)(X)


def test_a_module_that_is_replaced_after_the_first_call(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(mlp())
    cmodel = thunder.jit(model)
    cmodel(X)
    model[2] = nn.Linear(8, 8)
    with pytest.raises(Exception, match=REPLACED):
        cmodel(X)


def test_a_module_that_is_replaced_in_a_jitted_one(fake_ranks):
    fake_ranks(2)
    model = mlp()
    cmodel = shardtrace.fsdp(thunder.jit(model))
    model[2] = nn.Linear(8, 8)
    with pytest.raises(Exception, match=REPLACED):
        cmodel(X)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.adapter = None

    def forward(self, x):
        x = self.linear(x)
        return x if self.adapter is None else x + self.adapter(x)


@pytest.mark.parametrize("called_before", [False, True])
@on_ranks(2)
def test_a_module_that_is_added(called_before):
    model = shardtrace.fsdp(Adapted())
    cmodel = thunder.jit(model)
    if called_before:
        cmodel(X)
    model.adapter = nn.Linear(8, 8)
    with pytest.raises(Exception, match=r"parameter 'adapter\.bias' is trained beside the sharded Adapted"):
        cmodel(X)


def test_modules_without_parameters_may_change(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(Adapted())
    cmodel = thunder.jit(model)
    lines = []
    for adapter in (nn.Tanh(), nn.GELU(), nn.Dropout(0.5), nn.Dropout(0.9), nn.Identity(), None):
        model.adapter = adapter
        cmodel(X)
        lines.append(str(thunder.last_traces(cmodel)[-1]).count("tanh"))
    assert [n > 0 for n in lines] == [True, False, False, False, False, False]
    assert thunder.cache_misses(cmodel) == 6
    model.adapter = nn.Dropout(0.5)
    model.eval()
    cmodel(X)
    assert "uniform" not in str(thunder.last_traces(cmodel)[-1])


@pytest.mark.parametrize("called_before", [False, True])
def test_modules_that_change_places(fake_ranks, called_before):
    fake_ranks(2)
    model = shardtrace.fsdp(mlp())
    cmodel = thunder.jit(model)
    if called_before:
        cmodel(X)
    model[0], model[2] = model[2], model[0]
    with pytest.raises(Exception, match="module '0' of Sequential was replaced, moved or removed after"):
        cmodel(X)


def test_a_part_that_is_not_sharded(fake_ranks):
    fake_ranks(2)
    body = shardtrace.fsdp(nn.Linear(8, 8))
    whole = nn.Sequential(body, nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match=r"parameter '1\.bias' is trained beside the sharded Linear"):
        thunder.jit(whole)(X)
    head = nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match="is trained beside the sharded Linear"):
        thunder.jit(lambda x: head(body(x)))(X)
    head.requires_grad_(False)  # equal on all ranks, and stays so
    thunder.jit(lambda x: head(body(x)))(X).sum().backward()


def test_ignored_parameters(fake_ranks):
    fake_ranks(2)
    model = mlp()
    shardtrace.fsdp(model, ignored_params=model[2].parameters())
    assert model[0].weight.to_local().shape == (4, 8)
    assert type(model[2].weight) is nn.Parameter
    cmodel = thunder.jit(model)
    cmodel(X).sum().backward()
    assert model[2].weight.grad.shape == (8, 8)
    assert {name for row in shardtrace.collectives(cmodel) for name in row.parameters} == {"0.weight", "0.bias"}


def test_one_rank_may_train_what_it_likes(fake_ranks):
    fake_ranks(1)
    thunder.jit(nn.Sequential(shardtrace.fsdp(nn.Linear(8, 8)), nn.Linear(8, 8)))(X).sum().backward()


class Named(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        for name in (first, second):
            parent, _, attribute = name.rpartition(".")
            module = self
            if parent:
                self.add_module(parent, module := nn.Module())
            setattr(module, attribute, nn.Parameter(torch.randn(8)))


def test_names_that_are_one_to_thunder(fake_ranks):
    fake_ranks(2)
    with pytest.raises(ValueError, match=r"'a_b\.c' and 'a\.b_c' are one name to Thunder"):
        shardtrace.fsdp(Named("a.b_c", "a_b.c"))
    shardtrace.fsdp(Named("a.b_c", "a_b.d"))


class Heads(nn.Module):
    """Heads by names that are no words of Python."""

    def __init__(self, *names):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        self.scales = nn.ParameterDict({name: torch.randn(8) for name in names})

    def forward(self, x):
        return sum(head(x) * self.scales[name] for name, head in self.heads.items())


def test_names_that_are_no_words_of_python(fake_ranks):
    names = ("a-b", "a b", "a/b", "[0]", "a\nb", 'a"b', "*")
    model = Heads(*names)
    expected = model(X)
    with fake_ranks(1):
        torch.testing.assert_close(thunder.jit(shardtrace.fsdp(copy.deepcopy(model)))(X), expected)
    fake_ranks(2)
    thunder.jit(shardtrace.fsdp(model))(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_modules_nested_as_deeply_as_eager_can_call_them(fake_ranks):
    model = nn.Linear(8, 8)
    for _ in range(200):
        model = nn.Sequential(model)
    model(X)
    fake_ranks(2)
    thunder.jit(shardtrace.fsdp(model))(X).sum().backward()


def test_a_parameter_that_is_no_plain_tensor(fake_ranks):
    fake_ranks(2)
    model = mlp()
    model[0].weight = nn.Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)))
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is a TwoTensor: fsdp\(\) takes plain tensors"):
        shardtrace.fsdp(model)


def test_a_slice_of_a_sharded_model_is_not_sharded(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(mlp())
    assert type(model[:2]) is nn.Sequential
    assert model[:2](X).shape == (2, 8)  # its parts compile themselves
    with shardtrace.full_params(model):
        assert model[:2](X).shape == (2, 8)


class Interrupted(nn.Linear):
    def forward(self, x):
        raise KeyboardInterrupt


def test_an_interrupt_while_recording_stays_one(fake_ranks):
    fake_ranks(2)
    with pytest.raises(KeyboardInterrupt):
        thunder.jit(shardtrace.fsdp(Interrupted(8, 8)))(X)


def test_two_parameters_on_one_memory(fake_ranks):
    fake_ranks(2)
    model = mlp()
    model[2].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(
        ValueError, match=r"parameters '0\.weight' and '2\.weight' are two Parameters on the same memory"
    ):
        shardtrace.fsdp(model)
    flat = torch.randn(128)  # side by side is not the same memory
    model[0].weight, model[2].weight = (nn.Parameter(part.view(8, 8)) for part in flat.split(64))
    shardtrace.fsdp(model)


def test_use_outside_after_the_forward_is_the_same_error_as_before(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(mlp())
    for loss in (
        lambda x: model(x).sum() + model[0].weight.square().sum(),
        lambda x: model[0].weight.square().sum() + model(x).sum(),
    ):
        with pytest.raises(Exception, match=r"parameter '0\.(weight|bias)' of Sequential is used outside the forward"):
            compile_only(thunder.jit(loss), ((X,), {}))
    twice = thunder.jit(lambda x: model(x).sum() + model(x).mean())
    twice(X).backward()
    twice(torch.ones(3, 8)).backward()  # compiled again, when there are gradients
    gathers = [row for row in shardtrace.collectives(twice) if row.phase == "forward"]
    assert len(gathers) == 2


def test_thunders_recipes(single_rank):
    from thunder.recipes import BaseRecipe

    model = shardtrace.fsdp(nn.Linear(8, 8), mp_policy="bf16")  # with mp_policy, one rank also has a plan
    cmodel = thunder.compile(model, recipe=BaseRecipe(fuser="torch.compile"))
    cmodel(X).sum().backward()
    assert model.weight.grad.shape == (8, 8)


def test_thunders_default_recipe_without_nvfuser(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.compile(mlp(), plugins="shardtrace")
    cmodel(X).sum().backward()
    assert shardtrace.kernels in thunder.compile_data(cmodel).executors_list


def test_a_weight_that_is_tied_to_one_that_is_sharded(fake_ranks):
    fake_ranks(2)
    model = nn.Sequential(shardtrace.fsdp(nn.Linear(4, 4)), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"parameter '1.weight' is tied to 'weight' of Linear, which is sharded"):
        shardtrace.fsdp(model)


@on_ranks(2)
def test_ranks_that_begin_with_other_values():
    """Parameters from other seeds, drawn before or by fsdp(), and other weights. A rank's values can be for all."""
    with torch.device("meta"):
        meta = nn.Linear(4, 4)
    torch.manual_seed(dist.get_rank())
    weights = nn.Linear(4, 4).state_dict()
    found = (
        r"rank 0 has (parameter |weights )?weight.*values \w+; rank 1 has .*values \w+.*same torch.manual_seed on all"
    )
    for model, options in (
        (nn.Linear(4, 4), {}),
        (meta, {"init_policy": shardtrace.InitPolicy(device="cpu")}),
        (nn.Linear(4, 4), {"init_policy": shardtrace.InitPolicy(weights=weights)}),
    ):
        with pytest.raises(shardtrace.RankMismatchError, match=found):
            shardtrace.fsdp(model, checks=shardtrace.Checks(timeout=20), **options)
    shardtrace.fsdp(nn.Linear(4, 4), init_policy=shardtrace.InitPolicy(broadcast_from=1))
    shardtrace.fsdp(nn.Linear(4, 4), sharding_strategy="ddp")
    shardtrace.fsdp(
        nn.Linear(4, 4), init_policy=shardtrace.InitPolicy(weights={"weight": torch.ones(4, 4), "bias": torch.zeros(4)})
    )


class Held(nn.Module):
    """Keeps what ``keep`` makes of a linear layer, and uses it as ``use`` says."""

    def __init__(self, keep, use=lambda self, x: x):
        super().__init__()
        self.f, self.use = nn.Linear(8, 8), use
        keep(self, self.f)

    def forward(self, x):
        return self.f(self.use(self, x))


def in_object(m, f):
    m.kept = SimpleNamespace(pair=(0, f.weight.detach()))


ALIASES = {
    "buffer": lambda m, f: m.register_buffer("kept", f.weight.data),
    "a part of it": lambda m, f: m.register_buffer("kept", f.weight.detach()[2:4]),
    "attribute": lambda m, f: setattr(m, "kept", f.weight.detach()),
    "list in a dict": lambda m, f: setattr(m, "kept", {"of": [f.bias.data]}),
    "object": in_object,
    "another Parameter": lambda m, f: setattr(m, "kept", [nn.Parameter(f.weight.data)]),
}


@pytest.mark.parametrize("kept", ALIASES)
def test_a_tensor_on_the_memory_of_a_parameter(fake_ranks, kept):
    with fake_ranks(1):
        shardtrace.fsdp(Held(ALIASES[kept]))(X)
    fake_ranks(2)
    shardtrace.fsdp(Held(ALIASES[kept]), sharding_strategy="ddp")  # stays where it is
    model = Held(ALIASES[kept])
    with pytest.raises(ValueError, match=r"kept.* is no parameter and lies in the memory of 'f\.\w+' of Held.*clone"):
        shardtrace.fsdp(model)
    assert model.f.weight.shape == (8, 8)
    shardtrace.fsdp(model.f)
    with pytest.raises(ValueError, match=r"kept.* is no parameter and lies in the memory of '\w+' of Linear"):
        shardtrace.fsdp(model)


def test_what_is_not_on_the_memory_of_a_parameter(fake_ranks):
    fake_ranks(2)
    shardtrace.fsdp(nn.LSTM(8, 8))
    shardtrace.fsdp(Held(lambda m, f: setattr(m, "kept", [*f.parameters(), f.weight.detach().clone()])))(X)
    shardtrace.fsdp(nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8))))(X)  # its attribute is made in each call


OUTSIDE = {}


def remembered(m, f):
    m.k = nn.Linear(8, 8).requires_grad_(False)
    m.frozen = list(m.k.parameters())
    OUTSIDE["data"] = f.weight.data


def by_values(self, x):
    return x if self.f(x).sum() > 0 else -x


USES = {
    "lies in the memory of '0.f.weight' of Sequential": lambda self, x: x @ OUTSIDE["data"],
    "lies in the memory of '0.f.weight' of Sequential, ": lambda self, x: x * OUTSIDE["data"][1:3].sum(),
    "a module that PyTorch runs: parameter '0.k.weight'": lambda self, x: (
        by_values(self, x) * sum(p.sum() for p in self.frozen)
    ),
}


@pytest.mark.parametrize("why", USES)
def test_memory_and_shards_that_forward_has_from_outside(fake_ranks, why):
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Sequential(Held(remembered, USES[why]), nn.Linear(8, 8)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=why):
            model(X)


@pytest.mark.parametrize("values", [False, True])
def test_a_list_that_forward_does_not_use(fake_ranks, values):
    fake_ranks(2)
    used = by_values if values else lambda self, x: x * sum(p.sum() for p in self.k.parameters())
    shardtrace.fsdp(nn.Sequential(Held(remembered, used), nn.Linear(8, 8)))(X)


class Tied(nn.Module):
    def __init__(self, same):
        super().__init__()
        self.emb, self.out = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.out.weight = self.emb.weight if same else nn.Parameter(self.emb.weight.data)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("order", ["emb out", "out emb", "emb model", "out model"])
def test_tied_weights_in_separate_calls(fake_ranks, order, same):
    fake_ranks(2)
    model = Tied(same)
    first, second = (getattr(model, name, model) for name in order.split())
    shardtrace.fsdp(first)
    with pytest.raises(ValueError, match=r"'(out|emb)?\.?weight' is .*'weight' of .*sharded.* call fsdp\(\) once"):
        shardtrace.fsdp(second, init_policy=shardtrace.InitPolicy(broadcast_from=0))
    whole = Tied(same=True)
    assert shardtrace.fsdp(whole).out.weight is whole.emb.weight
