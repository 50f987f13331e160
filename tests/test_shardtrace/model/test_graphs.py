"""CUDA graphs, by a stand-in that records the operators of a capture and replays them, without Python."""

import copy

import shardtrace

import pytest
import thunder
import torch
from graphs import graphs_on_cpu
from hosts import slow_host
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from toy_gpt import GPT, GPTConfig


class Counts(nn.Module):
    """Counts its calls, in Python."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.layer(x))


class Fourier(nn.Module):
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x))


class Gate(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Writes(nn.Module):
    def forward(self, x):
        return x.add_(1)


class WithInputs(nn.Module):
    """A GPT of the tokens that rows stand for."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, x):
        return self.gpt(x.mul(10).long().remainder(32))


def graphed(model, **options):
    return thunder.jit(shardtrace.fsdp(model, **options), transforms=[CUDAGraphTransform()])


def rows(step):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (mlp, {}),
        (lambda: nn.Sequential(mlp(), mlp()), {"activation_checkpointing": True}),
        (Counts, {}),
        (lambda: WithInputs(GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=8, vocab_size=32))), {}),
    ],
)
def test_a_world_of_one_trains_in_graphs(single_rank, build, options):
    torch.manual_seed(0)
    expected = build()
    model = copy.deepcopy(expected)
    with graphs_on_cpu() as graphs:
        cmodel = graphed(model, **options)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (expected, model)]
        for step in range(4):
            losses = [m(rows(step)).square().sum() for m in (expected, cmodel)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(losses[1], losses[0])
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert graphs.replays == 4 * graphs.made > 0
    assert getattr(model, "calls", 4) == getattr(expected, "calls", 4) == 4  # set after each step, outside of graphs


def test_replays_draw_new_numbers_and_backward_reads_them(single_rank):
    with graphs_on_cpu():
        cmodel = graphed(nn.Sequential(nn.Linear(4, 200), nn.Dropout(0.5)))
        x, masks = torch.ones(1, 4, requires_grad=True), []
        for _ in range(3):
            y = cmodel(x)
            (gradient,) = torch.autograd.grad(y.sum(), cmodel.get_parameter("0.bias"))
            masks.append(y[0].detach() != 0)
            assert torch.equal(gradient != 0, masks[-1])
    assert not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Fourier, r"torch's own autograd differentiates fft_rfft in 1, and keeps objects of Python"),
        (Gate, "PyTorch runs Gate in 1, which may read values of tensors"),
        (lambda: nn.BatchNorm1d(4), "forward writes into '1_running_mean', of which a graph has a copy"),
    ],
)
def test_lines_that_a_graph_cannot_hold(single_rank, build, reason):
    cmodel = graphed(nn.Sequential(nn.Linear(4, 4), build()))
    with pytest.raises(RuntimeError, match=f"a CUDA graph cannot hold Sequential, because {reason}"):
        cmodel(rows(0))


def test_an_argument_that_forward_writes_into(single_rank):
    with pytest.raises(RuntimeError, match="because forward writes into '0'"):
        graphed(nn.Sequential(Writes(), nn.Linear(4, 4)))(rows(0))


def test_what_is_refused_only_in_training(single_rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    expected = model(rows(0)).detach()
    with graphs_on_cpu() as graphs, torch.no_grad():
        cmodel = graphed(model)
        for _ in range(2):
            torch.testing.assert_close(cmodel(rows(0)), expected)
    assert graphs.replays == 2 * graphs.made > 0


def test_steps_that_act_in_python(fake_ranks):
    fake_ranks(2)
    with slow_host():
        init = shardtrace.InitPolicy(device="cpu")
        on_host = graphed(nn.Linear(4, 4), init_policy=init, offload_policy=CPUOffloadPolicy())
    with pytest.raises(RuntimeError, match="Linear, whose parameters are in host memory"):
        on_host(rows(0))
    for options in ({}, {"checks": shardtrace.Checks(steps=False)}):
        with pytest.raises(RuntimeError, match="over 2 ranks, because the program looks at each collective"):
            graphed(nn.Linear(4, 4), **options)(rows(0))


def test_gradients_that_are_kept(single_rank):
    model = shardtrace.fsdp(nn.Linear(4, 4), mp_policy="bf16")
    cmodel = thunder.jit(model, transforms=[CUDAGraphTransform()])
    with pytest.raises(RuntimeError, match="inside or after no_sync"), model.no_sync():
        cmodel(rows(0))
    with graphs_on_cpu():
        loss = cmodel(rows(0)).sum()
        with pytest.raises(RuntimeError, match="inside or after no_sync"), model.no_sync():
            loss.backward()
