"""A computation on parts of sequences, or of parameters, is proven, and wrong ones are not."""

import random
from dataclasses import replace

import shardtrace
from passes.analysis.calls import Block, block_of
from passes.analysis.dims import torch_line
from passes.analysis.recognise import is_return, is_unpack
from passes.comm import sequence
from passes.comm.sequence import Part
from passes.kernels.parts import CausalAttention, LossOfParts, PartOfEmbedding, PartOfLoss
from passes.kernels.torch_call import call_of
from passes.pipeline import FirstStage
from passes.plan.plan import Split
from passes.proof.parts import unproven

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder import torch as ltorch
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.trace import from_trace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, HEADS, LENGTH = 8, 2, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.silu(self.up(x + self.out(y.transpose(1, 2).reshape(b, t, d)))))


class Net(nn.Module):
    """Returns a loss, and logits if it ``returns`` them."""

    def __init__(self, returns):
        super().__init__()
        words = WIDTH if returns else 10 * LENGTH
        self.embed, self.places = nn.Embedding(words, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, words)
        self.returns = returns

    def forward(self, x, y):
        h = self.embed(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h)
        h = h - h.mean(1, keepdim=True)
        logits = self.head(h)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), y[:, 1:].flatten())
        return logits if self.returns else None, loss


def compiled(attention, arguments="whole"):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    options = (
        {"tensor_parallel": "outer" if attention == "both" else "inner"} if attention in ("tensor", "both") else {}
    )
    if attention != "tensor":
        way = "auto" if attention == "both" else attention
        options |= {"context_parallel": shardtrace.ContextParallel("inner", attention=way, arguments=arguments)}
    cmodel = thunder.jit(shardtrace.fsdp(Net(returns=attention != "tensor"), mesh=mesh, **options))
    x = torch.zeros(2, LENGTH if arguments == "whole" else LENGTH // 2, dtype=torch.long)
    cmodel(x, x)[1].backward()
    return proven_facts(cmodel)


def proven_facts(cmodel):
    assert shardtrace.prove(cmodel).verdict == "proven"
    (first,) = (t for t in thunder.compile_data(cmodel).transforms if isinstance(t, FirstStage))
    return first.compilation.finished[-1]


def with_lines(trace, lines):
    new = from_trace(trace)
    new.bound_symbols = lines
    return new


def operands_swapped(lines, i, dice):
    """Another value of the same shape and dtype, computed before, in the place of an operand."""
    given = [a for a in lines[i].flat_proxy_args if isinstance(a, TensorProxy)]
    if not given:
        return None
    old = dice.choice(given)
    values = [o for b in lines[:i] for o in b.flat_proxy_outs if isinstance(o, TensorProxy) and o.name != old.name]
    alike = [v for v in values if tuple(v.shape) == tuple(old.shape) and v.dtype == old.dtype]
    if not alike:
        return None
    return lines[i].from_bsym_swap_proxies({variableify(old): dice.choice(alike)}, skip_output=True)


def split_changed(lines, i, dice):
    """A collective of another dimension, or of another length."""
    if len(lines[i].args) < 2 or not isinstance(part := lines[i].args[1], Part) or part.split.length == 1:
        return None
    changed = dice.choice(
        [part.split._replace(dim=part.split.dim + 1), part.split._replace(length=part.split.length - 1)]
    )
    return lines[i].from_bsym(args=(lines[i].args[0], Part(part.plan, changed), *lines[i].args[2:]))


def collective_changed(lines, i, dice):
    """A copy in the place of a sum or of the border, a gather in that of an exchange."""
    others = {
        sequence.sum_parts.id: sequence.to_output, sequence.to_output.id: sequence.sum_parts,
        sequence.gather_parts.id: sequence.gather_output, sequence.gather_output.id: sequence.gather_parts,
        sequence.exchange_heads.id: sequence.gather_parts, sequence.exchange_positions.id: sequence.gather_parts,
    }  # fmt: skip
    other = others.get(lines[i].sym.id)
    return lines[i].from_bsym(sym=other) if other is not None else None


def constant_changed(lines, i, dice):
    """Another number among the arguments."""
    numbers = [k for k, a in enumerate(lines[i].args) if type(a) in (int, float)]
    if not numbers:
        return None
    at = dice.choice(numbers)
    args = [a + 1 if k == at else a for k, a in enumerate(lines[i].args)]
    return lines[i].from_bsym(args=tuple(args))


def function_changed(lines, i, dice):
    """Attention that masks as for another rank, or for a longer sequence; a loss or an embedding of another rank."""
    call = call_of(lines[i].sym)
    own = call.function if call is not None else None
    if isinstance(own, CausalAttention | PartOfEmbedding | PartOfLoss):
        others = [replace(own, plan=replace(own.plan, rank=1 - own.plan.rank))]
        others += [replace(own, length=own.length + 4)] if isinstance(own, CausalAttention) else []
        others += [replace(own, ignored=own.ignored + 1)] if isinstance(own, PartOfLoss) else []
    elif isinstance(own, LossOfParts):
        others = [replace(own, dtype=torch.float64)]
    else:
        return None
    wrong = replace(call, function=dice.choice(others))
    return lines[i].from_bsym(sym=replace(lines[i].sym, id=wrong))


def part_of_another_rank(lines, i, dice):
    """This rank's line computes with the part of the other one."""
    if len(lines[i].args) < 2 or not isinstance(part := lines[i].args[1], Part):
        return None
    other = Part(replace(part.plan, rank=1 - part.plan.rank), part.split)
    return lines[i].from_bsym(args=(lines[i].args[0], other, *lines[i].args[2:]))


def bias_on_each_rank(lines, i, dice):
    """A product adds a bias that ranks add again when they have added up their parts of it."""
    line = lines[i]
    call = torch_line(line)
    product = call is not None and call.name == "nn.functional.linear" and len(call.operands) == 2
    if not product or i + 2 >= len(lines) or lines[i + 2].sym.name != "add":
        return None
    return line.from_bsym(sym=ltorch.linear, args=(*call.operands, lines[i + 2].args[1]), output=line.output[0])


KINDS = (
    operands_swapped,
    part_of_another_rank,
    bias_on_each_rank,
    split_changed,
    collective_changed,
    constant_changed,
    function_changed,
)


def live(lines):
    """The lines whose results are read."""
    read = {a.name for a in lines[-1].flat_proxy_args}
    found = set()
    for i in range(len(lines) - 1, -1, -1):
        if is_return(lines[i]) or read & {o.name for o in lines[i].flat_proxy_outs}:
            found.add(i)
            read |= {a.name for a in lines[i].flat_proxy_args}
    return found


def mutants(trace, kind, dice):
    """Wrong computations: one line of the trace, or of a block that it calls, is another one."""
    lines = trace.bound_symbols
    for i in sorted(live(lines)):
        if is_return(lines[i]) or is_unpack(lines[i]):
            continue
        block = block_of(lines[i])
        if block is None:
            changed = kind(lines, i, dice)
            if changed is not None:
                yield with_lines(trace, [*lines[:i], changed, *lines[i + 1 :]]), changed
            continue
        for inner, changed in mutants(block.trace, kind, dice):
            other = object.__new__(Block)
            other.__dict__.update(vars(block), trace=inner)
            other.__dict__.pop("symbol", None)
            call = lines[i].from_bsym(sym=other.symbol)
            yield with_lines(trace, [*lines[:i], call, *lines[i + 1 :]]), changed


@pytest.mark.parametrize(
    ("attention", "arguments"),
    [("gather", "whole"), ("ulysses", "whole"), ("gather", "part"), ("tensor", "whole"), ("both", "whole")],
)
def test_mutants_are_found(fake_ranks, attention, arguments):
    fake_ranks(4)
    facts = compiled(attention, arguments)
    record, context = facts.record, facts.context or facts.tensors
    before = record.stages[0 if facts.context is None else 1]
    assert list(unproven(before, record.first, context)) == []
    dice, count = random.Random(0), 0
    for kind in KINDS:
        found = list(mutants(record.first, kind, dice))
        absent = {"gather": [bias_on_each_rank], "ulysses": [function_changed, bias_on_each_rank]}
        assert found or kind in absent.get(attention, ()), kind.__name__
        count += len(found)
        for wrong, line in found:
            assert list(unproven(before, wrong, context)), f"{kind.__name__}: {line}"
    assert count > 60


def test_random_numbers_of_one_rank_are_not_those_of_all(fake_ranks):
    fake_ranks(2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    cmodel = thunder.jit(shardtrace.fsdp(model, mesh=mesh, tensor_parallel="inner"))
    cmodel(torch.ones(1, 3)).sum().backward()
    facts = proven_facts(cmodel)
    *lines, drawn, cut, gathered, output, result = facts.record.first.bound_symbols
    wrong = output.from_bsym_swap_proxies({variableify(gathered.output): cut.args[0]}, skip_output=True)
    wrong = with_lines(facts.record.first, [*lines, drawn, wrong, result])
    (why,) = unproven(facts.record.stages[0], wrong, facts.tensors)
    assert "to_output" in why
    assert "is given drawn" in why


def test_an_output_that_is_not_at_the_border(fake_ranks):
    fake_ranks(4)
    facts = compiled("gather")
    lines = facts.record.first.bound_symbols
    *_, at = (i for i, b in enumerate(lines) if b.sym.id == sequence.to_output.id)
    swap = {variableify(lines[at].output): lines[at].args[0]}
    wrong = with_lines(facts.record.first, [*lines[:at], *(b.from_bsym_swap_proxies(swap) for b in lines[at + 1 :])])
    (why,) = unproven(facts.record.traced, wrong, facts.context)
    assert why == "on parts of sequences, output 1 is whole, not border"
    assert Split.along(1, 3).size == 3
