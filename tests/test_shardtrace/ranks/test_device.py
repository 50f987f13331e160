"""The device of a rank, with a recorder in the place of torch.cuda."""

from unittest import mock

import shardtrace
from shardtrace.ranks import mesh
from shardtrace.ranks.mesh import choose_device, resolve_device, use_device

import pytest
import torch
import torch.distributed as dist

CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch):
    """A machine on which this is the fourth rank. By default it sees the GPUs of all of them and has set none."""
    seen = mock.MagicMock()
    seen.is_available.return_value = seen.is_initialized.return_value = True
    seen.current_device.return_value, seen.device_count.return_value = 0, 8
    for name in ("is_available", "is_initialized", "current_device", "device_count", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(seen, name))
    monkeypatch.setenv("LOCAL_RANK", "3")
    return seen


def gpu(index):
    return torch.device("cuda", index)


def test_the_device_is_chosen_as_by_fsdp2(fake_ranks, cuda, monkeypatch):
    cuda.is_available.return_value = False
    assert choose_device(None, None, CPU) == CPU
    cuda.is_available.return_value = True
    assert choose_device(None, None, CPU) == gpu(3)  # no process group yet: it will be one of nccl
    assert choose_device("cpu", None, gpu(1)) == CPU
    fake_ranks(2)
    assert choose_device(None, None, CPU) == CPU  # these ranks cannot reach GPUs
    assert choose_device(None, None, CPU, on_host=True) == gpu(3)
    assert choose_device(None, None, gpu(0)) == gpu(0)
    assert choose_device(None, dist.init_device_mesh("cpu", (2,)), gpu(1)) == CPU
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert choose_device(None, None, CPU) == gpu(3)


@pytest.mark.parametrize(
    ("visible", "set_to", "asked", "model", "expected"),
    [
        (8, 0, None, CPU, 3),
        (1, 0, None, CPU, 0),  # CUDA_VISIBLE_DEVICES=3 for this rank
        (2, 0, "cuda", CPU, 1),  # CUDA_VISIBLE_DEVICES=2,3 for the second half of the ranks
        (8, 5, None, CPU, 5),  # torch.cuda.set_device(5)
        (8, 5, None, gpu(6), 6),  # model.to("cuda:6")
        (8, 5, None, gpu(0), 5),  # model.to(0), which all ranks did
        (8, 0, None, gpu(0), 3),
        (8, 5, "cuda:0", gpu(6), 0),  # InitPolicy(device="cuda:0")
    ],
)
def test_the_gpu_of_a_rank(cuda, visible, set_to, asked, model, expected):
    cuda.device_count.return_value, cuda.current_device.return_value = visible, set_to
    assert choose_device(asked, None, model) == gpu(expected)


def test_a_gpu_that_the_group_is_bound_to(cuda):
    with mock.patch.object(dist, "group", mock.MagicMock(**{"WORLD.bound_device_id": gpu(2)})):
        assert resolve_device("cuda", None) == gpu(2)


def test_the_device_is_set_once(cuda):
    use_device(gpu(3))
    cuda.set_device.assert_called_once_with(gpu(3))
    cuda.current_device.return_value = 3
    use_device(gpu(3))
    use_device(CPU)
    cuda.set_device.assert_called_once()


@pytest.mark.parametrize(("device", "options", "index"), [("cuda", {}, 3), ("cuda", {"device_id": gpu(1)}, 1)])
def test_a_group_is_made_on_the_current_device_and_bound_to_it(cuda, monkeypatch, device, options, index):
    monkeypatch.setattr(dist, "rendezvous", lambda method: iter([(dist.HashStore(), 0, 1)]))
    cuda.init = mock.MagicMock()
    monkeypatch.setattr(mesh.dist, "init_process_group", cuda.init)
    shardtrace.init_process_group(device, **options)
    calls = [name for name, _, _ in cuda.mock_calls if name in ("set_device", "init")]
    assert calls == ["set_device", "init"]
    assert (cuda.init.call_args.args, cuda.init.call_args.kwargs["device_id"]) == (("nccl",), gpu(index))
    shardtrace.init_process_group("cpu")
    assert "device_id" not in cuda.init.call_args.kwargs
