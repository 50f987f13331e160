"""Calls of blocks that are of one kind: equal records. Nothing of Thunder takes part."""

import types

from shardtrace.record.calls import Mark, Uses, find_kinds, is_whole, outermost, outline
from shardtrace.record.memory import Memory
from shardtrace.record.recorder import FakeMode, Recorder, record
from shardtrace.record.watcher import CodeWatcher

import pytest
import torch
from models import Net
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Calls a function with itself and its input."""

    def __init__(self, function, number=None):
        super().__init__()
        self.function, self.number = function, number
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.function(self, x)


def recorded(net):
    mode = FakeMode()
    with mode:
        x = torch.ones(3, 4, requires_grad=True) * 1
        for p in net.modules():
            for name, parameter in p._parameters.items():
                if parameter is not None:
                    p._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
    names = {id(module): name for name, module in net.named_modules()}
    blocks = [m for m in net.modules() if isinstance(m, Block)]
    return record(
        net, [x], {}, mode=mode, recorder=Recorder(names, CodeWatcher(), Memory(mode, lambda t: None), watched=blocks)
    )


def kinds(*blocks, marks=(), refuse=lambda outline: "", net=Net):
    """The names of the blocks of each kind, and why others are apart."""
    done, why = recorded(net(*blocks)), {}
    found = find_kinds(done, done.spans, Uses(done, [done.result]), marks, refuse, why)
    groups = {id(kind): [m.span.name.removeprefix("blocks.") for m in kind.members] for kind in found.values()}
    return [" ".join(names) for names in groups.values()], why


def plain(block, x):
    return torch.tanh(block.fc(x)) + x


def scaled(block, x):
    return plain(block, x) * block.number


SAME = "no other block makes the same calls"
ONES, TWOS = torch.ones(4), torch.ones(4)
CONTEXT = types.SimpleNamespace(number=0)


def counted(block, x):
    CONTEXT.number += 1
    return plain(block, x) * CONTEXT.number


@pytest.mark.parametrize(
    ("function", "numbers", "equal"),
    [
        (plain, (1, 2), True),  # a number that is not read
        (scaled, (2.0, 2.0), True),
        (scaled, (2.0, 3.0), False),
        (scaled, (2, 2.0), False),
        (scaled, (0.0, -0.0), False),
        (scaled, (1, True), False),
        (lambda b, x: plain(b, x) * [2.0, 2.0][b.number], (0, 1), True),  # another branch, the same calls
        (lambda b, x: plain(b, x) if b.number else x - b.fc(x), (0, 1), False),
        (lambda b, x: F.dropout(plain(b, x), b.number), (0.1, 0.1), True),
        (lambda b, x: F.dropout(plain(b, x), b.number), (0.1, 0.2), False),
        (lambda b, x: plain(b, x)[: b.number], (3, 2), False),
        (lambda b, x: plain(b, x).to(b.number).float(), (torch.float64, torch.bfloat16), False),
        (lambda b, x: plain(b, x) * (ONES, TWOS)[b.number], (0, 1), True),  # which tensor is an argument
        (lambda b, x: plain(b, x).transpose(0, 1).reshape(3, 4) if b.number else plain(b, x).reshape(3, 4), (0, 1), False),
        (counted, (0, 0), False),
    ],
)  # fmt: skip
def test_pairs(function, numbers, equal):
    found, why = kinds(*(Block(function, n) for n in numbers))
    assert found == (["0 1"] if equal else [])
    assert why == ({} if equal else {"blocks.0": SAME, "blocks.1": SAME})


def test_where_gradients_are_off():
    class Half(Net):
        def forward(self, x):
            x = self.blocks[0](x)
            with torch.no_grad():
                y = self.blocks[1](x)
            return self.blocks[2](x) + y

    assert kinds(*(Block(plain) for _ in range(3)), net=Half)[0] == ["0 2"]


def test_other_shapes():
    blocks = [Block(plain), Block(plain)]
    blocks[1].fc.bias = None
    assert kinds(*blocks)[0] == []


def in_place(block, x):
    y = block.fc(x)
    y += 1
    y[0] = 2
    return y


def writes_into_what_it_is_given(block, x):
    x += 1
    return plain(block, x)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (in_place, ""),
        (writes_into_what_it_is_given, "it writes into tensors of others"),
        (lambda b, x: (plain(b, x), x.t())[1].t(), "it returns a view of an input"),
        (lambda b, x: (plain(b, x), x)[1], "nothing that it makes is read"),
        (lambda b, x: b.fc(x).sum() * 0 + x[:], ""),
    ],
)
def test_what_cannot_be_a_function(function, why):
    found, reasons = kinds(Block(function), Block(function))
    assert found == ([] if why else ["0 1"])
    assert set(reasons.values()) <= {why}


def test_results_that_are_written_later():
    class Writes(Net):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                x[0] = 1
            return x

    found, why = kinds(Block(plain), Block(plain), net=Writes)
    assert found == []
    assert set(why.values()) == {"what it returns is written into"}


def test_what_is_read_elsewhere_is_returned():
    class Keeps(Net):
        def forward(self, x):
            kept = []
            for i, block in enumerate(self.blocks):
                x = block(x, kept if i == 1 else [])
            return x + kept[0]

    class Keeping(Block):
        def forward(self, x, kept):
            kept.append(torch.tanh(self.fc(x)))
            return kept[-1] + x

    done = recorded(Keeps(*(Keeping(None) for _ in range(3))))
    uses = Uses(done, [done.result])
    found = find_kinds(done, done.spans, uses, (), lambda outline: "", {})
    (kind,) = set(found.values())
    assert [len(m.exports) for m in kind.members] == [1, 2, 1]
    assert len(kind.exports) == 2


def test_inputs_in_the_order_of_their_use():
    net = Net(Block(plain))
    done = recorded(net)
    found = outline(done, done.spans[0], Uses(done, [done.result]), ())
    x = done.calls[0].args[0]
    assert list(map(id, found.inputs)) == list(map(id, (x, net.blocks[0].fc.weight, net.blocks[0].fc.bias)))


def test_what_is_recomputed_is_part_of_the_kind():
    blocks = [Block(plain) for _ in range(4)]
    spans = recorded(Net(*blocks)).spans
    marks = [Mark(s.begin, s.end, cheap) for s, cheap in zip(spans[1:], (True, False, False), strict=True)]
    found, _ = kinds(*blocks, marks=marks)
    assert found == ["2 3"]
    around = Mark(spans[0].begin, spans[1].end, cheap=False)
    done = recorded(Net(*blocks))
    assert [is_whole(done, s, [around]) for s in done.spans] == [False, False, True, True]


def test_refused():
    found, why = kinds(Block(plain), Block(plain), refuse=lambda outline: "of many buckets")
    assert found == []
    assert set(why.values()) == {"of many buckets"}


def test_outermost():
    spans = recorded(nested()).spans
    assert [s.name for s in spans] == ["blocks.0.inner", "blocks.0", "blocks.1"]
    assert [s.name for s in outermost(spans)] == ["blocks.0", "blocks.1"]


def nested():
    net = Net(Block(lambda b, x: b.inner(x) + b.fc(x)), Block(plain))
    net.blocks[0].inner = Block(plain)
    return net
