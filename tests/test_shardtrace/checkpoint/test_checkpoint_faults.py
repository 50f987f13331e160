"""Checkpoints that are damaged, interrupted, incomplete, foreign or malicious raise an error that names the fault."""

import json
import os
import pickle
import re
import shutil
import zlib
from pathlib import Path
from unittest import mock

import shardtrace  # isort: split

from shardtrace import CheckpointError
from shardtrace.checkpoint import files

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_script
from safetensors.torch import load_file, save_file
from sharded_training import zoo_and_optimizer
from torch import nn

DATA = "rank-00000-000.safetensors"


def small(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def checkpoint(tmp_path):
    return shardtrace.save_checkpoint(tmp_path, *small(), step=5)


def load_fails(path, message, model=None):
    """Assert that the load raises and leaves the model, the optimizer and the generators as they were."""
    model, optimizer = model or small(seed=1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {p: {k: v.clone() for k, v in values.items()} for p, values in optimizer.state.items()}
    generators = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        shardtrace.load_checkpoint(path, model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(v, state[p][k]) for p, values in optimizer.state.items() for k, v in values.items())
    assert torch.equal(torch.get_rng_state(), generators)


def rewrite_index(checkpoint, change):
    """Change an index and its checksum: no accident, but somebody's work."""
    path = checkpoint / "index.json"
    body = json.loads(path.read_text())["index"]
    change(body)
    text = json.dumps(body).encode()
    path.write_bytes(b'{"crc32": "%08x", "index":\n' % zlib.crc32(text) + text + b"}\n")


def rewrite_data(checkpoint, change):
    """Change data, and the checksum of its file to fit."""
    tensors = load_file(checkpoint / DATA)
    change(tensors)
    save_file(tensors, checkpoint / DATA)
    data = (checkpoint / DATA).read_bytes()
    rewrite_index(checkpoint, lambda body: body["files"].update({DATA: [len(data), zlib.crc32(data)]}))


# ---- accidents ----


@pytest.mark.parametrize("where", [0, 100, 0.5, -1])
@pytest.mark.parametrize("file", [DATA, "index.json"])
def test_a_flipped_bit(checkpoint, file, where):
    data = bytearray((checkpoint / file).read_bytes())
    data[int(where * len(data)) if isinstance(where, float) else where] ^= 4
    (checkpoint / file).write_bytes(data)
    load_fails(checkpoint, f"{file} is damaged")


@pytest.mark.parametrize("size", [0, 7, -1])
def test_a_truncated_file(checkpoint, size):
    data = (checkpoint / DATA).read_bytes()
    (checkpoint / DATA).write_bytes(data[:size])
    load_fails(checkpoint, rf"{DATA} has [\d,]+ bytes, index.json says {len(data):,}")


def test_a_missing_file(checkpoint):
    (checkpoint / DATA).unlink()
    load_fails(checkpoint, f"{DATA} is missing")


def test_a_file_of_another_checkpoint(checkpoint, tmp_path):
    other = shardtrace.save_checkpoint(tmp_path, *small(seed=2), step=6)
    shutil.copy(other / DATA, checkpoint / DATA)
    load_fails(checkpoint, f"{DATA} is damaged: its checksum is")


def test_a_file_too_many(checkpoint):
    shutil.copy(checkpoint / DATA, checkpoint / "rank-00001-000.safetensors")
    load_fails(checkpoint, r"rank-00001-000.safetensors is not of this checkpoint")


def test_directories_without_a_checkpoint(tmp_path, checkpoint):
    load_fails(tmp_path / "nowhere", "there is no complete checkpoint in .*nowhere")
    (tmp_path / "file").write_text("")
    load_fails(tmp_path / "file", "there is no complete checkpoint in .*file")
    (checkpoint / "index.json").unlink()
    load_fails(checkpoint, "has no index.json: its save was interrupted")
    load_fails(tmp_path, "there is no complete checkpoint")
    (checkpoint / "index.json").write_text('{"weight_map": {}}')
    load_fails(tmp_path, "index.json is damaged, or not an index of shardtrace")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.0.bias"), r"do not hold the same keys: model\.0\.bias"),
        (lambda t: t.update(more=torch.ones(2)), "do not hold the same keys: more"),
        (
            lambda t: t.update({"model.0.bias": torch.ones(5)}),
            r"model\.0\.bias as torch.float32 of shape \(5,\), .*\(4,\)",
        ),
        (
            lambda t: t.update({"model.0.bias": torch.ones(4).half()}),
            r"model\.0\.bias as torch.float16 .* torch.float32",
        ),
    ],
)
def test_data_that_is_not_what_the_index_says(checkpoint, change, message):
    rewrite_data(checkpoint, change)
    load_fails(checkpoint, message)


def other(*layers):
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (other(nn.Linear(3, 4)), r"does not fit Sequential: unexpected key 1\.weight; unexpected key 1\.bias"),
        (other(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)), r"missing key 2\.weight"),
        (other(nn.Linear(3, 4), nn.Linear(4, 3)), r"1\.weight has shape \(2, 4\), the model's is \(3, 4\)"),
        (other(nn.Linear(3, 4), nn.Linear(4, 2).double()), r"1\.bias is torch.float32, the model's is torch.float64"),
    ],
)
def test_another_model(checkpoint, model, message):
    load_fails(checkpoint, message, model)


def test_what_was_not_saved(tmp_path):
    model, optimizer = small()
    shardtrace.save_checkpoint(tmp_path, model, step=1)
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        shardtrace.load_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="holds 0 schedulers, 1 are to be loaded"):
        shardtrace.load_checkpoint(tmp_path, model, schedulers=torch.optim.lr_scheduler.LinearLR(optimizer))
    with pytest.raises(CheckpointError, match="holds no scaler"):
        shardtrace.load_checkpoint(tmp_path, model, scaler=torch.amp.GradScaler("cpu"))


def test_arguments_of_save(tmp_path):
    model, _ = small()
    for options in ({"step": -1}, {"step": "one"}, {"step": 1, "keep_last": 0}):
        with pytest.raises(CheckpointError, match=r"must be a whole number of at least"):
            shardtrace.save_checkpoint(tmp_path, model, **options)
    for extra, name in (({"a": [1, {2}]}, r"extra\.a\.1 is a set"), (b"", "extra is a bytes"), (nn.Linear, "a type")):
        with pytest.raises(CheckpointError, match=name):
            shardtrace.save_checkpoint(tmp_path, model, step=1, extra=extra)


def test_a_later_checkpoint_is_not_hidden(tmp_path, checkpoint):
    with pytest.raises(CheckpointError, match=r"cannot save step 5: there is .*step-00000005 already"):
        shardtrace.save_checkpoint(tmp_path, *small(), step=5)
    with pytest.raises(CheckpointError, match=r"cannot save step 4: there is .*step-00000005 already"):
        shardtrace.save_checkpoint(tmp_path, *small(), step=4)


def test_keep_last(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "step-00000001").mkdir()  # an interrupted save
    for step in range(2, 7):
        shardtrace.save_checkpoint(tmp_path, *small(), step=step, keep_last=None if step < 4 else 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step-00000005", "step-00000006"]


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("file", ["rank-00000-000.safetensors", "rank-00001-000.safetensors"])
def test_damage_that_one_rank_sees_is_an_error_on_all(tmp_path, strategy, file):
    """Each rank reads one of two files. A load that raises on every rank leaves everything as it was."""
    path = shardtrace.save_checkpoint(tmp_path / "two", *zoo_and_optimizer(strategy, seed=1), step=1)
    if dist.get_rank() == 0:
        data = bytearray((path / file).read_bytes())
        data[len(data) // 2] ^= 1
        (path / file).write_bytes(data)
    dist.barrier()
    model, optimizer = zoo_and_optimizer(strategy)
    before = [p.detach().clone() for p in model.parameters()]
    generators = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=f"{file} is damaged"):
        shardtrace.load_checkpoint(path, model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), generators)
    assert not optimizer.state
    shardtrace.save_checkpoint(path / "after", model, step=0)  # the ranks are still in step


@on_ranks(2)
@pytest.mark.parametrize("on", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path, on):
    """The error comes at once or, in the background, later. The checkpoint before stays the latest."""
    model, optimizer = zoo_and_optimizer()
    first = shardtrace.save_checkpoint(tmp_path, model, optimizer, step=1)
    full = OSError(28, "No space left on device")
    message = f"step 2 was not saved to .*: rank {on}: OSError: .*No space left"
    with mock.patch.object(files, "save_file", side_effect=full if dist.get_rank() == on else files.save_file):
        with pytest.raises(CheckpointError, match=message):
            shardtrace.save_checkpoint(tmp_path, model, optimizer, step=2)
        with shardtrace.AsyncCheckpointer() as checkpointer:
            for again in (checkpointer.wait, lambda: checkpointer.save(tmp_path, model, optimizer, step=3)):
                checkpointer.save(tmp_path, model, optimizer, step=2)
                with pytest.raises(CheckpointError, match=message):
                    again()
    assert shardtrace.latest_checkpoint(tmp_path) == first
    dist.barrier()  # the first rank removes what was written
    assert list(tmp_path.iterdir()) == [first]
    with shardtrace.AsyncCheckpointer() as checkpointer:
        second = checkpointer.save(tmp_path, model, optimizer, step=2)
        third = checkpointer.save(tmp_path, model, optimizer, step=3, keep_last=1)
    assert shardtrace.latest_checkpoint(tmp_path) == third
    assert not second.exists()


@on_ranks(2)
@pytest.mark.parametrize("on", [0, 1])
def test_a_refusal_on_one_rank_is_an_error_on_all(tmp_path, on):
    path = tmp_path / "refused"
    model, _ = zoo_and_optimizer()
    extra = {"loader": [object() if dist.get_rank() == on else 1]}
    with pytest.raises(CheckpointError, match=rf"ranks\.{on}\.extra\.loader\.0 is a object"):
        shardtrace.save_checkpoint(path, model, step=1, extra=extra)
    with pytest.raises(CheckpointError, match=r"the ranks differ in a checkpoint to save to .* step 0"):
        shardtrace.save_checkpoint(path, model, step=dist.get_rank())
    assert not path.exists()


# ---- malice ----


class Payload:
    def __init__(self, witness):
        self.witness = str(witness)

    def __reduce__(self):
        return os.mkdir, (self.witness,)


@pytest.mark.parametrize("name", [".metadata", DATA, "index.json", "__0_0.distcp"])
def test_a_pickle_is_never_loaded(checkpoint, tmp_path, name):
    witness = tmp_path / "executed"
    pickled = pickle.dumps(Payload(witness))
    (checkpoint / name).write_bytes(pickled)
    if name == DATA:
        rewrite_index(checkpoint, lambda body: body["files"].update({DATA: [len(pickled), zlib.crc32(pickled)]}))
    model, optimizer = small()
    if name == ".metadata":  # of torch.distributed.checkpoint; here it is a hidden file that is never read
        shardtrace.load_checkpoint(checkpoint, model, optimizer)
    else:
        load_fails(checkpoint, re.escape(name) if name != DATA else "[Hh]eader")
    assert not witness.exists()


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "rank-00000-000.safetensors/../x", "x.pt", ""]
)
def test_a_path_that_leaves_the_directory(checkpoint, name):
    shutil.copy(checkpoint / DATA, checkpoint.parent / "secret.safetensors")
    rewrite_index(checkpoint, lambda body: body["files"].update({name: body["files"].pop(DATA)}))
    load_fails(checkpoint, f"{re.escape(repr(name))} is not the name of a data file")


def test_a_link_that_leaves_the_directory(checkpoint, tmp_path):
    (checkpoint / DATA).rename(tmp_path / "elsewhere")
    (checkpoint / DATA).symlink_to(tmp_path / "elsewhere")
    load_fails(checkpoint, f"{DATA} is not a regular file")


def at(*path, value):
    """A change that puts a value at a place of the index."""

    def change(body):
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at("format", value="shardtrace 99"), "has the format 'shardtrace 99'"),
        (at("step", value=None), "is not an index"),
        (at("files", value=[]), "is not an index"),
        (at("ranks", value=[]), "it lists no rank"),
        (at("ranks", value=[{}]), "is not one: KeyError"),
        (at("ranks", 0, "rng", value={"tensor": "x"}), "is not one: KeyError"),
        (at("ranks", 0, "extra", value={"call": ["os.system"]}), "holds .*call.* where a value should be"),
        (at("ranks", 0, "extra", value={"dict": [[[1], 2]]}), "where a value should be"),
        (at("tied", value={"model.x": "model.y"}), "model.x is tied to model.y, which does not fit"),
        (at("state", value={}), "is not one: KeyError"),
        (at("state", "optimizers", 0, "class", value="SGD"), "the optimizer is a AdamW, the checkpoint's was a SGD"),
        (at("state", "optimizers", 0, "groups", value=[]), r"parameter 0\.weight is in no group"),
        (at("state", "optimizers", 0, "state", "2.weight", value={}), r"optimizer state of 2\.weight"),
        (at("tensors", "model.0.weight", 0, value="system"), "is not an index"),
        (at("tensors", "model.0.weight", 1, value=[-4, 3]), "shape"),
        (at("tensors", "model.0.weight", 2, value=[]), r"model\.0\.weight is not covered by its chunks"),
        (at("tensors", "model.0.weight", 2, value=[[DATA, 0, 3]]), "not covered"),
        (at("tensors", "model.0.weight", 2, value=[[DATA, 0, 4], [DATA, 3, 1]]), "not covered"),
        (at("tensors", "model.0.weight", 2, value=[["other", 0, 4]]), "in a file that is not listed"),
        (
            at("tensors", "optimizer.state.0.weight.exp_avg", 1, value=[4, 2]),
            r"exp_avg of 0\.weight has shape \(4, 2\)",
        ),
    ],
)
def test_an_index_that_somebody_changed(checkpoint, change, message):
    rewrite_index(checkpoint, change)
    load_fails(checkpoint, message)


def test_an_index_that_is_too_deep(checkpoint):
    text = json.dumps({"format": "shardtrace 2", "step": 0}).encode()[:-1] + b', "files": ' + b"[" * 100_000
    (checkpoint / "index.json").write_bytes(b'{"crc32": "%08x", "index":\n' % zlib.crc32(text) + text + b"}\n")
    load_fails(checkpoint, "is not an index")


# ---- interruptions ----


def kills(mode, path):
    """The output of tests/checkpoint_kills.py, in a fork that has imported Thunder."""
    script = Path(__file__).parents[2] / "checkpoint_kills.py"
    return json.loads(run_script(script, [mode, path], world_size=1, timeout=200).splitlines()[-1])


def test_a_save_killed_at_each_of_its_file_operations(tmp_path):
    latest = kills("each", str(tmp_path))
    assert len(latest) > 20
    assert latest == sorted(latest)  # the old checkpoint up to one moment, and the new one from there on
    assert set(latest) == {1, 2}


def test_ranks_killed_at_random_moments(tmp_path):
    found = kills("random", str(tmp_path))
    assert len(found) == 10
    assert max(found) > 1
