"""The directories and files of checkpoints: how they are found, written and checked by all ranks together.

A checkpoint is a directory ``step-00000100`` with data files and ``index.json``. It is complete if it has its index,
which is renamed into place last, once everything else is on disk. Nothing is ever overwritten.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DELAY = 2.0  # seconds before a bar appears


class ProgressBar:
    """Shows bytes done and bytes per second on a terminal after DELAY, with tqdm if it is installed.

    Args:
        what: its label.
        show: False on ranks other than the first, and where there may be another bar.
    """

    def __init__(self, what: str, *, show: bool) -> None:
        self.what, self.show = what, show

    @contextmanager
    def of(self, total: int) -> Iterator[Callable[[int], object]]:
        """Yield a function to be called with each number of bytes done."""
        try:
            from tqdm import tqdm
        except ImportError:
            yield lambda done: None
            return
        off = not (self.show and sys.stderr.isatty())
        with tqdm(total=total, desc=self.what, unit="B", unit_scale=True, delay=DELAY, disable=off) as bar:
            yield bar.update


INDEX = "index.json"
_STEP = re.compile(r"step-(\d{8,})")
_BLOCK = 1 << 22  # bytes per read


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded. Raised on every rank; a load has changed nothing by then."""


def step_directory(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> dict[int, Path]:
    """The checkpoint directories in ``root``, complete or not, by step, in ascending order."""
    found = {int(m[1]): p for p in root.iterdir() if (m := _STEP.fullmatch(p.name))} if root.is_dir() else {}
    return dict(sorted(found.items()))


def is_complete(directory: Path) -> bool:
    return (directory / INDEX).is_file()


def latest_checkpoint(path: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step in the directory ``path``; None if there is none."""
    return next((p for p in reversed(steps_in(Path(path)).values()) if is_complete(p)), None)


def find_checkpoint(path: Path) -> Path:
    """``path`` itself if it is a checkpoint, else the latest in it. Raises CheckpointError if there is none."""
    if is_complete(path):
        return path
    if _STEP.fullmatch(path.name) and path.is_dir():
        raise CheckpointError(f"{path} has no {INDEX}: its save was interrupted; load the checkpoint before it")
    found = latest_checkpoint(path)
    if found is None:
        raise CheckpointError(f"there is no complete checkpoint in {path}")
    return found


def new_directory(root: Path, step: int) -> Path:
    """Make an empty directory for a step. The remains of an interrupted save of this step are removed.

    Raises CheckpointError if there is a complete checkpoint of this step or a later one, which would stay the latest.
    """
    last = latest_checkpoint(root)
    if last is not None and int(last.name.removeprefix("step-")) >= step:
        raise CheckpointError(
            f"cannot save step {step}: there is {last} already; save to another directory, or remove the later ones"
        )
    directory = step_directory(root, step)
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    sync_directory(root)
    sync_directory(root.parent)
    return directory


def remove_old(root: Path, keep_last: int) -> None:
    """Remove all but the latest ``keep_last`` complete checkpoints, and interrupted saves before the latest."""
    complete = [step for step, path in steps_in(root).items() if is_complete(path)]
    for step, path in steps_in(root).items():
        if step < complete[-1] and step not in complete[-keep_last:]:
            (path / INDEX).unlink(missing_ok=True)  # no longer complete
            sync_directory(path)
            shutil.rmtree(path)


def write_new(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file completely or not at all, even if the machine stops. ``write`` gets the path to write to."""
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    sync_file(temporary)
    if path.exists():
        raise CheckpointError(f"{path} exists already")
    temporary.rename(path)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_directory = sync_file  # its names and renames reach the disk


def checksum(path: Path) -> int:
    """CRC-32 of a file: it detects every flipped bit and every burst of errors of up to 32 bits.

    It guards against accidents. It is no signature: whoever can change a file can change its index too.
    """
    value = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
