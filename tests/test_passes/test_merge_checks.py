"""The prologue in few lines checks what it checked before."""

from operator import attrgetter, itemgetter
from types import SimpleNamespace

from passes.merge_checks import Fact, unlike

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from golden import compile_fake, text
from thunder.core.transform_common import Transform
from torch import nn


def model():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.BatchNorm1d(4))


def test_golden(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(model, torch.ones(3, 6))
    assert_expected_inline(
        text(thunder.last_prologue_traces(cmodel)[-1]),
        """\
check_parameters(guard_0, args)
check_len(args, 1)
check_len(kwargs, 0)
input: "cpu f32[3, 6]" = args[0]
module0: "Any" = globals()['__function_obj']
module: "Any" = thunder.core.module.get_thunder_module(module0)
(t_0_weight, t_0_bias, t_2_weight, t_2_bias) = fetch_parameters(module, names_0)
t_2_num_batches_tracked: "cpu i64[]" = module.get_buffer('2.num_batches_tracked')
t_2_running_mean: "cpu f32[4]" = module.get_buffer('2.running_mean')
t_2_running_var: "cpu f32[4]" = module.get_buffer('2.running_var')
m1: "Any" = module.get_submodule('0')
i0: "bool True" = m1.training
check_number_type_and_value(i0, True)
i1: "int 6" = m1.in_features
check_number_type_and_value(i1, 6)
i2: "int 4" = m1.out_features
check_number_type_and_value(i2, 4)
m2: "Any" = module.get_submodule('2')
f5: "float 0.1" = m2.momentum
check_number_type_and_value(f5, 0.1)
i6: "bool True" = m2.training
check_number_type_and_value(i6, True)
i7: "bool True" = m2.track_running_stats
check_number_type_and_value(i7, True)
i8: "bool True" = m2.training
check_number_type_and_value(i8, True)
i9: "int 4" = m2.num_features
check_number_type_and_value(i9, 4)
f10: "float 1e-05" = m2.eps
check_number_type_and_value(f10, 1e-05)
f11: "float 0.1" = m2.momentum
check_number_type_and_value(f11, 0.1)
i12: "bool True" = m2.affine
check_number_type_and_value(i12, True)
i13: "bool True" = m2.track_running_stats
check_number_type_and_value(i13, True)
check_tensors((input, t_0_weight, t_0_bias, t_2_weight, t_2_bias, t_2_running_mean, t_2_running_var, t_2_num_batches_tracked), metadata)
f16: "float 1e-05" = m2.eps
check_number_type_and_value(f16, 1e-05)
cache_info: "Any" = thunder._get_cache_info()
cache_info_default_dtype: "<class 'torch.dtype'>" = cache_info['default_dtype']
check_literal_like(cache_info_default_dtype, torch.float32)
cache_info_default_device: "<class 'torch.device'>" = cache_info['default_device']
check_literal_like(cache_info_default_device, torch.device("cpu"))
cache_info_is_autocast_enabled: "bool False" = cache_info['is_autocast_enabled']
check_number_type_and_value(cache_info_is_autocast_enabled, False)
cache_info_alias_tensor_indices: "str" = cache_info['alias_tensor_indices']
check_string_value(cache_info_alias_tensor_indices, '')
cache_info_is_grad_enabled: "bool True" = cache_info['is_grad_enabled']
check_number_type_and_value(cache_info_is_grad_enabled, True)
cache_info_no_grad_sync: "bool False" = cache_info['no_grad_sync']
check_number_type_and_value(cache_info_no_grad_sync, False)
return ((input, t_0_bias, t_0_weight, t_2_bias, t_2_num_batches_tracked, t_2_running_mean, t_2_running_var, t_2_weight), ())""",
    )


@pytest.mark.parametrize("transforms", [[], [Transform()]], ids=["merged", "as Thunder writes them"])
def test_what_compiles_another_step(fake_ranks, transforms):
    fake_ranks(1)
    cmodel = compile_fake(model, torch.ones(3, 6), transforms=transforms)

    def misses(x):
        before = thunder.cache_misses(cmodel)
        cmodel(x)
        return thunder.cache_misses(cmodel) - before

    weight = cmodel._model[0].weight
    assert misses(torch.zeros(3, 6)) == 0
    assert misses(torch.zeros(3, 6, requires_grad=True)) == 1
    assert misses(torch.zeros(2, 6)) == 1
    assert misses(torch.zeros(2, 6)) == 0
    weight.requires_grad_(False)
    assert misses(torch.zeros(2, 6)) == 1
    weight.requires_grad_(True)
    assert misses(torch.zeros(2, 6)) == 0


def test_what_blocks_share_is_checked_in_one_line(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(lambda: nn.Sequential(*(nn.LayerNorm(6) for _ in range(4))), torch.ones(3, 6))
    checks = [b for b in thunder.last_prologue_traces(cmodel)[-1].bound_symbols if b.sym.name == "check_values"]
    (check,) = checks
    blocks, facts = check.args[0], check.args[1].obj
    assert len(blocks) == len(facts) == 3  # the first has Thunder's own lines
    assert {fact.name for fact in facts[0]} == {"eps", "item 6"}

    before = thunder.cache_misses(cmodel)
    cmodel(torch.ones(3, 6))
    assert thunder.cache_misses(cmodel) == before
    cmodel._model[2].eps = 0.1
    cmodel(torch.ones(3, 6))
    assert thunder.cache_misses(cmodel) == before + 1


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (SimpleNamespace(number=1, parts=["a"]), ""),
        (SimpleNamespace(number=2, parts=["a"]), "number"),
        (SimpleNamespace(number=True, parts=["a"]), "number"),
        (SimpleNamespace(number=1, parts=[]), "parts[0]"),
        (SimpleNamespace(parts=["a"]), "number"),
        (SimpleNamespace(number=1, parts={}), "parts[0]"),
    ],
)
def test_unlike(block, name):
    steps = (attrgetter("parts"), itemgetter(0))
    assert unlike((Fact("number", (attrgetter("number"),), 1), Fact("parts[0]", steps, "a")), block) == name
