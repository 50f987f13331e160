"""Collectives that do something else than their laws say are found without another rank."""

import functools

import shardtrace  # isort: split

from dataclasses import replace
from functools import partial
from types import FunctionType

from passes.analysis.recognise import AWAITED, is_issue
from passes.comm import cuts, direct, native, quantized, sequence
from passes.kernels.parts import LossOfParts, PartOfEmbedding, PartOfLoss
from passes.plan import bucket as layout
from passes.proof import certificates
from shardtrace import CommPolicy, ContextParallel
from shardtrace.model import state
from shardtrace.ranks.mesh import Transport
from shardtrace.testing import compile_only, fake_ranks

import pytest
import thunder
import torch
from contexts import VOCAB, Mixture, hugging_face, inside, of_hugging_face
from thunder.core import transforms
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_flatten, tree_unflatten

WIRES = {"comm_policy": CommPolicy(gather_dtype="int8", reduce_wire="int8")}


@pytest.fixture(autouse=True)
def forgotten():
    """What other tests have found, and what this one finds, is not kept."""
    kept = (certificates._found, certificates._found_of_sequence, certificates._found_of_gradient)
    for found in kept:
        found.cache_clear()
    yield
    for found in kept:
        found.cache_clear()


def proof_of(**options):
    """Over the messages of gloo; what other backends run is chosen by a patch of ``transport``."""
    with fake_ranks(4):
        model = nn.Sequential(nn.Linear(40, 500), nn.Tanh(), nn.Linear(500, 40))
        jitted = thunder.jit(shardtrace.fsdp(model, checks=shardtrace.Checks(prove=False), **options))
        jitted(torch.randn(2, 40))
        return shardtrace.prove(jitted)


@pytest.fixture(scope="module")
def proof_of_sequence():
    """A proof of a step that is compiled once for each kind of attention: its collectives are run at each proof."""

    @functools.cache
    def compiled(attention):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "inner"))
        if attention == "tensor":
            options = {"tensor_parallel": "inner"}
        else:
            options = {"context_parallel": ContextParallel("inner", attention=attention.replace("experts", "auto"))}
        build = Mixture if attention == "experts" else partial(hugging_face, "Llama")
        model = shardtrace.fsdp(build(), mesh=mesh, checks=shardtrace.Checks(prove=False), **options)
        jitted = thunder.jit(model)
        x = torch.randint(1, VOCAB, (2, 13))
        (inside if attention == "experts" else of_hugging_face)(jitted, x, x)
        return jitted

    with fake_ranks(4):
        yield lambda attention: shardtrace.prove(compiled(attention))


def changed(owner, name, wrong):
    """A patch: ``wrong`` gets what the function returns, then its arguments."""
    right = getattr(owner, name)
    return owner, name, lambda *args, **kwargs: wrong(right(*args, **kwargs), *args, **kwargs)


WRONG = {
    "native divides twice": ("native", changed(native, "_divided", lambda row, *args: row / 2)),
    "messages forget a rank": ("direct", (direct, "_mean", lambda mine, others, share: mine * share)),
    "an all_reduce is not divided": ("ddp", changed(native, "_packed", lambda found, *args: (found[0] * 2, found[1]))),
}
OPTIONS = {"direct": {}, "native": {}, "ddp": {"sharding_strategy": "ddp"}}


@pytest.mark.parametrize("what", WRONG)
def test_a_collective_that_breaks_its_law_is_found(what, monkeypatch):
    options, patch = WRONG[what]
    if options == "native":
        monkeypatch.setattr(state, "transport", lambda group, devices: Transport(direct=False, averages=False))
    assert proof_of(**OPTIONS[options]).verdict in ("proven", "rounding")
    certificates._found.cache_clear()
    monkeypatch.setattr(*patch)
    assert "does not do what its law says: rank" in str(proof_of(**OPTIONS[options]))


BACKEND = Transport(direct=False, averages=False)
CASES = {  # the transport (None: gloo's messages), and options
    "messages": (None, {}),
    "backend": (BACKEND, {}),
    "ddp": (BACKEND, {"sharding_strategy": "ddp"}),
    "owner": (None, {"sharding_strategy": "owner"}),
    "wires": (None, WIRES),
    "wires of the backend": (BACKEND, WIRES),
    "wire of ddp": (BACKEND, {"sharding_strategy": "ddp", "comm_policy": CommPolicy(reduce_wire="int8")}),
    "parts": (None, {"tensor_parallel": "inner"}),
}
BROKEN = {"doubled": lambda t: t * 2, "in another order": lambda t: t.flatten().roll(1).view(t.shape)}


def cases_of(monkeypatch, transport, options):
    """The cases of the collectives of a step."""
    with fake_ranks(4), monkeypatch.context() as patched:
        if transport is not None:
            patched.setattr(state, "transport", lambda group, devices: transport)
        mesh = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "inner")) if "tensor_parallel" in options else None
        )
        model = nn.Sequential(nn.Linear(40, 500), nn.Tanh(), nn.Linear(500, 40))
        jitted = thunder.jit(shardtrace.fsdp(model, mesh=mesh, checks=shardtrace.Checks(prove=False), **options))
        compile_only(jitted, ((torch.randn(2, 40),), {}))
    found = []
    for traces in (thunder.last_traces(jitted), thunder.last_backward_traces(jitted)):
        lines = traces[-1].bound_symbols
        waits = {b.args[0].name: b for b in lines if b.sym.id in AWAITED}
        found += [certificates._case(b, waits[b.output.name]) for b in lines if is_issue(b)]
    return found


def functions_of_transports():
    modules = (native, direct, cuts, quantized)
    classes = [
        c for m in (layout, quantized) for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__
    ]
    for owner in (*modules, *classes):
        for name, function in list(vars(owner).items()):
            if isinstance(function, FunctionType) and not name.startswith("__"):
                yield owner, name, function


def with_tensors(value, change):
    """A tensor, or those in a list or tuple, changed; a future as it is."""
    flat, spec = tree_flatten(value, is_leaf=lambda v: hasattr(v, "_fields"))
    is_float = [isinstance(t, torch.Tensor) and t.is_floating_point() and len(t) > 1 for t in flat]
    return tree_unflatten([change(t) if may else t for t, may in zip(flat, is_float, strict=True)], spec)


def test_each_function_of_the_transports_does_as_the_law_says(monkeypatch):
    """Each that gives a tensor gives it doubled, then in another order, to the collectives that call it."""
    monkeypatch.setattr(certificates, "PATIENCE", 5.0)
    cases = dict.fromkeys(case for setting in CASES.values() for case in cases_of(monkeypatch, *setting))
    find, users = certificates._found.__wrapped__, {}
    for case in cases:
        with monkeypatch.context() as patched:
            for owner, name, function in functions_of_transports():

                def noting(*args, key=(owner, name), function=function, **kwargs):
                    given = []
                    found = with_tensors(function(*args, **kwargs), lambda t: given.append(t) or t)
                    if given:
                        users.setdefault(key, {})[case] = None  # noqa: B023
                    return found

                patched.setattr(owner, name, noting)
            assert find(case) == ""
    survivors, mutants = [], 0
    for (owner, name), callers in users.items():
        for how, change in BROKEN.items():
            with monkeypatch.context() as patched:
                patched.setattr(*changed(owner, name, lambda found, *args, **kwargs: with_tensors(found, change)))  # noqa: B023
                mutants += 1
                if not any(certificates._outcome(find, case) for case in callers):
                    survivors.append((owner.__name__, name, how))
    assert survivors == []
    assert mutants >= 60


MIXED = {
    "chunks in another order": ("gather", changed(sequence, "_in_order", lambda found, *args: found.flip(-2))),
    "parts for another rank": ("gather", changed(sequence, "_by_rank", lambda found, *args: found.roll(1, 0))),
    "heads of another rank": ("ulysses", changed(sequence, "_all_to_all", lambda future, *args: turned(future))),
}


def turned(future):
    work = future.works[0]

    class Turned:
        def wait(self):
            work.wait()
            future.received.copy_(future.received.roll(1, 0))

    return future._replace(works=[Turned()])


@pytest.mark.parametrize("what", MIXED)
def test_a_collective_of_sequences_that_breaks_its_law_is_found(proof_of_sequence, what, monkeypatch):
    attention, patch = MIXED[what]
    assert proof_of_sequence(attention).verdict == "proven"
    certificates._found_of_sequence.cache_clear()
    monkeypatch.setattr(*patch)
    assert "does not do what its law says: rank" in str(proof_of_sequence(attention))


S = sequence
NO_ADJOINTS = {
    "a gather's is a cut": ("gather", S.gather_parts, S.GATHER, S.cut),
    "an output's sums up": ("gather", S.gather_output, S.GATHER, S.SCATTER),
    "a cut's is padded by the last position": ("gather", S.cut, S.cut, lambda g, part: S.GATHER(g, part)),
    "a sum's is its own": ("gather", S.sum_parts, S.SUM, S._copy),
    "a cut parameter's is gathered": ("tensor", S.cut, S.cut, lambda g, part: S.GATHER(g, part)),
    "rows of a sum have only their own": ("tensor", S.scatter_parts, S.SCATTER, S.widen),
    "an output's is not divided": ("gather", S.to_output, S._copy, S._copy),
    "heads stay": ("ulysses", S.exchange_heads, S.TO_HEADS, lambda g, part: S.TO_POSITIONS(g * 1.0, part) * 2.0),
    "positions stay": ("ulysses", S.exchange_positions, S.TO_POSITIONS, lambda g, part: S.TO_HEADS(g, part) * 0.5),
}


@pytest.mark.parametrize(
    ("symbol", "other"), [(S.to_own_output, S.from_own_input), (S.from_own_input, S.to_own_output)]
)
def test_gradients_of_batches_that_ranks_have_of_their_own(symbol, other):
    setting = certificates.Setting(3, True, False, False, 1)

    def found(of):
        return certificates._found_of_gradient(
            certificates.Gradient(transforms._grad_fn_map[of.id], symbol.id, setting)
        )

    assert found(symbol) == ""
    assert "<A x, y>" in found(other)


@pytest.mark.parametrize("what", NO_ADJOINTS)
def test_a_gradient_that_is_no_adjoint_is_found(proof_of_sequence, what, monkeypatch):
    attention, symbol, forward, backward = NO_ADJOINTS[what]
    assert proof_of_sequence(attention).verdict == "proven"
    certificates._found_of_gradient.cache_clear()
    monkeypatch.setitem(transforms._grad_fn_map, symbol.id, None)
    sequence._with_gradient(symbol, forward, backward)
    text = f"{symbol.name}, or its gradient, is not what its law says: <A x, y>"
    assert text in str(proof_of_sequence(attention))


PARTS = {
    "another part": changed(layout, "positions_of", lambda found, p, rank, seat: cuts_of(p, rank, 1 - seat)),
    "gradients twice": changed(cuts, "finish_reduce_scatter", lambda found, *args: tuple(2 * t for t in found)),
}


def cuts_of(parameter, rank, seat):
    """As ``layout.positions_of``."""
    split = parameter.cut.split
    rows = layout._rows(parameter, rank) if split.dim == 0 else range(split.size)
    return [i for i, at in enumerate(rows) if at // split.inner % split.length in parameter.cut.plan.chunks_of(seat)]


@pytest.mark.parametrize("of", ["tensor", "experts"])
@pytest.mark.parametrize("what", PARTS)
def test_a_gather_of_parts_that_breaks_its_law_is_found(proof_of_sequence, what, of, monkeypatch):
    assert proof_of_sequence(of).verdict == "proven"
    certificates._found.cache_clear()
    monkeypatch.setattr(*PARTS[what])
    assert "does not do what its law says" in str(proof_of_sequence(of))


@pytest.mark.parametrize("attention", ["gather", "tensor"])
def test_a_cut_of_another_part_is_found(proof_of_sequence, attention, monkeypatch):
    assert proof_of_sequence(attention).verdict == "proven"
    certificates._found_of_gradient.cache_clear()
    right = sequence.Part.ranges

    def of_next_rank(part):
        plan = replace(part.plan, rank=(part.plan.rank + 1) % part.plan.ranks)
        return right(sequence.Part(plan, part.split))

    monkeypatch.setattr(sequence.Part, "ranges", of_next_rank)
    assert "cuts another part" in str(proof_of_sequence(attention))


@pytest.mark.parametrize("kind", [PartOfLoss, LossOfParts, PartOfEmbedding])
def test_wrong_functions_of_a_vocabulary_are_found(monkeypatch, kind):
    whole = PartOfEmbedding if kind is PartOfEmbedding else LossOfParts
    assert certificates._found_of_vocabulary.__wrapped__(whole) == ""
    right = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, *args, **options: 1.01 * right(self, *args, **options))
    assert " for " in certificates._found_of_vocabulary.__wrapped__(whole)
