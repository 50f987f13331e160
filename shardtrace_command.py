"""The command ``shardtrace``, outside of the package: ``shardtrace doctor`` also runs where that cannot be imported."""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    if sys.argv[1:] == ["doctor"]:
        package = find_spec("shardtrace")  # does not import it
        assert package is not None
        assert package.origin is not None
        runpy.run_path(str(Path(package.origin).with_name("doctor.py")), run_name="__main__")
    from shardtrace.cli import main as command

    return command()
