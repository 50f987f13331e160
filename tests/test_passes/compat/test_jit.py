import warnings

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
from thunder.core.devices import cpu
from thunder.core.proxies import tensorproxy
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
