"""What the command line is to look at: a factory, ``file.py:function``, or a training script, ``file.py``."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any


class TargetError(Exception):
    """A target that cannot be used; the message is for the person at the terminal."""


def script_of(target: str) -> Path | None:
    """The file of a target that is a training script. None for a factory."""
    if ":" in target:
        return None
    _check_file(Path(target))
    return Path(target)


def make(target: str) -> Any:
    """What a factory returns."""
    place, _, function = target.rpartition(":")
    if place.endswith(".py"):
        _check_file(Path(place))
        sys.path.insert(0, str(Path(place).resolve().parent))
        found = runpy.run_path(place, run_name=Path(place).stem).get(function)
    else:
        sys.path.insert(0, os.getcwd())
        try:
            found = getattr(importlib.import_module(place), function, None)
        except ModuleNotFoundError as error:
            raise TargetError(f"there is no module {error.name}: is {place} a file? Then write {place}.py") from error
    if not callable(found):
        raise TargetError(f"there is no function {function} in {place}")
    return found()


def model_and_inputs(target: str, made: Any) -> tuple[Any, Any]:
    """The module and the inputs that a factory has made."""
    if not (isinstance(made, tuple) and len(made) == 2):
        raise TargetError(
            f"{target} must return a module and its inputs, as in `return model, (x, y)`, not {type(made).__name__}"
        )
    model, inputs = made
    return model, inputs


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
