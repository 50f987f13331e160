"""Files that the first rank of a trainer writes late, or that only some ranks see."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import shardtrace
from shardtrace import trainers
from shardtrace.trainers import after_first, check_files

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn


class Late:
    """What counts here of the Trainer of transformers 4. The first rank makes folders late, as on a slow disk."""

    def __init__(self, model, folder):
        self.model, self.args = model, SimpleNamespace(output_dir=str(folder))
        self.state, self.loaded = SimpleNamespace(best_model_checkpoint=None), None

    def save_model(self, folder):
        self._save(folder)

    def _save(self, folder, state_dict=None):
        if dist.get_rank() == 0:
            time.sleep(0.2)
            os.makedirs(folder)
            torch.save(state_dict, f"{folder}/pytorch_model.bin")

    def _save_checkpoint(self, folder, sees=True):
        self.save_model(folder)
        if sees and os.path.exists(folder):
            self.state.best_model_checkpoint = str(folder)

    def _load_best_model(self):
        self.loaded = self.state.best_model_checkpoint

    def train(self, resume_from_checkpoint=None):
        self.loaded = resume_from_checkpoint

    def _save_optimizer_and_scheduler(self, folder):
        pass

    _load_optimizer_and_scheduler = _save_optimizer_and_scheduler


def last_checkpoint(folder):
    return max((f"{folder}/{name}" for name in os.listdir(folder)), default=None)


@on_ranks(2)
def test_a_rank_that_looks_for_a_checkpoint_before_it_is_there(tmp_path):
    trainers._join(Late, last_checkpoint)
    torch.manual_seed(0)
    checks = shardtrace.Checks(timeout=20)
    trainer = Late(shardtrace.fsdp(nn.Linear(4, 4), checks=checks), tmp_path)
    trainer.save_model(tmp_path / "model")
    assert (tmp_path / "model").is_dir()  # on each rank
    trainer._save_checkpoint(tmp_path / "1")
    trainer._save_checkpoint(tmp_path / "2", sees=dist.get_rank() == 0)  # a disk that shows it later
    trainer._load_best_model()
    assert trainer.loaded == str(tmp_path / "2")
    trainer.train(resume_from_checkpoint=True)
    for resume in (
        dist.get_rank() == 0,
        str(tmp_path / f"{1 + dist.get_rank()}"),
    ):  # only the first one, or another one
        with pytest.raises(shardtrace.RankMismatchError, match=r"ranks differ in the checkpoint to resume from.*disk"):
            trainer.train(resume_from_checkpoint=resume)
    trainer.state.best_model_checkpoint = str(tmp_path / f"{1 + dist.get_rank()}")
    with pytest.raises(shardtrace.RankMismatchError, match="ranks differ in the best checkpoint to load"):
        trainer._load_best_model()
    trainer.train(resume_from_checkpoint=None)
    assert trainer.loaded is None


@on_ranks(2)
def test_ranks_that_see_other_files_at_one_path(tmp_path):
    model = nn.Sequential(shardtrace.fsdp(nn.Linear(4, 4, bias=False), sharding_strategy="ddp"))
    mine = tmp_path / str(dist.get_rank())
    mine.mkdir()
    before = Path.cwd()
    os.chdir(mine)
    try:
        check_files(model, "folder", "nothing")
        Path("last.ckpt").write_bytes(b"0" * dist.get_rank())
        Path("training_args.bin").write_bytes(b"0" * dist.get_rank())
        for path in (".", "last.ckpt"):
            with pytest.raises(shardtrace.RankMismatchError, match=r"rank 0 has last.ckpt of 0 .*rank 1 has last.ckpt"):
                check_files(model, path, "a file")
    finally:
        os.chdir(before)
    assert after_first(model, dist.get_rank()) == 0
    assert after_first(nn.Linear(2, 2), dist.get_rank()) == dist.get_rank()
