"""Reads bound symbols as lines. The function of a block is read once for all lines that call it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from passes.analysis.calls import Block, Part, part_of
from passes.analysis.seconds import compute_seconds
from passes.outline import traced_block
from passes.plan import CostModel
from shardtrace.inspector.lines import Function, Line, read_line
from shardtrace.inspector.modules import assign_modules

from thunder.core.symbol import BoundSymbol


class Reader:
    """Reads the traces of one compilation, which all stay alive meanwhile."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._lines: dict[Hashable, Line] = {}
        self._functions: dict[Part | Block, Function] = {}

    def lines(self, bsyms: Sequence[BoundSymbol]) -> tuple[Line, ...]:
        return tuple(map(self._line, bsyms))

    def _line(self, bsym: BoundSymbol) -> Line:
        # traces share bound symbols and their parts; copies differ in tags and headers, which a line does not show
        values = (*map(id, bsym.flat_args), *map(id, bsym.flat_outs))
        key = id(bsym.sym), bsym.source_filename, bsym.source_positions, values
        if key not in self._lines:
            called = part_of(bsym) or traced_block(bsym)
            line = read_line(bsym)
            self._lines[key] = line if called is None else line._replace(function=self._function(called))
        return self._lines[key]

    def _function(self, called: Part | Block) -> Function:
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
