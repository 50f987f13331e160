"""A sample of what ``make operators`` runs: what models use must be equal to eager PyTorch."""

from itertools import islice

from shardtrace.record.symbols import TRUSTED

import compositions
import database
import pytest
import table
import torch
from cases import Sample, applied
from judge import judge
from torch._subclasses.fake_tensor import FakeTensor

WITHOUT_SAMPLES = {"detach", "type_as"}  # torch's database has none; compositions use them


def sampled(name):
    """The operators of torch's database with a last name or an alias."""
    return [
        op.formatted_name
        for op in database.operators().values()
        if not op.name.startswith("sparse.")
        and name in {n.rpartition(".")[2] for n in (op.name, *(alias.name for alias in op.aliases))}
    ]


def test_each_trusted_symbol_has_samples():
    assert {name for name in TRUSTED if not sampled(name)} == WITHOUT_SAMPLES


@pytest.mark.parametrize("name", sorted(TRUSTED - WITHOUT_SAMPLES))
def test_trusted(name, single_rank):
    """The symbol of each name, as a function and in place, with the first sample."""
    for operator in sampled(name):
        found = list(database.cases(operator, [torch.float32, torch.int64, torch.bool]))
        for variant in ("function", "in place on a view"):
            for case in [case for case in found if case.name.split("/")[1] == variant][:1]:
                row = judge(case)
                assert row["outcome"] in ("equal", "unsupported") or "in place: use" in row["error"], row


@pytest.mark.parametrize("family", compositions.names())
def test_compositions(family, single_rank):
    for case in islice(compositions.cases(family), 3, None, 101):
        row = judge(case)
        assert row["outcome"] in ("equal", "unsupported", "refused"), row


def test_what_is_wrong_is_seen(single_rank):
    """A function that computes something else while it is recorded."""

    def twice(x):
        return x * 2 if isinstance(x, FakeTensor) else x * 3

    samples = [Sample((torch.ones(2, requires_grad=True),), {})] * 2
    assert judge(applied("twice", twice, samples, owns=True))["outcome"] == "wrong"


def test_table():
    rows = [
        {"source": "operators", "operator": "add", "case": "add/function/float32/0", "outcome": "equal"},
        {
            "source": "operators",
            "operator": "nonzero",
            "case": "nonzero/function/float32/0",
            "outcome": "refused",
            "error": "the forward of Applied cannot be recorded",
        },
        {
            "source": "compositions",
            "operator": "in place",
            "case": "in place/mul_ row/autocast",
            "outcome": "wrong",
            "error": "off by 1",
        },
        {"source": "operators", "operator": "svd", "case": "svd/function/float32/0", "outcome": "unsupported"},
    ]
    assert table.markdown(rows).splitlines() == [
        "| cases | eager can | equal | refused | wrong | internal error | timeout |",
        "|---|---|---|---|---|---|---|",
        "| operators, function, float32 | 2 | 1 | 1 | 0 | 0 | 0 |",
        "| compositions, autocast | 1 | 0 | 0 | 1 | 0 | 0 |",
        "| all | 3 | 1 | 1 | 1 | 0 | 0 |",
        "",
        "| outcome | reason | operators |",
        "|---|---|---|",
        "| refused | the forward cannot be recorded | `nonzero` |",
        "| wrong | off by 1 | `mul_ row` |",
    ]
