"""Lightning Fabric with the strategy, as scripts call it. The ranks are those of the tests: Fabric starts none."""

import contextlib

import shardtrace

import pytest
import torch
import torch.distributed as dist
from contexts import Tokens
from models import Weighted, Zoo, tokens
from ranks import on_ranks
from sharded_training import ROWS, my_rows, reference
from torch import nn

pytest.importorskip("lightning.fabric", reason="pip install 'shardtrace[lightning]'")

from shardtrace.lightning import ShardtraceStrategy, jitted

from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.precision import BitsandbytesPrecision, MixedPrecision


class Here(LightningEnvironment):
    """The ranks that run already."""

    creates_processes_externally = True

    def world_size(self):
        return dist.get_world_size()

    def global_rank(self):
        return dist.get_rank()

    local_rank = global_rank


def launched(precision=None, plugins=(), **options):
    strategy = ShardtraceStrategy(**options)
    devices = dist.get_world_size()
    fabric = Fabric(
        accelerator="cpu", devices=devices, strategy=strategy, precision=precision, plugins=[Here(), *plugins]
    )
    fabric.launch()
    return fabric


def zoo(fabric, seed=0, lr=0.05):
    """A Zoo and its AdamW, set up together or one after the other."""
    torch.manual_seed(seed)
    model = Zoo()
    if seed:
        return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-2))
    model = fabric.setup(model)
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-2))


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def steps(fabric, model, optimizer, *numbers):
    for number in numbers:
        fabric.backward(model(*my_rows(tokens(ROWS, number))))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_training_saving_and_loading(tmp_path):
    """Both kinds of checkpoints, each loaded by ranks and by a single process, continue as one process does."""
    _, expected = reference(3, "adamw")
    fabric = launched(state_dict_type="full", sharding_strategy={"blocks.0.*": "owner", "*": "zero3"})
    model, optimizer = zoo(fabric)
    assert model.embedding.weight.to_local().shape == (6 - dist.get_rank(), 6)  # half of 11 rows
    steps(fabric, model, optimizer, 0, 1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "done": 2, "note": [1.5, "two"]}
    fabric.save(tmp_path / "file", state)
    sharded = launched(sharding_strategy="zero2")
    sharded.save(tmp_path / "folder", state)
    sharded.save(tmp_path / "folder", state)  # takes the place of the other
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["step-00000001"]

    model, optimizer = zoo(sharded, seed=1)
    for path in ("file", "folder"):
        now = {"model": model, "optimizer": optimizer, "done": 0}
        rest = sharded.load(tmp_path / path, now)
        assert rest == {"schedule": schedule.state_dict(), "note": [1.5, "two"]}
        assert now["done"] == 2
        steps(sharded, model, optimizer, 2)
        for name, value in shardtrace.full_state_dict(model).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6)

    one = Zoo()
    found = torch.load(tmp_path / "file")
    one.load_state_dict(found["model"])
    single = torch.optim.AdamW(one.parameters(), lr=0.05, eps=1e-2)
    single.load_state_dict(found["optimizer"])
    one(*tokens(ROWS, 2)).backward()
    single.step()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6)

    torch.save(one.state_dict(), tmp_path / f"raw{dist.get_rank()}")
    dist.barrier()
    sharded.load_raw(tmp_path / "raw0", model)
    torch.testing.assert_close(shardtrace.full_state_dict(model), dict(one.state_dict()))


@on_ranks(2)
def test_accumulation_and_clipping():
    fabric = launched(bucketing_strategy="model")
    torch.manual_seed(0)
    one, model = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    shardtrace.load_full_state_dict(model, one.state_dict())
    x = torch.randn(2, 2, 4)  # two batches of a row for each rank
    one(x).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    for number, rows in enumerate(x):
        with fabric.no_backward_sync(model, enabled=number == 0):
            fabric.backward(model(rows[dist.get_rank() :][:1]).square().mean() / 2)
        kinds = {row.kind for row in shardtrace.collectives(jitted(model))}
        assert kinds == ({"all_gather"} if number == 0 else {"all_gather", "reduce_scatter"})
    torch.testing.assert_close(fabric.clip_gradients(model, optimizer, max_norm=0.1), expected)
    mine = model.get_parameter("0.weight").grad
    torch.testing.assert_close(mine.full_tensor(), one[0].weight.grad)
    fabric.clip_gradients(model, optimizer, clip_val=1e-4)
    assert mine.full_tensor().abs().max() <= 1e-4


@on_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    """Precision 16-mixed on a CPU, which Fabric itself replaces by bf16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    fabric = launched(plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler)])
    model = Weighted()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for first, scale in ((1.0, 16.0), (60000.0, 8.0)):
        factors = torch.ones(6)
        factors[0] = first  # a row of the first rank
        before = model.last.bias.detach().clone()
        fabric.backward(model(torch.ones(2, 4), factors))
        optimizer.step()
        optimizer.zero_grad()
        assert scaler.get_scale() == scale
        assert torch.equal(before, model.last.bias) == (scale == 8)
    assert {row.dtype for row in shardtrace.collectives(jitted(model))} == {"f16"}


@pytest.mark.parametrize(
    ("precision", "at_rest", "on_the_wire"),
    [
        ("32-true", torch.float32, "f32"),
        ("64-true", torch.float64, "f64"),
        ("bf16-true", torch.bfloat16, "bf16"),
        ("bf16-mixed", torch.float32, "bf16"),
    ],
)
def test_precision(fake_ranks, precision, at_rest, on_the_wire):
    fake_ranks(2)
    fabric = launched(precision)
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    layer, norm = model
    assert layer.weight.is_meta
    assert not norm.running_var.is_meta
    model = fabric.setup(model)
    output = model(torch.ones(2, 4))
    fabric.backward(output.sum())
    assert output.dtype == torch.float32
    assert layer.weight.dtype == layer.weight.grad.dtype == at_rest
    assert {row.dtype for row in shardtrace.collectives(jitted(model))} == {on_the_wire}


def test_hybrid_mesh_by_its_shape(fake_ranks):
    fake_ranks(4)
    fabric = launched(sharding_strategy="hybrid_zero3", mesh=(2, 2))
    model = fabric.setup(nn.Linear(4, 8))
    assert model.weight.to_local().shape == (4, 4)


class Lightning(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, x):
        return self(x).sum()


def test_other_methods_are_refused(fake_ranks):
    """Thunder would run the compiled forward in their place."""
    fake_ranks(2)
    fabric = launched()
    model = fabric.setup(torch.compile(Lightning()))  # Thunder compiles it instead
    assert model(torch.ones(1, 2)).shape == (1, 2)
    model = fabric.setup(Lightning())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"only forward\(\) of Lightning is compiled"):
            model.training_step(torch.ones(1, 2))
        assert model(torch.ones(1, 2)).shape == (1, 2)


def test_refused(fake_ranks, tmp_path):
    fake_ranks(2)
    with pytest.raises(ValueError, match="must be 'full' or 'sharded', not 'shards'"):
        ShardtraceStrategy(state_dict_type="shards")
    with pytest.raises(TypeError, match="does not work with BitsandbytesPrecision"):
        ShardtraceStrategy(precision=object.__new__(BitsandbytesPrecision))
    with pytest.raises(TypeError, match="without TorchCheckpointIO"):
        launched(plugins=[TorchCheckpointIO()])
    fabric = launched()
    model, other = fabric.setup(nn.Linear(2, 2)), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters())
    path = tmp_path / "none"
    for call, error, message in (
        (lambda: fabric.save(path, {"m": other}), ValueError, "there are 0 in .'m'.: use a path for each model"),
        (lambda: fabric.save(path, {"m": model}, filter={"m": print}), NotImplementedError, "state_dict_type='full'"),
        (lambda: fabric.save(path, {"m": model, "o": optimizer}), shardtrace.CheckpointError, "is not a parameter of"),
        (lambda: fabric.save(path, {"m": model, "x": object()}), shardtrace.CheckpointError, "others.x is a object"),
        (lambda: fabric.load(path), ValueError, "loads into a sharded model"),
        (lambda: fabric.load_raw(path, optimizer), ValueError, "loaded with its model"),
        (lambda: fabric.load(path, {"m": model}), shardtrace.CheckpointError, "No such file"),
        (lambda: fabric.load(tmp_path, {"m": model}), shardtrace.CheckpointError, "no complete checkpoint"),
        (lambda: jitted(other), ValueError, "no jitted module in Linear"),
    ):
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises(error, match=message))
            call()


@on_ranks(4)
@pytest.mark.parametrize("parallel", [{"context_parallel": "context"}, {"tensor_parallel": "tensor"}], ids=str)
def test_ranks_that_share_a_batch_get_the_same(parallel):
    fabric = launched(mesh=(2, 2), **parallel)
    rows = torch.randint(32, (8, 13), generator=torch.Generator().manual_seed(0))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True))
    assert len(loader) == 2
    model = fabric.setup(Tokens(layers=1))
    for batch in loader:  # which these ranks compare
        assert model(batch).shape == (2, 13, 32)
    assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": dist.get_rank() // 2}


@on_ranks(4)
def test_ranks_that_share_experts_get_their_own():
    strategy = launched(mesh=(2, 2), expert_parallel="expert").strategy
    assert strategy.mesh.mesh_dim_names == ("data", "expert")
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": dist.get_rank()}
