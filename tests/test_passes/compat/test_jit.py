from passes.compat.jit import (
    compile_data_and_stats,
    jitted_module,
    jitted_transforms,
    set_traced_device,
    traced_device,
    unjitted,
)

import thunder
import torch
from thunder.core.devices import cpu
from thunder.core.proxies import tensorproxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import Transform


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
