"""Lines of traces as plain data: their modules, their templates, and what a pass has changed.

A line belongs to the module of the model whose forward asked for it. The recorder tags traced lines with it, and
autodiff and lowering hand the tags on (passes.analysis.recognise). A line that calls a block belongs to the block. The
lines of its function carry the names of the block's first call.

Lines without a tag belong to the module of their newest argument: autodiff's sums of gradients. Otherwise they are code
around the model, or of a model that is not sharded, and belong to the model itself.

Lines that differ only in names, as in repeated blocks, share a template. ``t3 = torch.add(t1, t2)`` is the template
``("", " = torch.add(", ", ", ")")`` with the names t3, t1 and t2.
"""

from __future__ import annotations

import linecache
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

from passes.analysis.calls import Block, BlockFunction, block_function, called_module
from passes.analysis.printing import importable, type_text
from passes.analysis.recognise import is_collective, is_offload, is_unpack, module_of, names
from passes.analysis.seconds import compute_seconds
from passes.blocks import traced_block
from passes.plan import Bucket, CostModel

from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

# ---- differences ----


T = TypeVar("T", bound=Hashable)


class Mark(IntEnum):
    KEPT = 0
    ADDED = 1
    MOVED = 2
    REMOVED = 3


class Row(NamedTuple):
    """``place`` is an index of the new list; for a removed line, of the old list."""

    mark: Mark
    place: int


def diff(old: Sequence[T], new: Sequence[T]) -> list[Row]:
    """The lines of ``new`` in order, and between them the removed lines of ``old`` at their places. O(n log n)."""
    kept = _longest_common(old, new)
    shared = Counter(old) & Counter(new)
    gone = _surplus(old, shared, set(kept.values()))
    added = _surplus(new, shared, set(kept))
    rows: list[Row] = []
    at = 0
    for i in range(len(new)):
        if i in kept:
            rows += [Row(Mark.REMOVED, k) for k in range(at, kept[i]) if k in gone]
            at = kept[i] + 1
            rows.append(Row(Mark.KEPT, i))
        else:
            rows.append(Row(Mark.ADDED if i in added else Mark.MOVED, i))
    return rows + [Row(Mark.REMOVED, k) for k in range(at, len(old)) if k in gone]


def _longest_common(old: Sequence[T], new: Sequence[T]) -> dict[int, int]:
    """Index in ``new`` -> index in ``old``: the longest common subsequence of the lines that are unique in both."""
    in_old, in_new = Counter(old), Counter(new)
    place = {line: k for k, line in enumerate(old)}
    pairs = [(i, place[line]) for i, line in enumerate(new) if in_new[line] == in_old[line] == 1]
    ends: list[int] = []  # the smallest last index of an increasing sequence of each length
    last: list[int] = []  # the pair at this index
    before: dict[int, int] = {}
    for p, (_, k) in enumerate(pairs):
        length = bisect_left(ends, k)
        if length:
            before[p] = last[length - 1]
        ends[length : length + 1] = [k]
        last[length : length + 1] = [p]
    found: dict[int, int] = {}
    p = last[-1] if last else -1
    while p >= 0:
        found[pairs[p][0]] = pairs[p][1]
        p = before.get(p, -1)
    return _extended(found, old, new)


def _extended(found: dict[int, int], old: Sequence[T], new: Sequence[T]) -> dict[int, int]:
    """Extends each match to the equal lines that follow it, such as lines that a list has twice."""
    used = set(found.values())
    for i, k in [(-1, -1), *sorted(found.items())]:
        while (i := i + 1) < len(new) and (k := k + 1) < len(old) and new[i] == old[k]:
            if i in found or k in used:
                break
            found[i] = k
            used.add(k)
    return found


def _surplus(lines: Sequence[T], shared: Counter[T], kept: set[int]) -> set[int]:
    """Indices of lines that the other list lacks, or has fewer times; kept lines are excluded."""
    seen = Counter(lines[k] for k in kept)
    found = set()
    for k, line in enumerate(lines):
        if k not in kept:
            seen[line] += 1
            if seen[line] > shared[line]:
                found.add(k)
    return found


# ---- modules ----


Name = str  # a module's qualified name; "" is the model itself


def assign_modules(lines: Iterable[BoundSymbol], known: Mapping[str, Name], within: Name = "") -> list[Name | None]:
    """The module of each line; None for collectives, ``del`` and the like.

    ``known`` has the modules of values that other traces computed, by name. ``within`` is the module whose lines they
    are.
    """
    modules = dict(known)
    found: list[Name | None] = []
    for bsym in lines:
        module = _tagged(bsym)
        if module is None and _computes(bsym):
            newest = (a.name for a in reversed(bsym.flat_proxy_args))
            module = next((modules[name] for name in newest if name in modules), within)
        found.append(module)
        if module is not None:
            modules.update((o.name, module) for o in bsym.flat_proxy_outs)
    return found


def _tagged(bsym: BoundSymbol) -> Name | None:
    """The module that the tags of a line tell; for a fusion, the one around those of all its parts."""
    if not bsym.sym.is_fusion:
        called = called_module(bsym)
        return called if called is not None else module_of(bsym)
    found = [module for part in bsym.subsymbols if (module := module_of(part)) is not None]
    return _around(found) if found else None


def _computes(bsym: BoundSymbol) -> bool:
    return bool(bsym.flat_proxy_outs) and not (is_collective(bsym) or is_offload(bsym) or is_unpack(bsym))


def ancestors(name: Name) -> Iterator[Name]:
    """The names of a module and of the modules around it: innermost first, the model ("") last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _around(names: Sequence[Name]) -> Name:
    """The innermost module that is, or contains, each of them."""
    first, *others = ([*ancestors(name)] for name in names)
    return next(a for a in first if all(a in other for other in others))


# ---- folding ----


class Branch(NamedTuple):
    """A module, or a run of equal siblings ("h.0 … h.11"), with the branches inside the first of them."""

    names: tuple[Name, ...]
    children: tuple[Branch, ...]


def fold(names: Iterable[Name], form: Callable[[Name], object]) -> Branch:
    """The tree of modules. Consecutive siblings whose ``form`` and children are equal become one branch."""
    inside: dict[Name, list[Name]] = {}
    for name in dict.fromkeys(a for n in names for a in reversed(list(ancestors(n)))):
        if name:
            inside.setdefault(name.rpartition(".")[0], []).append(name)

    def branch(name: Name) -> tuple[Branch, object]:
        folded: list[tuple[Branch, object]] = []
        for child in inside.get(name, ()):
            one, shape = branch(child)
            if folded and folded[-1][1] == shape and _is_next(folded[-1][0].names[-1], child):
                folded[-1] = (folded[-1][0]._replace(names=(*folded[-1][0].names, child)), shape)
            else:
                folded.append((one, shape))
        shape = (form(name), tuple((len(b.names), b.names[0].rpartition(".")[2], s) for b, s in folded))
        return Branch((name,), tuple(b for b, _ in folded)), shape

    return branch("")[0]


def _is_next(name: Name, following: Name) -> bool:
    a, b = name.rpartition(".")[2], following.rpartition(".")[2]
    return a.isdigit() and b.isdigit() and int(b) == int(a) + 1


# ---- lines ----


class Table(Generic[T]):
    """Distinct values in order of first appearance. Other tables refer to a value by its place."""

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._places: dict[T, int] = {value: i for i, value in enumerate(values)}

    def place(self, value: T) -> int:
        """The index of ``value``, which is added if it is new."""
        return self._places.setdefault(value, len(self._places))

    def __iter__(self) -> Any:
        return iter(self._places)

    def __contains__(self, value: T) -> bool:
        return value in self._places


class Type(NamedTuple):
    """The type of a value as a trace prints it, and its size in bytes."""

    text: str
    bytes: int


class Template(NamedTuple):
    """The code between the names of a line. The first ``outputs`` names are the line's results."""

    pieces: tuple[str, ...]
    outputs: int
    types: tuple[Type | None, ...]  # of the results; None if a result is not a tensor

    def fill(self, values: Iterable[str]) -> str:
        """The code with ``values`` as its names."""
        first, *rest = self.pieces
        return first + "".join(value + piece for value, piece in zip(values, rest, strict=True))


class Source(NamedTuple):
    """The origin of a line in the user's program. ``text`` is the source line.

    ``file`` is relative to the folder that Python imports it from ("torch/nn/modules/linear.py"), so that pages and
    files do not reveal the machine's paths.
    """

    file: str
    line: int
    text: str


@dataclass(frozen=True, eq=False)
class Function:
    """The function of a block, which any number of lines call. It is equal only to itself.

    Its code is that of one call, of ``module``. ``modules`` are those of its lines in this call, and ``seconds`` their
    predicted times.
    """

    name: str
    module: str
    lines: tuple[Line, ...]
    modules: tuple[str | None, ...]
    seconds: tuple[float, ...]

    def module_in(self, called: str, module: str) -> str:
        """The name of one of ``modules`` in a call of the module ``called``."""
        if module == self.module:
            return called
        inside = module.removeprefix(f"{self.module}." if self.module else "")
        if inside == module and self.module:  # a module beside the block
            return module
        return f"{called}.{inside}" if called else inside


class Line(NamedTuple):
    """A line of a trace. ``fused`` are the lines of a fusion, ``function`` is the block's that it calls."""

    template: Template
    names: tuple[str, ...]
    source: Source | None = None
    fused: tuple[Line, ...] = ()
    function: Function | None = None

    @property
    def parts(self) -> tuple[Line, ...]:
        """The lines that it consists of."""
        return self.function.lines if self.function is not None else self.fused

    @property
    def code(self) -> str:
        return self.template.fill(self.names)

    @property
    def results(self) -> tuple[str, ...]:
        return self.names[: self.template.outputs]


NAME = re.compile(r"[A-Za-z_]\w*(?!=|\w)")  # but not an argument's keyword
ANNOTATION = re.compile(r'(?<=\w): "[^"\n]*"(?= = )')  # of a prologue's values
TYPE_COMMENT = re.compile(r'(?:  # \w+|(?<=^)(# \w+)): "[^"\n]*" *$', re.MULTILINE)


def _read_line(bsym: BoundSymbol) -> Line:
    """A bound symbol as Thunder prints it, joined to one line, without its header and without type comments."""
    code = _code(bsym)
    known = names(bsym.args) | names(bsym.kwargs) | {o.name for o in bsym.flat_proxy_outs}
    known |= {a.name for a in bsym.args if isinstance(a, Bucket)}
    found = [match for match in NAME.finditer(code) if match[0] in known]
    cuts = [0, *(at for match in found for at in match.span()), len(code)]
    pieces = tuple(code[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True))
    bucket = next((a for a in bsym.args if isinstance(a, Bucket)), None)
    types = tuple(_type(o, bucket) for o in bsym.flat_proxy_outs)
    template = Template(pieces, _count_results(bsym, code, found), types)
    fused = tuple(map(_read_line, bsym.subsymbols)) if bsym.sym.is_fusion else ()
    return Line(template, tuple(match[0] for match in found), _source(bsym), fused)


def _code(bsym: BoundSymbol) -> str:
    header = bsym.header.splitlines() if isinstance(bsym.header, str) else bsym.header
    first, *more = "\n".join(bsym.python(indent=0, print_depth=1)[len(header) :]).splitlines() or [""]
    parts = [first, *(line for line in more if not line.lstrip().startswith("#"))]  # more type comments
    return TYPE_COMMENT.sub(r"\1", ANNOTATION.sub("", " ".join(part.removesuffix("\\").strip() for part in parts)))


def _count_results(bsym: BoundSymbol, code: str, found: list[re.Match[str]]) -> int:
    results = {o.name for o in bsym.flat_proxy_outs}
    if is_unpack(bsym) and " = " not in code:  # "# x", an argument of the trace
        return len(found)
    left = code.find(" = ")
    return sum(match[0] in results and match.start() < left for match in found)


def _type(proxy: Any, bucket: Bucket | None) -> Type | None:
    if not isinstance(proxy, TensorProxy | FutureTensorProxy):
        return None
    numel = math.prod(d if isinstance(d, int) else int(d.value) for d in proxy.shape)
    size = numel * proxy.dtype.bytes
    if isinstance(proxy, FutureTensorProxy) and bucket is not None and bucket.wire is not None:
        size = numel * bucket.bytes // max(1, bucket.full_numel)
    return Type(type_text(proxy, bucket), size)


def _source(bsym: BoundSymbol) -> Source | None:
    line = bsym.source_positions.lineno if bsym.source_positions is not None else None
    if not bsym.source_filename or not line:
        return None
    return Source(importable(bsym.source_filename), line, linecache.getline(bsym.source_filename, line).strip())


class Reader:
    """Reads the traces of one compilation, which all stay alive meanwhile. The function of a block is read once for all
    lines that call it."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._lines: dict[Hashable, Line] = {}
        self._functions: dict[BlockFunction | Block, Function] = {}

    def lines(self, bsyms: Sequence[BoundSymbol]) -> tuple[Line, ...]:
        return tuple(map(self._line, bsyms))

    def _line(self, bsym: BoundSymbol) -> Line:
        # traces share bound symbols and their parts; copies differ in tags and headers, which a line does not show
        values = (*map(id, bsym.flat_args), *map(id, bsym.flat_outs))
        key = id(bsym.sym), bsym.source_filename, bsym.source_positions, values
        if key not in self._lines:
            called = block_function(bsym) or traced_block(bsym)
            line = _read_line(bsym)
            self._lines[key] = line if called is None else line._replace(function=self._function(called))
        return self._lines[key]

    def _function(self, called: BlockFunction | Block) -> Function:
        if called not in self._functions:
            lines = called.trace.bound_symbols
            self._functions[called] = Function(
                name=called.name,
                module=called.module,
                lines=self.lines(lines),
                modules=tuple(assign_modules(lines, {}, called.module)),
                seconds=tuple(compute_seconds(self._cost, b) for b in lines),
            )
        return self._functions[called]
