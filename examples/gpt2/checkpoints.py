"""Checkpoints of a training: how they are saved, and how a stopped training resumes from the last one."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple

import shardtrace

from common import add_count, new_folder


class Checkpoints(NamedTuple):
    """The folder of the checkpoints, the steps between two of them, and whether to resume from the last one."""

    directory: Path
    every: int
    resumes: bool

    @classmethod
    def of(cls, args: Namespace) -> Checkpoints | None:
        """The options of the command line, None without ``--checkpoint-dir``. ``--resume`` then stops the script."""
        if args.checkpoint_dir is None:
            if args.resume:
                sys.exit("--resume needs --checkpoint-dir")
            return None
        return cls(args.checkpoint_dir, args.save_every, args.resume)

    def resume(self, state: dict[str, Any]) -> dict[str, Any]:
        """Loads the last checkpoint if ``--resume`` was given and there is one. Returns arguments for :func:`train`."""
        if not self.resumes or shardtrace.latest_checkpoint(self.directory) is None:
            return {}
        loaded = shardtrace.load_checkpoint(self.directory, **state)
        return {"start": loaded.step, "losses": loaded.extra["losses"]}

    def saving(self, checkpointer: shardtrace.AsyncCheckpointer, state: dict[str, Any]) -> dict[str, Any]:
        """Arguments for :func:`train` that make it save. The last two checkpoints are kept."""

        def save(step: int, losses: list[float]) -> None:
            checkpointer.save(self.directory, **state, step=step, extra={"losses": losses}, keep_last=2)

        return {"save": save, "save_every": self.every}


def add_checkpoints(parser: ArgumentParser) -> None:
    what = "save checkpoints in this folder and keep the last two"
    parser.add_argument("--checkpoint-dir", type=new_folder, metavar="FOLDER", help=what)
    add_count(parser, "--save-every", 100, "steps between two checkpoints")
    what = "resume from the last checkpoint; start at the first step if there is none"
    parser.add_argument("--resume", action="store_true", help=what)
