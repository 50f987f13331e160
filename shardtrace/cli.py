"""Shows what a training step does, compiled for fake ranks: it needs no GPU and no torchrun.

TARGET is a factory, ``file.py:function`` or ``package.module:function``, that returns a module and its inputs, as in
``return GPT(config), (tokens, targets)``. The module is compiled and not run. Or TARGET is a training script for
torchrun, ``file.py``. It runs as one of the fake ranks, with the arguments after ``--``, up to its first call of a
sharded model that has a backward. This call is compiled and not run:

    shardtrace inspect train.py --world-size 64 --out trace.html -- --batch-size 256

The script's own collectives do nothing. Exit codes: 0; 1 if the target cannot be loaded or compiled; 2 for a usage
error.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import passes  # noqa: F401  first, because it makes Thunder importable
from shardtrace.inspector import Inspection, NothingCompiledError, inspect, run_script

import thunder


class TargetError(Exception):
    """A target that cannot be used; the message is for the person at the terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``shardtrace``. Returns its exit code; a usage error raises SystemExit with code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:cut])
    if options.world_size is None:
        options.world_size = math.prod(options.mesh_shape) if options.mesh_shape else 8
    print(f"compiling {options.target} for rank {options.rank} of {options.world_size} ...", file=sys.stderr)
    try:
        shown = load(options, arguments[cut + 1 :])
        if options.command == "explain":
            print(shown)
        else:
            print(f"wrote {shown.to_html(options.out)}")
            if options.chrome_trace:
                print(f"wrote {shown.to_chrome_trace(options.chrome_trace)}")
    except (TargetError, NothingCompiledError) as error:
        print(f"shardtrace: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if options.traceback:
            raise
        print(f"shardtrace: {type(error).__name__}: {error} (--traceback shows where)", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardtrace", description=__doc__, formatter_class=_Format)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in (
        ("inspect", "writes the inspector's page, a single HTML file"),
        ("explain", "prints the summary"),
    ):
        command = commands.add_parser(name, help=about, description=f"{about}.\n\n{__doc__}", formatter_class=_Format)
        command.add_argument("target", metavar="TARGET", help="file.py:function, package.module:function, or file.py")
        command.add_argument("--world-size", type=int, metavar="N", help="number of fake ranks (8)")
        command.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to show (0)")
        command.add_argument("--sharding-strategy", metavar="S", help="for a factory: as in shardtrace.fsdp (zero3)")
        command.add_argument(
            "--bucketing-strategy",
            metavar="B",
            type=_number_or_name,
            help="for a factory: as in shardtrace.fsdp (auto)",
        )
        shape = "for a factory with a hybrid strategy: replicas x shards, as in 8x8"
        command.add_argument("--mesh", dest="mesh_shape", type=_mesh_shape, metavar="RxS", help=shape)
        device = "for a factory: the device to compile for, as in cuda, which need not be there"
        command.add_argument("--device", metavar="D", help=device)
        command.add_argument("--prefetch", type=int, metavar="K", help="for a factory: as in shardtrace.fsdp")
        command.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        if name == "inspect":
            command.add_argument("--out", type=Path, default=Path("trace.html"), help="file of the page (trace.html)")
            command.add_argument("--chrome-trace", type=Path, metavar="FILE", help="also write a trace for Perfetto")
    return parser


class _Format(argparse.RawDescriptionHelpFormatter):
    """Help that keeps its paragraphs."""


def _number_or_name(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _mesh_shape(text: str) -> tuple[int, int]:
    try:
        replicas, shards = map(int, text.split("x"))
        return replicas, shards
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not replicas x shards, as in 8x8") from None


def load(options: argparse.Namespace, script_arguments: Sequence[str]) -> Inspection:
    """Compiles the target and inspects it. Raises TargetError if it is no target, and the target's own exceptions."""
    place, colon, function = options.target.rpartition(":")
    if not colon:
        _check_file(Path(options.target))
        return run_script(Path(options.target), script_arguments, world_size=options.world_size, rank=options.rank)
    made = _factory(place, function)()
    if thunder.compile_data(made) is not None:
        return inspect(made)
    if not (isinstance(made, tuple) and len(made) == 2):
        raise TargetError(
            f"{options.target} must return a module and its inputs, as in `return model, (x, y)`, "
            f"not {type(made).__name__}"
        )
    names = ("device", "mesh_shape", "sharding_strategy", "bucketing_strategy", "prefetch")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return inspect(*made, world_size=options.world_size, rank=options.rank, **given)


def _factory(place: str, function: str) -> Callable[[], Any]:
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
    return found


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
