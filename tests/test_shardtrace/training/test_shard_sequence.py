"""Batches of models whose sequences are split over ranks: whole ones are compared, and parts are cut by shard_sequence."""

import copy
from functools import partial

import shardtrace
from shardtrace import ContextParallel, RankMismatchError

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from contexts import (
    VOCAB,
    Convolution,
    Hidden,
    Tokens,
    batch,
    compare_gradients,
    gpt,
    hugging_face,
    mesh_of,
    of_hugging_face,
)
from ranks import on_ranks
from torch import nn

PARTS = ContextParallel("context", arguments="part")


def pair(build, context, shape=(1, 2)):
    torch.manual_seed(0)
    whole = build()
    return whole, shardtrace.fsdp(copy.deepcopy(whole), mesh=mesh_of(shape), context_parallel=context)


@on_ranks(2)
def test_parts_of_batches():
    whole, model = pair(gpt, PARTS)
    for step in range(2):
        x, y = batch(step, 16)
        expected = whole(x, y)
        loss = model(*shardtrace.shard_sequence(model, (x, y)))
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        expected.backward()
        loss.backward()
        compare_gradients(model, whole, 1e-5)


@pytest.mark.parametrize(
    "build", [partial(hugging_face, "Llama", tie_word_embeddings=True), partial(hugging_face, "Bert")]
)
def test_parts_of_batches_are_proven(fake_ranks, build):
    fake_ranks(2)
    _, model = pair(build, PARTS)
    of_hugging_face(model, *shardtrace.shard_sequence(model, batch(0, 16))).backward()
    assert shardtrace.prove(model).verdict == "proven"


@on_ranks(4)
def test_a_loss_outside_of_the_model():
    """Data differ between the ranks of "data", as in any training; everything is in parts."""
    whole, model = pair(Convolution, ContextParallel("context", arguments="part", returns="part"), (2, 2))
    batches = [batch(step, 16) for step in range(2)]
    expected = sum(F.cross_entropy(whole(x).flatten(0, 1), y.flatten()) for x, y in batches) / 2
    expected.backward()
    given = {"x": batches[dist.get_rank() // 2][0], "y": [batches[dist.get_rank() // 2][1]], "name": "a batch"}
    mine = shardtrace.shard_sequence(thunder.jit(model), given)
    assert mine["name"] == "a batch"
    assert mine["x"].shape == mine["y"][0].shape == (2, 8)
    logits = model(mine["x"])
    (F.cross_entropy(logits.flatten(0, 1), mine["y"][0].flatten(), reduction="sum") / given["x"].numel()).backward()
    compare_gradients(model, whole, 1e-5)


@on_ranks(2)
def test_gradients_and_masks_in_parts():
    """Each rank has the gradient of its part; an argument of one position is whole, and so is its gradient."""

    class Scaled(Hidden):
        def forward(self, x, scale, mask):
            return super().forward(x * scale) * mask

    whole, model = pair(Scaled, PARTS)
    torch.manual_seed(1)
    x, scale, mask = torch.randn(2, 8, 16), torch.randn(2, 1, 16), torch.rand(2, 8, 1) > 0.3
    mine = shardtrace.shard_sequence(model, (x, scale, mask))
    assert mine[1] is scale
    for m, given in ((whole, (x, scale)), (model, mine[:2])):
        given[0].requires_grad_()
        given[1].requires_grad_().grad = None
        m(*given, mask if m is whole else mine[2]).pow(2).mean().backward()
        if m is whole:
            of_scale = scale.grad
    torch.testing.assert_close(mine[0].grad, shardtrace.shard_sequence(model, x.grad))
    torch.testing.assert_close(scale.grad, of_scale)


@on_ranks(2)
def test_one_rank_has_the_whole():
    model = shardtrace.fsdp(Tokens(layers=1), mesh=mesh_of((2, 1)), context_parallel=PARTS)
    x, _ = batch(0, 13)
    assert shardtrace.shard_sequence(model, x) is x
    assert model(x).shape == (2, 13, 32)


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x.add_(1)
        return self.weight * x


@on_ranks(2)
def test_what_is_refused():
    model = shardtrace.fsdp(Tokens(layers=1), mesh=mesh_of((1, 2)), context_parallel=PARTS)
    x, _ = batch(0, 14)
    with pytest.raises(ValueError, match=r"batch\['x'\] has 14 positions in dimension 1, .* into 4 chunks"):
        shardtrace.shard_sequence(model, {"x": x})
    with pytest.raises(ValueError, match="not sharded"):
        shardtrace.shard_sequence(nn.Linear(2, 2), x)
    with pytest.raises(RuntimeError, match=r"has 7 positions in dimension 1, .* cut it with shardtrace.shard_sequence"):
        model(x[:, :7])
    with pytest.raises(
        RuntimeError, match=r"Tokens takes parts of sequences .* call the model as a whole, and jit it alone"
    ):
        thunder.jit(lambda m, x: m(x))(model, x)
    writing = shardtrace.fsdp(Writing(), mesh=mesh_of((1, 2)), context_parallel=PARTS)
    with pytest.raises(RuntimeError, match=r"forward writes into an argument .* of which this rank was given a part"):
        writing(torch.ones(2, 8))


@on_ranks(2)
def test_a_check_compares_whole_sequences():
    context = ContextParallel("context", arguments="part", returns="part")
    done = shardtrace.check(partial(Tokens, layers=1), batch(0, 13)[0], mesh=mesh_of((1, 2)), context_parallel=context)
    assert done.ok, done


# ---- whole batches ----


class Table(nn.Embedding):
    def __init__(self):
        super().__init__(VOCAB, 4)


@on_ranks(4)
def test_ranks_of_one_sequence_need_the_same_batch():
    """Ranks of different data need none, and only the first batch of each shape is compared."""
    model = shardtrace.fsdp(Table(), mesh=mesh_of((2, 2)), context_parallel="context")
    rank = dist.get_rank()
    assert torch.isfinite(model(batch(rank // 2, 13)[0])).all()
    assert torch.isfinite(model(batch(rank, 13)[0])).all()
    with pytest.raises(RankMismatchError, match=r"differ in the batch that Table is given.* let the sampler count"):
        model(batch(rank, 15)[0])
