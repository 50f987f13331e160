"""Traces of sharded models as people read them.

Thunder prints the Python that runs. ``print(trace)`` of a trace with our lines says more, in comments:

    # b_0: ZeRO-3 over 2 ranks, 4,160 f32, 16,640 bytes: 0.{weight, bias}         at the first use of a bucket
    ft3 = all_gather((t_0_weight, t_0_bias), b_0)  # ft3: "future, 4160 f32"
    (t4, t5) = wait_all_gather(ft3, b_0)  # t4: "cpu f32[64, 64]", t5: "cpu f32[64]"

    # 0  train.py:12  y = model(x)                                                 the module, the place and its code
    t6 = linear(input, t4, t5)  # t6: "cpu f32[8, 64]"

    # mark_unused in 2 lines, minus zero if no gradient has come: t9 = t7, t10 = t8        lines that fold

It leaves out the definitions of lines that run. Blocks that the trace calls are printed below it. Nothing of this is
made before somebody prints: the program that Python compiles has Thunder's own text.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from passes.analysis.calls import Block, BlockFunction, block_function, block_of, called_module
from passes.analysis.recognise import is_deletion, module_of
from passes.comm.sequence import Part
from passes.comm.symbols import Folds
from passes.plan import Bucket
from passes.plan.plan import STRATEGY_NAMES

from thunder.core.codeutils import prettyprint
from thunder.core.proxies import AnyProxy, FutureTensorProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, default_python_printer
from thunder.core.trace import TraceCtx

WIDTH = 110  # of comments


# ---- types ----


def type_text(proxy: Any, bucket: Bucket | None = None) -> str:
    """The type of a value: device, dtype and shape of a tensor; for a future, what is in flight, of ``bucket`` if it is
    one's. A dim of a sequence of which ranks hold parts reads "8 of 16"."""
    if not isinstance(proxy, TensorProxy | FutureTensorProxy):
        return str(proxy.type_string())
    shape = tuple(d if isinstance(d, int) else int(d.value) for d in proxy.shape)
    if isinstance(proxy, FutureTensorProxy):
        travels_as = proxy.dtype.shortname() if bucket is None or bucket.wire is None else bucket.travels_as
        return f"future, {' x '.join(map(str, shape))} {travels_as}"
    sizes = list(map(str, shape))
    for part in (tag for tag in proxy.tags if isinstance(tag, Part) and tag.is_of(shape)):
        sizes[part.split.dim] += f" of {part.split.size}"
    return f"{proxy.device.device_str()} {proxy.dtype.shortname()}[{', '.join(sizes)}]"


def _with_types(bsym: BoundSymbol, *printables: Any) -> list[str]:
    """A line as Thunder prints it, with the types of all its results: behind it, or below if they are many."""
    code = default_python_printer(bsym, *printables)
    if isinstance(bsym.output, Proxy):
        code = code.removesuffix(f"  # {prettyprint(printables[0], with_type=True)}")
    bucket = next((a for a in bsym.args if isinstance(a, Bucket)), None)
    types = [f'{o.name}: "{type_text(o, bucket)}"' for o in bsym.flat_proxy_outs if not isinstance(o, AnyProxy)]
    if len(types) == 1 or (types and len(f"{code}  # {', '.join(types)}") < WIDTH):
        return [f"{code}  # {', '.join(types)}"]
    return [code, *_comment(types)]


def _comment(parts: Sequence[str]) -> list[str]:
    """A list on as few lines of comment as it needs. No part is broken."""
    lines = ["#"] if parts else []
    for i, part in enumerate(parts):
        word = f" {part}," if i + 1 < len(parts) else f" {part}"
        if lines[-1] != "#" and len(lines[-1]) + len(word) > WIDTH:
            lines.append("#")
        lines[-1] += word
    return lines


# ---- buckets ----


def describe_bucket(bucket: Bucket) -> list[str]:
    """The strategy, size, dtype or wire, and members of a bucket, as lines of a comment."""
    plan, members = bucket.plan, _without_prefix([m.parameter.name for m in bucket.members])
    strategy = STRATEGY_NAMES.get(plan.strategy, plan.strategy)
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    size = f"{bucket.full_numel:,} {bucket.travels_as}, {bucket.bytes:,} bytes"
    return _comment([f"{bucket.name}: {strategy} over {ranks}, {size}: {members[0]}", *members[1:]])


def _without_prefix(names: list[str]) -> list[str]:
    """Names with the modules that are common to all of them written once: ``h.0.{ln.weight, fc.weight}``."""
    modules = [name.split(".")[:-1] for name in names]
    common = list(takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False)))
    if len(names) == 1 or not common:
        return names
    prefix = "".join(f"{parts[0]}." for parts in common)
    first, *between, last = (name.removeprefix(prefix) for name in names)
    return [f"{prefix}{{{first}", *between, f"{last}}}"]


# ---- places ----


def importable(file: str) -> str:
    """A path relative to the innermost folder of ``sys.path`` that contains it; unchanged if none does."""
    folders = (os.path.join(folder or os.getcwd(), "") for folder in sys.path)
    return file.removeprefix(max((folder for folder in folders if file.startswith(folder)), key=len, default=""))


def _place(bsym: BoundSymbol) -> str:
    """The file with its folder, the line and its code: ``gpt2/modeling_gpt2.py:567  x = self.wte(ids)``."""
    number = bsym.source_positions.lineno if bsym.source_positions is not None else None
    if not bsym.source_filename or not number:
        return ""
    file = "/".join(importable(bsym.source_filename).split(os.sep)[-2:])
    return f"{file}:{number}  {linecache.getline(bsym.source_filename, number).strip()}"


# ---- lines ----


class _Heading:
    """Says above lines of which module and place they are, once for lines that follow each other. ``block``: the module
    inside of which they all are."""

    def __init__(self, block: str | None = None) -> None:
        self._block = block
        self._last: tuple[str | None, str] = None, ""

    def __call__(self, bsym: BoundSymbol) -> list[str]:
        called, module, place = called_module(bsym), module_of(bsym), _place(bsym)
        now = module if called is None else called
        if (now is None and not place) or (now == self._last[0] and place in ("", self._last[1])):
            return []
        self._last = now, place
        text = "  ".join(filter(None, (self._name(now), place)))
        return ["", f"# {text}" if len(text) < WIDTH else f"# {text[: WIDTH - 4]} ..."]

    def _name(self, module: str | None) -> str:
        if module is None:
            return ""
        if module == self._block:
            return "the block"
        return module.removeprefix(f"{self._block}.") or "the model"


def _shown(bsym: BoundSymbol, above: Iterable[str] = ()) -> BoundSymbol:
    """A line that prints as people read it, and cannot run."""
    header = bsym.header.splitlines() if isinstance(bsym.header, str) else bsym.header
    above = [*above, *(f"# {line}" for line in header)]
    return bsym.from_bsym(
        sym=replace(bsym.sym, python_printer=partial(_print_line, bsym.sym.python_printer, above)),
        subsymbols=_parts(bsym),
        header="",
        source_filename=None,
        source_positions=None,
    )


def line_text(bsym: BoundSymbol) -> str:
    """A line by itself, for messages: its code, and the types of its results if they fit behind it."""
    return str(_shown(bsym.from_bsym(header=""))).splitlines()[0]


def _parts(bsym: BoundSymbol) -> list[BoundSymbol]:
    """The lines that print below a line: its definition if nothing runs it yet, or what a fusion computes."""
    if bsym.sym.is_fusion:
        heading = _Heading()
        parts = [_shown(part, filter(None, heading(part))) for part in bsym.subsymbols]
        return [part.from_bsym(subsymbols=[]) for part in parts]
    return [] if bsym.sym.executor is not None else [_shown(part) for part in bsym.subsymbols]


def _print_line(printer: Any, above: Sequence[str], *line: Any) -> Iterator[str]:
    yield from above
    code = _with_types(*line) if printer is default_python_printer else printer(*line)
    yield from [code] if isinstance(code, str) else code


def _fold(lines: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """The lines, with successive ones of a symbol that folds, and the deletions of what they read, as one comment."""
    run: list[BoundSymbol] = []
    for bsym in lines:
        if run and bsym.sym.id != run[0].sym.id and not is_deletion(bsym):
            yield from _as_one(run)
            run = []
        if run or any(isinstance(tag, Folds) for tag in bsym.sym.tags or ()):
            run.append(bsym)
        else:
            yield bsym
    yield from run  # a trace does not end in them


def _as_one(run: list[BoundSymbol]) -> list[BoundSymbol]:
    first, *more = (b for b in run if not is_deletion(b))
    if not more:
        return run
    what = next(tag for tag in first.sym.tags if isinstance(tag, Folds))
    values = [f"{b.output.name} = {b.args[0].name}" for b in (first, *more)]
    text = _comment([f"{first.sym.name} in {len(values)} lines, {what}: {values[0]}", *values[1:]])
    return [first.from_bsym(sym=replace(first.sym, python_printer=lambda *_: text))]


def _text(trace: TraceCtx, block: str | None = None, **options: Any) -> str:
    heading, known = _Heading(block), set[str]()
    shown = copy(trace)
    lines = []
    for bsym in _fold(trace.bound_symbols):
        buckets = [a for a in bsym.args if isinstance(a, Bucket) and a.name not in known]
        known |= {b.name for b in buckets}
        lines.append(_shown(bsym, [*heading(bsym), *(row for b in buckets for row in describe_bucket(b))]))
    shown.scopes = [shown.bound_symbols]
    shown.bound_symbols = lines
    return "\n".join(line.rstrip() for line in shown.python(print_depth=-1, **options).splitlines())


# ---- traces ----


def readable(trace: TraceCtx) -> str | None:
    """The text of a trace, and of the blocks that it calls; None if it has no lines of a sharded model."""
    if not any(map(_is_ours, trace.bound_symbols)):
        return None
    calls: dict[Block | BlockFunction, list[str]] = {}
    for bsym in trace.bound_symbols:
        if (block := block_function(bsym) or block_of(bsym)) is not None:
            calls.setdefault(block, []).append(called_module(bsym) or "")
    texts = [_text(trace)]
    for block, modules in calls.items():
        first, last = modules[0], modules[-1]
        who = first if len(modules) == 1 else f"{first} ... {last}, {len(modules)} modules"
        texts.append(f"# The code of {who}\n{_text(block.trace, block.module, include_decorators=False)}")
    return "\n\n\n".join(texts)


def _is_ours(bsym: BoundSymbol) -> bool:
    modules = module_of(bsym), called_module(bsym)
    return modules != (None, None) or any(isinstance(a, Bucket) for a in bsym.args)
