"""A sharded model that is called without ``thunder.jit``, parts of it that are called by themselves, and its methods."""

import copy

import shardtrace
from shardtrace import CompilePolicy

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Zoo, tokens
from ranks import on_ranks
from thunder.core import interpreter
from torch import nn


class Model(nn.Module):
    """A body, and a head that a training script may call by itself."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))

    def encode(self, x, *, scale=1.0):
        """Without the head."""
        return self.blocks(self.embed(x)) * scale


def both():
    """A model and its sharded copy."""
    torch.manual_seed(0)
    eager = Model()
    return eager, shardtrace.fsdp(copy.deepcopy(eager))


def batch():
    return torch.arange(12).view(3, 4) + dist.get_rank()


def same_gradients(eager, model):
    """The sharded gradients are the mean of the eager ones over ranks."""
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        mean = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        torch.testing.assert_close(torch.zeros(q.shape) if q.grad is None else q.grad.full_tensor(), mean)


@on_ranks(2)
def test_a_model_that_compiles_itself_trains_like_eager():
    eager, model = both()
    for _ in range(2):
        loss, expected = model(batch()).square().mean(), eager(batch()).square().mean()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        loss.backward()
        expected.backward()
        same_gradients(eager, model)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(batch()), eager.eval()(batch()))
        torch.testing.assert_close(model.forward(batch()), eager(batch()))


@on_ranks(2)
def test_parts_compile_themselves():
    """A head that is called for chunks of the hidden states, as for a long sequence."""
    eager, model = both()
    for m in (eager, model):
        hidden = m.blocks(m.embed(batch()))
        sum(m.head(h).square().mean() for h in hidden.unbind(0)).backward()
    same_gradients(eager, model)
    assert len(shardtrace.collectives(model.head)) == 3  # a gather in forward, one in backward, a reduction


@on_ranks(2)
def test_parts_accumulate():
    eager, model = both()
    for m in (eager, model):
        with shardtrace.no_sync(model):
            m.head(m.encode(batch())).square().mean().backward()
        m.head(m.encode(batch() + 1)).square().mean().backward()
    same_gradients(eager, model)


@on_ranks(2)
def test_registered_methods_compile():
    eager, model = both()
    shardtrace.register_forward_method(model, "encode")
    for m in (eager, model):
        m.encode(batch(), scale=2.0).square().mean().backward()
    same_gradients(eager, model)
    assert model.encode.__doc__ == "Without the head."
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.embed.weight.zero_()
        torch.testing.assert_close(model.encode(batch()), eager.encode(batch()))
        assert not torch.equal(other.encode(batch()), eager.encode(batch()))
    with shardtrace.full_params(model):
        assert not hasattr(model.encode(batch()).grad_fn, "compiled_backward")


@on_ranks(2)
def test_generate_has_whole_parameters():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    eager = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    model = shardtrace.fsdp(copy.deepcopy(eager))
    prompt, options = torch.ones(1, 3, dtype=torch.long), {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), eager.generate(prompt, **options))
    assert model(prompt, labels=prompt).loss.item() == pytest.approx(eager(prompt, labels=prompt).loss.item())


# ---- one process ----


@pytest.fixture
def ranks(fake_ranks):
    fake_ranks(2)


def test_reports_take_the_model(ranks):
    model = shardtrace.fsdp(Zoo())
    with pytest.raises(TypeError, match="doesn't seem to be"):
        shardtrace.collectives(model)
    cmodel = thunder.jit(model)
    for call in (model, cmodel):
        call(*tokens(2, 0))
    assert shardtrace.collectives(model) == shardtrace.collectives(cmodel)
    assert shardtrace.memory(model).peak == shardtrace.memory(cmodel).peak
    assert len(thunder.last_traces(model)) == len(thunder.last_traces(cmodel))
    assert "Zoo" in str(shardtrace.inspect(model))


@pytest.mark.parametrize("given", [{"compile": False}, {"compile_policy": CompilePolicy(jit=False)}])
def test_compiling_is_left_to_thunder(ranks, given):
    model = shardtrace.fsdp(Model(), **given)
    x = torch.zeros(2, 3, dtype=torch.long)
    for part, name in ((model, "Model"), (model.head, "Linear")):
        with pytest.raises(RuntimeError, match=f"{name} is sharded with compile=False and was called without Thunder"):
            part(x)
    assert thunder.jit(model)(x).shape == (2, 3, 16)


def test_options_of_thunder(ranks):
    seen = []

    class Watch(thunder.Transform):
        def transform_traces_pre_prologue(self, prologue, computation, epilogue, **_):
            seen.append(computation)
            return prologue, computation, epilogue

    model = shardtrace.fsdp(Model(), compile={"transforms": [Watch()], "executors": ["torch"]})
    model(torch.zeros(2, 3, dtype=torch.long))
    assert len(seen) == 1
    assert "torch" in [executor.name for executor in thunder.compile_data(model).executors_list]
    with pytest.raises(TypeError, match=r"jit must be True, False, or arguments of thunder.jit, not 'fast'"):
        shardtrace.fsdp(Model(), compile="fast")


def test_a_function_of_thunder_may_call_parts(ranks):
    model = shardtrace.fsdp(Model())
    x = torch.zeros(2, 3, dtype=torch.long)
    assert thunder.jit(lambda x: model.head(model.blocks(model.embed(x))))(x).shape == (2, 3, 16)
    assert thunder.jit(model.head)(torch.ones(2, 8)).shape == (2, 16)


def test_a_module_around_a_sharded_one(ranks):
    """Only the sharded part compiles itself."""
    outer = nn.Sequential(shardtrace.fsdp(Model()), nn.Softmax(-1))
    assert outer(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 16)


def test_a_method_of_a_model_that_is_not_sharded():
    with pytest.raises(ValueError, match="Model is not sharded"):
        shardtrace.register_forward_method(Model(), "encode")


def test_an_interrupt_stays_one(fake_ranks, monkeypatch):
    """Thunder makes an InterpreterError, which prints the model, of what is raised in its interpreter."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    fake_ranks(2)
    model = shardtrace.fsdp(Model())
    monkeypatch.setattr(interpreter, "_interpret_call", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens(2))
