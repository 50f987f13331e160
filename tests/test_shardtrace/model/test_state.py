"""Optimizers that were built before fsdp(), and parameters that are changed after it."""

import shardtrace

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn


@on_ranks(2)
def test_an_optimizer_that_was_built_before():
    """The optimizer holds the shards afterwards."""
    torch.manual_seed(0)
    single, model = nn.Linear(4, 6), nn.Linear(4, 6)
    model.load_state_dict(single.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, model)]
    cmodel = thunder.jit(shardtrace.fsdp(model))
    for run in (single, cmodel):
        run(torch.ones(2, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(shardtrace.full_state_dict(model), dict(single.state_dict()))


@on_ranks(2)
def test_conversion_after_a_step():
    model = shardtrace.fsdp(nn.Linear(4, 4))
    cmodel = thunder.jit(model)
    cmodel(torch.ones(2, 4)).sum().backward()
    model.to(torch.bfloat16)
    model.zero_grad()
    cmodel(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad.dtype == torch.bfloat16


@on_ranks(2)
@pytest.mark.parametrize("on", [0, 1])
def test_a_parameter_changed_on_one_rank_is_an_error_on_all(on):
    model = nn.Linear(4, 4)
    cmodel = thunder.jit(shardtrace.fsdp(model, checks=shardtrace.Checks(timeout=20)))
    if dist.get_rank() == on:
        model.half()
    with pytest.raises(
        RuntimeError,
        match=r"the ranks differ in the collectives of Linear; .* root \(f(16|32), .* root \(f(32|16), ",
    ):
        cmodel(torch.ones(2, 4))


@pytest.mark.usefixtures("single_rank")
def test_hooks_on_a_backward():
    """A compiled backward calls none: they are refused, whenever they are registered. PyTorch calls those of a module
    that it runs, and those of the jitted module."""
    model = shardtrace.fsdp(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), compile_policy=shardtrace.CompilePolicy(eager=["0"])
    )
    cmodel, x, called = thunder.jit(model), torch.ones(2, 4, requires_grad=True), []

    def hook(*_):
        called.append(True)

    for module in (model[0], cmodel):
        handle = module.register_full_backward_hook(hook)
        cmodel(x).sum().backward()
        handle.remove()
    assert len(called) == 2
    for module, remedy in ((model, r"on the result of thunder\.jit"), (model[1], r"CompilePolicy\(eager=\['1'\]\)")):
        for register in (module.register_full_backward_hook, module.register_full_backward_pre_hook):
            handle = register(hook)
            with pytest.raises(RuntimeError, match="a hook on its backward, which the compiled backward.*" + remedy):
                cmodel(x)
            with torch.no_grad():
                cmodel(x)
            handle.remove()
    handle = torch.nn.modules.module.register_module_full_backward_hook(hook)
    with pytest.raises(RuntimeError, match="a hook for the backward of every module"):
        cmodel(x)
    handle.remove()
    cmodel(x).sum().backward()
    assert len(called) == 2
