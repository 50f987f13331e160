"""Losses and gradients of models whose ranks compute with parts of parameters are those of one process."""

from functools import partial

import shardtrace
from passes.plan import CostModel, Device, Link
from shardtrace import CommPolicy, CompilePolicy, ContextParallel

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from contexts import (
    Mixture,
    Shared,
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
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    zero = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=4, **zero))


class Model(nn.Module):
    """Tokens (B, T) to logits (B, T, 32), by attention with a head of keys for each rank and a gated product."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(32, 8), Shared(8, 4, 2, by="slices")
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 32)

    def forward(self, tokens):
        h = self.embedding(tokens)
        h = h + self.attention(self.norm(h))
        return self.head(h + self.down(F.silu(self.gate(h)) * self.up(h)))


class Tied(nn.Module):
    """One weight is cut in a product, and whole in an embedding; another product is frozen; channels are normalized."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(32, 8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.up.weight = self.embedding.weight
        self.frozen, self.norm, self.back = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(8, 32)

    def forward(self, tokens):
        h = self.embedding(tokens)
        h = h + self.down(F.gelu(self.up(h)))
        return self.head(h + self.back(self.norm(self.frozen(h).transpose(1, 2)).transpose(1, 2)))


adamw = partial(torch.optim.AdamW, eps=1e-3)  # the gradient of a bias of keys is 0, and rounded
ROWS = {"gpt": (2, 13), "llama": (3, 12)}  # each rank has rows of the batch, or of the sequences
MODELS = {
    "gpt": (partial(gpt, layers=2), inside),
    "gpt2": (gpt2, of_hugging_face),
    "llama": (partial(hugging_face, "Llama"), of_hugging_face),
}
LOSS = CompilePolicy(returns="loss")  # on parts of the vocabulary


@pytest.mark.parametrize("model", ROWS)
@on_ranks(2)
def test_models(model):
    rows, length = ROWS[model]
    options = {"optimizer": adamw, "steps": 3, "compile_policy": LOSS}
    train_both(*MODELS[model], tensor="tensor", rows=rows, length=length, **options)


MESHES = {  # other models are proven on them
    "2x2": {"build": Model, "loss_of": of_logits, "shape": (2, 2), "length": 12, "sharding_strategy": "zero2"},
    "1x2x2": {"build": gpt, "loss_of": inside, "shape": (1, 2, 2), "activation_checkpointing": "full"},
}


@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(4)
def test_meshes_of_four_ranks(mesh):
    train_both(**{"compile_policy": LOSS, "length": 16} | MESHES[mesh], tensor="tensor", optimizer=adamw)


@pytest.mark.parametrize("arguments", ["whole", "part"])
def test_evaluation_and_sums_are_proven(fake_ranks, arguments):
    fake_ranks(4)
    context = ContextParallel("context", arguments=arguments)
    mesh = mesh_of((1, 2, 2), "context", "tensor")
    parallel = {"mesh": mesh, "context_parallel": context, "tensor_parallel": "tensor"}
    model = shardtrace.fsdp(gpt(), activation_checkpointing="full", **parallel)
    with torch.no_grad():
        model(*batch(0, 8))
    assert shardtrace.prove(model).verdict == "proven"
    with shardtrace.no_sync(model):
        model(*batch(0, 8)).backward()
    assert shardtrace.prove(model).verdict == "proven"


PHASES = {"forward": "all_gather_parts", "backward": "reduce_scatter_parts"}  # and what the loss sends in them


@pytest.mark.parametrize("mesh", [("tensor",), ("context", "tensor")], ids="+".join)
@pytest.mark.parametrize("model", MODELS)
def test_models_are_proven_and_send_what_megatron_sends(fake_ranks, model, mesh):
    fake_ranks(4)
    build, loss_of = MODELS[model]
    parallel = {f"{name}_parallel": name for name in mesh}
    shape = (4 // 2 ** len(mesh), *[2] * len(mesh))
    sharded = shardtrace.fsdp(build(), mesh=mesh_of(shape, *mesh), compile_policy=LOSS, **parallel)
    length = 12 if mesh == ("tensor",) else 8
    tokens, labels = batch(0, length, rows=1)
    loss_of(sharded, tokens, labels).backward()
    assert shardtrace.prove(sharded).verdict == "proven"
    layers, hidden, rows = 2 if model == "gpt" else 1, 16 * length * 4, 3 * 2 * length * 4
    halves = ["reduce_scatter_parts", "all_gather_parts"]
    sums = [(half, hidden) for half in halves] * (2 * layers + 1)  # after each attention and each MLP, and of tables
    sent = {phase: [row for row in shardtrace.collectives(sharded) if row.phase == phase] for phase in PHASES}
    for phase, kind in PHASES.items():
        of_tensors = [(row.kind, row.bytes * len(mesh)) for row in sent[phase] if row.bucket.startswith("tensor")]
        assert sorted(of_tensors) == sorted([(kind, rows), *sums])


class Unread(nn.Module):
    """Its second result, of which the loss reads nothing, comes of products that are cut."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.read, self.unread = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 32)) for _ in range(2))

    def forward(self, tokens):
        h = self.embedding(tokens)
        return self.read(h), self.unread(h)


def of_first(model, x, y):
    return F.cross_entropy(model(x)[0].flatten(0, 1).float(), y.flatten())


# With this cost model, even small products are computed while their rows travel
LARGE = CostModel(Link(1e6, latency=0.0), Device(1e6, 1e6, bandwidth=1e12, overhead=0.0))
OPTIONS = {
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False), "rows": 1},
    "tied and frozen": {"build": Tied, "steps": 2},
    "one rank": {"shape": (2, 1)},
    "without gradients, added up": {"build": Unread, "loss_of": of_first, "micro": 3},
    "without gradients, not split": {"build": Unread, "loss_of": of_first, "sharding_strategy": "ddp"},
    "products in pieces": {"rows": 4, "compile_policy": CompilePolicy(cost_model=LARGE)},
    "experts": {"build": partial(Mixture, turns=True), "loss_of": inside, "optimizer": adamw, "compile_policy": LOSS},
}


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_options(name):
    train_both(**{"build": Model, "loss_of": of_logits, "tensor": "tensor", "steps": 1} | OPTIONS[name])


PROVEN = {
    "ddp, bf16": {"sharding_strategy": "ddp", "mp_policy": "bf16"},
    "owner, sums": {"sharding_strategy": "owner", "comm_policy": CommPolicy(sum_reductions=True)},
    "zero3, sums": {"comm_policy": CommPolicy(sum_reductions=True)},
    "int8": {"comm_policy": CommPolicy(gather_dtype="int8"), "build": partial(Tokens, width=64), "verdict": "rounding"},
    "without gradients": {"build": Unread, "loss_of": of_first},
}


@pytest.mark.parametrize("name", PROVEN)
def test_options_are_proven(fake_ranks, name):
    """Two rows of ranks share what each of them has of a parameter."""
    fake_ranks(4)
    options = {"build": Model, "loss_of": of_logits, "verdict": "proven"} | PROVEN[name]
    build, loss_of, verdict = (options.pop(key) for key in ("build", "loss_of", "verdict"))
    model = shardtrace.fsdp(build(), mesh=mesh_of((2, 2), "tensor"), tensor_parallel="tensor", **options)
    loss_of(model, *batch(0, 12)).backward()
    assert shardtrace.prove(model).verdict == verdict


@pytest.mark.parametrize("frozen", [False, True], ids=["", "first block frozen"])
@pytest.mark.parametrize("how", ["full", "cheap"])
def test_recomputed_blocks_are_proven(fake_ranks, how, frozen):
    fake_ranks(2)
    mesh = mesh_of((1, 2), "tensor")
    model = shardtrace.fsdp(gpt(layers=2), mesh=mesh, tensor_parallel="tensor", activation_checkpointing=how)
    for part in (model.wte, model.wpe, model.h[0]) if frozen else ():
        part.requires_grad_(False)
    inside(model, *batch(0, 12)).backward()
    assert shardtrace.prove(model).verdict == "proven"


@on_ranks(2)
def test_clipping_and_checkpoints_between_meshes(tmp_path):
    """Three steps of AdamW, each on another mesh than the one before it, the last one without tensor parallelism."""
    torch.manual_seed(0)
    whole = Model()
    optimizer = adamw(whole.parameters())
    for step, shape in enumerate([(2, 1), (1, 2), None]):
        torch.manual_seed(step)
        parallel = {"mesh": mesh_of(shape, "tensor"), "tensor_parallel": "tensor"} if shape else {}
        model = shardtrace.fsdp(Model(), **parallel)
        own = adamw(model.parameters())
        if step:
            shardtrace.load_checkpoint(tmp_path / str(step - 1), model, own)
        for m in (whole, model):
            of_logits(m, *batch(step, 8)).backward()
        norms = [torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1), shardtrace.clip_grad_norm_(model, 0.1)]
        torch.testing.assert_close(*norms)
        compare_gradients(model, whole, 1e-5)
        for o in (optimizer, own):
            o.step()
            o.zero_grad()
        torch.testing.assert_close(shardtrace.full_state_dict(model), whole.state_dict(), rtol=1e-5, atol=1e-5)
        shardtrace.save_checkpoint(tmp_path / str(step), model, own, step=step)


@on_ranks(2)
def test_sums_of_parts_are_not_saved(tmp_path):
    model = shardtrace.fsdp(Model(), mesh=mesh_of((1, 2), "tensor"), tensor_parallel="tensor")
    optimizer = adamw(model.parameters())
    with shardtrace.no_sync(model):
        of_logits(model, *batch(0, 8)).backward()
    with pytest.raises(shardtrace.CheckpointError, match="with a part of which each rank computes"):
        shardtrace.save_checkpoint(tmp_path, model, optimizer, step=1)


class Dropping(nn.Module):
    """One product, whose result is dropped out and scaled at random."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(4, width, bias=False)

    def forward(self, x):
        y = F.dropout(self.layer(x), 0.5, self.training)
        return torch.where(torch.rand_like(y[:, :1]) < 0.5, y, 2 * y)


@on_ranks(2)
@pytest.mark.parametrize(("rows", "width", "eager"), [(8, 64, []), (9, 33, []), (9, 33, [Dropping])])
def test_random_numbers_of_whole_values_are_equal_on_all_ranks(rows, width, eager):
    options = {"mesh": mesh_of((1, 2), "tensor"), "compile_policy": CompilePolicy(eager=eager)}
    model = shardtrace.fsdp(nn.Sequential(Dropping(width)), tensor_parallel="tensor", **options)
    x = torch.ones(rows, 4)
    torch.manual_seed(dist.get_rank())
    y = model(x)
    y.sum().backward()
    assert on_each_rank_equal(y.detach())
    product = x @ shardtrace.full_state_dict(model)["0.layer.weight"].T
    factors = (y.detach() / product).round()
    assert factors.unique().tolist() == [0, 2, 4]
    torch.testing.assert_close(y.detach(), factors * product)
    torch.testing.assert_close(shardtrace.full_gradients(model)["0.layer.weight"], factors.T @ x)
    first, second = (factors != 0).split(32, -1)  # of 64, each rank has drawn one of them
    assert width == 33 or not torch.equal(first, second)


@on_ranks(2)
def test_dropout_in_all_places():
    model = shardtrace.fsdp(gpt(dropout=0.5, layers=2), mesh=mesh_of((1, 2), "tensor"), tensor_parallel="tensor")
    x, y = batch(0, 12)
    torch.manual_seed(dist.get_rank())
    loss = model(x, y)
    loss.backward()
    assert on_each_rank_equal(loss.detach())
    before = shardtrace.full_gradients(model)["wte.weight"]
    model.zero_grad()
    model(x, y).backward()
    assert not torch.equal(before, shardtrace.full_gradients(model)["wte.weight"])  # drawn anew


@on_ranks(2)
def test_other_batches_on_ranks_of_tensors_are_refused():
    model = shardtrace.fsdp(Model(), mesh=mesh_of((1, 2), "tensor"), tensor_parallel="tensor")
    with pytest.raises(shardtrace.RankMismatchError, match="need the same batch"):
        model(batch(dist.get_rank(), 8)[0])
