"""Both packages hold their layers. Read from the sources, every import counts: of a module, in a function, for types."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The rooms from the ground up. A room imports from the floors below it, but not from another room on its own floor.
FLOORS = [
    ["passes.compat"],
    ["passes.plan"],
    ["passes.plan.dims"],
    ["passes.comm"],
    ["passes.kernels"],
    ["passes.analysis"],
    ["passes.writer"],
    ["passes.sequence"],
    ["passes"],  # the passes
    ["passes.proof"],
    ["passes.pipeline"],
    ["passes.__init__"],
    ["shardtrace.options", "shardtrace.ranks"],
    ["shardtrace.planner.calibrate", "shardtrace.planner.training_plan", "shardtrace.record"],
    ["shardtrace.model"],
    ["shardtrace.training"],
    ["shardtrace.checkpoint"],
    ["shardtrace.trainers"],
    ["shardtrace.api", "shardtrace.doctor"],
    ["shardtrace.testing"],
    ["shardtrace.inspector"],
    ["shardtrace.planner"],
    ["shardtrace.cli", "shardtrace.lightning", "shardtrace.parallel"],
    ["shardtrace.__init__", "shardtrace.__main__"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


@cache
def sources():
    """The syntax tree of each file, by its module. A package's own file is its ``__init__``."""
    files = [file for package in ("passes", "shardtrace") for file in (ROOT / package).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): ast.parse(file.read_text()) for file in files}


def modules_of(node):
    """The modules of the two packages that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.level == 0, f"line {node.lineno}: write the import with the whole name"
        parts = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [part if part in sources() or f"{part}.__init__" in sources() else node.module for part in parts]
    return {name if name in sources() else f"{name}.__init__" for name in names} & sources().keys()


@cache
def imports():
    """For each module, the modules that it imports."""
    statements = {
        module: [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        for module, tree in sources().items()
    }
    return {module: set().union(*map(modules_of, nodes)) for module, nodes in statements.items()}


@cache
def edges():
    return sorted((module, other) for module, others in imports().items() for other in others)


def room_of(module):
    """The longest name of a room that the module's name begins with."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in names if name in FLOOR), None)


def goes_up(module, other):
    mine, theirs = room_of(module), room_of(other)
    return mine != theirs and FLOOR[theirs] >= FLOOR[mine]


def test_imports_are_found():
    assert ("passes.schedule", "passes.plan.__init__") in edges()
    assert ("shardtrace.api", "shardtrace.model.state") in edges()
    assert len(edges()) > 200


def test_each_file_is_in_a_room():
    assert [module for module in sources() if room_of(module) is None] == []


def test_imports_go_down():
    assert {edge for edge in edges() if goes_up(*edge)} == set()


def test_passes_import_no_passes():
    assert [edge for edge in edges() if [room_of(module) for module in edge] == ["passes", "passes"]] == []


def test_no_files_import_each_other_in_a_circle():
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail("imports a circle: " + " <- ".join(error.args[1]))


def exported(tree):
    """The functions, classes and values that the file of a package imports or defines; its modules are none."""
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name for a in node.names if f"{node.module}.{a.name}" not in sources()}
    return names


def test_no_package_exports_a_name_of_its_modules():
    hidden = set()
    for file, tree in sources().items():
        package, _, last = file.rpartition(".")
        if last == "__init__":
            modules = {module.removesuffix(".__init__") for module in sources()}
            hidden |= {f"{package}.{name}" for name in exported(tree)} & modules
    assert hidden == set()


def lines_of(function):
    """The lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_files_and_functions_fit_on_few_screens():
    assert [module for module, tree in sources().items() if tree.body and tree.body[-1].end_lineno > 800] == []
    functions = ((m, f) for m, tree in sources().items() for f in ast.walk(tree) if isinstance(f, ast.FunctionDef))
    assert [(module, function.name) for module, function in functions if lines_of(function) > 50] == []
