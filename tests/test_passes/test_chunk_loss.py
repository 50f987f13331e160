"""Losses in chunks of rows: which ones, the same numbers as at once, and logits that are never there."""

import copy
import weakref

import shardtrace
from passes import chunk_loss
from passes.kernels.parts import ChunkedLoss
from passes.proof import certificates
from shardtrace import CompilePolicy

import pytest
import thunder
import torch
import torch.nn.functional as F
from contexts import mesh_of
from golden import compile_fake, stage
from thunder.core.trace import TraceCtx
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CLASSES, WIDTH = 24, 8
X = torch.randint(0, CLASSES, (3, 7), generator=torch.Generator().manual_seed(0))
Y = X.roll(1).masked_fill(X % 5 == 0, -100)


class Model(nn.Module):
    """``head(model, h, labels)`` gives the loss."""

    def __init__(self, head):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.biased = nn.Linear(WIDTH, CLASSES, bias=False), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("of_class", torch.rand(CLASSES) + 0.5)
        self.extra = nn.Parameter(torch.randn(1, CLASSES))
        self.loss = head

    def forward(self, x, labels):
        return self.loss(self, torch.tanh(self.body(self.embedding(x))), labels)


def flat(logits, labels, **options):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), **options)


def shifted(m, h, y):
    """As older releases of transformers do."""
    logits = m.head(h).float()[..., :-1, :].contiguous()
    return flat(logits, y[..., 1:].contiguous())


def with_autocast(m, h, y):
    with torch.autocast("cpu", torch.bfloat16):
        return flat(m.head(h), y)


HEADS = {
    "plain": lambda m, h, y: flat(m.head(h), y),
    "rows": lambda m, h, y: F.cross_entropy(m.head(h.flatten(0, 1)), y.flatten()),
    "some rows": lambda m, h, y: F.cross_entropy(m.head(h[:, -1]), y[:, -1]),
    "bias": lambda m, h, y: flat(m.biased(h), y),
    "bias of another parameter": lambda m, h, y: flat(m.head(h) + m.extra, y),
    "bias of a buffer": lambda m, h, y: flat(m.of_class + m.head(h), y),
    "tied": lambda m, h, y: flat(h @ m.embedding.weight.T, y),
    "tied in a linear": lambda m, h, y: flat(F.linear(h, m.embedding.weight), y),
    "shifted": shifted,
    "soft cap": lambda m, h, y: flat(30 * torch.tanh(m.head(h) / 30), y),
    "scaled in place": lambda m, h, y: flat(m.head(h).mul_(0.5), y),
    "cast": lambda m, h, y: flat(m.head(h).double(), y),
    "autocast": with_autocast,
    "sum": lambda m, h, y: flat(m.head(h), y, reduction="sum"),
    "smoothed": lambda m, h, y: flat(m.head(h), y, label_smoothing=0.1),
    "weights of classes": lambda m, h, y: flat(m.head(h), y, weight=m.of_class, label_smoothing=0.2),
    "another label": lambda m, h, y: flat(m.head(h), y.clamp(min=0), ignore_index=0),
    "rows without a gradient": lambda m, h, y: flat(m.biased(h.detach()), y),
    "weight without a gradient": lambda m, h, y: flat(F.linear(h, m.head.weight.detach()), y),
    "two losses": lambda m, h, y: flat(m.head(h), y) + flat(m.biased(h), y) / 2,
    "a function of the loss": lambda m, h, y: torch.exp(flat(m.head(h), y)),
}


def seen_twice(m, h, y):
    logits = m.head(h)
    return flat(logits, y) + 1e-4 * logits.logsumexp(-1).square().mean()


AT_ONCE = {
    "returned": lambda m, h, y: (lambda logits: (flat(logits, y), logits))(m.head(h)),
    "seen twice": seen_twice,
    "of each row": lambda m, h, y: flat(m.head(h), y, reduction="none").mean(),
    "probabilities": lambda m, h, y: F.cross_entropy(m.head(h).flatten(0, 1), m.of_class.expand(y.numel(), CLASSES)),
    "dropout": lambda m, h, y: flat(F.dropout(m.head(h)), y),
    "other classes": lambda m, h, y: flat(m.head(h)[..., :20].contiguous(), y.clamp(max=19)),
    "classes first": lambda m, h, y: F.cross_entropy(m.head(h).transpose(1, 2), y),
    "without a product": lambda m, h, y: flat(m.embedding(y.clamp(min=0)).repeat(1, 1, 3) * m.extra, y),
    "a cap that is a tensor": lambda m, h, y: flat(torch.tanh(m.head(h) / m.of_class) * m.of_class, y),
}


def is_chunked(cmodel):
    return any(b.sym.name.startswith("torch_chunked_loss") for b in thunder.last_traces(cmodel)[-1].bound_symbols)


def compiled(model, chunks=4, **options):
    return thunder.jit(shardtrace.fsdp(model, compile_policy=CompilePolicy(chunk_loss=chunks, **options)))


def step(run, model, labels=Y, factor=3.0):
    model.zero_grad()
    result = run(X, labels)
    loss = result[0] if isinstance(result, tuple) else result
    (loss * factor).backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def assert_equal(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}), equal_nan=True)


@pytest.mark.parametrize("name", [*HEADS, *AT_ONCE])
def test_loss_and_gradients_are_those_of_eager(name, single_rank):
    eager = Model((HEADS | AT_ONCE)[name])
    model = copy.deepcopy(eager)
    cmodel = compiled(model)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if name == "autocast" else {}
    labels = Y.clamp(max=19) if name == "other classes" else Y
    torch.manual_seed(1)
    expected = step(eager, eager, labels)
    torch.manual_seed(1)
    assert_equal(step(cmodel, model, labels), expected, **tolerance)
    assert is_chunked(cmodel) == (name in HEADS)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = eager(X, labels)
        torch.manual_seed(1)
        assert_equal(tree_leaves(cmodel(X, labels)), tree_leaves(expected), **tolerance)


def test_a_batch_without_a_label(single_rank):
    eager = Model(HEADS["plain"])
    model = copy.deepcopy(eager)
    found = step(compiled(model), model, torch.full_like(Y, -100))
    assert found[0].isnan()
    assert_equal(found, step(eager, eager, torch.full_like(Y, -100)))


def test_backward_again(single_rank):
    model = Model(HEADS["bias"])
    loss = compiled(model)(X, Y)
    once, again = (torch.autograd.grad(loss, model.biased.weight, retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(once, again)


def test_half_precision_keeps_small_gradients():
    """The gradients of a mean over many rows are zero in float16 unless a GradScaler's factor comes first."""
    torch.manual_seed(0)
    rows, weight = (torch.randn(n, WIDTH).half().requires_grad_() for n in (4096, CLASSES))
    labels = torch.randint(0, CLASSES, (4096,))
    loss = ChunkedLoss(8)(rows, weight, labels)
    assert loss.dtype == torch.float16
    found = torch.autograd.grad(loss, (rows, weight), torch.tensor(2.0**15, dtype=torch.float16))
    wide = [t.detach().float().requires_grad_() for t in (rows, weight)]
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*wide), labels), wide, torch.tensor(2.0**15))
    assert_equal(found, [g.half() for g in expected], rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_no_rank_gathers_the_head_again(fake_ranks, strategy):
    """And logits are not saved."""
    fake_ranks(2)
    cmodel = compile_fake(
        lambda: Model(HEADS["plain"]), X, Y, sharding_strategy=strategy, bucketing_strategy="layer",
        compile_policy=CompilePolicy(chunk_loss=3),
    )  # fmt: skip
    assert is_chunked(cmodel)
    _, (saved, _) = stage(cmodel, "schedule").bound_symbols[-1].args
    assert all(t.numel < X.numel() * CLASSES for t in saved if hasattr(t, "numel"))
    backward = thunder.last_backward_traces(cmodel)[-1]
    assert not any("unused" in b.sym.name for b in backward.bound_symbols)  # gradients are always there
    gathers = [str(b) for b in backward.bound_symbols if b.sym.name == "all_gather"]
    assert bool(gathers) == (strategy == "zero3")
    assert not any("head" in gather for gather in gathers)


def test_parts_of_a_sequence(fake_ranks):
    """Each rank chunks the rows of its part. The step is proven."""
    fake_ranks(4)
    model = shardtrace.fsdp(
        Model(HEADS["soft cap"]), mesh=mesh_of((1, 4)), context_parallel="context",
        compile_policy=CompilePolicy(chunk_loss=2),
    )  # fmt: skip
    cmodel = thunder.jit(model)
    x = torch.randint(0, CLASSES, (2, 32))
    cmodel(x, x)
    assert is_chunked(cmodel)
    assert shardtrace.prove(cmodel).verdict == "proven"


class Meter(TorchDispatchMode):
    """Measures the largest tensor that an operator makes, in elements, and the peak of new memory, in bytes."""

    def __init__(self, known):
        super().__init__()
        self.known, self.new = {t.untyped_storage()._cdata for t in known}, {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in (t for t in tree_leaves(result) if isinstance(t, torch.Tensor)):
            storage = t.untyped_storage()
            self.largest = max(self.largest, t.numel())
            if storage._cdata not in {*self.known, *self.new}:
                self.new[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.new.pop, storage._cdata)
                self.peak = max(self.peak, sum(self.new.values()))
        return result


def test_memory(single_rank, monkeypatch):
    """No tensor has the elements of the logits. The prediction is the measured peak."""
    monkeypatch.setattr(chunk_loss, "LEAST_BYTES", 1000)
    monkeypatch.setattr(chunk_loss, "LEAST_ROWS", 8)
    x, y = (torch.randint(0, CLASSES, (16, 128)) for _ in range(2))
    peaks = []
    for chunks in (None, "auto"):
        model = Model(HEADS["plain"])
        cmodel = compiled(model, chunks)
        for _ in range(2):  # the second step records again, on fake tensors
            cmodel(x, y)
        with Meter([*model.parameters(), *model.buffers(), x, y]) as meter:
            cmodel(x, y).backward()
        assert (meter.largest == x.numel() * CLASSES) == (chunks is None)
        given = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x, y))
        peaks.append(shardtrace.memory(cmodel).peak)
        assert peaks[-1] - given == pytest.approx(meter.peak, rel=0.02)
    assert peaks[1] < peaks[0] - 4 * x.numel() * CLASSES


def test_how_many_chunks():
    def count(rows, classes, chunks="auto"):
        call = chunk_loss.TorchLine("", (torch.empty(rows, classes, device="meta"),), {}, (), ())
        return chunk_loss._count(chunks, call)

    assert [count(8, 100, 4), count(3, 100, 4), count(512, 1000)] == [4, 3, 1]
    assert [count(8192, 50304), count(1 << 16, 128256), count(512, 128256)] == [8, 32, 4]


# ---- results without logits ----


def test_only_the_loss_is_returned(single_rank):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=CLASSES, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=16)
    eager = transformers.GPT2LMHeadModel(config).eval()
    model = copy.deepcopy(eager)
    cmodel = compiled(model, returns="loss")
    expected, found = (run(input_ids=X, labels=Y) for run in (eager, cmodel))
    assert type(found) is type(expected)
    torch.testing.assert_close(found.loss, expected.loss)
    assert is_chunked(cmodel)
    for read in (lambda t: t.argmax(-1), lambda t: t[:, -1], lambda t: torch.softmax(t, -1), lambda t: t / 2, len):
        with pytest.raises(
            RuntimeError, match=r'logits of the result is not computed .* CompilePolicy\(returns="loss"\)'
        ):
            read(found.logits)
    torch.testing.assert_close(cmodel(input_ids=X).logits, eager(input_ids=X).logits)  # no loss, no labels


def test_only_the_loss_of_a_tuple_is_returned(single_rank):
    model = Model(AT_ONCE["returned"])
    cmodel = compiled(model, returns="loss")
    for _ in range(3):  # the recording is made again
        loss, logits = cmodel(X, Y)
    assert loss.ndim == 0
    assert is_chunked(cmodel)
    with pytest.raises(RuntimeError, match="a tensor of the result is not computed"):
        logits.sum()


# ---- the proof ----


class Forgets(ChunkedLoss):
    """Loses what the last chunk has."""

    def slices(self, rows):
        return list(super().slices(rows))[:-1]


def test_a_line_that_is_not_the_loss_is_found(single_rank):
    def trace_with(function):
        cmodel = compiled(Model(HEADS["soft cap"]))
        cmodel(X, Y)
        trace: TraceCtx = stage(cmodel, "chunk_loss")
        (line,) = (b for b in trace.bound_symbols if b.sym.name.startswith("torch_chunked_loss"))
        line.sym.id.function = function(**vars(line.sym.id.function))
        return trace

    assert not [*certificates.wrong_losses(trace_with(ChunkedLoss))]
    (text,) = certificates.wrong_losses(trace_with(Forgets))
    assert text.startswith("a loss in 4 chunks is not the loss of all rows: loss: ")
