"""Executes the notebooks and stores their outputs. `make notebooks` runs it.

    python docs/execute_notebooks.py [NAME ...]

The ``.py`` of a pair is the source. The ``.ipynb`` is made from its cells and their outputs.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# Thunder warns that a library which it does not need is missing
WARNINGS = "ignore:transformer_engine module not found"


def read_source(path: Path) -> NotebookNode:
    """The notebook of a ``.py``, without outputs. Cells are numbered, so that builds differ only in outputs."""
    notebook = jupytext.read(path)
    notebook.metadata = METADATA
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Runs all cells from top to bottom in ``folder`` and puts their outputs into ``notebook``.

    Raises nbclient.exceptions.CellExecutionError if a cell fails, with the cell and its traceback.
    """
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=240,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    # The inspector shortens paths of source files by sys.path, and an editable install does not put the project there.
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": WARNINGS, "SHARDTRACE_PROGRESS": "inf"}
    client.execute(env={**os.environ, **own})
    notebook.metadata = METADATA
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            data.update({kind: without_machine(text) for kind, text in data.items() if isinstance(text, str)})


def without_machine(text: str) -> str:
    """Removes this machine's folders of libraries and of kernels' cells from paths of source files, which the inspector
    shows."""
    return re.sub(r"/tmp/ipykernel_\d+/(?=\d+\.py)", "cell ", text.replace(f"{sysconfig.get_path('purelib')}/", ""))


def main(names: list[str]) -> None:
    for path in [FOLDER / f"{name}.py" for name in names] or SOURCES:
        print(f"executing {path.stem}", flush=True)
        notebook = read_source(path)
        execute(notebook, FOLDER)
        nbformat.write(notebook, path.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(sys.argv[1:])
