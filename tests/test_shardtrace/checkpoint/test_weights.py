"""Weights of other programs, read straight into shards: formats, names, faults, and the memory that it takes."""

import json
import os
from pathlib import Path

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens
from ranks import on_ranks
from safetensors.torch import save_file, save_model
from torch import nn

MIXED = {"blocks.0.*": "owner", "embedding.*": "ddp", "*": "zero2"}


def zoo(seed=1):
    torch.manual_seed(seed)
    return Zoo()


def untied(model):
    return {key: value.clone() for key, value in model.state_dict().items() if key != "head.weight"}


def assert_holds(model, expected):
    found = shardtrace.full_state_dict(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


@on_ranks(3)
@pytest.mark.parametrize("strategy", ["zero3", MIXED])
def test_each_rank_reads_its_rows(strategy, tmp_path):
    """From a file, from several with an index, and from a state dict; into a meta model and into shards."""
    expected = zoo().state_dict()
    one, many = tmp_path / "one", tmp_path / "many"
    if dist.get_rank() == 0:
        one.mkdir()
        save_file(untied(zoo()), one / "model.safetensors")
        shardtrace.export_safetensors(many, zoo(), max_file_bytes=500)
    dist.barrier()
    for weights in (one, many, one / "model.safetensors", many / "model.safetensors.index.json", expected):
        with shardtrace.init_empty_weights():
            model = Zoo()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shardtrace.fsdp(
            model, sharding_strategy=strategy, init_policy=shardtrace.InitPolicy(weights=weights, device="cpu")
        )
        assert model.head.weight is model.embedding.weight
        assert_holds(model, expected)
        for entry in model._shardtrace.entries:  # the padding too
            assert torch.isfinite(entry.rows).all()
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [p.shape for p in model.parameters()]
    inputs, targets = tokens(4)
    torch.testing.assert_close(thunder.jit(model)(inputs, targets), zoo()(inputs, targets))

    model = shardtrace.fsdp(zoo(2), sharding_strategy=strategy)
    assert shardtrace.load_safetensors(many, model) == ([], [])
    assert_holds(model, expected)


def test_names_dtypes_and_what_is_not_strict(tmp_path):
    expected = zoo().state_dict()
    values = {f"module.{key}": value.double() for key, value in untied(zoo()).items()}
    save_file({**values, "module.step": torch.zeros(())}, tmp_path / "weights.safetensors")

    def rename(key):
        return None if key == "module.step" else key.removeprefix("module.")

    model = zoo(2)
    assert shardtrace.load_safetensors(tmp_path, model, rename=rename) == ([], [])
    assert_equal_states(model, expected)
    model = zoo(2)
    some = {"scale": torch.tensor(3.0), "other": torch.ones(2)}
    missing, unexpected = shardtrace.load_safetensors(some, model, strict=False)
    assert model.scale == 3
    assert len(missing) == len(expected) - 2  # head.weight is a second name of embedding.weight
    assert unexpected == ["other"]


def assert_equal_states(model, expected):
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
        assert value.dtype == expected[name].dtype


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])


def listed_but_missing(folder):
    index = {"weight_map": {"scale": "model-1.safetensors"}}
    (folder / "model.safetensors").rename(folder / "renamed.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def leaves_the_folder(folder):
    listed_but_missing(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"scale": "../model.safetensors"}}')


def no_index(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


def twice(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, r"model\.safetensors is no safetensors file, or is damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"there are no \*\.safetensors files in"),
        (listed_but_missing, r"model-1\.safetensors is missing, which model\.safetensors\.index\.json lists"),
        (leaves_the_folder, "names files outside its folder"),
        (no_index, "is no index of safetensors files"),
        (twice, r"is in .*a\.safetensors and in .*b\.safetensors"),
    ],
)
def test_spoilt_files(spoil, message, tmp_path):
    save_file(untied(zoo()), tmp_path / "model.safetensors")
    spoil(tmp_path)
    with pytest.raises(shardtrace.CheckpointError, match=message):
        shardtrace.load_safetensors(tmp_path, zoo())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("scale"), "missing key scale"),
        (lambda values: values.update(more=torch.ones(1)), "unexpected key more"),
        (lambda values: values.update(row=torch.ones(2, 6)), r"row of .*has shape \(2, 6\), the model's is \(1, 6\)"),
        (lambda values: values.update(row=3), "row of the state dict is a int, not a tensor"),
    ],
)
def test_weights_that_do_not_fit(change, message):
    values = untied(zoo())
    change(values)
    model = zoo(2)
    with pytest.raises(shardtrace.CheckpointError, match=message):
        shardtrace.load_safetensors(values, model)
    assert_equal_states(model, zoo(2).state_dict())


def test_no_such_place():
    with pytest.raises(shardtrace.CheckpointError, match="there is no file or folder /nowhere"):
        shardtrace.load_safetensors("/nowhere", zoo())


@on_ranks(2)
def test_a_file_that_one_rank_cannot_read(tmp_path):
    """Every rank raises, and nothing is sharded or loaded."""
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    save_file(untied(zoo()), folder / "model.safetensors")
    if dist.get_rank() == 1:
        cut(folder)
    with shardtrace.init_empty_weights():
        model = Zoo()
    with pytest.raises((shardtrace.CheckpointError, shardtrace.RankMismatchError), match=r"1/model\.safetensors is no"):
        shardtrace.fsdp(model, init_policy=shardtrace.InitPolicy(weights=folder))
    assert all(p.is_meta for p in model.parameters())
    model = shardtrace.fsdp(zoo(2))
    with pytest.raises(shardtrace.CheckpointError, match=r"1/model\.safetensors is no"):
        shardtrace.load_safetensors(folder, model)
    assert_holds(model, zoo(2).state_dict())


class Rotary(nn.Module):
    """Owns a buffer that is not in a state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)
        self.shared = self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return x * self.frequencies * self.weight + self.shared


def test_empty_weights_keep_buffers_and_ties(fake_ranks):
    with shardtrace.init_empty_weights():
        model = Rotary()
        lazy = nn.LazyLinear(3)
    assert model.weight.is_meta
    assert not model.weight.requires_grad
    assert model.shared is model.weight
    assert model.frequencies.tolist() == [0, 1, 2]
    assert not nn.Linear(2, 2).weight.is_meta
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    fake_ranks(2)
    shardtrace.fsdp(
        model, init_policy=shardtrace.InitPolicy(weights={"shared": torch.tensor([4.0, 5.0, 6.0])}, device="cpu")
    )
    assert model.weight.to_local().tolist() == [4, 5]

    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(ValueError, match=r"module the model itself .Rotary. has a buffer on the meta device"):
        shardtrace.fsdp(model, init_policy=shardtrace.InitPolicy(weights={"weight": torch.ones(3)}))
    shardtrace.fsdp(
        model,
        init_policy=shardtrace.InitPolicy(
            weights={"weight": torch.ones(3)}, param_init_fn=lambda m: m.frequencies.fill_(7.0)
        ),
    )
    assert model.frequencies.tolist() == [7, 7, 7]
    assert model.weight.to_local().tolist() == [1, 1]


def test_models_of_hugging_face(tmp_path):
    """The weights of a base model, with a buffer that old files hold."""
    transformers = pytest.importorskip("transformers", reason="pip install 'shardtrace[examples]'")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, bos_token_id=0, eos_token_id=0)
    base, model = transformers.GPT2Model(config), transformers.GPT2LMHeadModel(config)
    model._keys_to_ignore_on_load_unexpected = [r"attn\.bias"]
    save_file({**base.state_dict(), "h.0.attn.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    shardtrace.load_safetensors(tmp_path, model)
    for name, value in base.state_dict().items():
        assert torch.equal(model.transformer.state_dict()[name], value), name
    assert torch.equal(model.lm_head.weight, base.wte.weight)


LARGE = (4096, 2048)  # 32 MB, so that what Python allocates meanwhile matters little


def peak_memory():
    """Bytes: of the process, since the last call."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    Path("/proc/self/clear_refs").write_text("5")
    return {name: int(value[0]) * 1024 for name, *value in lines if name in ("VmHWM:", "VmRSS:")}


def large():
    return nn.ModuleList(nn.Linear(*LARGE, bias=False) for _ in range(4))


@pytest.fixture(scope="module")
def large_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    save_model(large(), folder / "model.safetensors")
    save_model(nn.Linear(4, 4), folder / "small.safetensors")
    return folder


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs the peak memory of Linux")
def test_no_rank_holds_more_than_its_shards_and_a_slice(large_file, ranks_of):
    ranks_of(2).run(read_large, folder=large_file)


def read_large(folder):
    shardtrace.fsdp(
        nn.Linear(4, 4), init_policy=shardtrace.InitPolicy(weights=folder / "small.safetensors")
    )  # what a first model allocates once
    with shardtrace.init_empty_weights():
        model = large()
    before = peak_memory()["VmRSS:"]
    shardtrace.fsdp(model, init_policy=shardtrace.InitPolicy(weights=folder, device="cpu"))
    grown = peak_memory()["VmHWM:"] - before
    slices = [p.to_local().nbytes for p in model.parameters()]
    assert grown < sum(slices) + 1.2 * max(slices)


@pytest.mark.parametrize("in_files", [False, True])
def test_values_that_do_not_fit(fake_ranks, tmp_path, in_files):
    """Of another kind, or different ones for the two names of a tied weight."""

    def weights(**values):
        found = {"weight": torch.ones(3), "frequencies": torch.ones(3)} | values
        if in_files:
            save_file(found, tmp_path / "model.safetensors")
        return tmp_path if in_files else found

    class Saved(Rotary):
        def __init__(self, dtype=torch.float32):
            super().__init__()
            self.register_buffer("frequencies", torch.zeros(3, dtype=dtype))

    fake_ranks(2)
    codes = torch.ones(3, dtype=torch.int8)
    with pytest.raises(shardtrace.CheckpointError, match=r"weight of .* has integer values, the model's are floating"):
        shardtrace.fsdp(Saved(), init_policy=shardtrace.InitPolicy(weights=weights(weight=codes)))
    with pytest.raises(
        shardtrace.CheckpointError, match=r"frequencies of .* has floating values.*are integer: convert"
    ):
        shardtrace.fsdp(Saved(torch.int64), init_policy=shardtrace.InitPolicy(weights=weights()))
    with pytest.raises(
        shardtrace.CheckpointError, match=r"cannot read \w+ .*\w+ has other values, and the model has one"
    ):
        shardtrace.fsdp(
            Saved(), init_policy=shardtrace.InitPolicy(weights=weights(shared=torch.tensor([1.0, 2.0, 3.0])))
        )
    model = shardtrace.fsdp(
        Saved(torch.int64), init_policy=shardtrace.InitPolicy(weights=weights(shared=torch.ones(3), frequencies=codes))
    )
    assert model.frequencies.tolist() == [1, 1, 1]
