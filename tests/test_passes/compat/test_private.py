"""Each private name of torch and Thunder that is listed exists, and each one that is used is listed."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest
import thunder
import torch
from private_names import THUNDER, TORCH, TRAINERS

ROOT = Path(__file__).parents[3]
COMPAT = ROOT / "passes" / "compat"
SOURCES = sorted(p for package in ("passes", "shardtrace") for p in (ROOT / package).rglob("*.py"))
OTHERS = {"_asdict", "_fields", "_replace"}  # of NamedTuples
OTHERS |= {"_current_frames", "_getframe"}  # of Python
OTHERS |= {"_to_copy", "_local_scalar_dense"}  # operators
OTHERS |= {"_C", "_autograd", "_functorch", "_dynamo"}  # modules, whose names are listed
NEVER_THERE = ("torch.TensorProxy", "torch._dynamo.eval_frame.guarded_backend_cache")  # for torch before 2.3; a slip
OURS = {"_hold", "_timed", "_shardtrace_outside", "_shardtrace_number"}


@pytest.mark.parametrize("private", [*THUNDER, *TORCH, *TRAINERS], ids=lambda p: f"{p.module}.{p.attribute}")
def test_a_private_name_exists(private):
    *parents, name = private.attribute.split(".")
    library = private.module.split(".")[0]
    for needed in ("accelerate", library) if library == "transformers" else (library,):  # its Trainer imports the first
        pytest.importorskip(needed, reason="pip install 'shardtrace[examples]'")
    owner = import_module(private.module)
    for parent in parents:
        owner = getattr(owner, parent)
    assert hasattr(owner, name) or name in inspect.getsource(owner), f"it served: {private.purpose}"


def nodes(path):
    return ast.walk(ast.parse(path.read_text()))


def private_imports(path, library):
    """Names with a leading underscore that a file imports from a library, and names from modules with one."""
    imports = (n for n in nodes(path) if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == library)
    return {a.name for n in imports for a in n.names if a.name[0] == "_" or "._" in n.module}


def private_attributes(path):
    """Attributes with one leading underscore of anything but ``self``."""
    found = (n for n in nodes(path) if isinstance(n, ast.Attribute) and n.attr[0] == "_" != n.attr[1])
    return {n.attr for n in found if not (isinstance(n.value, ast.Name) and n.value.id in ("self", "cls"))}


def listed(table):
    return {private.attribute.split(".")[-1] for private in table}


def test_each_private_name_that_is_used_is_listed():
    known = listed(THUNDER + TORCH) | OTHERS | OURS
    used = {
        p.name: private_imports(p, "torch") | private_imports(p, "thunder") | private_attributes(p) for p in SOURCES
    }
    assert {name: names - known for name, names in used.items() if names - known} == {}


def dotted(node):
    """``torch.nn.Linear`` of an expression that names it; None for others."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) and node.id == "torch" else None


def used_of_torch(path):
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Attribute) and (name := dotted(node)):
            yield name


def exists(name):
    owner, so_far = torch, "torch"
    for part in name.split(".")[1:]:
        so_far += f".{part}"
        try:
            owner = getattr(owner, part) if hasattr(owner, part) else import_module(so_far)
        except ImportError:
            return False
    return True


def test_names_of_torch_that_thunder_uses_exist():
    """Most are looked up when they are needed, not when Thunder is imported."""
    sources = [p for p in Path(thunder.__file__).parent.rglob("*.py") if not {"tests", "benchmarks"} & {*p.parts}]
    names = {name for path in sources for name in used_of_torch(path)}
    assert {"torch.autograd.function.Function.apply.__func__", "torch.Tensor.add_"} <= names
    assert [name for name in sorted(names) if not exists(name) and not name.startswith(NEVER_THERE)] == []


def test_only_compat_uses_private_names_of_thunder():
    own = {"_name", "_softmax", "_GROUPED_MM"}  # names of others, too, or of functions as torch has them
    found = {
        p.name: private_imports(p, "thunder") | private_attributes(p) & listed(THUNDER)
        for p in SOURCES
        if p.parent != COMPAT
    }
    assert {name: names - own for name, names in found.items() if names - own} == {}
