"""Gradient accumulation: ``no_sync``. (The lines of the trace: tests/test_passes/test_accumulate.py.)"""

from contextlib import nullcontext, suppress

import shardtrace

import pytest
import thunder
import torch
from models import Switch, Zoo
from ranks import on_ranks
from sharded_training import expected_gradients, mean_over_ranks, micro_batches, my_rows, sharded_zoo
from torch import nn

PARTS = {"embed*": "ddp", "blocks.0.*": "owner", "blocks.1.*": "zero2", "*": "zero3"}


@on_ranks(2)
def test_micro_batches_equal_one_batch():
    accumulate(PARTS)


@on_ranks(4)
def test_hybrid():
    """Switched after forward: whole sums, sums of shards, and what all ranks add up after each of them."""
    cmodel = thunder.jit(sharded_zoo("hybrid_zero2", mesh=(2, 2)))
    ways = ["whole", "all", "whole", "shards", "all"]
    total = 0.0
    for way, batch in zip(ways, micro_batches(0, len(ways)), strict=True):
        cmodel.set_requires_gradient_sync(True)
        loss = cmodel(*my_rows(batch)) / len(ways)
        if way == "whole":
            cmodel.set_requires_gradient_sync(False)
        if way == "shards":
            cmodel.set_requires_all_reduce(False)
        loss.backward()
        total += mean_over_ranks(loss)
    expected_loss, expected = expected_gradients(0, len(ways))
    torch.testing.assert_close(total, expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shardtrace.full_gradients(cmodel), expected, rtol=1e-6, atol=1e-6)
    assert not cmodel._shardtrace.runtime.kept.by_place


@on_ranks(4)
def test_reduced_over_replicas_in_the_last_step():
    """Microbatches leave sums of shards, and send nothing to other replicas."""
    model = sharded_zoo({"embed*": "ddp", "*": "hybrid_zero3"}, mesh=(2, 2))
    for step in range(2):
        model.zero_grad()
        for i, batch in enumerate(batches := micro_batches(step, 3)):
            last = i == 2
            with nullcontext() if last else model.no_sync(reduce_each="shard"):
                (model(*my_rows(batch)) / len(batches)).backward()
            kinds = [c.kind for c in shardtrace.collectives(model) if c.parameters[0].startswith("blocks")]
            assert "reduce_scatter" in kinds
            assert ("all_reduce" in kinds) is last
            assert (model.blocks[1].down.grad is None) is not last
        expected = expected_gradients(step, 3)[1]
        torch.testing.assert_close(shardtrace.full_gradients(model), expected, rtol=1e-6, atol=1e-6)
        assert not model._shardtrace.runtime.kept.by_place


@on_ranks(2)
def test_a_part_that_keeps_its_gradients():
    model = sharded_zoo("zero3", bucketing_strategy="layer")
    batches = micro_batches(0, 2)
    with shardtrace.no_sync(model.blocks[0]):
        (model(*my_rows(batches[0])) / 2).backward()
    assert all(p.grad is None for p in model.blocks[0].parameters())
    assert model.blocks[1].down.grad is not None
    (model(*my_rows(batches[1])) / 2).backward()
    torch.testing.assert_close(shardtrace.full_gradients(model), expected_gradients(0, 2)[1], rtol=1e-6, atol=1e-6)


def test_a_bucket_that_is_kept_in_part(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucketing_strategy="model")
    with (
        pytest.raises(RuntimeError, match=r"keeps the gradient of '0.weight' and not that of '1.weight'"),
        shardtrace.no_sync(model[0]),
    ):
        model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_reduced_in_each_step():
    accumulate("zero3", reduce_each=True)


def accumulate(strategy, reduce_each=False):
    """Four micro-batches give the gradients of one batch. The first three send no gradient, or all do."""
    model = sharded_zoo(strategy)
    cmodel = thunder.jit(model)
    for step in range(2):  # the second runs what is compiled
        model.zero_grad()
        total = 0.0
        for i, batch in enumerate(batches := micro_batches(step, 4)):
            last = i + 1 == len(batches)
            with nullcontext() if last else model.no_sync(reduce_each=reduce_each):
                loss = cmodel(*my_rows(batch)) / len(batches)
                loss.backward()
            sends = any("reduce" in c.kind for c in shardtrace.collectives(cmodel))
            assert sends == (last or reduce_each)
            assert all((p.grad is None) != sends for p in (model.position, model.scale, model.blocks[1].down))
            total += mean_over_ranks(loss)
        expected_loss, expected = expected_gradients(step, 4)
        torch.testing.assert_close(total, expected_loss, rtol=1e-6, atol=1e-6)
        found = shardtrace.full_gradients(model)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert not model._shardtrace.runtime.kept.by_place
    assert thunder.cache_misses(cmodel) == (1 if reduce_each else 2)


@on_ranks(2)
def test_sums_are_in_fp32():
    """Many small gradients in bf16, added to a large one, are lost in bf16 and kept in fp32."""
    kept = {}
    for dtype in (torch.float32, None):
        model = nn.Linear(4, 4, bias=False)
        shardtrace.fsdp(model, mp_policy="bf16", comm_policy=shardtrace.CommPolicy(accumulation_dtype=dtype))
        cmodel = thunder.jit(model)
        for i in range(9):
            with model.no_sync() if i < 8 else nullcontext():
                cmodel(torch.full((1, 4), 1.0 if i == 0 else 2.0**-9)).sum().backward()
            if i == 0:
                (total,) = model._shardtrace.runtime.kept.by_place.values()
                assert total.total.dtype == (dtype or torch.bfloat16)
        kept[dtype] = model.weight.grad[0, 0].item()
    assert kept == {torch.float32: 1 + 8 * 2.0**-9, None: 1.0}


@on_ranks(2)
def test_a_sum_that_is_not_reduced_is_an_error():
    """The reducing step does not use a parameter that the steps before it used. Training can go on after the error."""
    model = shardtrace.fsdp(Switch())
    cmodel, x = thunder.jit(model), torch.ones(2, 4)
    with model.no_sync():
        cmodel(x, True).sum().backward()
    cmodel(x, False).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        cmodel(x, False)
    assert (
        "parameter 'second.weight' has gradients from no_sync that the step after it did not reduce, as it did not "
        "use the parameter: use it there too, or call no_sync(model, reduce_each=True)"
    ) in str(raised.value)
    cmodel(x, True).sum().backward()


@on_ranks(2)
def test_a_parameter_that_is_frozen_before_its_sum_is_reduced():
    """The reducing step says so, compiled before or not; unfrozen, it reduces what was added up."""
    model = shardtrace.fsdp(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), checks=shardtrace.Checks(timeout=20)
    )
    cmodel, x, weight = thunder.jit(model), torch.ones(2, 4), model[0].weight
    messages = []
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            cmodel(x).square().sum().backward()
        weight.requires_grad_(False)
        try:
            cmodel(x)
        except RuntimeError as error:
            messages.append(str(error))
        with torch.no_grad():
            cmodel(x)  # reduces nothing
        with model.no_sync():
            cmodel(x)
        weight.requires_grad_(True)
        cmodel(x).square().sum().backward()
        twice = weight.grad.clone()
        weight.grad = None
        cmodel(x).square().sum().backward()
        torch.testing.assert_close(twice, 2 * weight.grad)
        weight.requires_grad_(False)
        cmodel(x).sum().backward()  # a step of a frozen parameter is compiled, for the second turn
        weight.requires_grad_(True)
    assert len(messages) == 2
    for message in messages:
        assert "parameter '0.weight' was frozen before the gradients that no_sync has added up for it" in message


@on_ranks(2)
def test_an_exception_drops_the_sums():
    model = shardtrace.fsdp(nn.Linear(4, 4))
    cmodel, x = thunder.jit(model), torch.ones(2, 4)
    cmodel(x).sum().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    with suppress(KeyError), shardtrace.no_sync(cmodel):
        cmodel(x).sum().backward()
        raise KeyError
    cmodel(x).sum().backward()
    assert torch.equal(model.weight.grad, expected)


@on_ranks(2)
def test_all_forwards_before_the_backwards():
    """In any order: each backward reduces or keeps as the switch says when it begins, and adds what was kept before."""
    model = shardtrace.fsdp(nn.Linear(1, 1, bias=False), sharding_strategy="ddp")
    cmodel = thunder.jit(model)

    def losses():
        model.zero_grad()
        for i, x in enumerate((1.0, 10.0, 100.0)):
            with model.no_sync() if i < 2 else nullcontext():
                yield cmodel(torch.full((1, 1), x)).sum()

    def backwards(order, kept):
        every = list(losses())
        for i in order:
            with model.no_sync() if i in kept else nullcontext():
                every[i].backward()
            assert (model.weight.grad is None) is (i in kept)
        assert model.weight.grad.item() == 111

    for _ in range(2):
        backwards((0, 1, 2), kept=())
        backwards((0, 1, 2), kept=(0, 1))
        backwards((2, 1, 0), kept=(2,))
    sum(losses()).backward()
    assert model.weight.grad.item() == 111
    assert thunder.cache_misses(cmodel) == 3


@on_ranks(2)
def test_the_switch_is_read_in_backward():
    """As with FSDP2: scripts set it between forward and backward, and leave it so for the next forward."""
    model = sharded_zoo(PARTS, activation_checkpointing=True)

    def between(loss, last):
        model.set_requires_gradient_sync(last)
        loss().backward()

    def attribute(loss, last):
        value = loss()
        model.require_backward_grad_sync = last
        value.backward()

    def around_backward(loss, last):
        value = loss()
        with nullcontext() if last else model.no_sync():
            value.backward()

    def around_forward(loss, last):
        with nullcontext() if last else model.no_sync():
            value = loss()
        value.backward()

    for step, way in enumerate((between, attribute, around_backward, around_forward)):
        model.zero_grad()
        for i, batch in enumerate(micro_batches(step, 3)):
            way(lambda batch=batch: model(*my_rows(batch)) / 3, i == 2)
            sends = any("reduce" in c.kind for c in shardtrace.collectives(model))
            assert sends == (model.blocks[1].down.grad is not None) == (way is around_forward or i == 2)
        found, expected = shardtrace.full_gradients(model), expected_gradients(step, 3)[1]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=lambda m, w=way: f"{w.__name__}: {m}")
        assert shardtrace.prove(model).verdict != "unproven"


@on_ranks(2)
def test_thunders_own_no_sync():
    model = shardtrace.fsdp(nn.Linear(4, 4))
    cmodel, x = thunder.jit(model), torch.ones(2, 4)
    with cmodel.no_sync():
        cmodel(x).sum().backward()
    assert model.weight.grad is None
    cmodel(x).sum().backward()
    once = model.weight.grad.clone()
    model.zero_grad()
    cmodel(x).sum().backward()
    assert torch.equal(once, 2 * model.weight.grad)


def test_of_an_unsharded_model():
    with pytest.raises(ValueError, match=r"Zoo is not sharded: call shardtrace\.fsdp"), shardtrace.no_sync(Zoo()):
        pass


# ---- sums that are dropped, or that no backward reduces ----


def discards(model, way):
    """Drops gradients as scripts do, of all parameters or (last two) of one linear layer."""
    made = {
        "optimizer": lambda: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(),
        "in place": lambda: torch.optim.AdamW(model.parameters(), lr=0.1).zero_grad(set_to_none=False),
        "model": lambda: model.zero_grad(),
        "jitted": lambda: thunder.jit(model).zero_grad(),
        "wrapped": lambda: nn.ModuleDict({"inner": model}).zero_grad(),
        "part": lambda: model[0].zero_grad(),
        "other optimizer": lambda: torch.optim.Adam([{"params": [p]} for p in model[0].parameters()]).zero_grad(),
    }
    made[way]()
    return way in ("part", "other optimizer")


def test_zero_grad_drops_the_sums(fake_ranks):
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), bucketing_strategy="layer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = model._shardtrace.runtime.kept.by_place
    for way in ("optimizer", "in place", "model", "jitted", "wrapped", "part", "other optimizer"):
        model.require_backward_grad_sync = False
        model(torch.ones(2, 4)).sum().backward()
        assert len(kept) == 4
        with pytest.raises(RuntimeError, match=r"'0.weight' of .* was added up inside no_sync, .* and is not reduced"):
            optimizer.step()
        if discards(model, way):
            assert {sum.parameter.name for sum in kept.values()} == {"1.weight", "1.bias"}
            torch.optim.SGD(model[0].parameters(), lr=0.1).step()  # has none of them
            with pytest.raises(RuntimeError, match=r"'1.weight'"):
                optimizer.step()
        optimizer.zero_grad()
        assert not kept
        optimizer.step()


def test_a_closure_may_reduce_the_sums(fake_ranks):
    """As Lightning's do, in the last step of a window."""
    fake_ranks(2)
    model = shardtrace.fsdp(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    for how in ((lambda: optimizer.step(closure)), (lambda: optimizer.step(closure=closure))):
        with model.no_sync():
            closure()
            with pytest.raises(RuntimeError, match="is not reduced"):
                how()
        assert how() is not None
        assert not model._shardtrace.runtime.kept.by_place
