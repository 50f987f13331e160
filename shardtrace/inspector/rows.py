"""Lists of named tuples that print as tables, and numbers formatted for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, TypeVar

from shardtrace.options.values import needs


def size(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"


def duration(seconds: float) -> str:
    """0.00153 -> '1.53 ms'."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale:  # three digits round up to it
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0 s"


def count(number: int, noun: str) -> str:
    """2, 'line' -> '2 lines'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


T = TypeVar("T")
MOST = 60  # rows that are printed
SIZES = ("bytes", "during", "total", "inputs", "unsharded", "in_flight", "activations", "saved", "gradients")
SECONDS = ("time", "start", "stop", "exposed")


class Rows(list[T]):
    """A list of named tuples of one kind: the rows of a table, as which it prints."""

    def to_pandas(self) -> Any:
        """The table as a ``pandas.DataFrame``. Raises ImportError if pandas is not installed."""
        needs("pandas", extra="notebook", what="to_pandas")
        import pandas

        return pandas.DataFrame(self)

    def __str__(self) -> str:
        return "\n".join([*columns(list(self._cells()), numbers=False), *self._rest()]) if self else "no rows"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = list(self._cells()) or [()]
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        note = "".join(f"<p>{escape(line)}</p>" for line in self._rest())
        return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{body}</table>{note}"

    def _cells(self) -> Iterator[tuple[str, ...]]:
        """The titles of the columns, then the texts of each row."""
        for k, row in enumerate(self[:MOST]):
            fields: dict[str, Any] = row._asdict()  # type: ignore[attr-defined]
            if k == 0:
                yield tuple(fields)
            yield tuple(_text(name, value) for name, value in fields.items())

    def _rest(self) -> list[str]:
        return [f"and {len(self) - MOST:,} more rows: see to_pandas()"] if len(self) > MOST else []


def _text(name: str, value: Any) -> str:
    if name in SIZES and isinstance(value, int):
        return size(value)
    if name in SECONDS:
        return duration(value)
    if isinstance(value, tuple):
        return ", ".join(value[:2]) + (f" and {len(value) - 2} more" if len(value) > 2 else "")
    text = str(value).partition("\n")[0]
    return text if len(text) <= 60 else text[:59] + "…"


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = True) -> list[str]:
    """Rows with aligned columns: the first to the left, the others to the right if they are ``numbers``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def padded(k: int, cell: str) -> str:
        return cell.rjust(widths[k]) if k and numbers else cell.ljust(widths[k])

    return ["  ".join(padded(k, cell) for k, cell in enumerate(row)).rstrip() for row in rows]
