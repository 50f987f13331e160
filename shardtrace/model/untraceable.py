"""Models that Thunder cannot trace: a note on its exception says which module and which line of the model it traced.

The exception stays the same object. Exceptions that a model raises itself get no note.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from typing import Any

from passes.compat import Failure, add_note, exception_of, noticing_failures

from torch import nn

LIBRARIES = ("passes", "shardtrace", "thunder", "torch")  # a line of the model is not in these


def with_place(trace: Callable[[], Any], root: nn.Module, name: str) -> Any:
    """Returns ``trace()``, which calls the running interpreter. ``root``: the module that it traces, of this
    ``name``."""
    failures: dict[int, Failure] = {}
    try:
        with noticing_failures(failures):
            result = trace()
    except Exception as error:
        _note(error, failures, root, name)
        raise
    if (returned := exception_of(result)) is not None:
        _note(returned, failures, root, name)
    return result


def _note(error: BaseException, failures: Mapping[int, Failure], root: nn.Module, name: str) -> None:
    """Adds the place of ``error``, or of its first cause, which Thunder may have wrapped."""
    failure = failures.get(id(error))
    cause = error.__cause__
    while cause is not None and not (failure is not None and failure.by_source):
        failure, cause = failures.get(id(cause), failure), cause.__cause__
    if failure is not None and not failure.by_source:
        add_note(error, _place(failure, root, name))


def _place(failure: Failure, root: nn.Module, name: str) -> str:
    frames = failure.frames[::-1]
    names = {id(module): path for path, module in root.named_modules()}
    module = next((f.receiver for f in frames if id(f.receiver) in names), root)
    ours = [f for f in frames if f.module.partition(".")[0] not in LIBRARIES] or frames
    line = next((f for f in ours if linecache.getline(f.file, f.line)), ours[0])
    what = f"{names[id(module)]} ({type(module).__name__}) of {name}" if module is not root else name
    source = linecache.getline(line.file, line.line).strip()
    return (
        f"Thunder was tracing {what}, at {line.file}:{line.line} in {line.function}:\n    {source}\n"
        "If the model runs without Thunder, docs/guide.md#models-that-thunder-cannot-trace says what to do."
    )
