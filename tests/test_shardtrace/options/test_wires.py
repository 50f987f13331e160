"""``gather_dtype``, ``reduce_wire`` and ``error_feedback``: what they choose, what they refuse, and training with them."""

import copy
import re

import shardtrace
from passes import Wire
from passes.analysis.recognise import bucket_of, is_issue
from passes.comm.quantized import INT8, gather_wire, reduction_wire
from shardtrace.model.state import state_of
from shardtrace.options.policies import grouped
from shardtrace.ranks.consensus import RankMismatchError

import pytest
import thunder
import torch
import torch.distributed as dist
from golden import compile_fake
from late import late_groups
from ranks import on_ranks
from torch import nn


class Net(nn.Module):
    """Matrices, even and uneven, trained and frozen; a norm, a scalar, integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(48, 96)
        self.norm = nn.LayerNorm(96)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Linear(96, 48, bias=False).requires_grad_(False)
        self.head = nn.Linear(48, 61)
        self.table = nn.Parameter(torch.arange(4096), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(self.frozen(self.norm(torch.tanh(self.wide(x)))) * self.scale)
        return (x * self.table[:61] / 61).square().mean()


X = torch.randn(8, 48, generator=torch.Generator().manual_seed(1))


def rows(strategy="zero3", ranks=2, **options):
    with_mesh = {} if not strategy.startswith("hybrid") else {"mesh": mesh_of((2, ranks // 2))}
    cmodel = compile_fake(Net, X, **grouped({"sharding_strategy": strategy, **with_mesh, **options}))
    return cmodel, shardtrace.collectives(cmodel)


def mesh_of(shape):
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize("strategy", ["zero3", "owner", "hybrid_zero3", "ddp"])
def test_fewer_bytes_in_as_many_collectives(fake_ranks, strategy):
    fake_ranks(4)
    options = {"reduce_wire": "int8"} | ({} if strategy == "ddp" else {"gather_dtype": "int8"})
    cmodel, found = rows(strategy, 4, bucketing_strategy="layer", **options)
    traces = thunder.last_traces(cmodel)[-1], thunder.last_backward_traces(cmodel)[-1]
    buckets = [bucket_of(b) for trace in traces for b in trace.bound_symbols if is_issue(b)]
    for row, bucket in zip(found, buckets, strict=True):
        ranks = 1 if strategy == "owner" else bucket.plan.world_size
        rounded = any(m.parameter.full_numel >= 1024 * ranks for m in bucket.members) and bucket.rest_dtype.bytes == 4
        plain = bucket.plain or bucket
        assert row.dtype == ("int8" if rounded else plain.dtype.shortname())
        assert row.bytes == bucket.bytes
        assert bucket.bytes < 0.32 * plain.bytes if rounded else bucket is plain
    shown = str(shardtrace.inspect(cmodel))
    assert ("gathered as int8" in shown) == (strategy != "ddp")
    assert "reduced as int8" in shown


def test_patterns(fake_ranks):
    fake_ranks(2)
    _, found = rows(gather_dtype={"wide.*": "int8", "frozen.*": None, "head.weight": torch.float8_e4m3fn})
    dtypes = {p: r.dtype for r in found if r.kind == "all_gather" for p in r.parameters}
    assert (dtypes["wide.weight"], dtypes["wide.bias"], dtypes["head.weight"]) == ("int8", "int8", "fp8")
    assert dtypes["frozen.weight"] == dtypes["head.bias"] == dtypes["norm.weight"] == "f32"


def test_a_wire_of_ones_own(fake_ranks):
    fake_ranks(2)
    int8 = gather_wire(INT8)
    own = Wire(int8.issue, int8.finish, int8.bytes, "mine", takes=int8.takes, prepare=int8.prepare)
    _, found = rows(gather_dtype=own)
    assert {r.dtype for r in found if r.kind == "all_gather"} == {"mine", "i64"}


REFUSED = [
    ({"gather_dtype": "int7"}, "unknown gather_dtype 'int7': choose one of 'int8', 'fp8'"),
    ({"gather_dtype": {}}, "a mapping is of patterns"),
    ({"gather_dtype": {"nothing.*": "int8"}}, "no parameter matches 'nothing.*' of gather_dtype; there are: scale"),
    ({"gather_dtype": {"table": "int8"}}, "for 'table' changes nothing: 'table' is torch.int64 and travels as it is"),
    ({"gather_dtype": {"scale": "int8"}}, "'scale' has 1 elements on a rank, fewer than 1024"),
    ({"gather_dtype": {"*.bias": "fp8"}}, "'wide.bias' has 48 elements on a rank, fewer than 1024"),
    ({"gather_dtype": "int8", "sharding_strategy": "ddp"}, "whole on every rank (ddp) and not gathered"),
    ({"gather_dtype": reduction_wire(INT8)}, "a wire that carries gradients: pass reduce_wire='int8'"),
    ({"reduce_wire": "int7"}, "unknown reduce_wire 'int7': choose one of 'int8', 'int4'"),
    ({"reduce_wire": "fp8"}, "unknown reduce_wire 'fp8'"),
    ({"error_feedback": True}, "error_feedback=True has no rounding to make up for"),
    ({"reduce_wire": "int4", "error_feedback": 1}, "error_feedback must be True or False, not 1"),
    ({"reduce_wire": "int4", "error_feedback": True, "mp_policy": "fp16"}, "fp16 scales the gradients of each step"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(fake_ranks, options, message):
    fake_ranks(2)
    with pytest.raises(ValueError, match=re.escape(message)):
        shardtrace.fsdp(Net(), **grouped(options))


@pytest.mark.parametrize("options", [{"gather_dtype": "int8"}, {"reduce_wire": "int8"}], ids=str)
def test_refused_on_one_rank(fake_ranks, options):
    fake_ranks(1)
    with pytest.raises(ValueError, match=r"changes nothing: 'scale' is on one rank.*none of 9 parameters"):
        shardtrace.fsdp(Net(), **grouped(options))


def test_refused_where_no_gradient_travels(fake_ranks):
    fake_ranks(2)
    with pytest.raises(ValueError, match="'scale' is frozen and has no gradient"):
        shardtrace.fsdp(Net().requires_grad_(False), comm_policy=shardtrace.CommPolicy(reduce_wire="int8"))
    with pytest.raises(ValueError, match="the gradient of parameter 'scale' is fp16"):
        shardtrace.fsdp(Net().half(), comm_policy=shardtrace.CommPolicy(reduce_wire="int8", error_feedback=True))


# ---- on ranks ----


@on_ranks(2)
def test_ranks_that_differ():
    mine = dist.get_rank()
    for options in ({"gather_dtype": ["int8", "fp8"][mine]}, {"reduce_wire": ["int8", "int4"][mine]}):
        with pytest.raises(RankMismatchError, match="int8"):
            shardtrace.fsdp(Net(), **grouped(options))
    with pytest.raises(RankMismatchError, match="gathered as int8"):
        shardtrace.fsdp(Net(), comm_policy=shardtrace.CommPolicy(gather_dtype=[None, "int8"][mine]))
    with pytest.raises((RankMismatchError, ValueError), match="no parameter matches 'nothing"):
        shardtrace.fsdp(Net(), comm_policy=shardtrace.CommPolicy(gather_dtype=["int8", {"nothing": "int8"}][mine]))


def trained(strategy, steps=2, mesh=None, model=None, accumulate=False, **options):
    """Losses and whole parameters after some steps of SGD on this rank's share of the batch."""
    model = shardtrace.fsdp(model or Net(), sharding_strategy=strategy, mesh=mesh, **grouped(options))
    cmodel = thunder.jit(model)
    optimizer = torch.optim.SGD([p for p in cmodel.parameters() if p.requires_grad], lr=0.05)
    share = X.chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for _ in range(steps):
        if accumulate:
            with model.no_sync():
                cmodel(share).backward()
        losses.append(cmodel(share))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = torch.stack([loss.detach() for loss in losses])
    dist.all_reduce(mean)
    return mean / dist.get_world_size(), {n: t.clone() for n, t in shardtrace.full_state_dict(model).items()}


def assert_near(found, exact, tolerance):
    torch.testing.assert_close(found[0].float(), exact[0], rtol=tolerance, atol=0)
    for name, value in exact[1].items():
        if value.is_floating_point() and value.dim() > 1:
            assert (found[1][name] - value).norm() <= tolerance * value.norm(), name


def alone(steps=2):
    """The same in one process, without shards, on the whole batch."""
    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(steps):
        losses.append(model(X))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach(), model.state_dict()


INT8_BOTH = {"gather_dtype": "int8", "reduce_wire": "int8"}


@on_ranks(2)
def test_training_on_two_ranks():
    mixed = {"wide.*": "zero3", "frozen.*": "zero3", "head.*": "owner", "*": "ddp"}
    assert_near(trained(mixed, **INT8_BOTH), alone(), 0.01)
    int4 = {"reduce_wire": "int4", "error_feedback": True}
    assert_near(trained("zero2", gather_dtype="fp8", mp_policy="bf16", **int4), alone(), 0.05)
    halved = {"accumulate": True, "gradient_divide_factor": 4.0}  # two equal batches, twice the divisor
    assert_near(trained("zero3", **halved, reduce_wire="int8"), alone(), 0.01)
    with late_groups() as mesh:
        assert_near(trained(mixed, mesh=mesh, **INT8_BOTH), alone(), 0.01)


@on_ranks(4)
def test_training_on_a_mesh():
    assert_near(trained("hybrid_zero3", mesh=mesh_of((2, 2)), **INT8_BOTH), alone(), 0.01)
    with late_groups((2, 2)) as mesh:
        assert_near(trained("hybrid_zero2", mesh=mesh, **INT8_BOTH, sum_reductions=True), alone(), 0.01)


@on_ranks(2)
def test_a_step_is_that_of_one_process_with_rounded_weights():
    """The rows of each rank are rounded, this rank's own too; gradients go to the exact shards."""
    model, single, rank = Net(), Net(), dist.get_rank()
    shardtrace.fsdp(model, comm_policy=shardtrace.CommPolicy(gather_dtype="int8"))
    cmodel = thunder.jit(model)
    for p in single.parameters():
        if p.dim() == 2:  # every matrix is rounded: 1024 elements or more on a rank
            p.data = torch.cat([rounded(rows) for rows in padded(p.data).chunk(2)])[: len(p)]
    share = X.chunk(2)[rank]
    cmodel(share).backward()
    (sum(single(part) for part in X.chunk(2)) / 2).backward()
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6)
    fresh = shardtrace.fsdp(Net())
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())


def padded(tensor):
    return torch.nn.functional.pad(
        tensor.flatten(1) if tensor.dim() > 1 else tensor, (0,) * 2 * (tensor.dim() - 1) + (0, len(tensor) % 2)
    )


def rounded(rows):
    message = INT8.messages(torch.empty(1, INT8.nbytes(rows.numel()), dtype=torch.uint8))
    result = torch.empty(1, rows.numel())
    INT8.pack(rows.view(1, -1), message, chunk=2**17)
    INT8.unpack(message, result, chunk=2**17)
    return result.view(rows.shape)


@on_ranks(2)
def test_an_overflow_skips_the_step_on_all_ranks():
    model = shardtrace.fsdp(
        Net(), mp_policy="fp16", comm_policy=shardtrace.CommPolicy(gather_dtype="int8", reduce_wire="int4")
    )
    cmodel = thunder.jit(model)
    trainable = [p for p in cmodel.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy.deepcopy([p.detach() for p in trainable])
    for bad in (True, False):
        share = X.chunk(2)[dist.get_rank()] * (1e5 if bad and dist.get_rank() == 1 else 1)
        scaler.scale(cmodel(share).float()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(map(torch.equal, before, trainable)) == bad
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_errors_live_from_step_to_step_until_a_checkpoint_is_loaded(tmp_path):
    model = shardtrace.fsdp(Net(), comm_policy=shardtrace.CommPolicy(reduce_wire="int4", error_feedback=True))
    errors = state_of(model).runtime.errors
    cmodel = thunder.jit(model)
    for _ in range(2):
        cmodel(X).backward()
    # the part of each trained matrix that the other rank owns
    assert sorted(e.numel() for e in errors.values()) == [31 * 48, 48 * 48]
    assert all(e.any() for e in errors.values())
    model.zero_grad()
    shardtrace.save_checkpoint(tmp_path, cmodel, step=1)
    shardtrace.load_checkpoint(tmp_path, cmodel)
    assert not errors
