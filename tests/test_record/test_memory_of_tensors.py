"""Which tensor is this, and whose memory? What forward writes, and what a script replaces between steps."""

import types
from functools import partial

import shardtrace
from shardtrace.record.memory import Memory, overlap

import pytest
import thunder
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

GLOBAL = torch.zeros(4)


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.how, self.fc = forward, nn.Linear(4, 4)
        table = torch.arange(24.0).view(6, 4)
        self.register_buffer("buffer", torch.ones(4))
        self.register_buffer("part", self.buffer[:2])
        self.register_buffer("row", table[5])
        self.attribute, self.none = torch.zeros(4), None
        self.view, self.rows = self.buffer[1:3], table[2:4]
        self.list, self.inside = [torch.zeros(4), torch.ones(4)], types.SimpleNamespace(t=torch.zeros(3))

    def forward(self, x, *others):
        return self.how(self, self.fc(x), *others)

    def held(self):
        tensors = [self.buffer, self.part, self.row, self.attribute, self.view, self.rows, *self.list, self.inside.t]
        return [t.clone() for t in tensors]


def runs_as_eager(forward, between=lambda net, step: None, args=lambda net, step: (), steps=3, build=lambda net: None):
    """Three steps of AdamW; between them ``between`` changes what the script changes. No step is recorded again, which
    would see what a guard does not."""
    found, sharded = [], partial(shardtrace.fsdp, checks=shardtrace.Checks(recording=False))
    for wrap in (lambda net: net, sharded):
        torch.manual_seed(0)
        GLOBAL.zero_()
        build(net := Net(forward))
        net = wrap(net)
        optimizer, seen = torch.optim.AdamW(net.parameters(), lr=0.1, eps=1e-2), []
        for step in range(steps):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            y = net(x, *args(net, step))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [y.detach().clone(), *net.held(), GLOBAL.clone()]
            between(net, step)
        found.append(seen)
    torch.testing.assert_close(*found)


def adds_to_list(net, y):
    net.list[1].add_(y.detach().mean(0))
    return y * net.list[1]


def adds_to_item(net, y):
    net.inside.t[1] += 1
    return y * net.inside.t[1]


def never_reads(net, y):
    net.attribute.copy_(y.detach()[0])
    return y


def reads_before(net, y):
    old = net.attribute.clone()
    net.attribute.view(2, 2)[1].add_(1)
    return y + old + net.attribute


def all_of_a_list(net, y):
    torch._foreach_add_(net.list, 1.0)
    return y + net.list[0] * net.list[1]


def out(net, y):
    torch.add(net.attribute, 1.0, out=net.attribute)
    return y + net.attribute


def assigns_data(net, y):
    net.attribute.data = net.attribute * 0.5 + 1
    net.row.data = net.row.data * 0.5 + y.detach().mean(0)
    return y + net.attribute + net.row


def in_inference_mode(net, y):
    with torch.inference_mode():
        net.attribute.mul_(0.5).add_(1)
        position = torch.zeros(4)
        position[2:] = 3.0
    return y + net.attribute.clone() + position


def a_global(net, y):
    GLOBAL.add_(1)
    return y * GLOBAL


def shared_buffers(net, y):
    net.buffer.add_(1)
    return y * net.part.sum() + net.view.sum()


def through_a_part(net, y):
    net.view.mul_(2)
    net.part.sub_(1)
    return y * net.buffer


def rows_of_a_table(net, y):
    net.rows.add_(1)
    return y + net.rows.sum(0) + net.row


def detached_and_written(net, y):
    z = y.detach()
    z.mul_(2)
    return y + z


WRITES = (  # those of a row write into tensors that share no memory
    (adds_to_list, adds_to_item, never_reads, a_global, detached_and_written),
    (reads_before, all_of_a_list, shared_buffers),
    (out, through_a_part, rows_of_a_table),
    (assigns_data,),
    (in_inference_mode,),
)


@pytest.mark.parametrize("writes", WRITES, ids=lambda writes: writes[0].__name__)
def test_writes_into_tensors_of_any_name(single_rank, writes):
    runs_as_eager(lambda net, y: sum(write(net, y) for write in writes))


def grows(net, step):
    net.buffer = torch.full((4 * (step + 2),), float(step))


def comes_and_goes(net, step):
    net.none = torch.full((4,), float(step)) if step % 2 == 0 else None
    net.buffer = None if step == 0 else torch.ones(4, dtype=torch.float64)
    net.held = list  # the same in each step: a change of an attribute is seen


def is_registered_again(net, step):
    net.register_buffer("buffer", torch.full((4,), 2.0 + step))
    net.attribute = torch.full((4,), 1.0 + step)
    net.list[0] = torch.full((4,), 3.0 + step)


def is_changed_in_place(net, step):
    net.attribute.add_(1)
    net.list[0].mul_(2).add_(1)
    net.buffer.data = torch.full((4,), 5.0)


def reads_all(net, y):
    optional = (net.none if net.none is not None else 0) + (net.buffer[:4] if net.buffer is not None else 0)
    return (y * net.attribute + net.list[0] + optional).float()


@pytest.mark.parametrize("between", [grows, comes_and_goes, is_registered_again, is_changed_in_place])
def test_what_the_script_replaces_is_read(single_rank, between):
    runs_as_eager(reads_all, between)


def writes_row_and_reads_buffer(net, y):
    net.row.add_(1)
    return y * net.buffer * net.row


def becomes_the_same(net, step):
    if step == 1:
        net.buffer = net.row


def becomes_a_part(net, step):
    if step == 1:
        net.buffer = net.row.view(2, 2).view(4)


@pytest.mark.parametrize("between", [becomes_the_same, becomes_a_part])
def test_buffers_come_to_share_memory_and_part_again(single_rank, between):
    def and_parts(net, step):
        between(net, step)
        if step == 3:
            net.buffer = torch.ones(4)

    runs_as_eager(writes_row_and_reads_buffer, and_parts, steps=5)


def test_a_parameter_that_the_script_replaces_is_read(single_rank):
    """On one rank, where it is whole."""

    def another(net, step):
        if step == 1:
            net.fc.weight = nn.Parameter(torch.full((4, 4), 0.1))

    runs_as_eager(lambda net, y: y, another, steps=4)


def test_a_tensor_in_the_place_of_a_parameter_is_refused(single_rank):
    net, x = shardtrace.fsdp(Net(lambda net, y: y)), torch.ones(3, 4)
    net(x)
    with pytest.raises(RuntimeError, match=r"'fc.weight' was replaced after fsdp\(\) by a Tensor"):
        torch.func.functional_call(net, {"fc.weight": torch.ones(4, 4)}, (x,))
    net(x)


def test_the_shape_alone_of_a_buffer_is_read(single_rank):
    runs_as_eager(lambda net, y: y * net.buffer.shape[0], grows)


def with_data(t, step):
    t.data = torch.ones(4 + step)


METADATA = {
    "resize": (lambda net, t: t.shape[0], lambda t, step: t.resize_(4 + step).fill_(1)),
    "data": (lambda net, t: t.numel(), with_data),
    "dtype": (lambda net, t: t.element_size(), lambda t, step: setattr(t, "data", t.data.to(DTYPES[step % 2]))),
    "of a part": (lambda net, t: t[1:].shape[0], with_data),
    "a new dimension": (lambda net, t: t.dim(), lambda t, step: t.unsqueeze_(0)),
    "strides": (lambda net, t: t.stride(-1), lambda t, step: setattr(t, "data", torch.ones(4, step + 1)[:, 0])),
    "new": (
        lambda net, t: t.shape[0],
        lambda net, step: setattr(net, "parameter", nn.Parameter(torch.ones(4 + step))),
    ),
    "set": (lambda net, t: len(t), lambda t, step: t.set_(torch.ones(2 + step))),
}
DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *((kind, ("attribute", "own")) for kind in METADATA if kind != "new"),
        ("data", ["parameter"]),
        ("new", ["parameter"]),
    ],
)
def test_metadata_that_a_script_changes_in_place(single_rank, kind, names):
    """Forward reads nothing else of the tensors, an attribute, or a buffer or a parameter that no line reads. One of
    them changes in each step."""
    read, change = METADATA[kind]

    def build(net):
        net.register_buffer("own", torch.ones(4))
        net.parameter = nn.Parameter(torch.ones(4))
        net.held = lambda: []  # here: each change of an attribute is seen, whatever else is

    def between(net, step):
        turn, number = divmod(step, len(names))
        change(net if kind == "new" else getattr(net, names[number]), turn + 1)

    def forward(net, y):
        return y * float(sum(read(net, getattr(net, name)) for name in names))

    runs_as_eager(forward, between, build=build, steps=4)


def test_an_unchanged_shape_compiles_once(single_rank):
    net = Net(lambda net, y: y * net.attribute.shape[0] * net.row.numel() + net.part.sum())
    ours = thunder.jit(shardtrace.fsdp(net))
    for _ in range(4):
        ours(torch.ones(3, 4))
        net.row.data = torch.ones(4)
        net.attribute.data = torch.ones(4)
    assert thunder.cache_misses(ours) <= 2


def test_data_parts_a_buffer_from_its_view(single_rank):
    def between(net, step):
        if step == 1:
            net.buffer.data = net.buffer.data.clone()

    runs_as_eager(lambda net, y: y * (net.buffer.add_(1).sum() + net.view.sum()), between, steps=4)


def test_data_of_shared_memory_is_refused(single_rank):
    net = shardtrace.fsdp(Net(lambda net, y: (setattr(net.buffer, "data", y.detach()[0]), y)[1]))
    with pytest.raises(NotImplementedError, match="use copy_"):
        net(torch.ones(3, 4))


JOINS = {
    "buffers": lambda net, y: setattr(net.row, "data", net.row2),
    "a part": lambda net, y: setattr(net.row, "data", net.buffer.detach().view(2, 2).view(4)),
    "an attribute": lambda net, y: setattr(net.attribute, "data", net.row.data),
    "exchanged": lambda net, y: (data := net.row.data, setattr(net.row, "data", net.row2.data), setattr(net.row2, "data", data)),
    "one result": lambda net, y: (new := y.detach()[0], setattr(net.row, "data", new), setattr(net.row2, "data", new)),
}  # fmt: skip


@pytest.mark.parametrize("how", JOINS)
def test_data_that_joins_memory_is_refused(single_rank, how):
    net = Net(lambda net, y: (JOINS[how](net, y), y)[1])
    net.register_buffer("row2", torch.ones(4))
    with pytest.raises(NotImplementedError, match=r"forward sets \.data of .*: (use copy_|set one of them to a clone)"):
        shardtrace.fsdp(net)(torch.ones(3, 4))


def test_data_of_clones(single_rank):
    def exchanges(net, y):
        data = net.row.data.clone()
        net.row.data = net.attribute.clone() * 2
        net.attribute.data = data + 1
        return y * net.row + net.attribute

    runs_as_eager(exchanges)


def test_an_argument_that_comes_to_share_memory_is_refused(single_rank):
    def args(net, step):
        return (net.buffer[:2] if step else torch.ones(2),)

    with pytest.raises(RuntimeError, match="shares memory with a tensor of the model"):
        runs_as_eager(lambda net, y, z: y * (net.buffer.add_(1).sum() + z.sum()), args=args)


def test_memory_that_is_shared_in_part_is_refused(single_rank):
    net = Net(lambda net, y: y + net.a.add_(1).sum() + net.b.sum())
    net.a, net.b = (lambda t: (t[:6], t[2:]))(torch.ones(8))
    net.register_buffer("whole", net.a)
    with pytest.raises(RuntimeError, match="share in part"):
        shardtrace.fsdp(net)(torch.ones(3, 4))


def test_a_gradient_that_is_written_from_outside_is_refused(single_rank):
    net = shardtrace.fsdp(Net(lambda net, y: (net.attribute.add_(y.mean(0)), y)[1]))
    with pytest.raises(RuntimeError, match="write them detached"):
        net(torch.ones(3, 4))


def test_parameters_in_a_list_are_the_module_s(single_rank):
    def forward(net, y):
        return y * sum(p.square().sum() for p in net.own)

    found = []
    for wrap in (lambda net: net, shardtrace.fsdp):
        torch.manual_seed(0)
        net = Net(forward)
        net.own = list(net.parameters())
        net = wrap(net)
        net(torch.ones(3, 4)).square().mean().backward()
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*found)


def test_fakes_share_memory_as_tensors_do():
    mode = FakeTensorMode()
    memory = Memory(mode, lambda t: None)
    whole = torch.arange(12.0)
    rows, other = whole.view(3, 4)[1:], whole.view(3, 4)[0]
    fakes = [memory.met(t) for t in (rows, other, whole, rows)]
    assert fakes[0] is fakes[3]
    assert overlap(fakes[0], fakes[2])
    assert overlap(fakes[1], fakes[2])
    assert not overlap(fakes[0], fakes[1])
    columns = torch.zeros(3, 4).unbind(1)
    assert overlap(columns[0], columns[0])
    assert not overlap(columns[0], columns[1])
