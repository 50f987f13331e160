"""Builds the API reference of the public names from their docstrings, as HTML that needs no network.

python docs/build.py build/api
"""

import importlib.util
import sys
import warnings
from pathlib import Path

import passes
import shardtrace

import pdoc

TEMPLATES = Path(__file__).parent / "templates"
# the exports of both packages, and the helpers for testing passes
MODULES = [shardtrace.__name__, passes.__name__, "!.*[.]", "shardtrace.testing"]
if importlib.util.find_spec("lightning") is not None:
    MODULES.append("shardtrace.lightning")


def build(folder: Path) -> None:
    """Writes index.html and a page for each module. An unreadable docstring or annotation is an error."""
    pdoc.render.configure(docformat="google", template_directory=TEMPLATES)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="pdoc")
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(f"wrote {sys.argv[1]}/index.html")
