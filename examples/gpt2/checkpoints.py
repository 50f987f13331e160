"""Checkpoints of a training: saved while it goes on, and loaded where it goes on after a stop."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple

import shardtrace  # before thunder: makes it importable on the newest torch

from common import add_count, new_folder


class Checkpoints(NamedTuple):
    """Where checkpoints are, how many steps apart, and whether to go on from the last one."""

    directory: Path
    every: int
    resumes: bool

    @classmethod
    def of(cls, args: Namespace) -> Checkpoints | None:
        """What the command line says; ``--resume`` without a directory stops the script."""
        if args.checkpoint_dir is None:
            if args.resume:
                sys.exit("--resume needs --checkpoint-dir")
            return None
        return cls(args.checkpoint_dir, args.save_every, args.resume)

    def resume(self, state: dict[str, Any]) -> dict[str, Any]:
        """Loads the last checkpoint, if there is one and it is wanted; returns what the loop is to know of it."""
        if not self.resumes or shardtrace.latest_checkpoint(self.directory) is None:
            return {}
        loaded = shardtrace.load_checkpoint(self.directory, **state)
        return {"start": loaded.step, "losses": loaded.extra["losses"]}

    def saving(self, checkpointer: shardtrace.AsyncCheckpointer, state: dict[str, Any]) -> dict[str, Any]:
        """How the loop saves: the last two are kept."""

        def save(step: int, losses: list[float]) -> None:
            checkpointer.save(self.directory, **state, step=step, extra={"losses": losses}, keep_last=2)

        return {"save": save, "save_every": self.every}


def add_checkpoints(parser: ArgumentParser) -> None:
    what = "save checkpoints in this folder, and keep the last two"
    parser.add_argument("--checkpoint-dir", type=new_folder, metavar="FOLDER", help=what)
    add_count(parser, "--save-every", 100, "steps between two checkpoints")
    what = "go on from the last checkpoint; begin at the first step if there is none"
    parser.add_argument("--resume", action="store_true", help=what)
