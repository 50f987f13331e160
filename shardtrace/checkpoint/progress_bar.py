"""A progress bar for long saves and loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY = 2.0  # seconds before a bar appears


class ProgressBar:
    """Shows bytes done and bytes per second on a terminal after DELAY, with tqdm if it is installed.

    Args:
        what: its label.
        show: False on ranks other than the first, and where there may be another bar.
    """

    def __init__(self, what: str, *, show: bool) -> None:
        self.what, self.show = what, show

    @contextmanager
    def of(self, total: int) -> Iterator[Callable[[int], object]]:
        """Yield a function to be called with each number of bytes done."""
        try:
            from tqdm import tqdm
        except ImportError:
            yield lambda done: None
            return
        off = not (self.show and sys.stderr.isatty())
        with tqdm(total=total, desc=self.what, unit="B", unit_scale=True, delay=DELAY, disable=off) as bar:
            yield bar.update
