"""A stand-in for a number that notices whether it is only added to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

READS = (
    *("lt", "le", "eq", "ne", "gt", "ge", "bool", "hash", "int", "float", "complex", "index", "round", "trunc"),
    *("floor", "ceil", "str", "repr", "format", "neg", "pos", "abs", "invert", "mul", "rmul", "truediv", "rtruediv"),
    *("floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod", "pow", "rpow", "and", "rand", "or", "ror", "xor"),
    *("rxor", "lshift", "rlshift", "rshift", "rrshift", "rsub"),
)


class StandIn:
    """A number, and what was added to it since the forward began. Any other use marks the first one, the ``origin``, as
    read, and gives what the number itself gives."""

    def __init__(self, value: float, added: tuple[float, ...] = (), origin: StandIn | None = None) -> None:
        self.value, self.added, self.origin = value, added, self if origin is None else origin
        self.read = False

    def __add__(self, other: Any) -> Any:
        if type(other) in (int, float):
            return StandIn(self.value + other, (*self.added, other), self.origin)
        return self.number() + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other if type(other) in (int, float) else self.number() - other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.number(), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance asks
        return type(self.value)

    def number(self) -> Any:
        self.origin.read = True
        return self.value


def _reading(name: str) -> Callable[..., Any]:
    def read(self: StandIn, *args: Any) -> Any:
        found = getattr(type(self.value), name, None)
        value = self.number()
        return (
            NotImplemented if found is None else found(value, *(a.number() if type(a) is StandIn else a for a in args))
        )

    return read


for _name in READS:
    setattr(StandIn, f"__{_name}__", _reading(f"__{_name}__"))
