"""The policies: the fields of each, and their names in other places."""

import inspect
import pickle
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import shardtrace
from passes.plan import CostModel, Device, Link
from shardtrace.cli import FLAGS
from shardtrace.options.policies import HOMES, POLICIES, flat, grouped

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[3]
ARGUMENTS = inspect.signature(shardtrace.fsdp).parameters.keys() - {"model", "spelling"}


def test_each_field_has_one_home():
    assert len(HOMES) == sum(len(fields(policy)) for policy in POLICIES.values())
    assert not HOMES.keys() & ARGUMENTS
    assert POLICIES.keys() <= ARGUMENTS


def test_policies_are_exported_and_say_what_each_field_is():
    for policy in POLICIES.values():
        assert getattr(shardtrace, policy.__name__) is policy
        assert all(f"\n        {f.name}: " in policy.__doc__ for f in fields(policy))


def test_tables_of_the_pages_list_every_option():
    rows = "\n".join(page.read_text() for page in (ROOT / "docs/guide").glob("*.md"))
    listed = {
        name for cells in re.findall(r"^\| (`.+?`) \|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)`", cells)
    }
    assert {*ARGUMENTS, *HOMES} <= listed


def test_flags_are_options():
    assert {name for names in FLAGS.values() for name in names} <= ARGUMENTS | HOMES.keys()


def test_a_policy_is_frozen_and_keyword_only_and_travels():
    with pytest.raises(TypeError, match="positional"):
        shardtrace.Checks(True)
    with pytest.raises(FrozenInstanceError):
        shardtrace.Checks().timeout = 3.0
    policy = shardtrace.CommPolicy(gather_dtype={"a.*": "int8", "*": None})
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_fields_and_arguments():
    options = {"mp_policy": "bf16", "prefetch": 2, "kernels": False, "timeout": 20}
    arguments = grouped(options)
    assert arguments == {
        "mp_policy": "bf16",
        "compile_policy": shardtrace.CompilePolicy(prefetch=2, kernels=False),
        "checks": shardtrace.Checks(timeout=20),
    }
    assert flat(arguments) == options
    assert grouped(arguments | {"prefetch": 3})["compile_policy"] == shardtrace.CompilePolicy(prefetch=3, kernels=False)
    assert flat({"checks": shardtrace.Checks(recording=1)}) == {"recording": 1}  # which True is not


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefetch": 2}, r"^prefetch is a field of CompilePolicy: pass compile_policy=CompilePolicy\(prefetch=2\)$"),
        ({"check_steps": False}, r"^check_steps is a field of Checks: pass checks=Checks\(steps=False\)$"),
        ({"check_recording": 3}, r"pass checks=Checks\(recording=3\)$"),
        ({"weights": {"weight": torch.ones(2, 2)}}, r"pass init_policy=InitPolicy\(weights=...\)$"),
        ({"ignored_params": [3]}, "^ignored_params must be parameters, not 3"),
        ({"ignored_params": [None]}, "^ignored_params must be parameters, not None"),
        ({"compile_policy": {"prefetch": 2}}, "^compile_policy must be a shardtrace.CompilePolicy, not dict$"),
    ],
)
def test_an_argument_of_another_kind(fake_ranks, given, message):
    fake_ranks(2)
    with pytest.raises(TypeError, match=message):
        shardtrace.fsdp(nn.Linear(2, 2), **given)


def test_inspect_takes_no_fields_either():
    with pytest.raises(TypeError, match="prefetch is a field of CompilePolicy"):
        shardtrace.inspect(nn.Linear(2, 2), torch.ones(2, 2), world_size=2, prefetch=2)


@pytest.mark.parametrize(
    ("policy", "fields", "message"),
    [
        ("CompilePolicy", {"disable_passes": "schedule"}, "disable_passes must be several names of passes"),
        ("CompilePolicy", {"cost_model": 3}, "cost_model must be a passes.CostModel, or None, not 3"),
        ("CommPolicy", {"gradient_divide_factor": 0}, "gradient_divide_factor must be a positive number"),
        ("CommPolicy", {"sum_reductions": 1}, "sum_reductions must be True or False, not 1"),
        ("Checks", {"timeout": 0}, "timeout must be a number of seconds, not 0"),
        ("InitPolicy", {"evenness": -1}, "evenness must be a number from 0 to 1"),
        ("InitPolicy", {"param_init_fn": 3}, "param_init_fn must be a function of a module, or None, not 3"),
        ("InitPolicy", {"broadcast_from": "0"}, "broadcast_from must be a global rank, or None, not '0'"),
        ("InitPolicy", {"weights": 3}, "weights must be a path or a state dict, not 3"),
    ],
)
def test_a_policy_checks_its_fields(policy, fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(shardtrace, policy)(**fields)


def test_weights_do_not_stay_with_the_model(fake_ranks):
    fake_ranks(2)
    policy = shardtrace.InitPolicy(weights={"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    model = shardtrace.fsdp(nn.Linear(2, 2), init_policy=policy)
    assert model._shardtrace.options.init.weights is None


def test_ranks_compare_what_is_not_their_own(fake_ranks):
    fake_ranks(2)
    cost = CostModel(Link(1e9, 1e-5), Device(1e12, 1e12, 1e11, 1e-6))
    options = shardtrace.fsdp(
        nn.Sequential(nn.Linear(2, 2)),
        init_policy=shardtrace.InitPolicy(device="cpu", param_init_fn=print),
        compile_policy=shardtrace.CompilePolicy(cost_model=cost, eager=["0"]),
        checks=shardtrace.Checks(timeout=20),
    )._shardtrace.options
    text = repr(options)
    compared = ("prefetch", "kernels", "evenness", "cost_model=CostModel", "accumulation_dtype", "timeout=20", "steps")
    assert all(name in text for name in compared)
    assert not any(name in text for name in ("device=device", "param_init_fn", "eager", "repeated_blocks", "<function"))
