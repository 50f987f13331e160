"""What the Accelerator does with a sharded model. tests/test_trainers.py trains with it."""

import shardtrace

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate", reason="pip install 'shardtrace[examples]'")


def test_uneven_inputs_are_not_joined(fake_ranks, monkeypatch):
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Linear(4, 4))
    accelerator = object.__new__(accelerate.Accelerator)
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", 2)
    with pytest.raises(RuntimeError, match=r"cannot join sharded models.*iterate over shardtrace\.join"):
        accelerator.join_uneven_inputs([model])
    with pytest.raises(RuntimeError, match=r"cannot join sharded models"):
        accelerator.join_uneven_inputs([torch.optim.SGD(model.parameters()), model], even_batches=True)


def test_models_of_shards_are_not_averaged(fake_ranks):
    from accelerate.local_sgd import LocalSGD

    fake_ranks(2)
    local = object.__new__(LocalSGD)
    local.enabled, local.model = True, shardtrace.fsdp(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"LocalSGD averages .*accelerator\.accumulate"), local:
        pass
    local.enabled = False
    with local:
        pass
