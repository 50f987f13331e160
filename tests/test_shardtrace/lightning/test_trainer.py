"""What the strategy of Lightning's Trainer refuses, and its name. tests/test_trainers.py trains with it."""

import pytest

pytest.importorskip("lightning.pytorch", reason="pip install 'shardtrace[lightning]'")

from shardtrace.lightning import ShardtraceTrainerStrategy

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
from torch import nn

ON_ONE = {"accelerator": "cpu", "devices": 1, "logger": False, "barebones": True}


def test_its_name_is_registered():
    trainer = Trainer(strategy="shardtrace", **ON_ONE)
    assert type(trainer.strategy) is ShardtraceTrainerStrategy


def test_precisions_that_replace_layers_are_refused():
    plugin = object.__new__(TransformerEnginePrecision)
    with pytest.raises(TypeError, match="does not work with TransformerEnginePrecision: use precision='32-true'"):
        Trainer(strategy=ShardtraceTrainerStrategy(), plugins=[plugin], **ON_ONE)


@pytest.mark.usefixtures("single_rank")
def test_sync_batchnorm_is_refused():
    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def training_step(self, batch, _):
            return self.norm(batch).sum()

        def train_dataloader(self):
            return []

        def configure_optimizers(self):
            return None

    trainer = Trainer(strategy="shardtrace", sync_batchnorm=True, **ON_ONE)
    with pytest.raises(ValueError, match="leave sync_batchnorm out"):
        trainer.fit(Module())
