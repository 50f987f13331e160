"""The line that lets ranks check that they run the same step: where it stands. (What it does: test_failure.py.)"""

import dataclasses

from passes.meet import meet
from passes.plan import Enlisted, Gradients, ShardedParameter, Step

import thunder
from golden import compile_fake
from thunder.core.trace import TraceCtx
from torch import nn, ones


def enlisted(trace: TraceCtx, **changes) -> Enlisted:
    found = Enlisted()
    bucket = next(b.args[1] for b in trace.bound_symbols if b.sym.name == "all_gather")
    plan = dataclasses.replace(bucket.plan, **changes)
    found.add(object(), ShardedParameter(plan, "weight", (4, 4), ""))
    found.steps[plan] = Step(Gradients.REDUCED)
    return found


def test_first_line_of_forward(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(lambda: nn.Linear(4, 4), ones(2, 4))
    forward, backward = thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]
    met = []
    wanted = enlisted(forward, meet=met.append)
    new = meet(forward, enlisted=wanted)
    names = [b.sym.name for b in new.bound_symbols]
    assert names.index("check_ranks") == names.index("all_gather") - 1
    assert set(names[: names.index("check_ranks")]) == {"unpack_trivial"}
    line = new.bound_symbols[names.index("check_ranks")]
    line._call_ctx["check_ranks"](line.args[0])
    assert met == list(wanted.steps.values())
    assert meet(backward, enlisted=wanted) is backward


def test_not_where_it_is_not_wanted(fake_ranks):
    fake_ranks(2)
    forward = thunder.last_traces(compile_fake(lambda: nn.Linear(4, 4), ones(2, 4)))[-1]
    assert meet(forward, enlisted=enlisted(forward, meet=None)) is forward
