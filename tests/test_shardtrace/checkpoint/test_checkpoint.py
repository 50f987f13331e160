"""Checkpoints of any number of ranks and any strategy, loaded by any other; resumed training; export."""

import io
import json
import random
import weakref

import shardtrace  # isort: split

from shardtrace.checkpoint import files, weights
from shardtrace.checkpoint.state import Slot

import numpy
import pytest
import thunder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Zoo, tokens
from ranks import on_ranks
from safetensors.torch import load_file, load_model
from sharded_training import ROWS, mean_over_ranks, my_rows, zoo_and_optimizer
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def trained(steps=3, seed=0):
    """A model of one process, and its optimizer with state."""
    torch.manual_seed(seed)
    model = Zoo()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        model(*tokens(4, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def new():
    model = Zoo()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def assert_same(mine, theirs):
    """Assert that models and optimizers are equal, bit for bit."""
    (model, optimizer), (other, other_optimizer) = mine, theirs
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        state, other_state = optimizer.state.get(p, {}), other_optimizer.state.get(q, {})
        assert state.keys() == other_state.keys(), name
        for key, value in state.items():
            assert torch.equal(value, other_state[key]), f"{name}: {key}"
            assert value.dtype == other_state[key].dtype
    for group, other_group in zip(optimizer.param_groups, other_optimizer.param_groups, strict=True):
        assert {**group, "params": None} == {**other_group, "params": None}


MIXED = {"blocks.0.*": "owner", "embedding.*": "ddp", "*": "zero2"}


def load_and_save(source, target, strategy):
    """A new model and a new optimizer load a checkpoint and save it again."""
    model, optimizer = zoo_and_optimizer(strategy, seed=1)
    loaded = shardtrace.load_checkpoint(source, model, optimizer)
    assert shardtrace.save_checkpoint(target, model, optimizer, step=loaded.step).is_dir()


@pytest.mark.parametrize(
    "path",
    [
        [(2, "zero3"), (3, "owner"), (2, "ddp"), (3, "zero3")],
        [(3, MIXED), (2, "owner"), (2, "zero3")],
        [(4, "hybrid_zero3"), (3, "zero3")],
    ],
)
def test_from_one_process_over_ranks_and_strategies_back_to_one(path, tmp_path, ranks_of):
    before = trained()
    shardtrace.save_checkpoint(tmp_path / "0", *before, step=7)
    for number, (world_size, strategy) in enumerate(path):
        source, target = tmp_path / str(number), tmp_path / str(number + 1)
        ranks_of(world_size).run(load_and_save, source=source, target=target, strategy=strategy)
    after = new()
    loaded = shardtrace.load_checkpoint(tmp_path / str(len(path)), *after)
    assert loaded.step == 7
    assert loaded.ranks == path[-1][0]
    assert_same(before, after)


@on_ranks(2)
@pytest.mark.parametrize(("strategy", "background"), [("zero3", False), (MIXED, True)])
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path, strategy, background):
    """Train four steps with random noise, and the last two again in a new model after a load."""

    def run(model, optimizer, schedule, steps, saves=None):
        cmodel, losses = thunder.jit(model), []
        for step in steps:
            loss = cmodel(*my_rows(tokens(ROWS, step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses += [mean_over_ranks(loss), random.random(), float(numpy.random.rand()), torch.rand(()).item()]
            if saves is not None and step == 1:
                extra = (dist.get_rank(), losses)
                saves(tmp_path, model, optimizer, step=2, schedulers=schedule, scaler=scaler, extra=extra)
        return losses

    def built(seed):
        model, optimizer = zoo_and_optimizer(strategy, seed=seed)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if background:
        with shardtrace.AsyncCheckpointer() as checkpointer:
            undisturbed = run(*built(0), range(4), checkpointer.save)
    else:
        undisturbed = run(*built(0), range(4), shardtrace.save_checkpoint)
    model, optimizer, schedule = built(1)
    other_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loaded = shardtrace.load_checkpoint(tmp_path, model, optimizer, schedulers=schedule, scaler=other_scaler)
    rank, losses = loaded.extra
    assert rank == dist.get_rank()
    assert other_scaler.state_dict() == scaler.state_dict()
    assert losses + run(model, optimizer, schedule, range(loaded.step, 4)) == undisturbed


@on_ranks(2)
def test_a_training_resumed_inside_an_accumulation(tmp_path):
    """Saved after ``no_sync`` has added up gradients, it gives the same gradients in the step that reduces them."""

    def built(seed):
        torch.manual_seed(seed)
        return shardtrace.fsdp(torch.nn.Linear(3, 5))

    def step(cmodel, seed):
        cmodel(torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))).sum().backward()

    model = built(0)
    cmodel = thunder.jit(model)
    with shardtrace.no_sync(model):
        step(cmodel, 0)
        step(cmodel, 1)
    shardtrace.save_checkpoint(tmp_path, model, step=0)
    step(cmodel, 2)
    other = built(1)
    shardtrace.load_checkpoint(tmp_path, other)
    step(thunder.jit(other), 2)
    assert torch.equal(model.weight.grad, other.weight.grad)
    assert model.weight.grad.abs().sum() > 0
    with pytest.raises(shardtrace.CheckpointError, match=r"inside an accumulation of gradients \(no_sync\) on 2 ranks"):
        shardtrace.load_checkpoint(tmp_path, torch.nn.Linear(3, 5))
    for kind in ("context", "tensor", "expert"):  # ranks that share a batch count otherwise
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", kind))
        together = shardtrace.fsdp(torch.nn.Linear(3, 5), mesh=mesh, **{f"{kind}_parallel": kind})
        with pytest.raises(shardtrace.CheckpointError, match="only by a model that is sharded so"):
            shardtrace.load_checkpoint(tmp_path, together)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "owner"])
def test_plain_dcp_and_fsdp2(tmp_path, strategy):
    """``sharded_state_dict`` works with torch's own save and load, and across to FSDP2 and back."""
    model, _ = zoo_and_optimizer(strategy)
    expected = shardtrace.full_state_dict(model)
    dcp.save({"model": shardtrace.sharded_state_dict(model)}, checkpoint_id=tmp_path / "ours")
    other, _ = zoo_and_optimizer(strategy, seed=1)
    dcp.load({"model": shardtrace.sharded_state_dict(other)}, checkpoint_id=tmp_path / "ours")
    found = shardtrace.full_state_dict(other)
    assert all(torch.equal(found[key], value) for key, value in expected.items())

    fsdp2 = Zoo()
    del fsdp2.scale  # FSDP2 takes no 0-dim parameter
    fsdp2 = fully_shard(fsdp2)
    state = {"model": get_model_state_dict(fsdp2)}
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    set_model_state_dict(fsdp2, state["model"])
    for name, value in fsdp2.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, expected[name]), name
    dcp.save({"model": get_model_state_dict(fsdp2)}, checkpoint_id=tmp_path / "fsdp2")
    last, _ = zoo_and_optimizer(strategy, seed=2)
    mine = {key: value for key, value in shardtrace.sharded_state_dict(last).items() if key != "scale"}
    dcp.load({"model": mine}, checkpoint_id=tmp_path / "fsdp2")
    found = shardtrace.full_state_dict(last)
    assert all(torch.equal(found[key], value) for key, value in expected.items() if key != "scale")


def test_optimizers_by_name(tmp_path):
    """Parameters are in other groups and another order. State and options are tensors, None and numbers."""

    def sgd(model, order, lr):
        groups = [{"params": [dict(model.named_parameters())[n] for n in names]} for names in order]
        groups[0] |= {"lr": torch.tensor(lr), "weight_decay": 0.5}
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)

    one, two = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    saved = sgd(one, [["weight"], ["bias"]], 0.25)
    one.weight.grad = torch.ones(2, 3)
    saved.step()
    saved.state[one.bias]["momentum_buffer"] = None
    shardtrace.save_checkpoint(tmp_path, one, saved, step=1)
    loaded = sgd(two, [["bias"], ["weight"]], 0.125)
    shardtrace.load_checkpoint(tmp_path, two, loaded)
    assert torch.equal(loaded.state[two.weight]["momentum_buffer"], saved.state[one.weight]["momentum_buffer"])
    assert loaded.state[two.bias] == {"momentum_buffer": None}
    assert [group["weight_decay"] for group in loaded.param_groups] == [0, 0.5]
    assert torch.equal(loaded.param_groups[1]["lr"], torch.tensor(0.25))
    assert loaded.param_groups[0]["lr"] == 0.25

    together = torch.optim.SGD(two.parameters(), lr=1.0, momentum=0.9)
    with pytest.raises(shardtrace.CheckpointError, match="weight and bias are in group 0, and had different options"):
        shardtrace.load_checkpoint(tmp_path, two, together)
    with pytest.raises(shardtrace.CheckpointError, match="the optimizer is a Adam, the checkpoint's was a SGD"):
        shardtrace.load_checkpoint(tmp_path, two, torch.optim.Adam(two.parameters()))
    alien = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    with pytest.raises(shardtrace.CheckpointError, match=r"parameter 0 of group 0 .* of shape \(3,\), is not a param"):
        shardtrace.save_checkpoint(tmp_path / "alien", two, alien, step=1)


def test_state_of_another_dtype_than_its_parameter(tmp_path):
    model, other = torch.nn.Linear(2, 2).bfloat16(), torch.nn.Linear(2, 2).bfloat16()
    optimizer, other_optimizer = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    master = torch.rand(2, 2)
    optimizer.state[model.weight] = {"master": master, "step": torch.tensor(3.0)}
    shardtrace.save_checkpoint(tmp_path, model, optimizer, step=1)
    shardtrace.load_checkpoint(tmp_path, other, other_optimizer)
    assert torch.equal(other_optimizer.state[other.weight]["master"], master)


class KeepsRowMeans(torch.optim.SGD):
    """An optimizer whose state has other shapes than the parameters."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["row_mean"] = p.grad.mean(-1, keepdim=True)


@on_ranks(2)
def test_an_optimizer_whose_state_cannot_be_sharded(tmp_path):
    model = shardtrace.fsdp(torch.nn.Linear(4, 6), sharding_strategy={"weight": "zero3", "*": "ddp"})
    optimizer = KeepsRowMeans(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(shardtrace.CheckpointError, match=r"optimizer\.state\.weight\.row_mean has shape \(6, 1\)"):
        shardtrace.save_checkpoint(tmp_path, model, optimizer, step=1)


def test_adafactor_of_an_unsharded_model(tmp_path):
    model, other = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
    optimizer, other_optimizer = (torch.optim.Adafactor(m.parameters()) for m in (model, other))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    shardtrace.save_checkpoint(tmp_path, model, optimizer, step=1)
    shardtrace.load_checkpoint(tmp_path, other, other_optimizer)
    assert_same((model, optimizer), (other, other_optimizer))


class Dtypes(torch.nn.Module):
    """A buffer of each dtype, an extra state, and a parameter that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3, 4).t())
        for name in ("bfloat16", "float16", "float64", "bool", "uint8", "int8", "int16", "int64", "float8_e4m3fn"):
            self.register_buffer(f"in_{name}", torch.randint(0, 2, (3, 2)).to(getattr(torch, name)))
        self.register_buffer("scalar", torch.randint(0, 99, ()))
        self.seen = {"steps": [torch.randint(0, 99, ()).item()], (1, 2): torch.rand(2)}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_dtypes_buffers_and_extra_state(tmp_path):
    model, other = Dtypes(), Dtypes()
    shardtrace.save_checkpoint(tmp_path, model, step=1)
    shardtrace.load_checkpoint(tmp_path, other)
    for (name, value), found in zip(model.named_buffers(), other.buffers(), strict=True):
        assert value.dtype == found.dtype
        assert torch.equal(value.float(), found.float()), name
    assert torch.equal(model.weight, other.weight)
    assert other.seen["steps"] == model.seen["steps"]
    assert torch.equal(other.seen[1, 2], model.seen[1, 2])


def test_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FILE_BYTES", 300)
    before, after = trained(), new()
    path = shardtrace.save_checkpoint(tmp_path, *before, step=1)
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    assert len(sizes) > 10
    shardtrace.load_checkpoint(tmp_path, *after)
    assert_same(before, after)


def test_tied_and_untied(tmp_path):
    tied, untied = Zoo(), Zoo()
    untied.head.weight = torch.nn.Parameter(untied.head.weight.detach().clone())
    shardtrace.save_checkpoint(tmp_path / "tied", tied, step=1)
    shardtrace.load_checkpoint(tmp_path / "tied", untied)
    assert torch.equal(untied.head.weight, tied.embedding.weight)
    assert untied.head.weight is not untied.embedding.weight
    shardtrace.save_checkpoint(tmp_path / "untied", untied, step=1)
    with pytest.raises(shardtrace.CheckpointError, match=r"head.weight and embedding.weight are tied in the model"):
        shardtrace.load_checkpoint(tmp_path / "untied", tied)


@on_ranks(2)
def test_export_is_loaded_by_plain_pytorch(tmp_path):
    sharded, _ = zoo_and_optimizer(MIXED)
    expected = shardtrace.full_state_dict(sharded)
    one, many = tmp_path / "one", tmp_path / "many"
    for folder, options in ((one, {}), (many, {"max_file_bytes": 500})):
        shardtrace.export_safetensors(folder, sharded, **options)
        with pytest.raises(shardtrace.CheckpointError, match="exists already"):
            shardtrace.export_safetensors(folder, sharded, **options)
    model = Zoo()
    assert load_model(model, one / "model.safetensors") == (set(), [])
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    index = json.loads((many / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = {}
    for file in files:
        found |= load_file(many / file)
    assert found.keys() == index["weight_map"].keys() == expected.keys() - {"head.weight"}
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


@on_ranks(2)
def test_export_holds_one_whole_parameter(tmp_path, monkeypatch):
    sharded, _ = zoo_and_optimizer("zero3")
    sharded.register_buffer("mask", torch.tensor([True, False, True]))  # elements of one byte, before larger ones
    sharded.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
    sharded.register_buffer("tiny", torch.ones((), dtype=torch.bfloat16))
    whole, given = Slot.whole, []

    def watched(self):
        assert not [r for r in given if r() is not None]
        value = whole(self)
        given.extend([weakref.ref(value)] if self.entry is not None else [])
        return value

    monkeypatch.setattr(Slot, "whole", watched)
    shardtrace.export_safetensors(tmp_path, sharded)
    monkeypatch.undo()
    assert len(given) > 5
    expected, found = shardtrace.full_state_dict(sharded), load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys() - {"head.weight"}
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


@on_ranks(2)
def test_an_export_that_cannot_be_written_is_an_error_on_every_rank(tmp_path, monkeypatch):
    """After a part of it was written. No rank waits in a gather."""
    sharded, _ = zoo_and_optimizer("zero3")
    gathered = []

    def full(header, values, path):
        gathered.append(next(values))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "_stream", full)
    with pytest.raises(shardtrace.CheckpointError, match="No space left on device"):
        shardtrace.export_safetensors(tmp_path, sharded)
    assert len(gathered) == (dist.get_rank() == 0)
    shardtrace.full_state_dict(sharded)


def test_export_is_loaded_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install 'shardtrace[examples]'")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(shardtrace.CheckpointError, match=r"config is a str: pass model\.config"):
        shardtrace.export_safetensors(tmp_path, model, config="gpt2")
    shardtrace.export_safetensors(tmp_path, model, config=model.config, max_file_bytes=2e4)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("show", [True, False])
def test_a_bar_for_what_takes_long(monkeypatch, show):
    monkeypatch.setattr(files, "DELAY", 0.0)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with files.ProgressBar("save", show=show).of(3_000_000) as advance:
        advance(3_000_000)
    assert ("save: 100%" in terminal.getvalue() and "B/s" in terminal.getvalue()) == show
