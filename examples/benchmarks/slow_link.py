"""Two network namespaces joined by a link of a given rate: the smallest cluster. Needs Linux, root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cleanup import undisturbed
from job import CannotRun

PREFIX = "shardtrace"
BURST = "256kb"  # bytes sent at full speed: 2 ms at 1 Gbit/s, and more than the 64 kB that TCP hands over at once
QUEUE = "50ms"  # packets that would wait longer are dropped, and TCP slows down


@dataclass(frozen=True)
class End:
    """One rank's end of the link."""

    namespace: str
    interface: str
    address: str

    @property
    def enter(self) -> list[str]:
        """The prefix of a command that runs in this namespace."""
        return ["ip", "netns", "exec", self.namespace]


def obstacle() -> str | None:
    """Why a slow link cannot be made here, None if nothing speaks against it."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 (Linux only)"
    if os.geteuid() != 0:
        return "it makes network namespaces, which only root may do (in a container, with CAP_SYS_ADMIN)"
    return None


def set_rate(interface: str, gbit: float, *, enter: Sequence[str] = ()) -> None:
    """Limits the rate at which ``interface`` sends, in this process's namespace or the one that ``enter`` enters. Each
    end limits its own direction."""
    limit = ["rate", f"{round(gbit * 1000)}mbit", "burst", BURST, "latency", QUEUE]
    _do(*enter, "tc", "qdisc", "replace", "dev", interface, "root", "tbf", *limit)


@contextmanager
def two_namespaces() -> Iterator[list[End]]:
    """Makes the link, and removes it when the block is left, also by an error. Raises :class:`CannotRun`.

    Removing a namespace removes its end of the link and its rate limit.
    """
    if reason := obstacle():
        raise CannotRun(reason)
    _remove_leftovers()
    # 198.18.0.0/15 is reserved for network benchmarks (RFC 2544), and these namespaces are empty anyway
    ends = [End(f"{PREFIX}-{os.getpid()}-{i}", f"link{i}", f"198.18.0.{i + 1}") for i in range(2)]
    first, second = ends
    try:
        try:
            for end in ends:
                _do("ip", "netns", "add", end.namespace)
            veth = ["type", "veth", "peer", "name", second.interface, "netns", second.namespace]
            _do("ip", "link", "add", first.interface, "netns", first.namespace, *veth)
            for end in ends:
                _do("ip", "-n", end.namespace, "addr", "add", f"{end.address}/24", "dev", end.interface)
                _do("ip", "-n", end.namespace, "link", "set", end.interface, "up")
                _do("ip", "-n", end.namespace, "link", "set", "lo", "up")
            for end in ends:  # also checks that the kernel has tbf
                set_rate(end.interface, 1, enter=end.enter)
        except subprocess.CalledProcessError as error:
            raise CannotRun(f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}") from None
        yield ends
    finally:
        with undisturbed():
            for end in ends:
                _remove(end.namespace)


def _remove_leftovers() -> None:
    """Removes namespaces of benchmarks that were killed before they could clean up."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        name = line.split()[0] if line.strip() else ""
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == PREFIX and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _remove(name)


def _remove(namespace: str) -> None:
    for _ in range(20):  # busy for a moment while a process in it ends
        done = subprocess.run(["ip", "netns", "del", namespace], capture_output=True, text=True, check=False)
        if done.returncode == 0 or "No such file" in done.stderr:
            return
        time.sleep(0.1)
    print(f"could not remove network namespace {namespace}: {done.stderr.strip()}", file=sys.stderr)


def _do(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
