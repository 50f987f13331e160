"""Shows what a training step does, compiled for fake ranks: it needs no GPU and no torchrun.

TARGET is a factory, ``file.py:function`` or ``package.module:function``, that returns a module and its inputs, as in
``return GPT(config), (tokens, targets)``. The module is compiled and not run. Or TARGET is a training script for
torchrun, ``file.py``. It runs as one of the fake ranks, with the arguments after ``--``, up to its first call of a
sharded model that has a backward. This call is compiled and not run:

    shardtrace inspect train.py --world-size 64 --out trace.html -- --batch-size 256

The script's own collectives do nothing. "plan" takes the model and the inputs of this call, and keeps the script's
precision and offload. Exit codes: 0; 1 if the target cannot be loaded or compiled, or if no plan fits; 2 for a usage
error; 130 after Ctrl-C. "check" compares a step of the target with eager PyTorch, for real: under torchrun on its
ranks, else on one. A script ends at its first call. Its exit code is 1 if something differs by more than rounding;
that of "prove" is 1 if the step is not proven.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import passes  # noqa: F401  first, because it makes Thunder importable
from passes.compat.jit import interrupt_of, notes_of
from passes.pipeline import AFTER_LOWERING, BEFORE_AUTODIFF
from passes.plan.cost import hardware
from shardtrace import calibrate, doctor
from shardtrace.checking import Check, check
from shardtrace.costs import rates_of
from shardtrace.inspector import Call, Inspection, NothingCompiledError, first_call, inspect, run_script
from shardtrace.inspector.script import TargetError, make, model_and_inputs, script_of
from shardtrace.model.choose import whole_copy
from shardtrace.model.state import state_of, states_in
from shardtrace.options.policies import POLICIES, grouped, needs
from shardtrace.planner import plan

import thunder
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

INSPECTED = (
    *("sharding_strategy", "bucketing_strategy", "mp_policy", "activation_checkpointing", "prefetch", "gather_dtype"),
    *("reduce_wire", "error_feedback", "plan", "offload_policy"),
)
CLUSTER = ("device", "link", "node_link", "node_ranks")  # the rates that predictions rest on
DEVICE = "h100-sxm"
INTERRUPTED = 130  # the exit code after Ctrl-C, as in a shell
FLAGS = {  # options of fsdp and fields of its policies, by the commands that have a flag for them
    "inspect": INSPECTED,
    "explain": INSPECTED,
    "prove": INSPECTED,
    "check": ("sharding_strategy", "bucketing_strategy", "mp_policy"),
    "plan": ("sharding_strategy", "mp_policy"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``shardtrace``. Returns its exit code; a usage error raises SystemExit with code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser()
    options = parser.parse_args(arguments[:cut])
    if options.command == "passes":
        print(_passes())
        return 0
    if options.command == "doctor":
        return doctor.main()
    if options.command == "calibrate":
        return calibrate.run(options.device)
    if options.command in ("inspect", "explain", "prove") and ":" not in options.target and (given := _flags(options)):
        parser.error(
            f"{options.target} is a script, which passes its own options to fsdp: {', '.join(given)} would change "
            f"nothing. Pass arguments of the script after --, or name a function, as in {options.target}:function"
        )
    for name in ("out", "chrome_trace", "page"):  # before minutes of work
        path = getattr(options, name, None)
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            parser.error(f"{_flag(name)}: {path} cannot be written: name a file in a folder that exists")
    if options.command == "check":
        options.world_size = 1  # of a script, up to its call
    elif options.world_size is None:
        options.world_size = math.prod(options.mesh_shape) if options.mesh_shape else 8
    if options.command != "check":
        print(f"compiling {options.target} for {options.world_size} ranks ...", file=sys.stderr)
    try:
        return _run(options, arguments[cut + 1 :])
    except (TargetError, NothingCompiledError) as error:
        print(f"shardtrace: {error}", file=sys.stderr)
        return 1
    except (Exception, KeyboardInterrupt) as error:
        if options.traceback:
            raise
        if interrupt_of(error) is not None:
            print(f"shardtrace: {options.command} was interrupted", file=sys.stderr)
            return INTERRUPTED
        print(
            f"shardtrace: {type(error).__name__}: {error} (--traceback shows where){notes_of(error)}", file=sys.stderr
        )
        return 1


def _run(options: argparse.Namespace, script_arguments: Sequence[str]) -> int:
    if options.command == "check":
        done = _check(options, script_arguments)
        if os.environ.get("RANK", "0") == "0":
            print(done)
        return 0 if done.ok else 1
    if options.command == "plan":
        _plan(options, script_arguments)
        return 0
    shown = load(options, script_arguments)
    if options.command == "prove":
        print(shown.proof if shown.proof is not None else "the step calls no sharded model")
        return 0 if shown.proof is not None and shown.proof.verdict != "unproven" else 1
    if options.command == "explain":
        print(shown)
    else:
        print(f"wrote {shown.to_html(options.out)}")
        if options.chrome_trace:
            print(f"wrote {shown.to_chrome_trace(options.chrome_trace)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardtrace", description=__doc__, formatter_class=_Format)
    parser.add_argument("--version", action="version", version=f"shardtrace {doctor.VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in (
        ("inspect", "writes the inspector's page, a single HTML file"),
        ("explain", "prints the summary"),
        ("prove", "proves that the compiled step is the unsharded program"),
    ):
        command = _command(commands, name, about, "for a factory: as in shardtrace.fsdp", more=f"\n\n{__doc__}")
        command.add_argument("--world-size", type=int, metavar="N", help="number of fake ranks (8)")
        command.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to show (0)")
        shape = "for a factory with a hybrid strategy: replicas x shards, as in 8x8"
        command.add_argument("--mesh", dest="mesh_shape", type=_mesh_shape, metavar="RxS", help=shape)
        _add_cluster(command, "for a factory: ", "that of the model, with rates of shardtrace")
        if name == "inspect":
            command.add_argument("--out", type=Path, default=Path("trace.html"), help="file of the page (trace.html)")
            command.add_argument("--chrome-trace", type=Path, metavar="FILE", help="also write a trace for Perfetto")
    _add_plan(commands)
    about = "compares a training step, sharded and compiled, with the same step in eager PyTorch"
    _command(commands, "check", about, "as in shardtrace.fsdp")
    about = "measures this machine, and under torchrun the link between its ranks, for predictions and schedules"
    command = commands.add_parser("calibrate", help=about, description=calibrate.__doc__, formatter_class=_Format)
    command.add_argument("--device", metavar="D", help=calibrate.DEVICE)
    commands.add_parser("passes", help="lists the passes, in order")
    commands.add_parser("doctor", help="says what works in this environment, and what to install")
    return parser


def _passes() -> str:
    """A line for each pass: when it runs, its name, whether it can be disabled, what it does."""
    stages = (("before autodiff", BEFORE_AUTODIFF), ("after lowering", AFTER_LOWERING))
    rows = [
        (stage, e.name, "" if e.needed else "optional", e.does.replace("``", ""))
        for stage, entries in stages
        for e in entries
    ]
    return "\n".join(f"{stage:<16} {name:<23} {optional:<9} {does}" for stage, name, optional, does in rows)


def _command(commands: Any, name: str, about: str, options: str, *, more: str = "") -> argparse.ArgumentParser:
    """Adds a command with what all have: a target, options of ``fsdp``, and a traceback."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=f"{about}.{more}", formatter_class=_Format
    )
    command.add_argument("target", metavar="TARGET", help="file.py:function, package.module:function, or file.py")
    command.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    _add_options(command, name, options)
    return command


def _add_options(command: argparse.ArgumentParser, name: str, about: str) -> None:
    """Adds the flags of options of ``fsdp``: a switch for a field that is True or False, else a flag with a value."""
    kinds = {f.name: str(f.type) for policy in POLICIES.values() for f in fields(policy)}
    for option in FLAGS[name]:
        flag, kind = _flag(option), kinds.get(option, "")
        if kind == "bool" or option == "offload_policy":
            command.add_argument(flag, dest=option, action="store_true", default=None, help=about)
        else:
            number = _number_or_name if option == "bucketing_strategy" else int if kind.startswith("int") else str
            command.add_argument(flag, type=number, metavar="V", help=about)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The options of ``fsdp`` that have a value, with fields in place of their policies."""
    values = {name: getattr(options, name) for name in FLAGS[options.command]}
    if values.get("offload_policy"):
        values["offload_policy"] = CPUOffloadPolicy()
    return {name: value for name, value in values.items() if value is not None}


def _flags(options: argparse.Namespace) -> list[str]:
    """The flags of what is given beside the target."""
    names = (name for name in (*FLAGS[options.command], *CLUSTER) if getattr(options, name) is not None)
    return [_flag(name) for name in names]


def _flag(option: str) -> str:
    return "--offload" if option == "offload_policy" else f"--{option.replace('_', '-')}"


def _rates(options: argparse.Namespace) -> dict[str, Any]:
    """The device and the cost model that the flags of a cluster name; none without them."""
    if all(getattr(options, name) is None for name in CLUSTER):
        return {}
    found = hardware(options.device or DEVICE)
    links = {"inside": options.node_link, "between": options.link, "node_ranks": options.node_ranks}
    cost = rates_of(found, links, options.world_size).cost
    return {"device": "cpu" if found.name == "cpu" else "cuda", "cost_model": cost}


def _add_plan(commands: Any) -> None:
    about = "chooses the options of shardtrace.fsdp for a cluster and prints what they are predicted to cost"
    command = _command(commands, "plan", about, "to be kept, as in shardtrace.fsdp")
    command.add_argument("--world-size", type=int, metavar="N", help="number of ranks (8)")
    shape = "replicas x shards, as in 8x8, for hybrid strategies (one replica for each machine)"
    command.add_argument("--mesh", dest="mesh_shape", type=_mesh_shape, metavar="RxS", help=shape)
    command.add_argument("--memory", metavar="M", help="of a rank, as in 80GB or 72GiB (that of the device)")
    _add_cluster(command, "", DEVICE)
    command.add_argument("--optimizer", default="AdamW", metavar="O", help="of torch.optim (AdamW)")
    command.add_argument("--accumulation", type=int, default=1, metavar="N", help="backwards for each step (1)")
    split = 'ranks over which each sequence is split, or "auto" (sequences are not split)'
    command.add_argument("--context", type=_count_or_name, metavar="N", help=split)
    rounds = "rounding that may be chosen if it is faster: gather-dtype=int8,fp8 or reduce-wire=int8,int4; repeatable"
    command.add_argument("--allow", type=_option_and_values, action="append", default=[], metavar="O=V", help=rounds)
    command.add_argument("--out", type=Path, metavar="FILE", help="write the plan, for fsdp(model, plan=FILE)")
    command.add_argument("--page", type=Path, metavar="FILE", help="write a page with memory against time (HTML)")


def _add_cluster(command: argparse.ArgumentParser, about: str, default: str) -> None:
    command.add_argument("--device", metavar="D", help=f"{about}as in a100-80, l40s, cpu ({default})")
    usual = "what is usual for the device"
    command.add_argument("--link", metavar="L", help=f"{about}between machines, as in 100gbit or 12.5GB/s ({usual})")
    command.add_argument("--node-link", metavar="L", help=f"{about}inside a machine, as in nvlink4 ({usual})")
    command.add_argument("--node-ranks", type=int, metavar="N", help=f"{about}ranks of a machine ({usual})")


class _Format(argparse.RawDescriptionHelpFormatter):
    """Help that keeps its paragraphs."""


def _number_or_name(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _count_or_name(text: str) -> int | str:
    return int(text) if text.isdigit() else text


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
    if (script := script_of(options.target)) is not None:
        return run_script(script, script_arguments, world_size=options.world_size, rank=options.rank)
    made = make(options.target)
    if thunder.compile_data(made) is not None:
        if flags := _flags(options):
            raise TargetError(f"{options.target} returns a jitted model, which {', '.join(flags)} cannot change")
        return inspect(made)
    model, inputs = model_and_inputs(options.target, made)
    size, shape, given = options.world_size, options.mesh_shape, grouped(_given(options) | _rates(options))
    return inspect(model, inputs, world_size=size, mesh_shape=shape, rank=options.rank, **given)


def _check(options: argparse.Namespace, arguments: Sequence[str]) -> Check:
    given = grouped(_given(options))
    torch.manual_seed(0)  # ranks make the same model and inputs
    if (script := script_of(options.target)) is None:
        return check(*model_and_inputs(options.target, make(options.target)), **given)
    call = first_call(script, arguments, world_size=1)
    return check(whole_copy(call.model, values=True), _inputs(call), **given)


def _plan(options: argparse.Namespace, script_arguments: Sequence[str]) -> None:
    needs("scipy", extra="plan", what="shardtrace plan")
    model, inputs, fixed = _to_be_planned(options, script_arguments)
    found = plan(
        model,
        inputs,
        world_size=options.world_size,
        device=options.device or DEVICE,
        **{name: getattr(options, name) for name in ("mesh_shape", "memory", "link", "node_link", "node_ranks")},
        **{name: getattr(options, name) for name in ("optimizer", "accumulation", "context")},
        fixed=fixed | _given(options),
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
    if (script := script_of(options.target)) is None:
        return *model_and_inputs(options.target, make(options.target)), {}
    call = first_call(script, arguments, world_size=options.world_size)
    state = state_of(call.model)
    if state is None:
        (inner, *_) = states_in(call.model)
        raise TargetError(
            f"{options.target} shards {inner.model_name} inside the {type(call.model).__name__} that it jits: let it "
            f"shard the whole model, or name a function, as in {options.target}:function"
        )
    given = state.options
    kept = {"mp_policy": given.precision, "offload_policy": given.offload, "context_parallel": given.context}
    return whole_copy(call.model), _inputs(call), {name: value for name, value in kept.items() if value is not None}


def _inputs(call: Call) -> Any:
    """The arguments of a call: all by name if some are, because example inputs are one or the other."""
    if not call.arguments or not call.keywords:
        return dict(call.keywords) or call.arguments
    names = signature(call.model.forward).bind_partial(*call.arguments)
    return dict(names.arguments) | dict(call.keywords)
