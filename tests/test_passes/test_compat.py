import ast
import subprocess
import sys
from pathlib import Path

from passes import compat

import pytest
import thunder
import torch
from thunder.core.devices import cpu
from thunder.core.proxies import tensorproxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import Transform


def test_nothing_is_missing_once_installed():
    assert compat.install() == ()


def test_stand_in_bears_its_name_and_raises(monkeypatch):
    monkeypatch.setattr(compat, "REMOVED_METHODS", ("made_up",))
    monkeypatch.setattr(torch.Tensor, "made_up", None, raising=False)
    del torch.Tensor.made_up  # restored, that is removed, by monkeypatch
    assert compat.install() == ("made_up",)
    assert torch.Tensor.made_up.__name__ == "made_up"  # Thunder checks it
    with pytest.raises(AttributeError, match=r"made_up was removed"):
        torch.ones(1).made_up("N")


def test_methods_that_exist_are_left_alone(monkeypatch):
    own = lambda self: "own"  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "rename", own, raising=False)
    compat.install()
    assert torch.Tensor.rename is own


def test_notes(monkeypatch):
    error, cause = RuntimeError("wrapped"), ValueError("first")
    error.__cause__ = cause
    for e, note in ((error, "one\ntwo"), (cause, "three")):
        compat.add_note(e, note)
    if sys.version_info >= (3, 11):
        assert (str(error), compat.notes_of(error)) == ("wrapped", "\none\ntwo\nthree")
    monkeypatch.setattr(sys, "version_info", (3, 10))
    old = RuntimeError("message", 3)
    compat.add_note(old, "note")
    assert old.args == ("message\nnote", 3)
    assert compat.notes_of(old) == ""


@pytest.mark.parametrize("first", ["shardtrace", "passes"])
def test_thunder_imports_after_us(first):
    """Without a warning."""
    done = subprocess.run([sys.executable, "-c", f"import {first}, thunder"], check=True, capture_output=True)
    assert done.stderr == b""


ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for package in ("passes", "shardtrace") for p in (ROOT / package).rglob("*.py"))
COMPAT = ROOT / "passes" / "compat.py"


def nodes(path):
    return ast.walk(ast.parse(path.read_text()))


def private_imports(path):
    """Names with a leading underscore that a file imports from Thunder."""
    imports = (n for n in nodes(path) if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "thunder")
    return {alias.name for n in imports for alias in n.names if alias.name.startswith("_")}


def private_attributes(path):
    return {n.attr for n in nodes(path) if isinstance(n, ast.Attribute) and n.attr[0] == "_" != n.attr[1]}


def test_only_compat_uses_private_names_of_thunder():
    attributes = private_attributes(COMPAT) - {"_C", "_name"} | {"_bind_postprocess", "_siginfo"}  # others' names, too
    found = {p.name: private_imports(p) | private_attributes(p) & attributes for p in SOURCES if p != COMPAT}
    assert {name: names for name, names in found.items() if names} == {}
    assert {"_call_ctx", "_proxied_values"} <= attributes
    assert {"_get_gradfn_and_executor", "_torch_to_thunder_function_map"} <= private_imports(COMPAT)


def test_lines_and_their_functions():
    """A line of ours holds its function. A line of torch's names it."""
    line = compat.symbol_that_calls("mine", lambda: None, abs, is_prim=True).bind(output=None)
    assert compat.function_of(line) is abs
    jitted = thunder.jit(lambda x: torch.cos(x))
    jitted(torch.ones(2, 3))
    traced = thunder.last_traces(jitted)[0].bound_symbols[-2]
    assert (traced.sym.name, compat.function_of(traced)) == ("cos", None)
    assert compat.shape_of(traced.flat_proxy_outs[0]) == (2, 3)
    assert not compat.has_grad_rule(traced)
    assert compat.has_grad_rule(traced.subsymbols[0])


def test_jitted_modules():
    module, transform = torch.nn.Linear(2, 2), Transform()
    jitted = thunder.jit(module, transforms=[transform])
    assert compat.jitted_module(jitted) is module
    assert compat.unjitted(jitted) is compat.unjitted(module) is module
    assert compat.jitted_transforms(jitted) == [transform]
    assert compat.compile_data_and_stats() == (None, None)


def test_a_meta_tensor_is_traced_on_another_device():
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    compat.set_traced_device(parameter, torch.device("cpu"))
    assert compat.traced_device(parameter) == torch.device("cpu")
    with tracectx(TraceCtx()):
        assert tensorproxy(parameter, name="p", history=None).device == cpu
