"""The table of dims, against torch: what two ranks compute of parts makes the whole.

``DIMS_SAMPLES=200`` runs that many samples of each of torch's operators, for minutes, instead of the first useful one.
"""

import math
import os
from functools import cache
from itertools import islice, product

from passes.analysis.dims import Placed, TorchLine, follow, lead, resized, torch_line
from passes.comm.sequence import Part, cut, gather_parts, local_part, scatter_parts
from passes.plan.dims import RESHAPES, TABLE, canonical, is_linear, moved
from passes.plan.dims.table import relation
from passes.plan.plan import ContextPlan, Split
from shardtrace import fsdp

import pytest
import thunder
import torch
import torch.testing._internal.common_methods_invocations as database
from dim_samples import SAMPLES, b, n, x
from dims import again, calls_of, check

FULL = int(os.environ.get("DIMS_SAMPLES", "0"))
MOST = FULL or 30  # samples of an operator, of which the first useful one is enough
DATABASE = {op.formatted_name: op for op in database.op_db if not op.name.startswith(("jiterator", "masked."))}
# operators whose methods torch.overrides may know by another name, such as Tensor.__iadd__ by that of Tensor.add_
OTHER_NAMES = (
    *("pos", "mod", "truediv", "radd", "rmul", "rdiv", "ror", "rxor", "iadd", "isub", "imul", "idiv", "itruediv"),
    *("ifloordiv", "imod", "imatmul"),
)
# and a symbol of Thunder's, and a function for which torch calls another
NEVER_COMPUTED = {*OTHER_NAMES, "prims.broadcast_in_dim", "nn.functional.upsample"}
if not hasattr(torch.nn.functional, "grouped_mm"):  # this torch has none
    NEVER_COMPUTED.add("nn.functional.grouped_mm")


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
    found, op = set(), DATABASE[name]
    given = samples(op)
    for function in ways_to_call(op) if FULL else (op.op, *(alias.op for alias in op.aliases)):
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


@cache
def chosen():
    """The operators that are run: without DIMS_SAMPLES, those without a sample of our own."""
    wanted = (set(TABLE) | RESHAPES).difference(*map(computed_by_hand, SAMPLES))
    names = {key: {op.name, *(alias.name for alias in op.aliases)} for key, op in DATABASE.items()}
    return [key for key, known in names.items() if FULL or wanted & set(map(canonical, known))]


@pytest.mark.parametrize("family", SAMPLES)
def test_samples(family):
    assert computed_by_hand(family)


@pytest.mark.parametrize("part", range(20))
def test_database(part):
    for name in chosen()[part::20]:
        computed(name)


def test_each_function_is_computed():
    found = set().union(*map(computed, chosen()), *map(computed_by_hand, SAMPLES))
    assert (set(TABLE) | RESHAPES) - found <= NEVER_COMPUTED


# ---- what is told ----


def call(function, *args, **kwargs):
    return calls_of(function, *args, **kwargs)[0].line


LINEAR = call(torch.nn.functional.linear, x(2, 6, 8), x(5, 8))


@pytest.mark.parametrize(
    ("number", "split", "placed"),
    [
        (0, Split.along(1, 6), Placed((Split.along(1, 6), None), (Split.along(1, 6),))),
        (0, Split(1, 2, 3, 1), Placed((Split(1, 2, 3, 1), None), (Split(1, 2, 3, 1),))),
        (0, Split.along(2, 8), Placed((Split.along(2, 8), Split.along(1, 8)), (None,), "sum")),
        (1, Split.along(0, 5), Placed((None, Split.along(0, 5)), (Split.along(2, 5),))),
        (0, Split.along(1, 7), None),  # not this size
    ],
)
def test_follow(number, split, placed):
    assert follow(LINEAR, number, split) == placed


def test_a_bias_is_not_added_twice():
    assert follow(call(torch.nn.functional.linear, x(2, 8), x(5, 8), x(5)), 0, Split.along(1, 8)) is None


def test_lead():
    split = Split.along(2, 5)
    assert lead(LINEAR, 0, split) == Placed((None, Split.along(0, 5)), (split,))
    assert lead(call(torch.zeros, 4, 6), 0, Split.along(1, 6)) == Placed((), (Split.along(1, 6),))
    assert lead(call(torch.Tensor.expand, x(6, 1), 4, 6, 8), 0, Split.along(0, 4)) == Placed(
        (None,), (Split.along(0, 4),)
    )


def test_a_dtype_is_taken_from_any_part():
    line = call(torch.Tensor.type_as, x(6), x(4, 8))
    assert follow(line, 1, Split.along(0, 4)) == Placed((None, Split.along(0, 4)), (None,))


@pytest.mark.parametrize("family", ["operators", "casts", "reshapes", "moves", "indices", "reductions", "products"])
def test_linear_functions_are_linear(family):
    """In each operand, and in all together, if the table says so."""
    found = set()
    for made in (m for sample in SAMPLES[family] for m in calls_of(sample)):
        operands, results = made.line.operands, made.line.results
        every = [i for i, t in enumerate(operands) if t.dtype.is_floating_point]
        for given in (every, *([i] for i in every[: len(every) * (len(every) > 1)])):
            if (
                len(results) == 1
                and results[0].dtype.is_floating_point
                and is_linear(made.line.name, len(operands), given)
            ):
                other = [torch.rand_like(t) if i in given else t for i, t in enumerate(operands)]
                both = [a + b if i in given else a for i, (a, b) in enumerate(zip(operands, other, strict=True))]
                torch.testing.assert_close(again(made, both), results[0] + again(made, other))
                found.add(made.line.name)
    assert found


@pytest.mark.parametrize(
    ("old", "split", "new", "wanted"),
    [
        ((2, 6, 8), Split.along(1, 6), (12, 8), Split(0, 2, 6, 1)),
        ((12, 8), Split(0, 2, 6, 1), (2, 6, 8), Split.along(1, 6)),
        ((2, 6, 8), Split.along(1, 6), (96,), Split(0, 2, 6, 8)),
        ((2, 6, 8), Split.along(1, 6), (2, 48), Split(1, 1, 6, 8)),
        ((2, 6, 8), Split.along(1, 6), (2, 1, 6, 2, 4), Split.along(2, 6)),
        ((2, 6, 8), Split.along(1, 6), (2, 2, 3, 8), None),  # the sequence would be divided
        ((2, 6, 8), Split.along(1, 6), (6, 2, 8), None),  # a size that is equal by chance
        ((2, 6, 8), Split.along(2, 8), (2, 6, 2, 4), None),
        ((2, 1, 8), Split.along(1, 1), (2, 8), None),  # no sequence
    ],
)
def test_moved(old, split, new, wanted):
    assert moved(split, old, new) == wanted


ALL = slice(None)


@pytest.mark.parametrize(
    ("function", "args", "shape", "wanted"),
    [
        (torch.Tensor.view, (2, 6, 2, 4), (2, 3, 2, 4), ((2, 3, 2, 4),)),
        (torch.Tensor.view, (2, -1), (2, 24), ((2, 24),)),
        (torch.Tensor.flatten, (1,), (2, 24), (1,)),
        (torch.Tensor.expand, (4, 2, 6, 8), (4, 2, 3, 8), ((4, 2, 3, 8),)),
        (torch.Tensor.repeat, (4, 1, 1, 2), (2, 2, 6, 16), ((2, 1, 1, 2),)),
        (torch.Tensor.new_full, ((4, 5), 3.0), (2, 5), ((2, 5), 3.0)),
        (torch.Tensor.narrow, (1, -6, 6), (2, 3, 8), (1, 0, 3)),
        (torch.Tensor.narrow, (2, 1, 6), (2, 3, 6), (2, 1, 6)),
        (torch.Tensor.__getitem__, ((..., slice(-6, None), slice(1, 3)),), (2, 3, 2), ((ALL, ALL, slice(1, 3)),)),
        (torch.Tensor.__getitem__, ((None, 1, slice(0, 9)),), (1, 3, 8), ((None, 1, ALL, ALL),)),
        (torch.Tensor.unflatten, (2, (2, 4)), (2, 3, 2, 4), (2, (2, 4))),
        (torch.Tensor.sum, (1,), (2, 8), (1,)),
    ],
)
def test_resized(function, args, shape, wanted):
    line = call(function, x(2, 6, 8), *args)
    found, named = resized(line, [shape])
    assert (*found[1:], *named.values()) == wanted


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.Tensor.__getitem__, (x(4, 6), b(4, 6))),  # as many results as there are True
        (torch.nn.functional.one_hot, (n(4, 6),)),  # the classes are counted
        (torch.nn.functional.cross_entropy, (x(4, 5), n(4))),  # some labels may be ignored
        (torch.nn.functional.linear, (2, 3)),
        (torch.where, (b(4, 6),)),
        (torch.Tensor.view, (x(4, 6), torch.int32)),
        (torch.linspace, (0, 1, 5)),
    ],
)
def test_nothing_is_guessed(function, args):
    assert relation(canonical(torch.overrides.resolve_name(function)), args, {}, [(4, 6)]) is None


# ---- lines of traces ----


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)
        self.function = function

    def forward(self, t):
        return self.function(self.fc(t))


def lines_of(function):
    """The lines of a function after a linear layer, for whose result of 2 x 6 x 8 it is called."""
    compiled = thunder.jit(fsdp(Model(function)))
    compiled(x(2, 6, 8))
    found = [torch_line(bsym) for bsym in thunder.last_traces(compiled)[0].bound_symbols]
    return [line for line in found if line is not None]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda t: torch.nn.functional.gelu(t) + 1, ["nn.functional.gelu", "add"]),
        (lambda t: 2 - t.softmax(-1), ["nn.functional.softmax", "rsub"]),
        (lambda t: t.relu_().bfloat16(), ["nn.functional.relu", "to"]),
        (lambda t: t[:, 1:].mT, ["getitem", "permute"]),
        (lambda t: t.view(12, 8).amax(-1), ["view", "amax"]),  # from here on calls of torch
        (lambda t: t.clamp_(0, 1), ["clamp"]),
        (lambda t: 2**t, ["rpow"]),
        (lambda t: torch.special.erfcx(t).logcumsumexp(1), ["special.erfcx", "logcumsumexp"]),
        (lambda t: torch.nn.functional.hardtanh(t, inplace=True), ["nn.functional.hardtanh"]),
        (lambda t: torch.einsum("bsd,btd->bst", t, t), ["einsum"]),
        (lambda t: torch.cat([t, t], dim=1), ["cat"]),
    ],
)
def test_lines(function, names, single_rank):
    first, *lines = lines_of(function)
    assert first.name == "nn.functional.linear"
    assert [line.name for line in lines] == names
    for line in lines:
        assert line.operands
        for number in range(len(line.operands)):
            assert line.operands[number].shape[0] in (2, 12)
            split = Split(0, line.operands[number].shape[0] // 2, 2, 1)
            assert line.name == "view" or follow(line, number, split) is not None


RANKS, OTHERS = 2, 3  # of rows, and of parts of the sequence
CUT_TWICE = {  # the shape, how ranks cut rows, how the sequence is split, and how that of rows is
    "chunks": ((2, 24, 5), Split(1, 6, 2, 2), Split.along(1, 24), Split.along(1, 12)),
    "chunks of several blocks": ((1, 48), Split(1, 12, 2, 2), Split.along(1, 48), Split.along(1, 24)),
    "sequences one behind the other": ((3 * 12, 2), Split(0, 18, 2, 1), Split(0, 3, 12, 1), Split(0, 3, 6, 1)),
    "whole sequences": ((4 * 12, 2), Split(0, 1, 2, 24), Split(0, 4, 12, 1), Split(0, 2, 12, 1)),
    "whole sequences, padded": ((4 * 13, 2), Split(0, 1, 2, 26), Split(0, 4, 13, 1), Split(0, 2, 13, 1)),
    "a chunk lies across sequences": ((3 * 12, 2), Split(0, 6, 2, 3), Split(0, 3, 12, 1), None),
    "a batch that does not divide": ((3 * 12, 2), Split(0, 1, 2, 18), Split(0, 3, 12, 1), None),
    "chunks that do not divide": ((1, 12), Split(1, 6, 2, 1), Split(1, 1, 4, 3), None),
}


@pytest.mark.parametrize("case", CUT_TWICE)
def test_a_part_of_a_sequence_has_a_part_of_the_rows(case):
    shape, rows, sequence, of_rows = CUT_TWICE[case]
    x = torch.arange(math.prod(shape)).reshape(shape)
    for rank, other in product(range(RANKS), range(OTHERS)):
        part = Part(ContextPlan(RANKS, rank, pieces=1, within=2 * OTHERS), rows)
        plan = ContextPlan(OTHERS, other)
        y = local_part(x, part)
        for symbol, whole, after in ((cut, x, y), (gather_parts, y, x), (scatter_parts, x, y)):
            line = TorchLine(symbol.id, (whole, part), {}, (whole,), (after,))
            given, expected = (sequence, of_rows) if whole is x else (of_rows, sequence)
            if given is None:
                continue
            placed = None if of_rows is None else Placed((given,), (expected,))
            assert follow(line, 0, given) == placed
            if expected is not None:
                assert lead(line, 0, expected) == placed
        if of_rows is not None:
            first, then = local_part(x, Part(plan, sequence)), local_part(y, Part(plan, of_rows))
            (_, local), _ = resized(TorchLine(cut.id, (x, part), {}, (x,), (y,)), [tuple(then.shape)])
            assert torch.equal(local_part(first, local), then)
