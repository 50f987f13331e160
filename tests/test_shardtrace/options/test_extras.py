"""Libraries that are missing are named before any work, with the command that installs them."""

import importlib
import sys

import shardtrace

import pytest
import torch
from torch import nn

INSTALL = r"which is not installed: pip install {0}, or shardtrace's extra, pip install '.\[{1}\]' in its folder"


def without(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)


def test_plan(monkeypatch):
    without(monkeypatch, "scipy")
    with pytest.raises(ImportError, match="shardtrace.plan needs scipy, " + INSTALL.format("scipy", "plan")):
        shardtrace.plan(nn.Linear(2, 2), torch.ones(1, 2), world_size=2)


def test_lightning(monkeypatch):
    without(monkeypatch, "lightning")
    monkeypatch.delitem(sys.modules, "shardtrace.lightning", raising=False)
    with pytest.raises(ImportError, match="needs lightning, " + INSTALL.format("lightning", "lightning")):
        importlib.import_module("shardtrace.lightning")


def test_tables(monkeypatch):
    rows = shardtrace.inspect(nn.Linear(2, 2), torch.ones(1, 2), world_size=2).collectives
    without(monkeypatch, "pandas")
    with pytest.raises(ImportError, match="to_pandas needs pandas, " + INSTALL.format("pandas", "notebook")):
        rows.to_pandas()
