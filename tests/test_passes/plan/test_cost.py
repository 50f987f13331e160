"""Rates of a device and of a link: defaults and refused values."""

import json
from dataclasses import asdict

from passes.plan.cost import CPU, CUDA, GLOO, NCCL, CostModel, Device, Link, default_cost_model

import pytest

MODEL = CostModel(Link(bandwidth=1000.0, latency=0.5), Device(flops=2e3, half_flops=8e3, bandwidth=1e3, overhead=0.25))


def test_json():
    for model in (MODEL, default_cost_model("cpu", "gloo"), default_cost_model("cuda", "nccl")):
        assert CostModel.from_dict(json.loads(json.dumps(asdict(model)))) == model


@pytest.mark.parametrize(
    ("part", "changes", "error"),
    [
        ("link", {"bandwidth": 0}, ValueError),
        ("link", {"latency": -1.0}, ValueError),
        ("link", {"bandwidth": float("nan")}, ValueError),
        ("device", {"flops": float("inf")}, ValueError),
        ("device", {"flops": "fast"}, TypeError),
        ("device", {"overhead": True}, TypeError),
        ("device", {"colour": 1.0}, TypeError),
    ],
)
def test_what_is_no_rate(part, changes, error):
    data = asdict(MODEL)
    data[part].update(changes)
    with pytest.raises(error):
        CostModel.from_dict(data)


def test_defaults():
    assert default_cost_model("cpu", "gloo") == default_cost_model("cpu", "fake") == CostModel(GLOO, CPU)
    assert default_cost_model("cuda", "nccl") == default_cost_model("xpu", "none") == CostModel(NCCL, CUDA)
    assert default_cost_model("cuda", "gloo") == CostModel(GLOO, CUDA)
