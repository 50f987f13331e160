"""What a model may return."""

import collections
import copy
import dataclasses

import shardtrace
from shardtrace.record.calls import map_tensors, tensors_in

import pytest
import thunder
import torch
from torch import nn

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    number: int = 3


class Fields(dict):
    __getattr__ = dict.__getitem__


class Holder:
    def __init__(self, tensor):
        self.tensor, self.more, self.own = tensor, [tensor, 1], self


RESULTS = {
    "tensor": lambda y: y,
    "named tuple": lambda y: Pair(y, y.sum()),
    "nested": lambda y: {"p": [Pair(y, (y, 2))]},
    "of torch": lambda y: y.topk(2),
    "OrderedDict": lambda y: collections.OrderedDict(b=y, a=y.sum()),
    "defaultdict": lambda y: collections.defaultdict(list, b=y, a=[y.sum()]),
    "class of dict": lambda y: Fields(b=y, a=collections.OrderedDict(c=y.sum())),
    "dataclass": lambda y: Output(y),
    "dataclass in a tuple": lambda y: (Output(y), y),
    "object": lambda y: Holder(y),
    "deque": lambda y: collections.deque([y, (y * 2,)], maxlen=3),
}


class Net(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.linear, self.result = nn.Linear(4, 4), result

    def forward(self, x):
        return self.result(self.linear(x))


@pytest.mark.parametrize("result", RESULTS)
def test_structures(single_rank, result):
    model = Net(RESULTS[result])
    expected = copy.deepcopy(model)
    x = torch.randn(3, 4)
    for call in (thunder.jit(shardtrace.fsdp(model)), expected):
        for _ in range(2):
            out = call(x)
            sum(t.sum() for t in tensors_in(out) if t.is_floating_point()).backward()
    assert type(out) is type(call(x))
    torch.testing.assert_close(model.linear.weight.grad, expected.linear.weight.grad)
    found = thunder.jit(model)(x)
    assert type(found) is type(out)
    for a, b in zip(tensors_in(found), tensors_in(out), strict=True):
        torch.testing.assert_close(a, b)


def test_what_has_no_gradient(single_rank):
    model = Net(lambda y: (y, y.detach(), y.argmax(-1)))
    x = torch.randn(3, 4)
    cmodel = thunder.jit(shardtrace.fsdp(model))
    assert [t.requires_grad for t in cmodel(x)] == [True, False, False]
    with torch.no_grad():
        assert not any(t.requires_grad for t in cmodel(x))


@pytest.mark.parametrize(
    "result", [lambda y: (y * k for k in (1, 2)), lambda y: (y, map(torch.sin, [y])), lambda y: {"a": {y}}]
)
def test_what_computes_later_or_has_no_order_is_refused(single_rank, result):
    with pytest.raises(RuntimeError, match=r"forward returns a (generator|map|set): return a list, a tuple or a dict"):
        thunder.jit(shardtrace.fsdp(Net(result)))(torch.randn(3, 4))


def test_what_holds_no_tensor_is_not_copied():
    value = {"a": object(), "b": (1, Pair(2, 3))}
    assert map_tensors(value["b"], None) is value["b"]
    assert map_tensors(value["a"], None) is value["a"]
    holder = Holder(1)
    assert map_tensors(holder, None) is holder or map_tensors(holder, None).own is not None
