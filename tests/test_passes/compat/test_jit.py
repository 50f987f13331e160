import functools
import inspect
import warnings
from collections import namedtuple
from dataclasses import dataclass

from passes.compat.jit import (
    compile_data_and_stats,
    jitted_module,
    jitted_transforms,
    replace_missing_fuser,
    set_traced_device,
    traced_device,
    unjitted,
)

import pytest
import thunder
import torch
from thunder.core import pytree, transform_common, utils
from thunder.core.devices import cpu
from thunder.core.proxies import numberproxy, tensorproxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import Transform
from thunder.extend import get_default_executors
from thunder.recipes import BaseRecipe


def test_jitted_modules():
    module, transform = torch.nn.Linear(2, 2), Transform()
    jitted = thunder.jit(module, transforms=[transform])
    assert jitted_module(jitted) is module
    assert unjitted(jitted) is unjitted(module) is module
    assert jitted_transforms(jitted) == [transform]
    assert compile_data_and_stats() == (None, None)


def test_a_meta_tensor_is_traced_on_another_device():
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    set_traced_device(parameter, torch.device("cpu"))
    assert traced_device(parameter) == torch.device("cpu")
    with tracectx(TraceCtx()):
        assert tensorproxy(parameter, name="p", history=None).device == cpu


def names(executors):
    return [e.name for e in executors]


@pytest.fixture
def without_nvfuser(monkeypatch):
    monkeypatch.setattr(thunder.extend, "_executor_map", {**thunder.extend._executor_map})
    thunder.extend._executor_map.pop("nvfuser", None)
    monkeypatch.setattr(thunder, "resolve_executors", thunder.extend.resolve_executors)
    monkeypatch.setattr(BaseRecipe, "setup_executors", BaseRecipe.setup_executors)
    replace_missing_fuser()


def test_executors_in_place_of_nvfuser(without_nvfuser):
    defaults = names(get_default_executors())
    with pytest.warns(UserWarning, match=r'To fuse without it: .* "torchcompile"') as caught:
        jitted = thunder.jit(lambda x: x + 1, executors=["nvfuser", "torch"])
    assert caught[0].filename == __file__  # it names the user's line
    found = names(thunder.compile_data(jitted).executors_list)
    assert [n for n in found if n in ("torch", *defaults)] == ["torch", *defaults]
    assert jitted(torch.ones(1)).item() == 2
    with pytest.raises(ValueError, match="made_up"):
        thunder.jit(lambda x: x, executors=["made_up"])


def test_recipes_in_place_of_nvfuser(without_nvfuser, monkeypatch, capsys):
    """The default recipe names nvFuser whether or not there is a GPU."""
    recipe = BaseRecipe()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(recipe.setup_executors()) == names(get_default_executors())
        assert names(BaseRecipe(fuser="torch.compile").setup_executors()) == ["torchcompile"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="To fuse without it"):
        assert names(recipe.setup_executors()) == names(get_default_executors())
    assert recipe.executor_names == ["nvfuser"]
    assert capsys.readouterr().out == ""  # Thunder's hint is about torch 2.8


@dataclass
class Pair:
    a: object
    b: object


Point = namedtuple("Point", ["x", "y"])
TREES = [
    (1, [2, {"k": 3.0}], None), Pair(1, (2, 3)), {"p": Pair([1], 2)}, Point(1, (2,)), torch.Size([2, 3]), slice(1, None), "text", [],
    [Pair, Pair(1, Pair(2, 3))], torch.return_types.max((torch.ones(1), torch.ones(1))),
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_containers_are_flattened_as_thunder_does(tree):
    """Each twice: the second time, the types are known. The functions that Thunder has were kept by ours."""
    trees = pytree.tree_flatten.__self__
    for _ in range(2):
        assert pytree.tree_flatten(tree) == trees._flatten(tree)
        (values, spec), (expected, other) = pytree.tree_flatten_with_dataclass(tree), trees._flatten_all(tree)
        assert values == expected
        assert repr(pytree.tree_unflatten(values, spec)) == repr(pytree.tree_unflatten(expected, other))


def test_containers_that_thunder_refuses():
    for _ in range(2):
        with pytest.raises(TypeError, match=r"tree_flatten of type .*object.* is not supported"):
            pytree.tree_flatten(object())
    assert utils.safe_map_flat(lambda a, b: a + b, [1, (2, Point(3, 4))], (5, [6, [7, 8]])) == (6, (8, (10, 12)))
    with pytest.raises(AssertionError, match="argument layout mismatch"):
        utils.safe_map_flat(lambda a, b: a + b, [1, 2], [1, [2]])


def test_arguments_of_lines_are_those_of_the_signature():
    def meta(a, b=2, *, c=3): ...
    def plain(a, b=2): ...
    def rest(a, *others, **named): ...

    for function, args, kwargs in (
        (meta, (1,), {}), (meta, (1, 5), {"c": 6}), (plain, (1, 2), {}), (plain, (1,), {}), (plain, (), {"b": 1, "a": 2}),
        (rest, (1, 2, 3), {"k": 4}), (functools.partial(plain, 1), (3,), {}),
    ):  # fmt: skip
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        for _ in range(2):
            assert Symbol("f", meta=function).normalize(*args, **kwargs) == (bound.args, bound.kwargs)
    with pytest.raises(TypeError, match="missing a required argument"):
        Symbol("f", meta=plain).normalize()


def test_functions_of_traces_know_the_objects_that_thunder_gathers():
    function = thunder.jit(lambda a: torch.sin(a) + torch.full((2,), 1.0, device=a.device))
    function(torch.ones(2))
    trace = thunder.last_traces(function)[-1]
    for line in trace.bound_symbols:
        assert line.gather_ctxs() == (line.import_ctx(), line._get_call_ctx(), line.object_ctx())
    found = inspect.unwrap(trace.python_callable()).__globals__
    assert "_gather_ctxs" not in vars(trace)
    expected = trace.python_ctx()
    assert {name: found[name] for name in expected} == expected


def test_what_makes_a_value_and_numbers_that_are_made_twice():
    function = thunder.jit(lambda a: torch.sin(a) * torch.cos(a))
    function(torch.ones(2))
    trace = thunder.last_traces(function)[-1]
    lines = trace.bound_symbols
    makers = utils.producers(trace, _map_to_numbers=True)
    for number, line in enumerate(lines):
        for made in line.flat_proxy_outs:
            assert lines[makers[made]] is utils.producers(list(lines))[made]
            assert makers[made] == number or made in line.flat_proxy_args  # a line that unpacks it
    remove = transform_common.remove_duplicate_number_proxies
    assert all(a is b for a, b in zip(remove(lines), lines, strict=True))
    with tracectx(TraceCtx()):
        n = numberproxy(int, 3)
    twice = [lines[0].from_bsym(output=output) for output in (n, (n, lines[0].output), n)]
    assert [b.output for b in remove(twice)] == [n, (3, lines[0].output)]
