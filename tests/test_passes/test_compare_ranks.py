"""The place of the line with which ranks check that they run the same step. (Its effect: test_failure.py.)"""

from passes.analysis.recognise import is_deletion, is_unpack
from passes.borders import insert_checks
from passes.plan import Gradients, PlainRuntime, Progress, Step

import thunder
from golden import compile_fake
from thunder.core.trace import TraceCtx
from torch import nn, ones


class Recording(PlainRuntime):
    """Records the steps that it was asked to compare."""

    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self.progress, self.compares = progress, progress is not None
        self.compared: list[Step] = []

    def compare_step(self, step: Step) -> None:
        self.compared.append(step)


def test_where_a_step_begins_and_ends(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(lambda: nn.Linear(4, 4), ones(2, 4))
    forward, backward = thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]
    progress, step = Progress(), Step(Gradients.REDUCED, ["all_gather"])
    runtime = Recording(progress)
    new = insert_checks(forward, {runtime: step})
    names = [b.sym.name for b in new.bound_symbols]
    assert names.index("check_ranks") == names.index("all_gather") - 1
    assert set(names[: names.index("check_ranks")]) == {"unpack_trivial"}
    assert names[-2:] == ["note", "python_return"]
    run(new, "check_ranks")
    assert runtime.compared == [step]
    progress.begin(step, "forward")
    run(new, "note")
    assert str(progress) == "after forward"

    new = insert_checks(backward, {runtime: step})
    names = [b.sym.name for b in new.bound_symbols if not is_unpack(b) and not is_deletion(b)]
    assert (names[0], names[-2:]) == ("note", ["note", "python_return"])
    assert run(new, "note") == ["in backward, 0 collectives sent", "after backward"]


def run(trace: TraceCtx, name: str) -> list[str]:
    """The position of a rank after each line of that name."""
    places = []
    for bsym in trace.bound_symbols:
        if bsym.sym.name == name:
            bsym._call_ctx[name](bsym.args[0])
            places.append(str(bsym.args[0].obj.func.__self__) if name == "note" else "")
    return places


def test_a_step_that_sends_nothing_is_nowhere():
    progress, step = Progress(), Step(None)
    progress.begin(step, "forward")
    progress.end(step)
    assert str(progress) == "after start"


def test_not_where_it_is_not_wanted(fake_ranks):
    fake_ranks(2)
    forward = thunder.last_traces(compile_fake(lambda: nn.Linear(4, 4), ones(2, 4)))[-1]
    assert insert_checks(forward, {Recording(None): Step(Gradients.REDUCED)}) is forward
