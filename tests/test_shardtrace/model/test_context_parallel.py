"""Losses and gradients of models whose sequences are split over ranks are those of one process."""

import copy
import sys
from functools import partial

import shardtrace
from passes.proof.prove import UnprovenStepError
from shardtrace import Checks, CommPolicy, CompilePolicy, ContextParallel

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from contexts import (
    VOCAB,
    Convolution,
    Hidden,
    Mixture,
    Sparse,
    Tokens,
    batch,
    compare_gradients,
    gpt,
    hugging_face,
    inside,
    mesh_of,
    of_hugging_face,
    of_logits,
    on_each_rank_equal,
    train_both,
)
from eager import uncompiled
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint


def padded(x):
    """A mask (B, T) that leaves out the last three tokens of the first row."""
    mask = torch.ones(x.shape, dtype=torch.long)
    mask[0, -3:] = 0
    return mask


def with_padding(model, x, y):
    return of_hugging_face(model, x, y, attention_mask=padded(x))


def prove(build, loss_of, *, shape=(1, 2), length=13, verdict="proven", **options):
    """Asserts that a step is proven to be the program of whole sequences, and sends parts of some."""
    model = shardtrace.fsdp(build(), mesh=mesh_of(shape), **{"context_parallel": "context", **options})
    loss_of(model, *batch(0, length)).backward()
    assert shardtrace.prove(model).verdict == verdict
    kinds = {row.kind for row in shardtrace.collectives(model)}
    assert any(kind.endswith(("_parts", "_heads", "_positions")) for kind in kinds)


MODELS = {
    "gpt": (gpt, inside),
    "qwen3": (partial(hugging_face, "Qwen3", head_dim=4), of_hugging_face),
    "gemma2": (partial(hugging_face, "Gemma2", head_dim=4, sliding_window=4), of_hugging_face),
    "bert": (partial(hugging_face, "Bert"), with_padding),
}


@on_ranks(4)
def test_convolution():
    train_both(Convolution, of_logits, shape=(2, 2))


MESHES = {"gpt": (2, 2), "bert": (2, 2), "qwen3": (1, 4), "gemma2": (1, 4)}


@pytest.mark.parametrize(("model", "shape"), MESHES.items())
def test_models_are_proven(fake_ranks, model, shape):
    fake_ranks(4)
    prove(*MODELS[model], shape=shape)


# ---- options of fsdp ----

OPTIONS = {
    "strategies": {"sharding_strategy": {"embedding.*": "ddp", "layers.*": "owner", "*": "zero3"}},
    "no_sync": {"micro": 3, "steps": 2, "sharding_strategy": {"layers.*": "zero2", "*": "zero3"}},
    "ulysses, offload": {
        "context": ContextParallel("context", attention="ulysses"),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    },
    "gather": {"context": ContextParallel("context", attention="gather")},
    "too short": {"length": 3},
    "ranks without a part": {"length": 5, "context": ContextParallel("context", attention="gather")},
    "one rank": {"shape": (2, 1)},
    "experts": {"build": partial(Mixture, turns=True), "loss_of": inside},
}


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_options(name):
    given = {"build": Tokens, "loss_of": of_logits, "steps": 1} | OPTIONS[name]
    train_both(**given)


# They choose other lines. What these send, and how ranks divide gradients, is as above.
PROVEN = {
    "bf16, layer buckets, sdpa": {
        "mp_policy": "bf16",
        "bucketing_strategy": "layer",
        "compile_policy": CompilePolicy(jit={"executors": ["sdpa"]}),
    },
    "int8": {"comm_policy": CommPolicy(gather_dtype="int8"), "build": partial(Tokens, width=64), "verdict": "rounding"},
    "sums, model bucket, torch_kernels": {
        "comm_policy": CommPolicy(sum_reductions=True),
        "bucketing_strategy": "model",
        "compile_policy": CompilePolicy(jit={"executors": [shardtrace.kernels]}),
    },
    "full": {"activation_checkpointing": "full"},
    "zero2, cheap": {"sharding_strategy": "zero2", "activation_checkpointing": "cheap"},
    "inline": {"compile_policy": CompilePolicy(repeated_blocks="inline")},
    "experts": {"build": Mixture, "loss_of": inside, "mp_policy": "bf16"},
    "experts that take turns": {"build": partial(Mixture, turns=True), "loss_of": inside, "length": 12},
    "experts, full": {"build": Sparse, "loss_of": inside, "activation_checkpointing": "full"},
    "experts, cheap": {"build": Sparse, "loss_of": inside, "activation_checkpointing": "cheap"},
}


@pytest.mark.parametrize("name", PROVEN)
def test_options_are_proven(fake_ranks, name):
    fake_ranks(2)
    prove(**{"build": Tokens, "loss_of": of_logits} | PROVEN[name])


@on_ranks(2)
def test_torchcompile():
    options = {"executors": ["sdpa", shardtrace.kernels, "torchcompile"]}
    with uncompiled():
        train_both(partial(Tokens, layers=1), of_logits, steps=1, compile_policy=CompilePolicy(jit=options))


# ---- models, masks and losses ----


class WithLoss(nn.Module):
    """Returns a loss of logits and labels."""

    def __init__(self, loss):
        super().__init__()
        self.embedding, self.head, self.loss = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB), loss

    def forward(self, x, y):
        return self.loss(self.head(self.embedding(x).tanh()), y, x)


class WithBatch(WithLoss):
    def forward(self, batch):
        return super().forward(batch["x"], batch["y"])


class WithAdapter(Tokens):
    """Its own parameters are frozen."""

    def __init__(self):
        super().__init__(layers=1)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, tokens):
        h = self.embedding(tokens)
        return self.head(self.layers[0](h + self.up(self.down(h))))


class Pooled(Tokens):
    """The loss of one prediction for each sequence."""

    def forward(self, x, y):
        h, seen = self.layers[0](self.embedding(x)), (x > 3).unsqueeze(-1)
        mean = (h * seen).sum(1) / seen.sum(1)
        return F.cross_entropy(self.head(h[:, 0] + h[:, -1] + mean + h.amax(1)), y[:, 0])


class Mixing(Tokens):
    """Lines that mix positions, and one that writes into a buffer."""

    def __init__(self):
        super().__init__(layers=1)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        h = self.norm(self.embedding(x).mT).mT
        self.seen.add_(h.detach().mean((0, 1)))
        h = (h.cumsum(1) / 10).flip(1).roll(1, 1)
        return self.head(h.softmax(1) + h.sort(1).values + h[:, -1:])


class Sliced(Tokens):
    """Slices that take the whole sequence, counted from its end, and others."""

    def __init__(self):
        super().__init__(layers=1)
        self.positions = nn.Embedding(64, 1)

    def forward(self, x):
        T = x.shape[1]
        h = self.embedding(x)[:, -T:]
        h[..., -T:, 0] = 1
        row = torch.arange(T)
        bias = self.positions(row[:, None] - row + 32).permute(2, 0, 1)[None]  # as T5's
        h = self.layers[0](h.narrow(1, -T, T), bias[..., -T - 5 : T + 5, :])
        first, second = h[:, -T:, None].squeeze(2).split([3, T - 3], 1)
        h = torch.cat([second, first], 1) + h[:, -2:].flip(1).sum(1, keepdim=True) + h[-2:, -T::2].mean(1, keepdim=True)
        return self.head(F.pad(h[:, :-1], (0, 0, 1, 0)) + h.select(1, -1)[:, None])


class Counted(Tokens):
    """Positions that leave out a token, as RoBERTa's."""

    def __init__(self):
        super().__init__(layers=1)
        self.positions = nn.Embedding(64, 16)

    def forward(self, x):
        seen = x.ne(3).int()
        return self.head(
            self.layers[0](self.embedding(x) + self.positions((seen.cumsum(1).type_as(seen) * seen).long()))
        )


def overlapping(h):
    """Windows of four positions, as Longformer's. With one sequence ``q`` is no copy."""
    B, T, D = h.shape
    q = h.view(B, T, 2, D // 2).transpose(1, 2).reshape(2 * B, T, D // 2).view(2 * B, T // 4, 4, D // 2)
    first, second, *last = q.stride()
    found = q.as_strided((2 * B, T // 2 - 1, 4, D // 2), (first, second // 2, *last))
    return found.mean((0, 1, 2)).repeat(2) + h


def of_another_order(function):
    return lambda h: function(h.mT, h.shape, h.stride())


def written(h):
    h = h.clone()
    h.mT.as_strided((h.shape[0], h.shape[2]), (h.stride(0), 1)).mul_(2)
    return h


class OfTheUser(torch.autograd.Function):
    """Relies on the strides of its argument, as a kernel may."""

    @staticmethod
    def forward(ctx, x):
        B, D, T = x.shape
        return x.as_strided((B, T, D), (T * D, D, 1)) * 2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad.mT


@torch.library.custom_op("shardtrace_tests::doubled_parts", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    B, D, T = x.shape
    return x.as_strided((B, T, D), (T * D, D, 1)) * 2


@doubled.register_fake
def _(x):
    return torch.empty_like(x.mT, memory_format=torch.contiguous_format)


# elements by where they lie in memory
LYING = {
    "overlapping": overlapping,
    "method": of_another_order(torch.Tensor.as_strided),
    "function": of_another_order(lambda x, size, stride: torch.as_strided(input=x, size=size, stride=stride)),
    "operator": of_another_order(torch.ops.aten.as_strided.default),
    "copy": of_another_order(torch.as_strided_copy),
    "scattered": lambda h: torch.as_strided_scatter(h.mT.mT, h[:, 0] * 2, (h.shape[0], 16), (h.stride(0), 1)),
    "beyond": lambda h: h[:, 1:5].as_strided(h.shape, h.stride(), 0) + h,
    "detached": lambda h: h.detach().mT.as_strided(h.shape, h.stride()) + h,
    "written": written,
    "of the user": lambda h: OfTheUser.apply(h.mT),
    "operator of the user": lambda h: doubled(h.detach().mT) + h,
}


class Lying(Tokens):
    def __init__(self, *functions):
        super().__init__(layers=1)
        self.functions = functions

    def forward(self, x):
        h = self.embedding(x)
        return self.head(self.layers[0](sum(f(self.layers[0].up(h)) for f in self.functions)))


class SequenceFirst(Tokens):
    def forward(self, x, y):
        return F.cross_entropy(super().forward(x.t()).flatten(0, 1), y.t().flatten())


def smoothed(logits, y, x):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=3, label_smoothing=0.1)


def weighted(logits, y, x):
    return F.cross_entropy(logits.transpose(1, 2), y, torch.linspace(0, 1, VOCAB))


def of_tokens_that_count(logits, y, x):
    loss, counts = F.cross_entropy(logits.mT, y, reduction="none"), y > 3
    return (loss * counts).sum() / counts.sum()


def by_hand(logits, y, x):
    return -logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean() + F.mse_loss(logits, logits.detach().roll(1, 0))


def shifted(logits, y, x):
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), x[:, 1:].reshape(-1))


def with_ignored_labels(model, x, y):
    y = y.clone()
    y[:, :4], y[1, -2:] = -100, -100
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), label_smoothing=0.1)


def with_mask(model, x, y, *, heads=1):
    """Causal, and within the same document."""
    document = (torch.arange(x.shape[1]) >= 5).long()
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & (document[:, None] == document)
    return of_logits(model, x, y, mask.expand(x.shape[0], heads, -1, -1).contiguous())


def recomputed(layer, x, mask):
    return checkpoint(layer, x, mask, use_reentrant=False)


CASES = {
    **{
        f.__name__: (partial(WithLoss, f), inside) for f in (smoothed, weighted, of_tokens_that_count, by_hand, shifted)
    },
    "pooled": (Pooled, inside),
    "mixing": (Mixing, of_logits),
    "sliced": (Sliced, of_logits),
    "counted": (Counted, of_logits),
    "adapter": (WithAdapter, of_logits),
    "dict": (partial(WithBatch, smoothed), lambda model, x, y: model({"x": x, "y": y})),
    "ignored labels": (Tokens, with_ignored_labels),
    "mask of each head": (partial(Tokens, heads=4), partial(with_mask, heads=4)),
    "torch checkpoint": (partial(Tokens, around=recomputed), of_logits),
    "loss outside": (gpt, of_logits),
}


LENGTHS = [*((name, 13) for name in CASES), *((name, 12) for name in ("by_hand", "shifted", "sliced"))]


@pytest.mark.parametrize(("name", "length"), LENGTHS)
def test_cases(fake_ranks, name, length):
    """Numbers of some are below; the laws are run by comm/test_sequence.py."""
    fake_ranks(2)
    prove(*CASES[name], length=length)


@pytest.mark.parametrize("name", ["of_tokens_that_count", "pooled", "mixing"])
@on_ranks(2)
def test_numbers_of_cases(name):
    build, loss_of = CASES[name]
    model = train_both(build, loss_of, steps=1)
    assert all(map(on_each_rank_equal, model.buffers()))


@on_ranks(4)
def test_mask_of_four_parts():
    train_both(Tokens, with_mask, shape=(1, 4), steps=1)


@pytest.mark.parametrize(("rows", "names"), [(1, list(LYING)), (2, ["overlapping"])], ids=["1", "2"])
@on_ranks(2)
def test_elements_by_where_they_lie(rows, names):
    build = partial(Lying, *(LYING[name] for name in names))
    model = train_both(build, of_logits, rows=rows, length=12, steps=1)
    assert shardtrace.prove(model).verdict == "proven"


@pytest.mark.parametrize("name", ["method", "copy"])
def test_elements_by_where_they_lie_are_not_proven(fake_ranks, monkeypatch, name):
    """Lines that do not say how their tensor lies."""
    fake_ranks(2)
    monkeypatch.setattr("shardtrace.record.replay.of_memory", lambda function: "")
    model = shardtrace.fsdp(Lying(LYING[name]), mesh=mesh_of((1, 2)), context_parallel="context")
    with pytest.raises(UnprovenStepError, match="by where they lie"):
        of_logits(model, *batch(0, 12)).backward()


def test_padding_in_a_llama(fake_ranks):
    fake_ranks(4)
    build = partial(hugging_face, "Llama", tie_word_embeddings=True)
    prove(build, with_padding, shape=(2, 2), activation_checkpointing="full")


@on_ranks(2)
def test_the_sequence_may_be_the_first_dimension():
    def loss_of(model, x, y):
        return model(x.t().contiguous(), y.t().contiguous())

    train_both(SequenceFirst, loss_of, steps=1, context=ContextParallel("context", sequence_dim=0))


@on_ranks(2)
def test_two_calls_in_one_function():
    def function(model, x, y):
        return of_logits(model, x, y) + of_logits(model, y, x)

    train_both(partial(Tokens, layers=1), function, steps=1, step=thunder.jit(function))


# ---- what goes in and comes out ----


def both(build, **options):
    """A model, and a copy of it whose sequences are split over two ranks."""
    torch.manual_seed(0)
    whole = build()
    options = {"context_parallel": "context"} | options
    return whole, shardtrace.fsdp(copy.deepcopy(whole), mesh=mesh_of((1, 2)), **options)


@on_ranks(2)
def test_gradients_of_arguments_are_whole():
    class Prefixed(Hidden):
        def forward(self, x, prefix, scale):
            return super().forward((x + prefix) * scale)

    whole, model = both(Prefixed)
    torch.manual_seed(0)
    given = [torch.randn(2, 13, 16), torch.randn(2, 1, 16), torch.tensor(1.5)]  # only the first one is split
    seen = []
    for m in (whole, model):
        args = [t.clone().requires_grad_() for t in given]
        loss = m(*args).pow(2).mean()
        loss.backward()
        seen.append((loss.detach(), [t.grad for t in args]))
    torch.testing.assert_close(*seen)
    compare_gradients(model, whole, 1e-5)


@on_ranks(2)
def test_gradients_of_ignored_parameters_are_whole():
    whole = Tokens()
    model = copy.deepcopy(whole)
    shardtrace.fsdp(model, mesh=mesh_of((1, 2)), context_parallel="context", ignored_params=[model.head.weight])
    for m in (whole, model):
        of_logits(m, *batch(0, 13)).backward()
    torch.testing.assert_close(model.head.weight.grad, whole.head.weight.grad)
    compare_gradients(model, whole, 1e-5)


@on_ranks(2)
def test_results_are_whole_without_gradients():
    whole, model = both(lambda: nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)))
    tokens, _ = batch(0, 13)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), whole(tokens))
    torch.testing.assert_close(model.eval()(tokens), whole.eval()(tokens))


@on_ranks(2)
def test_named_arguments_and_hidden_states():
    from transformers import BatchEncoding

    whole, model = both(partial(hugging_face, "Llama"))
    tokens, labels = batch(0, 13)
    given = BatchEncoding({"input_ids": tokens, "labels": labels, "attention_mask": padded(tokens)})
    expected, found = (m(**given, output_hidden_states=True) for m in (whole, model))
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    for out in (expected, found):
        (out.loss + out.hidden_states[1].pow(2).mean()).backward()
    compare_gradients(model, whole, 1e-5)


@on_ranks(2)
def test_parts_of_results():
    """The sum over ranks of the losses of parts is differentiated."""
    whole, model = both(Tokens, context_parallel=ContextParallel("context", returns="part"))
    x, y = batch(0, 16)
    mine = torch.arange(16).view(4, 4)[[dist.get_rank(), 3 - dist.get_rank()]].flatten()
    found, expected = model(x), whole(x)
    torch.testing.assert_close(found, expected[:, mine])
    F.cross_entropy(expected.flatten(0, 1), y.flatten()).backward()
    (F.cross_entropy(found.flatten(0, 1), y[:, mine].flatten(), reduction="sum") / y.numel()).backward()
    compare_gradients(model, whole, 1e-5)


@on_ranks(2)
def test_dropout_differs_between_ranks():
    model = shardtrace.fsdp(gpt(dropout=0.5), mesh=mesh_of((1, 2)), context_parallel="context")
    torch.manual_seed(dist.get_rank())
    x, _ = batch(0, 16)
    torch.manual_seed(dist.get_rank())
    loss = model(x, x)
    loss.backward()
    assert torch.isfinite(loss)
    assert on_each_rank_equal(loss.detach())
    assert all(g.isfinite().all() for g in shardtrace.full_gradients(model).values())
    before = model.wte.weight.grad.clone()
    model.zero_grad()
    model(x, x).backward()
    assert not torch.equal(before, model.wte.weight.grad)  # drawn anew


# ---- experts over ranks with batches of their own ----


@on_ranks(4)
def test_experts_of_ranks_with_their_own_batches():
    """Losses are those of the batches of the ranks of "expert", gradients those of all."""
    torch.manual_seed(0)
    whole = Sparse(layers=1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = shardtrace.fsdp(copy.deepcopy(whole), mesh=mesh, expert_parallel="expert")
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (whole, model)]
    for step in range(2):
        batches = [batch(step * 4 + rank, 7, rows=3) for rank in range(4)]
        losses = [whole(*b) for b in batches]
        torch.stack(losses).mean().backward()
        loss = model(*batches[dist.get_rank()])
        loss.backward()
        row = mesh.get_local_rank("data")
        torch.testing.assert_close(loss, torch.stack(losses).view(2, 2)[row].mean())
        compare_gradients(model, whole, 1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_experts_of_ranks_with_their_own_batches_are_proven(fake_ranks):
    fake_ranks(4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("expert",))
    model = shardtrace.fsdp(Sparse(), mesh=mesh, expert_parallel="expert", activation_checkpointing="full")
    own = batch(0, 7, 1)
    assert shardtrace.shard_sequence(model, own) is own
    inside(model, *own).backward()
    assert shardtrace.prove(model).verdict == "proven"
    received = [row.bytes for row in shardtrace.collectives(model) if row.parameters and "up" in row.parameters[0]]
    assert received == [4 * 48 * 8 * 4 // 4] * 6  # a quarter of the experts of two layers: two gathers, one reduction


class Layers(Sparse):
    """States (B, T, 8) to logits: what comes before, and the loss, are the script's."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


@pytest.mark.parametrize("factor", [None, 1])
@on_ranks(4)
def test_losses_that_the_script_computes_of_its_own_batch(factor):
    """They are averaged over all ranks, as without experts, or divided by the user's factor. What the script has
    computed before gets the gradient of this rank's loss."""
    torch.manual_seed(0)
    whole = Layers(layers=1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    policy = CommPolicy(gradient_divide_factor=factor)
    model = shardtrace.fsdp(copy.deepcopy(whole), mesh=mesh, expert_parallel="expert", comm_policy=policy)
    batches = [(torch.randn(2, 7, 8, requires_grad=True), batch(rank, 7, rows=2)[1]) for rank in range(4)]
    losses = [F.cross_entropy(whole(h).flatten(0, 1), labels.flatten()) for h, labels in batches]
    (torch.stack(losses).sum() / (factor or 4)).backward()
    h, labels = batches[dist.get_rank()]
    own = h.detach().requires_grad_()
    loss = F.cross_entropy(model(own).flatten(0, 1), labels.flatten())
    loss.backward()
    torch.testing.assert_close(loss, losses[dist.get_rank()])
    torch.testing.assert_close(own.grad, (factor or 4) * h.grad)
    compare_gradients(model, whole, 1e-5)


def test_own_parts_without_their_gradients_are_not_proven(fake_ranks, monkeypatch):
    fake_ranks(2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))

    def verdict():
        model = shardtrace.fsdp(Layers(layers=1), mesh=mesh, expert_parallel="expert", checks=Checks(prove=False))
        model(torch.randn(2, 7, 8, requires_grad=True)).sum().backward()
        return shardtrace.prove(model).verdict

    assert verdict() == "proven"
    for symbol in ("to_own_output", "from_own_input"):
        with monkeypatch.context() as without:
            for module in ("sequence", "split"):
                without.setattr(sys.modules[f"passes.{module}"], symbol, lambda x, part: x, raising=False)
            assert verdict() == "unproven", symbol


class Summed(Sparse):
    """As models of transformers take what the Trainer counts."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, labels) * labels.numel() / others.get("num_items_in_batch", labels.numel())


def test_what_experts_refuse(fake_ranks):
    fake_ranks(2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
    model = shardtrace.fsdp(Tokens(), mesh=mesh, expert_parallel="expert")
    with pytest.raises(
        RuntimeError, match=r"expert_parallel: no experts can be computed in 2 parts. They are found by"
    ):
        model(batch(0, 7)[0])
    model = shardtrace.fsdp(Summed(), mesh=mesh, expert_parallel="expert")
    with pytest.raises(RuntimeError, match=r"Summed is given num_items_in_batch.*accepts_loss_kwargs = False"):
        model(*batch(0, 7), num_items_in_batch=torch.tensor(14))
    with pytest.raises(ValueError, match=r"expert_parallel and context_parallel both say .*: choose one"):
        shardtrace.fsdp(Tokens(), mesh=mesh, expert_parallel="expert", context_parallel="expert")
    with pytest.raises(TypeError, match="expert_parallel must be the name of a mesh dimension, not 2"):
        shardtrace.fsdp(Tokens(), mesh=mesh, expert_parallel=2)
    with pytest.raises(
        ValueError, match=r"expert_parallel='ep' needs .*, not one of \('expert',\): .*\('data', 'ep'\)"
    ):
        shardtrace.fsdp(Tokens(), mesh=mesh, expert_parallel="ep")
    with pytest.raises(ValueError, match="expert_parallel and tensor_parallel both name 'expert'"):
        shardtrace.fsdp(Tokens(), mesh=mesh, expert_parallel="expert", tensor_parallel="expert")


def test_experts_are_inspected_on_a_mesh():
    found = shardtrace.inspect(Sparse(), batch(0, 7, 1), mesh_shape=(2, 2), expert_parallel="expert")
    received = {row.bytes for row in found.collectives if row.parameters and "up" in row.parameters[0]}
    assert received == {4 * 48 * 8 * 4 // 2}  # half of the experts of a layer
