"""Calibration with sizes that take no time, and its cache."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from passes.plan.cost import GLOO, CostModel, Device, Link, default_cost_model
from shardtrace import cli
from shardtrace.planner import calibrate as module
from shardtrace.planner.calibrate import (
    Effort,
    Key,
    cache_folder,
    calibrate,
    cost_model_key,
    fit_link,
    load_cost_model,
    write_cost_model,
)

import pytest
import torch
import torch.distributed as dist

CPU = torch.device("cpu")
TINY = Effort(matmul=16, elements=100, messages=(100, 2**17), repeats=2, seconds=0.001)
MODEL = CostModel(Link(bandwidth=1e9, latency=1e-5), Device(flops=1e10, half_flops=2e10, bandwidth=3e9, overhead=1e-6))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDTRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder, *, world_size=2, backend="gloo", model=MODEL, **changes):
    """Writes a cache file as another run would."""
    key = replace(cost_model_key(CPU, None), backend=backend, world_size=world_size)
    folder.mkdir(exist_ok=True)
    key.path.write_text(json.dumps({"version": 2, "key": asdict(key), "model": asdict(model), **changes}))
    return key.path


def test_one_process(folder, single_rank):
    reported = []
    model = calibrate(None, "cpu", effort=TINY, progress=reported.append)
    assert model.link == default_cost_model("cpu", "none").link
    assert len(reported) == 9
    assert model.device.attention > 0
    assert 0 < model.device.special < 1e13
    (file,) = folder.iterdir()
    assert file == cost_model_key(CPU, None).path
    data = json.loads(file.read_text())
    assert data["key"]["backend"] == "none"
    assert CostModel.from_dict(data["model"]) == model
    assert load_cost_model(CPU, dist.group.WORLD) == model


def test_a_file_from_before_rounding_was_measured(folder, single_rank):
    path = write(folder, world_size=1, backend="none")
    data = json.loads(path.read_text())
    del data["model"]["device"]["rounding"]
    path.write_text(json.dumps(data))
    assert load_cost_model(CPU, dist.group.WORLD).device == MODEL.device


def test_not_saved(folder):
    calibrate(None, "cpu", effort=TINY, save=False)
    assert not folder.exists()


def test_a_fake_group_measures_no_link_and_loads_the_defaults(folder, fake_ranks):
    fake_ranks(2)
    assert calibrate(dist.group.WORLD, "cpu", effort=TINY).link == GLOO
    assert not folder.exists()
    for backend in ("fake", "none", "gloo"):
        write(folder, backend=backend)
    assert load_cost_model(CPU, dist.group.WORLD) == default_cost_model("cpu", "gloo")


def test_a_cache_that_cannot_be_written_is_a_warning(folder):
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="could not be saved"):
        calibrate(None, "cpu", effort=TINY)


def test_the_folder(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SHARDTRACE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "shardtrace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "shardtrace"


def test_the_file_is_named_by_its_key_and_written_whole(folder):
    assert Key("AMD (R) EPYC, 2 threads", "gloo", 8).path == folder / "amd-r-epyc-2-threads-gloo-8.json"
    assert cost_model_key(CPU, None).device.endswith(f", {torch.get_num_threads()} threads")
    for model in (MODEL, replace(MODEL, link=GLOO)):
        path = write_cost_model(model, CPU, None)
        assert list(folder.iterdir()) == [path]
        assert CostModel.from_dict(json.loads(path.read_text())["model"]) == model


def find(world_size=2, backend="gloo"):
    return module._find(replace(cost_model_key(CPU, None), backend=backend, world_size=world_size))


def test_the_exact_calibration_then_the_nearest_number_of_ranks(folder):
    assert find() is None
    models = {n: replace(MODEL, link=Link(1e9 * n, 0.0)) for n in (2, 4, 16)}
    for n, model in models.items():
        write(folder, world_size=n, model=model)
    assert find(4) == models[4]
    assert find(14) == models[16]
    assert find(3) in (models[2], models[4])
    assert find(2, backend="nccl") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'version'"),
        ('{"version": 1}', "it is of version 1, not 2"),
        (json.dumps({"version": 2, "key": {"device": "x"}, "model": asdict(MODEL)}), "TypeError"),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_warning(folder, text, why):
    path = write(folder)
    path.write_text(text)
    with pytest.warns(UserWarning, match=rf"ignoring the calibration in .*{path.name} \(.*{why}") as caught:
        assert find() is None
    assert len(caught) == 1
    path.write_bytes(b"\xff\xfe")
    with pytest.warns(UserWarning, match="UnicodeDecodeError"):
        assert find() is None


def test_rates_that_are_none_and_other_machines(folder):
    path = write(folder)
    path.write_text(path.read_text().replace('"flops": 10000000000.0', '"flops": 0'))
    with pytest.warns(UserWarning, match="flops of Device must be finite and positive"):
        assert find() is None
    write(folder, key={"device": "another whose file has this name", "backend": "gloo", "world_size": 2})
    assert find() is None


def test_the_link_that_explains_what_was_measured():
    link = fit_link([(size, 2e-4 + size / 1e8) for size in (1e4, 1e5, 1e6, 1e7)])
    assert link.latency == pytest.approx(2e-4)
    assert link.bandwidth == pytest.approx(1e8)
    assert link.busy == link.busy_per_byte == 0
    samples = [(size, 2e-4 + size / 1e8) for size in (1e4, 1e5, 1e6)]
    link = fit_link(samples, [1e-3 + size / 1e9 for size, _ in samples])
    assert (link.busy, link.busy_per_byte) == (pytest.approx(1e-3), pytest.approx(1e-9))
    assert fit_link(samples, [3e-3, 2e-3, 1e-3]).busy_per_byte == 0
    for noisy in ([(1e4, 1e-5), (1e6, 2e-2)], [(1e4, 2e-3), (1e6, 1e-3)]):
        assert fit_link(noisy).latency == 0


def test_the_command(monkeypatch, capsys, folder):
    monkeypatch.setitem(module.EFFORTS, "cpu", TINY)
    assert cli.main(["calibrate", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    path = cost_model_key(CPU, None).path
    assert f"saved to {path}" in out
    assert "fp32 products" in out
    assert "latency" not in out
    path.unlink()
    folder.rmdir()
    folder.write_text("a file")
    assert cli.main(["calibrate"]) == 1
    assert "SHARDTRACE_CACHE" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        cli.main(["calibrate", "--help"])
    assert "torchrun" in capsys.readouterr().out


# ---- on two ranks ----


def on_a_rank(folder):
    """Runs on each rank. Each has its own cache, as on machines that share no file system."""
    rank, group, effort = dist.get_rank(), dist.group.WORLD, module.EFFORTS["cpu"]
    os.environ["SHARDTRACE_CACHE"] = str(Path(folder) / str(rank))
    try:
        loaded = [load_cost_model(CPU, group)]
        models = [calibrate(group, "cpu", effort=TINY)]
        if rank == 1:
            write_cost_model(MODEL, CPU, group)
        loaded.append(load_cost_model(CPU, group))
        module.EFFORTS["cpu"] = TINY
        assert cli.main(["calibrate"]) == 0
        models.append(load_cost_model(CPU, group))
        return models, loaded
    finally:
        module.EFFORTS["cpu"] = effort
        del os.environ["SHARDTRACE_CACHE"]


def test_all_ranks_have_what_the_first_measured(two_ranks, folder):
    first, second = two_ranks.run(on_a_rank, folder=str(folder))
    assert first == second
    models, loaded = first
    assert loaded == [default_cost_model("cpu", "gloo"), models[0]]
    assert models[0] != models[1]
    assert models[1].link.bandwidth != GLOO.bandwidth
    (file,) = (folder / "0").iterdir()
    assert json.loads(file.read_text())["key"]["world_size"] == 2
