"""Shows what a training step does, compiled for fake ranks: it needs no GPU and no torchrun.

TARGET is a factory, ``file.py:function`` or ``package.module:function``, that returns a module and its inputs, as in
``return GPT(config), (tokens, targets)``. The module is compiled and not run. Or TARGET is a training script for
torchrun, ``file.py``. It runs as one of the fake ranks, with the arguments after ``--``, up to its first call of a
sharded model that has a backward. This call is compiled and not run:

    shardtrace inspect train.py --world-size 64 --out trace.html -- --batch-size 256

The script's own collectives do nothing. "plan" takes the model and the inputs of this call, and keeps the script's
precision and offload. Exit codes: 0; 1 if the target cannot be loaded or compiled, or if no plan fits; 2 for a usage
error. "check" compares a step of the target with eager PyTorch, for real: under torchrun on its ranks, else on one.
A script ends at its first call. Its exit code is 1 if something differs by more than rounding.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import passes  # noqa: F401  first, because it makes Thunder importable
from passes.compat.failures import notes_of
from passes.pipeline import AFTER_LOWERING, BEFORE_AUTODIFF
from shardtrace.checking import Check, check
from shardtrace.inspector import Call, Inspection, NothingCompiledError, first_call, inspect, run_script
from shardtrace.model.state import state_of, states_in
from shardtrace.model.whole import whole_copy
from shardtrace.planner import plan

import thunder
import torch
from torch import nn


class TargetError(Exception):
    """A target that cannot be used; the message is for the person at the terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``shardtrace``. Returns its exit code; a usage error raises SystemExit with code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:cut])
    if options.command == "passes":
        print(_passes())
        return 0
    if options.command == "check":
        options.world_size = 1  # of a script, up to its call
    elif options.world_size is None:
        options.world_size = math.prod(options.mesh_shape) if options.mesh_shape else 8
    if options.command != "check":
        print(f"compiling {options.target} for {options.world_size} ranks ...", file=sys.stderr)
    try:
        if options.command == "check":
            done = _check(options, arguments[cut + 1 :])
            if os.environ.get("RANK", "0") == "0":
                print(done)
            return 0 if done.ok else 1
        if options.command == "plan":
            _plan(options, arguments[cut + 1 :])
            return 0
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
        print(
            f"shardtrace: {type(error).__name__}: {error} (--traceback shows where){notes_of(error)}", file=sys.stderr
        )
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
        for option in ("--gather-dtype", "--reduce-wire"):
            command.add_argument(option, metavar="W", help="for a factory: as in shardtrace.fsdp")
        command.add_argument(
            "--error-feedback", action="store_true", default=None, help="for a factory: as in shardtrace.fsdp"
        )
        command.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        if name == "inspect":
            command.add_argument("--out", type=Path, default=Path("trace.html"), help="file of the page (trace.html)")
            command.add_argument("--chrome-trace", type=Path, metavar="FILE", help="also write a trace for Perfetto")
    _add_plan(commands)
    _add_check(commands)
    commands.add_parser("passes", help="lists the passes, in order")
    return parser


def _passes() -> str:
    """A line for each pass: when it runs, its name, whether it can be disabled, what it does."""
    stages = (("before autodiff", BEFORE_AUTODIFF), ("after lowering", AFTER_LOWERING))
    rows = [(stage, e.name, "" if e.needed else "optional", e.does) for stage, entries in stages for e in entries]
    return "\n".join(f"{stage:<16} {name:<23} {optional:<9} {does}" for stage, name, optional, does in rows)


def _add_check(commands: Any) -> None:
    about = "compares a training step, sharded and compiled, with the same step in eager PyTorch"
    command = commands.add_parser("check", help=about, description=f"{about}.", formatter_class=_Format)
    command.add_argument("target", metavar="TARGET", help="file.py:function, package.module:function, or file.py")
    for option in ("--sharding-strategy", "--bucketing-strategy", "--mp-policy"):
        command.add_argument(option, metavar="V", help="as in shardtrace.fsdp")
    command.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def _add_plan(commands: Any) -> None:
    about = "chooses the options of shardtrace.fsdp for a cluster and prints what they are predicted to cost"
    command = commands.add_parser("plan", help=about, description=f"{about}.", formatter_class=_Format)
    command.add_argument("target", metavar="TARGET", help="file.py:function, package.module:function, or file.py")
    command.add_argument("--world-size", type=int, metavar="N", help="number of ranks (8)")
    shape = "replicas x shards, as in 8x8, for hybrid strategies (one replica for each machine)"
    command.add_argument("--mesh", dest="mesh_shape", type=_mesh_shape, metavar="RxS", help=shape)
    command.add_argument("--memory", metavar="M", help="of a rank, as in 80GB or 72GiB (that of the device)")
    command.add_argument("--device", default="h100-sxm", metavar="D", help="as in a100-80, l40s, cpu (h100-sxm)")
    command.add_argument("--link", metavar="L", help="between machines, as in 100gbit (what is usual for the device)")
    command.add_argument("--node-link", metavar="L", help="inside a machine, as in nvlink4 (what is usual)")
    command.add_argument("--node-ranks", type=int, metavar="N", help="ranks of a machine (what is usual)")
    command.add_argument("--optimizer", default="AdamW", metavar="O", help="of torch.optim (AdamW)")
    command.add_argument("--accumulation", type=int, default=1, metavar="N", help="backwards for each step (1)")
    command.add_argument("--mp-policy", metavar="P", help="bf16, fp16 or fp32, as in shardtrace.fsdp")
    command.add_argument("--sharding-strategy", metavar="S", help="to keep instead of choosing one")
    rounds = "rounding that may be chosen if it is faster: gather-dtype=int8,fp8 or reduce-wire=int8,int4; repeatable"
    command.add_argument("--allow", type=_option_and_values, action="append", default=[], metavar="O=V", help=rounds)
    command.add_argument("--out", type=Path, metavar="FILE", help="write the plan, for fsdp(model, plan=FILE)")
    command.add_argument("--page", type=Path, metavar="FILE", help="write a page with memory against time (HTML)")
    command.add_argument("--traceback", action="store_true", help="show the traceback of an error")


class _Format(argparse.RawDescriptionHelpFormatter):
    """Help that keeps its paragraphs."""


def _number_or_name(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _option_and_values(text: str) -> tuple[str, list[str]]:
    option, _, values = text.partition("=")
    if not option or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is not an option and its values, as in gather-dtype=int8,fp8")
    return option.replace("-", "_"), values.split(",")


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
    names = [
        *("device", "mesh_shape", "sharding_strategy", "bucketing_strategy", "prefetch"),
        *("gather_dtype", "reduce_wire", "error_feedback"),
    ]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return inspect(*_model_and_inputs(options.target, made), world_size=options.world_size, rank=options.rank, **given)


def _check(options: argparse.Namespace, arguments: Sequence[str]) -> Check:
    place, colon, function = options.target.rpartition(":")
    names = ("sharding_strategy", "bucketing_strategy", "mp_policy")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    torch.manual_seed(0)  # ranks make the same model and inputs
    if colon:
        return check(*_model_and_inputs(options.target, _factory(place, function)()), **given)
    _check_file(Path(options.target))
    call = first_call(Path(options.target), arguments, world_size=1)
    return check(whole_copy(call.model, values=True), _inputs(call), **given)


def _plan(options: argparse.Namespace, script_arguments: Sequence[str]) -> None:
    model, inputs, fixed = _to_be_planned(options, script_arguments)
    pins = ("mp_policy", "sharding_strategy")
    found = plan(
        model,
        inputs,
        world_size=options.world_size,
        **{name: getattr(options, name) for name in ("mesh_shape", "memory", "device", "link", "node_link")},
        **{name: getattr(options, name) for name in ("node_ranks", "optimizer", "accumulation")},
        fixed=fixed | {name: getattr(options, name) for name in pins if getattr(options, name) is not None},
        allowed=dict(options.allow),
    )
    print(found)
    if options.out is not None:
        found.to_json(options.out)
        print(f"wrote {options.out}")
    if options.page is not None:
        print(f"wrote {found.to_html(options.page)}")


def _to_be_planned(options: argparse.Namespace, arguments: Sequence[str]) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model, its inputs, and the options of ``fsdp`` that a plan is to keep: those of a script that change results,
    or where parameters are."""
    place, colon, function = options.target.rpartition(":")
    if colon:
        return *_model_and_inputs(options.target, _factory(place, function)()), {}
    _check_file(Path(options.target))
    call = first_call(Path(options.target), arguments, world_size=options.world_size)
    state = state_of(call.model)
    if state is None:
        (inner, *_) = states_in(call.model)
        raise TargetError(
            f"{options.target} shards {inner.model_name} inside the {type(call.model).__name__} that it jits: let it "
            f"shard the whole model, or name a function, as in {options.target}:function"
        )
    kept = {"mp_policy": state.options.precision, "offload_policy": state.options.offload}
    return whole_copy(call.model), _inputs(call), {name: value for name, value in kept.items() if value is not None}


def _inputs(call: Call) -> Any:
    """The arguments of a call: all by name if some are, because example inputs are one or the other."""
    if not call.arguments or not call.keywords:
        return dict(call.keywords) or call.arguments
    names = signature(call.model.forward).bind_partial(*call.arguments)
    return dict(names.arguments) | dict(call.keywords)


def _model_and_inputs(target: str, made: Any) -> tuple[Any, Any]:
    if not (isinstance(made, tuple) and len(made) == 2):
        raise TargetError(
            f"{target} must return a module and its inputs, as in `return model, (x, y)`, not {type(made).__name__}"
        )
    model, inputs = made
    return model, inputs


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
