"""Value numbering: equal numbers are equal values.

A number stands for an expression: an operation, its constants, and the numbers of its operands. The same expression
always has the same number, whatever the trace and the names in it.

Source: Alpern, Wegman and Zadeck, Detecting equality of variables in programs (1988).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple, cast

from thunder.core.codeutils import ContextObject
from thunder.core.proxies import NumberProxy, Proxy
from thunder.core.symbol import BoundSymbol

HOLE = ("a value",)  # the place of an operand among the constants of an operation
Expression = tuple[Hashable, Hashable, tuple[int, ...]]  # operation, constants, operands


class Numbers:
    """The table of expressions. ``lines`` has the first line that computed each, ``composites`` the results of
    composite lines that were taken apart. ``synonyms`` are expressions that have the value of another one.
    """

    def __init__(self) -> None:
        self.expressions: list[Expression] = []
        self.lines: dict[int, BoundSymbol] = {}
        self.composites: dict[int, tuple[int, ...]] = {}
        self.synonyms: dict[int, int] = {}
        self._table: dict[Expression, int] = {}

    def of(self, operation: Hashable, constants: Hashable = (), operands: tuple[int, ...] = ()) -> int:
        """The number of an expression."""
        expression = operation, constants, operands
        number = self._table.setdefault(expression, len(self.expressions))
        if number == len(self.expressions):
            self.expressions.append(expression)
        return self.synonyms.get(number, number)

    def difference(self, a: int, b: int) -> tuple[int, int]:
        """The smallest expressions in which two values differ: followed from the results to the first operation, or to
        the first operand, that is not the same."""
        while True:
            one, other = self.expressions[a], self.expressions[b]
            if one[:2] != other[:2] or len(one[2]) != len(other[2]):
                return a, b
            differing = [pair for pair in zip(one[2], other[2], strict=True) if pair[0] != pair[1]]
            if not differing:
                return a, b
            a, b = differing[0]

    def text(self, number: int, depth: int = 2) -> str:
        """An expression as a reader sees it, ``depth`` operations deep, with the constants that tell it from others."""
        operation, constants, operands = self.expressions[number]
        if operation == "result":
            return f"{self.text(operands[0], depth)}[{constants}]"
        draw = ""
        if operation == "draw":
            count, operation, constants = cast(tuple[int, Hashable, Hashable], constants)
            draw = f" (draw {count})"
        named = operation if isinstance(operation, str) else getattr(operation, "name", None)
        name = named if isinstance(named, str) else str(operation)
        inside = [self.text(n, depth - 1) for n in operands] if depth else ["..."] * bool(operands)
        if isinstance(constants, Arguments) and depth:
            inside = constants.texts(iter(inside))
        elif not operands:
            inside = [str(getattr(c, "name", c)) for c in (constants if isinstance(constants, tuple) else (constants,))]
        return f"{name.removeprefix('kernels.')}({', '.join(inside)}){draw}" if inside else name

    def place(self, number: int) -> str:
        """The line of the model's source that computes a value; empty if none is known."""
        line = self.lines.get(number)
        if line is None or line.source_filename is None:
            return ""
        where = line.source_positions
        return f"{line.source_filename}:{where.lineno}" if where is not None else line.source_filename


class Arguments(NamedTuple):
    """The arguments of a line without the names of its operands."""

    args: tuple[Hashable, ...]
    kwargs: tuple[tuple[str, Hashable], ...]

    def texts(self, operands: Iterator[str]) -> list[str]:
        """The arguments as a reader sees them, with the operands' texts in their places."""

        def text(value: Any) -> str:
            if value == HOLE:
                return next(operands)
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
                return str(value[1]) if value[0] is float else repr(value[1])
            if isinstance(value, tuple):
                return f"({', '.join(map(text, value))}{',' * (len(value) == 1)})"
            return str(getattr(value, "name", value))

        return [*map(text, self.args), *(f"{name}={text(value)}" for name, value in self.kwargs)]


def arguments_of(args: Any, kwargs: Any, operands: list[str]) -> Arguments:
    """The arguments of a line as a part of its expression. The names of values are added to ``operands``."""
    return Arguments(
        tuple([constant(a, operands) for a in args]),
        tuple([(name, constant(value, operands)) for name, value in sorted(kwargs.items())]),
    )


def constant(value: Any, operands: list[str]) -> Hashable:
    """An argument of a line as a part of its expression. The names of values are added to ``operands``."""
    if isinstance(value, NumberProxy) and value.value is not None:
        value = value.value
    if isinstance(value, Proxy):
        operands.append(value.name)
        return HOLE
    if isinstance(value, float):
        return float, repr(value)  # 0. and -0., nan
    if isinstance(value, (bool, int, str, complex)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return tuple(constant(v, operands) for v in value)
    if isinstance(value, dict):
        return tuple((k, constant(v, operands)) for k, v in sorted(value.items(), key=str))
    if isinstance(value, slice):
        return "slice", constant((value.start, value.stop, value.step), operands)
    if isinstance(value, ContextObject):
        return value
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return value
