"""The notebooks run from top to bottom, and their stored outputs are what they print."""

import re
import runpy
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

tool = runpy.run_path(str(Path(__file__).parents[1] / "docs/execute_notebooks.py"))
FOLDER, SOURCES, execute, read_source = (tool[name] for name in ("FOLDER", "SOURCES", "execute", "read_source"))
CHANGES = "run `make notebooks` after a change of a notebook's .py"
ABSOLUTE = re.compile(r"/(?:home|root|tmp|Users|usr|venv|site-packages)/")
SOURCE_FILE = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+[\w.+-]+\.py\b")  # with an absolute path; not a web address
pytestmark = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)


def cells(notebook):
    return [(cell.id, cell.cell_type, cell.metadata, cell.source) for cell in notebook.cells]


def printed(cell):
    """The text that a cell prints and shows."""
    return "\n".join(
        o.text if o.output_type == "stream" else o.get("data", {}).get("text/plain", "") for o in cell.outputs
    )


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def stored(path):
    return nbformat.read(path.with_suffix(".ipynb"), as_version=nbformat.NO_CONVERT)


def test_stored(path, stored):
    nbformat.validate(stored)
    source = read_source(path)
    assert cells(stored) == cells(source), CHANGES
    assert stored.metadata == source.metadata
    for count, cell in enumerate(code(stored), 1):
        assert cell.execution_count == count, CHANGES
        for output in cell.outputs:
            assert output.output_type != "error", output
            assert output.get("name") != "stderr", output.text
    text = path.with_suffix(".ipynb").read_text()
    assert not ABSOLUTE.search(text)
    assert not SOURCE_FILE.search(text)
    assert len(text) < 1.5e6


@pytest.fixture(scope="module")
def fresh(request, tmp_path_factory):
    """The notebooks of the chosen tests as futures, executed two at a time: each leaves a core idle for long. As for
    users, a step is proven where its proof is shown."""
    folder = shutil.copytree(FOLDER, tmp_path_factory.mktemp("fresh") / "notebooks")

    def run(path):
        notebook = read_source(path)
        execute(notebook, folder)
        return notebook

    chosen = {item.callspec.params["path"] for item in request.session.items if "fresh" in item.fixturenames}
    with pytest.MonkeyPatch.context() as environment, ThreadPoolExecutor(2) as threads:
        environment.delenv("SHARDTRACE_PROVE")
        environment.setenv("IPYTHONDIR", str(folder.parent))
        yield {path: threads.submit(run, path) for path in sorted(chosen)}


def test_runs_and_prints_what_is_stored(path, stored, fresh):
    """Cells tagged "varies" print times, or numbers that depend on the machine."""
    executed = fresh[path].result()
    assert not SOURCE_FILE.search(nbformat.writes(executed))
    for old, new in zip(code(stored), code(executed), strict=True):
        if "varies" not in old.metadata.get("tags", ()):
            assert printed(new) == printed(old), CHANGES
