import ast
import contextlib
import gc
import subprocess
import sys
import types
from pathlib import Path

from passes import compat
from shardtrace.testing import text

import pytest
import thunder
import torch
from thunder.core.devices import cpu
from thunder.core.jit_ext import register_general_jit_lookaside
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


def test_settings_of_python_are_restored():
    before = sys.getswitchinterval(), gc.get_threshold()
    with compat.quick_tracing():
        assert sys.getswitchinterval() == pytest.approx(1e-4)
    assert (sys.getswitchinterval(), gc.get_threshold()) == before


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
    attributes = private_attributes(COMPAT) | {"_bind_postprocess", "_siginfo"}
    found = {p.name: private_imports(p) | private_attributes(p) & attributes for p in SOURCES if p != COMPAT}
    assert {name: names for name, names in found.items() if names} == {}
    assert {"_call_ctx", "_proxied_values"} <= attributes
    assert "_interpret_call" in private_imports(COMPAT)


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


def shadowed(x):
    return max(x, 2)


SHADOWING = {"max": lambda x, times: x * times}  # a module's own function of a builtin's name


class Shadowing(torch.nn.Module):
    """Reads builtins, a function that has the name of one, and the truth of dicts, some of them changed meanwhile."""

    function = types.FunctionType(shadowed.__code__, {**globals(), **SHADOWING})

    def forward(self, x):
        found = {}
        empty = not found
        found["x"] = x
        kwargs = {"alpha": len([*found, empty])} if found and isinstance(x, torch.Tensor) else {}
        try:
            other = undefined
        except NameError as error:
            other = Shadowing.function(x) + len(error.args)
        return torch.add(x, other, **kwargs)


@pytest.mark.parametrize("hooked", [False, True])
def test_quick_builtins_change_no_trace(hooked):
    """Thunder makes a fraction of the calls in its own functions, and traces the same."""

    def lines_and_calls(quick):
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), Shadowing())
        if hooked:
            module[0].register_forward_hook(lambda module, args, out: out + len(args))
        calls = []

        def entry(module, x):
            return module(x)

        def lookaside(*args):
            with (
                compat.observing(lambda function, args: calls.append(function), lambda name: None),
                compat.quick_builtins() if quick else contextlib.nullcontext(),
            ):
                return compat.interpret(lambda module, x: module(x), *args)

        register_general_jit_lookaside(entry)(lookaside)
        jitted, x = thunder.jit(lambda x: entry(module, x)), torch.ones(2, 2)
        torch.testing.assert_close(jitted(x), module(x))
        return text(thunder.last_traces(jitted)[0]), text(thunder.last_prologue_traces(jitted)[0]), len(calls)

    plain, quick = lines_and_calls(False), lines_and_calls(True)
    assert quick[:2] == plain[:2]
    assert quick[2] < plain[2] / 2


class Lists(torch.nn.Module):
    """Loops over modules, calls them with unpacked arguments, and reads items of containers, some of them its own."""

    class Full(dict):
        def __contains__(self, key):
            return True

    class Called(torch.nn.Linear):
        factor = 3.0

        def __call__(self, x, *others, scale=1.0, **kwargs):
            return super().__call__(x) * scale * self.factor * len([*others, *kwargs])

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
        self.named = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": Lists.Called(2, 2)})
        self.options, self.own = {"scale": 2.0}, Lists.Full(scale=2.0)

    def forward(self, x):
        for block, other in zip(self.blocks, self.named.values(), strict=False):
            x = block(x) + other(x) + self.named["b"](x, x, *[x], **self.options, extra=1)
            if x.ndim == 2:
                continue
        for block in self.named.values():
            for _ in self.blocks[1:]:
                x = block.forward(x)
            break
        else:
            x = x * 0
        try:
            self.blocks[0](**{"input": x}, **{"input": x})
        except (TypeError, KeyError) as error:
            x = x + len(error.args)
        try:
            missing = (1, 2)[2] + self.options["missing"]
        except (IndexError, KeyError):
            missing = [1, [2, *self.options]][1][0]
        if "scale" in self.options and "missing" not in self.options and "missing" in self.own:
            x = x * self.own["scale"] * missing
        grown = {"a": 1}
        try:
            for key in grown.values():
                grown[f"{key}"] = key
        except RuntimeError:
            x = x + len(grown)
        return x


def test_quick_builtins_change_no_loop_call_or_item():
    """Among the calls are ones that fail, and classes with functions of their own."""

    def lines(quick):
        torch.manual_seed(0)
        module, x = Lists(), torch.ones(2, 2)

        def entry(module, x):
            return module(x)

        def lookaside(*args):
            with compat.quick_builtins() if quick else contextlib.nullcontext():
                return compat.interpret(lambda module, x: module(x), *args)

        register_general_jit_lookaside(entry)(lookaside)
        jitted = thunder.jit(lambda x: entry(module, x))
        torch.testing.assert_close(jitted(x), module(x))
        return text(thunder.last_traces(jitted)[0]), text(thunder.last_prologue_traces(jitted)[0])

    assert lines(True) == lines(False)


COMPARISONS = {
    "equal": lambda x, w: x.dtype == torch.float32,
    "reversed": lambda x, w: torch.bfloat16 == w.dtype,
    "not equal": lambda x, w: w.dtype != torch.float32,
    "is": lambda x, w: x.dtype is torch.float32,
    "in a tuple": lambda x, w: w.dtype in (torch.float16, torch.bfloat16),
    "not in a list": lambda x, w: x.dtype not in [torch.float16, torch.bfloat16],
    "in a dict": lambda x, w: x.dtype in {torch.float32: 1},
    "of a comparison": lambda x, w: (x > 0).dtype == torch.bool,
    "of two tensors": lambda x, w: x.dtype != w.dtype and x.dtype == (x + 1).dtype,
    "false": lambda x, w: not (x.dtype == torch.float64 or x.dtype in (torch.int64,) or w.dtype is torch.float32),
}


@pytest.mark.parametrize("compare", COMPARISONS.values(), ids=COMPARISONS)
def test_dtypes_compare_as_in_torch(compare):
    x, w = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    assert compare(x, w)

    def entry(x, w):
        return x + 1 if compare(x, w) else x

    def lookaside(*args):
        with compat.comparable_dtypes():
            return compat.interpret(lambda x, w: x + 1 if compare(x, w) else x, *args)

    register_general_jit_lookaside(entry)(lookaside)
    jitted = thunder.jit(lambda x, w: entry(x, w))
    assert torch.equal(jitted(x, w), x + 1)
