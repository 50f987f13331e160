"""Parameters that are DTensors: what scripts do with them outside of a step is what it is on one process."""

import copy
import io
import pickle

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class Net(nn.Module):
    """Rows that two ranks do not divide, a scalar, one element, a frozen parameter, and parameters in a list."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 7), nn.Linear(7, 5)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.5]))
        self.frozen = nn.Parameter(torch.ones(3, 2), requires_grad=False)
        self.weights = [self.a.weight, self.b.weight]

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight.t())
        return x * self.scale + self.shift + self.frozen.sum() + self.a.bias.sum() + self.b.bias


def build():
    torch.manual_seed(0)
    return Net()


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def beside(t, other):
    """A plain tensor that is to be used together with a parameter."""
    return distribute_tensor(t, other.device_mesh, [Replicate()]) if isinstance(other, DTensor) else t


def batch(step, rank=None):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x.chunk(dist.get_world_size())[rank]


# ---- scripts: what they do in a step, given the model, a function that gives the loss, an optimizer and a memory ----


def penalty(model, loss, optimizer, _):
    w = model.a.weight
    (loss() + full(0.05 * w.norm() + 0.05 * (w @ w.T).square().sum())).backward()
    optimizer.step()


def lamb(model, loss, *_):
    loss().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad * p.norm() / p.grad.norm().clamp(min=1e-9), alpha=0.1)


def sam(model, loss, optimizer, _):
    loss().backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        moves = [0.5 * p.grad / norm for p in trained]
        torch._foreach_add_(trained, moves)
    optimizer.zero_grad()
    loss().backward()
    with torch.no_grad():
        torch._foreach_sub_(trained, moves)
    optimizer.step()


def weight_standardisation(model, loss, optimizer, _):
    loss().backward()
    optimizer.step()
    with torch.no_grad():
        for p in (model.a.weight, model.b.weight):
            p.sub_(p.mean(dim=1, keepdim=True)).div_(p.std(dim=1, keepdim=True) + 1e-5)


def spectral_penalty(model, loss, optimizer, _):
    w, v = model.a.weight, torch.ones(6)
    for _ in range(3):
        u = F.normalize(full(w.detach() @ beside(v, w)), dim=0)
        v = F.normalize(full(w.detach().t() @ beside(u, w)), dim=0)
    (loss() + 0.1 * full(beside(u, w) @ (w @ beside(v, w)))).backward()
    optimizer.step()


def fisher_merging(model, loss, optimizer, _):
    merged = (model.a.weight, model.b.weight)
    before = [p.detach().clone() for p in merged]
    loss().backward()
    fisher = [p.grad.detach() ** 2 for p in merged]
    optimizer.step()
    with torch.no_grad():
        for p, old, f in zip(merged, before, fisher, strict=True):
            share = f / (f.max() + f.mean() + 1e-8)
            p.copy_(share * p + (1 - share) * old)


def gradient_noise_scale(model, loss, optimizer, _):
    loss().backward()
    square = sum(full((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
    noise = sum(full(p.grad.var()) for p in (model.a.weight, model.b.weight))
    optimizer.param_groups[0]["lr"] = 0.1 * (square / (noise + square)).item()
    optimizer.step()


def lookahead(model, loss, optimizer, memory):
    slow = memory.setdefault("slow", [p.detach().clone() for p in model.parameters()])
    loss().backward()
    optimizer.step()
    with torch.no_grad():
        for p, s in zip(model.parameters(), slow, strict=True):
            s.add_(p - s, alpha=0.5)
            p.copy_(s)


def gradient_centralisation(model, loss, optimizer, _):
    loss().backward()
    for p in (model.a.weight, model.b.weight):
        p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
    optimizer.step()


def top_k(model, loss, optimizer, _):
    loss().backward()
    optimizer.step()
    with torch.no_grad():
        for p in (model.a.weight, model.b.weight):
            limit = full(p).abs().flatten().topk(p.numel() // 3).values.min()
            p.mul_(p.abs() >= limit)


def tying_by_hand(model, loss, optimizer, _):
    loss().backward()
    with torch.no_grad():
        model.a.bias.grad.add_(model.b.bias.grad.mean())
        optimizer.step()
        model.a.bias.copy_(0.5 * (model.a.bias + model.a.weight.mean(dim=1)))


def swag(model, loss, optimizer, memory):
    loss().backward()
    optimizer.step()
    mean, square = ([torch.zeros_like(p) for p in model.parameters()] for _ in range(2))
    mean, square = memory.setdefault("mean", mean), memory.setdefault("square", square)
    memory["n"] = memory.get("n", 0) + 1
    with torch.no_grad():
        for p, m, s in zip(model.parameters(), mean, square, strict=True):
            m.add_((p - m) / memory["n"])
            s.add_((p * p - s) / memory["n"])
            p.add_(0.1 * (s - m**2).clamp(min=1e-6).sqrt() + 0.01 * m.norm())


def lbfgs_by_hand(model, loss, _, memory):
    loss().backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    x, g = [p.detach().clone() for p in trained], [p.grad.clone() for p in trained]

    def inner(a, b):
        return sum(full((i * j).sum()) for i, j in zip(a, b, strict=True))

    move = g
    if memory:
        s = [a - b for a, b in zip(x, memory["x"], strict=True)]
        y = [a - b for a, b in zip(g, memory["g"], strict=True)]
        factor = inner(s, g) / inner(s, y).clamp(min=1e-6)
        move = [a - 0.1 * factor.item() * b for a, b in zip(g, y, strict=True)]
    memory.update(x=x, g=g)
    with torch.no_grad():
        for p, m in zip(trained, move, strict=True):
            p.sub_(m, alpha=0.05)


def averaged(model, loss, optimizer, memory):
    average = memory.setdefault("average", torch.optim.swa_utils.AveragedModel(model))
    loss().backward()
    optimizer.step()
    average.update_parameters(model)
    with torch.no_grad():
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            p.lerp_(q, 0.3)


def data(model, loss, *_):
    loss().backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad.data, alpha=-0.1)
            p.data = p.data * 0.9
            p.data += 0.1
    model.a.weight.data = full(model.a.weight.data) * 0.5


def gradients_by_hand(model, loss, optimizer, _):
    loss().backward()
    grads = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    for p, g in zip(model.parameters(), grads, strict=True):
        p.grad = None if g is None else g * 2
    optimizer.step()


def rows_and_elements(model, loss, optimizer, _):
    loss().backward()
    with torch.no_grad():
        model.a.weight.grad[:2].zero_()
        model.b.weight.grad[[0, 3]] = 0.0
        model.b.bias.grad.data[torch.arange(5) > 2] = 0.0
        optimizer.step()
        model.a.bias[2:4] = 1.0
        model.a.bias.data[-1].fill_(0.5)
        model.b.weight.data.chunk(2)[1].mul_(0.5)
        model.a.weight[1] = model.a.weight[0]
        nn.init.constant_(model.b.weight[:2, 1], 0.3)
        model.a.weight.view(-1)[3:5] = 0.2
        model.a.weight.t()[1:3, 5].view(2, 1).add_(0.1)
        torch._foreach_mul_([model.a.weight[6], model.shift, model.b.weight[1:3]], 0.7)
        row, element = model.b.weight[3], model.b.weight[3][2]
        for each in model.b.bias.unbind():
            each.mul_(0.9)
        model.b.weight.mul_(0.9)
        row.add_(element.item())
        model.b.bias[0] = full(row)[0]


def clipping_by_hand(model, loss, optimizer, _):
    loss().backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    total = sum(p.grad.norm(2).item() ** 2 for p in trained) ** 0.5
    largest = max(float(p.grad.abs().max()) for p in trained)
    for p in trained:
        p.grad.mul_(0.1 / (total + largest))
    assert not any(p.grad.isnan().any() for p in trained)
    model.a.bias.grad[-1] = float("nan")  # of the last rank
    if not any(p.grad.isnan().any() for p in trained) or torch.isfinite(model.a.bias.grad).all():
        raise AssertionError
    model.a.bias.grad.nan_to_num_()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type="inf")
    optimizer.step()


def swapped_average(model, loss, optimizer, memory):
    average = memory.setdefault("average", {n: p.data.clone() for n, p in model.named_parameters()})
    loss().backward()
    optimizer.step()
    kept = {}
    for name, p in model.named_parameters():
        average[name].mul_(0.5).add_(p.data, alpha=0.5)
        kept[name], p.data = p.data, average[name]
    loss().item()
    for name, p in model.named_parameters():
        average[name], p.data = p.data.clone(), kept[name]
    model.a.weight.data, other = model.a.weight.data * 0.9, model.a.weight.data
    other.mul_(0.0)
    same = model.b.weight.data
    model.b.weight.data = model.b.weight.data
    same.mul_(0.9)


def gradients_as_data(model, loss, optimizer, _):
    loss().backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data = p.grad.data / 2
    optimizer.step()


def distances(model, loss, optimizer, memory):
    w, v = model.a.weight, model.b.weight
    start = memory.setdefault("start", w.detach() * 0.5)
    near = F.mse_loss(w, start) + F.smooth_l1_loss(w, start, beta=0.1) + F.huber_loss(w, start, delta=0.1)
    norms = (w.norm(dim=0).sum() - 3) ** 2 + torch.stack([p.norm() for p in (w, v)]).sum() ** 2
    (loss() + full(near + 0.1 * norms + 0.1 * (w.amax() - v.amin()) + 0.1 * w[:3].square().sum())).backward()
    optimizer.step()


def noise(model, loss, optimizer, memory):
    loss().backward()
    optimizer.step()
    torch.manual_seed(memory.setdefault("seed", 7))
    with torch.no_grad():
        for p in (model.a.weight, model.b.bias):
            p.add_(torch.empty_like(p).exponential_(), alpha=0.01)
            p.mul_(torch.bernoulli(torch.full_like(p, 0.9)))
            p.copy_(F.dropout(p, 0.1))
    memory["seed"] = int(torch.randint(100, ()))


SCRIPTS = (
    penalty, lamb, sam, weight_standardisation, spectral_penalty, fisher_merging, gradient_noise_scale, lookahead,
    gradient_centralisation, top_k, tying_by_hand, swag, lbfgs_by_hand, averaged, data, gradients_by_hand,
    rows_and_elements, clipping_by_hand, swapped_average, gradients_as_data, distances, noise,
)  # fmt: skip


@on_ranks(2)
def test_scripts_are_right():
    """One after the other with the same model, which begins with the same values again."""
    sharded = build()
    early = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)  # built before it is sharded
    shardtrace.fsdp(sharded)
    start = early.state_dict()
    for script in SCRIPTS:
        plain = build()
        sharded.load_state_dict(plain.state_dict())
        early.load_state_dict(start)
        optimizers = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), early
        for model, optimizer, rank in zip((plain, sharded), optimizers, (None, dist.get_rank()), strict=True):
            memory = {}
            for step in range(3):
                script(model, lambda: model(batch(step, rank)).square().mean(), optimizer, memory)  # noqa: B023
                optimizer.zero_grad()
        assert_same(sharded, plain, script.__name__)


def assert_same(sharded, plain, message=""):
    expected = plain.state_dict()
    for name, value in shardtrace.full_state_dict(sharded).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5, msg=lambda m: f"{message} {name}: {m}")  # noqa: B023


@on_ranks(2)
def test_what_a_parameter_is():
    model = shardtrace.fsdp(build())
    assert {name: p.placements for name, p in model.named_parameters()} == {
        "scale": (Replicate(),), "shift": (Shard(0),), "frozen": (Shard(0),), "a.weight": (Shard(0),),
        "a.bias": (Shard(0),), "b.weight": (Shard(0),), "b.bias": (Shard(0),),
    }  # fmt: skip
    p, rank = model.a.weight, dist.get_rank()
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, DTensor)
    assert p.shape == (7, 6)
    torch.testing.assert_close(p.full_tensor(), build().a.weight)
    assert p.to_local().equal(build().a.weight[[slice(0, 4), slice(4, 7)][rank]])
    assert p.to_local().data_ptr() == p.data.to_local().data_ptr()
    for copied in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p)):
        assert copied.to_local().equal(p.to_local())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert len(file.getvalue()) < 12_000  # no memory of other parameters
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        torch._foreach_zero_(list(model.parameters()))
    model.load_state_dict(loaded)
    assert_same(model, build())
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        torch.ones(6) @ p.t()


@on_ranks(4)
def test_placements_on_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shardtrace.fsdp(build(), sharding_strategy={"a.bias": "ddp", "*": "hybrid_zero3"}, mesh=mesh)
    assert model.a.weight.device_mesh == mesh
    assert model.a.weight.placements == (Replicate(), Shard(0))
    assert model.a.bias.placements == model.scale.placements == (Replicate(), Replicate())
    plain = build()
    for one, rank in ((plain, None), (model, dist.get_rank())):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, foreach=True)
        for step in range(2):
            one(batch(step, rank)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain)


@on_ranks(2)
def test_parameters_of_before_stand_for_those_of_now():
    model = build()
    old, seen = dict(model.named_parameters()), []
    old["a.weight"].register_hook(lambda grad: seen.append(("hook", grad.shape)))
    old["a.weight"].register_post_accumulate_grad_hook(lambda p: seen.append(("post", p.shape)))
    old["a.weight"].tag = "kept"
    shardtrace.fsdp(model)
    model(batch(0, dist.get_rank())).sum().backward()
    assert seen == [("hook", (7, 6)), ("post", (7, 6))]
    assert model.a.weight.tag == "kept"
    for name, p in model.named_parameters():
        assert old[name].shape == p.shape
        assert old[name].grad is p.grad
        assert old[name].untyped_storage().nbytes() == p.untyped_storage().nbytes()
    torch.testing.assert_close(old["a.weight"].full_tensor(), build().a.weight)
    old["a.weight"].grad = None
    old["a.weight"].requires_grad = False
    assert model.a.weight.grad is None
    assert not model.a.weight.requires_grad


@on_ranks(2)
def test_full_params():
    model, plain = shardtrace.fsdp(build()), build()
    kept = model.a.weight
    with shardtrace.full_params(model):
        whole = model.a.weight
        assert type(whole) is nn.Parameter
        torch.testing.assert_close(model(batch(0)), plain(batch(0)))
        torch.testing.assert_close(copy.deepcopy(model)(batch(0)), plain(batch(0)))
        whole.data.fill_(2.0)
    assert model.a.weight is kept
    assert full(kept.sum()) == full(whole.sum()) == 84
    copied = copy.deepcopy(model)
    with shardtrace.full_params(copied):
        assert copied.weights[0].shape == (7, 6)
        assert copied(batch(0)).shape == (8, 5)
    written = pytest.raises(RuntimeError, match="kept from outside of full_params was written inside")
    with written, shardtrace.full_params(model), torch.no_grad():
        kept.zero_()


@on_ranks(2)
def test_a_parameter_that_is_written_before_backward():
    """An error as in PyTorch, if backward gathers it again."""
    model, rank = shardtrace.fsdp(build()), dist.get_rank()
    loss = model(batch(0, rank)).square().mean()
    with torch.no_grad():
        model.b.weight.mul_(1.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation since forward"):
        loss.backward()


@on_ranks(2)
def test_parameters_that_a_script_replaces_or_converts():
    model, rank = shardtrace.fsdp(build()), dist.get_rank()
    for new in (torch.full((7, 6), 2.0), model.a.weight.detach() * 0 + 2):
        model.a.weight = nn.Parameter(new)
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"'a\.weight' of Net is used through a list"):
            model(batch(0, rank))
        model.weights[0] = model.a.weight
        model(batch(0, rank)).sum().backward()
        assert full(model.a.weight.sum()) == 84
        assert model.a.weight.grad.shape == (7, 6)
    other = copy.deepcopy(model)
    weight = other.a.weight
    other.to(torch.bfloat16)
    other(batch(0, rank).bfloat16()).sum().backward()
    assert other.a.weight is weight
    assert weight.grad.dtype is torch.bfloat16
    assert weight.grad.shape == (7, 6)
    assert model.a.weight.dtype is torch.float32
    assert other.weights[0].dtype is torch.bfloat16
    weight.data = weight.data.float()
    assert weight.dtype is weight.to_local().dtype is torch.float32
    with pytest.raises(RuntimeError, match=r"the data of parameter 'a.weight' has shape \(4, 6\), the parameter has"):
        model.a.weight.data = torch.ones(4, 6)


@on_ranks(2)
def test_parameters_that_a_script_exchanges():
    """By functional_call, or as attributes: new ones, one that it has used before, those of before, for other shapes,
    which are compiled anew."""
    for strategy, steps in (("zero3", 8), ("ddp", 4)):
        torch.manual_seed(0)
        build = lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))  # noqa: E731
        eager = build()
        ours = shardtrace.fsdp(copy.deepcopy(eager), sharding_strategy=strategy)
        with pytest.raises(RuntimeError, match=r"'0\.weight' was replaced after"):
            torch.func.functional_call(ours, {"0.weight": torch.ones(6, 4)}, (torch.ones(3, 4),))
        kept, own = [nn.Parameter(torch.ones(6, 4)) for _ in range(2)], [ours[0].weight, eager[0].weight]
        given = [None, "new", None, "new", "kept", None, "kept", "own"][:steps]
        for step, (what, rows) in enumerate(zip(given, (3, 3, 5, 5, 6, 6, 7, 8), strict=False)):
            x, value, found = torch.randn(rows, 4), torch.full((6, 4), 1.0 + step), []
            for i, model in enumerate((ours, eager)):
                p = {"new": nn.Parameter(value.clone()), "kept": kept[i], "own": own[i], None: own[i]}[what]
                y = model(x) if what is None else torch.func.functional_call(model, {"0.weight": p}, (x,))
                y.sum().backward()
                found.append([y, *(full(t.grad) if t.grad is not None else torch.tensor(0) for t in (p, own[i]))])
                p.grad = own[i].grad = None
            torch.testing.assert_close(*found)


def unties(net):
    net[2].weight = nn.Parameter(net[0].weight.detach() * 2)


def swaps(net):
    net[0], net[1] = net[1], net[0]


def swaps_weights(net):
    net[0].weight, net[1].weight = net[1].weight, net[0].weight


def drops_bias(net):
    net[1].bias = None


def adds_bias(net):
    net[1].bias = nn.Parameter(torch.ones(4))


def ties(net):
    net[1].weight = net[0].weight


def ties_anew(net):
    net[0].weight = net[2].weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    "changes", [(unties,), (swaps,), (swaps_weights,), (drops_bias, adds_bias), (ties, unties), (ties_anew,)]
)
def test_which_parameter_a_module_holds(single_rank, changes):
    """On one rank, where a script may exchange them as in eager PyTorch."""
    torch.manual_seed(0)
    eager = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    eager[2].weight = eager[0].weight
    ours, x = shardtrace.fsdp(copy.deepcopy(eager)), torch.randn(3, 4)
    for change in (lambda net: None, *changes, lambda net: None):
        for model in (eager, ours):
            change(model)
            model.zero_grad()
            model(x).square().sum().backward()
        torch.testing.assert_close(ours(x), eager(x))
        torch.testing.assert_close(*([p.grad for p in model.parameters()] for model in (ours, eager)))


@on_ranks(2)
def test_parameters_that_a_script_ties_are_refused():
    for tie in (ties, lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(4, 4))) or ties(net)):
        model = shardtrace.fsdp(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), init_policy=shardtrace.InitPolicy(broadcast_from=0)
        )
        model(torch.ones(3, 4))
        tie(model)
        with pytest.raises(RuntimeError, match=r"'0\.weight' and '1\.weight' are one Parameter now: tie them before"):
            model(torch.ones(3, 4))


class Counts(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 7), nn.Linear(7, 3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        return super().forward(x) * self.count


@on_ranks(2)
def test_a_model_with_buffers_that_a_script_converts():
    for dtypes in ((torch.float64, torch.float32), (torch.bfloat16, torch.bfloat16, torch.float64)):
        torch.manual_seed(0)
        eager = Counts()
        ours, x = shardtrace.fsdp(copy.deepcopy(eager)), torch.randn(5, 4)
        for dtype in (torch.float32, *dtypes):
            found = [model.to(dtype)(x.to(dtype)) for model in (ours, eager)]
            torch.testing.assert_close(*found)
            torch.testing.assert_close(ours.count, eager.count)


@on_ranks(2)
def test_random_numbers_are_those_of_one_process():
    """Of parameters that are drawn anew, and of noise that is added to them."""

    def draws(model):
        torch.manual_seed(1)
        model.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
        nn.init.normal_(model[0].weight, 1.0, 0.2)
        nn.init.trunc_normal_(model[1].weight)
        nn.init.xavier_uniform_(model[2].weight)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p)).mul_(torch.rand_like(p, dtype=torch.float32))
            model[1].weight.bernoulli_(0.5)
        return [full(p.detach()) for p in model.parameters()] + [torch.rand(2)]

    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3), nn.Linear(3, 3))
    for strategy in ("zero3", "zero2", "ddp"):
        ours = shardtrace.fsdp(copy.deepcopy(eager), sharding_strategy=strategy)
        torch.testing.assert_close(draws(ours), draws(copy.deepcopy(eager)))


@on_ranks(2)
def test_an_exchanged_parameter_is_an_input_of_compiled_steps():
    """Of another dtype it is compiled anew."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model = shardtrace.fsdp(copy.deepcopy(eager))
    ours, x = thunder.jit(model), torch.randn(3, 4)
    torch.testing.assert_close(ours(x), eager(x))
    for step in range(1, 4):
        p, q = [nn.Parameter(torch.full((6, 4), float(step))) for _ in range(2)]
        model[0].weight, eager[0].weight = p, q
        found, expected = ours(x), eager(x)
        torch.testing.assert_close(found, expected)
        found.sum().backward(), expected.sum().backward()
        torch.testing.assert_close(full(p.grad), q.grad)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, eager)]
        [o.step() for o in optimizers]
        torch.testing.assert_close(ours(x), eager(x))
    assert thunder.cache_misses(ours) == 1
    model[0].weight = nn.Parameter(torch.ones(6, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError):
        ours(x)


@on_ranks(2)
def test_an_exchanged_parameter_is_itself_after_full_params():
    model = shardtrace.fsdp(nn.Linear(4, 4))
    given = nn.Parameter(torch.ones(4, 4))
    torch.func.functional_call(model, {"weight": given}, (torch.ones(3, 4),))
    model(torch.ones(3, 4))
    with shardtrace.full_params(model):
        assert full(given.sum()) == 16
    assert full(given.sum()) == 16


@on_ranks(2)
def test_what_a_conversion_keeps():
    """torch exchanges DTensors for new ones, also where nothing is converted."""
    model, rank = shardtrace.fsdp(build()), dist.get_rank()
    seen = []
    model.a.weight.tag = "kept"
    model.a.weight.register_hook(lambda grad: seen.append(("hook", grad.dtype)))
    model.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("post", p.dtype)))
    nn.ModuleDict({"inner": model}).to("cpu")
    model.load_state_dict(build().state_dict())
    assert_same(model, build())
    model.to(torch.bfloat16)(batch(0, rank).bfloat16()).sum().backward()
    assert seen == [("hook", torch.bfloat16), ("post", torch.bfloat16)]
    assert model.a.weight.tag == "kept"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_penalty_on_what_one_rank_owns_raises(fake_ranks, rank):
    """On each rank, also on that one."""
    fake_ranks(2, rank)
    model = shardtrace.fsdp(nn.Linear(4, 4), sharding_strategy="owner")
    for penalty in (lambda p: p.norm(), lambda p: (p**2).sum(), lambda p: p.clone(), lambda p: p + torch.ones(1)):
        with pytest.raises(RuntimeError, match=r"parameter 'weight' is on rank \d alone .* outside of forward"):
            penalty(model.weight)
    with torch.no_grad():
        model.weight.mul_(2)
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert frozen.weight.norm().isfinite()
    with pytest.raises(RuntimeError, match="'weight' is on rank"):
        copy.deepcopy(model).weight.norm()
    assert type(pickle.loads(pickle.dumps(model.weight))) is nn.Parameter
