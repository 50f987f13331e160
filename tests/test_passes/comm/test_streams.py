"""The proof of streams holds for what transports really call: each is run by a recorder (tests/streams.py).

For each line, the proof of passes/analysis/verify.py may not assume an order that the transport does not make,
and must know each access. What was recorded has no race by itself. Each call that orders streams is then removed from
the sources, one at a time: all are found.
"""

import ast
import inspect
import itertools
from contextlib import contextmanager, nullcontext
from pathlib import Path

import shardtrace  # noqa: F401
from passes.analysis.recognise import is_products, is_trip
from passes.analysis.verify import COMPUTE, HOST, Streams, Wait, Work, actions, unordered
from passes.comm import cuts, direct, native, quantized, sequence, symbols
from passes.comm.quantized import FP8, INT4, INT8, gather_wire, reduction_wire
from passes.compat.jit import symbol_that_calls
from passes.kernels.aten import symbol_of
from passes.plan import (
    Bucket,
    BucketPlan,
    CostModel,
    Device,
    Link,
    Member,
    Placement,
    PlainRuntime,
    ShardedParameter,
    Wire,
    runtime,
)
from passes.plan.plan import ContextPlan, Split
from passes.schedule import overlap_sequence, wait_copies

import pytest
import torch
from streams import DEVICE, RecordedGroup, makes_future, recorded_host, recording, run
from thunder.core import dtypes, prims
from thunder.core.devices import to_device
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import del_last_used

RANK = 1
SHAPES = [(300, 128), (5,), (90, 640), (), (3, 2**15)]  # padded, small, large, a scalar; one rank has only padding
EVEN = [(8, 2**14), (4, 2**13)]
CUDA = to_device("cuda:0")


def compute_with(values):
    """A line that reads values and makes new ones like them."""
    return COMPUTES(*values)


COMPUTES = symbol_that_calls(
    "compute",
    lambda *values: tuple(TensorProxy(like=v) for v in values),
    lambda *values: tuple(torch.tanh(v) for v in values),
    id="compute",
    is_prim=True,
)


def bucket_of_case(
    recorder, *, shapes=SHAPES, ranks=3, placement=Placement.SHARD, host=False, dtype=None, seats=None, **options
):
    memory = recorded_host() if host else None
    runtime = PlainRuntime(RecordedGroup(recorder, min(RANK, ranks - 1), ranks))
    rest = dtypes.float32
    plan = BucketPlan(
        "M",
        ranks,
        min(RANK, ranks - 1),
        placement=placement,
        host=memory,
        param_dtype=dtype,
        runtime=runtime,
        **options,
    )
    members = tuple(
        Member(
            ShardedParameter(plan, f"p{i}", s, "", dtype=rest, owner=i % ranks, index=i, cut=cut_of(s, i, seats)), True
        )
        for i, s in enumerate(shapes)
    )
    plain = Bucket("root", "b_root", plan, members, plan.unsharded_dtype(rest))
    bucket = plain.carried_by(plan.gather)
    for part in (bucket, bucket.trainable) if seats is not None else ():
        for number, seat in itertools.product(range(len(members)), set(seats)):
            recorder.name_of(part.cuts.positions(number, seat, DEVICE))  # which stay from step to step
    return bucket


def cut_of(shape, number, seats):
    """The part with which a rank computes that shares parameters with others: of rows, or of columns."""
    if seats is None:
        return None
    dim = number % 2
    split = Split(dim, 1, len(set(seats)), shape[dim] // len(set(seats)))
    return sequence.Part(ContextPlan(len(set(seats)), seats[RANK], pieces=1, seats=seats), split)


def program_of(recorder, *, backward=True, **options):
    if "length" in options:
        return sequence_program(recorder, **options)
    if "rows" in options:
        return rows_program(recorder, **options)
    if "away" in options:
        return trip_program()
    return program(bucket_of_case(recorder, **options), backward=backward)


def program(bucket, *, backward):
    """A gather, a reduction and, with host memory, a copy of gradients to the host. Compute goes on between the halves
    of each."""
    trace = TraceCtx()
    host = bucket.plan.host is not None
    with tracectx(trace):
        x = TensorProxy("x", shape=(4,), device=CUDA, dtype=dtypes.float32)
        shards = tuple(
            TensorProxy(
                f"shard_{i}", shape=m.parameter.shard_shape, device=to_device("cpu") if host else CUDA,
                dtype=bucket.rest_dtype,
            )
            for i, m in enumerate(bucket.members)
        )  # fmt: skip
        trace.args = (x, *shards)
        for a in trace.args:
            prims.unpack_trivial(a, name=a.name)
        values = (x,)
        if bucket.plan.placement is Placement.REPLICATE:
            grads = compute_with(shards)
        else:
            op = symbols.GATHER_OF[bucket.plan.placement]
            future = op.issue(shards, bucket)
            values = compute_with(values)
            grads = compute_with(op.wait(future, bucket))
        for op, reduced in reductions(bucket) if backward else ():
            future = op.issue(grads, reduced)
            values = compute_with(values)
            grads = op.wait(future, reduced)
        prims.python_return((*values, *grads))
    return del_last_used(wait_copies(trace))


def sequence_program(recorder, *, length, batch=2, ranks=3, direct=False):
    """Each collective of sequences, on what the one before it has made. Compute goes on between the halves of each."""
    runtime = PlainRuntime(RecordedGroup(recorder, RANK, ranks))
    part = sequence.Part(ContextPlan(ranks, RANK, direct=direct, runtime=runtime), Split.along(2, length))
    trace = TraceCtx()
    with tracectx(trace):
        shape = part.local_shape((batch, 2 * ranks, length, 4))
        trace.args = x, y = [TensorProxy(name, shape=shape, device=CUDA, dtype=dtypes.float32) for name in "xy"]
        for a in trace.args:
            prims.unpack_trivial(a, name=a.name)
        for move in (sequence.TO_HEADS, sequence.TO_POSITIONS, sequence.GATHER, sequence.SCATTER, sequence.SUM):
            moved = move(x, part)
            (y,) = compute_with((y,))
            (x,) = compute_with((moved,))
        prims.python_return((x, y))
    return overlap_sequence(trace)


def rows_program(recorder, *, rows, batch=1, latency=0.0):
    """Two products between a gather of rows and a sum of them, in pieces if links have no latency."""
    cost = CostModel(Link(1e6, latency), Device(1.0, 1.0, bandwidth=1e15, overhead=0.0))
    runtime = PlainRuntime(RecordedGroup(recorder, RANK, 3))
    part = sequence.Part(ContextPlan(3, RANK, pieces=1, runtime=runtime, cost=cost), Split(0, batch, rows, 1))
    mm, trace = symbol_of(torch.ops.aten.mm.default), TraceCtx()
    with tracectx(trace):
        shapes = {"x": part.local_shape((batch * rows, 4)), "w": (4, 4), "v": (4, 4)}
        trace.args = x, w, v = [
            TensorProxy(name, shape=shape, device=CUDA, dtype=dtypes.float32) for name, shape in shapes.items()
        ]
        for a in trace.args:
            prims.unpack_trivial(a, name=a.name)
        (h,) = compute_with((sequence.GATHER(x, part),)) if latency else (sequence.GATHER(x, part),)
        prims.python_return(compute_with((sequence.SCATTER(mm(mm(h, w), v), part), h)))
    return overlap_sequence(trace)


def trip_program():
    """Activations go to the host and come back. Compute goes on between the halves of each copy."""
    trace = TraceCtx()
    with tracectx(trace):
        trace.args = x, y = [TensorProxy(name, shape=(6, 4), device=CUDA, dtype=dtypes.float32) for name in "xy"]
        for a in trace.args:
            prims.unpack_trivial(a, name=a.name)
        values = compute_with((x, y))
        away = symbols.Away("block", recorded_host(), (True, True), 192, values)
        for op in symbols.ACTIVATIONS:
            future = op.issue(values, away)
            (y,) = compute_with((y,))
            values = op.wait(future, away)
        prims.python_return((*compute_with(values), y))
    return del_last_used(trace)


def reductions(bucket):
    yield symbols.REDUCTION_OF[bucket.plan.placement], bucket.trainable
    if bucket.plan.host is not None:
        yield symbols.OFFLOAD, bucket.trainable


class OnesOwn:
    """A wire whose ``finish`` reads what ``issue`` has computed, beside what was received."""

    @staticmethod
    def issue(shards, bucket):
        row = bucket.layout.flat_row(shards)
        return native.gather(row, bucket.layout.row_sizes, bucket), row.neg()

    @staticmethod
    def finish(future, bucket):
        gathered, mine = future
        return tuple(t + mine.sum() for t in bucket.layout.unpack_rows(gathered.wait()))


BF16, EF = dtypes.bfloat16, {"error_feedback": True}
CASES = {
    "native": {},
    "native, one parameter": {"shapes": SHAPES[:1]},
    "native, even": {"shapes": EVEN, "ranks": 2, "averages": True},
    "native, owner": {"placement": Placement.OWNER},
    "native, owner of even": {"placement": Placement.OWNER, "shapes": [(8, 8)] * 3},
    "native, replicated": {"placement": Placement.REPLICATE, "dtype": BF16},
    "native, bf16, sums": {"dtype": BF16, "sums": True},
    "native, one rank": {"ranks": 1},
    "direct": {"direct": True},
    "direct, small": {"direct": True, "shapes": SHAPES[1:2]},
    "direct, large": {"direct": True, "shapes": EVEN, "dtype": BF16},
    "direct, owner": {"direct": True, "placement": Placement.OWNER},
    "direct, replicated": {"direct": True, "placement": Placement.REPLICATE},
    "cuts": {"shapes": EVEN, "ranks": 4, "seats": (0, 1, 0, 1)},
    "cuts, direct": {"shapes": EVEN, "ranks": 4, "seats": (0, 0, 1, 1), "direct": True, "dtype": BF16},
    "quantized": {"gather": gather_wire(INT8), "reduction": reduction_wire(INT4)},
    "quantized, bf16, errors": {"gather": gather_wire(FP8), "reduction": reduction_wire(INT8, **EF), "dtype": BF16},
    "quantized, owner": {
        "gather": gather_wire(INT4), "reduction": reduction_wire(INT8), "placement": Placement.OWNER,
    },
    "quantized, replicated": {"reduction": reduction_wire(INT8), "placement": Placement.REPLICATE},
    "quantized, direct": {"gather": gather_wire(INT8), "reduction": reduction_wire(INT4), "direct": True},
    "host": {"host": True},
    "host, one parameter": {"host": True, "shapes": SHAPES[:1]},
    "host, forward": {"host": True, "backward": False},
    "host, bf16": {"host": True, "dtype": BF16},
    "host, owner": {"host": True, "placement": Placement.OWNER},
    "host, one rank": {"host": True, "ranks": 1},
    "host, one rank, bf16": {"host": True, "ranks": 1, "dtype": BF16},
    "host, a wire of one's own": {"host": True, "gather": Wire(OnesOwn.issue, OnesOwn.finish, lambda bucket: 0)},
    "host, quantized": {"host": True, "gather": gather_wire(INT8), "reduction": reduction_wire(INT8)},
    "sequence": {"length": 12},
    "sequence, padded": {"length": 13},
    "sequence, batch of one": {"length": 12, "batch": 1},
    "sequence, direct": {"length": 12, "direct": True},
    "sequence, direct, padded": {"length": 13, "direct": True},
    "sequence, rows": {"rows": 6, "latency": 1e3},
    "sequence, blocks of rows": {"rows": 6, "batch": 2, "latency": 1e3},
    "sequence, products": {"rows": 12},
    "sequence, products of blocks of rows": {"rows": 12, "batch": 2},
    "host, activations": {"away": True},
}  # fmt: skip


# ---- the proof and the record, side by side ----


def wrong(case):
    """What is wrong with a transport: races in its record, and what the proof assumes of it and does not hold."""
    with recording() as recorder:
        trace = program_of(recorder, **CASES[case])
        run(trace, recorder)
    proof = Streams()
    assumed = list(actions(trace, proof))
    assert unordered(assumed) == []
    events = recorder.events
    streams = streams_of(trace, events)
    memory = memory_of(trace, events, recorder.bound, proof, streams)
    return [
        *(race.message for race in unordered(events)),
        *unknown_accesses(assumed, events, streams, memory),
        *missing_orders(len(trace.bound_symbols), assumed, events, streams),
    ]


def streams_of(trace, events):
    """For each stream of the proof, those of the record that it stands for. A message has a stream of its own there,
    all copies in one direction share one."""
    found = {COMPUTE: {COMPUTE}, HOST: {HOST}}
    for i, bsym in enumerate(trace.bound_symbols):
        if makes_future(bsym):
            there = {e.stream for e in events if e.line == i}
            messages, copies = ({s for s in there if s.startswith(kind)} for kind in ("collective", "stream"))
            found[bsym.output.name] = messages or copies or ({COMPUTE} if not is_trip(bsym) else set())
            found[f"{bsym.output.name}.copy"] = copies
        elif is_products(bsym):
            found[f"products.{i}"] = {e.stream for e in events if e.line == i} - {COMPUTE, HOST}
    return found


def memory_of(trace, events, bound, proof, streams):
    """For each storage of the record, its memory in the proof. Others live in one line."""
    found = {}
    for event in events:
        if event.line >= 0 and isinstance(event, Work) and makes_future(bsym := trace.bound_symbols[event.line]):
            future = bsym.output.name
            is_received = event.stream in streams[future] - {COMPUTE}
            for storage in map(storage_of, event.writes):
                if is_received or storage not in found:
                    found[storage] = f"{future}.received" if is_received else f"{future}.sent"
    for name in [*bound, *(a.name for a in trace.args)]:  # a parameter may be a result, too
        (memory,) = proof.memory([name])
        found |= dict.fromkeys(bound[name], memory)
    return found


def storage_of(part):
    return part.partition(":")[0]


def unknown_accesses(assumed, events, streams, memory):
    """Accesses that the proof does not know."""
    known = {
        (work.line, stream, m, writes)
        for work in assumed
        if isinstance(work, Work)
        for stream in streams[work.stream]
        for m in work.reads | work.writes
        for writes in {False, m in work.writes}
    }
    accesses = {
        (event.line, event.stream, memory[storage_of(part)], part in event.writes)
        for event in events
        if isinstance(event, Work) and event.line >= 0
        for part in event.reads | event.writes
        if storage_of(part) in memory
    }
    return [f"the proof does not know {access}" for access in sorted(accesses - known)]


def missing_orders(lines, assumed, events, streams):
    """Orders that the proof assumes after a line, and that the record has not."""
    work = {}  # of each stream of the record: its lines, and when
    for at, event in enumerate(events):
        if isinstance(event, Work) and event.line >= 0:
            work.setdefault(event.stream, []).append((event.line, at))

    def last(stream, other, line):
        """When the last work of a stream up to a line was enqueued: for a message, before it was posted."""
        posted = (
            min((at for _, at in work.get(stream, ())), default=0) if stream.startswith("collective") else len(events)
        )
        return max((at for known, at in work.get(other, ()) if known <= line and at < posted), default=-1)

    return [
        f"line {line}: {s} does not follow what {o} does in line {until}"
        for line, (mine, theirs) in enumerate(zip(orders(assumed, lines), orders(events, lines), strict=True))
        for stream, clock in mine.items()
        for other, (until, _) in clock.items()
        for s in streams[stream]
        for o in streams[other]
        if stream != other and s != o and theirs.get(s, theirs[HOST]).get(o, (-1, -1))[1] < last(s, o, until)
    ]


def orders(events, lines):
    """After each line, for each stream, what its next work follows: for other streams, their last work's line and
    index among the events."""
    clocks, rest = {HOST: {}}, list(enumerate(events))

    def join(stream, other):
        clock = clocks.setdefault(stream, {})
        for name, when in clocks.get(other, {}).items():
            clock[name] = max(clock.get(name, (-1, -1)), when)

    for line in range(lines):
        while rest and rest[0][1].line <= line:
            at, event = rest.pop(0)
            join(event.stream, HOST)
            if isinstance(event, Wait):
                join(event.stream, event.other)
            elif event.line >= 0:
                clocks[event.stream][event.stream] = line, at
        for stream in clocks:
            join(stream, HOST)  # with its next work
        yield {stream: dict(clock) for stream, clock in clocks.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_proof_holds_for_what_a_transport_calls(case):
    assert wrong(case) == []


# ---- mutants ----

ORDERING = {"wait", "wait_stream", "wait_event", "record", "record_event", "record_stream", "synchronize", "finish"}
ENDS = {"_wait", "mark"}  # of ours: they call the above
SURROUNDING = {"stream", "ahead", "back"}  # with host.ahead(): what is inside runs on another stream
TRANSPORTS = {
    "native": native, "direct": direct, "cuts": cuts, "quantized": quantized,
    "symbols": symbols, "sequence": sequence, "runtime": runtime,
}  # fmt: skip


class Mutant(ast.NodeTransformer):
    """Leaves out the ``wanted``-th call that orders streams. ``found`` tells what it is, and in which function."""

    def __init__(self, wanted):
        self.wanted, self.seen, self.found, self.inside = wanted, 0, None, []

    def chosen(self, node):
        self.seen += 1
        if self.seen - 1 == self.wanted:
            self.found = ast.unparse(node), tuple(self.inside)
        return self.seen - 1 == self.wanted

    def visit_FunctionDef(self, node):
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()
        return node

    visit_ClassDef = visit_FunctionDef

    def visit_Expr(self, node):
        if called(node.value) in ORDERING | ENDS and self.chosen(node):
            return ast.Pass()
        return node if called(node.value) in ORDERING | ENDS else self.generic_visit(node)

    def visit_Call(self, node):
        self.generic_visit(node)
        if called(node) == "mark" and self.chosen(node):
            return ast.parse("DONE_ALREADY", mode="eval").body
        if called(node) == "wait" and self.chosen(node):  # its result is what was received
            return ast.parse(f"{ast.unparse(node.func.value)}.received", mode="eval").body
        return node

    def visit_withitem(self, node):
        if called(node.context_expr) in SURROUNDING and self.chosen(node.context_expr):
            return ast.withitem(ast.parse("nothing()", mode="eval").body)
        return node


def called(node):
    """The name of the method that an expression calls, or of the function of ours."""
    function = node.func if isinstance(node, ast.Call) else None
    name = getattr(function, "id", None)
    return getattr(function, "attr", name if name in ENDS | SURROUNDING else None)


def mutants(module):
    """The mutants of a module, one after the other."""
    tree = lambda: ast.parse(inspect.getsource(module))  # noqa: E731
    count = Mutant(None)
    count.visit(tree())
    for wanted in range(count.seen):
        mutant = Mutant(wanted)
        changed = ast.fix_missing_locations(mutant.visit(tree()))
        yield mutant.found, compile(changed, module.__file__, "exec")


@contextmanager
def mutated(module, inside, code):
    """The function that the names ``inside`` lead to runs the code that it has in a mutated module."""
    function = module
    for name in inside:
        function = getattr(function, name)
        code = next(c for c in code.co_consts if inspect.iscode(c) and c.co_name == name)
    function = inspect.unwrap(function)
    before, function.__code__ = function.__code__, code
    names = {"DONE_ALREADY": runtime.DONE, "nothing": nullcontext}
    function.__globals__.update(names)
    try:
        yield
    finally:
        function.__code__ = before
        for name in names:
            del function.__globals__[name]


def first_cases(transport):
    """A part of the names of those that are likely to find its mutants."""
    names = {"native", "direct", "cuts", "quantized", "sequence"}
    return transport if transport in names else "host"


def test_each_call_that_orders_streams_is_needed():
    """Each is left out of the sources, one at a time. All are found, by a case that then fails."""
    survivors, all_of = [], {}
    for name, module in TRANSPORTS.items():
        for (what, inside), code in mutants(module):
            all_of[name] = all_of.get(name, 0) + 1
            with mutated(module, inside, code):
                if not any(wrong(case) for case in sorted(CASES, key=lambda case: first_cases(name) not in case)):
                    survivors.append(f"{name}.{'.'.join(inside)}: {what}")
    print(f"mutants, all found: {sum(all_of.values())}, {all_of}")
    assert survivors == []
    assert all_of.keys() == TRANSPORTS.keys()


def test_no_other_file_orders_streams():
    """Everything that transports call is in the files whose mutants are made."""
    passes = Path(native.__file__).parents[1]
    calling = {
        file.stem
        for file in (*passes.glob("comm/*.py"), *passes.glob("plan/*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if called(node) in ORDERING - {"finish", "record"} | ENDS
    }
    assert calling <= TRANSPORTS.keys()
