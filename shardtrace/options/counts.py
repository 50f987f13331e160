"""Whole numbers, as users pass them."""

from __future__ import annotations

from typing import Any


def parse_count(name: str, value: Any, expected: str, *, least: int = 0) -> int:
    """``value`` if it is a whole number of at least ``least``. Raises ValueError that says what is ``expected``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be {expected}, not {value!r}")
    return value
