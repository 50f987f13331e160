"""The prologue in few lines checks what it checked before."""

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
check_value(guard_0, args)
check_value(guard_1, args)
check_value(guard_2, args)
check_len(args, 1)
check_len(kwargs, 0)
input: "cpu f32[3, 6]" = args[0]
module0: "Any" = globals()['__function_obj']
module: "Any" = thunder.core.module.get_thunder_module(module0)
(t_0_weight_dtensor, t_0_bias_dtensor, t_2_weight_dtensor, t_2_bias_dtensor) = fetch_parameters(module, names_0)
t_2_num_batches_tracked: "cpu i64[]" = module.get_buffer('2.num_batches_tracked')
t_2_running_mean: "cpu f32[4]" = module.get_buffer('2.running_mean')
t_2_running_var: "cpu f32[4]" = module.get_buffer('2.running_var')
check_value(kinds_of_t_0, (input,))
check_value(memory_of_arguments, (input,))
check_tensors((input, t_0_weight_dtensor, t_0_bias_dtensor, t_2_num_batches_tracked, t_2_running_mean, t_2_running_var, t_2_weight_dtensor, t_2_bias_dtensor), metadata)
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
(t_0_weight, t_0_bias, t_2_weight, t_2_bias) = rows_of(model_0, t_0_weight_dtensor, t_0_bias_dtensor, t_2_weight_dtensor, t_2_bias_dtensor)
check_value(last_guard_0, args)
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
