"""The table of dims, against torch: what two ranks compute of parts makes the whole.

``DIMS_SAMPLES=200`` runs that many samples of each of torch's operators, for minutes, instead of the first useful one.
"""

import os
from functools import cache
from itertools import islice

from passes.plan.dims import RESHAPES, TABLE

import pytest
import torch
import torch.testing._internal.common_methods_invocations as database
from dim_samples import SAMPLES
from dims import calls_of, check

FULL = int(os.environ.get("DIMS_SAMPLES", "0"))
MOST = FULL or 30  # samples of an operator, of which the first useful one is enough
OPERATORS = {op.formatted_name: op for op in database.op_db if not op.name.startswith(("jiterator", "masked."))}
# not computed: with operands of a shape that no function gives, or only on a GPU
NEVER_SPLIT = {"prims.broadcast_in_dim": "is Thunder's"}


def _plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


def samples(op):
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if d in op.dtypes), None)
    if dtype is None:
        return []
    torch.manual_seed(0)
    return [(s.input, s.args, s.kwargs) for s in islice(op.sample_inputs("cpu", dtype), MOST)]


def ways_to_call(op):
    others = (op.get_method(), op.get_operator(), op.get_inplace(), op.get_inplace_operator())
    return dict.fromkeys(f for f in (op.op, *others, *(alias.op for alias in op.aliases)) if f is not None)


@cache
def computed(name):
    """The functions of the table of which a sample of an operator was computed in parts."""
    database.wrapper_set_seed = _plainly  # it sets the seed inside of random functions
    found, op = set(), OPERATORS[name]
    given = samples(op)
    for function in ways_to_call(op):
        for first, args, kwargs in given:
            try:
                made = calls_of(function, first, *args, **kwargs)
            except (RuntimeError, TypeError):  # not for this way to call
                continue
            useful = {m.line.name for m in made if check(m)}
            found |= useful
            if not FULL and (useful or not made):
                break
    return found


@cache
def computed_by_hand(family):
    torch.manual_seed(0)
    return {m.line.name for sample in SAMPLES[family] for m in calls_of(sample) if check(m)}


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operators(name):
    computed(name)


@pytest.mark.parametrize("family", SAMPLES)
def test_samples(family):
    assert computed_by_hand(family)


def test_each_function_is_computed():
    found = set().union(*map(computed, OPERATORS), *map(computed_by_hand, SAMPLES))
    assert set(TABLE) | RESHAPES == found | set(NEVER_SPLIT)
