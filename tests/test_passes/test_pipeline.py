import gc
import inspect
import time
from unittest import mock

import shardtrace
from passes import Bucket, Pass, PassAfterLowering, PassBeforeAutodiff, VerificationError, Wire
from passes.analysis.recognise import is_collective, is_gather, is_issue
from passes.pipeline import AFTER_LOWERING, BEFORE_AUTODIFF, Compilation, Facts, pipeline
from shardtrace.model import tracing

import pytest
import thunder
import torch
from golden import compile_fake, text
from models import Block, Zoo, tokens
from ranks import on_ranks
from thunder.core import dtypes
from thunder.core.proxies import variableify
from thunder.core.trace import from_trace, tracectx
from thunder.core.transform_common import Transform
from torch import nn


def ours(traces):
    return [
        str(t.get_provenance()).split("shardtrace: ")[1].split()[0]
        for t in traces
        if "shardtrace" in str(t.get_provenance())
    ]


def linear():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_every_pass_shows_up_by_name(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(linear, torch.ones(2, 4))
    assert ours(thunder.last_traces(cmodel)) == ["shard_parameters", "insert_synchronize", "regather", "schedule"]
    assert ours(thunder.last_backward_traces(cmodel)) == ["schedule"]


def test_zero2_needs_no_regather(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(linear, torch.ones(2, 4), sharding_strategy="zero2")
    assert "regather" not in ours(thunder.last_traces(cmodel))


def test_added_once_with_the_users_passes_before_schedule_and_other_transforms_after(fake_ranks):
    fake_ranks(2)

    class Other(Transform):
        def __repr__(self):
            return "other"

    def early(computation):
        return computation

    def late(trace):
        return trace

    transforms = [Other(), PassAfterLowering(late), PassBeforeAutodiff(early)]
    cmodel = thunder.jit(shardtrace.fsdp(linear()), transforms=transforms)
    for rows in (1, 2, 3):
        cmodel(torch.ones(rows, 4))
    names = [str(t).removeprefix("shardtrace.") for t in thunder.compile_data(cmodel).transforms]
    before, after = (
        ["shard_parameters", "delay_writes", "insert_synchronize", "keep_random", "checkpoint_activations", "regather"],
        ["save_shards", "keep_secondary", "offload_activations", "share_fusions", "accumulate"],
    )
    scheduled = [
        "overlap_sequence",
        "schedule",
        "wait_copies",
        "drop_unused",
        "verify_schedule",
        "verify_memory",
        "compare_ranks",
    ]
    assert names == [*before, *after, "late", "early", "outline", *scheduled, "other", "prove_step"]


ENTRIES = (*BEFORE_AUTODIFF, *AFTER_LOWERING)
OPTIONAL = [entry.name for entry in ENTRIES if not entry.needed]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_pass_states_its_contract_and_takes_facts(entry):
    assert entry.does.endswith(".")
    if entry.name != "your passes":
        parts = [line.partition(":")[0] for line in inspect.getdoc(entry.run).splitlines()]
        assert [part for part in parts if part in ("Takes", "Gives", "No-op when")] == ["Takes", "Gives", "No-op when"]
    _, *given = inspect.signature(entry.run).parameters.values()
    assert {p.kind for p in given} <= {inspect.Parameter.KEYWORD_ONLY}
    facts = {p.name for p in given if p.default is p.empty}
    assert facts <= Facts.__dataclass_fields__.keys() | {"inner"}


def trained(disable, blocks):
    """Losses and parameters after two steps without these passes, and the names of those that changed a trace."""
    changed = set()

    def observed(compilation, transforms, **options):
        return pipeline(compilation, transforms, **options | {"observe": lambda what, name, trace: changed.add(name)})

    torch.manual_seed(0)
    with mock.patch.object(tracing, "pipeline", observed):
        policy = shardtrace.CompilePolicy(repeated_blocks=blocks, disable_passes=disable)
        model = shardtrace.fsdp(Zoo(), activation_checkpointing=Block, compile_policy=policy)
        cmodel, optimizer = thunder.jit(model), torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(2):
            loss = cmodel(*tokens(4, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [*losses, *shardtrace.full_state_dict(model).values()], changed


@on_ranks(2)
def test_training_without_a_pass_that_can_be_disabled_gives_the_same_numbers():
    wanted, changed = trained([], "inline")
    assert {"merge_checks", "checkpoint_activations", "schedule", "compare_ranks"} <= changed
    for names, blocks in (*(([name], "inline") for name in OPTIONAL if name in changed), (OPTIONAL, "once")):
        found, left = trained(names, blocks)
        assert left.isdisjoint(names)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), names


def test_what_is_needed_is_not_disabled():
    can = f"Those that can be disabled are {', '.join(OPTIONAL)}"
    with pytest.raises(ValueError, match=rf"there is no pass 'shcedule'. {can}"):
        pipeline(Compilation(), disable=["schedule", "shcedule"])
    with pytest.raises(ValueError, match=rf"'regather' is needed \(ZeRO-3 would save gathered parameters\). {can}"):
        pipeline(Compilation(), disable=["regather"])


def test_a_call_without_the_model_has_no_facts_of_the_last_one(fake_ranks):
    fake_ranks(2)
    sharded, plain = shardtrace.fsdp(nn.Linear(2, 2)), nn.Linear(2, 2)
    step = thunder.jit(lambda x, shard: sharded(x) if shard else plain(x))
    step(torch.ones(1, 2), True)
    step(torch.ones(1, 2), False)
    assert "check_value" not in text(thunder.last_prologue_traces(step)[-1])


def test_garbage_is_looked_for_rarely_while_a_step_is_compiled_and_no_longer(fake_ranks):
    fake_ranks(2)
    seen = []

    def looks(trace):
        seen.append(gc.get_threshold()[0])
        if len(seen) == 3:
            raise KeyError("of a pass")
        return trace

    before = gc.get_threshold()
    model = thunder.jit(shardtrace.fsdp(linear()), transforms=[PassAfterLowering(looks)])
    model(torch.ones(1, 4)).sum().backward()
    assert seen == [100_000, 100_000]  # forward and backward
    assert gc.get_threshold() == before
    with pytest.raises(KeyError, match="of a pass"):
        model(torch.ones(2, 4))
    assert gc.get_threshold() == before


@pytest.mark.parametrize("young", [0, 1_000_000])
def test_a_script_that_looks_more_rarely_does_so(fake_ranks, young):
    """0: never."""
    fake_ranks(2)
    before = gc.get_threshold()
    gc.set_threshold(young, 2, 2)
    try:
        looks = []
        note = PassAfterLowering(lambda trace: looks.append(gc.get_threshold()) or trace)
        thunder.jit(shardtrace.fsdp(linear()), transforms=[note])(torch.ones(1, 4))
        assert {gc.get_threshold(), *looks} == {(young, 2, 2)}
    finally:
        gc.set_threshold(*before)


def swapped_tanh(computation):
    """A user's pass before autodiff: sin in place of tanh."""
    if not any(b.sym.name == "torch_tanh_0" for b in computation.bound_symbols):
        return computation
    new = from_trace(computation)
    for bsym in computation.bound_symbols:
        if bsym.sym.name == "torch_tanh_0":
            with tracectx(new):
                new.push_scope([])
                result = thunder.torch.sin(*bsym.args)
                (bsym,) = (b.from_bsym_swap_proxies({variableify(result): bsym.output[0]}) for b in new.pop_scope())
        new.bound_symbols.append(bsym)
    return new


def test_a_users_pass_before_autodiff_is_differentiated(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        torch.ones(2, 4),
        transforms=[PassBeforeAutodiff(swapped_tanh)],
        checks=shardtrace.Checks(prove=False),  # it is another program
    )
    assert ours(thunder.last_traces(cmodel))[2:4] == ["regather", "swapped_tanh"]
    assert "torch.cos(" in text(thunder.last_backward_traces(cmodel)[-1])


def on_wire(wire, concerns=is_gather):
    """A pass after lowering that sends the collectives which it ``concerns`` by ``wire``."""
    buckets = {}

    def carried(trace):
        if not any(map(concerns, trace.bound_symbols)):
            return trace
        new = from_trace(trace)
        for bsym in trace.bound_symbols:
            if concerns(bsym):
                old = bsym.args[1]
                other = Bucket(old.label, f"{old.name}_half", old.plan, old.members, dtypes.float16, wire)
                bsym = bsym.from_bsym(args=(bsym.args[0], buckets.setdefault(old, other)))
            new.bound_symbols.append(bsym)
        return new

    return carried


HALF = Wire(
    issue=lambda shards, bucket: torch.cat([s.flatten() for s in shards]).half().repeat(bucket.plan.world_size),
    finish=lambda rows, bucket: bucket.layout.unpack_rows(rows.float()),
    bytes=lambda bucket: 2 * bucket.full_numel,
)


def test_a_users_pass_after_lowering_is_named_and_scheduled(fake_ranks):
    fake_ranks(2)
    cmodel = compile_fake(linear, torch.ones(2, 4), transforms=[PassAfterLowering(on_wire(HALF))])
    assert ours(thunder.last_traces(cmodel))[-2:] == ["carried", "schedule"]
    assert ours(thunder.last_backward_traces(cmodel)) == ["carried", "schedule"]
    rows = shardtrace.collectives(cmodel)
    assert {(r.kind, r.dtype, r.bytes) for r in rows} == {("all_gather", "f16", 40), ("reduce_scatter", "f32", 80)}
    first = next(line for line in shardtrace.memory(cmodel).forward.lines if line.in_flight)
    assert first.in_flight == 40
    assert "f16" in str(shardtrace.inspect(cmodel).collectives[0])


def test_what_a_users_pass_breaks_is_told_by_its_name(fake_ranks):
    fake_ranks(2)
    everything = PassAfterLowering(on_wire(HALF, is_collective))
    with pytest.raises(
        VerificationError, match="after pass carried: bucket 1 is reduced, but its wire can only gather"
    ):
        compile_fake(linear, torch.ones(2, 4), transforms=[everything])
    issues = PassAfterLowering(on_wire(HALF, is_issue))
    with pytest.raises(VerificationError, match=r"after pass carried: future \w+ is of another bucket"):
        compile_fake(linear, torch.ones(2, 4), transforms=[issues])

    def lose_waits(trace):
        new = from_trace(trace)
        new.bound_symbols = [b for b in trace.bound_symbols if b.sym.name != "wait_reduce_scatter"]
        return new

    with pytest.raises(VerificationError, match=r"after pass lose_waits: future \w+ is never waited for"):
        compile_fake(linear, torch.ones(2, 4), transforms=[PassAfterLowering(lose_waits)])


def test_our_passes_and_verify_take_less_than_a_tenth_of_the_compile_time(fake_ranks):
    fake_ranks(2)
    cmodel = thunder.jit(shardtrace.fsdp(Zoo()))

    def share(rows):
        start = time.perf_counter()
        cmodel(*tokens(rows))  # a new shape: traced anew
        total = time.perf_counter() - start
        return (
            sum(
                t.seconds
                for t in thunder.compile_data(cmodel).transforms
                if isinstance(t, Pass) and t.name != "prove_step"
            )
            / total
        )

    # the minimum of a few: garbage collection during a pass counts for the pass
    assert 0 < min(share(rows) for rows in (2, 3, 4)) < 0.1
