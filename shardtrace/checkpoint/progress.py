"""A progress bar for what takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY = 2.0  # seconds before a bar appears


class Progress:
    """Bytes done and bytes per second on a terminal, by tqdm if it is installed, once it takes more than DELAY.

    Args:
        what: its label. show: false on ranks other than the first, and where another bar may be.
    """

    def __init__(self, what: str, *, show: bool) -> None:
        self.what, self.show = what, show

    @contextmanager
    def of(self, total: int) -> Iterator[Callable[[int], object]]:
        """Yields what is to be called with each number of bytes that is done."""
        try:
            from tqdm import tqdm
        except ImportError:
            yield lambda done: None
            return
        off = not (self.show and sys.stderr.isatty())
        with tqdm(total=total, desc=self.what, unit="B", unit_scale=True, delay=DELAY, disable=off) as bar:
            yield bar.update
