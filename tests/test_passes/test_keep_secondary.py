"""ZeRO-3 with second shards inside the node: the lines, and training as ZeRO-3 trains, bit for bit."""

import shardtrace
from passes.analysis.flops import bytes_moved
from passes.analysis.recognise import bucket_of, is_gather, is_issue
from passes.analysis.verify import VerificationError, verify
from passes.comm.symbols import keep_shards

import pytest
import thunder
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from golden import compile_fake, stage, text
from ranks import on_ranks
from thunder.core.trace import from_trace
from torch import nn


def mesh_of(shape):
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


X = torch.ones(4, 5)


@pytest.fixture
def compiled(fake_ranks):
    fake_ranks(4)
    return compile_fake(net, X, sharding_strategy="zero3_secondary", mesh=mesh_of((2, 2)))


def test_lines(compiled):
    assert_expected_inline(
        text(stage(compiled, "schedule"), dels=False),
        """\
ft0 = all_gather((t_0_weight, t_0_bias), b_0)
ft1 = all_gather((t_2_weight, t_2_bias), b_2)
(t2, t3) = wait_all_gather(ft0, b_0)
t4 = torch_linear_0(input, t2, t3)
t5 = torch_tanh_0(t4)
(t6, t7) = wait_all_gather(ft1, b_2)
(t8, t9) = keep_shards((t6, t7), b_2_secondary)
t10 = torch_linear_1(t5, t6, t7)
return {'output': (t10,), 'flat_args': [input, t_0_bias, t_0_weight, t_2_bias, t_2_weight], 'flat_output': (t10,)}, ((t8, t9, t5, input), ())""",
    )
    backward = text(stage(compiled, "schedule", thunder.last_backward_traces), dels=False)
    lines = [line for line in backward.splitlines() if "gather" in line or "reduce" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
bw_ft4 = all_gather((t1, t2), b_2_secondary)
(bw_t5, bw_t6) = wait_all_gather(bw_ft4, b_2_secondary)
ft12 = reduce_scatter((t9, t11), b_2)
ft18 = reduce_scatter((t15, t17), b_0)
(t19, t20) = wait_reduce_scatter(ft12, b_2)
(t21, t22) = wait_reduce_scatter(ft18, b_0)""",
    )


def test_bytes_and_memory(compiled):
    backward = stage(compiled, "schedule", thunder.last_backward_traces)
    (gather,) = [b for b in backward.bound_symbols if is_issue(b) and is_gather(b)]
    second = bucket_of(gather)
    assert (second.plan.world_size, second.plan.axis.value) == (2, "shard")
    assert [m.parameter.shard_shape for m in second.members] == [(2, 8), (2,)]  # two ranks hold 3 rows, padded to 4
    saved = [b for b in shardtrace.memory(compiled).forward.buffers if b.kind == "saved"]
    assert sorted(b.bytes for b in saved) == [4 * 18, 4 * 32]  # the second shards, and tanh
    (keep,) = [b for b in stage(compiled, "schedule").bound_symbols if b.sym.id == keep_shards.id]
    assert bytes_moved(keep) == 2 * 4 * 18  # not the whole gathered parameters
    assert "P in the node" in str(shardtrace.inspect(compiled))


def test_without_backward_nothing_is_kept(fake_ranks):
    fake_ranks(4)
    with torch.no_grad():
        cmodel = compile_fake(net, X, backward=False, sharding_strategy="zero3_secondary", mesh=mesh_of((2, 2)))
    assert "keep_shards" not in text(thunder.last_traces(cmodel)[-1])


def test_a_gather_from_all_ranks_in_backward_is_found(compiled):
    backward = stage(compiled, "schedule", thunder.last_backward_traces)
    first = {b.args[1].label: b.args[1] for b in stage(compiled, "schedule").bound_symbols if is_issue(b)}
    broken = from_trace(backward)
    broken.bound_symbols = [
        b.from_bsym(args=(b.args[0], first[bucket_of(b).label])) if "all_gather" in b.sym.name else b
        for b in backward.bound_symbols
    ]
    with pytest.raises(VerificationError, match="bucket 2 is gathered from all ranks in backward, in spite of second"):
        verify(broken)


@pytest.mark.parametrize(("shape", "same"), [((4, 1), "zero2"), ((1, 4), "zero3")])
def test_refused_where_it_changes_nothing(fake_ranks, shape, same):
    fake_ranks(4)
    with pytest.raises(ValueError, match=f'on a mesh of shape .* is "{same}": choose that'):
        shardtrace.fsdp(net(), sharding_strategy="zero3_secondary", mesh=mesh_of(shape))
    with pytest.raises(ValueError, match=r"needs a mesh of two dimensions.*so does zero3_secondary"):
        shardtrace.fsdp(net(), sharding_strategy="zero3_secondary")


class Wide(nn.Module):
    """Uneven matrices, a tied one, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(47, 101)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layers = nn.Sequential(nn.Linear(101, 61), nn.Tanh(), nn.Linear(61, 101))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = x + self.layers(x) * self.scale
        return (x @ self.table.weight.t()).square().mean()


def trained(mesh, strategy, **options):
    model = shardtrace.fsdp(Wide(), sharding_strategy=strategy, mesh=mesh, **options)
    cmodel = thunder.jit(model)
    optimizer = torch.optim.SGD(cmodel.parameters(), lr=0.1)
    tokens = torch.randint(0, 47, (8, 5), generator=torch.Generator().manual_seed(1))
    share = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    for _ in range(2):
        cmodel(share).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in shardtrace.full_state_dict(model).items()}


@on_ranks(4)
def test_training_equals_zero3():
    exact = trained(None, "zero3")
    assert_equal(trained(mesh_of((2, 2)), "zero3_secondary"), exact)
    # rounded gathers: backward uses the values that forward has used
    options = {"comm_policy": shardtrace.CommPolicy(gather_dtype="int8"), "mp_policy": "bf16"}
    assert_equal(trained(mesh_of((2, 2)), "zero3_secondary", **options), trained(None, "zero3", **options))


def assert_equal(found, exact):
    for name, value in exact.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
