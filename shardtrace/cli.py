"""Shows what a training step does, compiled for fake ranks: it needs no GPU and no torchrun.

TARGET is a factory, ``file.py:function`` or ``package.module:function``, that returns a module and its inputs, as in
``return GPT(config), (tokens, targets)``. The module is compiled and not run. Or TARGET is a training script for
torchrun, ``file.py``. It runs as one of the fake ranks, with the arguments after ``--``, up to its first call of a
sharded model that has a backward. This call is compiled and not run:

    shardtrace inspect train.py --world-size 64 --out trace.html -- --batch-size 256

The script's own collectives do nothing. "plan" takes the model and the inputs of this call, and keeps the script's
precision and offload. "check" compares a step of the target with eager PyTorch, for real: on one rank, on as many CPU
ranks as --world-size says, or on the ranks of a torchrun around it. A script ends at its first call.

Exit codes: 0; 1 if the target cannot be loaded or compiled, if no plan fits, if "check" finds something that differs by
more than rounding, or if "prove" does not prove the step; 2 for a usage error; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import passes  # noqa: F401  first, because it makes Thunder importable
from passes.compat.jit import interrupt_of, notes_of
from passes.pipeline import AFTER_LOWERING, BEFORE_AUTODIFF
from passes.plan.cost import hardware
from shardtrace import doctor
from shardtrace.api import fsdp
from shardtrace.inspector import Call, Inspection, NothingCompiledError, first_call, inspect, run_script
from shardtrace.inspector.checking import Check, check, one_rank
from shardtrace.inspector.inspection import TargetError, make, model_and_inputs, script_of
from shardtrace.model.distribute import whole_copy
from shardtrace.model.state import state_of, states_in
from shardtrace.options.policies import POLICIES, ExpertParallel, grouped, needs
from shardtrace.planner import calibrate
from shardtrace.planner.calibrate import rates_of
from shardtrace.planner.contract import MemoryBudgetError
from shardtrace.planner.estimate import DEGREES
from shardtrace.planner.planning import plan
from shardtrace.planner.training_plan import NoPlanFitsError, PlanError, TrainingPlan

import thunder
import torch
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

INSPECTED = (
    *("sharding_strategy", "bucketing_strategy", "mp_policy", "activation_checkpointing", "prefetch", "gather_dtype"),
    *("reduce_wire", "error_feedback", "plan", "offload_policy", "memory"),
)
CLUSTER = ("device", "link", "node_link", "node_ranks")  # the rates that predictions rest on
DEVICE = "h100-sxm"
INTERRUPTED = 130  # the exit code after Ctrl-C, as in a shell
FLAGS = {  # options of fsdp and fields of its policies, by the commands that have a flag for them
    "inspect": INSPECTED,
    "explain": INSPECTED,
    "prove": INSPECTED,
    "check": ("sharding_strategy", "bucketing_strategy", "mp_policy", "memory"),
    "plan": ("sharding_strategy", "mp_policy"),
}
OF_SCRIPTS = (  # options of a script's fsdp with which its step is checked, beside the mesh
    *("sharding_strategy", "bucketing_strategy", "mp_policy", "activation_checkpointing", "offload_policy", "memory"),
    *("context_parallel", "tensor_parallel", "comm_policy", "compile_policy"),
)
ABOUT = {  # what each flag of an option takes
    "sharding_strategy": ("S", "zero3 (default), zero2, ddp, owner, zero3_secondary, hybrid_zero3 or hybrid_zero2"),
    "bucketing_strategy": ("B", "auto (default), none, layer, block, model, or a size in MB"),
    "mp_policy": ("P", "bf16 or fp16: the precision of compute and communication"),
    "activation_checkpointing": (
        "A",
        "full, cheap, host, full+host: what blocks recompute or keep in host memory",
    ),
    "prefetch": ("N", "buckets that are gathered ahead of use"),
    "gather_dtype": ("D", "int8 or fp8: rounds parameters on the wire"),
    "reduce_wire": ("W", "int8 or int4: rounds gradients on the wire"),
    "error_feedback": ("", "with --reduce-wire: add what rounding left out to the next step's gradients"),
    "plan": ("FILE", "a plan that `shardtrace plan --out FILE` wrote; it also sets --world-size"),
    "offload_policy": ("", "keep shards, gradients and optimizer state in host memory"),
    "memory": ("M", "of a rank, as in 80GB or 72GiB: blocks recompute what they must for a step to fit"),
}
PYTHON = (*ABOUT, *CLUSTER, *DEGREES, "accumulation", "mesh_shape", "world_size")  # names in errors


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``shardtrace``. Returns its exit code; a usage error raises SystemExit with code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments[:cut])
    if unknown:
        _refuse_unknown(options.parser, options.command, unknown)
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
        if options.world_size > 1 and "RANK" not in os.environ:
            return _on_ranks(options.world_size, arguments)
        if options.world_size > 1 and options.world_size != (ranks := int(os.environ["WORLD_SIZE"])):
            parser.error(f"--world-size {options.world_size} under a torchrun of {ranks} ranks: leave it out")
        options.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if options.command != "check":
        try:
            options.world_size = options.world_size or _usual_ranks(options)
        except PlanError as error:
            parser.error(f"--plan: {error}")
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
        print(f"shardtrace: {_said(error, options)} (--traceback shows where){notes_of(error)}", file=sys.stderr)
        return 1


def _said(error: BaseException, options: argparse.Namespace) -> str:
    """An error for the person at the terminal. What a script has passed to fsdp was no flag."""
    ours = isinstance(error, PlanError | NoPlanFitsError | MemoryBudgetError)
    of_script = options.command == "check" and script_of(options.target) is not None
    said = str(error) if ours else f"{type(error).__name__}: {error}"
    if of_script and options.world_size == 1:
        return f"{said}; the script ran as the only rank: --world-size 2 checks it on two"
    return _in_flags(said) if (ours or isinstance(error, ValueError | TypeError)) and not of_script else said


def _usual_ranks(options: argparse.Namespace) -> int:
    """The number of ranks if no flag says it: the plan's, that of the mesh, or 8."""
    if getattr(options, "plan", None) is not None:
        return TrainingPlan.from_json(options.plan).world_size
    return math.prod(options.mesh_shape) if options.mesh_shape else 8


def _on_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Runs the command on so many CPU processes of this machine. Prints what the first rank prints, and the errors of
    the first rank that has one. Returns its exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": ""}
    shared = {"OMP_NUM_THREADS": "1"} | dict(os.environ) | group
    command, processes = [sys.executable, "-m", "shardtrace", *arguments], []
    with ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        for rank in range(ranks):
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            out = None if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=errors[rank]))
        try:
            codes = [process.wait() for process in processes]
        except KeyboardInterrupt:  # the ranks have it, too
            for process in processes:
                process.wait()
            return INTERRUPTED
        failed = next((rank for rank, code in enumerate(codes) if code), 0)
        for rank in {0, failed}:
            errors[rank].seek(0)
            sys.stderr.write(errors[rank].read().decode(errors="replace"))
    return codes[failed]


def _refuse_unknown(parser: argparse.ArgumentParser, command: str, unknown: Sequence[str]) -> None:
    """Ends with a usage error that names the flag that was meant."""
    flags = re.findall(r"--[a-z-]+", parser.format_usage())
    wrong = next((word for word in unknown if word.startswith("-")), unknown[0])
    near = get_close_matches(wrong.partition("=")[0], flags, 1)
    meant = f"did you mean {near[0]}?" if near else f"`shardtrace {command} --help` lists the flags"
    parser.error(f"{command} has no {wrong.partition('=')[0]}: {meant}")


def _in_flags(message: str) -> str:
    """A message about options of Python, in flags: ``sharding_strategy='zero3'`` as ``--sharding-strategy zero3``."""
    message = re.sub(r'fixed=\{"(\w+)": "(\w+)"\}', r'\1="\2"', message.replace(", or pass plan.options yourself", ""))
    message = re.sub(r"\bcost_model\b", "the rates (--device, --link, --node-link, --node-ranks)", message)
    message = re.sub(r"\boffload_policy=\{[^}]*\}", "--offload", message)

    def flag(match: re.Match[str]) -> str:
        value = match[2].strip("\"'") if match[2] else ""
        return f"{_flag(match[1])} {value}".rstrip()

    message = re.sub(rf"\b({'|'.join(PYTHON)})=(\"[^\"]*\"|'[^']*'|[\w.]+)", flag, message)
    return re.sub(rf"(?<![-\w])({'|'.join(n for n in PYTHON if '_' in n)})()\b(?!=)", flag, message)


def _run(options: argparse.Namespace, script_arguments: Sequence[str]) -> int:
    if options.command == "check":
        done = _check(options, script_arguments)
        if os.environ.get("RANK", "0") == "0":
            print(str(done) if script_of(options.target) is not None else _in_flags(str(done)))
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
        command = _command(commands, name, about, "for a factory: ", more=f"\n\n{__doc__}")
        command.add_argument("--world-size", type=_count, metavar="N", help="number of fake ranks (8)")
        command.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to show (0)")
        shape = "for a factory with a hybrid strategy: replicas x shards, as in 8x8"
        command.add_argument("--mesh", dest="mesh_shape", type=_mesh_shape, metavar="RxS", help=shape)
        _add_cluster(command, "for a factory: ", "the model's device, with the default rates of its kind")
        if name == "inspect":
            command.add_argument("--out", type=Path, default=Path("trace.html"), help="file of the page (trace.html)")
            command.add_argument("--chrome-trace", type=Path, metavar="FILE", help="also write a trace for Perfetto")
    _add_plan(commands)
    about = "compares a training step, sharded and compiled, with the same step in eager PyTorch"
    command = _command(commands, "check", about, "")
    ranks = "number of CPU processes to start (1); leave it out under torchrun"
    command.add_argument("--world-size", type=_count, default=1, metavar="N", help=ranks)
    about = "measures this machine, and under torchrun the link between its ranks, for predictions and schedules"
    command = commands.add_parser("calibrate", help=about, description=calibrate.__doc__, formatter_class=_Format)
    command.add_argument("--device", metavar="D", help=calibrate.DEVICE)
    commands.add_parser("passes", help="lists the passes, in order")
    commands.add_parser("doctor", help="says what works in this environment, and what to install")
    for command in commands.choices.values():
        command.set_defaults(parser=command)
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
        flag, kind, (metavar, what) = _flag(option), kinds.get(option, ""), ABOUT[option]
        if kind == "bool" or option == "offload_policy":
            command.add_argument(flag, dest=option, action="store_true", default=None, help=f"{about}{what}")
        else:
            number = _number_or_name if option == "bucketing_strategy" else int if kind.startswith("int") else str
            command.add_argument(flag, type=number, metavar=metavar, help=f"{about}{what}")


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
    command = _command(commands, "plan", about, "what the plan may not change: ")
    command.add_argument("--world-size", type=_count, metavar="N", help="number of ranks (8)")
    shape = "replicas x shards, as in 8x8, for hybrid strategies (one replica for each machine)"
    command.add_argument("--mesh", dest="mesh_shape", type=_mesh_shape, metavar="RxS", help=shape)
    command.add_argument("--memory", metavar="M", help="of a rank, as in 80GB or 72GiB (that of the device)")
    _add_cluster(command, "", DEVICE)
    command.add_argument("--optimizer", default="AdamW", metavar="O", help="of torch.optim (AdamW)")
    command.add_argument("--accumulation", type=int, default=1, metavar="N", help="backwards for each step (1)")
    split = 'ranks over which each sequence is split, or "auto" (sequences are not split)'
    command.add_argument("--context", type=_count_or_name, metavar="N", help=split)
    own = 'ranks that share experts, each with a batch of its own, or "auto" (experts are not shared)'
    command.add_argument("--experts", type=_count_or_name, metavar="N", help=own)
    share = 'ranks that compute with parts of the parameters, or "auto" (each computes with whole ones)'
    command.add_argument("--tensor", type=_count_or_name, metavar="N", help=share)
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


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, 1 or more")
    return int(text)


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
    ranks = options.world_size
    call = first_call(script, arguments, world_size=ranks, copies=ranks > 1)
    with one_rank():
        model, kept = _sharded_by_script(script, call, ranks)
        done = check(model, _inputs(call), **kept | given)
    told = ", ".join(f"{name}={value!r}" for name, value in kept.items() if name not in given)
    return replace(
        done, remarks=(*done.remarks, f"with the options of {script.name}: {told}") if told else done.remarks
    )


def _sharded_by_script(script: Path, call: Call, ranks: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model that a script calls, unsharded, and the options that the script passes to ``fsdp``."""
    found = call.sharded
    if found is None and ranks == 1:
        return whole_copy(call.model, values=True), {}
    if found is None:
        raise TargetError(
            f"{script} shards a part of the {type(call.model).__name__} that it jits: check it on one rank, or name a "
            f"function that returns the model and its inputs, as in {script}:function"
        )
    whole = found.whole if found.whole is not None else whole_copy(call.model, values=True)
    if any(t.is_meta for t in (*whole.parameters(), *whole.buffers())):
        raise TargetError(
            f"{script} calls fsdp with parameters on the meta device, whose values only a check on one rank has: leave "
            f"--world-size out, or name a function that returns the model and its inputs, as in {script}:function"
        )
    defaults = signature(fsdp).parameters
    kept = {name: found.options[name] for name in OF_SCRIPTS if found.options[name] != defaults[name].default}
    _name_experts(kept)
    if isinstance(mesh := found.options["mesh"], DeviceMesh):
        kept["mesh"] = init_device_mesh(mesh.device_type, tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)
    return whole, kept


def _plan(options: argparse.Namespace, script_arguments: Sequence[str]) -> None:
    needs("scipy", extra="plan", what="shardtrace plan")
    model, inputs, fixed = _to_be_planned(options, script_arguments)
    found = plan(
        model,
        inputs,
        world_size=options.world_size,
        device=options.device or DEVICE,
        **{name: getattr(options, name) for name in ("mesh_shape", "memory", "link", "node_link", "node_ranks")},
        **{name: getattr(options, name) for name in ("optimizer", "accumulation", *DEGREES)},
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
    kept = {
        "mp_policy": given.precision,
        "offload_policy": given.offload,
        "context_parallel": given.context,
        "tensor_parallel": given.tensor,
    }
    _name_experts(kept)
    return whole_copy(call.model), _inputs(call), {name: value for name, value in kept.items() if value is not None}


def _name_experts(options: dict[str, Any]) -> None:
    """Gives what ``fsdp`` has made of an ``expert_parallel`` its name again."""
    if isinstance(context := options.get("context_parallel"), ExpertParallel):
        del options["context_parallel"]
        options["expert_parallel"] = context.mesh_dim


def _inputs(call: Call) -> Any:
    """The arguments of a call: all by name if some are, because example inputs are one or the other."""
    if not call.arguments or not call.keywords:
        return dict(call.keywords) or call.arguments
    names = signature(call.model.forward).bind_partial(*call.arguments)
    return dict(names.arguments) | dict(call.keywords)
