"""What a forward asks of torch, call by call, on fake tensors. Nothing of Thunder takes part."""

import types

from shardtrace.record.memory import Memory
from shardtrace.record.recorder import CannotRecord, FakeMode, Recorder, record
from shardtrace.record.symbols import name_of
from shardtrace.record.watcher import CodeWatcher

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F


def recorded(function, *args, modules=None, **options):
    """The record of a function, with fakes of 3 x 4 numbers for the names of its tensors."""
    mode = FakeMode()
    memory = Memory(mode, lambda t: None)
    with mode:
        fakes = {name: torch.ones(3, 4, requires_grad=name == "x") for name in ("x", "y")}
        fakes["x"] = fakes["x"] * 1
    names = {id(module): name for name, module in (modules.named_modules() if modules is not None else ())}
    done = record(
        function, [fakes.get(a, a) if isinstance(a, str) else a for a in args], {}, mode=mode,
        recorder=Recorder(names, CodeWatcher(), memory, **options),
    )  # fmt: skip
    done.x, done.y, done.memory = fakes["x"], fakes["y"], memory
    return done


def names(done):
    return [name_of(call.function) for call in done.calls]


def test_calls_as_they_are_written():
    done = recorded(lambda x: F.gelu(x @ x.t() + 2).softmax(dim=-1), "x")
    assert names(done) == ["t", "matmul", "add", "gelu", "softmax"]
    product, plus, gelu, softmax = done.calls[1:]
    assert product.args[0] is done.x
    assert plus.args == (product.results[0], 2)
    assert gelu.args[0] is plus.results[0]
    assert (softmax.args[1:], dict(softmax.kwargs)) == ((), {"dim": -1})
    assert done.result is softmax.results[0]
    assert softmax.results[0].shape == (3, 3)


def test_containers_are_copied():
    def function(x):
        parts = [x, x]
        whole = torch.cat(parts)
        parts.clear()
        return whole

    (call,) = recorded(function, "x").calls
    assert len(call.args[0]) == 2


def test_what_is_written():
    def function(x, y):
        torch.add(y, 1, out=y)
        y.add_(x)
        view = y[0]
        view.zero_()
        y[1] = 2.0
        return y

    done = recorded(function, "x", "y")
    assert names(done) == ["add", "add_", "__getitem__", "zero_", "__setitem__"]
    assert [len(call.written) for call in done.calls] == [1, 1, 0, 1, 1]
    out, added, part, zeroed, item = done.calls
    assert all(call.written[0] is done.y for call in (added, out, item))
    assert zeroed.written == part.results


def test_of_tensors_that_share_memory_the_first_is_written():
    def function(x):
        y = x * 1
        return F.relu(y, inplace=True), y

    call = recorded(function, "x").calls[1]
    assert call.written == (call.args[0],)
    assert call.results == call.written


def test_modes():
    def function(x):
        a = x + 1
        with torch.no_grad():
            b = x + 2
            with torch.enable_grad():
                c = x + 3
        with torch.autocast("cpu", torch.bfloat16):
            d = x @ x.t()
            with torch.autocast("cpu", enabled=False):
                e = x @ x.t()
        return a, b, c, d, e

    calls = recorded(function, "x").calls
    assert [call.grad for call in calls if name_of(call.function) == "add"] == [True, False, True]
    products = [call for call in calls if name_of(call.function) == "matmul"]
    assert [[(s.device, s.dtype) for s in call.autocast] for call in products] == [[("cpu", torch.bfloat16)], []]
    assert [call.results[0].dtype for call in products] == [torch.bfloat16, torch.float32]


def test_random_numbers():
    def function(x):
        return F.dropout(x, 0.5), F.dropout(x, 0.5, training=False), torch.rand(3), torch.bernoulli(x), x.sin()

    done = recorded(function, "x")
    assert names(done) == ["dropout", "rand", "bernoulli", "sin"]
    assert [call.random for call in done.calls] == [True, True, True, False]
    assert done.result[1] is done.x


def test_places_and_names():
    class Inner(nn.Module):
        def forward(self, x):
            found = x.sin()
            low, high = found.aminmax()
            return self.helper(found), low, high

        def helper(self, x):
            return x.cos()

    model = nn.Sequential(nn.Tanh(), Inner())
    done = recorded(model, "x", modules=model)
    assert names(done) == ["tanh", "sin", "aminmax", "cos"]
    assert [call.place.module for call in done.calls] == ["0", "1", "1", "1"]
    assert [call.place.function for call in done.calls[1:]] == ["forward", "forward", "helper"]
    assert {call.place.file for call in done.calls[1:]} == {__file__}
    assert [call.names for call in done.calls[1:]] == [("found",), ("low", "high"), ()]
    line = Inner.forward.__code__.co_firstlineno + 1
    assert str(done.calls[1].place) == f"{__file__}:{line} in forward of 1"


def test_calls_of_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Tanh())
    done = recorded(model, "x", modules=model, watched=[model[1], model[1][1], model[2]])
    assert [(s.name, s.begin, s.end) for s in done.spans] == [("1.1", 2, 3), ("1", 1, 3), ("2", 3, 4)]
    assert done.spans[1].module is model[1]


def test_hooks_are_python():
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.register_forward_hook(lambda module, args, result: result + 1)
    assert names(recorded(model, "x", modules=model)) == ["mul", "linear", "add"]


def test_checkpoints():
    def function(x):
        y = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
        z = torch.utils.checkpoint.checkpoint(torch.cos, y, use_reentrant=True)
        return z.tan()

    calls = [call for call in recorded(function, "x").calls if name_of(call.function) in ("sin", "cos", "tan")]
    assert [call.checkpoint for call in calls] == [0, 1, None]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@torch.jit.script
def scripted(x):
    return x * x


def test_functions_with_gradients_of_their_own_are_one_call():
    done = recorded(lambda x: scripted(Double.apply(x)), "x")
    assert [call.function.owner for call in done.calls] == [Double, scripted]
    again = recorded(lambda x: Double.apply(x), "x")
    assert again.calls[0].function == done.calls[0].function
    assert again.calls[0].function != done.calls[1].function


def test_operators_that_no_function_contains():
    """Below ``torch.vmap`` torch tells only the mode of the fakes."""
    done = recorded(lambda x: torch.vmap(lambda row: row.sin().sum())(x), "x")
    assert {call.function.namespace for call in done.calls} == {"aten"}
    assert done.result.shape == (3,)
    assert done.calls[-1].results[0] is done.result or done.result._base is not None


def test_models_are_told_that_they_are_compiled():
    seen = []
    recorded(lambda x: seen.append((torch.compiler.is_compiling(), torch._dynamo.is_compiling())), "x")
    assert seen == [(True, True)]
    assert not torch.compiler.is_compiling()


def test_errors_name_the_modules_that_ran():
    class Values(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    model = nn.Sequential(nn.Tanh(), nn.Sequential(Values()))
    with pytest.raises(CannotRecord) as info:
        recorded(model, "x", modules=model)
    assert info.value.modules == (model, model[1], model[1][0])
    assert "item" in str(info.value.__cause__) or "_local_scalar_dense" in str(info.value.__cause__)


def test_all_is_as_before():
    call, apply = nn.Module.__call__, torch.autograd.Function.apply
    with pytest.raises(CannotRecord):
        recorded(lambda x: 1 / 0, "x")
    assert nn.Module.__call__ is call
    assert torch.autograd.Function.apply == apply
    assert "apply" not in torch.autograd.function._SingleLevelFunction.__dict__
    assert not isinstance(torch.ones(1), torch._subclasses.FakeTensor)


def test_shapes_that_change_in_place():
    with pytest.raises(CannotRecord) as info:
        recorded(lambda x: x.unsqueeze_(0), "y")
    assert "unsqueeze_ changes the shape of its argument in place" in str(info.value.__cause__)


def test_tensors_from_outside_have_fakes():
    table, state = torch.ones(4), types.SimpleNamespace(table=torch.zeros(4))
    done = recorded(lambda x: x * table + state.table, "x")
    assert done.memory.outside[id(done.calls[0].args[1])] is table
    assert done.memory.outside[id(done.calls[1].args[1])] is state.table


def test_a_write_from_outside_returns_the_tensor_itself():
    table = torch.ones(4)
    done = recorded(lambda x: (table.add_(x[0].detach()), table[:2].mul_(2.0)), "x")
    assert done.result[0] is table
    assert [done.memory.outside.get(id(t)) is table for call in done.calls for t in call.written] == [True, False]
    assert table.tolist() == [1.0] * 4


WRITES = {
    "relu": lambda x, y: F.relu(y, inplace=True),
    "item": lambda x, y: y.__setitem__((..., 0), 1.0),
    "out": lambda x, y: torch.mul(x, 2.0, out=y),
    "foreach": lambda x, y: torch._foreach_mul_([y], 2.0),
    "batch_norm": lambda x, y: torch.batch_norm(x, None, None, y[0], y[1], True, 0.1, 1e-5, False),
    "data": lambda x, y: setattr(y, "data", x.detach() * 1),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", WRITES)
def test_writes_are_known_from_operators(how, inference):
    def function(x, y):
        with torch.inference_mode(inference):
            WRITES[how](x.detach(), y)

    done = recorded(function, "x", "y")
    written = [t for call in done.calls for t in call.written]
    assert {t.untyped_storage()._cdata for t in written} == {done.y.untyped_storage()._cdata}
    assert len(written) == (2 if how == "batch_norm" else 1)


def test_all_members_of_a_list_are_written():
    def function(x):
        y = x.detach() * 1
        torch._foreach_add_(y.unbind(1), 1.0)
        torch.add(y[0], 1.0, out=y[1])
        return y

    *_, rows, _, _, out = recorded(function, "x").calls
    assert len(rows.written) == 4
    assert out.written == (out.kwargs["out"],)


def test_memory_that_two_written_arguments_share_is_refused():
    def function(x):
        torch._foreach_add_([x.detach()[:2], x.detach()[1:]], 1.0)

    with pytest.raises(CannotRecord) as found:
        recorded(function, "x")
    assert "share memory" in str(found.value.__cause__)


NOTHING = {
    "requires_grad_ changes": lambda x, y: y.requires_grad_(),
    "retain_grad": lambda x, y: (x * 2).retain_grad(),
    "calls backward": lambda x, y: (x * 2).sum().backward(),
    "gradients belong to steps": lambda x, y: torch.autograd.backward((x * 2).sum()),
    "memory": lambda x, y: y.set_(x.detach()),
    "view": lambda x, y: (v := y[0], setattr(y, "data", x.detach() * 1), v + 1),
    "uses a view": lambda x, y: (z := x.detach() * 1, setattr(y, "data", z), y.mul_(2), z + 1),
    "returns a tensor of which": lambda x, y: (x * 2).detach().requires_grad_(),
}


@pytest.mark.parametrize("words", NOTHING)
def test_what_no_line_can_do_is_refused(words):
    with pytest.raises(CannotRecord) as found:
        recorded(NOTHING[words], "x", "y")
    assert words in str(found.value.__cause__)


def test_queries_are_no_calls():
    def function(x):
        assert (x.size(), x.dim(), x.is_contiguous(), x.requires_grad) == (x.shape, 2, True, True)
        assert repr(x)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return F.dropout(x, 0.5, training=False).contiguous().requires_grad_()

    assert recorded(function, "x").calls == []


def test_a_result_is_cut_from_its_gradient():
    def function(x):
        y = x * 2
        y.detach_()
        return y

    assert [name_of(call.function) for call in recorded(function, "x").calls] == ["mul", "detach"]


def test_a_view_without_a_gradient_is_written(single_rank):
    def forward(m, x):
        y = m[0](x)
        z = y.detach()
        z.mul_(2)
        w = m[0](x) * 1
        w.lerp_(w, 0.5)
        return m[1](z) + w

    from against_eager import check

    class Net(nn.Sequential):
        def forward(self, x):
            return forward(self, x)

    check(lambda: Net(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), lambda step: (torch.randn(3, 4),))


def hooks_on_a_node(x):
    y = x * 2
    y.grad_fn.register_hook(lambda given, got: None)
    return y


def hooks_on_what_is_saved(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return x.tanh()


def leaves_gradients_off(x):
    torch.set_grad_enabled(False)
    return x * 2


def seeds_its_own(x):
    return x * (torch.initial_seed() % 2)


REFUSED = {
    hooks_on_a_node: "register_hook of the grad_fn of a tensor",
    hooks_on_what_is_saved: "sets hooks on what is saved",
    leaves_gradients_off: "leaves gradients, autocast or the default dtype in another state",
    seeds_its_own: "asks for torch's seed",
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_no_step_would_do_is_refused(function):
    with torch.enable_grad(), pytest.raises(CannotRecord) as error:
        recorded(function, "x")
    assert REFUSED[function] in str(error.value.__cause__)


def test_a_node_of_the_graph_may_be_looked_at():
    done = recorded(lambda x: x * 2 if "Mul" in (x * 1).grad_fn.name() else x, "x")
    assert names(done) == ["mul", "mul"]
