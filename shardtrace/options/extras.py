"""Libraries that only some functions need."""

from __future__ import annotations

from importlib.util import find_spec


def needs(library: str, *, extra: str, what: str) -> None:
    """Raises ImportError that says what to install if ``library`` is missing. Call it before any work."""
    if find_spec(library) is None:
        raise ImportError(
            f"{what} needs {library}, which is not installed: pip install {library}, or shardtrace's extra, "
            f"pip install '.[{extra}]' in its folder",
            name=library,
        )
